"""Steps without a graph: exact fills, of memory that grows on demand or of a runner's own, and the step run on them."""

from collections.abc import Callable
from typing import Any, Generic

from ..dataflow import log
from ..dataflow.axes import Live
from ..dataflow.bucket import Bucket, hand_over
from ..dataflow.buffers import Buffers
from ..dataflow.errors import BatchError
from ..dataflow.guard import GRADIENTS, without_gradients
from ..dataflow.packet import Feed
from ..dataflow.plan import packet_bytes
from ..dataflow.sources import Side
from ..dataflow.specialization import Specializations
from .running import Running, under_way
from .stage import Stage, V
from .traffic import HostReads


class Eagerly(Generic[V]):
    """Fills exact views and runs the step on them. Each axis grows to the next power of two when a batch asks for more.

    held: the exact bucket, and what steps read of its slots in host memory. no_copy: views are of the batch's tensors.
    """

    def __init__(
        self,
        stage: Stage[V],
        runner: str,
        table: Specializations,
        *,
        buffers: Buffers | None = None,
        no_copy: bool = False,
    ) -> None:
        """Use `buffers`, those of a runner's buckets, as long as they are large enough. runner: its name in events."""
        self.stage = stage
        self.no_copy = no_copy
        self._runner = runner
        self._table = table
        self.held = None if buffers is None else self._over(buffers)

    @property
    def buffers(self) -> Buffers | None:
        """The buffers at their present capacity; None before the first batch."""
        held = self.held  # read once: another thread may ask
        return None if held is None else held[0].buffers

    @property
    def hosts(self) -> HostReads:
        """What steps read of slots in host memory, once there was a batch."""
        return self.held[1]  # type: ignore[index] # a fill comes first

    def fill(self, batch: Any, live: Live, side: Side) -> V:
        """Fill from a batch of these rows on each varying axis; the view. BatchError, before anything is written."""
        bucket = self._bucket(live)
        if self.hosts.possible:
            self.hosts.wait()
        fill = hand_over if self.no_copy else Bucket.fill
        ready = fill(bucket, batch, live, self.stage.absent(batch, side), side)
        ready.compute_on_device(batch)
        return self.stage.view(ready, batch)

    def admit(self, batch: Any, live: Live, side: Side) -> None:
        """Raise as a fill of these live sizes would; memory grows as for a fill."""
        self._bucket(live).admit(batch, live, self.stage.absent(batch, side), side)

    def run(self, view: V) -> Any:
        """Run the step on the view filled last; the first without some slots finds what it reads in host memory."""
        hosts, run = self.hosts, self.repeated()
        if hosts.possible:
            absent = self.stage.absent_in(view)
            if hosts.wants(absent):
                return hosts.look(lambda: run(view), absent)
        return run(view)

    def repeated(self) -> Callable[[V], Any]:
        """A call that runs the step on views of the present buffers."""
        stage, turn, gradients = self.stage, self.hosts.turn, GRADIENTS
        step: Callable[[V], Any] = stage.run if stage.restored else stage.step
        note = self.hosts.note if self.hosts.possible else None

        def run(view: V) -> Any:
            turn.eager_runs += 1
            step_now = Running(view)
            if gradients():
                outputs = without_gradients(under_way, step_now, step, view)
            else:
                outputs = under_way(step_now, step, view)
            if note is not None:
                note()
            return outputs

        return run

    def _bucket(self, live: Live) -> Bucket:
        """The bucket for these live sizes, grown if it must. BatchError where its memory is bound and cannot grow."""
        stage, held, declaration = self.stage, self.held, self.stage.declaration
        none = dict.fromkeys((*declaration.axes, *declaration.following), 0)
        before = {**none, **stage.sizes} if held is None else dict(held[0].buffers.capacity)
        short = {axis: rows for axis, rows in zip(declaration.varying, live, strict=True) if rows > before[axis]}
        if held is not None and not short:
            return held[0]
        bound = [buffer.name for buffer in held[0].buffers if buffer.adopted] if held is not None else []
        if bound:
            most = ", ".join(f"{axis} {rows}" for axis, rows in before.items() if axis in short)
            raise BatchError(
                f"slot {bound[0]!r} is bound to memory that cannot grow, and the batch has more rows than {most}"
            )
        capacity = before | {axis: 1 << max(rows - 1, 0).bit_length() for axis, rows in short.items()}
        buffers = stage.allocate(capacity)
        sizes = {axis.name: size for axis, size in capacity.items()}
        log.debug("grown", runner=self._runner, declaration=declaration.name, nbytes=buffers.nbytes, sizes=sizes)
        self.held = self._over(buffers)
        return self.held[0]

    def _over(self, buffers: Buffers) -> tuple[Bucket, HostReads]:
        backend = self.stage.backend
        over = self.stage.declaration, buffers.capacity, backend.capabilities
        feed = Feed(backend.upload, packet_bytes(*over))
        return Bucket(*over, buffers, exact=True, feed=feed, table=self._table), HostReads(backend, buffers)
