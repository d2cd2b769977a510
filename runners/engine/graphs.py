"""The graphs of one runner: filling, capturing and replaying its buckets."""

import collections
import contextlib
import functools
import itertools
import operator
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Generic

import attrs
import torch

from ...backends.base import Graph
from ...dataflow import log
from ...dataflow.axes import BATCH, Axis, Live, Sizes
from ...dataflow.buffers import Buffers, at_rest, overlaps, span
from ...dataflow.capabilities import DEVICE, chosen_lowering
from ...dataflow.edits import RowBucket
from ...dataflow.errors import CaptureError, ConfigError, ReplayError, origin_of, user_traceback
from ...dataflow.fill.bucket import Bucket, run_all
from ...dataflow.fill.kinds import KindTable, SourceKinds
from ...dataflow.guard import FUNCTION_MODES, GRADIENTS, below_modes, outside_inference, without_gradients
from ...dataflow.inputs import V
from ...dataflow.lowering import LOWERINGS
from ...dataflow.packet import HEAD, WORD, Feed
from ...dataflow.plan import Absent, packet_bytes
from ...dataflow.slots import BY_STEP
from ...dataflow.sources import Side, Sources
from .capture import (
    FORKS,
    Clock,
    capture_errors,
    capture_step,
    clock_of,
    frozen_garbage,
    progress_over,
    warm_up,
    with_place,
)
from .chunks import Chunks
from .compiled import CompiledFunctions, compiled_functions
from .config import ADDRESSES, GENERATIONS, RunnerConfig
from .current import CurrentStep, with_current
from .hooks import Coordinator
from .outputs import Stamped, cut_rows, map_tensors, nbytes_of
from .selection import BucketKey, VariantKey
from .stage import Stage
from .state import Holdings, State, check_writes
from .statistics import CaptureReport, MemoryAccount, human_bytes
from .traffic import HostReads


@attrs.define(eq=False)
class ReadBatch:
    """One batch, as a fill reads it.

    Attributes:
        batch: The batch.
        side: Its side arguments.
        sources: The values of its sources, in the order of the table of kinds.
        kinds: Their kinds, or None for kinds that were not seen before.
        live: Live rows on each varying axis, and last those of the leading axis.
        absent: Optional slots that it lacks.
    """

    batch: Any
    side: Side
    sources: Sources
    kinds: SourceKinds | None
    live: Live
    absent: Absent


@attrs.frozen(eq=False)
class Reader:
    """Reads the batches of one runner.

    Attributes:
        stage: The declaration.
        table: The kinds of batches seen so far.
        size: Reads live sizes slowly, with errors that explain a fault.
    """

    stage: Stage[Any]
    table: KindTable
    size: Callable[[Any, Side], Live]

    def read(self, batch: Any, side: Side) -> ReadBatch:
        """Read the sources of a batch and its live sizes. Raise BatchError if the sizes cannot be read."""
        table = self.table
        if not side or self._takes(side):
            sources: Sources = ()
            try:
                sources = table.gather(batch, side)
                kinds = table.known[0] if table.known and not FUNCTION_MODES() else None
                live = None if kinds is None else kinds.read(sources)
                if live is None:
                    kinds = below_modes(table.find, sources)
                    live = None if kinds is None else below_modes(kinds.read, sources)
            except Exception:  # noqa: BLE001 - the code below raises it, with a better message
                kinds = live = None
            if kinds is not None and live is not None:
                return ReadBatch(batch, side, sources, kinds, live, kinds.absent)
        live = self.size(batch, side)
        absent = self.stage.absent(batch, side)
        return ReadBatch(batch, side, table.gather(batch, side), None, live, absent)

    def _takes(self, side: Side) -> bool:
        """Return whether slots read all side arguments."""
        arguments = self.stage.declaration.arguments
        return arguments is None or arguments.issuperset(side)


@attrs.define(eq=False)
class Filling:
    """The fills of one bucket.

    Attributes:
        filler: The state that all buckets share.
        bucket: The bucket.
        computes: Whether a fill also runs functions on the device, because no graph does.
        kernel: Launches the kernel, if there is one.
        alone: A graph of the kernel alone, for fills that must end before the step's graph starts.
        compiled: Calls that run the functions on the device, if they are compiled.
    """

    filler: "Filler[Any]"
    bucket: Bucket
    computes: bool = False
    kernel: Any = None
    alone: Graph | None = None
    compiled: Sequence[Callable[[], None]] | None = None

    def first_nodes(self) -> None:
        """Run what a graph of the whole step begins with: rules of slots, the kernel, and functions on the device."""
        filler = self.filler
        bucket = self.bucket
        if filler.lowering.is_in_graph:
            rules = bucket.transitions[DEVICE]
            if rules.leaves(bucket.fused):
                words = filler.feed.upload.packet[: WORD * (HEAD + len(bucket.declaration.counted))]
                rules.advance_in_graph(words.view(torch.int64).unbind())
            self.kernel()
        if self.compiled is None:
            bucket.compute_on_device()
        else:
            for run in self.compiled:
                run()

    def compile(self) -> None:
        """Compile the functions that a graph of the step runs, before its capture. All slots keep their contents."""
        filler, bucket, functions = self.filler, self.bucket, self.filler.functions
        on_device = bucket.functions(bucket.padded).on_device
        rules = bucket.transitions[DEVICE] if filler.lowering.is_in_graph else None
        has_rules = rules is not None and rules.has_functions
        if functions is None or self.compiled is not None or not (on_device or has_rules):
            return

        @torch.no_grad()
        def compile_all() -> None:
            before = [one.target.clone() for one in on_device]
            # resets apart, because these see slots as integers, and a compiler takes that for other memory
            parts = itertools.groupby(on_device, lambda one: one.slot in bucket.declaration.functions)
            self.compiled = [run for _, part in parts for run in functions.compile([*part])]
            for one, contents in zip(on_device, before, strict=True):
                one.target.copy_(contents)
            if rules is not None:
                rules.compile(functions.compile)

        warm_up(filler.stage.backend, compile_all)

    def fill(self, call: ReadBatch, *, whole: bool) -> None:
        """Fill from a batch. Raises the errors of a fill, and then writes nothing.

        Args:
            call: The batch.
            whole: Whether the step's graph is replayed next, so that the kernel at its start can do the device's part.
        """
        filler, bucket = self.filler, self.bucket
        use, stream = filler.buffers.use, filler.stream()
        if not stream == use.stream == filler.clock.stream or (use.neighbours and not use.follows(stream)):
            filler.order()  # wait before reading sources, because they may be slots
        if filler.lowering.is_reference:
            self._fill_slot_by_slot(call)
            return
        found = None if FUNCTION_MODES() or call.kinds is None else bucket.take(call.kinds, call.sources, call.live)
        plan, taken = found or bucket.admit(call.sources, call.live)
        use.fills += 1  # forget before the first write, because a write may raise
        if use.reading is not None:
            filler.hosts.wait()
        filler.buffers.clean.is_sent = filler.lowering.has_kernel
        if GRADIENTS():
            without_gradients(plan.write, taken, call.live, call.batch)
        else:
            plan.write(taken, call.live, call.batch)
        if whole and filler.lowering.is_in_graph:
            filler.lowered["in_graph"] += 1
        elif self.kernel is None:
            filler.lowered[filler.lowering.name] += 1
        else:  # launch now, because the step's graph would read the sources too late
            self.launch()
        if self.computes:
            run_all(bucket.functions(call.live).on_device, call.batch)

    def _fill_slot_by_slot(self, call: ReadBatch) -> None:
        filler = self.filler
        filler.hosts.wait()
        given = self.bucket.tensors(call.batch, call.live, call.side)
        filler.buffers.use.fills += 1
        self.bucket.fill_slot_by_slot(call.batch, call.live, call.side, given)
        filler.lowered["slot_by_slot"] += 1

    def launch(self) -> None:
        """Launch the kernel now."""
        filler = self.filler
        filler.lowered["fused"] += 1
        alone = self.alone
        if alone is None:  # captured on first use: with the kernel in the step's graph it is seldom needed
            alone = filler.capture_alone(self)
            filler.late = time.perf_counter_ns()
        alone.replay()
        filler.buffers.clean.is_sent = False
        if filler.lowering.is_in_graph:
            filler.feed.was_disarmed()


@attrs.define(eq=False, slots=False)
class Filler(Generic[V]):
    """Fills buckets over one set of buffers, by one lowering.

    Attributes:
        stage: The declaration and the backend.
        buffers: The memory of the slots.
        wanted: The lowering, or "auto".
        buckets: The padded sizes of the buckets that share the packet.
        table: The kinds of batches seen so far.
        error_mode: The error mode of captures.
        clock: The clock of the graphs that read the buffers.
        late: The time of the last capture during a fill, by `perf_counter_ns`.
        lowered: The number of fills by lowering.
        compile_computed: Whether functions in graphs are compiled, as the option of runners says.
        feed: Sends the packet.
    """

    stage: Stage[V]
    buffers: Buffers
    wanted: str
    buckets: Sequence[Sizes]
    table: KindTable
    error_mode: str | None = None
    clock: Clock = attrs.field(factory=Clock)
    late: int = 0
    lowered: collections.Counter[str] = attrs.field(factory=collections.Counter)
    compile_computed: bool | None = None
    _tables: int = 0
    _edits: dict[Any, tuple[RowBucket, Graph, object]] = attrs.field(factory=dict)  # by sizes and absent slots

    def __attrs_post_init__(self) -> None:
        """Make what all buckets share."""
        backend = self.stage.backend
        self.lowering = LOWERINGS[chosen_lowering(backend.capabilities, self.wanted)]
        self.stream = backend.stream_key()
        if self.buffers.use.stream is None:
            self.buffers.use.stream = self.stream()
        self.hosts = HostReads(backend, self.buffers)
        self._fusion = backend.fusion() if self.lowering.has_kernel else None
        if self.lowering.has_kernel and self._fusion is None:
            raise ConfigError(f"backend {backend.name!r} names fused lowerings, but fusion() returned None")
        slots, record = self.stage.declaration, backend.capabilities
        most = max((packet_bytes(slots, sizes, record) for sizes in self.buckets), default=WORD)
        rows = 2 * WORD * max((sizes.get(BATCH, 0) for sizes in self.buckets), default=0)  # for rows of an edit
        numbered = self.lowering.is_in_graph and bool(slots.rules)
        self.feed = Feed(backend.upload, most + rows * numbered, numbered=numbered)
        if self._fusion is not None:
            _ = self.feed.upload

    @property
    def nbytes(self) -> int:
        """The bytes of tables, of the packet, and of the host memory that uploads start from."""
        return self._tables + self.feed.nbytes

    @functools.cached_property
    def functions(self) -> CompiledFunctions | None:
        """The compiled functions that all buckets share, or None if they run as written."""
        return compiled_functions(self.stage.backend.capabilities, wanted=self.compile_computed)

    @property
    def how_computed(self) -> dict[str, str]:
        """How the functions in graphs run, as `CaptureReport.functions` has it."""
        return {} if self.functions is None else dict(self.functions.how)

    def make(self, sizes: Sizes, absent: Absent, *, computes: bool = False, **options: Any) -> Filling:
        """Make a bucket and its fills. Nothing is captured yet.

        Args:
            sizes: The padded size of every axis.
            absent: Optional slots that its batches lack.
            computes: Whether fills also run functions on the device.
            options: `exact` and `frozen`, as for `Bucket`.
        """
        fusion = self._fusion
        bucket = self._bucket(sizes, absent, **options)
        if fusion is None:
            return Filling(self, bucket, computes)
        return Filling(self, bucket, computes, self._launcher(fusion.kernel, bucket, fusion.block))

    def _bucket(self, sizes: Sizes, absent: Absent, **options: Any) -> Bucket:
        stage, given = self.stage, {"lowering": self.lowering.name, "feed": self.feed, "table": self.table, **options}
        return Bucket(stage.declaration, sizes, stage.backend.capabilities, self.buffers, absent=absent, **given)

    def capture_alone(self, filling: Filling, *, warm: bool = False) -> Graph:
        """Capture the kernel alone. It disarms the packet, so that the kernel in the step's graph does nothing."""
        backend, kernel = self.stage.backend, filling.kernel
        with outside_inference():
            armed = self.feed.upload.packet[:WORD].view(torch.int64)

        def alone() -> None:
            kernel()
            if self.lowering.is_in_graph:
                armed.zero_()

        if warm:
            warm_up(backend, alone)
        graph = filling.alone = capture_step(backend, alone, backend.pool(), self.error_mode)
        return graph

    def editing(self, sizes: Sizes, absent: Absent, *, by_kernel: bool) -> tuple[RowBucket, Graph | None]:
        """Make the `RowBucket` of a bucket, and the graph of the edit kernel if the device has one."""
        stage, fusion = self.stage, self._fusion
        own = {"table": KindTable(stage.declaration, sizes), "partial": True}
        if not (by_kernel and self.lowering.is_in_graph) or fusion is None or fusion.edit is None:
            return RowBucket(self._bucket(sizes, absent, **{**own, "lowering": "slot_by_slot"})), None
        key = absent, *sizes.values()
        if key not in self._edits:
            bucket = self._bucket(sizes, absent, **own)
            edit = self._launcher(fusion.edit, bucket, fusion.block)
            self.feed.disarm()
            warm_up(stage.backend, edit)
            graph = capture_step(stage.backend, edit, stage.backend.pool(), self.error_mode)
            self._edits[key] = RowBucket(bucket), graph, edit  # the graph reads what it keeps
        return self._edits[key][:2]

    def _launcher(self, kernel: Callable[..., Callable[[], None]], bucket: Bucket, block: int) -> Callable[[], None]:
        """Return a call that launches a kernel over a bucket's table, which the call keeps. block: See `Fusion`."""
        with outside_inference():
            table = torch.from_numpy(bucket.table_of_lanes(block)).to(self.stage.backend.device)
        self._tables += table.nbytes
        return kernel(table, self.feed.upload.packet, [lane.target for lane in bucket.lanes])

    def order(self) -> None:
        """Let a step on another stream than the last one wait for it, because both use the same memory.

        The step also waits for graphs of the same pool, and for buffers that share memory.
        """
        use = self.buffers.use
        clock = self.clock
        stream = self.stream()
        for last in {use.stream, clock.stream, *(other.stream for other in use.neighbours)}:
            if last is not None and last != stream:
                self.stage.backend.order(last, stream)
        use.stream = clock.stream = stream


@attrs.define(eq=False, repr=False)
class Captured:
    """The graph of one bucket for one pattern of absent slots.

    Attributes:
        bucket: The bucket.
        filling: Fills it.
        graph: The graph.
        step: The call that was captured.
        chunks: Graphs of several steps, by their number.
        taken: Storages that the first run of the step used, each with the operators that read or wrote it.
        verified: Whether a check has found that no address moved.
    """

    bucket: BucketKey
    filling: Filling
    graph: Graph
    step: Callable[[], Any]
    taken: Mapping[int, AbstractSet[str]]
    chunks: dict[int, Graph] = attrs.field(factory=dict)
    verified: bool = False

    def __repr__(self) -> str:
        """Return one line."""
        return f"<graph of bucket {self.bucket} of {self.filling.filler.stage.declaration.name}>"

    @property
    def graphs(self) -> list[Graph]:
        """The graphs of one step and of several."""
        return [self.graph, *self.chunks.values()]


Key = tuple[BucketKey, Absent, VariantKey]
Look = Callable[[Callable[[], Any]], State]
"""Runs a whole step for the first time, and returns the state that it changes besides its slots, restored."""
Around = Callable[[Callable[[], Any]], Any]
"""Calls a function in the place of the captured part of a step, with the step's own code before and after."""
Recipe = Callable[[Filling, Look], tuple[Callable[[], Any], Around, State]]
"""Makes the call to capture for a bucket. Finds the step's state before it runs the step in another way."""


@attrs.define(eq=False, slots=False, repr=False)
class GraphSet(Generic[V]):
    """The graphs of one runner over one set of buffers.

    Attributes:
        stage: The declaration, the backend and the step.
        buffers: The memory of the slots.
        filler: Fills the buckets.
        config: The runner's options.
        sizes: Padded sizes of the buckets that are captured.
        patterns: Patterns of absent slots.
        runner: The runner's name.
        coordinator: Coordinates captures with other ranks.
        variants: For each variant, the values of fields that its graphs freeze.
        axes: The axes of the buckets, in the order of their sizes.
        output_rows: The axis that the rows of outputs follow, or None if outputs are whole.
        recipe: What is captured, or None for the whole step.
        holder: The object from which the tensors that graphs read besides slots are reached.
        parameters: Slots that each replay passes to its graph, by the operator's argument.
        chunks: Captures further graphs of each bucket, of several steps, or None if all run one.
        report: The result of the captures, or None before the first.
        captured: The graphs. Each capture makes a new mapping, since another thread may read the old one.
        is_shared: Whether other runners fill the same buffers, and capture graphs over them.
    """

    stage: Stage[V]
    buffers: Buffers
    filler: Filler[V]
    config: RunnerConfig
    sizes: Mapping[BucketKey, Sizes]
    patterns: Collection[Absent]
    runner: str
    coordinator: Coordinator
    variants: Mapping[VariantKey, Mapping[str, Any]]
    axes: Sequence[Axis]
    output_rows: Axis | None
    recipe: Recipe | None = None
    holder: Callable[..., Any] | None = None
    parameters: Mapping[str, str] = attrs.field(factory=dict)
    chunks: Chunks | None = None
    report: CaptureReport | None = None
    captured: Mapping[Key, Captured] = attrs.field(factory=dict)
    is_shared: bool = False
    _forks: int = attrs.field(factory=lambda: FORKS.count)

    def __attrs_post_init__(self) -> None:
        """Join the pool of all graphs of its backend."""
        self._pool = self.stage.backend.pool()
        self.clock = self.filler.clock = clock_of(self._pool)
        self.holdings = Holdings(self.holder)
        self._looks_at_addresses = ADDRESSES in self.config.modes
        self.stamps = GENERATIONS in self.config.modes

    def has(self, bucket: BucketKey, absent: Absent, variant: VariantKey = ()) -> bool:
        """Return whether a graph was captured, or will be when a batch comes for it."""
        return (bucket, absent, variant) in self.captured or self._is_pending(bucket, absent)

    def get(self, bucket: BucketKey | None, absent: Absent, variant: VariantKey = ()) -> Captured | None:
        """Return the graph of a bucket, pattern and variant, or None if there is none. With `lazy`, capture it now."""
        if bucket is None:
            return None
        if (bucket, absent, variant) not in self.captured and self._is_pending(bucket, absent):
            self._capture_buckets([bucket], late=True)
            self.filler.late = time.perf_counter_ns()
        return self.captured.get((bucket, absent, variant))

    def capture(self) -> CaptureReport:
        """Capture every bucket, the last choice first, but none if `lazy`.

        Raise CaptureError at the end if some failed.
        """
        if self.report is not None:
            raise CaptureError(
                "this runner is captured already: its addresses are sealed; make a new runner to capture again"
            )
        sizes, most = self.sizes, self.stage.backend.capabilities.graphs_hint
        wanted = len(sizes) * len(self.patterns) * len(self.variants)
        if most is not None and wanted > most:  # warn before the captures, which may take minutes
            log.warning("many_graphs", runner=self.runner, wanted=wanted, most=most)
        self.coordinator.barrier("captures begin")
        report, failed = self._capture_buckets(() if self.config.lazy else [*reversed([*sizes])])
        self._forks = FORKS.count
        if failed:
            message = f"{len(failed)} of {len(sizes)} buckets were not captured and run eagerly: "
            error = CaptureError(message + "; ".join(report.reasons))
            error.__context__ = failed[0]
            raise error.with_traceback(user_traceback(origin_of(failed[0]))) from None  # user frames
        return report

    def _capture_buckets(
        self, buckets: Sequence[BucketKey], *, late: bool = False
    ) -> tuple[CaptureReport, list[CaptureError]]:
        """Capture some buckets. Return the report, and the errors of those that failed.

        late: Whether a batch has come for them.
        """
        backend, errors = self.stage.backend, list[CaptureError]()
        start, before = time.perf_counter(), backend.memory()
        known = self.report or CaptureReport(memory=self.memory())
        reasons, shows = dict(known.failed), self.config.progress and self.coordinator.rank == 0 and not late

        def text(bucket: BucketKey) -> str:
            return f"capturing bucket {bucket}, {human_bytes(backend.memory().free)} free"

        with frozen_garbage(), self._at_rest(always=late):
            for bucket in progress_over(buckets, text, show=shows):
                try:
                    self._capture_bucket(bucket)
                except CaptureError as error:
                    errors.append(error)
                    reasons[bucket] = str(error)
        if buckets and self.holder is not None and all(one.graph.is_recorded for one in self.captured.values()):
            self.holdings.look()
        seconds, after = known.seconds + time.perf_counter() - start, backend.memory()
        driver = max(0, (before.free - after.free) - (after.allocated - before.allocated)) + known.driver
        done, count = tuple(sorted({bucket for bucket, *_ in self.captured})), len(self.captured)
        how = self.filler.how_computed
        self.report = report = CaptureReport(done, reasons, seconds, self.memory(), driver, how, count)
        report.log(self.runner)
        return report, errors

    def _is_pending(self, bucket: BucketKey, absent: Absent) -> bool:
        """Return whether a bucket is captured when the first batch comes for it. One that failed is not tried again."""
        report = self.report
        if report is None or not self.config.lazy or bucket in report.failed:
            return False
        return bucket in self.sizes and absent in self.patterns

    def _at_rest(self, *, always: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all slots have their initial values.

        It does nothing unless a fill, another runner of a pool, or their owner may have written them.
        """
        self.filler.hosts.wait()
        self.filler.order()  # another runner may have used the memory on another stream
        wanted = always or self.is_shared or any(buffer.pooled or buffer.adopted for buffer in self.buffers)
        return at_rest(self.buffers, self.stage.backend.capabilities) if wanted else contextlib.nullcontext()

    def _capture_bucket(self, bucket: BucketKey) -> None:
        """Capture one bucket for every pattern and variant.

        Raise CaptureError, and keep nothing of it, if this rank or another fails.
        """
        gradients, error = torch.is_grad_enabled(), None
        try:
            for absent, variant in itertools.product(sorted(self.patterns, key=sorted), self.variants):
                made = self._capture(bucket, absent, self.variants[variant])
                self.captured = {**self.captured, (bucket, absent, variant): made}
        except CaptureError as raised:
            error = with_place(raised)
        finally:
            torch.set_grad_enabled(gradients)  # an interrupt may have come while a `no_grad` block ended
        failed = self.coordinator.barrier(f"captured bucket {bucket}", error)
        if failed is not None:
            self.captured = {key: one for key, one in self.captured.items() if key[0] != bucket}
            self.buffers.distrust()
            raise error or CaptureError(f"rank {failed[0]}: {failed[1]}")

    def _capture(self, bucket: BucketKey, absent: Absent, frozen: Mapping[str, Any]) -> Captured:
        stage, filler, coordinator = self.stage, self.filler, self.coordinator
        filling = filler.make(self.sizes[bucket], absent, computes=self.recipe is not None, frozen=frozen)
        filler.feed.disarm()  # the kernel must not write slots during the capture
        self._compute_once(filling.bucket)
        as_warm_up = functools.partial(coordinator.warm_up, backend=stage.backend)
        recipe = self._whole_step if self.recipe is None else self.recipe
        step, around, state = recipe(filling, lambda run: self._look(as_warm_up(run), absent))
        if self.recipe is None:
            filling.compile()
        # The watched run counts as a warm-up if nothing is compiled, since torch.compile is off under a watch. With
        # several ranks it never counts, because all must run a step equally often, whatever each has imported.
        looked = coordinator.size == 1 and "torch._dynamo" not in sys.modules
        for _ in range(self.config.warmups - looked):
            with capture_errors(), state.kept():
                warm_up(stage.backend, functools.partial(around, as_warm_up(step)))
        views = filling.bucket.views  # None for an optional slot that is absent
        named = ((argument, views[name]) for argument, name in self.parameters.items())
        parameters = {argument: view for argument, view in named if view is not None}
        with capture_errors(), state.kept(), stage.backend.stream():
            given = self._pool, self.config.error_mode, parameters
            graph = around(functools.partial(capture_step, stage.backend, step, *given))
            chunks = {} if self.chunks is None else self.chunks.capture(step, graph.outputs, filling.bucket, *given)
        if self.output_rows is not None:
            cut_rows(graph.outputs, self.sizes[bucket][self.output_rows], f"padded row of bucket {bucket}")
        if filler.lowering.has_kernel and not filler.lowering.is_in_graph:
            filler.capture_alone(filling, warm=True)
        _ = self.buffers.addresses
        return Captured(bucket, filling, graph, step, state.taken, chunks)

    def _compute_once(self, bucket: Bucket) -> None:
        """Run the functions with `again=`, so that a capture sees a plan of the bucket, but none that takes fields."""
        with capture_errors(), torch.no_grad():
            for one in bucket.functions(bucket.padded).on_host:
                if one.again and not (one.fields or one.again.fields):  # no batch is there
                    one.run(None, bucket.step(bucket.padded))

    def _look(self, run: Callable[[], Any], absent: Absent) -> State:
        """Run the whole step once under a watch, restore its state, and return the state.

        Raise CaptureError if it writes what it may only read.
        """
        stage, hosts, found = self.stage, self.filler.hosts, list[State]()
        seen = functools.partial(hosts.look, run, absent) if hosts.wants(absent) else run

        def once(note: Callable[[torch.Tensor], None]) -> None:
            state = State.of(stage.backend, stage.state or (), self.buffers)
            with state.kept():
                if stage.state is None:
                    slots = [span(buffer.tensor) for buffer in self.buffers if buffer.nbytes]
                    more = State.found(stage.backend, slots, seen, exact=True, holder=stage.step, inside=note)
                    state = more.joined(state)
                else:
                    seen()
            found.append(state)

        warm_up(stage.backend, lambda: check_writes(once, self.buffers))
        return found[0]

    def _whole_step(self, filling: Filling, look: Look) -> tuple[Callable[[], Any], Around, State]:
        """Make the whole step without gradients.

        It consists of the fused kernel, if that is the first node, functions of computed slots, and the user's step.
        """
        stage, bucket = self.stage, filling.bucket
        view_of = stage.viewer_of_capture(bucket)

        def step() -> Any:
            with torch.no_grad():
                filling.first_nodes()
                view = view_of(None, bucket.padded)
                return with_current(CurrentStep(view), stage.run, view)

        return step, operator.call, look(step)

    def replay(self, captured: Captured) -> None:
        """Replay a filled bucket's graph, on the stream of the fill."""
        if not captured.verified or self._looks_at_addresses:
            self.verify(captured)
        if self._forks != FORKS.count:
            raise ReplayError("this process was forked after capture: graphs belong to the process that captured them")
        try:
            captured.graph.replay()
        except BaseException:
            self.buffers.distrust()  # the failed step has not restored its slots
            raise
        self.clock.replays += 1
        self.buffers.clean.is_sent = False
        if self.filler.hosts.notes:
            self.filler.hosts.note()

    def stamped(self, outputs: Any) -> Any:
        """Return outputs, stamped with their generation if a debug mode asks for that."""
        return map_tensors(outputs, self._stamp) if self.stamps else outputs

    def verify(self, captured: Captured) -> None:
        """Raise ReplayError if memory of a graph has moved. Checks once, or at each replay in a debug mode."""
        if not captured.verified or self._looks_at_addresses:
            for graph in captured.graphs:
                graph.check_addresses()
            moved = ", ".join(map(repr, self.buffers.moved()))
            if moved:
                raise ReplayError(f"the buffers of {moved} moved since capture: a graph would read freed memory")
            captured.verified = True

    def memory(self) -> MemoryAccount:
        """Return the bytes of inputs, graphs and outputs."""
        graphs = [graph for captured in self.captured.values() for graph in captured.graphs]
        return MemoryAccount(
            inputs=self.buffers.nbytes,
            graphs=sum(graph.nbytes for graph in graphs),
            outputs=nbytes_of([graph.outputs for graph in graphs], but=self.buffers.storages),
            uploads=self.filler.nbytes,
            shared=sum(buffer.nbytes for buffer in self.buffers if buffer.pooled),
        )

    def _stamp(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stamp a tensor.

        The stamp of an input lasts until the next fill, of an output slot until the next step, else until a replay in
        the pool.
        """
        inside = next((b for b in self.buffers if b.nbytes and overlaps(tensor, [span(b.tensor)])), None)
        if inside is None or not tensor.numel():
            return Stamped.stamp(tensor, lambda: self.clock.replays)
        name, use = inside.name, self.buffers.use
        if inside.slot.writers == BY_STEP:
            return Stamped.stamp(tensor, lambda: self.clock.replays + use.eager_runs + use.overwritten(name))
        return Stamped.stamp(tensor, lambda: use.fills + use.overwritten(name))
