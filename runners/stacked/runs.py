"""Runs of a step of which one part, the stack, is captured by tokens, while the rest runs eagerly around it."""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Generic

import attrs
import torch

from ...dataflow.axes import BATCH, TOKENS, Axis
from ...dataflow.capabilities import Lowering, chosen_lowering
from ...dataflow.errors import BatchError, ConfigError, ReplayError
from ...dataflow.fill import compute_on_device
from ...dataflow.limits import Limits
from ...dataflow.plan import FillPlan
from ...dataflow.sizing import Sizer
from ...dataflow.sources import Side
from ...dataflow.views import carried
from ..capture import CaptureReport
from ..captured import Captured, Order
from ..config import RunnerConfig
from ..decision import Decision, Tally
from ..eager import EagerRunner
from ..filler import Filler
from ..graphs import GraphSet, patterns_of
from ..outputs import live_rows, map_tensors
from ..parts import Parts
from ..router import Router
from ..running import Running, under_way
from ..stage import Stage, V
from ..watching import Watch
from .capture import Boundary, Part, StackCapture, live_view


@attrs.frozen(eq=False)
class Filled(Generic[V]):
    """A filled step: its view, the graphs that take it (None for an eager run), live tokens and requests."""

    view: V
    captured: Captured | None
    tokens: int
    requests: int


class StackRuns(Generic[V]):
    """What the prefill runners have in common: fills, decisions, replays and books.

    name: the runner's, in events. output_rows: the axis that the rows of the step's outputs follow. watch: who is told
    of each step.
    """

    def __init__(
        self,
        stage: Stage[V],
        boundary: Boundary,
        config: RunnerConfig,
        *,
        name: str,
        absent: Sequence[Collection[str]],
        carry: tuple[str, ...],
        output_rows: Axis | None,
    ) -> None:
        self.stage = stage
        self.config = config
        self.buckets = config.token_ladder()
        self.name = name
        self._boundary = boundary
        self._output_rows = _checked_axis(output_rows, stage)
        counts = ({TOKENS: tokens, BATCH: config.max_batch} for tokens in self.buckets.sizes)
        self._sizes = {one[TOKENS]: stage.padded(one, "max_batch= and buckets=") for one in counts}
        capacity = self._sizes[self.buckets.largest]
        buffers = stage.allocate(capacity)
        lowering = chosen_lowering(stage.backend.capabilities, config.lowering)
        lowering = "fused" if lowering == "in_graph" else lowering  # what runs before the graphs reads the slots, too
        sizes, mode = list(self._sizes.values()), config.error_mode
        filler = Filler(stage, buffers, lowering, sizes, debug=config.debug, error_mode=mode)
        capturing = StackCapture(stage, boundary, buffers, output_rows)
        handed = _handed(stage)
        self.graphs = GraphSet(
            stage, buffers, filler, rows_each=None, debug=config.debug, recipe=capturing, parameters=handed
        )
        self._patterns = patterns_of(absent)
        self._size = Sizer(stage.declaration, {}, capacity, TOKENS)
        self._limits = Limits.of(stage.declaration, capacity)
        on, path, leading = config.graphs, boundary.path, (TOKENS,)
        routed = stage.declaration, self.buckets, capacity, self.graphs
        self._router = Router(*routed, enabled=on, leading=leading, path=path)
        self._requests = _place(stage, BATCH)
        self._eager = EagerRunner.beside(stage, buffers, carry)
        self._tally = Tally(path)
        self.watch = Watch()
        self._filled: Filled[V] | None = None

    @property
    def parts(self) -> Parts[V]:
        """What they are made of."""
        return Parts(
            self.name,
            self.config,
            self.stage,
            self._sizes,
            self._patterns,
            self.graphs,
            self._eager,
            self._size,
            self._tally,
            self.watch,
        )

    def capture(self) -> CaptureReport:
        """Capture every bucket, the largest first; with `lazy`, each when the first batch comes for it."""
        return self.graphs.capture(Order.of(self.config, self._sizes, self._patterns, self.name))

    @property
    def lowering(self) -> Lowering:
        """How fills are run."""
        return self.graphs.filler.lowering

    def decide(self, batch: Any, side: Side) -> Decision:
        """The path that a batch would take."""
        return self._router.decide(self._size(batch, side), self.stage.absent(batch, side), batch)

    def plan(
        self, bucket: int, absent: Collection[str], in_place: Collection[str], hosted: Collection[str]
    ) -> FillPlan:
        """How one bucket is filled."""
        return self.stage.plan(self._sizes, bucket, self.lowering, absent, in_place, hosted)

    def stats(self) -> Mapping[str, Any]:
        """The books, as plain data."""
        filler = self.graphs.filler
        return {**self._tally.as_data(), "lowerings": dict(filler.lowered), "detours": dict(filler.detours)}

    def step(self, batch: Any, side: Side) -> Any:
        """Run one step. BatchError where the batch does not fit; nothing is written then."""
        return self._run(self._fill(batch, side))

    def fill(self, batch: Any, side: Side) -> V:
        """Fill from a batch, and return the view that the step's eager parts see."""
        filled = self._filled = self._fill(batch, side)
        return filled.view

    def replay(self, view: V) -> Any:
        """Run the step on the view that was filled last. ReplayError where it is another."""
        filled = self._filled
        if filled is None or filled.view is not view:
            message = "this view was not filled last: a later fill has overwritten its slots"
            raise ReplayError(message)
        self.graphs.filler.order()
        try:
            return self._run(filled)
        except BaseException:  # what the step writes on the way may not be as it was filled
            self._filled = None
            raise

    def _fill(self, batch: Any, side: Side) -> Filled[V]:
        before, self._filled = self._filled, None
        graphs = self.graphs
        graphs.fills += 1
        graphs.filler.order()
        try:
            live = self._size(batch, side)
            if self._limits is not None:
                self._limits.check(batch, side)
            absent = self.stage.absent(batch, side)
            route = self._router.route(live, absent, batch)
            if isinstance(route, Decision):
                return self._fill_eagerly(batch, route, side, live)
            ready = graphs.filler.fill(route.filling, batch, live[:-1], absent, side, whole=False)
        except BatchError as error:
            self._filled = before  # nothing was written: the view filled last still stands
            graphs.fills -= 1
            self._size.explain(error)
            raise
        compute_on_device(ready, batch)
        view = live_view(self.stage, graphs.buffers, ready, carried(self.stage.declaration.fields, batch))
        return Filled(view, route, live[-1], self._requests_in(live))

    def _requests_in(self, live: tuple[int, ...]) -> int:
        return 0 if self._requests is None else live[self._requests]

    def _fill_eagerly(self, batch: Any, decision: Decision, side: Side, live: tuple[int, ...]) -> Filled[V]:
        view = self._eager.fill(batch, **side)
        self._tally.note_fallback(decision, live[-1], self.name)
        return Filled(view, None, live[-1], self._requests_in(live))

    def _run(self, filled: Filled[V]) -> Any:
        captured = filled.captured
        if captured is None:
            self.graphs.eager_runs += 1
            return self._eager.run(filled.view)
        stack, stage = self._boundary.stack, self.stage
        with torch.no_grad(), _distrusting(self.graphs), under_way(Running(filled.view, "replay")) as step:
            answer = _Answer(self.graphs, captured, step)
            if stack is None:
                outputs = stage.run(filled.view, answer)
            else:
                with stack.answered(answer):
                    outputs = stage.run(filled.view)
                answer.check(stack.name)
        self._tally.replayed(captured.rows, filled.tokens)
        return self._cut(outputs, captured.rows, filled)

    def _cut(self, outputs: Any, padded: int, filled: Filled[V]) -> Any:
        """The outputs' live rows."""
        if self._output_rows is None:
            return outputs
        if self._output_rows == BATCH:
            _check_rows(outputs, filled.requests, "requests", "TOKENS, if its rows are tokens")
            return outputs
        _check_rows(outputs, padded, "tokens of the bucket", "BATCH, if its rows are requests")
        return live_rows(outputs, filled.tokens)


class _Answer:
    """What the stack does in a replay: it takes the arguments, and replays its graphs."""

    def __init__(self, graphs: GraphSet[Any], captured: Captured, step: Running) -> None:
        self._graphs = graphs
        self._captured = captured
        self._step = step
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay, on these arguments; what the graphs returned."""
        self._calls += 1
        part: Part[Any] = self._captured.step  # type: ignore[assignment] # as StackCapture made it
        step, call = self._step, part.call
        step.now, step.shown = call.take(args, kwargs, step.view), call.view
        clock = self._graphs.clock
        before = clock.replays
        try:
            outputs = self._graphs.replay(self._captured, self._captured.rows)
        finally:
            step.shown = None
        if clock.replays != before + 1:
            message = (
                "a break of this step replayed a graph of the same memory pool, which may overwrite what this step's "
                "later graphs read: run that runner before or after this one's step, or eagerly within the break"
            )
            raise ReplayError(message)
        call.give_back(args, kwargs)
        return outputs

    def check(self, name: str) -> None:
        """ReplayError where the stack was not called once, as at capture."""
        if self._calls != 1:
            message = f"the step called the stack, {name}, {self._calls} times, and once at capture"
            raise ReplayError(message)


@contextlib.contextmanager
def _distrusting(graphs: GraphSet[Any]) -> Iterator[None]:
    """A step that breaks off may leave slots as it has written them."""
    try:
        yield
    except BaseException:
        graphs.buffers.distrust()
        raise


def _checked_axis(output_rows: Axis | None, stage: Stage[Any]) -> Axis | None:
    """The axis that rows of outputs follow. ConfigError where it is none of them, or one that no slot has."""
    if output_rows is None or (output_rows in (TOKENS, BATCH) and output_rows in stage.declaration.axes):
        return output_rows
    if output_rows in (TOKENS, BATCH):
        message = f"output_rows is {output_rows}, which no slot of {stage.declaration.name} has: pass another, or None"
    else:
        message = f"output_rows is TOKENS, BATCH or None, got {output_rows!r}"
    raise ConfigError(message)


def _handed(stage: Stage[Any]) -> dict[str, str]:
    """Host parameters that graphs are handed. Those over requests are for breaks: no graph knows of requests."""
    slots = stage.declaration.slots
    return {argument: name for argument, name in stage.declaration.parameters.items() if BATCH not in slots[name].axes}


def _place(stage: Stage[Any], axis: Axis) -> int | None:
    varying = stage.declaration.varying
    return varying.index(axis) if axis in varying else None


def _check_rows(outputs: Any, rows: int, what: str, otherwise: str) -> None:
    """Every tensor has so many rows: ReplayError."""

    def check(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            message = (
                f"the step returned a tensor of shape {list(tensor.shape)}, expected {rows} rows, the {what}: pass "
                f"output_rows={otherwise}, or None to get it whole"
            )
            raise ReplayError(message)
        return tensor

    map_tensors(outputs, check)
