"""Carries: which slots are one memory because a value carries over, and for how long."""

import itertools
from collections.abc import Iterator, Sequence

import attrs

from ..errors import ConfigError
from ..roles import dtype_text
from .lifetimes import Carry, Lifetime, Name, is_constant, name_text
from .tenants import Company, rows_match

Group = tuple[Sequence[Name], Lifetime]


def carried(company: Company, carries: Sequence[Carry]) -> list[Group]:
    """Groups of slots that hold one value, each with its lifetime.

    A lifetime goes from the writer's phase to the reader's, in the order of a round. Of a member that does not share,
    none: the value is copied, as the batch brings it. ConfigError where a value cannot carry over: the two slots' rows
    lie otherwise, or something would write the memory while the value is waiting.
    """
    for carry in carries:
        faults = [*_faults(company, carry)]
        if faults:
            message = f"{carry} cannot carry over: {'; '.join(faults)}"
            raise ConfigError(message)
    kept = [carry for carry in carries if all(company.member(end).pooled for end in carry.ends)]
    groups = [_group(company, names, kept) for names in _joined(kept)]
    for names, _ in groups:
        _check_between(company, names, [carry for carry in kept if carry.ends[0] in names])
    return groups


def _joined(carries: Sequence[Carry]) -> list[list[Name]]:
    """Slots that carries join, in groups."""
    groups: list[list[Name]] = []
    for carry in carries:
        mine = [group for group in groups if any(end in group for end in carry.ends)]
        rest = [group for group in groups if group not in mine]
        groups = [*rest, [*dict.fromkeys([*itertools.chain(*mine), *carry.ends])]]
    return groups


def _group(company: Company, names: Sequence[Name], carries: Sequence[Carry]) -> Group:
    mine = [carry for carry in carries if carry.ends[0] in names]
    told = "; ".join(f"its value carries over from {carry}" for carry in mine)
    lasting = [own for own in map(company.lifetime, names) if own.always]
    if lasting:
        return names, attrs.evolve(lasting[0], why=f"{told}; {lasting[0].why}")
    alive = {phase for carry in mine for phase in _span(company, carry)}
    phases = tuple(phase for phase in company.schedule.phases if phase in alive)
    return names, Lifetime(phases, always=False, why=told)


def _span(company: Company, carry: Carry) -> tuple[str, ...]:
    first, last = (company.member(end).phase for end in carry.ends)
    return company.schedule.span(first, last)


def _faults(company: Company, carry: Carry) -> Iterator[str]:
    for end in carry.ends:
        yield from _end_faults(company, end)
    if any(True for end in carry.ends for _ in _end_faults(company, end)):
        return
    writer, reader = carry.ends
    if is_constant(company.member(writer).declaration.slots[writer[1]], writer[1]):
        yield f"{name_text(writer)} is a constant, which holds in all phases: leave it out"
    slot = company.member(reader).declaration.slots[reader[1]]
    if slot.computes() is not None or is_constant(slot, reader[1]):
        yield f"{name_text(reader)} is {slot.kind}, and so never what another wrote: let it be copied or staged"
    yield from _fit_faults(company, writer, reader)
    yield from _phase_faults(company, writer, reader)


def _end_faults(company: Company, end: Name) -> Iterator[str]:
    member = company.members.get(end[0])
    if member is None:
        yield f"there is no member {end[0]!r}: members are {', '.join(map(repr, company.members)) or 'none'}"
    elif end[1] not in member.declaration.slots:
        yield f"member {end[0]!r} has no slot {end[1]!r}"
    elif end[1] in member.bound:
        yield f"the memory of {name_text(end)} was handed in: hand the same to both, and leave this out"


def _fit_faults(company: Company, writer: Name, reader: Name) -> Iterator[str]:
    """Why two slots cannot be one memory in which each finds the other's rows."""
    if company.home(writer) != company.home(reader):
        where = " and ".join(f"{home.device}'s {home.placement} memory" for home in map(company.home, (writer, reader)))
        yield f"they lie in {where}: place both alike"
    if not rows_match(company, writer, reader):
        yield f"their rows differ, {_layout(company, writer)} and {_layout(company, reader)}: make all but dim 0 alike"
    elif _lacks_room(company, writer, reader):
        rows = f"{_layout(company, writer)}, {_layout(company, reader)}"
        yield f"one of both is chained, and a part of it has fewer rows than the other: {rows}"


def _layout(company: Company, name: Name) -> str:
    member = company.member(name)
    return f"{name_text(name)} is {dtype_text(member.dtype(name[1]))} {list(member.shape(name[1]))}"


def _lacks_room(company: Company, writer: Name, reader: Name) -> bool:
    """Whether one slot would reach into a later part of the other."""
    ends = [(company.member(name), name[1]) for name in (writer, reader)]
    rows = [member.shape(name) for member, name in ends]
    return any(name in member.chained and rows[i] < rows[1 - i] for i, (member, name) in enumerate(ends))


def _phase_faults(company: Company, writer: Name, reader: Name) -> Iterator[str]:
    schedule, (first, last) = company.schedule, (company.member(end).phase for end in (writer, reader))
    if first == last:
        yield f"both are in phase {first!r}, and may be in use at once: give each a phase of its own"
    elif schedule.meet(first, last):
        yield (
            f"{first!r} and {last!r} may be in use at once, so that the next value would be written while this one is "
            "read: let the batch bring it, to memory of the reader's own"
        )


def _check_between(company: Company, names: Sequence[Name], carries: Sequence[Carry]) -> None:
    """ConfigError where a slot of the group is written while a value of the group waits for its reader."""
    for carry in carries:
        waiting, reader = _span(company, carry), company.member(carry.ends[1]).phase
        for name in (name for name in names if name not in carry.ends):
            phase = company.member(name).phase
            if any(company.schedule.meet(phase, one) for one in waiting):
                message = (
                    f"{carry} cannot carry over: {name_text(name)}, which other carries make the same memory, is in "
                    f"use in {phase!r}, before {reader!r} is over; carry the value through, from a phase to the next"
                )
                raise ConfigError(message)
