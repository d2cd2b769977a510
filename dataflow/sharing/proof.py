"""The proof of a layout: every pair of slots, and of phases, looked at one by one, by nothing that made the layout."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import attrs

from ..arena import ALIGNMENT
from ..errors import LayoutError
from .layout import Block, Layout, Place
from .lifetimes import Carry, Member, Name, lasting
from .tenants import Company, are_alike, are_equal


def check_layout(layout: Layout, members: Sequence[Member], carries: Sequence[Carry] = ()) -> None:
    """Prove that no two slots share a byte that both may need at once, and that all have the memory they ask for.

    Raises LayoutError with all faults: a slot without a place, or with another's size; an offset that is not aligned;
    slots that meet; a value that carries over between places that are not one.
    """
    proof = _Proof(layout, Company.of(layout.schedule, members), carries)
    faults = [*proof.faults()]
    if faults:
        message = f"the layout is not safe: {'; '.join(faults)}"
        raise LayoutError(message)


@attrs.frozen(slots=False)
class _Proof:
    """A layout beside what it is to hold."""

    layout: Layout
    company: Company
    carries: Sequence[Carry]

    def faults(self) -> Iterator[str]:
        """What is wrong; with places that are none, no pair is looked at."""
        wrong = [*self._missing(), *(fault for place in self.layout.places for fault in self._misplaced(place))]
        yield from wrong or [*self._unjoined(), *self._misdated(), *self._meeting()]

    @functools.cached_property
    def _wanted(self) -> Mapping[Name, Member]:
        return {name: self.company.member(name) for name in self.company}

    def _missing(self) -> Iterator[str]:
        have = Counter((place.member, place.slot) for place in self.layout.places)
        for name in sorted({*have, *self._wanted}):
            if have[name] != (name in self._wanted):
                yield f"{'.'.join(name)} has {have[name]} places, and needs {int(name in self._wanted)}"

    def _misplaced(self, place: Place) -> Iterator[str]:
        member = self._wanted.get((place.member, place.slot))
        if member is None or not 0 <= place.block < len(self.layout.blocks):
            yield f"{place} lies in block {place.block}, which is none for it"
            return
        room, home, block = member.room(place.slot), member.home(place.slot), self.layout.blocks[place.block]
        if (place.shape, place.dtype) != (room.shape, room.dtype):
            yield f"{place} is {place.dtype} {list(place.shape)}, and should be {room.dtype} {list(room.shape)}"
        if (block.device, block.placement) != (home.device, home.placement):
            yield f"{place} lies in {block.device}'s {block.placement} memory, not in {home.device}'s {home.placement}"
        if place.offset % ALIGNMENT or (place.offset and not self._has_arenas(block)):
            yield f"{place} begins at byte {place.offset}: not aligned, or not where its allocation begins"
        if not 0 <= place.offset <= place.stop <= block.nbytes:
            yield f"{place} ends at byte {place.stop} of a block of {block.nbytes}"
        if math.prod(room.shape) * room.dtype.itemsize > place.nbytes:
            yield f"{place} has {place.nbytes} bytes, too few for {room.dtype} {list(room.shape)}"

    def _has_arenas(self, block: Block) -> bool:
        return all(one.capabilities.arenas for one in self.company.members.values() if one.device == block.device)

    @functools.cached_property
    def _joining(self) -> list[Carry]:
        """Carries that make two slots one: those between members that share."""
        return [carry for carry in self.carries if all(self.company.member(end).pooled for end in carry.ends)]

    @functools.cached_property
    def _groups(self) -> Mapping[Name, frozenset[Name]]:
        """By slot, all that hold its value, itself among them."""
        groups = {name: frozenset({name}) for name in self._wanted}
        for carry in self._joining:
            joined = frozenset[Name]().union(*(groups[end] for end in carry.ends))
            groups |= dict.fromkeys(joined, joined)
        return groups

    def _waiting(self, carry: Carry) -> list[str]:
        """The phases in which a value is on its way, walked one by one."""
        phase, last = (self.company.member(end).phase for end in carry.ends)
        order, walked = self.layout.schedule.order, [phase]
        while phase != last:
            phase = order[(order.index(phase) + 1) % len(order)]
            walked.append(phase)
        return walked

    @functools.cached_property
    def _alive(self) -> Mapping[Name, frozenset[str]]:
        """By slot, the phases in which its bytes must hold; all of them where that is always."""
        alive = dict[Name, frozenset[str]]()
        for name, member in self._wanted.items():
            lasts = lasting(member.declaration.slots[name[1]], name[1], member.kept)
            alive[name] = frozenset({member.phase} if member.pooled and not lasts else self.layout.schedule.phases)
        for carry in self._joining:
            for name in self._groups[carry.ends[0]]:
                alive[name] |= {*self._waiting(carry), *alive[carry.ends[0]], *alive[carry.ends[1]]}
        return alive

    def _unjoined(self) -> Iterator[str]:
        for carry in self._joining:
            writer, reader = (self.layout.place(*end) for end in carry.ends)
            if (writer.block, writer.offset) != (reader.block, reader.offset):
                yield f"{writer} and {reader} hold one value, and do not begin at one address"

    def _misdated(self) -> Iterator[str]:
        for place in self.layout.places:
            alive = self._alive[place.member, place.slot]
            if not alive <= {*place.lifetime.phases}:
                yield f"{place} is needed in {', '.join(sorted(alive))}, and said to be in {place.lifetime}"

    def _meeting(self) -> Iterator[str]:
        for one, other in itertools.combinations(self.layout.places, 2):
            if one.block == other.block and max(one.offset, other.offset) < min(one.stop, other.stop):
                reason = self._why_not(one, other)
                if reason is not None:
                    yield f"{one} and {other} share memory, but {reason}"

    def _why_not(self, one: Place, other: Place) -> str | None:
        """Why two slots must not have a byte in common, or None where they may."""
        first, second = (one.member, one.slot), (other.member, other.slot)
        if one.offset == other.offset and self._is_one(first, second):
            return None
        for mine in sorted(self._alive[first]):
            for theirs in sorted(self._alive[second]):
                if self._meet(mine, theirs):
                    return f"{one} is needed in {mine}, and {other} in {theirs}"
        return None

    def _is_one(self, first: Name, second: Name) -> bool:
        """Whether two slots hold the same, so that they may begin at one address."""
        if second in self._groups[first]:
            return not self._spoils(first, second) and not self._spoils(second, first)
        return are_equal(self.company, first, second) or are_alike(self.company, first, second)

    def _spoils(self, name: Name, other: Name) -> bool:
        """Whether a slot may be written while a value that the other writes or reads is on its way."""
        phase = self._wanted[name].phase
        carries = [carry for carry in self._joining if other in carry.ends and name not in carry.ends]
        return any(self._meet(phase, step) for carry in carries for step in self._waiting(carry))

    def _meet(self, first: str, second: str) -> bool:
        schedule = self.layout.schedule
        apart = first != second and first not in schedule.anytime and second not in schedule.anytime
        return not apart or any({first, second} == {*pair} for pair in schedule.overlaps)
