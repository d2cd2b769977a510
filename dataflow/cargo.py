"""The cargo: what the host has for device slots, taken up in one packet, out of which foreach copies fill the slots.

The packet: a word that arms no table; then host data that the batch brought, then values that the host computed, each
in its slot's own dtype. What is too large for it is moved by itself.
"""

from collections.abc import Sequence
from typing import Any, Final

import attrs
import torch

from .admission import Fact, Wanted
from .alike import Alike
from .axes import Sizes
from .buffers import Buffers
from .capabilities import DEVICE, Capabilities
from .computation import Computation
from .copies import Groups, Singles, copy_all
from .declaration import Declaration
from .feed import Feeder
from .gather import Sources, chosen
from .hostdata import NOT_CARRIED, Bytes, tensor_carrier
from .kinds import hosted_kind
from .lanes import rest, rounded
from .packed import PackedValue
from .plan import FillPlan
from .planner import LARGE_BYTES, slot_bytes

UNIT: Final = 32
"""Bytes that each place in the packet is a multiple of: a vector unit's load, 16 bytes on CUDA and 32 on an NPU."""
_MIXTURES: Final = 4
"""Mixtures of host data that one live size remembers."""


_HEAD: Final = bytes(UNIT)


def most_cargo(declaration: Declaration, sizes: Sizes, capabilities: Capabilities) -> int:
    """Bytes that a packet of a bucket may have: every slot on the device but large ones."""
    slots = [slot for slot in declaration.slots.values() if slot.placement == DEVICE]
    bodies = [slot_bytes(slot, sizes, capabilities) for slot in slots]
    return UNIT + sum(rounded(body, UNIT) for body in bodies if body < LARGE_BYTES)


@attrs.frozen(eq=False)
class Hosted:
    """A slot whose source is host data: what it wants, what its source is like, and whether it rides in the packet."""

    want: Wanted
    fact: Fact
    rides: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the source's live rows in the slot's dtype."""
        return torch.Size(self.fact[2]).numel() * self.want.dtype.itemsize


class Mixture:
    """Host data of certain kinds as bytes, and as tensors where it does not ride; nothing of other kinds."""

    def __init__(self, hosted: Sequence[Hosted], sources: Sources, buffers: Buffers) -> None:
        rows = zip(hosted, sources, strict=True)
        self._kinds = [hosted_kind(one.want, source, one.fact, buffers, loose=not one.rides) for one, source in rows]
        self._alike = Alike(self._kinds, sources)
        self._carriers = [kind.carrier for kind in self._kinds if kind.carrier is not None]
        riding = [one for one in hosted if one.rides]
        self._count = len(riding)
        self._parts: list[Bytes] = [_HEAD, *(part for one in riding for part in (b"", rest(one.nbytes, UNIT)))]

    def carry(self, sources: Sources) -> Sources | None:
        """The packet's bytes, then tensors; None where sources are not like those this was made for."""
        if not self._alike(sources):
            return None
        parts = self._parts.copy()
        try:
            if self._alike.only_arrays:
                parts[1::2] = sources
                return (b"".join(parts),)
            made = [carry(source) for carry, source in zip(self._carriers, sources, strict=True)]
            parts[1::2] = made[: self._count]
            return (b"".join(parts), *made[self._count :])
        except NOT_CARRIED:
            return None


@attrs.frozen
class _Place:
    """Where a slot's share stands in the packet, and which one it is of all that is copied."""

    at: int
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Cargo:
    """What one live size takes up, and the sources that its copies then have.

    hosted: slots with host data, those that ride in the packet first. values: what the host computes for slots on the
    device, by slot. early: copies to slots on the host, and host: what is computed for these: both are done before
    anything is computed for the packet, which may need them.
    """

    def __init__(
        self,
        plan: FillPlan,
        wanted: Sequence[Wanted],
        facts: Sequence[Fact],
        values: Sequence[PackedValue],
        buffers: Buffers,
        feeder: Feeder,
        *,
        early: tuple[Groups, Singles],
        host: Sequence[Computation],
    ) -> None:
        rides = frozenset(plan.packed)
        places = {name: at for at, name in enumerate(name for group in plan.copies for name in group.slots)}
        sources = {want.name: index for index, want in enumerate(wanted)}
        hosted = sorted(sources.keys() & {*plan.packed, *plan.moved}, key=lambda name: (name not in rides, name))
        self.hosted = [Hosted(wanted[sources[name]], facts[sources[name]], name in rides) for name in hosted]
        self.values = tuple(values)
        self._buffers = buffers
        self._feeder = feeder
        self._early = early
        self._host = tuple(host)
        self._count = len(wanted)
        self._chosen = chosen([sources[name] for name in hosted])
        self._brought = [(places[name], index) for name, index in sources.items() if name not in hosted]
        self._loose = [places[one.want.name] for one in self.hosted if not one.rides]
        self._riding = [value for value in self.values if value.slot in rides]
        self._heavy = [(places[value.slot], value) for value in self.values if value.slot not in rides]
        self._places = self._laid_out(places)
        self._full: list[Any] = [None] * len(places)
        self._open = False
        self._mixtures: list[Mixture] = []

    def carry(self, sources: Sources) -> Sources | None:
        """Sources, and behind them host data as bytes and tensors; None where some is no host data that fits."""
        if not self.hosted:
            return sources
        hosted = self._chosen(sources)
        for place, mixture in enumerate(self._mixtures):
            carried = mixture.carry(hosted)
            if carried is not None:
                if place:
                    self._mixtures.insert(0, self._mixtures.pop(place))
                return (*sources, *carried)
        made = Mixture(self.hosted, hosted, self._buffers)
        carried = made.carry(hosted)
        if carried is None:
            return None
        self._mixtures.insert(0, made)
        del self._mixtures[_MIXTURES:]
        return (*sources, *carried)

    def carry_tensors(self, sources: Sources) -> Sources:
        """The same of sources that were admitted: host data is dense tensors of its slots' dtypes."""
        if not self.hosted:
            return sources
        parts: list[Bytes] = [_HEAD]
        alone = []
        for one, tensor in zip(self.hosted, self._chosen(sources), strict=True):
            if one.rides:
                parts += [tensor_carrier(one.nbytes)(tensor), rest(one.nbytes, UNIT)]
            else:
                alone.append(tensor)
        return (*sources, b"".join(parts), *alone)

    def load(self, sources: Sources, batch: Any) -> list[torch.Tensor]:
        """Take everything up, and return what to copy from, in the plan's order.

        sources: as `carry` gave them. Raises ComputeError before the packet is written.
        """
        if not self._open:
            self._unfold()
        full = self._full.copy()
        for at, index in self._brought:
            full[at] = sources[index]
        copy_all(*self._early, full)
        for computation in self._host:
            computation.run(batch)
        data = sources[self._count] if self.hosted else _HEAD
        if self._riding:
            data = b"".join((data, *[value.bytes_of(batch) for value in self._riding]))
        heavy = [(at, value.tensor_of(batch)) for at, value in self._heavy]
        feed = self._feeder()
        if len(data) > UNIT:
            feed.carry(data)
        for at, tensor in (*heavy, *zip(self._loose, sources[self._count + 1 :], strict=True)):
            full[at] = feed.upload.move(tensor)
        return full

    def _laid_out(self, places: dict[str, int]) -> list[_Place]:
        """Where everything stands in the packet."""
        found, start = [], UNIT
        for one in self.hosted:
            if one.rides:
                found.append(_Place(places[one.want.name], start, one.nbytes, one.want.dtype, one.fact[2]))
                start += rounded(one.nbytes, UNIT)
        for value in self._riding:
            target = value.scratch
            found.append(_Place(places[value.slot], start, target.nbytes, target.dtype, tuple(target.shape)))
            start += value.nbytes
        return found

    def _unfold(self) -> None:
        """Have the packet's parts at hand as tensors: they lie at the same place in each step."""
        packet = self._feeder().upload.packet
        if self._places and self._places[-1].start + self._places[-1].nbytes > packet.nbytes:
            message = f"the packet has {packet.nbytes} bytes, too few for a bucket that it was not made for"
            raise ValueError(message)
        with torch.inference_mode(mode=False):
            for one in self._places:
                part = packet[one.start : one.start + one.nbytes]
                self._full[one.at] = part.view(one.dtype).view(one.shape)
        self._open = True
