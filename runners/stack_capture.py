"""Capturing the stack of a step: what of a bucket is captured, and on which arguments."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic

import attrs
import torch

from ..dataflow.axes import BATCH, Sizes
from ..dataflow.bucket import Absent
from ..dataflow.buffers import Buffers
from ..dataflow.errors import CaptureError
from ..dataflow.ready import Ready
from ..dataflow.step import Step
from ..dataflow.views import ViewInfo, carried, make_view
from .decision import Path
from .filler import Filling
from .placeholder import fill_placeholder
from .running import Running, running, under_way
from .stack import Stack
from .stack_call import Noted, StackCall
from .stage import Stage, V
from .watch import Watch

Cut = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Callable[[], Any]]
"""Makes of a function and its arguments a call of it that marks its breaks, having run it once."""
_LIVE = "live"


@attrs.frozen(eq=False)
class Boundary:
    """What of a step is captured: the stack, or all of it; what marks its breaks, if not its code; the path's name."""

    stack: Stack | None
    path: Path
    cut: Cut | None = None


def live_view(stage: Stage[V], buffers: Buffers, ready: Ready, fields: Mapping[str, Any]) -> V:
    """The view of a fill with its request slots cut to the live requests, and every other axis padded."""
    known = ready.notes.get(_LIVE)
    if known is None:
        sizes = {**ready.step.padded_sizes, BATCH: ready.step.live_sizes.get(BATCH, 0)}
        slots = stage.declaration.slots
        views = {
            name: view if view is None or name not in slots else buffers[name].view(sizes)
            for name, view in ready.views.items()
        }
        info = ViewInfo(Step(ready.step.live_sizes, sizes), stage.relations, stage.declaration.settings)
        known = ready.notes[_LIVE] = (views, info)
    views, info = known
    return make_view(stage.inputs, views, fields, info)


class StackCapture(Generic[V]):
    """Makes what is captured of a bucket, on the declaration's placeholder."""

    def __init__(self, stage: Stage[V], boundary: Boundary, buffers: Buffers) -> None:
        self._stage = stage
        self._boundary = boundary
        self._buffers = buffers

    def __call__(self, filling: Filling, absent: Absent) -> "Part[V]":
        """Run the step on a placeholder, and make a call of its stack, whose arguments stay where they are.

        CaptureError where the step raises, does not call the stack once, or reads request slots outside of breaks.
        """
        stage, bucket = self._stage, filling.bucket
        live: Sizes = {**bucket.sizes, BATCH: 1}
        with stage.backend.stream(), torch.no_grad(), _named():
            fields = fill_placeholder(stage, self._buffers, Step(live, bucket.sizes), absent)
            ready = bucket.fill_for(absent).ready(tuple(live[axis] for axis in stage.declaration.varying))
            view = live_view(stage, self._buffers, ready, fields)
            shown = live_view(stage, self._buffers, ready, carried(stage.declaration.fields, None))
            call = self._call_of(view, shown)
            part = Part(stage, view, call)
            with under_way(Running(view, "capture", now=call.stand_ins(view))):
                self._cut(call)
                self._watch(part)
        self._buffers.distrust()
        return part

    def _call_of(self, view: V, shown: V) -> StackCall:
        """The call that is captured; shown: what it sees in the view's place."""
        stack, stage = self._boundary.stack, self._stage
        run: Callable[..., Any] = stage.step
        args: tuple[Any, ...] = (view,)
        kwargs: dict[str, Any] = {}
        if stack is not None:
            run = stack.module.forward
            noted = Noted(run)
            with stack.answered(noted), under_way(Running(view, "capture")):
                stage.run(view)
            args, kwargs = noted.only(stack.name)
        return StackCall(run, args, kwargs, shown, self._buffers)

    def _cut(self, call: StackCall) -> None:
        """Have its breaks marked, where its own code does not."""
        if self._boundary.cut is not None:
            args, kwargs = call.arguments
            with self._stage.lent(call.view):
                call.run = _cut_at(self._boundary.cut(call.run, args, kwargs))

    def _watch(self, part: "Part[V]") -> None:
        """Run it under watch: which arguments its graphs read, and that none reads a slot over requests."""
        slots = self._stage.declaration.slots
        over_requests = {name: self._buffers[name].tensor for name in slots if BATCH in slots[name].axes}
        with Watch(over_requests, part.call.leaves) as watch:
            part.run()
        part.call.read = frozenset(watch.read)


def _cut_at(parts: Callable[[], Any]) -> Callable[..., Any]:
    """A step in parts holds its arguments already."""

    def run(*_: Any, **__: Any) -> Any:
        return parts()

    return run


@contextmanager
def _named() -> Iterator[None]:
    """Whatever goes wrong while a bucket is looked at, it is not captured."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        message = f"the step raised {type(error).__name__}: {error}"
        raise CaptureError(message) from error


@attrs.define(eq=False)
class Part(Generic[V]):
    """What is captured of a bucket, and the view of its placeholder."""

    stage: Stage[V]
    view: V
    call: StackCall

    def run(self) -> Any:
        """Run it in the step that runs."""
        with self.stage.lent(self.view):
            return self.call()

    def __call__(self) -> Any:
        """Run it as it is captured, and as a backend without graphs replays it."""
        step = running()
        if step is not None:
            return self.run()
        now, backend = self.call.stand_ins(self.view), self.stage.backend
        with torch.no_grad(), under_way(Running(self.view, "capture", now, backend)):
            return self.run()
