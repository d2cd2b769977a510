"""The base of all runners: one step from the batch to the outputs, and the queries that every runner answers."""

import abc
import functools
import reprlib
import time
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Final, Generic

import attrs
import torch
from torch.autograd import profiler

from ...dataflow import log
from ...dataflow.axes import Axis, Live, Sizes
from ...dataflow.errors import BatchError, ConfigError, ReplayError, kind_text
from ...dataflow.fill.kinds import KindTable
from ...dataflow.inputs import Inputs, V
from ...dataflow.plan import Absent
from ...dataflow.sizing import Sizer, limits_of
from ...dataflow.sources import NO_SIDE, Side
from ...dataflow.views import ViewInfo
from .config import KeywordSignature, RunnerConfig
from .current import StepLock, Unique, opaque
from .graphs import Captured, GraphSet, ReadBatch, Reader
from .hooks import Coordinator, Watch
from .outputs import Out, own_copy
from .pool import Phase
from .routes import EagerRoutes, Route
from .sampling import Sample, sample_batch
from .selection import BucketKey, Variant
from .stage import Stage
from .statistics import CaptureReport, Decision, MemoryAccount, PathName, Statistics, Tally, human_bytes, with_text_keys

_NOT_LAST: Final = (
    "this view was not filled last: a later fill has overwritten its slots, or it is a part or a copy of a view; "
    "replay what the last fill() returned"
)


@attrs.define(eq=False)
class Filled(Generic[V]):
    """A step after its fill and before its replay.

    Attributes:
        view: The view for the caller and the step.
        route: The route that runs the step.
        live: Rows on each varying axis, and last those of the leading axis.
    """

    view: V
    route: Route[V]
    live: Live


ONE_RUNNER: Final = "a runner, or of a ModeRunner one of its modes"
"""What tools expect that take a single runner."""


@opaque
class Runner(Unique, abc.ABC, Generic[V, Out]):
    """Fills a declaration's slots from a batch and runs a step on the view. Subclasses are final, or abstract.

    A call is a fill and a replay, and watchers see both. A function under torch.compile may call it.

    Attributes:
        config: Its options.
        stage: The declaration, the backend and the step.
        coordinator: Coordinates it with the same runner of other ranks.
        is_whole: Whether its graphs are of whole steps. These graphs also run functions of slots on the device, and a
            call needs no view.
        cuts: Whether outputs are cut to live rows.
        graphs: The captured buckets, and the buffers that they read. None if the runner captures nothing.
        eager: Runs the batches that no graph takes.
        step_lock: Lets one step in at a time.
        limits: The largest values of slots' host data.
        phase: Its phase in the pool that it was given, or None without a pool.
        sizes: Each bucket's padded sizes, in the order of choice.
        patterns: Patterns of absent slots that graphs are captured for.
        axes: The axes on which buckets have sizes of their own, in the order of these sizes.
        variants: The values of fields that graphs are captured for.
        size: Reads a batch's live sizes, and last those of the leading axis.
        tally: Counts steps.
    """

    __signature__: ClassVar = KeywordSignature()
    is_whole: ClassVar[bool] = True
    cuts: bool = True
    graphs: GraphSet[V] | None = None
    eager: EagerRoutes[V]
    phase: Phase | None = None

    def __init__(
        self,
        config: RunnerConfig,
        stage: Stage[V],
        size: Sizer,
        coordinator: Coordinator,
        *,
        capacity: Sizes,
        path: PathName = "graph",
    ) -> None:
        """Set up the parts that every runner has.

        Args:
            config: The options.
            stage: The declaration, the backend and the step.
            size: Reads live sizes.
            coordinator: Coordinates it with other ranks.
            capacity: The largest size of each axis.
            path: The path of a batch that fits a bucket.
        """
        self.config = config
        self.stage = stage
        self.coordinator = coordinator
        self._is_alone = coordinator.alone
        self._owned = config.outputs == "copy"
        self.watch = Watch()
        self.name = type(self).__name__
        self.size = size
        self.limits = limits_of(stage.declaration, capacity)
        self.tally = Tally(path)
        self.step_lock = StepLock(self.name)
        self._table = KindTable(stage.declaration, stage.sizes, size)
        self._reader = Reader(stage, self._table, size)
        self._filled: Filled[V] | None = None
        self._others = 0
        self._is_checked = bool(self.limits or stage.declaration.checked_fields)
        self.sizes: Mapping[BucketKey, Sizes] = {}
        self.patterns: Collection[Absent] = ()
        self.axes: tuple[Axis, ...] = ()
        self.variants: tuple[Variant, ...] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Keep torch.compile from tracing the methods of a subclass, too."""
        super().__init_subclass__(**options)
        opaque(cls)

    def __repr__(self) -> str:
        """Return one line. It does not lay out the memory of a pool."""
        stage = self.stage
        state = "no memory yet"
        if self.phase is None or "graphs" in vars(self):
            stats = self.stats()
            state = human_bytes(stats["memory"]["total"])
            capture = stats["capture"]
            if self.sizes:
                failed = f", {len(capture['failed'])} failed" if capture["failed"] else ""
                made = f"{len(capture['buckets']) or 'none'} of {len(self.sizes)} captured{failed}"
                state = f"{made if self.config.graphs else 'graphs off'}, {state}"
        buckets = f"buckets {reprlib.repr([*self.sizes])}, " if self.sizes else ""
        return f"<{self.name} of {stage.declaration.name} on {stage.backend.name}: {buckets}{state}>"

    @abc.abstractmethod
    def _route(self, call: ReadBatch) -> Route[V]:
        """Choose the route of a batch. Raises the errors of a call."""

    @abc.abstractmethod
    def _decide(self, call: ReadBatch) -> Decision:
        """Return the path of a batch. Raise ReplayError before anything is captured."""

    def decide(self, batch: Any, **side: Any) -> Decision:
        """Return the path that a batch would take, its bucket, and why. Nothing is run.

        Args:
            batch: The batch, in any form that a call accepts.
            side: Side arguments, by name.

        Raises:
            BatchError: No source has a size, or sources differ in it.
            ReplayError: Nothing is captured yet.
        """
        decision, _ = self.decide_alone(batch, side)
        self.size.compare(batch, side)
        return decision

    def decide_alone(self, batch: Any, side: Side) -> tuple[Decision, Live]:
        """Return this rank's own decision for a batch, and the batch's live sizes.

        Sources are not compared: the fill does that.
        """
        call = self._reader.read(batch, side)
        return self._decide(call), call.live

    def __call__(self, batch: Any, **side: Any) -> Out:
        """Run one step and return its outputs for the live rows, valid until the next replay.

        Outputs lie in the graph's memory, and the next call overwrites them: use them before it, or keep a `clone()`.
        With the option `outputs="copy"` they are yours. With `debug=True` a later use raises StaleOutputError.

        Args:
            batch: A mapping or an object with a value for each copied slot and field.
            side: Side arguments, by name: what slots with `source=side(...)` read.

        Raises:
            BatchError: The batch does not fit its declaration. Nothing was written.
            ReplayError: Nothing is captured yet, or the runner is in the middle of a step.
        """
        if self.watch.watchers:
            return self.replay(self.fill(batch, **side))
        lock = self.step_lock.lock
        if lock.locked():
            raise self.step_lock.refusal()
        with lock:
            is_profiled = profiler._is_profiler_enabled  # noqa: SLF001 - torch has no public name
            if is_profiled:
                call, route = profiler.record_function("slotgraph:fill")(self._fill)(batch, side, whole=True)
            else:
                call, route = self._fill(batch, side, whole=True)
            self._filled = None
            view = route.viewer(batch, call.live) if route.needs_view else None
            if is_profiled:
                run = profiler.record_function(route.range_name)(self.coordinator.run)
                outputs: Out = run(route.run, view, call.live)
            elif self._is_alone:
                outputs = route.run(view, call.live)
            else:
                outputs = self.coordinator.run(route.run, view, call.live)
            return own_copy(outputs) if self._owned else outputs

    def fill(self, batch: Any, **side: Any) -> V:
        """Fill the inputs from a batch and return the view that the step sees, valid until the next fill.

        Args:
            batch: The batch, in any form that a call accepts.
            side: Side arguments, by name.

        Raises:
            BatchError: The batch does not fit its declaration. Nothing was written.
            ReplayError: Nothing is captured yet, or the runner is in the middle of a step.
        """
        if self.watch.watchers:
            return self.watch.fill(lambda: self._fill_view(batch, side), batch, side)
        return self._fill_view(batch, side)

    def replay(self, view: V) -> Out:
        """Run the step on the view that was filled last, and return its outputs for the live rows.

        Args:
            view: What `fill` returned.

        Raises:
            ReplayError: It is not that view, or the runner is in the middle of a step.
        """
        if self.watch.watchers and self._why_no_view(view) is None:
            return self.watch.replay(lambda: self._replay_view(view), view)
        return self._replay_view(view)

    def _fill_view(self, batch: Any, side: Side) -> V:
        with self.step_lock.open():
            fill = self._fill
            if profiler._is_profiler_enabled:  # noqa: SLF001 - as above
                fill = profiler.record_function("slotgraph:fill")(fill)
            call, route = fill(batch, side, whole=False)
            view = route.viewer(batch, call.live)
            use = route.filler.buffers.use
            self._others = use.others
            self._filled = Filled(view, route, call.live)
            return view

    def _replay_view(self, view: V) -> Out:
        with self.step_lock.open():
            filled = self._filled
            if filled is None or filled.view is not view:
                raise ReplayError(self._why_no_view(view) or _NOT_LAST)
            filler = filled.route.filler
            if filler.buffers.use.others != self._others:
                raise ReplayError(
                    "another runner of the same pool was filled since, or another mode, in memory that both use: "
                    "replay a view before the next phase begins, or declare that the phases overlap"
                )
            try:
                filler.order()
                run = filled.route.run
                if profiler._is_profiler_enabled:  # noqa: SLF001 - as above
                    run = profiler.record_function(filled.route.range_name)(run)
                outputs: Out = self.coordinator.run(run, view, filled.live)
                return own_copy(outputs) if self._owned else outputs
            except BaseException:  # the step may have overwritten filled slots
                self._filled = None
                raise

    def graph_of(self, view: Any) -> Captured | None:
        """Return the graph that replays a view, or None if the step runs eagerly or `replay` refuses the view."""
        filled = self._filled
        if filled is None or filled.view is not view or filled.route.filler.buffers.use.others != self._others:
            return None
        return filled.route.captured

    def _why_no_view(self, view: Any) -> str | None:
        """Return why an object is no view of this runner, or None if it is one."""
        info = getattr(view, "_slotgraph_view", None)
        if not isinstance(info, ViewInfo):
            came = f"a batch, {kind_text(view)}" if isinstance(view, Inputs) else kind_text(view)
            return f"replay() takes what fill() returned, got {came}: call runner(batch), or replay(fill(batch))"
        if info.declaration is self.stage.declaration:
            return None
        return f"this view was not filled last: another runner filled it, of {info.declaration.name}; replay it there"

    def _fill(self, batch: Any, side: Side, *, whole: bool) -> tuple[ReadBatch, Route[V]]:
        """Fill from a batch by its route. whole: Whether the step runs next, and needs no view."""
        before = self._filled
        self._filled = None
        start = time.perf_counter_ns() if next(self.tally.sampled) else 0
        coordinator = self.coordinator
        if not self._is_alone:
            coordinator.begin()
        eager = self.eager
        earlier = eager.filler
        try:
            call = self._reader.read(batch, side)
            if self._is_checked:
                self.check_limits(batch, side)
                self.stage.declaration.check_fields(batch)
            route = self._route(call)
            route.filling.fill(call, whole=whole)
        except BaseException as error:
            if isinstance(error, BatchError):
                self.size.explain(error, batch, side)
                self._filled = before  # nothing was written: the last view is still valid
            coordinator.refuse(error)
            eager.restore(earlier)  # return to the memory before it grew for this batch
            raise
        if start or route.decision is not None:
            late = route.filler.late
            self.tally.filled(route.counts, route.decision, start if start > late else 0, self.name)
        return call, route

    def check_limits(self, batch: Any, side: Side = NO_SIDE, slots: Collection[str] | None = None) -> None:
        """Raise BatchError if host data exceeds the limit of a slot. slots: The slots to check, or None for all."""
        for limit in self.limits:
            if slots is None or limit.name in slots:
                limit.check(batch, side)

    @property
    def agreed(self) -> Decision | None:
        """The decision of all ranks in the last step that they agreed on, and the rank that forced it, or None."""
        return self.coordinator.agreed

    def agree_ahead(self, batch: Any, **side: Any) -> None:
        """Send the other ranks the sizes of the next step's batch, while this step still runs.

        The next call uses these sizes, so its batch must have them and must be one that a fill accepts. It does nothing
        without other ranks, or if all ranks get the same batches.

        Args:
            batch: The next step's batch, or one with tensors of the same shapes.
            side: Side arguments, by name.

        Raises:
            BatchError: No source has a size.
            RankError: Another rank failed.
        """
        coordinator = self.coordinator
        if coordinator.quiet:
            self.stage.declaration.check_side(side)
            return
        with coordinator.preparing():
            own, live = self.decide_alone(batch, side)
        coordinator.agree_ahead(own, live)

    def idle(self, batch: Any = None, **side: Any) -> Out | None:
        """Take part in the other ranks' step without a request, and return outputs without rows.

        If all ranks are idle, nothing is run, and None is returned.

        Args:
            batch: One without rows. By default it is made from the declaration.
            side: Side arguments, by name.

        Raises:
            BatchError: The batch has rows.
            ConfigError: A field has no default, so a batch must be given.
        """
        coordinator = self.coordinator
        if coordinator.size == 1:
            self.stage.declaration.check_side(side)
            if batch is not None:
                self._empty(batch, side)  # refuses one with rows
            return None
        with coordinator.preparing():
            empty, given = self._empty(batch, side)
            own, live = self.decide_alone(empty, given)
        return None if coordinator.idle(own, live) else self(empty, **given)

    def _empty(self, batch: Any, side: Side) -> tuple[Any, Side]:
        """Return an idle rank's batch and side arguments: the given ones, or cached ones that are made once."""
        if batch is None:
            return self._sample.batch, {**self._sample.side, **side}
        rows = max(self.size(batch, side), default=0)
        if rows:
            raise BatchError(f"an idle rank's batch has no rows, and this one has {rows}: call the runner with it")
        return batch, side

    @functools.cached_property
    def _sample(self) -> Sample:
        """A batch without rows, for an idle rank. Raises ConfigError if a field has no default."""
        declaration = self.stage.declaration
        backend = self.stage.backend
        live = {axis: self.stage.sizes[axis] if axis.fixed else 0 for axis in declaration.axes}
        try:
            return sample_batch(declaration, backend.capabilities, live, torch.Generator(), device=backend.device)
        except ConfigError as error:
            raise ConfigError(
                f"idle() cannot make a batch without rows, so give it one, idle(batch): {error}"
            ) from error

    def wait(self) -> None:
        """Wait until the device has done all its work, such as the last step.

        With ranks it waits for at most their `timeout`, because a captured collective waits for a lost rank for ever.
        All ranks must call it equally often.

        Raises:
            RankError: A rank is lost. The error names it, and the group's collectives on the device are aborted.
        """
        backend = self.stage.backend
        self.coordinator.wait(backend.event(), backend.device)

    def stats(self) -> Statistics:
        """Return counts of steps, padding, fills, memory and captures so far, as plain data.

        Another thread may call it while steps run.
        """
        graphs = self.graphs
        own = self.eager.buffers
        nbytes = 0 if own is None else own.nbytes
        memory = MemoryAccount(inputs=nbytes)
        report = CaptureReport()
        made = 0
        eager = 0
        lowered = dict[str, int]()
        buffers = graphs.buffers if graphs else own
        if graphs is not None:
            memory = graphs.memory()
            report = graphs.report or report
            made = len(graphs.captured)
            eager = 0 if own is graphs.buffers else nbytes
            lowered = dict(graphs.filler.lowered)
        return {
            **self.tally.as_data(),
            "lowerings": lowered,
            "again": {} if buffers is None else buffers.again,
            "memory": {**attrs.asdict(memory), "eager": eager, "total": memory.total + eager},
            "capture": {
                "buckets": list(report.captured),
                "failed": dict(report.failed),
                "graphs": made,
                "seconds": report.seconds,
                "driver": report.driver,
                "functions": dict(report.functions),
            },
            "ranks": self.coordinator.as_data(),
        }

    def log_stats(self) -> None:
        """Log `stats()` as one event, `statistics`."""
        log.info("statistics", runner=self.name, **with_text_keys(self.stats()))
