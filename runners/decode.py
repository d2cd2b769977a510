"""The decode runner: request-axis buckets, one captured graph each, eager where none fits."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Unpack, final

import torch

from ..backends.base import Backend
from ..dataflow.axes import BATCH, TOKENS, Axis, Sizes
from ..dataflow.capabilities import Lowering
from ..dataflow.errors import BatchError, ConfigError, MissingSourceError, ReplayError
from ..dataflow.limits import Limits
from ..dataflow.plan import FillPlan
from ..dataflow.planner import NONE
from ..dataflow.sizing import Sizer
from ..dataflow.sources import Side
from .capture import CaptureReport
from .captured import Captured, Order
from .config import Options, RunnerConfig
from .decision import Decision, Tally
from .eager import EagerRunner
from .filler import Filler
from .graphs import GraphSet, patterns_of
from .outputs import rows_each
from .parts import Parts
from .router import Router
from .runner import Runner
from .shortcut import MISS, Shortcuts
from .stage import NO_BINDINGS, NO_LOANS, NO_PATTERNS, NO_SIZES, Lend, Stage, V, name_of, with_width
from .watching import Watch
from .widths import Widths


@final
class DecodeRunner(Runner[V]):
    """Captures a step for buckets of requests, and replays the smallest that a batch fits.

    inputs: the declaration class. step: called with its view; returns tensors with one row a token. sizes: sizes of
    the fixed axes, and capacities of varying ones beside BATCH and TOKENS. settings: what `when=` of slots refers to.
    bind: tensors to adopt as buffers, by slot. absent: further patterns of absent optional slots to capture, each a
    collection of names; with none, only batches that bring every slot are replayed. lend: by slot, a call that gets
    its view before the step's code runs (warm-up, capture, eager runs), and None after it: so an object outside, such
    as a KV cache, is part of what is captured. carry: slots that the batch has computed right where a step runs
    eagerly, such as counts of padded rows; a replay has its own. output_rows: the axis that the rows of outputs follow,
    TOKENS or BATCH, or None to get outputs whole. one_width: whether the step can be run for `width` alone, so that
    batches of another are refused, not run eagerly. Options are those of `RunnerConfig`.
    """

    def __init__(
        self,
        inputs: type[V],
        step: Callable[[V], Any],
        *,
        sizes: Sizes = NO_SIZES,
        settings: object = None,
        bind: Mapping[str, torch.Tensor] = NO_BINDINGS,
        absent: Sequence[Collection[str]] = NO_PATTERNS,
        lend: Mapping[str, Lend] = NO_LOANS,
        carry: tuple[str, ...] = (),
        output_rows: Axis | None = TOKENS,
        one_width: bool = False,
        backend: str | Backend = "auto",
        **options: Unpack[Options],
    ) -> None:
        self.config = config = RunnerConfig.of({"backend": name_of(backend), **options})
        self.name = type(self).__name__  # in events; a runner that is made of this one gives it its own
        relations = {TOKENS: BATCH * config.width}
        sizes = with_width(inputs, sizes, config.width)
        self.stage = Stage.of(inputs, step, backend, sizes, settings, relations, lend=lend)
        self.buckets = config.ladder()
        counts = ({BATCH: rows, TOKENS: rows * config.width} for rows in self.buckets.sizes)
        self._sizes = {one[BATCH]: self.stage.padded(one, "buckets= and width=") for one in counts}
        capacity = self._sizes[self.buckets.largest]
        each = rows_each(output_rows, config.width)
        buffers, debug = self.stage.allocate(capacity, bind), config.debug
        sizes_of, mode = list(self._sizes.values()), config.error_mode
        filler = Filler(self.stage, buffers, config.lowering, sizes_of, debug=debug, error_mode=mode)
        self.graphs = GraphSet(self.stage, buffers, filler, rows_each=each, debug=debug)
        self._patterns = patterns_of(absent)
        self._size = Sizer(self.stage.declaration, relations, capacity, BATCH)
        self._limits = Limits.of(self.stage.declaration, capacity)
        self._widths = Widths(self.stage.declaration, config.width, self.stage.sizes, only=one_width)
        self._router = Router(self.stage.declaration, self.buckets, capacity, self.graphs, enabled=config.graphs)
        self._eager = EagerRunner.beside(self.stage, buffers, carry)
        self._tally = Tally()
        self._watch = Watch(self._watched)
        self._shortcuts = self._may_shorten()
        self._filled: tuple[V | None, Captured | None, int] | None = None

    def capture(self) -> CaptureReport:
        """Capture every bucket, the largest first; with `lazy`, each when the first batch comes for it.

        Nothing is captured with `graphs` off. Raises CaptureError where buckets failed; the others are usable all the
        same, and `report` names both.
        """
        return self.graphs.capture(Order.of(self.config, self._sizes, self._patterns, self.name))

    @property
    def parts(self) -> Parts[V]:
        """What it is made of, for tools that look at runners."""
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
            self._watch,
        )

    @property
    def watch(self) -> Watch:
        """Who is told of each step."""
        return self._watch

    def _watched(self, on: bool) -> None:  # noqa: FBT001 - as `Watch` calls it
        """Shortcuts tell no one of their steps."""
        if self._shortcuts is not None:
            self._shortcuts.settle()
        self._shortcuts = None if on else self._may_shorten()

    def _may_shorten(self) -> Shortcuts[V] | None:
        """Shortcuts, where fills are part of graphs, and required sources tell all sizes."""
        if self.lowering != "in_graph" or self.config.debug or not self._size.required:
            return None
        holds = [self._router.same_fields] if self._router.decides_by_fields else []
        holds += [self._limits.allow] if self._limits is not None else []
        return Shortcuts(self.graphs, self._size, self._note, holds)

    def _note(self, captured: Captured, rows: int, times: int) -> None:
        """Note replays that were filled inside their graphs."""
        self._tally.replayed(captured.rows, rows, times)
        self.graphs.filler.lowered["in_graph"] += times

    @property
    def lowering(self) -> Lowering:
        """How fills are run."""
        return self.graphs.filler.lowering

    @property
    def report(self) -> CaptureReport | None:
        """What the capture came to, or None before it."""
        return self.graphs.report

    def __call__(self, batch: Any, **side: Any) -> Any:
        """Run one step and return its outputs for the live rows, valid until the next replay.

        Raises BatchError where the batch does not fit its declaration, ReplayError before `capture`.
        """
        shortcuts = self._shortcuts
        if shortcuts is None or side:
            return super().__call__(batch, **side)
        try:
            outputs = shortcuts.run(batch)
        except BaseException:  # in the middle of a step, which nobody may believe to be filled
            self._filled = None
            self.graphs.buffers.distrust()
            raise
        if outputs is not MISS:
            self._filled = None
            return outputs
        view, captured, rows = self._fill(batch, side, whole=True)
        outputs = self._run(view, captured, rows)
        if captured is not None:
            shortcuts.learn(batch, captured, self._size(batch, side)[:-1], rows)
        return outputs

    def _step(self, batch: Any, side: Side) -> Any:
        return self._run(*self._fill(batch, side, whole=True))

    def _fill_view(self, batch: Any, side: Side) -> V:
        """A bucket's padded slots, or exact ones on the eager path."""
        filled = self._filled = self._fill(batch, side, whole=False)
        view: V = filled[0]  # type: ignore[assignment] # made, where the fill is not a whole step's
        return view

    def inputs(self, bucket: int, absent: Collection[str] = ()) -> V:
        """A bucket's slots, all padded rows of them, for a producer that writes them itself.

        A batch then brings the live rows of such a slot, `view.input_ids[:rows]`, as its source: being where they
        belong, they are not copied, and the tail is reset as ever. Write on the stream that steps run on.
        Raises ConfigError where there is no graph for the bucket.
        """
        pattern = frozenset(absent)
        captured = self.graphs.get(bucket, pattern)
        if captured is None:
            without = f" without {', '.join(map(repr, sorted(pattern)))}" if pattern else ""
            message = (
                f"there is no graph of bucket {bucket}{without}: buckets are {self.buckets.sizes}, after capture()"
            )
            raise ConfigError(message)
        return self.graphs.view(captured, pattern)

    def _fill(self, batch: Any, side: Side, *, whole: bool) -> "tuple[V | None, Captured | None, int]":
        """The view, the graph that takes it or None for an eager run, and live rows.

        whole: the graph is replayed at once; it may do what is its part of the fill, and no one asks for the view.
        """
        before, self._filled = self._filled, None
        graphs = self.graphs
        graphs.fills += 1
        graphs.filler.order()
        try:
            live = self._size(batch, side)
            if self._limits is not None:
                self._limits.check(batch, side)
            absent = self.stage.absent(batch, side) if self.stage.optional else NONE
            route = self._router.route(live, absent, batch)
            if isinstance(route, Decision):
                view = self._eager.fill(batch, **side)
                self._tally.note_fallback(route, live[-1], self.name)
                return view, None, live[-1]
            ready = graphs.filler.fill(route.filling, batch, live[:-1], absent, side, whole=whole)
        except BatchError as error:
            self._size.explain(error)
            try:
                return self._fill_other_width(batch, side, error)
            except BatchError:
                self._filled = before  # nothing was written: the view filled last still stands
                graphs.fills -= 1
                raise
        return None if whole else self.stage.view(ready, batch), route, live[-1]

    def _fill_other_width(self, batch: Any, side: Side, refused: BatchError) -> tuple[V, None, int]:
        """Fill eagerly what was refused, where its requests have another width than was captured and all else fits.

        Raises what refused it where that is not so, and BatchError where slots or the step depend on the width.
        """
        other = self._widths.of(batch, side)
        if other is None:
            raise refused
        width, requests = other
        decision = self._widths.decision(width)
        try:
            view = self._eager.fill_width(width, batch, side)
        except MissingSourceError:  # of any width, and the plainer thing to say
            raise
        except BatchError:
            raise refused from None
        self._tally.note_fallback(decision, requests, self.name)
        return view, None, requests

    def _replay_view(self, view: V) -> Any:
        if self._filled is None or self._filled[0] is not view:
            message = "this view was not filled last: a later fill has overwritten its slots"
            raise ReplayError(message)
        self.graphs.filler.order()
        try:
            return self._run(*self._filled)
        except BaseException:  # what the step writes on the way may not be as it was filled
            self._filled = None
            raise

    def _run(self, view: V | None, captured: Captured | None, rows: int) -> Any:
        if captured is None:
            self.graphs.eager_runs += 1
            return self._eager.run(view)  # type: ignore[arg-type] # an eager run has its view
        outputs = self.graphs.replay(captured, rows)
        self._tally.replayed(captured.rows, rows)
        return outputs

    def decide(self, batch: Any, **side: Any) -> Decision:
        """The path that a batch would take, its bucket, and why. Raises as a call does, where sizes tell."""
        other = self._widths.of(batch, side)
        if other is not None and self.report is not None:
            return self._widths.decision(other[0])
        return self._router.decide(self._size(batch, side), self.stage.absent(batch, side), batch)

    def plan(
        self,
        bucket: int,
        absent: Collection[str] = (),
        in_place: Collection[str] = (),
        hosted: Collection[str] = (),
    ) -> FillPlan:
        """How one bucket is filled, for batches without some optional slots, or with some in place or on the host.

        ConfigError where there is no such bucket or slot.
        """
        return self.stage.plan(self._sizes, bucket, self.lowering, absent, in_place, hosted)

    def stats(self) -> Mapping[str, Any]:
        """Plain data: steps by path; each bucket's path, steps, live and padded rows, and waste; eager runs by reason.

        lowerings: fills by each lowering. detours: how often each reason led to a later lowering than the runner's.
        """
        filler = self.graphs.filler
        if self._shortcuts is not None:
            self._shortcuts.settle()
        return {**self._tally.as_data(), "lowerings": dict(filler.lowered), "detours": dict(filler.detours)}
