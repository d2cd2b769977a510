"""Lifetimes: the phases of a loop, the runners that are used in them, and when each slot's bytes must hold.

Slots of several runners are one memory on purpose where a value carries over from one to the other.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from ..axes import Sizes, extent
from ..buffers import Room
from ..capabilities import HOST, Capabilities, Placement, dtype_text, resolve_dtype
from ..declaration import Declaration
from ..errors import ConfigError
from ..slots import Constant, Output, Slot, Staged
from ..tails import Keep, Once, Pad

Pair = tuple[str, str]
Key = tuple[str, str]
"""A member's name and a slot's."""


def _listed(value: Any, expected: str = "phases: expected names") -> tuple[Any, ...]:
    """The items of a list; a text alone would be a list of letters."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"{expected} in a list or tuple, got {value!r}")
    return tuple(value)


def _pairs(value: Any) -> tuple[Any, ...]:
    return tuple(map(_listed, _listed(value, "overlaps: expected pairs of phases")))


@attrs.frozen
class Schedule:
    """The phases of a loop, and which of them may be in use at once.

    A phase begins with the first write to an input of one of its runners, by a fill or a producer. It ends when the
    step is done and its outputs have been read.

    Args:
        order: Phases that run one after the other, then from the first again. A round may leave one out.
        overlaps: Pairs of phases of which one may begin before the other has ended.
        anytime: Phases that keep to no order, and so may overlap with all others.

    Raises:
        ConfigError: A name is unknown, empty, or given twice.
    """

    order: tuple[str, ...] = attrs.field(converter=_listed)
    overlaps: tuple[Pair, ...] = attrs.field(default=(), converter=_pairs)
    anytime: tuple[str, ...] = attrs.field(default=(), converter=_listed)

    def __attrs_post_init__(self) -> None:
        """Refuse names that make no schedule."""
        phases, known = self.phases, ", ".join(map(repr, self.phases))
        faults = [
            f"phases: expected names, got {name!r}" for name in phases if not str(name).strip() or name != str(name)
        ]
        faults += [f"phase {name!r} is named {phases.count(name)} times" for name in phases if phases.count(name) > 1]
        for pair in self.overlaps:
            if len(pair) != 2 or pair[0] == pair[1] or not all(name in phases for name in pair):  # noqa: PLR2004 - two
                faults.append(f"overlaps: expected pairs of two of its phases, which are {known}, got {pair!r}")
        if faults:
            raise ConfigError(f"no schedule: {'; '.join(dict.fromkeys(faults))}")

    @property
    def phases(self) -> tuple[str, ...]:
        """All phases: those in order, then those at any time."""
        return (*self.order, *self.anytime)

    def meet(self, first: str, second: str) -> bool:
        """Whether two phases may be in use at once; a phase meets itself."""
        free = first in self.anytime or second in self.anytime
        return first == second or free or (first, second) in self.overlaps or (second, first) in self.overlaps

    def span(self, first: str, last: str) -> tuple[str, ...]:
        """The phases from one to another in order, both included, past the end of a round where need be."""
        start, count = self.order.index(first), len(self.order)
        steps = (self.order.index(last) - start) % count
        return tuple(self.order[(start + step) % count] for step in range(steps + 1))

    @property
    def at_once(self) -> list[frozenset[str]]:
        """The largest sets of phases that may all be in use at once."""
        sets = {frozenset[str]()}
        for phase in self.phases:
            sets |= {frozenset([phase, *(one for one in some if self.meet(one, phase))]) for some in sets}
            sets = {some for some in sets if not any(some < other for other in sets)}
        return [*sets]

    def __str__(self) -> str:
        """The round, and what may overlap."""
        parts = [" -> ".join(self.order)] if self.order else []
        parts += [f"{first} and {second} may overlap" for first, second in self.overlaps]
        parts += [f"{name} at any time" for name in self.anytime]
        return "; ".join(parts)


@attrs.frozen(kw_only=True)
class LiveSlot:
    """A slot of a member, what its memory must be, and when its bytes must hold.

    Args:
        member: The member's name.
        phase: The phase that the member is used in.
        slot: The slot's name.
        device: The device that its memory belongs to.
        placement: Whether that is the device's own memory, or what the host has for it.
        shape: The slot's shape at full capacity.
        dtype: The slot's dtype on that device.
        nbytes: Bytes, aligned.
        phases: The phases in which its bytes must hold, in the schedule's order.
        always: Whether they must hold in all phases and also between them.
        why: The reason for that, in words.
        allocation: A number that slots have in common which are one memory, because a value carries over.
    """

    member: str
    phase: str
    slot: str
    device: str
    placement: Placement
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    phases: tuple[str, ...]
    always: bool
    why: str
    allocation: int

    def meeting(self, other: "LiveSlot", schedule: Schedule) -> Pair | None:
        """A phase of each in which the bytes of both may have to hold at once; None where there is none."""
        pairs = itertools.product(self.phases, other.phases)
        return next((pair for pair in pairs if schedule.meet(*pair)), None)

    def __str__(self) -> str:
        """The slot as one writes it: draft.hidden."""
        return f"{self.member}.{self.slot}"


@attrs.frozen(kw_only=True, eq=False)
class Member:
    """A runner that shares memory with others, as far as the layout must know it.

    Args:
        name: The runner's name among the members.
        phase: The phase that the runner is used in.
        declaration: The runner's slots, under its settings.
        capacity: The size of every axis that buffers are made for.
        capabilities: The record of the runner's backend.
        device: The device that its device slots lie on.
        bound: Slots whose memory was handed in. They get no place.
        kept: Slots whose bytes must hold from step to step: their producer writes only what changed.
        shares: Whether the runner shares at all. None leaves it to the backend's record.
    """

    name: str
    phase: str
    declaration: Declaration = attrs.field(repr=lambda declaration: declaration.name)
    capacity: Sizes
    capabilities: Capabilities = attrs.field(repr=False)
    device: str = "cpu"
    bound: Collection[str] = frozenset()
    kept: Collection[str] = frozenset()
    shares: bool | None = None

    @property
    def pooled(self) -> bool:
        """Whether its slots may share."""
        return self.capabilities.pools_inputs if self.shares is None else self.shares

    def live_slot(self, name: str, schedule: Schedule, allocation: int) -> LiveSlot:
        """A slot by itself. A value that carries over makes it live longer. ConfigError for an unknown phase."""
        if self.phase not in schedule.phases:
            known = ", ".join(map(repr, schedule.phases)) or "none"
            raise ConfigError(f"member {self.name!r}: phase {self.phase!r} is not in the schedule: phases are {known}")
        slot = self.declaration.slots[name]
        shape, dtype = extent(slot.shape, self.capacity), resolve_dtype(slot.dtype, self.capabilities)
        why = lasting(slot, name, self.kept) if self.pooled else "its backend pools no inputs"
        return LiveSlot(
            member=self.name,
            phase=self.phase,
            slot=name,
            device=self.device,
            placement=slot.placement,
            shape=shape,
            dtype=dtype,
            nbytes=Room(name, shape, dtype, slot.placement).nbytes,
            phases=(self.phase,) if why is None else schedule.phases,
            always=why is not None,
            why=why or f"each step of {self.phase} writes it",
            allocation=allocation,
        )


def lasting(slot: Slot, name: str, kept: Collection[str] = ()) -> str | None:
    """Why a slot's bytes must hold beyond its runner's phase, or None where they need not.

    A kind of slot that is not known here is judged by what it says of itself, so that it is kept rather than not.
    """
    rule = slot.rule()
    reasons = {
        "a constant, which no step writes": is_constant(slot, name),
        "it is kept, because that was asked for": name in kept,
        "in host memory, where a fill may write what the device has yet to read": slot.placement == HOST,
        "its tail is set once": isinstance(rule, Once),
        "its tail is kept, and holds what the slot held before": isinstance(rule, Keep),
        "no fill writes all of it in each step": not _written(slot, name),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def is_constant(slot: Slot, name: str) -> bool:
    """Whether a slot's memory holds its initial value for good."""
    written = slot.rewritten or slot.restored or slot.reads(name) is not None or slot.computes() is not None
    return isinstance(slot, Constant) and slot.rule() is None and not written


def _written(slot: Slot, name: str) -> bool:
    """Whether each step, or a producer that the slot names, writes every row that the step reads."""
    if slot.computes() is not None:
        return True
    ruled = isinstance(slot.rule(), Pad) or not slot.varying
    return ruled if slot.reads(name) is not None else isinstance(slot, Output) or (isinstance(slot, Staged) and ruled)


@attrs.frozen
class Carry:
    """A value that one member writes in its phase and another reads in a later phase, of this round or the next.

    Args:
        slot: The writer's slot.
        writer: The writing member's name.
        reader: The reading member's name.
        into: The reader's slot, where it has another name.
    """

    slot: str
    writer: str
    reader: str
    into: str | None = None

    @property
    def ends(self) -> tuple[Key, Key]:
        """The writer and its slot, the reader and its slot."""
        return (self.writer, self.slot), (self.reader, self.into or self.slot)

    def __str__(self) -> str:
        """From which slot to which."""
        return " to ".join(map(".".join, self.ends))


def live_slots(members: Sequence[Member], schedule: Schedule, carries: Sequence[Carry] = ()) -> dict[Key, LiveSlot]:
    """Every slot that needs a place, and when its bytes must hold.

    Slots that a value carries over between are one allocation, from the first writer's phase to the last reader's. A
    member that shares nothing keeps its own memory: the batch brings it the value.

    Raises:
        ConfigError: Names or phases do not fit together, two slots of a carry cannot be one memory, or another slot is
            written while the value waits.
    """
    named = {member.name: member for member in members}
    if len(named) < len(members):
        raise ConfigError(
            f"two members have one name, of {', '.join(one.name for one in members)}: give one another name"
        )
    keys = [(member.name, slot) for member in members for slot in member.declaration.slots if slot not in member.bound]
    found = {key: named[key[0]].live_slot(key[1], schedule, number) for number, key in enumerate(keys)}
    for carry in carries:
        faults = [fault for end in carry.ends if end not in found for fault in _missing(*end, named)]
        if not faults:
            writer, reader = (found[end] for end in carry.ends)
            faults = [*_misfits(writer, reader, named, schedule)]
        if faults:
            raise ConfigError(f"{carry} cannot carry over: {'; '.join(faults)}")
    joined = [carry for carry in carries if named[carry.writer].pooled and named[carry.reader].pooled]
    for carry in joined:
        first, second = (found[end].allocation for end in carry.ends)
        found |= {key: attrs.evolve(one, allocation=first) for key, one in found.items() if one.allocation == second}
    for number in {found[carry.ends[0]].allocation for carry in joined}:
        group = {key: one for key, one in found.items() if one.allocation == number}
        found |= _carried(group, [carry for carry in joined if carry.ends[0] in group], schedule)
    return found


def _carried(group: Mapping[Key, LiveSlot], carries: Sequence[Carry], schedule: Schedule) -> dict[Key, LiveSlot]:
    """Slots that are one memory, each with the lifetime of all values in it."""
    alive = set[str]()
    for carry in carries:
        waiting = schedule.span(*(group[end].phase for end in carry.ends))
        alive |= {*waiting}
        for one in (one for key, one in group.items() if key not in carry.ends):
            if any(schedule.meet(one.phase, phase) for phase in waiting):
                raise ConfigError(
                    f"{carry} cannot carry over: {one}, which other carries make the same memory, is in use in "
                    f"{one.phase!r}, before {waiting[-1]!r} is over; carry the value through, from a phase to the next"
                )
    lasting = [one.why for one in group.values() if one.always]
    why = "; ".join([*(f"its value carries over from {carry}" for carry in carries), *lasting[:1]])
    phases = tuple(phase for phase in schedule.phases if lasting or phase in alive)
    return {key: attrs.evolve(one, phases=phases, always=bool(lasting), why=why) for key, one in group.items()}


def _missing(name: str, slot: str, members: Mapping[str, Member]) -> Iterator[str]:
    """Why a carry's end has no place."""
    if name not in members:
        yield f"there is no member {name!r}: members are {', '.join(map(repr, members)) or 'none'}"
    elif slot in members[name].bound:
        yield f"the memory of {name}.{slot} was handed in: hand the same to both, and leave this out"
    else:
        yield f"member {name!r} has no slot {slot!r}"


def _misfits(writer: LiveSlot, reader: LiveSlot, members: Mapping[str, Member], schedule: Schedule) -> Iterator[str]:
    """Why two slots cannot be one memory, in which the reader finds the rows that the writer left."""
    ends = writer, reader
    for one in ends:
        slot = members[one.member].declaration.slots[one.slot]
        if is_constant(slot, one.slot) or (one is reader and slot.computes() is not None):
            yield f"{one} is {slot.kind}, and so never what a step leaves there: let it be copied or staged"
    if (writer.device, writer.placement) != (reader.device, reader.placement):
        where = " and ".join(f"{one.device}'s {one.placement} memory" for one in ends)
        yield f"they lie in {where}: place both alike"
    first, last = writer.shape, reader.shape
    told = f"{writer} is {dtype_text(writer.dtype)} {[*first]} and {reader} is {dtype_text(reader.dtype)} {[*last]}"
    if writer.dtype != reader.dtype or len(first) != len(last) or first[1:] != last[1:]:
        yield f"their rows differ, {told}: make all but dim 0 alike"
    if writer.phase == reader.phase:
        yield f"both are in phase {writer.phase!r}, and may be in use at once: give each a phase of its own"
    elif schedule.meet(writer.phase, reader.phase):
        yield (
            f"{writer.phase!r} and {reader.phase!r} may be in use at once, so that the next value would be written "
            "while this one is read: let the batch bring it, to memory of the reader's own"
        )
