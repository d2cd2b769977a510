"""Shared allocations: slots of several runners that are one memory on purpose, because a value carries over."""

from collections.abc import Iterator, Mapping, Sequence

import attrs

from ..capabilities import dtype_text
from ..errors import ConfigError
from .lifetimes import LiveSlot, Member, Schedule, is_constant

Key = tuple[str, str]
"""A member's name and a slot's."""


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
        message = f"two members have one name, of {', '.join(one.name for one in members)}: give one another name"
        raise ConfigError(message)
    keys = [(member.name, slot) for member in members for slot in member.declaration.slots if slot not in member.bound]
    found = {key: named[key[0]].live_slot(key[1], schedule, number) for number, key in enumerate(keys)}
    for carry in carries:
        faults = [fault for end in carry.ends if end not in found for fault in _missing(*end, named)]
        if not faults:
            writer, reader = (found[end] for end in carry.ends)
            faults = [*_misfits(writer, reader, named, schedule)]
        if faults:
            message = f"{carry} cannot carry over: {'; '.join(faults)}"
            raise ConfigError(message)
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
                message = (
                    f"{carry} cannot carry over: {one}, which other carries make the same memory, is in use in "
                    f"{one.phase!r}, before {waiting[-1]!r} is over; carry the value through, from a phase to the next"
                )
                raise ConfigError(message)
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
    chained = [one.slot in members[one.member].chained for one in ends]
    first, last = (one.shape[1:] if parts else one.shape for one, parts in zip(ends, chained, strict=True))
    told = f"{writer} is {dtype_text(writer.dtype)} {[*first]} and {reader} is {dtype_text(reader.dtype)} {[*last]}"
    if writer.dtype != reader.dtype or len(first) != len(last) or first[1:] != last[1:]:
        yield f"their rows differ, {told}: make all but dim 0 alike"
    elif (chained[0] and first < last) or (chained[1] and last < first):
        yield f"one of both is chained, and a part of it has fewer rows than the other: {told}"
    if writer.phase == reader.phase:
        yield f"both are in phase {writer.phase!r}, and may be in use at once: give each a phase of its own"
    elif schedule.meet(writer.phase, reader.phase):
        yield (
            f"{writer.phase!r} and {reader.phase!r} may be in use at once, so that the next value would be written "
            "while this one is read: let the batch bring it, to memory of the reader's own"
        )
