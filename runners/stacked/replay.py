"""A step whose stack is captured: the breaks between its graphs, the call that they are of, and a replay of it."""

import enum
import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import attrs
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...backends.base import Backend
from ...dataflow.errors import CaptureError, ReplayError, SlotGraphError
from ...dataflow.guard import GRADIENTS, outside_inference, without_gradients
from ...dataflow.inputs import Inputs
from ..bits import text_of
from ..capture import Captured
from ..graphs import GraphSet
from ..outputs import cut_rows
from ..running import RUNNING, Running, running, under_way
from ..stage import Stage
from ..statistics import Counts

VALUES: Final = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size, enum.Enum)
"""What a graph takes in as a value; any other object is handed on to breaks, each step's own."""
EAGER: Final[Sequence[Any]] = []
"""Where the answer of a break goes that runs outside of graphs: to its caller alone."""
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
    step = running()
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

        places: None at capture, where they are not known yet, and `EAGER` outside of graphs.
        """
        reference = RUNNING.get()
        step = None if reference is None else reference()
        if step is None:
            raise ReplayError(f"break {self._name!r} needs a step: replay through the runner, not the graph")
        if step.inside is not None:
            raise CaptureError(
                f"break {self._name!r} is called inside break {step.inside!r}, which runs eagerly as a whole already: "
                "leave out the inner mark"
            )
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
            self._keep(answer, step)
        elif len(places) == 1 and type(answer) is torch.Tensor and _FACTS(answer) == _FACTS(places[0]):
            places[0].copy_(answer)
        elif places is not EAGER:
            self._move(answer, places)
        return answer

    def _keep(self, answer: Any, step: Running) -> None:
        """Note the answer's structure, and hold what later graphs may use again only as memory."""
        found, self._answered = pytree.tree_flatten(answer)
        for leaf in found:
            if not isinstance(leaf, (torch.Tensor, *VALUES)):
                raise CaptureError(
                    f"break {self._name!r} returned {type(leaf).__name__}, of which graphs cannot be handed each "
                    "step's own: return tensors, or tuples, lists and dicts of them"
                )
        if step.backend is not None:
            borrow = step.backend.borrow
            self._leaves = [borrow(one) if isinstance(one, torch.Tensor) else one for one in self._leaves]
            self._fixed = pytree.tree_unflatten(self._leaves, self._arguments)

    def _move(self, answer: Any, places: Sequence[Any]) -> None:
        """Copy tensors to where later graphs read them; anything else must be what it was."""
        leaves, structure = pytree.tree_flatten(answer)
        if structure != self._answered:
            raise ReplayError(f"break {self._name!r} returned another structure than at capture")
        for number, (leaf, place) in enumerate(zip(leaves, places, strict=True)):
            if isinstance(place, torch.Tensor) and isinstance(leaf, torch.Tensor) and _FACTS(leaf) == _FACTS(place):
                place.copy_(leaf)
            elif isinstance(place, torch.Tensor) or type(leaf) is not type(place) or leaf != place:
                raise ReplayError(
                    f"break {self._name!r}: result {number} is {text_of(leaf)}, and was {text_of(place)} at capture: "
                    "return what changes as a tensor of one shape"
                )


@attrs.frozen(eq=False)
class Stack:
    """The part of a step that is captured: a module that it calls, and how that was named; all of it where none is."""

    module: nn.Module | None = None
    name: str = ""

    def code(self, stage: Stage[Any]) -> Callable[..., Any]:
        """What is captured."""
        return stage.step if self.module is None else self.module.forward

    def run(self, stage: Stage[Any], view: Any, answer: Callable[..., Any]) -> Any:
        """Run a step with `answer` in the place of what is captured."""
        if self.module is None:
            return stage.run(view, answer) if stage.restored else answer(view)
        own = self.module.__dict__
        before = own.get("forward")
        own["forward"] = answer
        try:
            return stage.run(view) if stage.restored else stage.step(view)
        finally:
            if before is None:
                del own["forward"]
            else:
                own["forward"] = before

    def wrong_calls(self, times: int) -> str:
        """What is wrong with a step that does not call it once."""
        return f"the step called the stack, {self.name}, {times} times"


class StackCall:
    """What is captured of one bucket: a function and its arguments; tensors beside the slots have memory of their own.

    own: the step's view. view: what the captured part sees in its place. read, written: places of arguments.
    """

    def __init__(
        self,
        backend: Backend,
        run: Callable[..., Any],
        arguments: tuple[Sequence[Any], Mapping[str, Any]],
        own: Inputs,
        view: Inputs,
        holds: Callable[[torch.Tensor], bool],
    ) -> None:
        self.run = run
        self.view = view
        self.own = own
        self._backend = backend
        args, kwargs = arguments
        leaves, self._structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        given = (*args, *kwargs.values())
        is_flat = len(leaves) == len(given) and all(map(operator.is_, leaves, given))
        self._kinds = (*map(type, given), *kwargs) if is_flat else None
        self._inside = {place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and holds(leaf)}
        self.leaves = [view if leaf is own else self._kept(place, leaf) for place, leaf in enumerate(leaves)]
        self._slots = slots_of(view)
        self.read, self.written = set[int](), set[int]()

    def _kept(self, place: int, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or place in self._inside:
            return leaf
        with outside_inference():  # a step outside of it will write there
            return leaf.detach().clone()

    def arguments(self) -> Any:
        """The arguments of the capture."""
        return pytree.tree_unflatten(self.leaves, self._structure)

    def at_capture(self, recording: Backend | None = None) -> Running:
        """The step of the capture; it has every key that `take` may give."""
        rest = [leaf for place, leaf in enumerate(self.leaves) if place not in self.read]
        now = {id(leaf): leaf for leaf in rest if not isinstance(leaf, VALUES)} | {id(self.view): self.own}
        now |= {key: vars(self.own)[name] for key, name in self._slots.items()}
        return Running(self.own, "capture", now, recording, self.view)

    def __call__(self) -> Any:
        """Run it as it is captured, and as a backend without graphs replays it."""
        step, (args, kwargs) = running(), self.arguments()
        if step is not None and id(self.view) in step.now:  # a replay
            return self.run(*args, **kwargs)
        with torch.no_grad():
            return under_way(self.at_capture(self._backend), lambda: self.run(*args, **kwargs))

    def take(  # noqa: C901 - in one piece, for each step's sake
        self, args: Sequence[Any], kwargs: Mapping[str, Any], step: Running
    ) -> list[Any]:
        """Move a step's arguments to where graphs read them, and let breaks find them; returns them flat."""
        leaves, view, shown, read = [*args, *kwargs.values()], step.view, self.view, self.read
        if (*map(type, leaves), *kwargs) != self._kinds:  # what follows takes ten times as long
            leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
            if structure != self._structure:
                raise ReplayError("the stack was called with other arguments than at capture")
        values, now = view.__dict__, dict[int, Any]()
        for key, name in self._slots.items():
            now[key] = values[name]
        for place, kept in enumerate(self.leaves):
            leaf = leaves[place]
            if kept is shown or place in read:
                if leaf is (view if kept is shown else kept):
                    continue
                if not isinstance(kept, torch.Tensor):
                    raise ReplayError(other_object(place, kept))
                if not isinstance(leaf, torch.Tensor) or _FACTS(leaf) != _FACTS(kept):
                    raise _changed(place, leaf, kept)
                if leaf.data_ptr() != kept.data_ptr() or leaf.stride() != kept.stride():
                    if place in self._inside:
                        raise ReplayError(other_object(place, kept))
                    kept.copy_(leaf)
            elif not isinstance(kept, VALUES):
                now[id(kept)] = leaf
            elif type(leaf) is not type(kept) or leaf != kept:
                raise _changed(place, leaf, kept)
        now[id(shown)] = view
        step.now = now
        return leaves


def _changed(place: int, leaf: Any, kept: Any) -> ReplayError:
    return ReplayError(
        f"argument {place} of the stack is {text_of(leaf)}, and was {text_of(kept)} at capture: hand over what "
        "changes as a tensor of one shape, or in the view"
    )


def other_object(place: int, kept: Any) -> str:
    """Why a graph does not go with an argument that is made anew in each step."""
    return (
        f"argument {place} of the stack, of type {type(kept).__name__}, is another one than at capture, and graphs "
        "read the memory of that: hand over its tensors as arguments of their own, or read it in a break"
    )


def slots_of(view: Inputs) -> dict[int, str]:
    """Names of a view's slots, by the identity of its tensors."""
    return {id(value): name for name, value in view.__dict__.items() if isinstance(value, torch.Tensor)}


def stack_step(
    graphs: GraphSet[Any],
    stack: Stack,
    captured: Captured,
    rows: int | None,
    live: int | None,
    show: Callable[[Any], Inputs] | None = None,
    counted: Counts | None = None,
) -> Callable[[Any], Any]:
    """A call that runs a step on a batch, whose stack replays graphs in the place of its code; outputs for live rows.

    rows: those that outputs must have, or None for any. live: how many to return, or None for all. show: makes the view
    of a batch; None where the call gets views, whose graphs are looked at before a replay.
    """
    stage, hosts, answer = graphs.stage, graphs.filler.hosts, _replayer(graphs, captured, looked=show is None)
    note = hosts.note if hosts.possible else None

    def step_of(batch: Any) -> Any:
        if GRADIENTS():
            return without_gradients(step_of, batch)
        view = batch if show is None else show(batch)
        step = Running(view, "replay")
        token = RUNNING.set(weakref.ref(step))  # an interrupt leaves no step behind: only this call holds it
        try:
            outputs = stack.run(stage, view, functools.partial(answer, step))
        finally:
            RUNNING.reset(token)
        if step.calls != 1:
            raise ReplayError(f"{stack.wrong_calls(step.calls)}, and once at capture")
        if note is not None:
            note()
        if rows is not None:
            if type(outputs) is torch.Tensor and outputs.dim() and outputs.shape[0] == rows:
                outputs = outputs if live is None else outputs[:live]
            else:
                outputs = cut_rows(outputs, rows, "request" if live is None else "padded token", live, ReplayError)
        if counted is not None:
            counted.steps += 1
        return outputs

    return step_of


def _replayer(graphs: GraphSet[Any], captured: Captured, *, looked: bool) -> Callable[..., Any]:
    """What the stack does in a step: it takes the arguments, and replays its graphs. looked: these are looked at."""
    clock, filler, graph = graphs.clock, graphs.filler, captured.graph
    call: StackCall = captured.step  # type: ignore[assignment] # as `capture_stack` made it
    stream, note = filler.stream, filler.hosts.note if filler.hosts.possible else None

    def answer(step: Running, *args: Any, **kwargs: Any) -> Any:
        step.calls += 1
        leaves, before = call.take(args, kwargs, step), clock.replays
        if looked:
            outputs = graphs.replay(captured, captured.rows)
        else:
            if stream() != clock.stream:
                clock.stream = filler.follow(clock.stream)
            graph.replay()
            clock.replays += 1
            if note is not None:
                note()
            outputs = graph.outputs
            # never the graph's own tensor, whose shape a caller might change
            outputs = outputs.detach() if type(outputs) is torch.Tensor else captured.live(None)
        if clock.replays != before + 1:
            raise ReplayError(
                "a break of this step replayed a graph of the same memory pool, which may overwrite what this step's "
                "later graphs read: run that runner before or after this one's step, or eagerly within the break"
            )
        for place in call.written:  # to where the step has them
            leaf, kept = leaves[place], call.leaves[place]
            if isinstance(kept, torch.Tensor) and leaf.data_ptr() != kept.data_ptr():
                leaf.copy_(kept)
        return outputs

    return answer
