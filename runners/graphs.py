"""The graphs of one runner: how a bucket is filled, what is captured of it, and how it is replayed."""

import collections
import contextlib
import functools
import operator
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic

import attrs
import torch

from ..backends.base import Fusion, Graph
from ..dataflow import log
from ..dataflow.axes import BATCH, Live, Sizes
from ..dataflow.bucket import Absent, Bucket
from ..dataflow.buffers import Buffers, at_rest, overlaps, span
from ..dataflow.capabilities import DEVICE, Lowering, chosen_lowering
from ..dataflow.edits import RowBucket
from ..dataflow.errors import CaptureError, ConfigError, ReplayError, origin_of, user_traceback
from ..dataflow.guard import outside_inference
from ..dataflow.packet import HEAD, WORD, Feed
from ..dataflow.plan import FUSED, packet_bytes
from ..dataflow.ready import Planned, Ready
from ..dataflow.slots import Output
from ..dataflow.sources import Side
from ..dataflow.specialization import Specializations
from .capture import (
    FORKS,
    Captured,
    Filling,
    capture_step,
    clock_of,
    frozen_garbage,
    progress_over,
    told_as_capture_error,
    warm_up,
    with_place,
)
from .config import ADDRESSES, GENERATIONS, RunnerConfig
from .hooks import Coordinator
from .outputs import Stamped, cut_rows, map_tensors, nbytes_of
from .running import Running, under_way
from .stage import Stage, V
from .state import Holdings, State, check_writes
from .statistics import CaptureReport, MemoryAccount, human_bytes
from .traffic import HostReads


@attrs.define(eq=False, slots=False)
class Filler(Generic[V]):
    """Fills a runner's buckets, of these padded sizes, by one lowering. lowered: fills by each.

    late: when something was last captured in the middle of a fill, by `perf_counter_ns`.
    """

    stage: Stage[V]
    buffers: Buffers
    wanted: str
    buckets: Sequence[Sizes]
    error_mode: str | None = None
    table: Specializations = attrs.Factory(lambda self: Specializations(self.stage.declaration), takes_self=True)
    late: int = 0
    lowered: collections.Counter[str] = attrs.field(factory=collections.Counter)
    _tables: int = 0
    _edits: dict[Absent, Filling] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        """Make what all buckets share."""
        backend = self.stage.backend
        self.lowering: Lowering = chosen_lowering(backend.capabilities, self.wanted)
        self.stream = backend.stream_key()
        self.buffers.turn.stream = self.stream()
        self.hosts = HostReads(backend, self.buffers)
        self._fusion = backend.fusion() if self.lowering in FUSED else None
        if self.lowering in FUSED and self._fusion is None:
            raise ConfigError(f"backend {backend.name!r} names fused lowerings, but fusion() gives none")
        slots, record = self.stage.declaration, backend.capabilities
        most = max((packet_bytes(slots, sizes, record) for sizes in self.buckets), default=WORD)
        rows = 2 * WORD * max((sizes.get(BATCH, 0) for sizes in self.buckets), default=0)  # of an edit
        numbered = self.lowering == "in_graph" and bool(slots.rules)
        self._feed = Feed(backend.upload, most + rows * numbered, numbered=numbered)
        if self._fusion is not None:
            _ = self._feed.upload

    @property
    def nbytes(self) -> int:
        """Bytes of tables, of the packet, and of the host memory that uploads start from."""
        return self._tables + self._feed.nbytes

    def make(self, sizes: Sizes, absent: Absent) -> Filling:
        """A bucket with all that fills it but what must be captured."""
        stage, fusion = self.stage, self._fusion
        over = stage.declaration, sizes, stage.backend.capabilities, self.buffers
        bucket = Bucket(*over, lowering=self.lowering, feed=self._feed, table=self.table)
        if fusion is None:
            return Filling(bucket)
        planned = bucket.planned(absent)
        table = self._table(planned, fusion)
        targets = [lane.target for lane in planned.lanes]
        return Filling(bucket, table, fusion.kernel(table, self._feed.upload.packet, targets))

    def capture_alone(self, filling: Filling, *, warm: bool = False) -> Graph:
        """Capture the kernel by itself; where it is a step's first node too, it must not run there a second time."""
        backend, kernel = self.stage.backend, filling.kernel
        with outside_inference():
            armed = self._feed.upload.packet[:WORD].view(torch.int64)

        def alone() -> None:
            kernel()
            if self.lowering == "in_graph":
                armed.zero_()

        if warm:
            warm_up(backend, alone)
        graph = filling.alone = capture_step(backend, alone, pool=backend.pool(), error_mode=self.error_mode)
        return graph

    def first_node(self, filling: Filling, absent: Absent) -> None:
        """Run what a step's graph begins with: rules of slots that are functions, and the kernel."""
        if self.lowering != "in_graph":
            return
        planned = filling.bucket.planned(absent)
        rules = planned.transitions[DEVICE]
        if rules.leaves(planned.fused):
            words = self._feed.upload.packet[: WORD * (HEAD + len(self.stage.declaration.counted))]
            rules.advance_in_graph(words.view(torch.int64).unbind())
        filling.kernel()

    def editing(self, sizes: Sizes, absent: Absent, *, by_kernel: bool) -> Filling:
        """What edits rows of requests of a bucket: its graph, `alone`, where the device has a kernel for that."""
        stage, fusion = self.stage, self._fusion
        if not by_kernel or self.lowering != "in_graph" or fusion is None or fusion.edit is None:
            over = stage.declaration, sizes, stage.backend.capabilities, self.buffers
            return Filling(RowBucket(*over, lowering="slot_by_slot", feed=self._feed, left_out=absent))
        if absent not in self._edits:
            over = stage.declaration, sizes, stage.backend.capabilities, self.buffers
            bucket = RowBucket(*over, lowering="in_graph", feed=self._feed, left_out=absent)
            planned = bucket.planned()
            table = self._table(planned, fusion)
            edit = fusion.edit(table, self._feed.upload.packet, [lane.target for lane in planned.lanes])

            self.rest()
            warm_up(stage.backend, edit)
            graph = capture_step(stage.backend, edit, pool=stage.backend.pool(), error_mode=self.error_mode)
            self._edits[absent] = Filling(bucket, table, edit, graph)
        return self._edits[absent]

    def _table(self, planned: Planned, fusion: Fusion) -> torch.Tensor:
        """The kernel's table of a plan, on the device."""
        with outside_inference():
            table = torch.from_numpy(planned.table(fusion.block)).to(self.stage.backend.device)
        self._tables += table.nbytes
        return table

    def rest(self) -> None:
        """Have the kernel leave the slots alone until a batch comes."""
        self._feed.disarm()

    def order(self) -> None:
        """Let a step that comes on another stream than the last one wait for it: both use the same memory."""
        turn, stream = self.buffers.turn, self.stream()  # asked once: it takes longer than all that follows
        if turn.stream != stream:
            turn.stream = self.follow(turn.stream)
        for other in turn.neighbours:
            if other.stream != stream:
                self.follow(other.stream)

    def follow(self, last: int | None) -> int:
        """Let what comes now wait for what was handed to another stream, where there is one; the current stream."""
        stream = self.stream()
        if last is not None and stream != last:
            self.stage.backend.order(last, stream)
        return stream

    def fill(self, filling: Filling, batch: Any, live: Live, absent: Absent, side: Side, *, whole: bool) -> Ready:
        """Fill a bucket. whole: the step's graph is replayed at once, and may do its own part of the fill."""
        if self.hosts.possible:
            self.hosts.wait()
        fill = filling.bucket.fill_slot_by_slot if self.lowering == "slot_by_slot" else filling.bucket.fill
        ready = fill(batch, live, absent, side)
        if whole and self.lowering == "in_graph":
            self.lowered["in_graph"] += 1
        else:  # a kernel in the graph reads sources later
            self.launched(filling)
        return ready

    def launched(self, filling: Filling) -> None:
        """Count a fill, and launch the kernel now where there is one."""
        if filling.kernel is None:
            self.lowered[self.lowering] += 1
            return
        self.lowered["fused"] += 1
        alone = filling.alone
        if alone is None:  # the first time: a graph that does it itself has no need of this before
            alone = self.capture_alone(filling)
            self.late = time.perf_counter_ns()
        alone.replay()
        if self.lowering == "in_graph":
            self._feed.was_disarmed()


def _as_the_user_sees_it(error: CaptureError, first: CaptureError) -> CaptureError:
    """Give an error the lines of the user's that the first of several came through, which stays its context."""
    error.__context__ = first
    return error.with_traceback(user_traceback(origin_of(first)))


Key = tuple[int, Absent]
Look = Callable[[Callable[[], Any]], State]
"""Runs a whole step for the first time, and tells its state: what it changes beside its slots, which is put back."""
Around = Callable[[Callable[[], Any]], Any]
"""Calls something where a step calls what is captured of it, with the step's own code before and after."""
Recipe = Callable[[Filling, Absent, Look], tuple[Callable[[], Any], Around, State]]
"""Makes the call that is captured of a bucket, and looks at its step's state before it runs the step otherwise."""


@attrs.define(eq=False, slots=False)
class GraphSet(Generic[V]):
    """The graphs of one runner over one set of buffers.

    sizes: of the buckets that are captured. patterns: of absent slots. runner: its name. rows_each: output rows for
    each of a bucket's, None where outputs are whole. recipe: None for the whole step. holder: reaches the tensors that
    graphs read beside slots. parameters: slots that each replay hands to its graph, by the operator's argument.
    captured: the graphs that there are, a new mapping after each capture, as another thread may read it.
    """

    stage: Stage[V]
    buffers: Buffers
    filler: Filler[V]
    config: RunnerConfig
    sizes: Mapping[int, Sizes]
    patterns: Collection[Absent]
    runner: str
    coordinator: Coordinator
    rows_each: int | None
    recipe: Recipe | None
    holder: Callable[..., Any] | None
    parameters: Mapping[str, str]
    report: CaptureReport | None = None
    captured: Mapping[Key, Captured] = attrs.field(factory=dict)
    _forks: int = attrs.field(factory=lambda: FORKS.count)

    def __attrs_post_init__(self) -> None:
        """Take part in the pool of all graphs of its backend."""
        self._pool = self.stage.backend.pool()
        self.clock = clock_of(self._pool)
        self.holdings = Holdings(self.holder)
        self._modes = self.config.modes

    def has(self, bucket: int | None, absent: Absent) -> bool:
        """Whether one bucket and pattern was captured, or will be when a batch comes for it."""
        return (bucket, absent) in self.captured or self._is_pending(bucket, absent)

    def get(self, bucket: int | None, absent: Absent) -> Captured | None:
        """The graph of one bucket and pattern, captured now if that was put off; None where there is none."""
        if bucket is None:
            return None
        if (bucket, absent) not in self.captured and self._is_pending(bucket, absent):
            self._capture_buckets([bucket], late=True)
            self.filler.late = time.perf_counter_ns()
        return self.captured.get((bucket, absent))

    def capture(self) -> CaptureReport:
        """Capture every bucket, the largest first, but not if `lazy`. CaptureError at the end if some failed."""
        if self.report is not None:
            raise CaptureError(
                "this runner is captured already: its addresses are sealed; make a new runner to capture again"
            )
        sizes, meet, most = self.sizes, self.coordinator.meet, self.stage.backend.capabilities.graphs_hint
        wanted = len(sizes) * len(self.patterns)
        if most is not None and wanted > most:  # which is said before minutes are spent on them
            log.warning("many_graphs", runner=self.runner, wanted=wanted, most=most)
        meet("captures begin")
        report, failed = self._capture_buckets(() if self.config.lazy else sorted(sizes, reverse=True))
        self._forks = FORKS.count
        if failed:
            message = f"{len(failed)} of {len(sizes)} buckets were not captured and run eagerly: "
            raise _as_the_user_sees_it(CaptureError(message + "; ".join(report.reasons)), failed[0]) from None
        return report

    def _capture_buckets(
        self, buckets: Sequence[int], *, late: bool = False
    ) -> tuple[CaptureReport, list[CaptureError]]:
        """Capture some buckets; the report, and the errors of those that failed. late: a batch has come for them."""
        backend, errors = self.stage.backend, list[CaptureError]()
        start, before = time.perf_counter(), backend.memory()
        known = self.report or CaptureReport((), {}, 0.0, self.memory())
        reasons, shows = dict(known.failed), self.config.progress and self.coordinator.rank == 0 and not late

        def text(rows: int) -> str:
            return f"capturing bucket {rows}, {human_bytes(backend.memory().free)} free"

        with frozen_garbage(), self._at_rest(always=late):
            for rows in progress_over(buckets, text, show=shows):
                try:
                    self._capture_bucket(rows)
                except CaptureError as error:
                    errors.append(error)
                    reasons[rows] = str(error)
        if buckets and self.holder is not None and all(one.graph.is_recorded for one in self.captured.values()):
            self.holdings.look()
        seconds, after = known.seconds + time.perf_counter() - start, backend.memory()
        driver = max(0, (before.free - after.free) - (after.allocated - before.allocated)) + known.driver
        done = tuple(sorted({rows for rows, _ in self.captured}))
        self.report = report = CaptureReport(done, reasons, seconds, self.memory(), driver)
        report.log(self.runner)
        return report, errors

    def _is_pending(self, bucket: int | None, absent: Absent) -> bool:
        """Whether a bucket is captured once the first batch comes for it; never again where that failed."""
        report = self.report
        if report is None or not self.config.lazy or bucket in report.failed:
            return False
        return bucket in self.sizes and absent in self.patterns

    def _at_rest(self, *, always: bool) -> contextlib.AbstractContextManager[None]:
        """Initial values in the buffers, as at first, where a fill or another runner of a pool may have been since."""
        self.filler.hosts.wait()
        self.filler.order()  # others may have been there on another stream
        wanted = always or any(buffer.pooled for buffer in self.buffers)
        return at_rest(self.buffers, self.stage.backend.capabilities) if wanted else contextlib.nullcontext()

    def _capture_bucket(self, rows: int) -> None:
        """Capture one bucket for every pattern. CaptureError, with nothing of it kept, also of another rank."""
        gradients, error = torch.is_grad_enabled(), None
        try:
            for absent in sorted(self.patterns, key=sorted):
                self.captured = {**self.captured, (rows, absent): self._capture(rows, absent)}
        except CaptureError as raised:
            error = with_place(raised)
        finally:
            torch.set_grad_enabled(gradients)  # an interrupt may come while a `no_grad` block ends
        failed = self.coordinator.meet(f"captured bucket {rows}", error)
        if failed is not None:
            self.captured = {key: one for key, one in self.captured.items() if key[0] != rows}
            self.buffers.distrust()
            raise error or CaptureError(f"rank {failed[0]}: {failed[1]}")

    def _capture(self, rows: int, absent: Absent) -> Captured:
        stage, filler, coordinator = self.stage, self.filler, self.coordinator
        filling = filler.make(self.sizes[rows], absent)
        filler.rest()
        as_warm_up = functools.partial(coordinator.warm_up, backend=stage.backend)
        recipe = self._whole_step if self.recipe is None else self.recipe
        step, around, state = recipe(filling, absent, lambda run: self._look(as_warm_up(run), absent))
        # the look is a warm-up where nothing can be compiled: compiled functions run as they were written under it; of
        # several ranks all run a step equally often, whatever each has imported
        looked = coordinator.size == 1 and "torch._dynamo" not in sys.modules
        for _ in range(self.config.warmups - looked):
            with told_as_capture_error(), state.kept():
                warm_up(stage.backend, functools.partial(around, as_warm_up(step)))
        views = filling.whole(absent).views  # of an optional slot that is absent, None
        named = ((argument, views[name]) for argument, name in self.parameters.items())
        parameters = {argument: view for argument, view in named if view is not None}
        with told_as_capture_error(), state.kept(), stage.backend.stream():
            mode = self.config.error_mode
            capture = functools.partial(capture_step, stage.backend, step, pool=self._pool, error_mode=mode)
            graph = around(functools.partial(capture, parameters=parameters))
        if self.rows_each is not None:
            cut_rows(graph.outputs, rows * self.rows_each, f"padded row of bucket {rows}")
        if filler.lowering == "fused":
            filler.capture_alone(filling, warm=True)
        _ = self.buffers.addresses
        return Captured(rows, filling, graph, step, state.taken)

    def _look(self, run: Callable[[], Any], absent: Absent) -> State:
        """Run the whole step once; its state, which is put back. CaptureError where it writes what it may only read."""
        stage, hosts, found = self.stage, self.filler.hosts, list[State]()
        seen = functools.partial(hosts.look, run, absent) if hosts.wants(absent) else run

        def once(note: Callable[[torch.Tensor], None]) -> None:
            if stage.state is None:
                slots = [span(buffer.tensor) for buffer in self.buffers if buffer.nbytes]
                found.append(State.found(stage.backend, slots, seen, exact=True, holder=stage.step, inside=note))
            else:
                found.append(State.of(stage.backend, stage.state))
                with found[0].kept():
                    seen()

        warm_up(stage.backend, lambda: check_writes(once, self.buffers))
        return found[0]

    def _whole_step(self, filling: Filling, absent: Absent, look: Look) -> tuple[Callable[[], Any], Around, State]:
        """The whole step without gradients: first the fused kernel, where it is the first node, and computed slots."""
        stage, filler, ready = self.stage, self.filler, filling.whole(absent)

        def step() -> Any:
            with torch.no_grad():
                filler.first_node(filling, absent)
                ready.compute_on_device()
                view = stage.view_of_capture(ready)
                return under_way(Running(view), stage.run, view)

        return step, operator.call, look(step)

    def replay(self, captured: Captured, rows: int) -> Any:
        """Replay a filled bucket and return its outputs for `rows` live rows of the leading axis."""
        self.verify(captured)
        if self._forks != FORKS.count:
            raise ReplayError("this process was forked after capture: graphs belong to the process that captured them")
        self.clock.stream = self.filler.follow(self.clock.stream)  # of whichever runner: the graphs share memory
        try:
            captured.graph.replay()
        except BaseException:
            self.buffers.distrust()  # slots that the step would have put back
            raise
        self.clock.replays += 1
        if self.filler.hosts.possible:
            self.filler.hosts.note()
        outputs = captured.live(None if self.rows_each is None else rows * self.rows_each)
        return map_tensors(outputs, self._stamp) if GENERATIONS in self._modes else outputs

    def verify(self, captured: Captured) -> None:
        """Raise ReplayError where memory of a graph is seen to have moved: before its first replay, or each."""
        if not captured.verified or ADDRESSES in self._modes:
            captured.graph.check_addresses()
            moved = ", ".join(map(repr, self.buffers.moved()))
            if moved:
                raise ReplayError(f"the buffers of {moved} moved since capture: a graph would read freed memory")
            captured.verified = True

    def order(self) -> None:
        """Let a whole step wait for what was handed to other streams, of these graphs and of others of their pool."""
        filler, turn, clock = self.filler, self.buffers.turn, self.clock
        last = turn.stream
        filler.order()
        clock.stream = turn.stream if clock.stream == last else filler.follow(clock.stream)

    def memory(self) -> MemoryAccount:
        """Bytes of inputs, graphs and outputs."""
        graphs = [captured.graph for captured in self.captured.values()]
        return MemoryAccount(
            inputs=self.buffers.nbytes,
            graphs=sum(graph.nbytes for graph in graphs),
            outputs=nbytes_of([graph.outputs for graph in graphs], but=self.buffers.storages),
            uploads=self.filler.nbytes,
            shared=sum(buffer.nbytes for buffer in self.buffers if buffer.pooled),
        )

    def _stamp(self, tensor: torch.Tensor) -> torch.Tensor:
        """In an input it lasts to the next fill, in an output slot to the next step, else to a replay in the pool."""
        inside = next((b for b in self.buffers if b.nbytes and overlaps(tensor, [span(b.tensor)])), None)
        if inside is None or not tensor.numel():
            return Stamped.stamp(tensor, lambda: self.clock.replays)
        name, turn = inside.name, self.buffers.turn
        if isinstance(inside.slot, Output):
            return Stamped.stamp(tensor, lambda: self.clock.replays + turn.eager_runs + turn.overwritten(name))
        return Stamped.stamp(tensor, lambda: turn.fills + turn.overwritten(name))
