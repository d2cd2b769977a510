"""The filler: how one runner's buckets are filled, lowering by lowering, and which took each batch."""

import collections
import time
from typing import Any, Generic

import torch

from ..backends.base import Fusion
from ..dataflow.axes import Sizes
from ..dataflow.bucket import Absent, Bucket
from ..dataflow.buffers import Buffers
from ..dataflow.capabilities import Lowering, chosen_lowering
from ..dataflow.errors import ConfigError
from ..dataflow.packet import WORD, Feed, table_of
from ..dataflow.plan import FUSED, plan_fill
from ..dataflow.ready import Lanes, Ready, most_for_copies
from ..dataflow.sources import Side
from ..dataflow.specialization import Specializations
from .capture import capture_step, warm_up
from .captured import Filling
from .config import OFF, STREAMS
from .hostreads import HostReads
from .stage import Stage, V


class Filler(Generic[V]):
    """Fills a runner's buckets by one lowering, and by the next where a batch asks for it.

    modes: of debugging: order sources of other streams. table: where buckets keep their specializations. lowered: fills
    by each lowering. detours: why batches were filled by a later one than chosen. late: when something was last
    captured in the middle of a fill, whose time then says nothing of fills, by `perf_counter_ns`.
    """

    def __init__(
        self,
        stage: Stage[V],
        buffers: Buffers,
        lowering: str,
        buckets: "list[Sizes]",
        *,
        modes: frozenset[str] = OFF,
        error_mode: str | None = None,
        table: Specializations | None = None,
    ) -> None:
        self.stage = stage
        self.buffers = buffers
        self.lowering: Lowering = chosen_lowering(stage.backend.capabilities, lowering)
        self.lowered: collections.Counter[str] = collections.Counter()
        self.detours: collections.Counter[str] = collections.Counter()
        self.late = 0
        self._orders_sources = STREAMS in modes
        self._error_mode = error_mode
        self._tables = 0
        self._table = Specializations(stage.declaration) if table is None else table
        self.stream = stage.backend.stream_key()
        buffers.turn.stream = self.stream()
        self.hosts = HostReads(stage.backend, buffers)
        self._fusion = self._fusion_of(stage) if self.lowering in FUSED else None
        self._feed = Feed(stage.backend.upload, max(map(self._most, buckets), default=WORD))
        if self._fusion is not None:
            _ = self._feed.upload

    @staticmethod
    def _fusion_of(stage: Stage[V]) -> Fusion:
        fusion = stage.backend.fusion()
        if fusion is None:
            raise ConfigError(f"backend {stage.backend.name!r} names fused lowerings, but fusion() gives none")
        return fusion

    def _most(self, sizes: Sizes) -> int:
        """Bytes of the largest packet that a bucket may ask for."""
        declaration, capabilities = self.stage.declaration, self.stage.backend.capabilities
        most = most_for_copies(declaration, sizes, capabilities) if capabilities.packed_uploads else WORD
        if self._fusion is None:
            return most
        plan = plan_fill(declaration, sizes, capabilities, lowering=self.lowering, foreign=self.buffers.foreign)
        return max(most, Lanes.of(plan, declaration, self.buffers).most)

    @property
    def nbytes(self) -> int:
        """Bytes of tables, of the packet, and of the host memory that uploads start from."""
        return self._tables + self._feed.nbytes

    def make(self, sizes: Sizes, absent: Absent) -> Filling:
        """A bucket with all that fills it but what must be captured."""
        stage, fusion = self.stage, self._fusion
        capabilities = stage.backend.capabilities
        feed = self._feed if capabilities.packed_uploads or fusion is not None else None
        over = stage.declaration, sizes, capabilities, self.buffers
        bucket = Bucket(*over, lowering=self.lowering, feed=feed, table=self._table)
        lanes = bucket.planned(absent).lanes
        if fusion is None or lanes is None:
            return Filling(bucket)
        rows = table_of(lanes.lanes, fusion.block, lanes.owner)
        with torch.inference_mode(mode=False):
            table = torch.from_numpy(rows).to(stage.backend.device)
        self._tables += table.nbytes
        targets = [lane.target for lane in lanes.lanes]
        return Filling(bucket, table, fusion.kernel(table, self._feed.upload.packet, targets))

    def capture_alone(self, filling: Filling, *, warm: bool = False) -> None:
        """Capture the kernel by itself; where it is a step's first node too, it must not run there a second time."""
        backend, kernel = self.stage.backend, filling.kernel
        with torch.inference_mode(mode=False):
            armed = self._feed.upload.packet[:WORD].view(torch.int64)

        def alone() -> None:
            kernel()
            if self.lowering == "in_graph":
                armed.zero_()

        if warm:
            warm_up(backend, alone)
        filling.alone = capture_step(backend, alone, pool=backend.pool(), error_mode=self._error_mode)

    def captured_late(self) -> None:
        """Something was captured that had been put off."""
        self.late = time.perf_counter_ns()

    def first_node(self, filling: Filling) -> None:
        """Run what a step's graph begins with."""
        if self.lowering == "in_graph":
            filling.kernel()

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

    def fill(
        self, filling: Filling, batch: Any, live: tuple[int, ...], absent: Absent, side: Side, *, whole: bool
    ) -> Ready:
        """Fill a bucket. whole: the step's graph is replayed at once, and may do what is its own part of the fill.

        Raises MissingSourceError and BatchError before anything is written.
        """
        if self.hosts.possible:
            self.hosts.wait()
        backend, here = self.stage.backend, self.stream()
        foreign = self._foreign(filling, batch, side) - {here} if self._orders_sources else ()
        for stream in foreign:  # after what they wrote
            backend.order(stream, here)
        fill = filling.bucket.fill_slot_by_slot if self.lowering == "slot_by_slot" else filling.bucket.fill
        ready = fill(batch, live, absent, side)
        if whole and not foreign and self.lowering == "in_graph":
            self.lowered["in_graph"] += 1
        else:  # a kernel in the graph reads sources later
            self.launched(filling)
        for stream in foreign:  # before what they write next
            backend.order(here, stream)
        if foreign:
            self.detours["foreign_stream"] += 1
        return ready

    def launched(self, filling: Filling) -> None:
        """Count a fill, and launch the kernel now where there is one."""
        if filling.kernel is None:
            self.lowered[self.lowering] += 1
            return
        self.lowered["fused"] += 1
        if filling.alone is None:  # the first time: a graph that does it itself has no need of this before
            self.capture_alone(filling)
            self.captured_late()
        if filling.alone is not None:
            filling.alone.replay()
        if self.lowering == "in_graph":
            self._feed.was_disarmed()

    def _foreign(self, filling: Filling, batch: Any, side: Side) -> frozenset[int]:
        """The streams that sources' memory belongs to."""
        sources, device = filling.bucket.gather(batch, side), self.stage.backend.device
        tensors = [one for one in sources if isinstance(one, torch.Tensor) and one.device == device and one.numel()]
        return frozenset(self.stage.backend.streams_of(tensors))
