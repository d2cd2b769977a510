"""The packet: what one upload takes to the device, where everything stands in it, and what sends it.

A packet begins with words for the kernel (see `lanes`), or with a word that arms no kernel where foreach copies read
it. Then comes host data that the batch brought, then values that the host computed, each at a multiple of its unit.
"""

import abc
import functools
import itertools
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import attrs
import torch

from .admission import Kind
from .axes import Sizes
from .buffers import Buffers
from .capabilities import DEVICE, Capabilities
from .declaration import Declaration
from .errors import ConfigError
from .lanes import WORD, Lane, head_bytes, meta, rounded
from .plan import FillPlan
from .planner import LARGE_BYTES, slot_bytes
from .slots import Slot

UNIT: Final = 32
"""Bytes that each place is a multiple of where copies read the packet: a vector unit's load, 16 bytes on CUDA and 32 on
an NPU."""
UNARMED: Final = bytes(UNIT)
"""What a packet for copies begins with."""
_AT_REST: Final = bytes(WORD)
_UNKNOWN: Final = b""


class Upload(abc.ABC):
    """A packet on the device, and what takes bytes to it while the device may still read those sent before."""

    @property
    @abc.abstractmethod
    def packet(self) -> torch.Tensor:
        """The packet, which is bytes on the device, at a fixed address that is a multiple of 64 at least."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes that this holds, on the device and on the host."""

    @abc.abstractmethod
    def send(self, data: bytes, kept: object) -> None:
        """Start one copy of `data` to the packet on the current stream; `kept` stays alive until the device is past it.

        What the packet held beyond stays as it was.
        """

    def move(self, source: torch.Tensor) -> torch.Tensor:
        """A copy of a dense host tensor in memory of its own on the device, beside the packet.

        The source may change as soon as this returns. By default it waits until the device has read it.
        """
        with torch.inference_mode(mode=False):
            return source.detach().to(self.packet.device, copy=True)


class Feed:
    """One packet that several buckets take turns to fill. It is made when first asked for: not all bring host data.

    room: bytes of the packet.
    """

    def __init__(self, upload: Callable[[int], Upload | None], room: int) -> None:
        """Keep a backend's verb, which makes the packet."""
        self.room = room
        self._make = upload
        self._data = _AT_REST
        self._numbers = itertools.count(1)

    @functools.cached_property
    def upload(self) -> Upload:
        """The packet, and what sends to it. ConfigError where the backend has none."""
        upload = self._make(self.room)
        if upload is None:
            raise ConfigError(
                "the backend's record says packed_uploads, or names fused lowerings, but upload() gives None"
            )
        return upload

    @property
    def nbytes(self) -> int:
        """Bytes of the packet, and of the host memory that uploads start from."""
        return self.upload.nbytes if "upload" in vars(self) else 0

    def number(self) -> int:
        """A number for one more table that this packet feeds: it arms no other."""
        return next(self._numbers)

    def arm(self, data: bytes, kept: object) -> None:
        """Have the packet hold a step's bytes."""
        if data == self._data:
            return
        self._data = _UNKNOWN  # in case the next line raises
        self.upload.send(data, kept)
        self._data = data

    def carry(self, data: bytes) -> None:
        """Have the packet hold what foreach copies read: bytes whose first word arms no table."""
        self._data = _UNKNOWN
        self.upload.send(data, None)
        self._data = _AT_REST

    def disarm(self) -> None:
        """Have the kernel do nothing, where it was armed."""
        if self._data is not _AT_REST:
            self.carry(_AT_REST)

    def was_disarmed(self) -> None:
        """Note that the device has disarmed the packet itself."""
        self._data = _AT_REST


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
        pads = {tail.slot: tail.value for tail in plan.tails}
        slots = tuple(declaration.slots[name] for name in plan.fused)
        lanes = [
            Lane.of(name, buffers[name].view(padded), slot.varying, pads.get(name))
            for name, slot in zip(plan.fused, slots, strict=True)
        ]
        return cls(tuple(lanes), slots, owner)

    @property
    def most(self) -> int:
        """Bytes that a packet for them may have: their words, and all slots but large ones as host data."""
        return head_bytes(len(self.lanes)) + sum(body for body in self._bodies.values() if body <= LARGE_BYTES)

    @property
    def carried(self) -> frozenset[str]:
        """Slots whose host data a packet has room for."""
        return frozenset(name for name, body in self._bodies.items() if body <= LARGE_BYTES)

    @property
    def _bodies(self) -> dict[str, int]:
        """Bytes of each lane's padded rows, in the widest dtype that its sources may have."""
        pairs = [(one, (one.target.dtype, *slot.converts_from())) for one, slot in self._pairs]
        return {one.slot: rounded(one.outer * one.row * max(d.itemsize for d in dtypes)) for one, dtypes in pairs}

    @property
    def _pairs(self) -> Iterator[tuple[Lane, Slot]]:
        return zip(self.lanes, self.slots, strict=True)

    def words(self, kinds: Mapping[str, Kind], values: frozenset[str], live: Sizes) -> bytes:
        """A packet's words but for the addresses. values: slots that the host computes, of which every row is live."""
        metas, paces = [], []
        for lane, slot in self._pairs:
            kind, whole = kinds.get(lane.slot), lane.slot in values or not slot.varying
            rows = lane.row if whole else slot.shape[slot.varying[0]].at(live) * lane.inner
            metas.append(meta(rows, lane.target.dtype if kind is None else kind.dtype, lane.target.dtype))
            paces.append(rows if kind is None or kind.pace is None else kind.pace)
        return struct.pack(f"<{1 + 2 * len(metas)}q", self.owner, *metas, *paces)
