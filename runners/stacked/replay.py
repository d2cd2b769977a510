"""A step whose stack is captured: the breaks between its graphs, the call that they are of, and a replay of it."""

import enum
import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

import attrs
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...dataflow.buffers import Buffers
from ...dataflow.errors import CaptureError, ReplayError, SlotGraphError
from ...dataflow.guard import GRADIENTS, without_gradients
from ...dataflow.inputs import Inputs
from ..capture import Captured, Clock
from ..running import RUNNING, Running, running
from ..stage import Stage
from ..statistics import Counts
from .watch import Use, tensors_within

VALUES: Final = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size, enum.Enum)
"""What a graph takes in as a value; any other object is handed on to breaks, each step's own."""
EAGER: Final[Sequence[Any]] = []
"""Where the answer of a break goes that runs outside of graphs: to its caller alone."""
_LATE: Final = "the stack was called after its step had ended"
_FACTS: Final = operator.attrgetter("shape", "dtype")
P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V", bound=Inputs)


def current_view(inputs: type[V]) -> V:
    """The view of the step that runs now, for code that is not handed it: an attention operator, a break's body.

    Slots over tokens have the bucket's rows, those over requests as many as the batch has.

    Raises:
        ReplayError: No step runs, or one of another declaration.
        CaptureError: An operator asks inside a graph, which would hold for the values of its capture.

    """
    reference = RUNNING.get()
    step = None if reference is None else reference()
    if step is None:
        raise ReplayError("no step is running: current_view() is for what a runner's step calls")
    if not isinstance(step.view, inputs):
        raise ReplayError(f"the running step's view is of {type(step.view).__name__}, not of {inputs.__name__}")
    if step.inside is not None:
        return step.view
    if step.operator is not None:
        raise CaptureError(
            f"operator {step.operator} asks for the step's view inside of a graph, which would keep what it finds: run "
            "it between graphs, by splits= or graph_break, or hand it the slots that it reads"
        )
    return step.view if step.shown is None else step.shown  # type: ignore[return-value] # of the same declaration


def graph_break(body: Callable[P, R]) -> Callable[P, R]:
    """Mark a function at which a capture ends one graph, to begin the next one after it.

    In each step it is called as it is, without gradients: it may read the host, and take any shape. Its tensor
    arguments have the addresses of the capture and the contents of the step. What the captured part was given (the
    view, a slot over requests, metadata) is replaced by this step's. Its results must have the shapes and dtypes that
    they had at capture; they are copied to where later graphs read them. Elsewhere it is an ordinary function.

    A decorator and no context manager, because a replay calls the body again, and of a `with` block there is nothing
    to call.
    """
    return functools.wraps(body)(broken(str(getattr(body, "__qualname__", body)), body))


def broken(name: str, body: Callable[P, R]) -> Callable[P, R]:
    """The same under a name of its own."""

    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        step = running()
        if step is None:
            return body(*args, **kwargs)
        one = Break(name, body, args, kwargs)
        result: R = one(EAGER) if step.backend is None or step.inside else step.backend.interrupt(one)
        return result

    return marked


class Break:
    """One call of a function between two graphs, with the arguments of its capture."""

    def __init__(self, name: str, body: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._name = name
        self._body = body
        self._leaves, self._arguments = pytree.tree_flatten((args, dict(kwargs)))
        self._fixed: tuple[Any, Any] = (args, kwargs)
        self._changing: list[tuple[int, int]] | None = None
        self._answered: Any = None

    def __call__(self, places: Sequence[Any] | None) -> Any:  # noqa: C901 - in one piece, for each step's sake
        """Call it in the step that runs, and write the answer to the places which later graphs read.

        Args:
            places: Those; None at capture, where they are not known yet, and `EAGER` outside of graphs.

        Raises:
            ReplayError: No step runs, the function raised, or its answer is not of the kind that it was.
            CaptureError: It raised in a capture, or is called inside of another break.

        """
        reference = RUNNING.get()
        step = None if reference is None else reference()
        if step is None or step.inside is not None:
            self._refuse(step)
        if self._changing is None:  # in each step the same ones
            self._changing = [(place, id(leaf)) for place, leaf in enumerate(self._leaves) if id(leaf) in step.now]
        args, kwargs = self._fixed
        if self._changing:  # what a step has in the place of what the capture was given
            leaves = list(self._leaves)
            for place, key in self._changing:
                leaves[place] = step.now[key]
            args, kwargs = pytree.tree_unflatten(leaves, self._arguments)
        step.inside = self._name
        try:
            if GRADIENTS():
                with torch.no_grad():
                    answer = self._body(*args, **kwargs)
            else:
                answer = self._body(*args, **kwargs)
        except Exception as error:
            if step.phase == "eager" or isinstance(error, SlotGraphError):
                raise
            raise (CaptureError if step.phase == "capture" else ReplayError)(
                f"break {self._name!r} raised {type(error).__name__}: {error}"
            ) from error
        finally:
            step.inside = None
        if places is None:
            self._answered = self._structure_of(answer)
            self._borrow(step)
        elif len(places) == 1 and type(answer) is torch.Tensor and _FACTS(answer) == _FACTS(places[0]):
            places[0].copy_(answer)
        elif places is not EAGER:
            self._move(answer, places)
        return answer

    def _refuse(self, step: Running | None) -> NoReturn:
        if step is None:
            raise ReplayError(f"break {self._name!r} needs a step: replay through the runner, not the graph")
        raise CaptureError(
            f"break {self._name!r} is called inside break {step.inside!r}, which runs eagerly as a whole already: "
            "leave out the inner mark"
        )

    def _structure_of(self, answer: Any) -> Any:
        """The structure of an answer. CaptureError where it holds what no graph can be handed."""
        leaves, structure = pytree.tree_flatten(answer)
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *VALUES)):
                raise CaptureError(
                    f"break {self._name!r} returned {type(leaf).__name__}, of which graphs cannot be handed each "
                    "step's own: return tensors, or tuples, lists and dicts of them"
                )
        return structure

    def _borrow(self, step: Running) -> None:
        """Hold what later graphs may use again only as memory."""
        if step.backend is not None:
            leaves, borrow = self._leaves, step.backend.borrow
            self._leaves = [borrow(one) if isinstance(one, torch.Tensor) else one for one in leaves]
            self._fixed = pytree.tree_unflatten(self._leaves, self._arguments)

    def _move(self, answer: Any, places: Sequence[Any]) -> None:
        """Copy tensors to where later graphs read them; anything else must be what it was."""
        leaves, structure = pytree.tree_flatten(answer)
        if structure != self._answered:
            raise ReplayError(f"break {self._name!r} returned another structure than at capture")
        for number, (leaf, place) in enumerate(zip(leaves, places, strict=True)):
            found = f"break {self._name!r}: result {number} is {_text(leaf)}"
            if isinstance(place, torch.Tensor):
                if not isinstance(leaf, torch.Tensor) or leaf.shape != place.shape or leaf.dtype != place.dtype:
                    raise ReplayError(f"{found}, and was {_text(place)} at capture")
                place.copy_(leaf)
            elif isinstance(leaf, torch.Tensor) or (leaf is not place and bool(leaf != place)):
                raise ReplayError(
                    f"{found}, and the graphs after it were captured with {place!r}: return what changes as a tensor"
                )


def _text(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)} on {value.device}"


@attrs.frozen(eq=False)
class Stack:
    """The part of a model that is captured, the rest of which runs eagerly around it; and how it was named."""

    module: nn.Module
    name: str

    def answered(self, run: Callable[[Any], Any], view: Any, answer: Callable[..., Any]) -> Any:
        """Run a step, whose call of the module gets to do something else."""
        own = self.module.__dict__
        before = own.get("forward")
        own["forward"] = answer
        try:
            return run(view)
        finally:
            if before is None:
                del own["forward"]
            else:
                own["forward"] = before


class StackCall:
    """What is captured of one bucket: a function and its arguments.

    own: the view that the step was called with. view: what the captured part sees in its place. Tensors that are no
    slots are kept in memory of their own; `use` has the places of the arguments that graphs read, and write.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        own: Inputs,
        view: Inputs,
        buffers: Buffers,
    ) -> None:
        self.run = run
        self.view = view
        self._buffers = buffers
        leaves, self._structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        given = (*args, *kwargs.values())
        is_flat = len(leaves) == len(given) and all(one is other for one, other in zip(leaves, given, strict=True))
        self._kinds = (*map(type, given), *kwargs) if is_flat else None
        self.leaves: list[Any] = [view if leaf is own else self._kept(leaf) for leaf in leaves]
        self._slots = _slots_of(view)
        self.learn(Use())

    def learn(self, use: Use) -> None:
        """Note what graphs do with the arguments."""
        self.use = use
        places, leaves = range(len(self.leaves)), self.leaves
        rest = [place for place in places if place not in use.read and leaves[place] is not self.view]
        self._views = [place for place in places if leaves[place] is self.view]
        read = [(place, leaves[place]) for place in sorted(use.read) if leaves[place] is not self.view]
        holds = self._buffers.holds
        self._read = [(place, leaf, isinstance(leaf, torch.Tensor) and holds(leaf)) for place, leaf in read]
        self._handed_on = [(place, id(leaves[place])) for place in rest if not isinstance(leaves[place], VALUES)]
        self._values = [(place, leaves[place]) for place in rest if isinstance(leaves[place], VALUES)]

    def _kept(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or self._buffers.holds(leaf):
            return leaf
        with torch.inference_mode(mode=False):  # a step outside of it will write there
            return leaf.detach().clone()

    def arguments_in(self, view: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the capture, with another view and its slots in the place of those that they are of."""
        stands = stand_ins(self.view, view)
        args, kwargs = pytree.tree_unflatten([stands.get(id(leaf), leaf) for leaf in self.leaves], self._structure)
        return args, kwargs

    def __call__(self) -> Any:
        """Run what is captured."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self._structure)
        return self.run(*args, **kwargs)

    def tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Tensors that came with an argument, and its place; those inside of an object that are the view's are not."""
        slots = {key for key, _ in self._slots}  # of those a fill takes care
        for place, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                yield place, leaf
            elif leaf is not self.view and not isinstance(leaf, VALUES):
                yield from ((place, one) for one in tensors_within(leaf) if id(one) not in slots)

    def objects(self) -> list[int]:
        """Places of objects inside of which graphs read tensors."""
        return [place for place, leaf, _ in self._read if not isinstance(leaf, torch.Tensor)]

    def at_capture(self, view: Inputs) -> Mapping[int, Any]:
        """What stands for what in the step of the capture; every key that `take` may give is in it."""
        return {key: self.leaves[place] for place, key in self._handed_on} | stand_ins(self.view, view)

    def take(  # noqa: C901, PLR0912 - in one piece, for each step's sake
        self, args: Sequence[Any], kwargs: Mapping[str, Any], step: Running
    ) -> list[Any]:
        """Move a step's arguments to where the graphs read them, and have its breaks find what stands for what.

        Returns the arguments, flat. ReplayError where a graph would read something else than at capture.
        """
        leaves, view = [*args, *kwargs.values()], step.view
        if (*map(type, leaves), *kwargs) != self._kinds:  # what follows takes ten times as long
            leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
            if structure != self._structure:
                raise ReplayError("the stack was called with other arguments than at capture")
        values, now = view.__dict__, dict[int, Any]()
        now[id(self.view)] = view
        for key, name in self._slots:
            now[key] = values[name]
        for place in self._views:
            if leaves[place] is not view:
                raise ReplayError(
                    f"argument {place} of the stack was the step's own view at capture, and is another one now"
                )
        for place, kept, is_slot in self._read:
            leaf = leaves[place]
            if leaf is kept:
                continue
            if not (isinstance(leaf, torch.Tensor) and isinstance(kept, torch.Tensor) and _FACTS(leaf) == _FACTS(kept)):
                raise ReplayError(_unlike(place, leaf, kept))
            if leaf.data_ptr() != kept.data_ptr() or leaf.stride() != kept.stride():
                if is_slot:
                    raise ReplayError(_elsewhere(place))
                kept.copy_(leaf)
        for place, key in self._handed_on:
            now[key] = leaves[place]
        for place, kept in self._values:
            leaf = leaves[place]
            if type(leaf) is not type(kept) or leaf != kept:
                raise ReplayError(_other_value(place, leaf, kept))
        step.now, step.shown = now, self.view
        return leaves

    def give_back(self, leaves: Sequence[Any]) -> None:
        """Move what graphs wrote into arguments to where the step has them."""
        for place in self.use.written:
            leaf, kept = leaves[place], self.leaves[place]
            if isinstance(kept, torch.Tensor) and leaf.data_ptr() != kept.data_ptr():
                leaf.copy_(kept)


def _unlike(place: int, leaf: Any, kept: Any) -> str:
    if not isinstance(kept, torch.Tensor):
        return other_object(place, kept)
    return f"argument {place} of the stack is {_briefly(leaf)}, and its graphs read one of {list(kept.shape)}"


def _elsewhere(place: int) -> str:
    return f"argument {place} of the stack was a slot at capture, which graphs read, and is other memory now"


def _other_value(place: int, leaf: Any, kept: Any) -> str:
    got = _briefly(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)
    return (
        f"argument {place} of the stack is {got}, and its graphs were captured with {kept!r}: hand over what changes "
        "as a tensor, or in the view"
    )


def _briefly(leaf: Any) -> str:
    return str(list(leaf.shape)) if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def other_object(place: int, kept: Any) -> str:
    """Why a graph does not go with an argument that is made anew in each step."""
    return (
        f"argument {place} of the stack, of type {type(kept).__name__}, is another object in each step, and graphs "
        "read a tensor inside of it: hand that over as an argument of its own, or read it in a break"
    )


def stand_ins(seen: Inputs, view: Inputs) -> dict[int, Any]:
    """A view and its slots, by the identity of another one and of that one's slots."""
    values = view.__dict__
    return {id(seen): view, **{key: values[name] for key, name in _slots_of(seen)}}


def _slots_of(view: Inputs) -> list[tuple[int, str]]:
    return [(id(value), name) for name, value in view.__dict__.items() if isinstance(value, torch.Tensor)]


@attrs.frozen(eq=False)
class Rows:
    """What live rows of a step's outputs are: of `padded` rows the first `live`; all where that is None.

    cut: does it for what is no single tensor, or raises.
    """

    padded: int | None
    live: int | None
    cut: Callable[[Any], Any]


@attrs.define(eq=False)
class StackStep:
    """A call that runs a step, whose stack replays graphs in the place of its code.

    Attributes:
        stage: The step, and what is lent to it.
        stack: What of it is captured; None where that is all of it.
        call: The call that the graphs are of.
        captured: The graphs.
        clock: Of their memory.
        rows: The live rows of what the step returns.
        note: Called behind work of the device that may read host slots.
        replay: Replays the graphs, and gives what the stack returns; None where they were replayed before.
        stream: Tells the current stream.
        follow: Lets it wait for another one.
        show: Makes the view of a batch; None where the call gets views.
        counted: Counts steps.
    """

    stage: Stage[Any]
    stack: Stack | None
    call: StackCall
    captured: Captured
    clock: Clock
    rows: Rows
    note: Callable[[], object] | None
    replay: Callable[[], Any] | None = None
    stream: Callable[[], int | None] = lambda: None
    follow: Callable[[int | None], int | None] = lambda last: last
    show: Callable[[Any], Inputs] | None = None
    counted: Counts | None = None
    _run: Callable[[Any], Any] = attrs.field(init=False)
    _calls: int = attrs.field(init=False)
    _step: "weakref.ref[Running]" = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Look at the stage once."""
        stage, what = self.stage, self._answer if self.stack is None else self.stage.step
        self._run = functools.partial(stage.run, step=what) if stage.lend or stage.restored else what

    def __call__(self, batch: Any) -> Any:
        """Run the step on a batch, or a view; its outputs for live rows."""
        if GRADIENTS():
            return without_gradients(self.__call__, batch)
        view = batch if self.show is None else self.show(batch)
        stack, note, counted = self.stack, self.note, self.counted
        step, self._calls = Running(view, "replay"), 0
        self._step = weakref.ref(step)  # an interrupt leaves no step behind: only this call holds it
        token = RUNNING.set(self._step)
        try:
            outputs = self._run(view) if stack is None else stack.answered(self._run, view, self._answer)
        finally:
            RUNNING.reset(token)
        if self._calls != 1:
            name = "" if stack is None else stack.name
            raise ReplayError(f"the step called the stack, {name}, {self._calls} times, and once at capture")
        if note is not None:
            note()
        rows, live = self.rows.padded, self.rows.live
        if rows is not None:
            if type(outputs) is torch.Tensor and outputs.dim() and outputs.shape[0] == rows:
                outputs = outputs if live is None else outputs[:live]
            else:
                outputs = self.rows.cut(outputs)
        if counted is not None:
            counted.steps += 1
        return outputs

    def _answer(self, *args: Any, **kwargs: Any) -> Any:
        """What the stack does: it takes the arguments, and replays its graphs."""
        self._calls += 1
        step, clock, call = self._step(), self.clock, self.call
        if step is None:
            raise ReplayError(_LATE)
        leaves, before = call.take(args, kwargs, step), clock.replays
        try:
            if self.replay is not None:
                outputs = self.replay()
            else:
                if self.stream() != clock.stream:
                    clock.stream = self.follow(clock.stream)
                self.captured.graph.replay()
                clock.replays += 1
                if self.note is not None:
                    self.note()
                outputs = self.captured.graph.outputs
                # never the graph's own tensor, whose shape a caller might change
                outputs = outputs.detach() if type(outputs) is torch.Tensor else self.captured.live(None)
        finally:
            step.shown = None
        if clock.replays != before + 1:
            raise ReplayError(
                "a break of this step replayed a graph of the same memory pool, which may overwrite what this step's "
                "later graphs read: run that runner before or after this one's step, or eagerly within the break"
            )
        if call.use.written:
            call.give_back(leaves)
        return outputs
