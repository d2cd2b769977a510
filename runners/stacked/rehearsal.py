"""Rehearses a step before its stack is captured, to find values that a replay would not update."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import attrs
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from ...backends.operators import OperatorWatch, is_plain, kernel_of, run_uncompiled, run_under, tensors_in, written
from ...dataflow.axes import BATCH
from ...dataflow.buffers import Buffers, span
from ...dataflow.errors import CaptureError, ReplayError
from ...dataflow.views import alias
from ..engine.bits import text_of
from ..engine.current import CurrentStep, current_step, untraced, with_current
from ..engine.outputs import map_tensors
from ..engine.stage import Stage
from ..engine.state import CLOSED, reached
from .breaks import VALUES, Break, broken, share_storage
from .stack import Stack, StackCall, hand_out, other_object, share_memory, shared_arguments, slots_of

T = TypeVar("T")
_DEPTH: Final = 5
"""How deep in an object tensors are searched for."""
_CLOSED: Final = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial)
"""Types whose objects are not searched: they have the same tensors in each step."""
_FIXED: Final = frozenset({"device", "dtype", "layout", "ndim", "dim", "is_cuda", "is_cpu", "requires_grad"})
"""Attributes that a graph may read of a slot over requests, since they are the same in each step."""
_SIZES: Final = _FIXED | {"shape", "size", "numel"}
"""Attributes that a graph may read of a tensor that each step makes anew, since the bucket determines them."""


@attrs.define(eq=False, slots=False)
class Rehearsal:
    """One watched run of a step. Its stack gets copies of its arguments, and breaks run as between graphs.

    It records which code makes each tensor: the code around the stack (`anew`), or the stack's own (`stored`, if other
    code finds it). A replay runs the code around the stack and the breaks, but not the stack. So if a graph or a break
    gets a tensor from the other code in another way than as an argument or result, all later steps would use the tensor
    of the capture.

    Attributes:
        stage: The stage of the step.
        stack: The part that is captured.
        buffers: The memory of its slots.
        breaks: Operators that are breaks, by name.
        make: Makes the `StackCall` of the stack's arguments.
        read: Indices of arguments whose memory graphs read.
        written: Indices of arguments whose memory graphs or breaks write.
    """

    stage: Stage[Any]
    stack: Stack
    buffers: Buffers
    breaks: frozenset[str]
    make: Callable[[Any], StackCall]

    def __attrs_post_init__(self) -> None:
        """Initialize the records."""
        self.read = set[int]()
        self.written = set[int]()
        self._calls = list[StackCall]()
        self._origins: Sequence[Any] = ()  # the stack's arguments in the step
        self._outputs: Any = None  # results of the stack
        over_requests = [one for one in self.buffers if BATCH in one.slot.axes and one.nbytes]
        self._requests = [(*span(one.tensor), one.name) for one in over_requests]
        self._anew = WeakIdKeyDictionary()
        self._stored = WeakIdKeyDictionary()
        self._handed = WeakIdKeyDictionary()
        self._slots: Mapping[int, str] = {}
        self._arguments = list[tuple[int, int, int]]()
        self._originals = list[tuple[int, int, int]]()
        self._objects = dict[int, Any]()  # arguments of the stack that are no tensors, by index
        self._met, self._overwritten = set[int](), set[int]()  # arguments that the stack also reaches in another way
        self._shared = list[tuple[int, int, str]]()  # results of breaks that share memory with each other
        self._alive = list[torch.Tensor]()  # keep those alive, so that no other tensor gets their memory
        self._functions, self._operators = _Functions(self), _Operators(self)
        self._is_paused = False

    def run(self, view: Any, first: Any) -> StackCall:
        """Run the step, and return the call of its stack. Raise CaptureError if it cannot be captured.

        first: The arguments of the stack in an earlier run.
        """
        run = functools.partial(self.stack.run, self.stage, view, self._answer)
        run_uncompiled(lambda: with_current(CurrentStep(view, "capture"), self.watched, run))
        [call] = self._calls
        self._conclude(call, pytree.tree_leaves(first))
        return call

    def around(self, view: Any, run: Callable[[], T]) -> T:
        """Run the step again, with `run` in place of its stack. The code after it gets the results of the rehearsal.

        So the stack is captured under the casts, contexts and attributes that the step sets up. If the capture fails,
        the step still runs to its end, because other ranks may wait for its collectives.
        """
        made = list[T]()
        failed = list[CaptureError]()
        is_inference = torch.is_inference_mode_enabled()

        @untraced  # the code around the stack may be compiled
        def answer(*args: Any, **kwargs: Any) -> Any:
            try:
                with torch.inference_mode(is_inference):  # whatever mode the step has set
                    made.append(run())
            except CaptureError as error:
                failed.append(error)
            step = CurrentStep(view, "capture", pytree.tree_leaves((args, kwargs)))
            return hand_out(map_tensors(self._outputs, torch.clone), step)

        try:
            with torch.no_grad():
                with_current(CurrentStep(view, "capture"), self.stack.run, self.stage, view, answer)
        except Exception:
            if not failed:
                raise
        if failed:
            raise failed[0]
        if len(made) != 1:
            raise CaptureError(self.stack.wrong_calls(len(made)))
        return made[0]

    def _answer(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stack under watch, when the step calls it."""
        if self._calls:
            raise CaptureError(self.stack.wrong_calls(2))
        with self._paused():
            call = self.make((args, kwargs))
            self._calls.append(call)
            self._origins = pytree.tree_leaves((args, kwargs))
            step = self._begin(call)
        args, kwargs = call.arguments()
        outputs = with_current(step, lambda: call.run(*args, **kwargs))
        for tensor in tensors_in(outputs):
            if tensor in self._anew:
                raise CaptureError(_made_anew("the stack returns", tensor))

        def hand(leaf: Any) -> Any:
            for tensor in _tensors_of(leaf):
                self._handed[tensor] = True
            return leaf

        with self._paused():
            named = map_tensors(call.named(outputs), alias, hand)
            self._outputs = map_tensors(named, torch.clone)
            try:  # results that the code around the stack also gets after a replay
                return hand_out(named, CurrentStep(call.own, "capture", self._origins))
            except ReplayError as error:
                raise CaptureError(str(error)) from None

    def watched(self, run: Callable[[], T]) -> T:
        """Call a function while all functions of torch are watched."""
        return run_under(self._functions, lambda: run_under(self._operators, run))

    @property
    def part(self) -> str | None:
        """The part that is running: the "step" around the stack, a "graph", a "break", or None without a watch."""
        step = current_step()
        if self._is_paused or step is None:
            return None
        if step.shown is None:
            return "step"
        return "graph" if step.inside is None else "break"

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Run a block unwatched, because it is not part of the step."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _begin(self, call: StackCall) -> CurrentStep:
        """Record the memory of the arguments, and return the `CurrentStep` for the stack's code."""
        named = {**slots_of(call.view), **slots_of(call.own)}
        requests = {name for *_, name in self._requests}
        self._slots = {key: name for key, name in named.items() if name in requests}
        step = call.at_capture(self)
        given = list(step.arguments)
        for place, leaf in enumerate(call.leaves):
            if isinstance(leaf, torch.Tensor):
                self._arguments.append((*span(leaf), place))
                if place not in call.inside:
                    self._originals.append((*span(self._origins[place]), place))
                    self._stored[leaf] = True
                    given[place] = alias(leaf)
            elif leaf is not call.view and not isinstance(leaf, (*VALUES, *_CLOSED)):
                self._objects[place] = leaf
                self._arguments += [(*span(one), place) for one in _tensors_of(leaf) if id(one) not in named]
        for name in slots_of(call.view).values():
            self._stored[vars(call.view)[name]] = True
        step.arguments = given
        return step

    def interrupt(self, run: Any, /) -> Any:
        """Call a break as a backend does, with results copied to memory of their own."""
        one: Break = run
        with self._paused():
            for place, leaf in enumerate(one.leaves):
                if place not in one.sources:
                    self._check_given(f"break {one.name!r}", leaf)
            one.replace([alias(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in one.leaves])
        answer: list[torch.Tensor] = one(None)
        with self._paused():
            places = [leaf.clone() for leaf in answer]
            one.aliases = [alias(leaf) for leaf in one.aliases]
            for number, leaf in enumerate(answer):
                if any(share_memory(leaf, other) for other in answer[:number] + answer[number + 1 :]):
                    self._shared.append((*span(places[number]), one.name))
                    self._alive.append(places[number])
        for made in (*places, *one.aliases):
            self._stored[made] = True
        return places

    def borrow(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """Return the tensor itself, since a rehearsal reuses no memory."""
        return tensor

    def _check_given(self, what: str, leaf: Any) -> None:
        """Raise CaptureError for an argument of a break whose current value a replay could not pass."""
        for tensor in _tensors_of(leaf):
            if tensor in self._anew:
                raise CaptureError(_made_anew(f"{what} is handed", tensor))
            self.read.update(_at([tensor], self._arguments))
            if tensor is not leaf and tensor in self._stored:
                self._check_stored(what, [tensor], only_named=True)
                self._handed[tensor] = True

    def _check_stored(self, what: str, tensors: Iterable[torch.Tensor], *, only_named: bool = False) -> None:
        """Raise CaptureError for a tensor that the stack's code made and stored outside, where other code finds it.

        only_named: Whether to raise only if it is reachable from the step, the stack, or an argument of the stack.
        """
        for tensor in tensors:
            if tensor not in self._stored or tensor in self._handed:
                continue
            holder = [self._objects, self.stack.module, self.stage.step]  # the last object is searched first
            names = [name for name, _, found in reached(holder, (*CLOSED, Rehearsal)) if found is tensor]
            if names or not only_named:
                where = f", as {names[0].removeprefix('[2].')!r}" if names else ""
                raise CaptureError(
                    f"{what} reads a tensor that the code of the stack has stored, {text_of(tensor)}{where}: no "
                    f"replay runs that code, so later steps would find the tensor of the capture; pass it to the "
                    f"break as an argument, or return it from the stack"
                )

    def see_function(self, name: str, given: Sequence[torch.Tensor]) -> None:
        """Check a function of torch before the call. Raise CaptureError if a replay would not update its tensors."""
        step = current_step()
        if step is None or step.shown is None or step.inside is not None:
            what = "the step" if step is None or step.inside is None else f"break {step.inside!r}"
            self._check_stored(what, given)
            return
        for tensor in given:
            if id(tensor) in self._slots and name not in _FIXED:
                raise CaptureError(_reads(name, self._slots[id(tensor)]))
            if tensor in self._anew and name not in _SIZES:
                hits = list(_at([tensor], self._arguments))
                if not hits:
                    raise CaptureError(_made_anew(f"{name} reads", tensor))
                raise CaptureError(
                    f"argument {hits[0]} of the stack, of type {type(self._objects[hits[0]]).__name__}, holds a tensor "
                    f"that each step makes anew, {text_of(tensor)}, and {name} reads it outside of a break: pass the "
                    f"tensor as an argument of the stack, or read it in a break"
                )

    def note_made(self, given: Sequence[torch.Tensor], result: Any) -> None:
        """Record which code made the tensors that a function of torch returned."""
        known = {"step": self._anew, "graph": self._stored}.get(self.part or "")
        if known is None:
            return
        for tensor in tensors_in(result):
            origins = [one for one in given if share_storage(one, tensor)]
            if not origins or any(one in known for one in origins):
                known[tensor] = True

    def see_operator(self, name: str, taken: Sequence[torch.Tensor], changed: Sequence[torch.Tensor]) -> None:
        """Check an operator of a graph or a break before it runs.

        Raise CaptureError if no graph may read or write its tensors.
        """
        self._met.update(_at(taken, self._originals))
        self._overwritten.update(_at(changed, self._originals))
        self.written.update(_at(changed, self._arguments))
        for result in _at(changed, self._shared):
            raise CaptureError(
                f"{name} writes a result of break {result!r} that shares memory with another one: graphs read copies "
                "of both, so the other result would not change; return clones from the break"
            )
        if self.part == "graph":
            for slot in _at(taken, self._requests):
                raise CaptureError(_reads(name, slot))
            self.read.update(_at(taken, self._arguments))

    def _conclude(self, call: StackCall, first: Sequence[Any]) -> None:
        """Decide how arguments are passed. Raise CaptureError if graphs must not work on copies of them."""
        for place in sorted(self.read):
            leaf = call.leaves[place]
            if not isinstance(leaf, torch.Tensor) and first[place] is not leaf:
                raise CaptureError(other_object(place, leaf))
            if place in self._met and place in self._overwritten | self.written:
                raise CaptureError(
                    f"the stack writes its argument {place}, {text_of(leaf)}, and it or a break also reaches that "
                    "memory without the argument, through an attribute, a closure or a global: graphs read a copy, so "
                    "one would not see the writes of the other; use only the argument"
                )
        tensors = [place for place, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor)]
        apart = [
            (one, other)
            for other in tensors
            for one in tensors[: tensors.index(other)]
            if {one, other} & self.written and {one, other} & self.read and not {one, other} <= call.inside
        ]
        for one, other in apart:
            if share_memory(self._origins[one], self._origins[other]):
                raise CaptureError(shared_arguments(one, other))
        call.settle(self.read, self.written, apart)


class _Operators(OperatorWatch):
    """Watches every operator of the stack, including those inside custom operators that breaks call."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__()
        self._rehearsal = rehearsal

    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check one operator, and run it."""
        step = current_step()
        part = self._rehearsal.part
        if step is None or part not in {"graph", "break"}:
            return operator(*args, **kwargs)
        name = operator_name(operator)
        plain = is_plain(operator)
        taken = tensors_in((args, kwargs))
        self._rehearsal.see_operator(name, taken, list(written(operator, args, kwargs)) if plain else [])
        if part == "break":
            kernel = kernel_of(operator, taken) if plain else None
            if kernel is None:
                return operator(*args, **kwargs)
            return self._rehearsal.watched(lambda: kernel(*args, **kwargs))
        step.operator = name
        try:
            return operator(*args, **kwargs)
        finally:
            step.operator = None


class _Functions(TorchFunctionMode):
    """Watches every function of torch that a step calls, and runs those that `breaks` names as breaks."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__()
        self._rehearsal = rehearsal

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, or raise CaptureError."""
        rehearsal = self._rehearsal
        given = kwargs or {}
        part = rehearsal.part
        if not part:
            return func(*args, **given)
        # for the getter of an attribute, take the attribute's name
        name = operator_name(getattr(func, "__self__", func) if func.__name__ == "__get__" else func)
        if part == "graph" and name in rehearsal.breaks:
            return broken(name, func)(*args, **given)
        taken = tensors_in((args, given))
        rehearsal.see_function(name, taken)
        result = func(*args, **given)
        rehearsal.note_made(taken, result)
        return result


def operator_name(target: Any) -> str:
    """Return an operator's name, "namespace::operator", or a Python function's own."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):  # noqa: SLF001 - no public names
        return "::".join(str(target).split(".")[:2])
    return str(getattr(target, "_qualname", getattr(target, "__name__", target)))  # custom operators


def _at(tensors: Iterable[torch.Tensor], known: Sequence[tuple[int, int, T]]) -> Iterator[T]:
    """Yield the records of memory that overlaps one of these tensors."""
    for start, stop in [span(tensor) for tensor in tensors if tensor.numel()] if known else ():
        yield from (what for low, high, what in known if low < stop and start < high)


def _tensors_of(value: Any) -> Iterable[torch.Tensor]:
    """Return the tensors that are reachable from an object, itself included."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [] if isinstance(value, (*VALUES, *_CLOSED)) else [one for *_, one in reached(value, _CLOSED, _DEPTH)]


def _reads(what: str, slot: str) -> str:
    return (
        f"{what} reads slot {slot!r}, whose rows are requests, outside of a break: its graph would hold for one number "
        f"of requests. Read it in a break, which gets each step's own rows when it is handed view.{slot} or the view"
    )


def _made_anew(what: str, tensor: torch.Tensor) -> str:
    return (
        f"{what} a tensor that the step makes anew, past the arguments of the stack, {text_of(tensor)}: later steps "
        "would have that of the capture in its place. Hand it to the stack as an argument, or read it in a break, "
        "where the step has put it"
    )
