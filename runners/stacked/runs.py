"""Runs of a step of which one part, the stack, is captured by tokens, while the rest runs eagerly around it."""

import functools
import time
from collections.abc import Collection, Sequence
from typing import Any, Generic

import attrs
import torch

from ...dataflow.axes import BATCH, TOKENS, Axis
from ...dataflow.capabilities import chosen_lowering
from ...dataflow.errors import BatchError, ConfigError, ReplayError
from ...dataflow.limits import Limits
from ...dataflow.sizing import Sizer
from ...dataflow.sources import Side
from ...dataflow.views import carried
from ..capture import CaptureReport
from ..captured import Captured, Order
from ..config import RunnerConfig
from ..decision import Decision, Tally
from ..eager import EagerRunner
from ..filler import Filler
from ..gate import Gate
from ..graphs import GraphSet
from ..outputs import live_rows, map_tensors
from ..parts import Parts
from ..pool import Phase, Seat
from ..ranks.agreement import coordinator_of
from ..router import Router
from ..running import Running, under_way
from ..stage import NO_BINDINGS, Stage, V
from ..watching import Watch
from .answer import Answer, distrusting
from .capture import Boundary, StackCapture, live_view


@attrs.frozen(eq=False)
class Filled(Generic[V]):
    """A filled step: its view, the graphs that take it or why it is run eagerly, live tokens and requests."""

    view: V
    route: Captured | Decision
    tokens: int
    requests: int


class StackRuns(Generic[V]):
    """What the prefill runners have in common: fills, decisions, replays and books.

    name: the runner's, in events. output_rows: the axis that the rows of the step's outputs follow. agreement: with the
    same runner of other ranks. watch: who is told of each step.
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
        phase: Phase | None,
    ) -> None:
        self.stage = stage
        self.config = config
        self.buckets = config.token_ladder()
        self.name = name
        self._boundary = boundary
        counts = ({TOKENS: tokens, BATCH: config.max_batch} for tokens in self.buckets.sizes)
        self._sizes = {one[TOKENS]: stage.padded(one, "max_batch= and buckets=") for one in counts}
        capacity = self._sizes[self.buckets.largest]
        self._carry, self._patterns = stage.captured_with(config, carry, absent)
        self._size = Sizer(stage.declaration, {}, capacity, TOKENS)
        self._output_rows = _checked_axis(output_rows, stage)
        self._limits = Limits.of(stage.declaration, capacity)
        self._requests = _place(stage, BATCH)
        self.coordinator = coordinator_of(stage.declaration, name, config, self._sizes, TOKENS)
        self._tally = Tally(boundary.path)
        self.watch = Watch()
        self._gate = Gate(name)
        self._filled: Filled[V] | None = None
        self._others = 0
        self._seat = Seat(self, stage, capacity, NO_BINDINGS, phase, sharing=config.sharing)
        if phase is None:
            _ = self._router, self._eager  # what is wrong with them is said now

    @functools.cached_property
    def graphs(self) -> GraphSet[V]:
        """The captured buckets, and the buffers that they read; those of a pool are laid out when first asked for."""
        stage, config, buffers = self.stage, self.config, self._seat.buffers()
        lowering = chosen_lowering(stage.backend.capabilities, config.lowering)
        lowering = "fused" if lowering == "in_graph" else lowering  # what runs before the graphs reads the slots, too
        sizes, mode = list(self._sizes.values()), config.error_mode
        filler = Filler(stage, buffers, lowering, sizes, modes=config.modes, error_mode=mode)
        capturing = StackCapture(stage, self._boundary, buffers, self._output_rows)
        handed = _handed(stage)
        return GraphSet(
            stage,
            buffers,
            filler,
            rows_each=None,
            modes=config.modes,
            recipe=capturing,
            holder=capturing.holder,
            parameters=handed,
        )

    @functools.cached_property
    def _router(self) -> Router:
        graphs, on, path = self.graphs, self.config.graphs, self._boundary.path
        routed = self.stage.declaration, self.buckets, graphs.buffers.capacity, graphs
        asked = self.coordinator, self._eager.admit
        return Router(*routed, *asked, enabled=on, leading=(TOKENS,), path=path)

    @functools.cached_property
    def _eager(self) -> EagerRunner[V]:
        return EagerRunner.beside(self.stage, self.graphs.buffers, self._carry)

    @property
    def parts(self) -> Parts[V]:
        """What they are made of."""
        made = self.name, self.config, self.stage, self._sizes, self._patterns, self.graphs, self._eager
        return Parts(*made, self.coordinator, self._size, self._tally, self.watch, self._seat)

    def capture(self) -> CaptureReport:
        """Capture every bucket, the largest first; with `lazy`, each when the first batch comes for it."""
        with self._gate.open():
            return self.graphs.capture(Order.of(self.config, self._sizes, self._patterns, self.name, self.coordinator))

    def decide(self, batch: Any, side: Side) -> Decision:
        """The path that a batch would take."""
        return self._router.decide(self._size(batch, side), self.stage.absent(batch, side), batch)

    def step(self, batch: Any, side: Side) -> Any:
        """Run one step. BatchError where the batch does not fit; nothing is written then."""
        with self._gate.open():
            return self._run(self._fill(batch, side))

    def fill(self, batch: Any, side: Side) -> V:
        """Fill from a batch, and return the view that the step's eager parts see."""
        with self._gate.open():
            filled = self._filled = self._fill(batch, side)
            self._others = self.graphs.buffers.turn.others
        return filled.view

    def replay(self, view: V) -> Any:
        """Run the step on the view that was filled last. ReplayError where it is another."""
        with self._gate.open():
            filled = self._filled
            if filled is None or filled.view is not view:
                message = "this view was not filled last: a later fill has overwritten its slots"
                raise ReplayError(message)
            self.graphs.buffers.turn.check_others(self._others)
            try:
                self.graphs.filler.order()
                return self._run(filled)
            except BaseException:  # what the step writes on the way may not be as it was filled
                self._filled = None
                raise

    def _fill(self, batch: Any, side: Side) -> Filled[V]:
        before, self._filled = self._filled, None
        graphs = self.graphs
        start = time.perf_counter_ns() if next(self._tally.turns) else 0
        graphs.buffers.turn.fills += 1
        graphs.filler.order()
        self.coordinator.begin()
        try:
            live = self._size(batch, side)
            if self._limits is not None:
                self._limits.check(batch, side)
            absent = self.stage.absent(batch, side)
            route = self._router.route(live, absent, batch, side)
            if isinstance(route, Decision):
                return self._fill_eagerly(batch, route, side, live, start)
            ready = graphs.filler.fill(route.filling, batch, live[:-1], absent, side, whole=False)
            ready.compute_on_device(batch)
        except BaseException as error:
            self.coordinator.refuse(error)
            if isinstance(error, BatchError):
                self._filled = before  # nothing was written: the view filled last still stands
                graphs.buffers.turn.fills -= 1
                self._size.explain(error, batch, side)
            raise
        view = live_view(self.stage, graphs.buffers, ready, carried(self.stage.declaration.fields, batch))
        if start and start > graphs.filler.late:
            self._tally.timed(self._tally.buckets[route.rows], start)
        return Filled(view, route, live[-1], self._requests_in(live))

    def _requests_in(self, live: tuple[int, ...]) -> int:
        return 0 if self._requests is None else live[self._requests]

    def _fill_eagerly(self, batch: Any, decision: Decision, side: Side, live: tuple[int, ...], start: int) -> Filled[V]:
        view = self._eager.fill(batch, **side)
        self._tally.unfit(decision, self.name, start if start > self.graphs.filler.late else 0)
        return Filled(view, decision, live[-1], self._requests_in(live))

    def _run(self, filled: Filled[V]) -> Any:
        return self.coordinator.run(self._run_here, filled)

    def _run_here(self, filled: Filled[V]) -> Any:
        captured = filled.route
        if isinstance(captured, Decision):
            self.graphs.eager_runs += 1
            outputs = self._eager.run(filled.view)
            self._tally.fell_back(captured, filled.tokens)
            return outputs
        stack, stage = self._boundary.stack, self.stage
        with torch.no_grad(), distrusting(self.graphs), under_way(Running(filled.view, "replay")) as step:
            answer = Answer(self.graphs, captured, step)
            if stack is None:
                outputs = stage.run(filled.view, answer)
            else:
                with stack.answered(answer):
                    outputs = stage.run(filled.view)
                answer.check(stack.name)
        self.graphs.filler.hosts.note()  # of what runs around the graphs, too
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
