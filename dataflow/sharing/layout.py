"""Places: where slots of runners lie in shared memory, and why they may, as data and in words."""

import functools
from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch

from ..capabilities import Placement
from ..errors import ConfigError
from .lifetimes import Lifetime
from .phases import Schedule
from .tenants import CARRIED, EQUAL, Tie


@attrs.frozen(kw_only=True)
class Block:
    """One allocation. pooled: whether slots of different members may share within it."""

    device: str
    placement: Placement
    nbytes: int
    pooled: bool


@attrs.frozen(kw_only=True)
class Place:
    """Where one slot of one member lies.

    phase: when the member is in use. block: which of the layout's. offset: bytes from its start. nbytes: bytes of the
    slot, aligned. shape, dtype: of the whole slot; of a chained one, of its parent. lifetime: when its bytes must hold.
    tenant: slots of one number hold the same on purpose, and tie says what makes them.
    """

    member: str
    phase: str
    slot: str
    block: int
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    lifetime: Lifetime
    tenant: int
    tie: Tie

    @property
    def stop(self) -> int:
        """One past its last byte."""
        return self.offset + self.nbytes

    def touches(self, other: "Place") -> bool:
        """Whether two places have a byte in common."""
        return self.block == other.block and self.offset < other.stop and other.offset < self.stop

    def __str__(self) -> str:
        """The member's slot."""
        return f"{self.member}.{self.slot}"


@attrs.frozen(kw_only=True)
class Layout:
    """Where every slot of every member lies.

    peak: the most bytes that ever have to hold at once, below which no layout comes. apart: bytes without sharing.
    by_name: bytes where slots of one name share unless they meet. blindly: bytes where they share even if they meet,
    and whatever they hold, which may be fewer, and wrong.
    """

    schedule: Schedule
    blocks: tuple[Block, ...]
    places: tuple[Place, ...]
    peak: int
    apart: int
    by_name: int
    blindly: int

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def saved(self) -> int:
        """Bytes saved against memory of each slot's own."""
        return self.apart - self.nbytes

    @property
    def phases(self) -> Mapping[str, str]:
        """By member, when it is in use."""
        return {place.member: place.phase for place in self.places}

    @functools.cached_property
    def _found(self) -> Mapping[tuple[str, str], Place]:
        return {(place.member, place.slot): place for place in self.places}

    def place(self, member: str, slot: str) -> Place:
        """Where a slot lies. ConfigError where it has no place here."""
        place = self._found.get((member, slot))
        if place is None:
            message = f"the layout has no place for slot {slot!r} of member {member!r}: it is bound, or of no member"
            raise ConfigError(message)
        return place

    def of(self, member: str) -> tuple[Place, ...]:
        """The places of one member."""
        return tuple(place for place in self.places if place.member == member)

    def shared_with(self, member: str, slot: str) -> tuple[Place, ...]:
        """The places that have a byte in common with a slot's."""
        mine = self.place(member, slot)
        return tuple(place for place in self.places if place is not mine and place.touches(mine))

    def neighbours(self, member: str) -> frozenset[str]:
        """Members that write to memory of this one, so that it cannot rely on what it left there."""
        mine = self.of(member)
        others = (other for place in mine for other in self.shared_with(member, place.slot) if other.tie != "equal")
        return frozenset(other.member for other in others)

    def why(self, member: str, slot: str) -> tuple[str, ...]:
        """Why a slot lies where it does: what makes its lifetime, who shares its memory, and who does not, and why."""
        mine = self.place(member, slot)
        apart = (f"not with {other}: {reason}" for other, reason in self._apart(mine))
        return (f"{mine}: {mine.lifetime.why}", *self.sharing(member, slot), *apart)

    def sharing(self, member: str, slot: str) -> tuple[str, ...]:
        """Who shares a slot's memory, and why that is safe: a sentence for each reason."""
        mine, found = self.place(member, slot), dict[str, list[str]]()
        for other in self.shared_with(member, slot):
            found.setdefault(_why_shared(mine, other, self.schedule), []).append(str(other))
        return tuple(f"shares with {', '.join(names)}: {reason}" for reason, names in found.items())

    def _apart(self, mine: Place) -> Iterator[tuple[Place, str]]:
        """Slots of the same name that must have other memory, and why."""
        named = (other for other in self.places if other.slot == mine.slot and other is not mine)
        for other in (other for other in named if not other.touches(mine)):
            reason = _why_apart(mine, other, self.schedule)
            if reason is not None:
                yield other, reason


def _why_shared(one: Place, other: Place, schedule: Schedule) -> str:
    """Why two slots may have a byte in common."""
    if one.tenant != other.tenant:
        return _never_at_once(one.lifetime.phases, other.lifetime.phases, schedule)
    if one.tie == EQUAL:
        return "both hold the same values, and no step writes them"
    if one.tie == CARRIED:
        return one.lifetime.why
    return f"tails hold the same kind of value, and {_never_at_once((one.phase,), (other.phase,), schedule)}"


def _never_at_once(mine: Sequence[str], theirs: Sequence[str], schedule: Schedule) -> str:
    if len(mine) == len(theirs) == 1:
        first, last = sorted((mine[0], theirs[0]), key=schedule.order.index)
        return f"{first} ends before {last} begins"
    return f"{', '.join(mine)} never overlap {', '.join(theirs)}"


def _why_apart(one: Place, other: Place, schedule: Schedule) -> str | None:
    """Why two slots must not have a byte in common, or None where they might."""
    for place in (one, other):
        if place.lifetime.always:
            return f"{place} lives always: {place.lifetime.why}"
    met = ((a, b) for a in one.lifetime.phases for b in other.lifetime.phases if schedule.meet(a, b))
    first, second = next(met, ("", ""))
    if first == second:
        return f"both are in use in {first}" if first else None
    for name in (first, second):
        if name in schedule.anytime:
            return f"{name} is in use at any time"
    return f"{first} and {second} may overlap"
