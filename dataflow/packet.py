"""The packet: what one upload takes to the device, and where everything stands in it.

A packet begins with words for the kernel (see `lanes`), or with a word that arms no kernel where foreach copies read
it. Then comes host data that the batch brought, then values that the host computed, each at a multiple of its unit.
"""

import struct
from collections.abc import Mapping
from typing import Final

import attrs

from .axes import Sizes
from .buffers import Buffers
from .capabilities import DEVICE, Capabilities
from .declaration import Declaration
from .kinds import Kind
from .lanes import Lane, head_bytes, meta, rounded
from .plan import FillPlan
from .planner import LARGE_BYTES, slot_bytes
from .slots import Slot
from .tails import Number

UNIT: Final = 32
"""Bytes that each place is a multiple of where copies read the packet: a vector unit's load, 16 bytes on CUDA and 32 on
an NPU."""
UNARMED: Final = bytes(UNIT)
"""What a packet for copies begins with."""


def most_for_copies(declaration: Declaration, sizes: Sizes, capabilities: Capabilities) -> int:
    """Bytes that a packet for copies may have in a bucket: every slot on the device but large ones."""
    slots = [slot for slot in declaration.slots.values() if slot.placement == DEVICE]
    bodies = [slot_bytes(slot, sizes, capabilities) for slot in slots]
    return UNIT + sum(rounded(body, UNIT) for body in bodies if body < LARGE_BYTES)


@attrs.frozen(eq=False)
class Lanes:
    """What one kernel writes: the lanes of a plan, in the order of `plan.fused`. owner: the number of their table."""

    lanes: tuple[Lane, ...]
    slots: tuple[Slot, ...]
    owner: int

    @classmethod
    def of(cls, plan: FillPlan, declaration: Declaration, buffers: Buffers, owner: int = 0) -> "Lanes":
        """The lanes of a plan over the buffers of its slots."""
        padded = {axis: size for axis in declaration.axes for name, size in plan.sizes if axis.name == name}
        pads: dict[str, Number] = {tail.slot: tail.value for tail in plan.tails}
        slots = tuple(declaration.slots[name] for name in plan.fused)
        lanes = [
            Lane.of(name, buffers[name].view(padded), slot.varying, pads.get(name))
            for name, slot in zip(plan.fused, slots, strict=True)
        ]
        return cls(tuple(lanes), slots, owner)

    @property
    def most(self) -> int:
        """Bytes that a packet for them may have: their words, and all slots but large ones as host data."""
        return head_bytes(len(self.lanes)) + sum(body for body in self._bodies().values() if body <= LARGE_BYTES)

    @property
    def carried(self) -> frozenset[str]:
        """Slots whose host data a packet has room for."""
        return frozenset(name for name, body in self._bodies().items() if body <= LARGE_BYTES)

    def _bodies(self) -> dict[str, int]:
        """Bytes of each lane's padded rows, in the widest dtype that its sources may have."""
        pairs = zip(self.lanes, self.slots, strict=True)
        return {
            lane.slot: rounded(
                lane.outer * lane.row * max(one.itemsize for one in (lane.target.dtype, *slot.converts_from()))
            )
            for lane, slot in pairs
        }

    def words(self, kinds: Mapping[str, Kind], values: frozenset[str], live: Sizes) -> bytes:
        """A packet's words but for the addresses. values: slots that the host computes, of which every row is live."""
        metas, paces = [], []
        for lane, slot in zip(self.lanes, self.slots, strict=True):
            kind, whole = kinds.get(lane.slot), lane.slot in values or not slot.varying
            rows = lane.row if whole else slot.shape[slot.varying[0]].at(live) * lane.inner
            metas.append(meta(rows, lane.target.dtype if kind is None else kind.dtype, lane.target.dtype))
            paces.append(rows if kind is None or kind.pace is None else kind.pace)
        return struct.pack(f"<{1 + 2 * len(metas)}q", self.owner, *metas, *paces)
