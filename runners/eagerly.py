"""Steps without a graph: exact fills, of memory that grows on demand or of a runner's own, and the step run on them."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic

import attrs
import torch

from ..dataflow import log
from ..dataflow.admission import Wanted, check_carried, unreadable
from ..dataflow.axes import Axis, Dim, Sizes, extent
from ..dataflow.bucket import Bucket, hand_over
from ..dataflow.buffers import Buffers, BufferTurn
from ..dataflow.capabilities import DEVICE, resolve_dtype
from ..dataflow.errors import BatchError
from ..dataflow.guard import GRADIENTS, without_gradients
from ..dataflow.packet import Feed
from ..dataflow.ready import most_for_copies
from ..dataflow.sizing import Sizer
from ..dataflow.slots import Slot
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
        self._carried = [
            Wanted(name, slots[name], resolve_dtype(slots[name].dtype, capabilities), self._home(slots[name]))
            for name in carry
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

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers at their present capacity."""
        buffers = self.buffers
        return 0 if buffers is None else buffers.nbytes

    def __call__(self, batch: Any, **side: Any) -> Any:
        """Run one step, of which no books are kept."""
        return self.run(self.fill(batch, **side))

    def fill(self, batch: Any, **side: Any) -> V:
        """Fill from a batch and return the exact view. Raises MissingSourceError and BatchError."""
        return self.fill_sized(batch, self.size(batch, side), side)

    def fill_sized(
        self, batch: Any, live: tuple[int, ...], side: Side, relations: Mapping[Axis, Dim] | None = None
    ) -> V:
        """Fill from a batch of these live sizes.

        Args:
            batch: The batch.
            live: Its rows on each varying axis of the runner's declaration.
            side: Side arguments.
            relations: Axes that follow from others, where these are not the stage's.

        Raises:
            BatchError: A source does not fit. Nothing was written.

        """
        live = self.own(live)
        self._check_carried(batch, live)
        bucket, absent = self.bucket(live), self.stage.absent(batch, side)
        hosts = self.hosts()
        if hosts.possible:
            hosts.wait()
        fill = hand_over if self.no_copy else Bucket.fill
        ready = fill(bucket, batch, live, absent, side)
        ready.compute_on_device(batch)
        return self.stage.view(ready, batch, relations)

    def admit(self, batch: Any, live: tuple[int, ...], side: Side) -> None:
        """Raise as a fill of these live sizes would; memory grows as for a fill."""
        live = self.own(live)
        self._check_carried(batch, live)
        self.bucket(live).admit(batch, live, self.stage.absent(batch, side), side)

    def own(self, live: tuple[int, ...]) -> tuple[int, ...]:
        """The runner's live sizes without those of axes that carried slots alone are over."""
        return tuple([live[place] for place in self._places])

    def run(self, view: V) -> Any:
        """Run the step on the view that was filled last.

        The first run without some slots finds which slots in host memory the step's operators read.
        """
        buffers, hosts = self.buffers, self.hosts()
        if buffers is not None:
            buffers.turn.eager_runs += 1
        run: Callable[[V], Any] = self.stage.run
        if hosts.possible:
            values = view.__dict__
            absent = frozenset(name for name, _ in self.stage.declaration.optional if values[name] is None)
            if hosts.wants(absent):
                outputs = without_gradients(under_way, Running(view), hosts.look, lambda: run(view), absent)
                hosts.note()
                return outputs
        outputs = without_gradients(under_way, Running(view), run, view)
        hosts.note()
        return outputs

    def repeated(self) -> Callable[[V], Any]:
        """A call that runs the step again on views like one that it was run on."""
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

    def bucket(self, live: tuple[int, ...]) -> Bucket:
        """The bucket for these live sizes, grown if it must. BatchError where its memory is bound and cannot grow."""
        capacity = self._capacity
        axes = self.stage.declaration.varying
        short = {axis: rows for axis, rows in zip(axes, live, strict=True) if rows > capacity[axis]}
        if self.held is None or short:
            self.held = self._grown(
                capacity, {axis: 1 << max(rows - 1, 0).bit_length() for axis, rows in short.items()}
            )
        return self.held

    @property
    def _capacity(self) -> Sizes:
        if self.held is not None:
            return self.held.buffers.capacity
        declaration = self.stage.declaration
        return dict.fromkeys((*declaration.axes, *declaration.following), 0) | dict(self.stage.sizes)

    def _grown(self, before: Sizes, more: Sizes) -> Bucket:
        stage, held = self.stage, self.held
        bound = [buffer.name for buffer in held.buffers if buffer.adopted] if held is not None else []
        if bound:
            most = ", ".join(f"{axis} {rows}" for axis, rows in before.items() if axis in more)
            raise BatchError(
                f"slot {bound[0]!r} is bound to memory that cannot grow, and the batch has more rows than {most}"
            )
        capacity = {**before, **more}
        buffers = stage.allocate(capacity)
        sizes = {axis.name: size for axis, size in capacity.items()}
        name = stage.declaration.name
        log.debug("grown", runner=self._runner, declaration=name, nbytes=buffers.nbytes, sizes=sizes)
        return self._over(buffers)

    def _over(self, buffers: Buffers) -> Bucket:
        declaration, backend = self.stage.declaration, self.stage.backend
        capabilities, feed = backend.capabilities, None
        if capabilities.packed_uploads:
            feed = Feed(backend.upload, most_for_copies(declaration, buffers.capacity, capabilities))
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

    def _home(self, slot: Slot) -> torch.device:
        return self.stage.backend.device if slot.placement == DEVICE else torch.device("cpu")
