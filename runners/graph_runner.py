"""The base of runners that capture graphs: buckets, the route of a batch to one, and fills of it."""

import abc
import functools
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Required, TypedDict

import attrs
import torch

from ..backends.base import Backend
from ..dataflow.axes import BATCH, Axis, Sizes
from ..dataflow.bucket import Absent
from ..dataflow.buffers import Bound, Buffers
from ..dataflow.capabilities import Lowering
from ..dataflow.computation import field_of
from ..dataflow.errors import ConfigError, RankError, ReplayError
from ..dataflow.explain import check_named
from ..dataflow.plan import FillPlan, Pattern, plan_fill
from ..dataflow.ready import Ready
from ..dataflow.sizing import Sizer
from ..dataflow.sources import Side, look_up
from ..dataflow.specialization import Run, Specialization, Specializations
from .capture import Captured
from .config import (
    Buckets,
    RunnerConfig,
    Wanted,
    checked_names,
    patterns_of,
)
from .eagerly import Eagerly
from .graphs import Filler, GraphSet, Order
from .hooks import Live, watchers_of
from .pool import Phase, Seat
from .ranks.agreement import coordinator_of
from .ranks.group import Ranks
from .runner import Filled, Holds, Runner, bind
from .stage import Lend, Stage, V
from .statistics import CaptureReport, Decision, Path, Why

Finish = Callable[[Any], Any]
"""What follows the writes of a short way's fill: the rest of the step, given the batch; its outputs."""


class CaptureArguments(TypedDict, total=False):
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
    buckets: tuple[int, ...] | list[int]
    max_batch: int
    max_waste: float
    warmups: int
    progress: bool
    debug: Wanted
    sharing: bool | None
    graphs: bool
    lowering: str
    lazy: bool
    error_mode: str | None


class StackArguments(CaptureArguments, total=False):
    """Of a runner whose buckets are tokens, up to `max_tokens`."""

    max_tokens: int


class DraftArguments(CaptureArguments, total=False):
    """Of a runner whose buckets are requests, and whose outputs are one row a request."""

    bind: Mapping[str, Bound]


class ExtendArguments(DraftArguments, total=False):
    """Of one over the `width` tokens that each request brings after a verify."""

    width: Required[int]
    output_rows: Axis | None


class DecodeArguments(DraftArguments, total=False):
    """Of one whose buckets are requests of `width` tokens."""

    width: int
    output_rows: Axis | None


class Router:
    """Decides for one runner which bucket a batch goes to, or why it runs eagerly.

    enabled: whether anything is captured at all. leading: axes that the bucket decides. path: what a batch takes that
    fits one.
    """

    def __init__(
        self,
        graphs: GraphSet[Any],
        buckets: Buckets,
        capacity: Sizes,
        *,
        enabled: bool,
        leading: Collection[Axis],
        path: Path,
    ) -> None:
        declaration = graphs.stage.declaration
        self._graphs, self._buckets, self._enabled = graphs, buckets, enabled
        self._fits = {rows: Decision(path, rows, "fits", f"bucket {rows} fits") for rows in buckets.sizes}
        self._counted = "rows" if BATCH in leading else "tokens"
        own = [(place, axis) for place, axis in enumerate(declaration.varying) if axis not in leading]
        self._limits = [(place, axis, capacity[axis]) for place, axis in own]
        fields = declaration.fields.items()
        self._fields = {name: field_of(None, name, seen) for name, seen in fields if seen is not attrs.NOTHING}

    def decide(self, live: Live, absent: Absent, batch: Any) -> Decision:
        """The path of a batch with these live sizes, the leading axis last. ReplayError before anything is captured."""
        graphs, buckets, rows = self._graphs, self._buckets, live[-1]
        report, bucket = graphs.report, buckets.fit(rows)
        over = next(((live[place], axis, most) for place, axis, most in self._limits if live[place] > most), None)
        why: Why
        if report is None:
            raise ReplayError("nothing is captured yet: call capture() first")
        if not self._enabled:
            why, reason = "disabled", "graphs are switched off, by graphs=False"
        elif over is not None:
            why, reason = "too_large", "{} rows on {} are more than the {} of every bucket".format(*over)
        elif bucket is None:
            why = "too_large"
            reason = f"{rows} {self._counted} are more than the largest bucket, {buckets.largest}"
        elif (share := buckets.waste(rows, bucket)) > buckets.max_waste:
            why = "waste"
            reason = f"bucket {bucket} would be {share:.0%} padding, over the limit of {buckets.max_waste:.0%}"
        elif not graphs.has(bucket, absent):
            names, failed = ", ".join(map(repr, sorted(absent))), report.failed.get(bucket)
            why = "absent" if failed is None else "not_captured"
            reason = failed or f"no graph was captured without {names}; pass absent=[{{{names}}}] to capture one"
        elif name := self._differing(batch):
            came, seen = _brief(look_up(batch, name)), self._fields[name]
            why, reason = "field_differs", f"field {name!r} is {came}, not {seen!r}, with which graphs were captured"
        else:
            return self._fits[bucket]
        return Decision("eager", None, why, reason)

    @property
    def decides_by_fields(self) -> bool:
        """Whether some fields must have the values that graphs saw."""
        return bool(self._fields)

    def same_fields(self, batch: Any) -> bool:
        """Whether all of them do."""
        return not self._differing(batch)

    def _differing(self, batch: Any) -> str:
        """The first field whose value in the batch is not the one that graphs saw, or nothing."""
        for name, captured in self._fields.items():
            value = look_up(batch, name)
            if value is not None and not _same(value, captured):
                return name
        return ""


def _same(value: Any, captured: Any) -> bool:
    """Whether two field values are one; a tensor or an array, of which `==` makes another, is never the same."""
    return value is captured or (not hasattr(value, "shape") and bool(value == captured))


def _brief(value: Any) -> str:
    """A field's value in a sentence; of a tensor or an array its kind alone, which asks no device."""
    return type(value).__name__ if hasattr(value, "shape") else reprlib.repr(value)


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
            path: What a batch takes that fits a bucket.
            rows_each: Output rows for each row of the leading axis; None where outputs are handed out whole.

        """
        lead, *_ = leading
        self.buckets = buckets
        self._leading = tuple(leading)
        self._rows_each, self.cuts = rows_each, rows_each is not None
        sizes = {rows: stage.padded(counts(rows), said) for rows in buckets.sizes}
        self._capacity = sizes[buckets.largest]
        config.check(stage.backend.capabilities)
        self._carry = checked_names("carry", given.get("carry", ()))
        stage.declaration.carrying(self._carry)
        patterns = patterns_of(stage.declaration, given.get("absent", ()))
        size = Sizer(stage.declaration, stage.relations, self._capacity, lead)
        coordinator = coordinator_of(stage.declaration, type(self).__name__, config, sizes, lead)
        super().__init__(config, stage, size, coordinator, capacity=self._capacity, path=path)
        self._sizes, self._patterns = sizes, patterns
        phase = given.get("phase")
        self.seat: Seat[V] = Seat(  # pyright: ignore[reportIncompatibleVariableOverride] - never None here
            self.name, stage, self._capacity, given.get("bind", {}), phase, sharing=config.sharing
        )
        if phase is None:
            _ = self._router, self._eager  # what is wrong with them is said now

    def _captures(self, buffers: Buffers) -> Mapping[str, Any]:
        """What of a step is captured, as arguments of `GraphSet`: here the whole step."""
        del buffers
        return {}

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
    def graphs(self) -> GraphSet[V]:  # pyright: ignore[reportIncompatibleMethodOverride] - a property that is kept
        """The captured buckets, and the buffers that they read; those of a pool are laid out when first asked for."""
        config, stage, buffers = self.config, self.stage, self.seat.buffers()
        made, modes = (stage, buffers, self._lowering, [*self._sizes.values()]), config.modes
        filler = Filler(*made, modes=modes, error_mode=config.error_mode, table=self._table)
        order = Order(config, self._sizes if config.graphs else {}, self._patterns, self.name, self.coordinator)
        return GraphSet(stage, buffers, filler, order, rows_each=self._rows_each, **self._captures(buffers))

    @functools.cached_property
    def _router(self) -> Router:
        known, enabled = (self.graphs, self.buckets, self._capacity), self.config.graphs
        return Router(*known, enabled=enabled, leading=self._leading, path=self._tally.path)

    @functools.cached_property
    def _eager(self) -> Eagerly[V]:  # pyright: ignore[reportIncompatibleMethodOverride] - a property that is kept
        made = self.stage, self.name, self._size
        return Eagerly(*made, carry=self._carry, buffers=self.graphs.buffers, table=self._table)

    def capture(self) -> CaptureReport:
        """Capture every bucket, the largest first; with `lazy`, each when the first batch comes for it.

        Nothing is captured with `graphs` off. Raises CaptureError where buckets failed; the others are usable all the
        same, and `report` names both.
        """
        try:
            with self._gate.open():
                return self.graphs.capture()
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
        declaration, sizes, pattern = self.stage.declaration, self._sizes.get(bucket), Pattern(absent, in_place, hosted)
        check_named(declaration, pattern)
        if sizes is None:
            known = ", ".join(map(str, sorted(self._sizes)))
            raise ConfigError(f"there is no bucket {bucket}: buckets are {known}")
        capabilities, foreign = self.stage.backend.capabilities, self.graphs.buffers.foreign
        return plan_fill(declaration, sizes, capabilities, pattern, lowering=self.lowering, foreign=foreign)

    def decide(self, batch: Any, **side: Any) -> Decision:
        """The path that a batch would take, its bucket, and why. Raises as a call does, where sizes tell."""
        return self._router.decide(self._size(batch, side), self.stage.absent(batch, side), batch)

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
        self._tally.stepped(route.rows, filled.rows)
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
            counts=self._tally.buckets[captured.rows],
            graphs=graphs,
            hosts=filler.hosts,
            launch=launch,
            device=() if self.is_whole else ready.device,
            holds=self._holds(),
        )

    def _holds(self) -> list[Holds]:
        router = self._router
        return [*super()._holds(), *([lambda batch, _: router.same_fields(batch)] if router.decides_by_fields else [])]
