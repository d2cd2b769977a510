"""The bound plan: one plan over its buffers, for one kind of each source. Live sizes are arguments of each call."""

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import attrs
import torch

from ..admission import has_memory, is_in_place
from ..axes import Live, Step
from ..buffers import Buffers
from ..computation import Computation, PackedValue
from ..guard import POINTER
from ..hostdata import NOT_CARRIED
from ..packet import WORD
from ..plan import FillPlan
from ..sources import Sources, chosen
from .packing import Packing
from .ways import Way
from .writers import Copies, Tails, Taken

_UNLIKE: Final = (AttributeError, RuntimeError, *NOT_CARRIED)
"""Errors of converting a source whose kind differs from the one before it."""
_MOST_APART: Final = 1024
"""The most source addresses outside all slots that a plan remembers. Beyond this it forgets them."""
_ODD: Final = WORD - 1
"""Bits that are zero in each multiple of a word."""


@attrs.frozen(eq=False)
class Functions:
    """The functions of computed slots, bound to what they read.

    Attributes:
        on_host: Those that the host runs before the packet is sent.
        packed: Those whose results the host writes into the packet.
        on_device: Those that the device runs.
    """

    on_host: Sequence[Computation]
    packed: Sequence[PackedValue]
    on_device: Sequence[Computation]


class BucketOfPlan(Protocol):
    """The members of a bucket that a bound plan uses.

    Attributes:
        padded: The padded size of each axis that varies.
        exact: Whether functions see live rows only, so that they are bound to live sizes.
    """

    padded: Live
    exact: bool

    def step(self, live: Live) -> Step:
        """Return the sizes of a call, for functions that take `step`."""
        ...

    def functions(self, live: Live) -> Functions:
        """Return the bound functions of computed slots for a call of these sizes."""
        ...


@attrs.frozen(eq=False)
class Writers:
    """The writers of a plan.

    Attributes:
        always: Resets tails that may always be dirty.
        tails: Resets the others.
        early: Copies into slots that host functions read, before these run.
        late: Copies that run after the packet was sent.
        packing: Packs the packet. None for a plan that sends no packet.
        computes: Whether the host computes anything.
        distrusts: Whether all tails are reset because a producer may have written them.
    """

    always: Sequence[Tails]
    tails: Sequence[Tails]
    early: Sequence[Copies]
    late: Sequence[Copies]
    packing: Packing | None
    computes: bool
    distrusts: bool


class BoundPlan:
    """A plan bound to its buffers for one kind of each source.

    Attributes:
        plan: The plan.
        ways: How each source reaches its slot.
        packing: Packs the packet. None for a plan that sends no packet.
    """

    __slots__ = (
        "_addressed",
        "_apart",
        "_bounds",
        "_bucket",
        "_buffers",
        "_by_address",
        "_conversions",
        "_functions",
        "_in_place",
        "_writers",
        "packing",
        "plan",
        "ways",
    )

    def __init__(
        self, plan: FillPlan, bucket: BucketOfPlan, buffers: Buffers, ways: Sequence[Way], writers: Writers
    ) -> None:
        self.plan = plan
        self.ways = ways
        self.packing = writers.packing
        self._bucket = bucket
        self._buffers = buffers
        self._bounds = buffers.bounds
        self._apart = set[int]()
        self._functions = None if bucket.exact else bucket.functions(bucket.padded)
        self._writers = writers
        self._conversions = [(way.place, way.convert, way.rows) for way in ways if way.convert is not None]
        self._in_place = [(way.place, way.target) for way in ways if way.in_place]
        self._by_address = by_address(ways)
        self._addressed = chosen([way.place for way in self._by_address])

    def take(self, sources: Sources, live: Live) -> Taken | None:
        """Convert the sources that need it, and copy those whose memory this fill will write. Writes no slot.

        Returns:
            The sources and addresses that writers read. None if a source turns out to be of another kind.
        """
        try:
            if self._conversions:
                sources = self._convert(sources, live)
            for place, target in self._in_place:
                if POINTER(sources[place]) != POINTER(target):
                    return None
            addresses = tuple(map(POINTER, self._addressed(sources)))
            if not self._apart.issuperset(addresses):
                for one in addresses:
                    if one & _ODD or not one or bisect.bisect_right(self._bounds, one) & 1:
                        return self._move_apart(sources, addresses)
                if len(self._apart) > _MOST_APART:
                    self._apart.clear()
                self._apart.update(addresses)  # no slot shares this memory, whatever the size
        except _UNLIKE:
            return None
        return sources, addresses

    def _convert(self, sources: Sources, live: Live) -> Sources:
        """Convert some sources. A source that feeds several slots in one way is converted once."""
        made = [*sources]
        known = dict[tuple[int, Any], Any]()
        for place, convert, rows in self._conversions:
            source = sources[place]
            key = id(source), convert
            if key not in known:
                known[key] = convert(source) if rows is None else convert(source, rows.extent(live))
            made[place] = known[key]
        return tuple(made)

    def _move_apart(self, sources: Sources, addresses: Sequence[int]) -> Taken | None:
        """Copy sources in slots or at misaligned addresses. Return None if one has no memory or is its slot's own."""
        made = [*sources]
        reaches = self._buffers.reaches
        for way, address in zip(self._by_address, addresses, strict=True):
            if address and not address & _ODD and not reaches(address):
                continue
            source = sources[way.place]
            if not has_memory(source) or (way.convert is None and is_in_place(source, self._buffers[way.slot])):
                return None
            if address % source.itemsize or self._buffers.holds(source):
                if way.pace:  # keep the row stride, which is in the packet
                    made[way.place] = source.new_empty_strided(source.shape, source.stride()).copy_(source)
                else:
                    made[way.place] = source.clone(memory_format=torch.contiguous_format)
        sources = tuple(made)
        return sources, tuple(map(POINTER, self._addressed(sources)))

    def write(self, taken: Taken, live: Live, batch: Any) -> None:  # noqa: C901 - calls within would take longer
        """Write the sources from `take`, and run host functions. Raise ComputeError if a function raises."""
        bucket = self._bucket
        writers = self._writers
        clean = self._buffers.clean
        if writers.distrusts:
            clean.forget()
        dirty = clean.begin(bucket, live, bucket.padded)
        for tails in writers.always:
            tails.reset(live, bucket.padded)
        if dirty is not None:
            for tails in writers.tails:
                tails.reset(live, dirty)
        for copies in writers.early:
            copies.copy(taken, live)
        packed: Sequence[PackedValue] = ()
        step: Step | None = None
        if writers.computes:
            functions = self._functions or bucket.functions(live)
            packed = functions.packed
            step = bucket.step(live)
            for computation in functions.on_host:
                computation.run(batch, step)
        packing = self.packing
        if packing is not None:
            sources, addresses = taken
            packet = packing.pack(sources, addresses, live)
            for value in packed:
                packet += value.bytes_of(batch, step)
            packing.feed.send(packet, sources if addresses else None)
        for copies in writers.late:
            copies.copy(taken, live)
        clean.done(bucket, live)


def by_address(ways: Sequence[Way]) -> list[Way]:
    """Return the ways of sources that are written as tensors, in the order of their addresses."""
    return [way for way in ways if not (way.is_bytes or way.in_place)]


def order_of(ways: Sequence[Way]) -> Mapping[int, int]:
    """Return, by a source's place, the index of its address among those that `take` returns."""
    return {way.place: number for number, way in enumerate(by_address(ways))}
