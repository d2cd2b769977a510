"""Runners that capture graphs: buckets, the route of a batch to one, and fills of it; and the decode runner."""

import abc
import functools
import reprlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, final

import attrs
import torch
from torch import nn

from ..backends.base import Backend
from ..dataflow.axes import BATCH, TOKENS, WIDTH, Axis, Live, Sizes
from ..dataflow.bucket import Absent
from ..dataflow.buffers import Bound, Buffers
from ..dataflow.capabilities import Lowering, chosen_lowering
from ..dataflow.errors import BatchError, ConfigError, RankError, ReplayError
from ..dataflow.guard import own_guard
from ..dataflow.plan import FillPlan, Pattern, plan_fill
from ..dataflow.ready import Ready
from ..dataflow.sizing import Sizer
from ..dataflow.sources import NO_SIDE, Field, Side, look_up
from ..dataflow.specialization import Run, Specialization
from .ahead import Ahead, LaunchedStep, Read
from .capture import Captured
from .chain import Chain
from .config import RunnerConfig, Wanted, check_step, checked, checked_names, config_of, patterns_of
from .eagerly import Eagerly
from .graphs import Filler, GraphSet
from .hooks import watchers_of
from .outputs import rows_each
from .pool import Phase, Seat
from .ranks.agreement import coordinator_of
from .ranks.group import Ranks
from .runner import Filled, Holds, Runner, bind
from .stage import NO_SIZES, Stage, V, joined
from .statistics import CaptureReport, Decision, Path, Why

Finish = Callable[[Any], Any]
"""What follows the writes of a short way's fill: the rest of the step, given the batch; its outputs."""


class CaptureArguments(TypedDict, total=False):
    """What every runner that captures takes beside its declaration and its step: see `DecodeRunner`."""

    sizes: Sizes
    settings: object
    absent: Sequence[Collection[str]]
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
    outputs: Literal["view", "copy"]


class StackArguments(CaptureArguments, total=False):
    """Of a runner whose buckets are tokens, up to `max_tokens`."""

    max_tokens: int
    output_rows: Axis | None
    stack: nn.Module | str | None


class DraftArguments(CaptureArguments, total=False):
    """Of a runner whose buckets are requests, and whose outputs are one row a request."""

    bind: Mapping[str, Bound]


class ExtendArguments(DraftArguments, total=False):
    """Of one whose outputs may follow another axis."""

    output_rows: Axis | None


class DecodeArguments(ExtendArguments, total=False):
    """Of one whose buckets are requests of `width` tokens."""

    width: int


def _differing(seen: Mapping[Field, Any], batch: Any) -> str:
    """The first field whose value in the batch is not the one that graphs saw, or nothing."""
    for field, captured in seen.items():
        value = look_up(batch, field.name) if field.convert is None else field.read(batch)
        # a tensor or an array, of which `!=` makes another, is never the same
        if value is not None and value is not captured and (hasattr(value, "shape") or value != captured):
            return field.name
    return ""


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
        counts: Callable[[int], Sizes],
        given: Mapping[str, Any],
        *,
        said: str,
        leading: Collection[Axis],
        factor: str = "",
        path: Path = "graph",
        rows_each: int | None = None,
    ) -> None:
        """Size the buckets, and take a seat in the pool. given: all arguments. path: of a batch that fits a bucket.

        counts: tells a bucket's padded sizes of BATCH and TOKENS from its rows. said: options that decide these, for
        errors. factor: the option that says how many tokens a request has, likewise. leading: their axes, that of rows
        first. rows_each: of outputs for each row; None where they are whole.
        """
        lead, *_ = leading
        self.buckets = buckets = config.ladder(of_tokens=lead == TOKENS)
        self._rows_each, self.cuts = rows_each, rows_each is not None
        sizes = {rows: stage.padded(counts(rows), said) for rows in buckets.sizes}
        self._capacity = sizes[buckets.largest]
        config.check(stage.backend.capabilities)
        patterns = patterns_of(stage.declaration, given.get("absent", ()))
        size = Sizer(stage.declaration, stage.relations, self._capacity, lead, factor=factor)
        coordinator = coordinator_of(stage.declaration, type(self).__name__, config, sizes, patterns, lead)
        super().__init__(config, stage, size, coordinator, capacity=self._capacity, path=path)
        self.sizes, self.patterns = sizes, patterns
        self._fits = {rows: Decision(path, rows, "fits", f"bucket {rows} fits") for rows in buckets.sizes}
        varying = enumerate(stage.declaration.varying)
        self._most = [(place, axis, self._capacity[axis]) for place, axis in varying if axis not in leading]
        fields = stage.declaration.fields.values()
        self._seen = {field: field.read(None) for field in fields if field.default is not attrs.NOTHING}
        phase = given.get("phase")
        self.seat: Seat[V] = Seat(  # pyright: ignore[reportIncompatibleVariableOverride] - never None here
            self.name, stage, self._capacity, given.get("bind", {}), phase, config.sharing
        )
        if phase is None:
            _ = self.eager  # what is wrong with it is said now

    def _captures(self, buffers: Buffers) -> Mapping[str, Any]:
        """What of a step is captured, as arguments of `GraphSet`: here the whole step."""
        del buffers
        return {"recipe": None, "holder": self.stage.step, "parameters": self.stage.declaration.parameters}

    def _viewer(self, ready: Ready) -> Callable[[Any], V]:
        """A call that makes the view of a batch that was filled."""
        return self.stage.viewer(ready)

    def _run_graph(self, filled: Filled[V], captured: Captured) -> Any:
        """Run a filled step by its graph; its outputs."""
        return self.graphs.replay(captured, filled.rows)

    @abc.abstractmethod
    def _finish(self, captured: Captured, ready: Ready, filled: Filled[V]) -> Finish:
        """Make what follows the writes of a step like this one, and counts it."""

    @functools.cached_property
    def graphs(self) -> GraphSet[V]:  # type: ignore[override] # one that is kept
        """The captured buckets, and the buffers that they read; those of a pool are laid out when first asked for."""
        config, stage, buffers = self.config, self.stage, self.seat.buffers()
        lowering = chosen_lowering(stage.backend.capabilities, config.lowering)
        if lowering == "in_graph" and not self.is_whole:
            lowering = "fused"  # what runs before the graphs reads the slots, too
        filler = Filler(stage, buffers, lowering, [*self.sizes.values()], config.error_mode, self._table)
        return GraphSet(
            stage,
            buffers,
            filler,
            config,
            self.sizes if config.graphs else {},
            self.patterns,
            self.name,
            self.coordinator,
            self._rows_each,
            **self._captures(buffers),
        )

    @functools.cached_property
    def eager(self) -> Eagerly[V]:  # type: ignore[override] # one that is kept
        """Runs the batches that no graph takes, in the same buffers."""
        return Eagerly(self.stage, self.name, self._table, buffers=self.graphs.buffers)

    def capture(self) -> CaptureReport:
        """Capture every bucket, the largest first; with `lazy`, each when the first batch comes for it.

        With `graphs` off nothing is captured.

        Raises:
            CaptureError: Buckets failed, or the runner is captured already. The other buckets can be used, and `report`
                names both.
        """
        try:
            with self.gate.open():
                return self.graphs.capture()
        finally:
            modes = self.config.modes
            for watcher in () if self._is_debugged else watchers_of(self, modes):
                self.watch.add(watcher)
            self._is_debugged = True
            # not where other ranks are asked before each step, a debug mode looks at it, or fills go slot by slot
            is_plain = self.coordinator.quiet and not modes and "graphs" in vars(self)
            self._bound = self._table if is_plain and self.lowering != "slot_by_slot" else None

    @property
    def report(self) -> CaptureReport | None:
        """The buckets, times and memory of the capture, or None before it."""
        return self.graphs.report

    @property
    def lowering(self) -> Lowering:
        """How fills are run."""
        return self.graphs.filler.lowering

    def plan(
        self, bucket: int, absent: Collection[str] = (), in_place: Collection[str] = (), hosted: Collection[str] = ()
    ) -> FillPlan:
        """How one bucket is filled.

        Args:
            bucket: Its padded size.
            absent: Optional slots that the batch lacks.
            in_place: Slots whose source is the buffer itself.
            hosted: Slots on the device whose source is on the host.

        Raises:
            ConfigError: There is no such bucket or slot.
        """
        declaration, sizes, pattern = self.stage.declaration, self.sizes.get(bucket), Pattern(absent, in_place, hosted)
        pattern.check(declaration)
        if sizes is None:
            known = ", ".join(map(str, sorted(self.sizes)))
            raise ConfigError(f"there is no bucket {bucket}: buckets are {known}")
        capabilities, foreign = self.stage.backend.capabilities, self.graphs.buffers.foreign
        return plan_fill(declaration, sizes, capabilities, pattern, lowering=self.lowering, foreign=foreign)

    def _decide(self, live: Live, absent: Absent, batch: Any) -> Decision:
        """The path of a batch with these live sizes, the leading axis last. ReplayError before anything is captured."""
        buckets, rows, report = self.buckets, live[-1], self.graphs.report
        bucket = buckets.fit(rows)
        over = next(((live[place], axis, most) for place, axis, most in self._most if live[place] > most), None)
        why: Why
        if report is None:
            raise ReplayError("nothing is captured yet: call capture() first")
        if not self.config.graphs:
            why, reason = "disabled", "graphs are switched off, by graphs=False"
        elif over is not None:
            why, reason = "too_large", "{} rows on {} are more than the {} of every bucket".format(*over)
        elif bucket is None:
            why, counted = "too_large", "rows" if self.is_whole else "tokens"
            reason = f"{rows} {counted} are more than the largest bucket, {buckets.largest}"
        elif (share := buckets.waste(rows, bucket)) > buckets.max_waste:
            why = "waste"
            reason = f"bucket {bucket} would be {share:.0%} padding, over the limit of {buckets.max_waste:.0%}"
        elif not self.graphs.has(bucket, absent):
            names, failed = ", ".join(map(repr, sorted(absent))), report.failed.get(bucket)
            why = "absent" if failed is None else "not_captured"
            reason = failed or f"no graph was captured without {names}; pass absent=[{{{names}}}] to capture one"
        elif name := _differing(self._seen, batch):
            field = self.stage.declaration.fields[name]
            came, seen = _brief(field.read(batch)), self._seen[field]
            why, reason = "field_differs", f"field {name!r} is {came}, not {seen!r}, with which graphs were captured"
        else:
            return self._fits[bucket]
        return Decision("eager", None, why, reason)

    def _route(self, live: Live, absent: Absent, batch: Any, side: Side) -> Captured | Decision:
        own, graphs, coordinator = self._decide(live, absent, batch), self.graphs, self.coordinator

        def admit() -> None:
            captured = graphs.get(own.bucket, absent)
            if captured is None:
                self.eager.admit(batch, live[: self._axes], side)
            else:
                captured.filling.bucket.admit(batch, live[:-1], absent, side)

        decision = coordinator.settle(own, live, admit)
        captured = graphs.get(decision.bucket, absent)
        if captured is not None or decision.bucket is None:
            return captured or decision
        if coordinator.quiet:  # a late capture that failed is decided anew
            return self._decide(live, absent, batch)
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
        self.tally.stepped(route.rows, filled.rows)
        return outputs

    def _repeats(self, filled: Filled[V]) -> bool:
        # where fields decide, the next batch like one that took no graph may take one
        return isinstance(filled.route, Captured) or (not self._seen and super()._repeats(filled))

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
            counts=self.tally.buckets[captured.rows],
            graphs=graphs,
            hosts=filler.hosts,
            launch=launch,
            device=() if self.is_whole else ready.device,
            holds=self._holds(),
        )

    def _holds(self) -> list[Holds]:
        seen = self._seen
        return [*super()._holds(), *([lambda batch, _: not _differing(seen, batch)] if seen else [])]


class RequestRunner(GraphRunner[V]):
    """Captures a whole step for buckets of requests. Subclasses are final: they say what the step is."""

    def __init__(
        self,
        inputs: type[V],
        step: Callable[[V], Any],
        given: Mapping[str, Any],
        *,
        output_rows: Axis | None,
        known: Sizes = NO_SIZES,
        width: int | None = None,
    ) -> None:
        """Take the arguments of `DecodeRunner`, further sizes, a default of output_rows=, and topk= as the width."""
        config, factor = config_of(type(self), given), "width"
        if width is not None:
            config, factor = attrs.evolve(config, width=width), "topk"
        width = config.width
        relations, sizes = {TOKENS: BATCH * width}, joined(inputs, given.get("sizes", {}), {WIDTH: width, **known})
        stage = Stage.of(inputs, step, relations=relations, **{**given, "sizes": sizes})
        super().__init__(
            config,
            stage,
            lambda rows: {BATCH: rows, TOKENS: rows * width},
            given,
            said=f"buckets= and {factor}=",
            factor=factor,
            leading=(BATCH, TOKENS),
            rows_each=rows_each(given.get("output_rows", output_rows), width),
        )

    def _finish(self, captured: Captured, ready: Ready, filled: Filled[V]) -> Finish:
        del ready
        graphs, hosts, rows = self.graphs, self.graphs.filler.hosts, filled.rows
        clock, live, counted = graphs.clock, captured.live, self.tally.repeated[captured.rows, rows]
        shown = None if self._rows_each is None else rows * self._rows_each
        graph, note = captured.graph, hosts.note if hosts.possible else None
        replay, unchanged, last, kept, pointer = graph.replay, own_guard(()), None, None, 0

        def finish(_: Any) -> Any:
            nonlocal unchanged, last, kept, pointer
            replay()
            clock.replays += 1
            counted.steps += 1
            if note is not None:
                note()
            whole = graph.outputs
            if type(whole) is not torch.Tensor:  # a container may be changed by whoever gets it
                return live(shown)
            if whole is last and kept is not None and unchanged(kept) and kept.data_ptr() == pointer:
                return kept
            outputs = whole.detach() if shown is None else whole[:shown]
            if whole is last:  # a backend may make new ones at each replay, of which nothing is worth keeping
                kept, unchanged, pointer = outputs, own_guard([outputs]), outputs.data_ptr()
            else:
                last, kept = whole, None
            return outputs

        return finish

    def inputs(self, bucket: int, absent: Collection[str] = ()) -> V:
        """A bucket's slots, all padded rows of them, for a producer that writes them itself.

        A batch then brings the live rows of such a slot, `view.input_ids[:rows]`, as its source. They are not copied,
        and the tail is reset as ever. Write on the stream that steps run on.

        Args:
            bucket: Its padded size.
            absent: Optional slots that the batches lack.

        Raises:
            ConfigError: There is no graph for the bucket.
        """
        pattern = frozenset(absent)
        captured = self.graphs.captured.get((bucket, pattern))
        if captured is None:
            with self.gate.open():  # it may be captured now
                captured = self.graphs.get(bucket, pattern)
        if captured is None:
            without = f" without {', '.join(map(repr, sorted(pattern)))}" if pattern else ""
            raise ConfigError(
                f"there is no graph of bucket {bucket}{without}: buckets are {self.buckets.sizes}, after capture()"
            )
        self.graphs.buffers.ledger.handed_out = True
        return self.stage.view(captured.filling.whole(pattern), None)


@final
class DecodeRunner(RequestRunner[V]):
    """Captures a step for buckets of requests, and replays the smallest that a batch fits.

    Args:
        inputs: The declaration class.
        step: Called with its view; returns tensors with one row a token.
        sizes: Sizes of the fixed axes, and capacities of varying ones beside BATCH and TOKENS.
        settings: What `when=` of slots refers to.
        bind: Tensors to adopt as buffers, by slot.
        absent: Further patterns of absent optional slots to capture, each a collection of names. With none, a
            batch that lacks one runs eagerly.
        output_rows: The axis that the rows of outputs follow, TOKENS or BATCH, or None to get outputs whole.
        phase: The phase of a pool in which the runner uses the pool's memory.
        state: The tensors beside slots, or parts of them, that captures and checks put back after each run of the
            step for a warm-up or a look. By default all that its operators write is found and put back; a large KV
            cache that a custom operator writes may be too large for that: give the parts that padded rows write,
            or `()`.
        ranks: The processes that run each step together, in one bucket.
        backend: A backend or its name.
        options: Those of `RunnerConfig` that this runner uses.

    Raises:
        ConfigError: An argument does not fit.
        BindError: A tensor cannot be adopted.
    """

    def __init__(self, inputs: type[V], step: Callable[[V], Any], **options: Unpack[DecodeArguments]) -> None:
        super().__init__(inputs, step, options, output_rows=TOKENS)

    def steps(
        self,
        batch: Any,
        *,
        keys: Iterable[Hashable] | None = None,
        ahead: int = 0,
        read: Read | None = None,
        needs: Collection[str] = (),
        agree_every: int = 1,
    ) -> Iterator[LaunchedStep]:
        """Run one step after another from a first batch, on slots that advance by their own rules (`then=`).

        Between two steps the host says only what is new: `step.leave`, `step.join`, `step.edit`. A step without news is
        one replay, for which nothing is uploaded. The loop ends when no request is live and all launched steps were
        handed out; with ranks, when none of them has one. The slots belong to it meanwhile: a call of the runner ends
        it with ReplayError.

        Args:
            batch: The first step's batch, as a call takes it. With ranks, None for one without requests.
            keys: A key of your own for each of its requests, all different. By default 0, 1, 2 and so on.
            ahead: How many steps are launched beyond the one that is handed out.
            read: Chooses what of the step's outputs is copied to the host: tensors, or parts of them. By default all.
                It is called before their values are there, and computes nothing.
            needs: Slots whose values in later steps `step.needs` is to foretell, such as `["seq_lens"]`. Each advances
                by a number and holds one number a request.
            agree_every: With ranks, after how many steps they choose a bucket together, the same for all of them. In
                between requests join only as far as the last one holds them.

        Returns:
            The steps in turn, which the device may still be running.

        Raises:
            ConfigError: No slot advances, or rows of a slot do not belong to requests.
            BatchError: The batch does not fit, or no graph takes it.
            ReplayError: Nothing is captured yet.
            RankError: Another rank failed.
        """
        checked("ahead", "a number of steps, 0 or more", ahead, int, 0)
        checked("agree_every", "a number of steps, at least 1", agree_every, int, 1)
        needs = checked_names("needs", needs)
        if read is not None:
            check_step("read", read, "a step's outputs, which chooses parts of them")
        why = self._why_by_calls()
        every = 1 if why else agree_every
        with self.coordinator.loop(every) as loop:
            if batch is None:
                batch, _ = self._empty(None, NO_SIDE)
            decision = self.decide(batch)
            if decision.bucket is None:
                raise BatchError(f"steps() needs a graph, and this batch has none: {decision.reason}")
            chain = Chain(self, batch, keys, self.buckets, self._rows_each, loop, why)
            return iter(Ahead(self, chain, ahead, read, needs))

    def _why_by_calls(self) -> str:
        """Why `steps` runs each step as a call; nothing where it replays graphs by itself."""
        if self.lowering not in {"in_graph", "foreach"}:
            return f"the lowering is {self.lowering}"
        return "each step is watched" if self.watch.watchers or self.config.modes else ""
