"""The filler: how one runner's buckets are filled, lowering by lowering, and which took each batch."""

import collections
import time
from typing import Any, Final, Generic

import attrs
import torch

from ..backends.base import Fusion, Graph
from ..dataflow.axes import Sizes
from ..dataflow.bucket import Absent, Bucket
from ..dataflow.buffers import Buffers
from ..dataflow.capabilities import Lowering, chosen_lowering
from ..dataflow.errors import ConfigError
from ..dataflow.feed import Feeder
from ..dataflow.lanes import WORD, table_of
from ..dataflow.packet import Lanes, most_for_copies
from ..dataflow.plan import FUSED
from ..dataflow.planner import plan_fill
from ..dataflow.ready import Ready
from ..dataflow.sources import Side
from .capture import capture_step, warm_up
from .config import OFF, STREAMS
from .hostreads import HostReads
from .stage import Stage, V

_NO_STREAMS: Final = frozenset[int]()


@attrs.define(eq=False)
class Filling:
    """One bucket's fills for one pattern of absent slots.

    kernel: what launches the kernel, `table` what it reads. alone: a graph of the kernel by itself, to be replayed
    where a fill must be done before the step's graph.
    """

    bucket: Bucket
    table: torch.Tensor | None = None
    kernel: Any = None
    alone: Graph | None = None


class Filler(Generic[V]):
    """Fills a runner's buckets by one lowering, and by the next where a batch asks for it.

    modes: of debugging: order sources of other streams. lowered: fills by each lowering. detours: why batches were
    filled by a later one than chosen. late: when something was last captured in the middle of a fill, whose time then
    says nothing of fills, by `perf_counter_ns`.
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
    ) -> None:
        capabilities = stage.backend.capabilities
        self.stage = stage
        self.buffers = buffers
        self.lowering: Lowering = chosen_lowering(capabilities, lowering)
        self.lowered: collections.Counter[str] = collections.Counter()
        self.detours: collections.Counter[str] = collections.Counter()
        self.late = 0
        self._orders_sources = STREAMS in modes
        self._error_mode = error_mode
        self._tables = 0
        self.stream = stage.backend.stream_key()
        buffers.turn.stream = self.stream()
        self.hosts = HostReads(stage.backend, buffers)
        self._fusion = self._fusion_of(stage) if self.lowering in FUSED else None
        self._feeder = Feeder(stage.backend.upload, self._most(buckets))
        if self._fusion is not None:
            self._feeder()

    @staticmethod
    def _fusion_of(stage: Stage[V]) -> Fusion:
        fusion = stage.backend.fusion()
        if fusion is None:
            message = f"backend {stage.backend.name!r} names fused lowerings, but fusion() gives none"
            raise ConfigError(message)
        return fusion

    def _most(self, buckets: "list[Sizes]") -> int:
        """Bytes of the largest packet that any bucket may ask for."""
        stage = self.stage
        capabilities, declaration = stage.backend.capabilities, stage.declaration
        most = [most_for_copies(declaration, sizes, capabilities) for sizes in buckets if capabilities.packed_uploads]
        if self._fusion is not None:
            foreign = self.buffers.foreign
            for sizes in buckets:
                plan = plan_fill(declaration, sizes, capabilities, lowering=self.lowering, foreign=foreign)
                most.append(Lanes.of(plan, declaration, self.buffers).most)
        return max(most, default=WORD)

    @property
    def nbytes(self) -> int:
        """Bytes of tables, of the packet, and of the host memory that uploads start from."""
        return self._tables + self._feeder.nbytes

    def make(self, sizes: Sizes, absent: Absent) -> Filling:
        """A bucket with all that fills it but what must be captured."""
        stage, fusion = self.stage, self._fusion
        capabilities = stage.backend.capabilities
        feeder = self._feeder if capabilities.packed_uploads or fusion is not None else None
        bucket = Bucket(stage.declaration, sizes, capabilities, self.buffers, lowering=self.lowering, feeder=feeder)
        lanes = bucket.planned(absent).lanes
        if fusion is None or lanes is None:
            return Filling(bucket)
        rows = table_of(lanes.lanes, fusion.block, lanes.owner)
        with torch.inference_mode(mode=False):
            table = torch.from_numpy(rows).to(stage.backend.device)
        self._tables += table.nbytes
        targets = [lane.target for lane in lanes.lanes]
        return Filling(bucket, table, fusion.kernel(table, self._feeder().upload.packet, targets))

    def capture_alone(self, filling: Filling, *, warm: bool = False) -> None:
        """Capture the kernel by itself; where it is a step's first node too, it must not run there a second time."""
        stage, feed, kernel = self.stage, self._feeder.made, filling.kernel
        if feed is None:
            return
        with torch.inference_mode(mode=False):
            armed = feed.upload.packet[:WORD].view(torch.int64)

        def alone() -> None:
            kernel()
            if self.lowering == "in_graph":
                armed.zero_()

        pool, mode = stage.backend.pool(), self._error_mode
        if warm:
            warm_up(stage.backend, alone)
        filling.alone = capture_step(stage.backend, alone, pool=pool, error_mode=mode)

    def captured_late(self) -> None:
        """Something was captured that had been put off."""
        self.late = time.perf_counter_ns()

    def first_node(self, filling: Filling) -> None:
        """Run what a step's graph begins with."""
        if self.lowering == "in_graph":
            filling.kernel()

    def rest(self) -> None:
        """Have the kernel leave the slots alone until a batch comes."""
        if self._feeder.made is not None:
            self._feeder.made.disarm()

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
        foreign = self._foreign(filling, batch, side) if self._orders_sources else _NO_STREAMS
        if foreign:
            return self._from_foreign(foreign, filling, batch, live, absent, side)
        return self._filled(filling, batch, live, absent, side, whole=whole)

    def _filled(
        self, filling: Filling, batch: Any, live: tuple[int, ...], absent: Absent, side: Side, *, whole: bool
    ) -> Ready:
        bucket = filling.bucket
        if self.lowering == "slot_by_slot":
            ready = bucket.fill_slot_by_slot(batch, live, absent, side)
        else:
            ready = bucket.fill(batch, live, absent, side)
        if whole and self.lowering == "in_graph":
            self.lowered["in_graph"] += 1
        else:
            self.launched(filling)
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
        if self.lowering == "in_graph" and self._feeder.made is not None:
            self._feeder.made.was_disarmed()

    def _foreign(self, filling: Filling, batch: Any, side: Side) -> frozenset[int]:
        """Streams other than the current one that sources' memory belongs to."""
        sources = filling.bucket.gather(batch, side)
        device = self.stage.backend.device
        tensors = [one for one in sources if isinstance(one, torch.Tensor) and one.device == device and one.numel()]
        return frozenset(self.stage.backend.streams_of(tensors)) - {self.stream()}

    def _from_foreign(
        self,
        foreign: frozenset[int],
        filling: Filling,
        batch: Any,
        live: tuple[int, ...],
        absent: Absent,
        side: Side,
    ) -> Ready:
        """Fill in order with the streams that sources belong to: after what they wrote, before what they write next."""
        backend, here = self.stage.backend, self.stream()
        for stream in foreign:
            backend.order(stream, here)
        ready = self._filled(filling, batch, live, absent, side, whole=False)  # a kernel in the graph reads them later
        for stream in foreign:
            backend.order(here, stream)
        self.detours["foreign_stream"] += 1
        return ready
