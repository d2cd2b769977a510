"""Runners that capture graphs, with their buckets, routes and fills, and the decode runner."""

import abc
import functools
import itertools
import math
import reprlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, final, overload

import attrs
import torch
from torch import nn

from ..backends.base import Backend
from ..dataflow.axes import BATCH, TOKENS, WIDTH, Axis, Dim, Live, Sizes
from ..dataflow.buffers import Bound, Buffers
from ..dataflow.capabilities import LoweringName, chosen_lowering
from ..dataflow.done import with_done
from ..dataflow.errors import ConfigError, RankError, ReplayError
from ..dataflow.inputs import V
from ..dataflow.lowering import LOWERINGS
from ..dataflow.plan import Absent, FillPlan, Pattern, plan_fill
from ..dataflow.sizing import Sizer
from ..dataflow.sources import NO_SIDE, Field, look_up
from .engine.chunks import Chunks
from .engine.config import Buckets, RunnerConfig, Wanted, checked, checked_keys, config_of, patterns_of
from .engine.graphs import Captured, Filler, GraphSet, ReadBatch
from .engine.hooks import watchers_of
from .engine.outputs import Out, check_output_rows
from .engine.pool import Phase
from .engine.routes import EagerRoutes, GraphRoute, Route
from .engine.runner import Runner
from .engine.selection import (
    BucketKey,
    BucketSelector,
    Variant,
    VariantKey,
    frozen_by,
    frozen_text,
    sizes_of,
    variants_of,
)
from .engine.stage import NO_SIZES, Stage, StepFunction, joined
from .engine.statistics import CaptureReport, Decision, PathName, Why
from .ranks.agreement import coordinator_of
from .ranks.group import Ranks
from .steps.chain import Chain
from .steps.chunks import checked_chunks, chunk_sizes
from .steps.loop import LaunchedStep, StepLoop

Read = TypeVar("Read")


class StageArguments(TypedDict, total=False):
    """The arguments of every runner besides its declaration and its step: see `DecodeRunner`."""

    sizes: Sizes
    settings: object
    ranks: Ranks | None
    config: RunnerConfig | None
    backend: str | Backend


class CaptureArguments(StageArguments, total=False):
    """The arguments of every runner that captures."""

    bind: Mapping[str, Bound]
    keep_bound: bool
    absent: Sequence[Collection[str]]
    variants: Sequence[Variant]
    phase: Phase | None
    state: Iterable[torch.Tensor] | None
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


class GraphArguments(CaptureArguments, total=False):
    """The arguments of a runner whose buckets have sizes on any axes."""

    buckets: Mapping[Axis, Collection[int]] | Sequence[Mapping[Axis, int]]
    relations: Mapping[Axis, Dim]
    cost: Callable[[Sizes], float] | None
    output_rows: Axis | None
    compile_computed: bool | None


class LadderArguments(CaptureArguments, total=False):
    """The arguments of a runner whose buckets are numbers of rows."""

    buckets: tuple[int, ...] | list[int]
    max_batch: int


class StackArguments(LadderArguments, total=False):
    """The arguments of a runner whose buckets are tokens, up to `max_tokens`."""

    max_tokens: int
    output_rows: Axis | None
    stack: nn.Module | str | None


class DraftArguments(LadderArguments, total=False):
    """The arguments of a runner whose buckets are requests, and whose outputs have one row a request."""

    compile_computed: bool | None


class ExtendArguments(DraftArguments, total=False):
    """The arguments of a runner whose outputs may follow another axis."""

    output_rows: Axis | None


class DecodeArguments(ExtendArguments, total=False):
    """The arguments of a runner whose buckets are requests of `width` tokens."""

    width: int
    chunks: Collection[int]
    done: str | None


def _differing(seen: Mapping[Field, Any], batch: Any) -> str:
    """Return the first field whose value in the batch differs from the value at capture, or ""."""
    for field, captured in seen.items():
        value = look_up(batch, field.name) if field.convert is None else field.read(batch)
        # tensors and arrays count as different, because their `!=` returns no bool
        if value is not None and value is not captured and (hasattr(value, "shape") or value != captured):
            return field.name
    return ""


def _brief(value: Any) -> str:
    """Return a field's value for an error message.

    For a tensor or an array, show only the type, since the values may be on the device.
    """
    return type(value).__name__ if hasattr(value, "shape") else reprlib.repr(value)


class CapturingRunner(Runner[V, Out]):
    """A runner that captures graphs. Subclasses are final, or abstract."""

    _is_debugged = False

    def __init__(
        self,
        config: RunnerConfig,
        stage: Stage[V],
        sizes: Mapping[BucketKey, Sizes],
        given: Mapping[str, Any],
        *,
        axes: Sequence[Axis],
        output_rows: Axis | None = None,
        factor: str = "",
        path: PathName = "graph",
        chosen: str = "",
    ) -> None:
        """Prepare the choice of buckets, and join the pool.

        Args:
            config: The options.
            stage: The declaration, the backend and the step.
            sizes: The padded sizes of each bucket, in the order of choice.
            given: All arguments of the runner.
            axes: The axes on which buckets have sizes of their own, first that of rows.
            output_rows: The axis that the rows of a graph's outputs follow, or None if they are whole.
            factor: The name of the option for tokens per request, for errors.
            path: The path of a batch that fits a bucket.
            chosen: Why a bucket is chosen among those that hold a batch, if there may be several.
        """
        declaration = stage.declaration
        self._given = given
        self._output_rows = output_rows
        self.cuts = output_rows is not None
        self._capacity = {axis: max(padded[axis] for padded in sizes.values()) for axis in next(iter(sizes.values()))}
        config.check(stage.backend.capabilities)
        patterns = patterns_of(declaration, given.get("absent", ()))
        variants = variants_of(declaration, given.get("variants", ()))
        size = Sizer(declaration, stage.relations, self._capacity, axes[0], factor=factor)
        kind = type(self).__name__
        coordinator = coordinator_of(declaration, kind, config, sizes, patterns, axes[0], variants=variants)
        if not coordinator.quiet and (variants or len(axes) > 1):
            raise ConfigError(
                f"ranks exchange one size of a bucket and no field, and {kind} has buckets on "
                f"{' and '.join(map(str, axes))}{' and variants' * bool(variants)}: only ranks that get the "
                "same batches can have these, Ranks(equal=True)"
            )
        super().__init__(config, stage, size, coordinator, capacity=self._capacity, path=path)
        self.sizes = sizes
        self.patterns = patterns
        self.axes = tuple(axes)
        self.variants = variants
        self._places = {axis: n for n, axis in enumerate(declaration.varying) if axis not in stage.relations}
        self._selector = BucketSelector(sizes, self._places)
        self._frozen = frozen_by(variants)
        self._fits = dict[tuple[BucketKey, VariantKey], Decision]()
        for bucket, (variant, frozen) in itertools.product(sizes, self._frozen.items()):
            text = frozen_text(frozen)
            reason = f"bucket {bucket} fits{chosen}{', with ' * bool(text)}{text}"
            self._fits[bucket, variant] = Decision(path, bucket, "fits", reason, variant=text)
        self._note_fields()
        self._is_plain = config.max_waste >= 1 and coordinator.alone  # whether sizes and fields alone decide
        self._routes = dict[tuple[BucketKey | None, Absent, VariantKey], Route[V]]()
        self._join_memory(given)

    def _note_fields(self) -> None:
        """Prepare the choice by values of fields: those of variants, and the defaults that all graphs have frozen."""
        declaration = self.stage.declaration
        self._choices = [(one.select, declaration.fields[one.field].read) for one in self.variants]
        known = {one.field for one in self.variants}
        fields = [field for name, field in declaration.fields.items() if name not in known]
        self._seen = {field: field.read(None) for field in fields if field.default is not attrs.NOTHING}

    def _join_memory(self, given: Mapping[str, Any]) -> None:
        """Prepare the memory of the slots: adopted tensors, and a pool's. Raises ConfigError and BindError."""
        config = self.config
        stage = self.stage
        bind = checked_keys("bind", "a mapping of slots' names to tensors", given.get("bind", {}), str)
        keep = checked("keep_bound", "True or False", given.get("keep_bound", False), bool)
        self._allocate = functools.partial(stage.allocate, self._capacity, bind, keep_bound=keep)
        if given.get("phase") is not None:
            phase = checked("phase", "a phase of a pool, such as pool['decode'], or None", given["phase"], Phase)
            own = phase, self.name, stage, self._capacity, bind, self._allocate
            self.phase = phase.pool.join(*own, sharing=config.sharing)
        else:
            _ = self.eager  # raise errors now, not at the first step

    def _captures(self, buffers: Buffers) -> Mapping[str, Any]:
        """Return the arguments of `GraphSet` that say which part of a step is captured: by default the whole step."""
        del buffers
        return {"holder": self.stage.step, "parameters": self.stage.declaration.parameters}

    @abc.abstractmethod
    def _route_of(self, captured: Captured) -> Route[V]:
        """Make the route of batches that a graph takes."""

    @functools.cached_property
    def _buffers(self) -> Buffers:
        """The memory of the slots. The first use lays out the memory of a pool."""
        if self.phase is not None and self.phase.member:
            return self.phase.pool.take(self.phase.member)
        return self._allocate()

    @functools.cached_property
    def graphs(self) -> GraphSet[V]:  # type: ignore[override] # one that is kept
        """The captured buckets, and the buffers that they read."""
        config = self.config
        stage = self.stage
        buffers = self._buffers
        lowering = chosen_lowering(stage.backend.capabilities, config.lowering)
        if LOWERINGS[lowering].is_in_graph and not self.is_whole:
            lowering = "fused"  # code before the first graph also reads the slots
        filler = Filler(stage, buffers, lowering, [*self.sizes.values()], self._table, config.error_mode)
        filler.compile_computed = config.compile_computed
        return GraphSet(
            stage,
            buffers,
            filler,
            config,
            self.sizes if config.graphs else {},
            self.patterns,
            self.name,
            self.coordinator,
            self._frozen,
            self.axes,
            self._output_rows,
            **self._captures(buffers),
        )

    @functools.cached_property
    def eager(self) -> EagerRoutes[V]:  # type: ignore[override] # one that is kept
        """Runs the batches that no graph takes, in the same buffers."""
        return EagerRoutes(self.stage, self.name, self._table, buffers=self.graphs.buffers)

    def use(self, buffers: Buffers) -> None:
        """Use buffers that other runners use, too, in place of its own, before anything is captured."""
        del self.graphs, self.eager
        self._buffers = buffers
        self.graphs.is_shared = True
        _ = self.eager

    def capture(self) -> CaptureReport:
        """Capture every bucket, the last choice first. With `lazy`, capture each when the first batch comes for it.

        With `graphs` off nothing is captured.

        Raises:
            CaptureError: Buckets failed, or the runner is captured already. The other buckets can be used, and `report`
                names both.
        """
        try:
            with self.step_lock.open():
                return self.graphs.capture()
        finally:
            modes = self.config.modes
            for watcher in () if self._is_debugged else watchers_of(self, modes):
                self.watch.add(watcher)
            self._is_debugged = True

    @property
    def report(self) -> CaptureReport | None:
        """The buckets, times and memory of the capture, or None before it."""
        return self.graphs.report

    @property
    def lowering(self) -> LoweringName:
        """How fills are run."""
        return self.graphs.filler.lowering.name

    def plan(
        self,
        bucket: BucketKey,
        absent: Collection[str] = (),
        in_place: Collection[str] = (),
        hosted: Collection[str] = (),
    ) -> FillPlan:
        """Return how one bucket is filled.

        Args:
            bucket: Its padded size, or its sizes in the order of `axes`.
            absent: Optional slots that the batch lacks.
            in_place: Slots whose source is the buffer itself.
            hosted: Slots on the device whose source is on the host.

        Raises:
            ConfigError: There is no such bucket or slot.
        """
        declaration = self.stage.declaration
        sizes = self.sizes.get(bucket)
        pattern = Pattern(absent, in_place, hosted)
        pattern.check(declaration)
        if sizes is None:
            known = ", ".join(map(str, self.sizes))
            raise ConfigError(f"there is no bucket {bucket}: buckets are {known}")
        capabilities = self.stage.backend.capabilities
        foreign = self.graphs.buffers.foreign
        return plan_fill(declaration, sizes, capabilities, pattern, lowering=self.lowering, foreign=foreign)

    def _decide(self, call: ReadBatch) -> Decision:
        bucket = self._selector.select(call.live)
        variant = self._variant(call.batch)
        report = self.graphs.report
        why: Why
        if report is None:
            raise ReplayError("nothing is captured yet: call capture() first")
        if not self.config.graphs:
            why = "disabled"
            reason = "graphs are switched off, by graphs=False"
        elif bucket is None:
            why = "too_large"
            reason = self._why_too_large(call.live)
        elif (share := self._waste(call.live, bucket)) > self.config.max_waste:
            why = "waste"
            reason = f"bucket {bucket} would be {share:.0%} padding, over the limit of {self.config.max_waste:.0%}"
        elif None in variant:
            one = self.variants[variant.index(None)]
            came = _brief(self.stage.declaration.fields[one.field].read(call.batch))
            why = "field_differs"
            reason = f"field {one.field!r} is {came}, and graphs were captured for {one}"
        elif not self.graphs.has(bucket, call.absent, variant):
            names = ", ".join(map(repr, sorted(call.absent)))
            failed = report.failed.get(bucket)
            why = "absent" if failed is None else "not_captured"
            reason = failed or f"no graph was captured without {names}; pass absent=[{{{names}}}] to capture one"
        elif name := _differing(self._seen, call.batch):
            field = self.stage.declaration.fields[name]
            came = _brief(field.read(call.batch))
            seen = self._seen[field]
            why = "field_differs"
            reason = f"field {name!r} is {came}, not {seen!r}, with which graphs were captured"
        else:
            return self._fits[bucket, variant]
        return Decision("eager", None, why, reason)

    def _variant(self, batch: Any) -> VariantKey:
        """Return the values that the graph of a batch has frozen, with None for a field of which no graph has one."""
        return tuple([select(read(batch)) for select, read in self._choices])

    def _waste(self, live: Live, bucket: BucketKey) -> float:
        """Return the share of padding in a bucket: on several axes, of the product of its sizes."""
        return Buckets.waste(math.prod(live[self._places[axis]] for axis in self.axes), math.prod(sizes_of(bucket)))

    def _why_too_large(self, live: Live) -> str:
        """Return why no bucket holds these live sizes."""
        for axis, place in self._places.items():
            rows = live[place]
            most = self._capacity[axis]
            if rows > most and self.axes == (axis,):
                return f"{rows} {'rows' if self.is_whole else 'tokens'} are more than the largest bucket, {most}"
            if rows > most:
                return f"{rows} rows on {axis} are more than the {most} of every bucket"
        together = " and ".join(f"{live[self._places[axis]]} rows on {axis}" for axis in self.axes)
        return f"no bucket holds {together} together"

    def _route(self, call: ReadBatch) -> Route[V]:
        variant = self._variant(call.batch) if self.variants else ()
        if self._is_plain and not (self._seen and _differing(self._seen, call.batch)):
            route = self._routes.get((self._selector.select(call.live), call.absent, variant))
            if route is not None:
                return route
        decision = self._decide(call)
        if not self.coordinator.alone:
            admit = functools.partial(self._admit, decision, call, variant)
            decision = self.coordinator.agree(decision, call.live, admit)
        route = self._graph_route(decision.bucket, call.absent, variant)
        if route is None and decision.bucket is not None:
            if not self.coordinator.quiet:
                missing = ", ".join(map(repr, sorted(call.absent)))
                raise RankError(
                    f"ranks agreed on bucket {decision.bucket}, of which this one has no graph without {missing}"
                )
            decision = self._decide(call)  # a lazy capture has failed
        return route or self.eager.route(call, decision, self.tally)

    def _graph_route(self, bucket: BucketKey | None, absent: Absent, variant: VariantKey) -> Route[V] | None:
        """Return the route of a graph, or None if there is none. The graph may be captured now."""
        route = self._routes.get((bucket, absent, variant))
        if route is None:
            captured = self.graphs.get(bucket, absent, variant)
            if captured is not None:
                route = self._routes[bucket, absent, variant] = self._route_of(captured)
        return route

    def _admit(self, own: Decision, call: ReadBatch, variant: VariantKey) -> None:
        """Raise the errors that a fill of the batch would raise on this rank's route."""
        route = self._graph_route(own.bucket, call.absent, variant)
        if route is None:
            route = self.eager.route(call, own, self.tally)
        route.filling.bucket.admit(call.sources, call.live)


class WholeStepRunner(CapturingRunner[V, Out]):
    """Captures whole steps. Subclasses are final, or abstract."""

    def _route_of(self, captured: Captured) -> Route[V]:
        return GraphRoute(self.graphs, captured, self.tally.buckets[captured.bucket])

    def inputs(self, bucket: BucketKey, absent: Collection[str] = ()) -> V:
        """Return a bucket's slots, with all padded rows, for a producer that writes them itself.

        A batch then has the live rows of such a slot, `view.input_ids[:rows]`, as its source. They are not copied, and
        the tail is reset as usual. Write on the stream that steps run on.

        Args:
            bucket: Its padded size, or its sizes in the order of `axes`.
            absent: Optional slots that the batches lack.

        Raises:
            ConfigError: There is no graph for the bucket.
        """
        pattern = frozenset(absent)
        key = bucket, pattern, next(iter(self._frozen))  # all variants have the same slots
        captured = self.graphs.captured.get(key)
        if captured is None:
            with self.step_lock.open():  # this may capture it
                captured = self.graphs.get(*key)
        if captured is None:
            without = f" without {', '.join(map(repr, sorted(pattern)))}" if pattern else ""
            raise ConfigError(
                f"there is no graph of bucket {bucket}{without}: buckets are {(*self.sizes,)}, after capture()"
            )
        self.graphs.buffers.clean.handed_out = True
        filled_by = captured.filling.bucket
        return self.stage.viewer(filled_by)(None, filled_by.padded)


class RequestRunner(WholeStepRunner[V, Out]):
    """Captures a whole step for buckets of requests. Subclasses are final, and define the step."""

    def __init__(
        self,
        inputs: type[V],
        step: StepFunction[V, Out],
        given: Mapping[str, Any],
        *,
        output_rows: Axis | None,
        known: Sizes = NO_SIZES,
        width: int | None = None,
    ) -> None:
        """Take the arguments of `DecodeRunner`, further sizes, a default of output_rows=, and topk= as the width."""
        config = config_of(type(self), given)
        factor = "width"
        if width is not None:
            config = attrs.evolve(config, width=width)
            factor = "topk"
        width = config.width
        relations = {TOKENS: BATCH * width}
        sizes = joined(inputs, given.get("sizes", {}), {WIDTH: width, **known})
        stage = Stage.of(inputs, step, relations=relations, **{**given, "sizes": sizes})
        if (done := given.get("done")) is not None:
            done = checked("done", "the name of a slot, or None", done, str)
            stage = attrs.evolve(stage, declaration=with_done(stage.declaration, done))
        self.buckets = config.ladder()
        output_rows = given.get("output_rows", output_rows)
        check_output_rows(output_rows)
        sized_by = f"buckets= and {factor}="
        super().__init__(
            config,
            stage,
            {rows: stage.padded({BATCH: rows}, sized_by) for rows in self.buckets.sizes},
            {"output_rows": output_rows, **given},
            axes=(BATCH,),
            factor=factor,
            output_rows=output_rows,
        )

    def remade(self, **options: Any) -> "DecodeRunner[V, Out]":
        """Make a decode runner of the same step with some other options. It has separate memory and graphs."""
        stage = self.stage
        own = {"sizes": stage.sizes, "width": self.config.width, "backend": stage.backend, "state": stage.state}
        taken = {name: value for name, value in self._given.items() if name not in {"bind", "keep_bound", "phase"}}
        return DecodeRunner(stage.inputs, stage.step, **{**taken, **own, **options})


@final
class DecodeRunner(RequestRunner[V, Out]):
    """Captures a step for buckets of requests, and replays the smallest that a batch fits.

    Args:
        inputs: The declaration class.
        step: Called with its view, or with the slots and fields that its parameters name; returns tensors with one row
            a token.
        sizes: Sizes of the fixed axes, and capacities of varying ones besides BATCH and TOKENS.
        settings: What `when=` of slots refers to.
        bind: Tensors to adopt as buffers, by slot.
        keep_bound: Keep the contents of adopted tensors, in place of each slot's initial value.
        absent: Further patterns of absent optional slots to capture, each a collection of names. Without them, a batch
            that lacks an optional slot runs eagerly.
        variants: Values of fields that graphs are captured for, as `variant` makes them. A batch with other values
            runs eagerly.
        output_rows: The axis that the rows of outputs follow: TOKENS, the default, or BATCH, or None to get outputs
            whole.
        phase: The phase of a pool in which the runner uses the pool's memory.
        state: The tensors besides slots, or parts of them, that captures and checks put back after each run of the step
            for a warm-up or a look. By default all that its operators write is found and put back. A large KV cache
            that a custom operator writes may be too large for that: give the parts that padded rows write, or `()`.
        ranks: The processes that run each step together, in one bucket.
        chunks: Numbers of steps, such as `(4, 8)`, that `steps(chunk=...)` may launch at once. Each is one more graph
            of each bucket.
        done: The slot with one bool a request, and with a rule, that says which requests are done. From the next step
            on their rows hold the tails of all other slots on the device, as padded rows do, and `tokens()` of
            `steps()` drops them.
        config: Its options; keywords beside it win. Options that this runner does not use are ignored.
        backend: A backend or its name.
        options: `buckets`, `max_batch`, `max_waste`, `width`, `warmups`, `progress`, `debug`, `sharing`, `graphs`,
            `lowering`, `compile_computed`, `lazy`, `error_mode` and `outputs`, as `RunnerConfig` describes them.

    Raises:
        ConfigError: An argument does not fit.
        BindError: A tensor cannot be adopted.
    """

    def __init__(self, inputs: type[V], step: StepFunction[V, Out], **options: Unpack[DecodeArguments]) -> None:
        self._chunks = checked_chunks(options.get("chunks", ()), options.get("ranks"))
        super().__init__(inputs, step, options, output_rows=TOKENS)

    def _captures(self, buffers: Buffers) -> Mapping[str, Any]:
        stage = self.stage
        counts = self._chunks
        chunks = Chunks(stage.backend, counts, len(stage.declaration.counted)) if counts else None
        return {**super()._captures(buffers), "chunks": chunks}

    @overload
    def steps(
        self,
        batch: Any,
        *,
        keys: Iterable[Hashable] | None = None,
        ahead: int = 0,
        read: None = None,
        needs: Collection[str] = (),
        chunk: int | Literal["auto"] = 1,
    ) -> Iterator[LaunchedStep[Out]]: ...

    @overload
    def steps(
        self,
        batch: Any,
        *,
        keys: Iterable[Hashable] | None = None,
        ahead: int = 0,
        read: Callable[[Out], Read],
        needs: Collection[str] = (),
        chunk: int | Literal["auto"] = 1,
    ) -> Iterator[LaunchedStep[Read]]: ...

    def steps(
        self,
        batch: Any,
        *,
        keys: Iterable[Hashable] | None = None,
        ahead: int = 0,
        read: Callable[[Any], Any] | None = None,
        needs: Collection[str] = (),
        chunk: int | Literal["auto"] = 1,
    ) -> Iterator[LaunchedStep[Any]]:
        """Run one step after another from a first batch, on slots that advance by their own rules (`then=`).

        Between two steps the host only says what changes: `step.leave`, `step.join`, `step.edit`. A step without a
        change is one replay, for which nothing is uploaded. The loop ends when no request is live and all launched
        steps were handed out; with ranks, when none of them has a live request. Meanwhile the slots belong to the loop:
        a call of the runner ends it with ReplayError.

        Args:
            batch: The first step's batch, as a call takes it. With ranks, None for one without requests.
            keys: A key of your own for each of its requests, all different. By default 0, 1, 2 and so on.
            ahead: How many steps, or chunks of steps, are launched beyond the one that is handed out.
            read: Chooses what of the step's outputs is copied to the host: tensors, or parts of them. By default all.
                It is called before their values are there, and computes nothing.
            needs: Slots of which `step.needs` says what later steps need, such as `["seq_lens"]`. Each has one number a
                request and advances by a number, or has ragged rows whose `ragged=` is a function of such a slot.
            chunk: How many steps one launch runs: 1, or a number that `chunks=` names. The first step is a launch of
                its own. Edits take effect at the end of a chunk. "auto" begins with 1, takes the next larger number
                when the device has run out of work before a launch, and runs 1 while requests are about to join.

        Returns:
            The steps in order, which the device may still be running.

        Raises:
            ConfigError: No slot advances, or rows of a slot do not belong to requests. Or several steps cannot be one
                launch, because the host works between them.
            BatchError: The batch does not fit, or no graph takes it.
            ReplayError: Nothing is captured yet.
            RankError: Another rank failed.
        """
        with self.coordinator.loop() as loop:
            if batch is None:
                batch, _ = self._empty(None, NO_SIDE)
            for one in self.variants:
                if one.at_least:
                    raise ConfigError(
                        f"steps() keeps the fields of its first batch, and later steps may outgrow {one.field!r}: a "
                        "runner with variant(at_least=) is called for each step"
                    )
            chain = Chain(self, batch, self.buckets, self._variant(batch), loop, chunk_sizes(chunk, self._chunks))
            return iter(StepLoop(self, chain, batch, keys, ahead, read, needs))
