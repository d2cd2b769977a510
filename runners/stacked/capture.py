"""Capturing the stack of a step: what of a bucket is captured, and on which arguments."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic

import attrs
import torch
from torch.utils import _pytree as pytree

from ...backends.operators import run_under
from ...dataflow.axes import BATCH, TOKENS, Axis, Sizes, Step, extent
from ...dataflow.bucket import Absent
from ...dataflow.buffers import Buffers
from ...dataflow.capabilities import dtype_text
from ...dataflow.computation import initial_value, write_all
from ...dataflow.errors import CaptureError, ComputeError
from ...dataflow.guard import without_gradients
from ...dataflow.oracle import fill_slot_by_slot
from ...dataflow.ready import Ready
from ...dataflow.tails import holds
from ...dataflow.views import Aliases, ViewInfo, carried, viewer
from ..capture import Filling, told_as_capture_error
from ..outputs import check_rows
from ..running import Running, running, under_way
from ..stage import Stage, V
from ..state import State
from ..statistics import Path
from .replay import Stack, StackCall, other_object, stand_ins
from .splitting import Splitter
from .watch import Fenced, ReadWatch


def fill_placeholder(stage: Stage[Any], buffers: Buffers, step: Step, absent: Absent) -> dict[str, Any]:
    """Fill a bucket from the declaration's placeholder, tails and computed slots too; returns its fields by name.

    Copied slots that it does not name hold their pad value. CaptureError where it names what is no copied slot or
    field, or gives a slot what that cannot hold.
    """
    declaration, capabilities = stage.declaration, stage.backend.capabilities
    one = {BATCH: 1}  # also where no slot is over requests
    values = dict(stage.inputs.placeholder(Step(one | dict(step.live_sizes), one | dict(step.padded_sizes))))
    copied = [name for name, slot in declaration.slots.items() if slot.reads(name) is not None]
    known = {*copied, *declaration.fields, *declaration.disabled}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise CaptureError(
            f"{declaration.name}.placeholder() names {unknown[0]!r}, which is no copied slot and no field"
        )
    given = {name: _value(name, values, buffers, stage, step.live_sizes) for name in copied if name not in absent}
    fields = carried(declaration.fields, values)
    buffers.distrust()
    fill_slot_by_slot(declaration, buffers, capabilities, step, fields, given=given)
    return fields


def _value(name: str, values: Mapping[str, Any], buffers: Buffers, stage: Stage[Any], live: Sizes) -> torch.Tensor:
    buffer = buffers[name]
    target = torch.empty(extent(buffer.slot.shape, live), dtype=buffer.tensor.dtype, device=buffer.tensor.device)
    if name in values:
        value = values[name]
    else:
        value = initial_value(name, buffer.slot, buffers.capacity, stage.backend.capabilities)
    if isinstance(value, bool | int | float) and not holds(target.dtype, value):
        raise CaptureError(f"slot {name!r}: its placeholder: {value!r} does not fit {dtype_text(target.dtype)}")
    try:
        write_all(target, value, f"slot {name!r}: its placeholder")
    except ComputeError as error:
        raise CaptureError(str(error)) from error
    return target


Look = Callable[[Callable[[], Any]], State]
"""Runs a whole step for the first time, and tells its state."""
_LIVE = "live"


@attrs.frozen(eq=False)
class Boundary:
    """What of a step is captured: the stack, or all of it; what marks its breaks, if not its code; the path's name."""

    stack: Stack | None
    path: Path
    cut: Splitter | None = None


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
    """Makes what is captured of a bucket, on the declaration's placeholder; output_rows: the axis of outputs' rows."""

    def __init__(self, stage: Stage[V], boundary: Boundary, buffers: Buffers, output_rows: Axis | None) -> None:
        self._stage = stage
        self._boundary = boundary
        self._buffers = buffers
        self._output_rows = output_rows

    @property
    def holder(self) -> Callable[..., Any] | None:
        """What reaches the tensors that graphs read beside slots; None where splits read of them too."""
        stack = self._boundary.stack
        return None if stack is None or self._boundary.cut is not None else stack.module.forward

    def __call__(
        self, filling: Filling, absent: Absent, look: Callable[[Callable[[], Any]], State]
    ) -> "tuple[Part[V], State]":
        """Run the step on a placeholder, and make a call of its stack, whose arguments stay where they are.

        All runs leave the step's state as it was.

        CaptureError where the step raises, does not call the stack once, reads request slots outside of breaks, or
        returns what no live rows can be cut of.
        """
        stage, bucket = self._stage, filling.bucket
        sizes: Sizes = {**bucket.sizes, BATCH: 1}
        live = tuple(sizes[axis] for axis in stage.declaration.varying)
        with told_as_capture_error(), stage.backend.stream(), torch.no_grad():
            fields = fill_placeholder(stage, self._buffers, stage.declaration.step(live, bucket.sizes), absent)
            ready = bucket.ready(live, absent)
            make = live_viewer(stage, self._buffers, ready)
            view, shown = make(fields), stage.sealed(make(None))
            state = look(functools.partial(_whole, stage, view))
            with state.kept():
                call, outputs = self._call_of(view, shown)
                self._cut(call, view)
                returned = self._watch(call, view)
                self._check_objects(call, view)
            self._check_rows(returned if self._boundary.stack is None else outputs, view)
        self._buffers.distrust()
        return Part(stage, view, call), state

    def _call_of(self, view: V, shown: V) -> tuple[StackCall, Any]:
        """The call that is captured, and what the step around it returned; shown: what it sees in the view's place."""
        stack = self._boundary.stack
        run: Callable[..., Any] = self._stage.step if stack is None else stack.module.forward
        (args, kwargs), outputs = (((view,), {}), None) if stack is None else self._noted(stack, view)
        return StackCall(run, args, kwargs, own=view, view=shown, buffers=self._buffers), outputs

    def _noted(self, stack: Stack, view: V) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], Any]:
        """Run the step: what it calls its stack with, and what it returns."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        forward = stack.module.forward

        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return forward(*args, **kwargs)

        outputs = under_way(Running(view, "capture"), stack.answered, self._stage.run, view, noted)
        if len(calls) != 1:
            raise CaptureError(
                f"the step called the stack, {stack.name}, {len(calls)} times: it is captured for one call a step"
            )
        return calls[0], outputs

    def _cut(self, call: StackCall, view: V) -> None:
        """Have its breaks marked, where its own code does not."""
        if self._boundary.cut is not None:
            self._check_uncut(call, view, self._boundary.cut.names)
            args, kwargs = call.arguments_in(call.view)
            step = Running(view, "capture", now=call.at_capture(view), shown=call.view)
            with self._stage.lent(view):
                call.run = _cut_at(under_way(step, self._boundary.cut, call.run, args, kwargs))

    def _check_uncut(self, call: StackCall, view: V, names: frozenset[str]) -> None:
        """What the tracer would not see: it takes numbers of requests as constants. CaptureError."""
        try:
            self._watch(call, view, names)
        except CaptureError as error:
            raise CaptureError(f"{error} (splits names {', '.join(sorted(names))})") from error

    def _watch(self, call: StackCall, view: V, breaks: frozenset[str] = frozenset()) -> Any:
        """Run it under watch: what its graphs do with the arguments, and that none reads a slot over requests.

        breaks: operators that will be breaks, and are none yet.
        """
        slots = self._stage.declaration.slots
        over = [name for name in slots if BATCH in slots[name].axes]
        fenced = _fenced(call.view, over, breaks)
        args, kwargs = call.arguments_in(fenced)
        now = {**call.at_capture(view), **stand_ins(fenced, view)}
        watch = ReadWatch({name: self._buffers[name].tensor for name in over}, call.tensors(), breaks)
        step = Running(view, "capture", now, shown=fenced)
        with self._stage.lent(view):
            outputs = under_way(step, run_under, watch, lambda: call.run(*args, **kwargs))
        call.learn(watch.use)
        return outputs

    def _check_rows(self, outputs: Any, view: V) -> None:
        """CaptureError where the step's outputs have other rows than was said. The placeholder is one request."""
        if self._output_rows is not None:
            info = view._slotgraph_view  # noqa: SLF001 - what a fill leaves there for runners
            tokens = info.step.padded(TOKENS) if info is not None else 0
            by_request = self._output_rows == BATCH
            check_rows(outputs, *((1, "request of the placeholder") if by_request else (tokens, "padded token")))

    def _check_objects(self, call: StackCall, view: V) -> None:
        """CaptureError where graphs read tensors inside of an object that each step makes anew."""
        stack, objects = self._boundary.stack, call.objects()
        if stack is not None and objects:
            again = pytree.tree_leaves(self._noted(stack, view)[0])
            for place in objects:
                if again[place] is not call.leaves[place]:
                    raise CaptureError(other_object(place, call.leaves[place]))


def _fenced(view: V, over_requests: Sequence[str], breaks: frozenset[str]) -> V:
    """A view of which slots over requests are for breaks alone."""
    values = view.__dict__
    fenced = {name: Fenced.around(values[name], name, breaks) for name in over_requests if values[name] is not None}
    other = copy.copy(view)
    vars(other).update(fenced)
    return other


def _cut_at(parts: Callable[[], Any]) -> Callable[..., Any]:
    """A step in parts holds its arguments already."""

    def run(*_: Any, **__: Any) -> Any:
        return parts()

    return run


def _whole(stage: Stage[V], view: V) -> Any:
    """Run the step and what is around its stack, without graphs."""
    return without_gradients(under_way, Running(view, "capture"), stage.run, view)


@attrs.define(eq=False)
class Part(Generic[V]):
    """What is captured of a bucket, and the view of its placeholder."""

    stage: Stage[V]
    view: V
    call: StackCall

    def __call__(self) -> Any:
        """Run it as it is captured, and as a backend without graphs replays it."""
        step, call = running(), self.call
        if step is not None and id(call.view) in step.now:  # a replay, which lends its own slots
            return call()
        own = Running(self.view, "capture", call.at_capture(self.view), self.stage.backend, call.view)
        with torch.no_grad(), self.stage.lent(self.view):
            return under_way(own, call)
