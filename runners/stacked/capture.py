"""Capturing the stack of a step: what of a bucket is captured, on which arguments, and what its graphs may not read."""

import contextlib
import copy
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...backends.operators import OperatorWatch, is_plain, run_under, tensors_in, written
from ...dataflow.axes import BATCH, TOKENS, Axis, Sizes, Step, extent
from ...dataflow.bucket import Absent
from ...dataflow.buffers import Buffers, span
from ...dataflow.capabilities import dtype_text
from ...dataflow.computation import initial_value, write_all
from ...dataflow.errors import CaptureError, ComputeError
from ...dataflow.oracle import fill_slot_by_slot
from ...dataflow.ready import Ready
from ...dataflow.tails import holds
from ...dataflow.views import Aliases, ViewInfo, carried, viewer
from ..capture import Filling, told_as_capture_error
from ..graphs import Look
from ..outputs import check_rows
from ..running import Running, running, under_way
from ..stage import Stage, V
from ..state import State
from .replay import VALUES, Stack, StackCall, other_object, slots_of, stand_ins
from .splitting import Splitter, operator_name

T = TypeVar("T")
_LIVE: Final = "live"
_DEPTH: Final = 5
"""How far into an object tensors are looked for."""
_CLOSED: Final = (nn.Module, type, types.ModuleType, types.FunctionType)
"""What is not looked into: it has the same tensors in each step."""
_FIXED: Final = frozenset({"device", "dtype", "layout", "ndim", "dim", "is_cuda", "is_cpu", "requires_grad"})
"""What may be asked of a slot over requests in a graph: it is the same in each step."""


def fill_placeholder(stage: Stage[Any], buffers: Buffers, step: Step, absent: Absent) -> dict[str, Any]:
    """Fill a bucket from the declaration's placeholder, tails and computed slots too; returns its fields by name.

    Copied slots that it does not name hold their pad value. CaptureError where it names what is no copied slot or
    field, or gives a slot what that cannot hold.
    """
    declaration, capabilities = stage.declaration, stage.backend.capabilities
    one = {BATCH: 1}  # also where no slot is over requests
    values = dict(stage.inputs.placeholder(Step(one | dict(step.live_sizes), one | dict(step.padded_sizes))))
    copied = [name for name, slot in declaration.slots.items() if slot.reads(name) is not None]
    unknown = [name for name in values if name not in {*copied, *declaration.fields, *declaration.disabled}]
    if unknown:
        raise CaptureError(
            f"{declaration.name}.placeholder() names {unknown[0]!r}, which is no copied slot and no field"
        )
    given = dict[str, torch.Tensor]()
    for name in copied:
        if name in absent:
            continue
        buffer = buffers[name]
        shape, tensor = extent(buffer.slot.shape, step.live_sizes), buffer.tensor
        given[name] = target = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        first = initial_value(name, buffer.slot, buffers.capacity, capabilities) if name not in values else values[name]
        if isinstance(first, bool | int | float) and not holds(target.dtype, first):
            raise CaptureError(f"slot {name!r}: its placeholder: {first!r} does not fit {dtype_text(target.dtype)}")
        try:
            write_all(target, first, f"slot {name!r}: its placeholder")
        except ComputeError as error:
            raise CaptureError(str(error)) from error
    fields = carried(declaration.fields, values)
    buffers.distrust()
    fill_slot_by_slot(declaration, buffers, capabilities, step, fields, given=given)
    return fields


def live_viewer(stage: Stage[V], buffers: Buffers, ready: Ready) -> Callable[[Any], V]:
    """A call that makes the view of a batch: request slots are cut to the live requests, every other axis is padded."""
    made: Callable[[Any], V] | None = ready.notes.get(_LIVE)
    if made is None:
        live = ready.step.live_sizes
        sizes = {axis: live[axis] if axis == BATCH else size for axis, size in ready.step.padded_sizes.items()}
        slots = stage.declaration.slots
        views = {
            name: view if view is None or name not in slots else buffers[name].view(sizes)
            for name, view in ready.views.items()
        }
        info = ViewInfo(Step(live, sizes), stage.relations, stage.declaration)
        made = ready.notes[_LIVE] = viewer(stage.inputs, Aliases(views), stage.declaration.fields, info)
    return made


class StackCapture(Generic[V]):
    """Makes what is captured of a bucket, on the declaration's placeholder.

    stack: what of the step is captured; None for all of it. splitter: what marks its breaks, if not its code.
    output_rows: the axis of outputs' rows.
    """

    def __init__(
        self,
        stage: Stage[V],
        buffers: Buffers,
        stack: Stack | None,
        splitter: Splitter | None,
        output_rows: Axis | None,
    ) -> None:
        self._stage = stage
        self._buffers = buffers
        self._stack = stack
        self._splitter = splitter
        self._output_rows = output_rows

    @property
    def holder(self) -> Callable[..., Any] | None:
        """What reaches the tensors that graphs read beside slots; None where splits read of them too."""
        return None if self._stack is None or self._splitter is not None else self._stack.module.forward

    def __call__(self, filling: Filling, absent: Absent, look: Look) -> tuple[StackCall, State]:
        """Run the step on a placeholder, and make a call of its stack, whose arguments stay where they are.

        All runs leave the step's state as it was.

        CaptureError where the step raises, does not call the stack once, reads request slots outside of breaks, or
        returns what no live rows can be cut of.
        """
        stage, bucket, stack, splitter = self._stage, filling.bucket, self._stack, self._splitter
        sizes: Sizes = {**bucket.sizes, BATCH: 1}
        live = tuple(sizes[axis] for axis in stage.declaration.varying)
        calls, outputs = list[tuple[Any, Any]](), None
        with told_as_capture_error(), stage.backend.stream(), torch.no_grad():
            fields = fill_placeholder(stage, self._buffers, stage.declaration.step(live, bucket.sizes), absent)
            make = live_viewer(stage, self._buffers, bucket.ready(live, absent))
            view, shown = make(fields), stage.sealed(make(None))

            def whole() -> None:
                nonlocal outputs
                calls.clear()
                step = Running(view, "capture")
                outputs = under_way(step, stage.run, view) if stack is None else self._noted(stack, view, calls)

            state = look(whole)
            args, kwargs = ((view,), {}) if stack is None else _only(stack, calls)
            run = stage.step if stack is None else stack.module.forward
            call = StackCall(stage, run, args, kwargs, own=view, view=shown, holds=self._buffers.holds)
            with state.kept():
                self._watch(call)
                objects = [place for place in sorted(call.read) if not isinstance(call.leaves[place], torch.Tensor)]
                if stack is not None and objects:
                    whole()
                    again = pytree.tree_leaves(_only(stack, calls))
                    for place in objects:
                        if again[place] is not call.leaves[place]:
                            raise CaptureError(other_object(place, call.leaves[place]))
                if splitter is not None:
                    args, kwargs = call.arguments()
                    parts = under_way(call.at_capture(shown), splitter, run, args, kwargs)
                    call.run = lambda *_, **__: parts()  # which hold their arguments already
            self._check_rows(outputs, view)
        self._buffers.distrust()
        return call, state

    def _noted(self, stack: Stack, view: V, calls: list[tuple[Any, Any]]) -> Any:
        """Run the step: what it calls its stack with is noted, and what it returns is returned."""
        forward = stack.module.forward

        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return forward(*args, **kwargs)

        return under_way(Running(view, "capture"), stack.answered, self._stage.run, view, noted)

    def _watch(self, call: StackCall) -> None:
        """Run it under watch: what its graphs do with the arguments, and that none reads a slot over requests.

        Splits are no breaks yet, because the tracer would take numbers of requests as constants.
        """
        slots, breaks = self._stage.declaration.slots, frozenset[str]()
        if self._splitter is not None:
            breaks = self._splitter.names
        over = [name for name in slots if BATCH in slots[name].axes]
        fenced = copy.copy(call.view)
        values = vars(fenced)
        for name in over:
            if values[name] is not None:
                values[name] = Fenced.around(values[name], name, breaks)
        step = call.at_capture(fenced)
        args, kwargs = call.arguments(stand_ins(call.view, fenced))
        watch = ReadWatch({name: self._buffers[name].tensor for name in over}, _tensors_of(call), breaks)
        try:
            under_way(step, run_under, watch, lambda: call.run(*args, **kwargs))
        except CaptureError as error:
            if not breaks:
                raise
            raise CaptureError(f"{error} (splits names {', '.join(sorted(breaks))})") from error
        call.read, call.written = watch.read, watch.written

    def _check_rows(self, outputs: Any, view: V) -> None:
        """CaptureError where the step's outputs have other rows than was said. The placeholder is one request."""
        if self._output_rows is not None:
            info = view._slotgraph_view  # noqa: SLF001 - what a fill leaves there for runners
            tokens = info.step.padded(TOKENS) if info is not None else 0
            by_request = self._output_rows == BATCH
            check_rows(outputs, *((1, "request of the placeholder") if by_request else (tokens, "padded token")))


def _only(stack: Stack, calls: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """The one call of the stack in a step. CaptureError for another number."""
    if len(calls) != 1:
        raise CaptureError(
            f"the step called the stack, {stack.name}, {len(calls)} times: it is captured for one call a step"
        )
    return calls[0]


def _tensors_of(call: StackCall) -> Iterator[tuple[int, torch.Tensor]]:
    """Tensors that came with an argument, and its place; those inside of an object that are the view's are not."""
    slots = {key for key, _ in slots_of(call.view)}  # of those a fill takes care
    for place, leaf in enumerate(call.leaves):
        if isinstance(leaf, torch.Tensor):
            yield place, leaf
        elif leaf is not call.view and not isinstance(leaf, VALUES):
            yield from ((place, one) for one in tensors_within(leaf) if id(one) not in slots)


class ReadWatch(OperatorWatch):
    """Looks at every operator outside of breaks, and notes its use of what it was given.

    forbidden: slots over requests, by name: a graph that reads one holds for one number of requests alone.
    given: tensors that came with the arguments of the captured part, and their places. breaks: names of operators that
    will be breaks, and are none yet. read, written: the places that graphs read, and write.
    """

    def __init__(
        self,
        forbidden: Mapping[str, torch.Tensor],
        given: Iterable[tuple[int, torch.Tensor]],
        breaks: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.read, self.written = set[int](), set[int]()
        self._breaks = breaks
        self._forbidden = [(*span(tensor), name) for name, tensor in forbidden.items() if tensor.numel()]
        self._given = [(*span(tensor), place) for place, tensor in given if tensor.numel()]

    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note what an operator reads and writes, and run it. CaptureError where no graph may read that."""
        step, name = running(), operator_name(operator)
        if step is None or step.inside is not None:
            return operator(*args, **kwargs)
        if name in self._breaks:
            with _inside(step, name):
                return operator(*args, **kwargs)
        taken = tensors_in((args, kwargs))
        for slot in _at(taken, self._forbidden):
            raise CaptureError(_reads(name, slot))
        self.read.update(_at(taken, self._given))
        if is_plain(operator):
            self.written.update(_at(written(operator, args, kwargs), self._given))
        step.operator = name
        try:
            return operator(*args, **kwargs)
        finally:
            step.operator = None


def _at(tensors: Iterable[torch.Tensor], known: Sequence[tuple[int, int, T]]) -> Iterator[T]:
    """What lies where one of these tensors begins."""
    for address in [tensor.data_ptr() for tensor in tensors if tensor.numel()]:
        yield from (what for low, high, what in known if low <= address < high)


class Fenced(torch.Tensor):
    """A slot over requests while graphs are looked at: to be handed to breaks, and to nothing else."""

    _slot: str
    _breaks: frozenset[str]

    @classmethod
    def around(cls, tensor: torch.Tensor, slot: str, breaks: frozenset[str] = frozenset()) -> "Fenced":
        """The same memory behind a fence. breaks: names of functions that will be breaks, and may have it."""
        fenced = tensor.as_subclass(cls)
        fenced._slot, fenced._breaks = slot, breaks  # noqa: SLF001 - its own fields
        return fenced

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """CaptureError, but for what is the same in each step, and for breaks."""
        del types
        first = next(one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, cls))
        # of the getter of an attribute, the attribute's name
        name = operator_name(getattr(func, "__self__", func) if func.__name__ == "__get__" else func)
        step = running()
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch documents for __torch_function__
            if name in _FIXED:
                return func(*args, **(kwargs or {}))
            if step is None or name not in first._breaks:  # noqa: SLF001 - as above
                raise CaptureError(_reads(name, first._slot))  # noqa: SLF001 - as above
            plain, named = pytree.tree_map_only(cls, lambda one: one.as_subclass(torch.Tensor), (args, kwargs or {}))
            with _inside(step, name):
                return func(*plain, **named)


@contextlib.contextmanager
def _inside(step: Running, name: str) -> Iterator[None]:
    """While what will be a break runs."""
    step.inside = name
    try:
        yield
    finally:
        step.inside = None


def tensors_within(holder: Any) -> Iterator[torch.Tensor]:
    """The tensors that an object holds, a few levels down."""
    seen, todo = set[int](), [(holder, 0)]
    while todo:
        one, depth = todo.pop()
        if id(one) in seen or isinstance(one, _CLOSED):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        elif depth < _DEPTH:
            todo += [(inner, depth + 1) for inner in parts_of(one)]


def parts_of(holder: Any) -> list[Any]:
    """What an object holds, one level down."""
    if isinstance(holder, Mapping):
        return [*holder.values()]
    if isinstance(holder, list | tuple | set):
        return [*holder]
    slots = [kind.__dict__.get("__slots__", ()) for kind in type(holder).__mro__]
    names = [name for some in slots for name in ([some] if isinstance(some, str) else some)]
    return [*getattr(holder, "__dict__", {}).values(), *(getattr(holder, name, None) for name in names)]


def _reads(what: str, slot: str) -> str:
    return (
        f"{what} reads slot {slot!r}, whose rows are requests, outside of a break: its graph would hold for one number "
        f"of requests. Read it in a break, which gets each step's own rows when it is handed view.{slot} or the view"
    )
