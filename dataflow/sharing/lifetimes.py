"""Lifetimes: in which phases a slot's bytes must hold, of every runner that shares memory with others."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import attrs
import torch

from ..arena import Room
from ..axes import Sizes, extent
from ..capabilities import HOST, Capabilities, Placement
from ..declaration import Declaration
from ..errors import ConfigError
from ..roles import resolve_dtype
from ..slots import Constant, Output, Slot, Staged
from ..tails import Keep, Once, Pad
from .phases import Schedule

Name = tuple[str, str]
"""A slot of a member: the member's name, the slot's."""

HOST_MEMORY: Final = "in host memory, where a fill may write what the device has yet to read"
CONSTANT: Final = "a constant, which no step writes"
ONCE: Final = "its tail is set once"
KEPT_TAIL: Final = "its tail is kept, and holds what the slot held before"
ASKED: Final = "it is kept, because that was asked for"
NOT_POOLED: Final = "its backend pools no inputs"
UNPLANNED: Final = "no fill writes all of it in each step"


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


def _frozen_mapping(mapping: Mapping[str, int]) -> Mapping[str, int]:
    return MappingProxyType(dict(mapping))


@attrs.frozen(kw_only=True, eq=False)
class Member:
    """A runner that shares memory with others, as far as the layout must know it.

    phase: when it is in use. declaration: under the runner's settings. capacity: the size of every axis that buffers
    are made for. device: whose memory its device slots lie in. bound: slots whose memory was handed in, which get no
    place. chained: slots of which a parent allocation holds so many parts, one behind the other; the slot itself is
    part 0. kept: slots whose bytes must hold from step to step, such as one whose producer writes only what changed.
    shares: whether the member shares at all; None for what its backend's record says.
    Raises ConfigError where a name is empty or no slot's, or a size is missing.
    """

    name: str
    phase: str
    declaration: Declaration = attrs.field(repr=lambda declaration: declaration.name)
    capacity: Sizes
    capabilities: Capabilities = attrs.field(repr=False)
    device: str = "cpu"
    bound: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    chained: Mapping[str, int] = attrs.field(factory=dict, converter=_frozen_mapping)
    kept: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    shares: bool | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse what is no member."""
        faults = [*self._faults()]
        if faults:
            message = f"member {self.name!r}: {'; '.join(faults)}"
            raise ConfigError(message)

    def _faults(self) -> Iterator[str]:
        if not self.name.strip():
            yield "expected a name"
        for said, names in (("bound", self.bound), ("chained", self.chained), ("kept", self.kept)):
            for name in sorted(names):
                if name not in self.declaration.slots:
                    yield f"{said} names {name!r}, which is no slot of {self.declaration.name}"
        yield from (f"chained: expected a part or more of {n!r}, got {p}" for n, p in self.chained.items() if p < 1)
        missing = [axis.name for axis in self.declaration.axes if axis not in self.capacity]
        if missing:
            yield f"its capacity has no size for {', '.join(missing)}"

    @property
    def pooled(self) -> bool:
        """Whether its slots may share."""
        return self.capabilities.pools_inputs if self.shares is None else self.shares

    @property
    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Slots that need a place, by name."""
        return ((name, slot) for name, slot in self.declaration.slots.items() if name not in self.bound)

    def dtype(self, name: str) -> torch.dtype:
        """A slot's dtype on the member's device."""
        return resolve_dtype(self.declaration.slots[name].dtype, self.capabilities)

    def shape(self, name: str) -> tuple[int, ...]:
        """A slot's shape at full capacity; of a chained one, one part's."""
        return extent(self.declaration.slots[name].shape, self.capacity)

    def room(self, name: str) -> Room:
        """What a slot's memory must be: of a chained one, its parent's."""
        shape, parts = self.shape(name), self.chained.get(name)
        whole = shape if parts is None else (parts, *shape)
        return Room(name, whole, self.dtype(name), self.declaration.slots[name].placement)

    def used(self, name: str) -> int:
        """Bytes that a slot's elements take, all parts of it."""
        room = self.room(name)
        return math.prod(room.shape) * room.dtype.itemsize

    def home(self, name: str) -> "Home":
        """The memory that a slot lies in."""
        return Home(self.device, self.declaration.slots[name].placement)


@attrs.frozen(order=True)
class Home:
    """One kind of memory: a device's own, or what the host has for it."""

    device: str
    placement: Placement


@attrs.frozen
class Lifetime:
    """When a slot's bytes must hold.

    phases: in which ones, in the schedule's order. always: in all of them, between and beside them, too. why: what
    makes it so, in words.
    """

    phases: tuple[str, ...]
    always: bool
    why: str

    def meets(self, other: "Lifetime", schedule: Schedule) -> bool:
        """Whether both may have to hold at once."""
        if self.always or other.always:
            return True
        return any(schedule.meet(mine, theirs) for mine in self.phases for theirs in other.phases)

    def __str__(self) -> str:
        """The phases, or that it is always."""
        return "always" if self.always else ", ".join(self.phases)


def lasting(slot: Slot, name: str, kept: Collection[str] = ()) -> str | None:
    """Why a slot's bytes must hold beyond its runner's phase, or None where they need not.

    Judged by what the slot says of itself, so that a kind of slot that is not known here is kept rather than not.
    """
    rule = slot.rule()
    reasons = {
        CONSTANT: is_constant(slot, name),
        ASKED: name in kept,
        HOST_MEMORY: slot.placement == HOST,
        ONCE: isinstance(rule, Once),
        KEPT_TAIL: isinstance(rule, Keep),
        UNPLANNED: not _written(slot, name),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def is_constant(slot: Slot, name: str) -> bool:
    """Whether a slot's memory holds its initial value for good."""
    written = slot.rewritten or slot.restored or slot.reads(name) is not None or slot.computes() is not None
    return isinstance(slot, Constant) and slot.rule() is None and not written


def _written(slot: Slot, name: str) -> bool:
    """Whether each step writes every row that it reads, or says that whoever writes them does."""
    if slot.computes() is not None:
        return True
    ruled = isinstance(slot.rule(), Pad) or not slot.varying
    return ruled if slot.reads(name) is not None else isinstance(slot, Output) or (isinstance(slot, Staged) and ruled)


def lifetime_of(member: Member, name: str, schedule: Schedule) -> Lifetime:
    """When the bytes of a member's slot must hold, by themselves: what is carried lives longer."""
    reason = lasting(member.declaration.slots[name], name, member.kept) if member.pooled else NOT_POOLED
    if reason is not None:
        return Lifetime(schedule.phases, always=True, why=reason)
    return Lifetime((member.phase,), always=False, why=f"each step of {member.phase} writes it")


@attrs.frozen
class Carry:
    """A value that one member writes in its phase and another reads in a later one, of this round or the next.

    slot: the writer's. writer, reader: members' names. into: the reader's slot, where its name is another.
    """

    slot: str
    writer: str
    reader: str
    into: str | None = None

    @property
    def ends(self) -> tuple[Name, Name]:
        """The slots at both ends."""
        return (self.writer, self.slot), (self.reader, self.into or self.slot)

    def __str__(self) -> str:
        """From where to where."""
        (writer, slot), (reader, into) = self.ends
        return f"{writer}.{slot} to {reader}.{into}"


def name_text(name: Name) -> str:
    """A member's slot, as one writes it."""
    return f"{name[0]}.{name[1]}"
