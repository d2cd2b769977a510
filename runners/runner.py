"""The base of all runners: one step from the batch to the outputs, and what can be asked of any runner."""

import abc
import time
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Final, Generic

import attrs
import torch

from ..dataflow import log
from ..dataflow.axes import Sizes
from ..dataflow.bucket import Absent
from ..dataflow.buffers import BufferTurn
from ..dataflow.errors import BatchError, ConfigError, ReplayError
from ..dataflow.sampling import sample_batch
from ..dataflow.sizing import Limits, Sizer
from ..dataflow.sources import Side
from ..dataflow.specialization import MISS, Run, Specialization, Specializations
from .bound import Holds, bind
from .captured import Captured
from .config import RunnerConfig
from .coordination import Coordinator, Live
from .decision import Decision, Path, Tally
from .eagerly import Eagerly
from .exclusive import Gate, Unique, opaque
from .graphs import GraphSet
from .parts import Parts
from .pool import Seat
from .stage import Stage, V
from .statistics import Statistics, statistics_of
from .watching import Watch


def empty_batch(parts: Parts[V], batch: Any, side: Side) -> tuple[Any, Side]:
    """A batch of zero live rows and its side arguments: a given one, or what the declaration makes, which is kept.

    BatchError where the given one has rows, ConfigError where the declaration does not tell how one looks.
    """
    if batch is not None:
        rows = max(parts.size(batch, side), default=0)
        if rows:
            raise BatchError(f"an idle rank's batch has no rows, and this one has {rows}: call the runner with it")
        return batch, side
    coordinator = parts.coordinator
    if coordinator.empty is None:
        stage = parts.stage
        live = {axis: stage.sizes[axis] if axis.fixed else 0 for axis in stage.declaration.axes}
        device, capabilities = stage.backend.device, stage.backend.capabilities
        try:
            coordinator.empty = sample_batch(stage.declaration, capabilities, live, torch.Generator(), device=device)
        except ConfigError as error:
            raise ConfigError(
                f"idle() cannot make a batch without rows, so give it one, idle(batch): {error}"
            ) from error
    return coordinator.empty.batch, {**coordinator.empty.side, **side}


_STALE: Final = "this view was not filled last: a later fill has overwritten its slots"


@attrs.define(eq=False)
class Filled(Generic[V]):
    """A filled step.

    Attributes:
        view: What the step sees; None where the graph is replayed at once, so that nobody asks for it.
        route: The graph that takes the batch, or why it is run eagerly.
        live: Live rows on each varying axis, and last those of the leading axis.
    """

    view: V | None
    route: Captured | Decision
    live: Live

    @property
    def rows(self) -> int:
        """Live rows on the leading axis."""
        return self.live[-1] if self.live else 0


@opaque
class Runner(Unique, abc.ABC, Generic[V]):
    """Fills a declaration's slots from a batch and runs a step on the view. Subclasses are final, or abstract.

    A call is a fill and a replay, and watchers are told of both. A function under torch.compile may call it.

    Attributes:
        is_whole: Whether its graphs are of whole steps, which then compute on the device, and show nobody the view.
        cuts: Whether outputs are cut to live rows.
    """

    is_whole: ClassVar[bool] = True
    cuts: bool = True

    def __init__(
        self,
        config: RunnerConfig,
        stage: Stage[V],
        size: Sizer,
        coordinator: Coordinator,
        *,
        capacity: Sizes,
        path: Path = "graph",
    ) -> None:
        """Keep what every runner has.

        Args:
            config: Its options.
            stage: The declaration, the backend and the step.
            size: Tells live sizes, and last those of the leading axis.
            coordinator: With the same runner of other ranks.
            capacity: The largest size of each axis.
            path: What a batch takes that fits a bucket.

        """
        self.config = config
        self.stage = stage
        self.coordinator = coordinator
        self.watch = Watch()
        self.name = type(self).__name__
        self._size = size
        self._limits = Limits.of(stage.declaration, capacity)
        self._axes = len(stage.declaration.varying)
        self._tally = Tally(path)
        self._gate = Gate(self.name)
        self._table = Specializations(stage.declaration, size)
        self._bound: Specializations | None = None
        self._filled: Filled[V] | None = None
        self._others = 0

    def __init_subclass__(cls, **options: Any) -> None:
        """Keep the compiler out of a subclass' own methods, too."""
        super().__init_subclass__(**options)
        opaque(cls)

    @property
    @abc.abstractmethod
    def parts(self) -> Parts[V]:
        """What it is made of, for tools that look at runners."""

    @property
    @abc.abstractmethod
    def _eager(self) -> Eagerly[V]:
        """What runs steps without a graph."""

    @property
    @abc.abstractmethod
    def _turn(self) -> BufferTurn | None:
        """The turn of the memory that was filled last; None where there is none yet."""

    @abc.abstractmethod
    def _route(self, live: Live, absent: Absent, batch: Any, side: Side) -> Captured | Decision:
        """The graph that takes a batch, or why it is run eagerly. Raises as a call does."""

    def _parts(
        self, sizes: Mapping[int, Sizes], patterns: Collection[Absent], graphs: GraphSet[V] | None, seat: Seat[V] | None
    ) -> Parts[V]:
        made = self.name, self.config, self.stage, sizes, patterns, graphs, self._eager
        return Parts(*made, self.coordinator, self._size, self._tally, self.watch, seat)

    @abc.abstractmethod
    def decide(self, batch: Any, **side: Any) -> Decision:
        """The path that a batch would take, its bucket, and why. Raises as a call does, where sizes tell."""

    def __call__(self, batch: Any, **side: Any) -> Any:
        """Run one step and return its outputs for the live rows, valid until the next replay.

        Raises:
            BatchError: The batch does not fit its declaration. Nothing was written.
            ReplayError: Nothing is captured yet, or the runner is in the middle of a step.

        """
        if self.watch.watchers:
            return self.replay(self.fill(batch, **side))
        lock, bound = self._gate.lock, self._bound
        if lock.locked():
            raise self._gate.refusal()
        with lock:
            if bound is not None:
                try:
                    outputs = bound.run(batch, side)
                except BaseException:
                    self._broke_off()
                    raise
                if outputs is not MISS:
                    self._filled = None
                    return outputs
            filled = self._fill(batch, side, whole=True)
            outputs = self.coordinator.run(self._run, filled)
            if bound is not None:
                self._learn(bound, batch, side, filled, whole=True)
            return outputs

    def fill(self, batch: Any, **side: Any) -> V:
        """Fill the inputs from a batch and return the view that the step sees.

        Raises as a call does; the buffers, the graphs and the batch are then as they were.
        """
        if self.watch.watchers:
            return self.watch.fill(lambda: self._fill_view(batch, side), batch, side)
        return self._fill_view(batch, side)

    def replay(self, view: V) -> Any:
        """Run the step on the view that was filled last. ReplayError where another fill has overwritten it."""
        if self.watch.watchers:
            return self.watch.replay(lambda: self._replay_view(view), view)
        return self._replay_view(view)

    def _fill_view(self, batch: Any, side: Side) -> V:
        bound = self._bound if self.stage.declaration.ranks is None else None  # ranks are told what each fill brings
        with self._gate.open():
            filled: Any = MISS
            if bound is not None:
                try:
                    filled = bound.run(batch, side, False)  # noqa: FBT003 - as it says there
                    if filled is not MISS:
                        return self._shown(filled)
                except BaseException:
                    self._broke_off()
                    raise
            filled = self._fill(batch, side, whole=False)
            if bound is not None:
                self._learn(bound, batch, side, filled, whole=False)
            return self._shown(filled)

    def _shown(self, filled: Filled[V]) -> V:
        """The view of a fill, which is the last one from now on."""
        turn = self._turn
        self._others = 0 if turn is None else turn.others
        self._filled = filled
        return filled.view  # type: ignore[return-value] # not of a whole step

    def _replay_view(self, view: V) -> Any:
        with self._gate.open():
            filled, turn = self._filled, self._turn
            if filled is None or filled.view is not view or turn is None:
                raise ReplayError(_STALE)
            turn.check_others(self._others)
            try:
                self._order()
                return self.coordinator.run(self._run, filled)
            except BaseException:  # what the step writes on the way may not be as it was filled
                self._filled = None
                raise

    def _fill(self, batch: Any, side: Side, *, whole: bool) -> Filled[V]:
        """The long way. whole: the step runs at once, and nobody asks for the view that its graph sees."""
        before, self._filled = self._filled, None
        eager, start = self._eager, time.perf_counter_ns() if next(self._tally.turns) else 0
        held = eager.held
        self._begin()
        self.coordinator.begin()
        try:
            live = self._size(batch, side)
            if self._limits is not None:
                self._limits.check(batch, side)
            absent = self.stage.absent(batch, side)
            filled = self._fill_by(self._route(live, absent, batch, side), batch, side, live, absent, whole=whole)
        except BaseException as error:
            if isinstance(error, BatchError):
                self._size.explain(error, batch, side)
                self._filled = before  # nothing was written: the view filled last still stands
                self._undo()
            self.coordinator.refuse(error)
            eager.held = held  # what grew for this batch goes again
            raise
        route = filled.route
        counted = route if isinstance(route, Decision) else route.rows
        self._tally.filled(counted, start if start > self._late else 0, self.name)
        return filled

    def _fill_by(
        self, route: Captured | Decision, batch: Any, side: Side, live: Live, absent: Absent, *, whole: bool
    ) -> Filled[V]:
        """Fill for one route: here for a step without a graph."""
        del absent, whole
        return Filled(self._eager.fill_sized(batch, live[: self._axes], side), route, live)

    @property
    def _late(self) -> int:
        """When something was last captured in the middle of a fill, whose time then says nothing of fills."""
        return 0

    def _begin(self) -> None:
        """A fill begins."""

    def _undo(self) -> None:
        """A fill that began was refused, and has written nothing."""

    def _order(self) -> None:
        """Let a replay wait for what was handed to other streams."""

    def _broke_off(self) -> None:
        """A step ended in the middle, which nobody may believe to be filled."""
        self._filled = None
        buffers = self._eager.buffers
        if buffers is not None:
            buffers.distrust()

    def _run(self, filled: Filled[V]) -> Any:
        """Run a filled step, and count it: here without a graph."""
        outputs = self._eager.run(filled.view)  # type: ignore[arg-type] # a step without a graph has its view
        self._tally.fell_back(filled.route, filled.rows)  # type: ignore[arg-type] # or why there is no graph
        return outputs

    def _learn(self, bound: Specializations, batch: Any, side: Side, filled: Filled[V], *, whole: bool) -> None:
        """Let the next batch like this one take the short way, of which other ranks are told where they run it too."""
        found = bound.latest(batch, side) if self._repeats(filled) else None
        if found is not None and not found.is_bound(whole=whole):
            run = self._short(found, filled, whole=whole)
            found.bound[whole] = self.coordinator.repeated(run, filled.live) if whole else run

    def _repeats(self, filled: Filled[V]) -> bool:
        """Whether a step may go as this one did: here one without a graph."""
        eager, route = self._eager, filled.route
        return isinstance(route, Decision) and eager.repeats and eager.held is not None

    def _short(self, found: Specialization, filled: Filled[V], *, whole: bool) -> Run:
        """Make a step, or a fill where it is not `whole`, that goes as this one did: here without a graph."""
        eager, ready, route, live, rows = self._eager, found.ready, filled.route, filled.live, filled.rows
        held, hosts, counted = eager.held, eager.hosts(), self._tally.reasons[route.why]  # type: ignore[union-attr] # see `_repeats`
        show, run = eager.stage.viewer(ready), eager.repeated()

        def finish(batch: Any) -> Any:
            outputs = run(show(batch))
            counted.steps += 1
            counted.live += rows
            return outputs

        return bind(
            found,
            finish if whole else lambda batch: Filled(show(batch), route, live),
            turn=held.buffers.turn,  # type: ignore[union-attr] # see `_repeats`
            times=counted.times,
            graphs=self.parts.graphs,
            hosts=hosts if hosts.possible else None,
            device=ready.device,
            holds=[lambda *_: eager.held is held, *self._holds()],
        )

    def _holds(self) -> list[Holds]:
        """What must be true of a batch beside its sources for its step to go as one before it."""
        return [] if self._limits is None else [self._limits.allow]

    @property
    def agreed(self) -> Decision | None:
        """What all ranks did in the last step that they agreed on, and which rank forced it; None where none did."""
        return self.coordinator.agreed

    def agree_ahead(self, batch: Any, **side: Any) -> None:
        """Tell the other ranks the sizes of the next step's batch, while this step still runs.

        The next call then finds what they told. Its batch must have these sizes, and be one that fills admit: the
        others go by it. Without other ranks, or where all get the same batches, nothing is done. Raises as `decide`.
        """
        coordinator = self.coordinator
        if coordinator.quiet:
            self.stage.declaration.check_side(side)
            return
        with coordinator.before():
            own, live = self.decide(batch, **side), self._size(batch, side)
        coordinator.ahead(own, live)

    def idle(self, batch: Any = None, **side: Any) -> Any:
        """Take part in the others' step without a request: zero live rows; the outputs for none.

        Where all ranks are idle nothing is run, and None returned. batch: one without rows; made as the declaration has
        it, where none is given. Raises as a call does; BatchError where the batch has rows, ConfigError where one must
        be given, because a field has no default.
        """
        parts, coordinator = self.parts, self.coordinator
        if coordinator.size == 1:
            parts.stage.declaration.check_side(side)
            return None
        with coordinator.before():
            empty, given = empty_batch(parts, batch, side)
            own, live = self.decide(empty, **given), parts.size(empty, given)
        return None if coordinator.idle(own, live) else self(empty, **given)

    def wait(self) -> None:
        """Wait until the device has done what was asked of it: the step that was called last, for one.

        With ranks for no longer than their `timeout`, because a captured collective waits for a lost rank for ever:
        RankError then names it, and the collectives of the group are aborted. All ranks call it as often.
        """
        backend = self.stage.backend
        self.coordinator.wait(backend.event(), backend.device)

    def stats(self) -> Statistics:
        """Its books as plain data: what was counted so far, and some of the times of its fills."""
        return statistics_of(self._tally, self.parts.graphs, self._eager.buffers, self.coordinator)

    def log_stats(self) -> None:
        """One event, `statistics`, with all of them."""
        log.info("statistics", runner=self.name, **self.stats())
