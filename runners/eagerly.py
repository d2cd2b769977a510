"""Steps without a graph: exact fills, of memory that grows on demand or of a runner's own, and the step run on them."""

from collections.abc import Callable, Collection
from typing import Any, Generic

import attrs
import torch

from ..dataflow import log
from ..dataflow.admission import Wanted, check_carried, unreadable
from ..dataflow.axes import extent
from ..dataflow.bucket import Absent, Bucket, hand_over
from ..dataflow.buffers import Buffers, BufferTurn
from ..dataflow.capabilities import DEVICE, resolve_dtype
from ..dataflow.errors import BatchError
from ..dataflow.guard import GRADIENTS, without_gradients
from ..dataflow.packet import Feed
from ..dataflow.plan import packet_bytes
from ..dataflow.sizing import Sizer
from ..dataflow.sources import Side, look_up
from ..dataflow.specialization import Specializations
from .running import Running, under_way
from .stage import Stage, V
from .traffic import HostReads


class Eagerly(Generic[V]):
    """Fills exact views and runs the step on them.

    Each axis grows to the next power of two when a batch asks for more than the memory has.

    Attributes:
        stage: What the runner stands on, with a declaration where slots that are carried are fields.
        held: The exact bucket at its present capacity; None before the first batch.
        no_copy: Whether views are of the batch's own tensors.
    """

    def __init__(
        self,
        stage: Stage[V],
        runner: str,
        size: Sizer,
        *,
        carry: Collection[str] = (),
        buffers: Buffers | None = None,
        no_copy: bool = False,
        table: Specializations | None = None,
    ) -> None:
        """Use `buffers` as long as they are large enough.

        Args:
            stage: What the runner stands on.
            runner: Its name in events.
            size: Tells the live sizes of a batch, those of the leading axis last.
            carry: Slots that the batch has computed already.
            buffers: The memory of the runner's buckets, if it has any.
            no_copy: Whether to hand the batch's own tensors through.
            table: Where to keep specializations of fills that may be repeated.

        """
        capabilities, slots = stage.backend.capabilities, stage.inputs.slotgraph.slots
        own = stage.declaration.carrying(tuple(name for name in carry if name in stage.declaration.slots))
        self.stage = attrs.evolve(stage, declaration=own.related(stage.relations))
        varying = stage.declaration.varying
        self._places = [varying.index(axis) for axis in own.varying]
        self.no_copy = no_copy
        self.size = size
        self._runner = runner
        homes = {DEVICE: stage.backend.device}
        self._carried = [
            Wanted(name, slot, resolve_dtype(slot.dtype, capabilities), homes.get(slot.placement, torch.device("cpu")))
            for name, slot in ((name, slots[name]) for name in carry)
        ]
        self._table = table if self.repeats else Specializations(self.stage.declaration)
        self.held = None if buffers is None else self._over(buffers)
        self._reads: HostReads | None = None

    @property
    def repeats(self) -> bool:
        """Whether a fill may go as one before it: nothing is carried or handed through."""
        return not self._carried and not self.no_copy

    @property
    def buffers(self) -> Buffers | None:
        """The buffers at their present capacity; None before the first batch."""
        held = self.held  # read once: another thread may ask
        return None if held is None else held.buffers

    def __call__(self, batch: Any, **side: Any) -> Any:
        """Run one step, of which no books are kept."""
        return self.run(self.fill(batch, **side))

    def fill(self, batch: Any, **side: Any) -> V:
        """Fill from a batch and return the exact view. Raises MissingSourceError and BatchError."""
        return self.fill_sized(batch, self.size(batch, side), side)

    def fill_sized(self, batch: Any, live: tuple[int, ...], side: Side) -> V:
        """Fill from a batch of these rows on each varying axis. BatchError, before anything is written."""
        bucket, live, absent = self._found(batch, live, side)
        hosts = self.hosts()
        if hosts.possible:
            hosts.wait()
        fill = hand_over if self.no_copy else Bucket.fill
        ready = fill(bucket, batch, live, absent, side)
        ready.compute_on_device(batch)
        return self.stage.view(ready, batch)

    def admit(self, batch: Any, live: tuple[int, ...], side: Side) -> None:
        """Raise as a fill of these live sizes would; memory grows as for a fill."""
        bucket, live, absent = self._found(batch, live, side)
        bucket.admit(batch, live, absent, side)

    def _found(self, batch: Any, live: tuple[int, ...], side: Side) -> tuple[Bucket, tuple[int, ...], Absent]:
        """What a batch is filled into, its live sizes there, and its absent slots; carried ones are checked."""
        live = tuple([live[place] for place in self._places])  # without axes that carried slots alone are over
        self._check_carried(batch, live)
        return self._bucket(live), live, self.stage.absent(batch, side)

    def run(self, view: V) -> Any:
        """Run the step on the view that was filled last.

        The first run without some slots finds which slots in host memory the step's operators read.
        """
        hosts, run = self.hosts(), self.repeated()
        if hosts.possible:
            values = view.__dict__
            absent = frozenset(name for name, _ in self.stage.declaration.optional if values[name] is None)
            if hosts.wants(absent):
                return hosts.look(lambda: run(view), absent)
        return run(view)

    def repeated(self) -> Callable[[V], Any]:
        """A call that runs the step on views of the present buffers."""
        buffers, hosts, stage = self.buffers, self.hosts(), self.stage
        step: Callable[[V], Any] = stage.run if stage.lend or stage.restored else stage.step
        turn = BufferTurn() if buffers is None else buffers.turn
        note, gradients = hosts.note if hosts.possible else None, GRADIENTS

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

    def hosts(self) -> HostReads:
        """What steps read of slots in host memory, of the present buffers."""
        buffers = self.buffers
        if self._reads is None or self._reads.buffers is not buffers:
            self._reads = HostReads(self.stage.backend, buffers)
        return self._reads

    def _bucket(self, live: tuple[int, ...]) -> Bucket:
        """The bucket for these live sizes, grown if it must. BatchError where its memory is bound and cannot grow."""
        stage, held, declaration = self.stage, self.held, self.stage.declaration
        if held is None:
            before = dict.fromkeys((*declaration.axes, *declaration.following), 0) | dict(stage.sizes)
        else:
            before = dict(held.buffers.capacity)
        short = {axis: rows for axis, rows in zip(declaration.varying, live, strict=True) if rows > before[axis]}
        if held is not None and not short:
            return held
        bound = [buffer.name for buffer in held.buffers if buffer.adopted] if held is not None else []
        if bound:
            most = ", ".join(f"{axis} {rows}" for axis, rows in before.items() if axis in short)
            raise BatchError(
                f"slot {bound[0]!r} is bound to memory that cannot grow, and the batch has more rows than {most}"
            )
        capacity = before | {axis: 1 << max(rows - 1, 0).bit_length() for axis, rows in short.items()}
        buffers = stage.allocate(capacity)
        sizes = {axis.name: size for axis, size in capacity.items()}
        log.debug("grown", runner=self._runner, declaration=declaration.name, nbytes=buffers.nbytes, sizes=sizes)
        self.held = held = self._over(buffers)
        return held

    def _over(self, buffers: Buffers) -> Bucket:
        declaration, backend = self.stage.declaration, self.stage.backend
        capabilities, feed = backend.capabilities, None
        if capabilities.packed_uploads:
            feed = Feed(backend.upload, packet_bytes(declaration, buffers.capacity, capabilities))
        over = declaration, buffers.capacity, capabilities, buffers
        return Bucket(*over, exact=True, feed=feed, table=self._table)

    def _check_carried(self, batch: Any, live: tuple[int, ...]) -> None:
        """Hold the slots that the batch has computed to their declaration, like any source."""
        sizes = {**self.stage.sizes, **dict(zip(self.stage.declaration.varying, live, strict=True))}
        for want in self._carried:
            sized = extent(want.slot.shape, sizes) if want.slot.axes <= sizes.keys() else None
            source = look_up(batch, want.name)
            known = sized is not None or not isinstance(source, torch.Tensor) or unreadable(source)
            shape = sized or () if known else tuple(source.shape)  # of an axis that no copied slot tells, any size
            check_carried(want, source, shape)
