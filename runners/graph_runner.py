"""The base of runners that capture graphs: buckets, the route of a batch to one, and fills of it."""

import abc
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..backends.base import Backend
from ..dataflow.axes import Axis, Dim, Sizes
from ..dataflow.bucket import Absent
from ..dataflow.buffers import Bound, Buffers, BufferTurn
from ..dataflow.capabilities import Lowering
from ..dataflow.errors import RankError
from ..dataflow.plan import FillPlan
from ..dataflow.ready import Ready
from ..dataflow.sizing import Sizer
from ..dataflow.sources import Side
from ..dataflow.specialization import Run, Specialization, Specializations
from .arguments import checked_names, patterns_of
from .bound import Holds, bind
from .buckets import Buckets, Router
from .capture import CaptureReport
from .captured import Captured
from .config import CaptureOptions, DecodeOptions, ExtendOptions, RunnerConfig, StackOptions
from .coordination import Live
from .decision import Decision, Path
from .eagerly import Eagerly
from .filler import Filler
from .graphs import GraphSet, Order
from .parts import Parts
from .pool import Phase, Seat
from .ranks.agreement import coordinator_of
from .ranks.group import Ranks
from .runner import Filled, Runner
from .stage import Lend, Stage, V
from .watching import watchers_of

Finish = Callable[[Any], Any]
"""What follows the writes of a short way's fill: the rest of the step, given the batch; its outputs."""


class CaptureArguments(CaptureOptions, total=False):
    """What every runner that captures takes beside its declaration and its step: see `DecodeRunner`."""

    sizes: Sizes
    settings: object
    absent: Sequence[Collection[str]]
    lend: Mapping[str, Lend]
    carry: tuple[str, ...]
    phase: Phase | None
    state: Iterable[torch.Tensor] | None
    ranks: Ranks | None
    backend: str | Backend


class StackArguments(CaptureArguments, StackOptions, total=False):
    """Of a runner whose buckets are tokens."""


class DraftArguments(CaptureArguments, total=False):
    """Of a runner whose buckets are requests, and whose outputs are one row a request."""

    bind: Mapping[str, Bound]


class ExtendArguments(DraftArguments, ExtendOptions, total=False):
    """Of one that is made for a width."""

    output_rows: Axis | None


class DecodeArguments(DraftArguments, DecodeOptions, total=False):
    """Of one that has a width."""

    output_rows: Axis | None


class GraphRunner(Runner[V]):
    """A runner that captures graphs. Subclasses are final, or abstract."""

    _is_debugged = False

    def __init__(
        self,
        config: RunnerConfig,
        stage: Stage[V],
        buckets: Buckets,
        counts: Callable[[int], Sizes],
        given: Mapping[str, Any],
        *,
        said: str,
        leading: Collection[Axis],
        relations: Mapping[Axis, Dim],
        path: Path,
        rows_each: int | None = None,
    ) -> None:
        """Size the buckets, and take a seat in the pool.

        Args:
            config: The runner's options.
            stage: The declaration, the backend and the step.
            buckets: The rows that graphs are captured for.
            counts: Tells a bucket's padded sizes of BATCH and TOKENS from its rows.
            given: The arguments, of which those about captures are used here.
            said: The options that decide padded sizes, for an error.
            leading: The axes that the bucket decides; buckets are rows on the first.
            relations: Axes that follow from others.
            path: What a batch takes that fits a bucket.
            rows_each: Output rows for each row of the leading axis; None where outputs are handed out whole.

        """
        lead, *_ = leading
        self.buckets = buckets
        self._leading = tuple(leading)
        self._rows_each, self.cuts = rows_each, rows_each is not None
        self._sizes = {rows: stage.padded(counts(rows), said) for rows in buckets.sizes}
        self._capacity = self._sizes[buckets.largest]
        config.check(stage.backend.capabilities)
        self._carry = checked_names("carry", given.get("carry", ()))
        stage.declaration.carrying(self._carry)
        self._patterns = patterns_of(stage.declaration, given.get("absent", ()))
        size = Sizer(stage.declaration, relations, self._capacity, lead)
        coordinator = coordinator_of(stage.declaration, type(self).__name__, config, self._sizes, lead)
        super().__init__(config, stage, size, coordinator, capacity=self._capacity, path=path)
        phase = given.get("phase")
        self.seat = Seat(self.name, stage, self._capacity, given.get("bind", {}), phase, sharing=config.sharing)
        if phase is None:
            _ = self._router, self._eager  # what is wrong with them is said now

    def _graph_set(self, buffers: Buffers, filler: Filler[V]) -> GraphSet[V]:
        """The graphs over these buffers, none of them captured yet."""
        return GraphSet(self.stage, buffers, filler, rows_each=self._rows_each, modes=self.config.modes)

    def _viewer(self, ready: Ready) -> Callable[[Any], V]:
        """A call that makes the view of a batch that was filled."""
        return self.stage.viewer(ready)

    def _run_graph(self, filled: Filled[V], captured: Captured) -> Any:
        """Run a filled step by its graph; its outputs."""
        return self.graphs.replay(captured, filled.rows)

    @abc.abstractmethod
    def _finish(self, captured: Captured, ready: Ready, filled: Filled[V]) -> Finish:
        """Make what follows the writes of a step like this one, and counts it."""

    @property
    def _lowering(self) -> str:
        """How fills are run, as the options have it."""
        return self.config.lowering

    @functools.cached_property
    def graphs(self) -> GraphSet[V]:
        """The captured buckets, and the buffers that they read; those of a pool are laid out when first asked for."""
        config, buffers, sizes = self.config, self.seat.buffers(), list(self._sizes.values())
        made, mode = (self.stage, buffers, self._lowering, sizes), config.error_mode
        return self._graph_set(buffers, Filler(*made, modes=config.modes, error_mode=mode, table=self._table))

    @functools.cached_property
    def _router(self) -> Router:
        graphs, enabled = self.graphs, self.config.graphs
        known = self.stage.declaration, self.buckets, self._capacity, graphs.has, lambda: graphs.report
        return Router(*known, enabled=enabled, leading=self._leading, path=self._tally.path)

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
        return self._parts(self._sizes, self._patterns, self.graphs, self.seat)

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
        own, graphs, coordinator = self._router.decide(live, absent, batch), self.graphs, self.coordinator

        def admit() -> None:
            captured = graphs.get(own.bucket, absent)
            if captured is None:
                self._eager.admit(batch, live[: self._axes], side)
            else:
                captured.filling.bucket.admit(batch, live[:-1], absent, side)

        decision = coordinator.settle(own, live, admit)
        captured = graphs.get(decision.bucket, absent)
        if captured is not None or decision.bucket is None:
            return captured or decision
        if coordinator.quiet:  # a late capture that failed is decided anew
            return self._router.decide(live, absent, batch)
        missing = ", ".join(map(repr, sorted(absent)))
        raise RankError(f"ranks agreed on bucket {decision.bucket}, of which this one has no graph without {missing}")

    def _fill_by(
        self, route: Captured | Decision, batch: Any, side: Side, live: Live, absent: Absent, *, whole: bool
    ) -> Filled[V]:
        if isinstance(route, Decision):
            return super()._fill_by(route, batch, side, live, absent, whole=whole)
        ready = self.graphs.filler.fill(route.filling, batch, live[:-1], absent, side, whole=whole)
        if self.is_whole and whole:
            return Filled(None, route, live)
        if not self.is_whole:
            ready.compute_on_device(batch)
        return Filled(self._viewer(ready)(batch), route, live)

    def _run(self, filled: Filled[V]) -> Any:
        route = filled.route
        if isinstance(route, Decision):
            return super()._run(filled)
        outputs = self._run_graph(filled, route)
        self._tally.replayed(route.rows, filled.rows)
        return outputs

    def _repeats(self, filled: Filled[V]) -> bool:
        # where fields decide, the next batch like one that took no graph may take one
        by_fields = self._router.decides_by_fields
        return isinstance(filled.route, Captured) or (not by_fields and super()._repeats(filled))

    def _short(self, found: Specialization, filled: Filled[V], *, whole: bool) -> Run:
        captured, graphs, ready = filled.route, self.graphs, found.ready
        if isinstance(captured, Decision):
            return super()._short(found, filled, whole=whole)
        filler, live, filling = graphs.filler, filled.live, captured.filling
        if whole:
            finish = self._finish(captured, ready, filled)
            alone = filling.alone if filler.lowering == "fused" else None
            launch = None if alone is None else alone.replay
        else:
            show, launch = self._viewer(ready), functools.partial(filler.launched, filling)
            finish = lambda batch: Filled(show(batch), captured, live)  # noqa: E731 - as `_finish` makes one
        return bind(
            found,
            finish,
            turn=graphs.buffers.turn,
            times=self._tally.buckets[captured.rows].times,
            graphs=graphs,
            hosts=filler.hosts if filler.hosts.possible else None,
            launch=launch,
            device=() if self.is_whole else ready.device,
            holds=self._holds(),
        )

    def _holds(self) -> list[Holds]:
        router = self._router
        return [*super()._holds(), *([lambda batch, _: router.same_fields(batch)] if router.decides_by_fields else [])]
