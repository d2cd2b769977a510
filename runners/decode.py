"""The decode runner: request-axis buckets, one captured graph each, eager where none fits."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Generic, Unpack, final

import structlog
import torch

from ..backends.base import Backend
from ..dataflow.axes import BATCH, TOKENS, Axis, Sizes
from ..dataflow.errors import BatchError, ConfigError, ReplayError
from ..dataflow.plan import FillPlan
from ..dataflow.planner import plan_fill
from ..dataflow.sizing import Sizer
from ..dataflow.sources import Side
from .capture import CaptureReport
from .config import Options, RunnerConfig
from .decision import Decision, Tally
from .eager import EagerRunner
from .graphs import Captured, GraphSet, patterns_of
from .router import Router
from .stage import NO_BINDINGS, NO_SIZES, Stage, V, name_of

_LOG = structlog.get_logger("slotgraph")
_NO_PATTERNS: Final[Sequence[Collection[str]]] = ()


@final
class DecodeRunner(Generic[V]):
    """Captures a step for buckets of requests, and replays the smallest that a batch fits.

    inputs: the declaration class. step: called with its view; returns tensors with one row a token. sizes: sizes of
    the fixed axes, and capacities of varying ones beside BATCH and TOKENS. settings: what `when=` of slots refers to.
    bind: tensors to adopt as buffers, by slot. absent: further patterns of absent optional slots to capture, each a
    collection of names; with none, only batches that bring every slot are replayed. output_rows: the axis that the
    rows of outputs follow, TOKENS or BATCH, or None to get outputs whole. Options are those of `RunnerConfig`.
    """

    def __init__(
        self,
        inputs: type[V],
        step: Callable[[V], Any],
        *,
        sizes: Sizes = NO_SIZES,
        settings: object = None,
        bind: Mapping[str, torch.Tensor] = NO_BINDINGS,
        absent: Sequence[Collection[str]] = _NO_PATTERNS,
        output_rows: Axis | None = TOKENS,
        backend: str | Backend = "auto",
        **options: Unpack[Options],
    ) -> None:
        self.config = config = RunnerConfig.of({"backend": name_of(backend), **options})
        relations = {TOKENS: BATCH * config.width}
        self.stage = Stage.of(inputs, step, backend, sizes, settings, relations)
        self.buckets = config.ladder()
        self._sizes = {rows: _padded(self.stage, sizes, rows, config.width) for rows in self.buckets.sizes}
        capacity = self._sizes[self.buckets.largest]
        rows_each = _rows_each(output_rows, config.width)
        self.graphs = GraphSet(self.stage, self.stage.allocate(capacity, bind), rows_each=rows_each, debug=config.debug)
        self._patterns = patterns_of(absent)
        self._size = Sizer(self.stage.declaration, relations, capacity, BATCH)
        self._router = Router(self.stage.declaration, self.buckets, capacity, self.graphs)
        self._eager = EagerRunner(
            inputs,
            step,
            sizes=sizes,
            settings=settings,
            relations=relations,
            buffers=self.graphs.buffers,
            backend=self.stage.backend,
            no_copy=False,
        )
        self._tally = Tally()
        self._filled: tuple[V, Captured | None, int] | None = None

    def capture(self) -> CaptureReport:
        """Capture every bucket, the largest first.

        Raises CaptureError where buckets failed; the others are usable all the same, and `report` names both.
        """
        config, name = self.config, type(self).__name__
        return self.graphs.capture(
            self._sizes, self._patterns, warmups=config.warmups, progress=config.progress, name=name
        )

    @property
    def report(self) -> CaptureReport | None:
        """What the capture came to, or None before it."""
        return self.graphs.report

    def __call__(self, batch: Any, **side: Any) -> Any:
        """Run one step and return its outputs for the live rows, valid until the next replay.

        Raises BatchError where the batch does not fit its declaration, ReplayError before `capture`.
        """
        return self.replay(self.fill(batch, **side))

    def fill(self, batch: Any, **side: Any) -> V:
        """Fill the inputs from a batch and return the view: a bucket's padded slots, or exact ones on the eager path.

        Raises as a call does; the buffers, the graphs and the batch are then as they were.
        """
        before, self._filled = self._filled, None
        self.graphs.fills += 1
        try:
            self._filled = filled = self._fill(batch, side)
        except BatchError as error:
            self._filled = before  # nothing was written: the view filled last still stands
            self.graphs.fills -= 1
            self._size.explain(error)
            raise
        return filled[0]

    def _fill(self, batch: Any, side: Side) -> "tuple[V, Captured | None, int]":
        live = self._size(batch, side)
        absent = self.stage.absent(batch, side)
        route = self._router.route(live, absent, batch)
        if isinstance(route, Decision):
            return self._fill_eagerly(batch, route, side), None, live[-1]
        ready = route.bucket.fill(batch, live[:-1], absent, side)
        return self.stage.view(ready, batch), route, live[-1]

    def replay(self, view: V) -> Any:
        """Run the step on the view that was filled last. ReplayError where another fill has overwritten it."""
        if self._filled is None or self._filled[0] is not view:
            message = "this view was not filled last: a later fill has overwritten its slots"
            raise ReplayError(message)
        _, captured, rows = self._filled
        if captured is None:
            self.graphs.eager_runs += 1
            return self._eager.run(view)
        outputs = self.graphs.replay(captured, rows)
        self._tally.replayed(captured.rows, rows)
        return outputs

    def decide(self, batch: Any, **side: Any) -> Decision:
        """The path that a batch would take, its bucket, and why."""
        return self._router.decide(self._size(batch, side), self.stage.absent(batch, side), batch)

    def plan(self, bucket: int, absent: Collection[str] = ()) -> FillPlan:
        """How one bucket is filled, for batches that come without some optional slots."""
        stage, pattern = self.stage, frozenset(absent)
        return plan_fill(stage.declaration, self._sizes[bucket], stage.backend.capabilities, absent=pattern)

    def stats(self) -> Mapping[str, Any]:
        """Plain data: steps, per bucket live and padded rows and waste, and how often each reason led to eager runs."""
        return self._tally.as_data()

    def _fill_eagerly(self, batch: Any, decision: Decision, side: Side) -> V:
        """Fill in a graph's place, count it, and warn the first time that a reason leads to it."""
        view = self._eager.fill(batch, **side)
        if self._tally.fell_back(decision):
            _LOG.warning("fallback", runner=type(self).__name__, why=decision.why, reason=decision.reason)
        return view


def _rows_each(output_rows: Axis | None, width: int) -> int | None:
    """Output rows for each request."""
    if output_rows is None:
        return None
    if output_rows not in (TOKENS, BATCH):
        message = f"output_rows is TOKENS, BATCH or None, got {output_rows!r}"
        raise ConfigError(message)
    return width if output_rows == TOKENS else 1


def _padded(stage: Stage[Any], sizes: Sizes, rows: int, width: int) -> Sizes:
    """The padded size of every axis in a bucket. ConfigError where a varying axis has no capacity."""
    if BATCH in sizes or TOKENS in sizes:
        message = "sizes of BATCH and TOKENS follow from buckets= and width=: give those"
        raise ConfigError(message)
    padded = {BATCH: rows, TOKENS: rows * width, **sizes}
    missing = [axis.name for axis in stage.declaration.axes if axis not in padded]
    if missing:
        message = f"{stage.declaration.name} needs sizes= for {', '.join(missing)}: the most rows that a batch brings"
        raise ConfigError(message)
    return padded
