"""The decode runner: request-axis buckets, one captured graph each, eager where none fits."""

import functools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Unpack, final

import torch

from ..backends.base import Backend
from ..dataflow.axes import BATCH, TOKENS, Axis, Sizes
from ..dataflow.errors import BatchError, ConfigError, MissingSourceError, ReplayError
from ..dataflow.limits import Limits
from ..dataflow.planner import NONE
from ..dataflow.sizing import Sizer
from ..dataflow.sources import Side
from .capture import CaptureReport
from .captured import Captured, Order
from .decision import Decision, Tally
from .eager import EagerRunner
from .filler import Filler
from .gate import Gate
from .graphs import GraphSet
from .options import DecodeOptions, config_of
from .outputs import rows_each
from .parts import Parts
from .pool import Bindings, Phase, Seat
from .ranks.agreement import coordinator_of
from .ranks.group import Ranks
from .router import Router
from .runner import GraphRunner
from .shortcut import MISS, Shortcuts
from .stage import NO_BINDINGS, NO_LOANS, NO_PATTERNS, NO_SIZES, Lend, Stage, V, with_width
from .watching import Watch
from .widths import Widths


@final
class DecodeRunner(GraphRunner[V]):
    """Captures a step for buckets of requests, and replays the smallest that a batch fits.

    inputs: the declaration class. step: called with its view; returns tensors with one row a token. sizes: sizes of
    the fixed axes, and capacities of varying ones beside BATCH and TOKENS. settings: what `when=` of slots refers to.
    bind: tensors to adopt as buffers, by slot. absent: further patterns of absent optional slots to capture, each a
    collection of names; with none, only batches that bring every slot are replayed. lend: by slot, a call that gets
    its view before the step's code runs (warm-up, capture, eager runs), and None after it: so an object outside, such
    as a KV cache, is part of what is captured. carry: slots that the batch has computed right where a step runs
    eagerly, such as counts of padded rows; a replay has its own. output_rows: the axis that the rows of outputs follow,
    TOKENS or BATCH, or None to get outputs whole. one_width: whether the step can be run for `width` alone, so that
    batches of another are refused, not run eagerly. phase: of a pool, whose memory others use in theirs. state: the
    tensors beside slots, or parts of them, that captures and checks put back after each run of the step that nobody
    asked for; by default all that its operators write is found and put back. A large KV cache that a custom operator
    writes may be too large for that: give the parts that padded rows write, or `()`. ranks: those that run each step
    together, in one bucket. Options are those of `DecodeOptions`.
    """

    def __init__(
        self,
        inputs: type[V],
        step: Callable[[V], Any],
        *,
        sizes: Sizes = NO_SIZES,
        settings: object = None,
        bind: Bindings = NO_BINDINGS,
        absent: Sequence[Collection[str]] = NO_PATTERNS,
        lend: Mapping[str, Lend] = NO_LOANS,
        carry: tuple[str, ...] = (),
        output_rows: Axis | None = TOKENS,
        one_width: bool = False,
        phase: Phase | None = None,
        state: Iterable[torch.Tensor] | None = None,
        ranks: Ranks | None = None,
        backend: str | Backend = "auto",
        **options: Unpack[DecodeOptions],
    ) -> None:
        self.config = config = config_of(type(self), backend, options)
        self.name = type(self).__name__  # in events; a runner that is made of this one gives it its own
        relations = {TOKENS: BATCH * config.width}
        sizes = with_width(inputs, sizes, config.width)
        self.stage = Stage.of(inputs, step, backend, sizes, settings, relations, lend=lend, ranks=ranks, state=state)
        self.buckets, self._rows_each = config.ladder(), rows_each(output_rows, config.width)
        counts = ({BATCH: rows, TOKENS: rows * config.width} for rows in self.buckets.sizes)
        self._sizes = {one[BATCH]: self.stage.padded(one, "buckets= and width=") for one in counts}
        capacity = self._sizes[self.buckets.largest]
        self._carry, self._patterns = self.stage.captured_with(config, carry, absent)
        self._size = Sizer(self.stage.declaration, relations, capacity, BATCH)
        self._limits = Limits.of(self.stage.declaration, capacity)
        self._widths = Widths(self.stage.declaration, config.width, self.stage.sizes, only=one_width)
        self.coordinator = coordinator_of(self.stage.declaration, self.name, config, self._sizes, BATCH)
        self._tally, self._watch, self._gate = Tally(), Watch(self._watched), Gate(type(self).__name__)
        self._shortcuts: Shortcuts[V] | None = None
        self._filled: tuple[V | None, Captured | Decision, int] | None = None
        self._others = 0
        self.seat = Seat(self, self.stage, capacity, bind, phase, sharing=config.sharing)
        if phase is None:
            _ = self._router, self._eager  # what is wrong with them is said now

    @functools.cached_property
    def graphs(self) -> GraphSet[V]:  # pyright: ignore[reportIncompatibleMethodOverride] - a property that is kept
        """The captured buckets, and the buffers that they read; those of a pool are laid out when first asked for."""
        stage, config, buffers = self.stage, self.config, self.seat.buffers()
        sizes, mode = list(self._sizes.values()), config.error_mode
        filler = Filler(stage, buffers, config.lowering, sizes, modes=config.modes, error_mode=mode)
        return GraphSet(stage, buffers, filler, rows_each=self._rows_each, modes=config.modes)

    @functools.cached_property
    def _router(self) -> Router:
        graphs, declaration, capacity = self.graphs, self.stage.declaration, self.graphs.buffers.capacity
        asked = self.coordinator, self._eager.admit
        return Router(declaration, self.buckets, capacity, graphs, *asked, enabled=self.config.graphs)

    @functools.cached_property
    def _eager(self) -> EagerRunner[V]:
        return EagerRunner.beside(self.stage, self.graphs.buffers, self._carry)

    def capture(self) -> CaptureReport:
        """Capture every bucket: see `GraphRunner.capture`."""
        try:
            with self._gate.open():
                return self.graphs.capture(
                    Order.of(self.config, self._sizes, self._patterns, self.name, self.coordinator)
                )
        finally:
            self._debug()
            self._watched(bool(self._watch.watchers))

    @property
    def parts(self) -> Parts[V]:
        """What it is made of, for tools that look at runners."""
        made = self.name, self.config, self.stage, self._sizes, self._patterns, self.graphs, self._eager
        return Parts(*made, self.coordinator, self._size, self._tally, self._watch, self.seat)

    @property
    def watch(self) -> Watch:
        """Who is told of each step."""
        return self._watch

    def _watched(self, on: bool) -> None:  # noqa: FBT001 - as `Watch` calls it
        """Shortcuts tell no one of their steps; before `capture` there are none."""
        self._shortcuts = None if on else self._may_shorten()

    def _may_shorten(self) -> Shortcuts[V] | None:
        """Shortcuts, once there are graphs, and where no debug mode looks at steps."""
        if "graphs" not in vars(self) or self.config.modes:
            return None
        return Shortcuts.of(self.graphs, self._size, self._tally, self._router, self.coordinator, self._limits)

    def __call__(self, batch: Any, **side: Any) -> Any:
        """Run one step and return its outputs for the live rows, valid until the next replay.

        Raises BatchError where the batch does not fit its declaration, ReplayError before `capture`.
        """
        shortcuts = self._shortcuts
        if shortcuts is None:
            return super().__call__(batch, **side) if self._watch.watchers else self._step(batch, side)
        lock = self._gate.lock
        if lock.locked():
            raise self._gate.refusal()
        with lock:
            try:
                outputs = shortcuts.run(batch, side)
            except BaseException:  # in the middle of a step, which nobody may believe to be filled
                self._filled = None
                self.graphs.buffers.distrust()
                raise
            if outputs is not MISS:
                self._filled = None
                return outputs
            return self._learnt(shortcuts, batch, side)

    def _learnt(self, shortcuts: Shortcuts[V], batch: Any, side: Side) -> Any:
        """A whole step, so that the next one like it is a shortcut."""
        view, route, rows = self._fill(batch, side, whole=True)
        outputs = self._run(view, route, rows)
        if isinstance(route, Captured):
            shortcuts.learn(batch, side, route, self._size(batch, side)[:-1], rows)
        return outputs

    def _step(self, batch: Any, side: Side) -> Any:
        with self._gate.open():
            return self._run(*self._fill(batch, side, whole=True))

    def _fill_view(self, batch: Any, side: Side) -> V:
        """A bucket's padded slots, or exact ones on the eager path."""
        with self._gate.open():
            filled = self._filled = self._fill(batch, side, whole=False)
            self._others = self.graphs.buffers.turn.others
        view: V = filled[0]  # type: ignore[assignment] # made, where the fill is not a whole step's
        return view

    def inputs(self, bucket: int, absent: Collection[str] = ()) -> V:
        """A bucket's slots, all padded rows of them, for a producer that writes them itself.

        A batch then brings the live rows of such a slot, `view.input_ids[:rows]`, as its source: being where they
        belong, they are not copied, and the tail is reset as ever. Write on the stream that steps run on.
        Raises ConfigError where there is no graph for the bucket.
        """
        pattern = frozenset(absent)
        captured = self.graphs.captured.get((bucket, pattern))
        if captured is None:
            with self._gate.open():  # it may be captured now
                captured = self.graphs.get(bucket, pattern)
        if captured is None:
            without = f" without {', '.join(map(repr, sorted(pattern)))}" if pattern else ""
            message = (
                f"there is no graph of bucket {bucket}{without}: buckets are {self.buckets.sizes}, after capture()"
            )
            raise ConfigError(message)
        return self.graphs.view(captured, pattern)

    def _fill(self, batch: Any, side: Side, *, whole: bool) -> "tuple[V | None, Captured | Decision, int]":
        """The view, the graph that takes it or why it is run eagerly, and live rows.

        whole: the graph is replayed at once; it may do what is its part of the fill, and no one asks for the view.
        """
        before, self._filled = self._filled, None
        graphs = self.graphs
        start, router = self._begin(), self._router
        try:
            live = self._size(batch, side)
            if self._limits is not None:
                self._limits.check(batch, side)
            absent = self.stage.absent(batch, side) if self.stage.optional else NONE
            route = router.route(live, absent, batch, side)
            if isinstance(route, Decision):
                view = self._eager.fill(batch, **side)
                self._tally.unfit(route, self.name, start if start > graphs.filler.late else 0)
                return view, route, live[-1]
            ready = graphs.filler.fill(route.filling, batch, live[:-1], absent, side, whole=whole)
        except BatchError as error:
            self._size.explain(error, batch, side)
            try:
                return self._fill_other_width(batch, side, error, start)
            except BaseException as refused:
                self.coordinator.refuse(refused)
                if isinstance(refused, BatchError):
                    self._filled = before  # nothing was written: the view filled last still stands
                    graphs.buffers.turn.fills -= 1
                raise
        except BaseException as error:
            self.coordinator.refuse(error)
            raise
        shown = None if whole else self.stage.view(ready, batch)
        if start and start > graphs.filler.late:
            self._tally.timed(self._tally.buckets[route.rows], start)
        return shown, route, live[-1]

    def _begin(self) -> int:
        """A fill begins; when, if it is to be timed, else 0."""
        start = time.perf_counter_ns() if next(self._tally.turns) else 0
        self.graphs.buffers.turn.fills += 1
        self.graphs.filler.order()
        self.coordinator.begin()
        return start

    def _fill_other_width(self, batch: Any, side: Side, refused: BatchError, start: int) -> tuple[V, Decision, int]:
        """Fill eagerly what was refused, where its requests have another width than was captured and all else fits.

        Raises what refused it where that is not so, and BatchError where slots or the step depend on the width.
        """
        other = self._widths.of(batch, side)
        if other is None:
            raise refused
        width, live = other
        eager, own = self._eager, self._widths.decision(width)
        try:
            decision = self.coordinator.settle(own, live, lambda: eager.admit_width(width, batch, side))
            view = eager.fill_width(width, batch, side)
        except MissingSourceError:  # of any width, and the plainer thing to say
            raise
        except BatchError:
            raise refused from None
        self._tally.unfit(decision, self.name, start)
        return view, decision, live[-1]

    def _replay_view(self, view: V) -> Any:
        with self._gate.open():
            filled = self._filled
            if filled is None or filled[0] is not view:
                message = "this view was not filled last: a later fill has overwritten its slots"
                raise ReplayError(message)
            self.graphs.buffers.turn.check_others(self._others)
            try:
                self.graphs.filler.order()
                return self._run(*filled)
            except BaseException:  # what the step writes on the way may not be as it was filled
                self._filled = None
                raise

    def _run(self, view: V | None, route: Captured | Decision, rows: int) -> Any:
        return self.coordinator.run(self._run_here, view, route, rows)

    def _run_here(self, view: V | None, route: Captured | Decision, rows: int) -> Any:
        if isinstance(route, Decision):
            self.graphs.eager_runs += 1
            outputs = self._eager.run(view)  # type: ignore[arg-type] # an eager run has its view
            self._tally.fell_back(route, rows)
            return outputs
        outputs = self.graphs.replay(route, rows)
        self._tally.replayed(route.rows, rows)
        return outputs

    def decide(self, batch: Any, **side: Any) -> Decision:
        """The path that a batch would take, its bucket, and why. Raises as a call does, where sizes tell."""
        other = self._widths.of(batch, side)
        if other is not None and self.report is not None:
            return self._widths.decision(other[0])
        return self._router.decide(self._size(batch, side), self.stage.absent(batch, side), batch)
