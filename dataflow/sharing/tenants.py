"""Tenants: what asks for memory of its own, a slot, or several slots of several runners that hold the same."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import attrs
import torch

from ..errors import ConfigError
from ..values import initial_value, write_all
from .lifetimes import CONSTANT, KEPT_TAIL, Home, Lifetime, Member, Name, lifetime_of
from .phases import Schedule

Grouping = Callable[["Company", Sequence[Name]], list[list[Name]]]
Tie = Literal["alone", "carried", "equal", "alike"]
ALONE: Final = "alone"
CARRIED: Final = "carried"
EQUAL: Final = "equal"
ALIKE: Final = "alike"
"""What makes slots one tenant: a value that carries over, equal constants, or kept tails that hold the same kind of
value."""


@attrs.frozen
class Tenant:
    """Slots that begin at one address, and what they need. nbytes: of the largest one, aligned."""

    names: tuple[Name, ...]
    tie: Tie
    home: Home
    nbytes: int
    lifetime: Lifetime


@attrs.frozen(eq=False)
class Company:
    """All members by name, and the schedule that they keep to."""

    schedule: Schedule
    members: Mapping[str, Member]

    @classmethod
    def of(cls, schedule: Schedule, members: Sequence[Member]) -> "Company":
        """ConfigError where two members have one name, or one is in a phase that the schedule has not."""
        found: dict[str, Member] = {}
        for member in members:
            if member.name in found:
                message = f"two members are called {member.name!r}: give one of the runners another name"
                raise ConfigError(message)
            if member.phase not in schedule.phases:
                known = ", ".join(map(repr, schedule.phases)) or "none"
                message = f"member {member.name!r}: phase {member.phase!r} is not in the schedule: phases are {known}"
                raise ConfigError(message)
            found[member.name] = member
        return cls(schedule, found)

    def __iter__(self) -> Iterator[Name]:
        """Every slot that needs a place."""
        return ((member.name, name) for member in self.members.values() for name, _ in member.slots)

    def member(self, name: Name) -> Member:
        """The member of a slot."""
        return self.members[name[0]]

    def nbytes(self, name: Name) -> int:
        """Bytes of a slot, aligned."""
        return self.member(name).room(name[1]).nbytes

    def home(self, name: Name) -> Home:
        """Where a slot lies."""
        return self.member(name).home(name[1])

    def lifetime(self, name: Name) -> Lifetime:
        """A slot's own lifetime."""
        return lifetime_of(self.member(name), name[1], self.schedule)

    def tenant(self, names: Sequence[Name], tie: Tie, lifetime: Lifetime | None = None) -> Tenant:
        """Slots as one tenant, which lives as long as the first where no lifetime is given."""
        first, nbytes = names[0], max(map(self.nbytes, names))
        return Tenant(tuple(names), tie, self.home(first), nbytes, lifetime or self.lifetime(first))


def alone(company: Company) -> list[Tenant]:
    """Every slot by itself."""
    return [company.tenant([name], ALONE) for name in company]


def tenants(company: Company, carried: Sequence[tuple[Sequence[Name], Lifetime]]) -> list[Tenant]:
    """Every slot in one tenant. carried: groups of slots that hold one value, with their lifetimes."""
    found = [company.tenant(names, CARRIED, lifetime) for names, lifetime in carried]
    taken = {name for tenant in found for name in tenant.names}
    left = [name for name in company if name not in taken]
    kinds: tuple[tuple[str, Tie, Grouping], ...] = ((CONSTANT, EQUAL, _equal), (KEPT_TAIL, ALIKE, _alike))
    for reason, tie, groups in kinds:
        asked = [name for name in left if company.lifetime(name).why == reason]
        found += [company.tenant(names, tie if len(names) > 1 else ALONE) for names in groups(company, asked)]
        left = [name for name in left if name not in asked]
    return found + [company.tenant([name], ALONE) for name in left]


def _largest_first(company: Company, names: Sequence[Name]) -> list[Name]:
    return sorted(names, key=lambda name: (-company.nbytes(name), name))


def _equal(company: Company, names: Sequence[Name]) -> list[list[Name]]:
    """Constants in groups of which each is the beginning of the first, value for value."""
    groups: list[list[Name]] = []
    for name in _largest_first(company, names):
        group = next((one for one in groups if are_equal(company, one[0], name)), None)
        groups.append([name]) if group is None else group.append(name)
    return groups


def are_equal(company: Company, first: Name, second: Name) -> bool:
    """Whether two constants of one name hold the same in every row that both have."""
    if not _last_for(company, CONSTANT, first, second):
        return False
    return rows_match(company, first, second) and _begin_equal(company, first, second)


def _last_for(company: Company, reason: str, first: Name, second: Name) -> bool:
    """Whether two slots of one name and one kind of memory both last for one reason; none whose parts are chained."""
    like = first[1] == second[1] and company.home(first) == company.home(second)
    chained = any(name[1] in company.member(name).chained for name in (first, second))
    return like and not chained and all(company.lifetime(name).why == reason for name in (first, second))


def _begin_equal(company: Company, first: Name, second: Name) -> bool:
    """Whether two slots hold the same at first, in every row that both have; NaN is NaN, and 0.0 is not -0.0."""
    values = [_first_value(company.member(name), name[1]) for name in (first, second)]
    if all(isinstance(value, bool | int | float) for value in values):
        return repr(values[0]) == repr(values[1])
    wholes = [_whole(company.member(name), name[1], value) for name, value in zip((first, second), values, strict=True)]
    both = min(len(whole) for whole in wholes)
    return torch.equal(*(whole[:both] for whole in wholes))


def _first_value(member: Member, name: str) -> Any:
    return initial_value(name, member.declaration.slots[name], member.capacity, member.capabilities)


def _whole(member: Member, name: str, value: Any) -> torch.Tensor:
    """All of what a slot holds at first, in memory of the host, as bytes."""
    with torch.inference_mode(mode=False), torch.no_grad():
        whole = torch.empty(member.shape(name), dtype=member.dtype(name), device="cpu")
        write_all(whole, value, f"slot {name!r}")
        return whole.reshape(-1).view(torch.uint8)


def rows_match(company: Company, first: Name, second: Name) -> bool:
    """Whether row i of one slot lies where row i of the other does, if both begin at one address."""
    (one, mine), (other, theirs) = (company.member(first), first[1]), (company.member(second), second[1])
    left, right = one.shape(mine), other.shape(theirs)
    return one.dtype(mine) == other.dtype(theirs) and len(left) == len(right) and left[1:] == right[1:]


def _alike(company: Company, names: Sequence[Name]) -> list[list[Name]]:
    """Slots with kept tails in groups of which no two are in use at once, and each may hold what another left."""
    groups: list[list[Name]] = []
    for name in _largest_first(company, names):
        group = next((one for one in groups if all(are_alike(company, name, other) for other in one)), None)
        groups.append([name]) if group is None else group.append(name)
    return groups


def are_alike(company: Company, first: Name, second: Name) -> bool:
    """Whether what one slot's steps leave may stand in the kept tail of another's, and never both are in use.

    The same name, dtype, rows, tail rule with its reason, limit and first value, and the same sizes of all fixed axes
    that both declarations know: an id of a larger vocabulary is none of a smaller one.
    """
    one, other = company.member(first), company.member(second)
    if not _last_for(company, KEPT_TAIL, first, second) or company.schedule.meet(one.phase, other.phase):
        return False
    if not rows_match(company, first, second):
        return False
    fixed = {axis for axis in one.declaration.axes if axis.fixed} & {*other.declaration.axes}
    if any(one.capacity[axis] != other.capacity[axis] for axis in fixed):
        return False
    return _kept(one, first[1]) == _kept(other, second[1]) and _begin_equal(company, first, second)


def _kept(member: Member, name: str) -> tuple[object, ...]:
    """What a slot says of its kept tail, and of the values that it may hold."""
    slot = member.declaration.slots[name]
    rule, most = slot.rule(), slot.most()
    return (type(slot), rule, None if most is None else most.at(member.capacity))
