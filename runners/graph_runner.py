"""The base of runners that capture graphs: buckets, the route of a batch to one, and fills of it."""

import abc
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..dataflow.axes import Axis, Dim, Sizes
from ..dataflow.bucket import Absent
from ..dataflow.buffers import Buffers
from ..dataflow.capabilities import Lowering
from ..dataflow.plan import FillPlan
from ..dataflow.ready import Ready
from ..dataflow.sizing import Sizer
from ..dataflow.sources import Side
from ..dataflow.specialization import Run, Specializations
from ..dataflow.turns import BufferTurn
from .bound import Holds, bind
from .buckets import Buckets
from .capture import CaptureReport
from .captured import Captured, Order
from .config import RunnerConfig
from .coordination import Live
from .decision import Decision, Path
from .eagerly import Eagerly
from .filler import Filler
from .graphs import GraphSet
from .parts import Parts
from .pool import Bindings, Phase, Seat
from .ranks.agreement import coordinator_of
from .router import Router
from .runner import Filled, Runner
from .stage import Stage, V
from .watching import watchers_of


class GraphRunner(Runner[V]):
    """A runner that captures graphs. Subclasses are final, or abstract."""

    _is_debugged = False

    def __init__(
        self,
        config: RunnerConfig,
        stage: Stage[V],
        buckets: Buckets,
        counts: Callable[[int], Sizes],
        *,
        said: str,
        leading: Collection[Axis],
        relations: Mapping[Axis, Dim],
        path: Path,
        absent: Sequence[Collection[str]],
        carry: tuple[str, ...],
        bind: Bindings,
        phase: Phase | None,
    ) -> None:
        """Size the buckets, and take a seat in the pool.

        Args:
            config: The runner's options.
            stage: The declaration, the backend and the step.
            buckets: The rows that graphs are captured for.
            counts: Tells a bucket's padded sizes of BATCH and TOKENS from its rows.
            said: The options that decide these, for an error.
            leading: The axes that the bucket decides; buckets are rows on the first.
            relations: Axes that follow from others.
            path: What a batch takes that fits a bucket.
            absent: Patterns of absent optional slots, beside none.
            carry: Slots that the batch has computed already where a step runs without a graph.
            bind: Tensors to adopt as buffers, by slot.
            phase: Of a pool.

        """
        lead, *_ = leading
        self.buckets = buckets
        self._leading = tuple(leading)
        self._sizes = {rows: stage.padded(counts(rows), said) for rows in buckets.sizes}
        self._capacity = self._sizes[buckets.largest]
        self._carry, self._patterns = stage.captured_with(config, carry, absent)
        size = Sizer(stage.declaration, relations, self._capacity, lead)
        coordinator = coordinator_of(stage.declaration, type(self).__name__, config, self._sizes, lead)
        super().__init__(config, stage, size, coordinator, capacity=self._capacity, path=path)
        self.seat = Seat(self.name, stage, self._capacity, bind, phase, sharing=config.sharing)
        if phase is None:
            _ = self._router, self._eager  # what is wrong with them is said now

    @abc.abstractmethod
    def _graph_set(self, buffers: Buffers, filler: Filler[V]) -> GraphSet[V]:
        """The graphs over these buffers, none of them captured yet."""

    @property
    @abc.abstractmethod
    def _is_whole(self) -> bool:
        """Whether the graph is the whole step, which then computes on the device, and nobody else sees the view."""

    @abc.abstractmethod
    def _viewer(self, ready: Ready) -> Callable[[Any], V]:
        """A call that makes the view of a batch that was filled."""

    @abc.abstractmethod
    def _run_graph(self, filled: Filled[V], captured: Captured) -> Any:
        """Run a filled step by its graph; its outputs."""

    @property
    def _lowering(self) -> str:
        """How fills are run, as the options have it."""
        return self.config.lowering

    @functools.cached_property
    def graphs(self) -> GraphSet[V]:
        """The captured buckets, and the buffers that they read; those of a pool are laid out when first asked for."""
        stage, config, buffers = self.stage, self.config, self.seat.buffers()
        sizes, mode = list(self._sizes.values()), config.error_mode
        made = stage, buffers, self._lowering, sizes
        return self._graph_set(buffers, Filler(*made, modes=config.modes, error_mode=mode, table=self._table))

    @functools.cached_property
    def _router(self) -> Router:
        asked = self.coordinator, self._eager.admit
        routed = self.stage.declaration, self.buckets, self._capacity, self.graphs
        return Router(*routed, *asked, enabled=self.config.graphs, leading=self._leading, path=self._tally.path)

    @functools.cached_property
    def _eager(self) -> Eagerly[V]:  # pyright: ignore[reportIncompatibleMethodOverride] - a property that is kept
        made = self.stage, self.name, self._size
        return Eagerly(*made, carry=self._carry, buffers=self.graphs.buffers, table=self._table)

    @property
    def _turn(self) -> BufferTurn:
        return self.graphs.buffers.turn

    @property
    def parts(self) -> Parts[V]:
        """What it is made of, for tools that look at runners."""
        made = self.name, self.config, self.stage, self._sizes, self._patterns, self.graphs, self._eager
        return Parts(*made, self.coordinator, self._size, self._tally, self.watch, self.seat)

    def capture(self) -> CaptureReport:
        """Capture every bucket, the largest first; with `lazy`, each when the first batch comes for it.

        Nothing is captured with `graphs` off. Raises CaptureError where buckets failed; the others are usable all the
        same, and `report` names both.
        """
        try:
            with self._gate.open():
                order = Order.of(self.config, self._sizes, self._patterns, self.name, self.coordinator)
                return self.graphs.capture(order)
        finally:
            self._debug()
            self._bound = self._bound_steps()

    def _debug(self) -> None:
        """Let the debug modes that are on watch each step from now on, unless they do."""
        modes = self.config.modes
        if modes and not self._is_debugged:
            self._is_debugged = True
            for watcher in watchers_of(self, modes):
                self.watch.add(watcher)

    def _bound_steps(self) -> Specializations | None:
        """None where other ranks are asked before each step, a debug mode looks at it, or fills go slot by slot."""
        if "graphs" not in vars(self) or self.config.modes or not self.coordinator.quiet:
            return None
        return None if self.lowering == "slot_by_slot" else self._table

    @property
    def report(self) -> CaptureReport | None:
        """What the capture came to, or None before it."""
        return self.graphs.report

    @property
    def lowering(self) -> Lowering:
        """How fills are run."""
        return self.graphs.filler.lowering

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
        foreign = self.graphs.buffers.foreign
        return self.stage.plan(self._sizes, bucket, self.lowering, absent, in_place, hosted, foreign)

    def decide(self, batch: Any, **side: Any) -> Decision:
        """The path that a batch would take, its bucket, and why. Raises as a call does, where sizes tell."""
        return self._router.decide(self._size(batch, side), self.stage.absent(batch, side), batch)

    @property
    def _late(self) -> int:
        return self.graphs.filler.late

    def _begin(self) -> None:
        graphs = self.graphs
        graphs.buffers.turn.fills += 1
        graphs.filler.order()

    def _undo(self) -> None:
        self.graphs.buffers.turn.fills -= 1

    def _order(self) -> None:
        self.graphs.filler.order()

    def _broke_off(self) -> None:
        super()._broke_off()
        self.graphs.buffers.distrust()

    def _route(self, live: Live, absent: Absent, batch: Any, side: Side) -> Captured | Decision:
        return self._router.route(live, absent, batch, side)

    def _fill_by(
        self, route: Captured | Decision, batch: Any, side: Side, live: Live, absent: Absent, *, whole: bool
    ) -> Filled[V]:
        if isinstance(route, Decision):
            return super()._fill_by(route, batch, side, live, absent, whole=whole)
        ready = self.graphs.filler.fill(route.filling, batch, live[:-1], absent, side, whole=whole)
        if self._is_whole and whole:
            return Filled(None, route, live)
        if not self._is_whole:
            ready.compute_on_device(batch)
        return Filled(self._viewer(ready)(batch), route, live)

    def _run(self, filled: Filled[V]) -> Any:
        route = filled.route
        if isinstance(route, Decision):
            return super()._run(filled)
        outputs = self._run_graph(filled, route)
        self._tally.replayed(route.rows, filled.rows)
        return outputs

    def _learn(self, bound: Specializations, batch: Any, side: Side, filled: Filled[V], *, whole: bool) -> None:
        captured, router = filled.route, self._router
        if isinstance(captured, Decision):
            if not router.decides_by_fields:  # else the next batch like this one may take a graph
                super()._learn(bound, batch, side, filled, whole=whole)
            return
        found = bound.latest(batch, side)
        if found is None:
            return

        def make() -> Run:
            graphs, hosts = self.graphs, self.graphs.filler.hosts
            finish, launch = self._bound_run(captured, found.ready, filled, whole=whole)
            return bind(
                found,
                finish,
                turn=graphs.buffers.turn,
                times=self._tally.buckets[captured.rows].times,
                graphs=graphs,
                hosts=hosts if hosts.possible else None,
                launch=launch,
                compute=found.ready.compute_on_device if found.ready.device and not self._is_whole else None,
                holds=self._holds(),
            )

        self._keep(found, make, filled.live, whole=whole)

    def _bound_run(
        self, captured: Captured, ready: Ready, filled: Filled[V], *, whole: bool
    ) -> tuple[Callable[[Any], Any], Callable[[], object] | None]:
        """What follows the writes of a bound fill, and the launch that is part of it."""
        show, live, run = self._viewer(ready), filled.live, self._run
        launch = functools.partial(self.graphs.filler.launched, captured.filling)
        if whole:
            return lambda batch: run(Filled(show(batch), captured, live)), launch
        return lambda batch: Filled(show(batch), captured, live), launch

    def _holds(self) -> list[Holds]:
        router = self._router
        return [*super()._holds(), *([lambda batch, _: router.same_fields(batch)] if router.decides_by_fields else [])]
