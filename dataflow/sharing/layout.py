"""The layout: where slots of runners lie in shared memory, as data and in words, made by first fit and proven.

All is a pure function of what the runners are. The proof: no two slots whose bytes must hold at once have a byte in
common.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import attrs
from rich import box
from rich.table import Column, Table
from rich.text import Text

from ..buffers import ALIGNMENT
from ..capabilities import Placement
from ..errors import ConfigError, LayoutError
from .lifetimes import Carry, Key, LiveSlot, Member, Schedule, live_slots


@attrs.frozen(kw_only=True)
class Block:
    """One allocation of the backend."""

    device: str
    placement: Placement
    nbytes: int


@attrs.frozen(kw_only=True)
class Place(LiveSlot):
    """Where one slot of one member lies.

    Args:
        block: The index of its block in the layout.
        offset: Bytes from the start of the block.
    """

    block: int
    offset: int

    @property
    def stop(self) -> int:
        """One past its last byte."""
        return self.offset + self.nbytes

    def touches(self, other: "Place") -> bool:
        """Whether two places have a byte in common."""
        return self.block == other.block and self.offset < other.stop and other.offset < self.stop


@attrs.frozen(kw_only=True)
class Layout:
    """Where every slot of every member lies. It prints as a table on a rich console.

    Args:
        schedule: The phases, and which of them may overlap.
        blocks: The allocations.
        places: A place for each slot, in the order of members and of their declarations.
        peak: The most bytes that ever have to hold at once. No layout is smaller.
        by_name: Bytes that slots take where only slots of one name share, unless they meet.
    """

    schedule: Schedule
    blocks: tuple[Block, ...]
    places: tuple[Place, ...]
    peak: int
    by_name: int

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def apart(self) -> int:
        """Bytes that slots take where none shares."""
        return sum(place.nbytes for place in self.places)

    @property
    def saved(self) -> int:
        """Bytes saved by sharing."""
        return self.apart - self.nbytes

    @functools.cached_property
    def _found(self) -> Mapping[tuple[str, str], Place]:
        return {(place.member, place.slot): place for place in self.places}

    def place(self, member: str, slot: str) -> Place:
        """Where a slot lies. ConfigError where it has no place here."""
        place = self._found.get((member, slot))
        if place is None:
            raise ConfigError(
                f"the layout has no place for slot {slot!r} of member {member!r}: it is bound, or of no member"
            )
        return place

    def shared_with(self, member: str, slot: str) -> tuple[Place, ...]:
        """The places that have a byte in common with a slot's."""
        mine = self.place(member, slot)
        return tuple(place for place in self.places if place is not mine and place.touches(mine))

    def why(self, member: str, slot: str) -> tuple[str, ...]:
        """Why a slot lies where it does: what makes its lifetime, who shares its memory, and who does not."""
        mine = self.place(member, slot)
        others = [one for one in self.places if one.slot == slot and one is not mine and not one.touches(mine)]
        apart = [
            f"not with {other}: {self._why_apart(mine, other, *met)}"
            for other in others
            if (met := mine.meeting(other, self.schedule)) is not None
        ]
        return (f"{mine}: {mine.why}", *self._sharing(mine), *apart)

    def _sharing(self, mine: Place) -> Iterator[str]:
        """Who shares a slot's memory, and why that is safe: a sentence for each reason."""
        found = dict[str, list[str]]()
        for other in self.shared_with(mine.member, mine.slot):
            carried = mine.allocation == other.allocation
            found.setdefault(mine.why if carried else self._why_shared(mine, other), []).append(str(other))
        return (f"shares with {', '.join(names)}: {reason}" for reason, names in found.items())

    def _why_shared(self, mine: Place, other: Place) -> str:
        if len(mine.phases) == len(other.phases) == 1:
            first, last = sorted((*mine.phases, *other.phases), key=self.schedule.order.index)
            return f"{first} ends before {last} begins"
        return f"{', '.join(mine.phases)} never overlap {', '.join(other.phases)}"

    @staticmethod
    def _why_apart(mine: Place, other: Place, first: str, second: str) -> str:
        for place in (mine, other):
            if place.always:
                return f"{place} lives always: {place.why}"
        return f"both are in use in {first}" if first == second else f"{first} and {second} may overlap"

    def __rich__(self) -> Table:
        """Each block with the slots in it, and why they lie there."""
        saved = f"{self.nbytes:,} bytes, {self.saved:,} fewer than {self.apart:,} without sharing"
        other = f"{self.by_name:,} if only slots of one name shared; {self.peak:,} must hold at once"
        heads = "block: from", "bytes", "slot", "needed in", "and why it lies there"
        columns = [Column(head, overflow="fold") for head in heads]
        table = Table(*columns, title=f"phases: {self.schedule}", caption=f"{saved}; {other}", box=box.SIMPLE_HEAD)
        for place in sorted(self.places, key=lambda one: (one.block, one.offset, -one.nbytes, str(one))):
            told = "; ".join(self._sharing(place)) or f"shares with none: {place.why}"
            needed = "always" if place.always else ", ".join(place.phases)
            cells = f"{place.block}: {place.offset:,}", f"{place.nbytes:,}", str(place), needed, told
            table.add_row(*map(Text, cells))
        return table


def lay_out(members: Sequence[Member], schedule: Schedule, carries: Sequence[Carry] = ()) -> Layout:
    """Lay out all slots of all members, so that no two share a byte that both may need at once, and prove it.

    Args:
        members: The runners.
        schedule: The phases that they are used in.
        carries: Values that go from one member to another, for which both have the same memory.

    Raises:
        ConfigError: Names, phases or carries do not fit together.
        LayoutError: The proof fails.
    """
    slots = [*live_slots(members, schedule, carries).values()]
    largest = {one.allocation: one for one in sorted(slots, key=lambda one: one.nbytes)}
    blocks, spots, peak, by_name = list[Block](), dict[int, tuple[int, int]](), 0, 0
    homes: set[tuple[str, Placement]] = {(one.device, one.placement) for one in slots}
    for device, placement in sorted(homes):
        there = [member for member in members if member.device == device]
        arenas = all(one.capabilities.arenas for one in there)
        mine = [one for one in largest.values() if (one.device, one.placement) == (device, placement)]
        mine.sort(key=lambda one: (not one.always, -one.nbytes, str(one)))
        named = _first_fit(mine, schedule, arenas=arenas, by_name=True)
        sizes, found = min(_first_fit(mine, schedule, arenas=arenas), named, key=lambda fit: sum(fit[0]))
        spots |= {
            one.allocation: (len(blocks) + block, offset) for one, (block, offset) in zip(mine, found, strict=True)
        }
        blocks += [Block(device=device, placement=placement, nbytes=nbytes) for nbytes in sizes]
        by_name += sum(named[0])
        peak += max(sum(one.nbytes for one in mine if not some.isdisjoint(one.phases)) for some in schedule.at_once)
    facts_of = [(attrs.asdict(one, recurse=False), spots[one.allocation]) for one in slots]
    places = tuple(Place(**facts, block=block, offset=offset) for facts, (block, offset) in facts_of)
    layout = Layout(schedule=schedule, blocks=tuple(blocks), places=places, peak=peak, by_name=by_name)
    check_layout(layout, members, carries)
    return layout


def _first_fit(
    slots: Sequence[LiveSlot], schedule: Schedule, *, arenas: bool, by_name: bool = False
) -> tuple[list[int], list[tuple[int, int]]]:
    """The sizes of blocks, and a block and an offset for each slot: the lowest that is free while the slot is needed.

    Args:
        slots: One slot for each allocation. The largest come first, so that a block is as large as its first slot.
        schedule: Tells which slots may be needed at once.
        arenas: Whether one block holds all slots, at any offset. Else all slots of a block begin where it does.
        by_name: Whether only slots of one name share.
    """
    lengths = [one.nbytes if arenas else 1 for one in slots]
    starts: list[int] = []
    for one, length in zip(slots, lengths, strict=True):
        placed = zip(slots, starts, lengths, strict=False)
        apart = [
            (at, n) for other, at, n in placed if one.meeting(other, schedule) or (by_name and one.slot != other.slot)
        ]
        start = 0
        for at, taken in sorted(apart):
            if at - start >= length:
                break
            start = max(start, at + taken)
        starts.append(start)
    spots = [(0, start) if arenas else (start, 0) for start in starts]
    sizes = dict[int, int]()
    for one, (block, offset) in zip(slots, spots, strict=True):
        sizes[block] = max(sizes.get(block, 0), offset + one.nbytes)
    return [*sizes.values()], spots


def check_layout(layout: Layout, members: Sequence[Member], carries: Sequence[Carry] = ()) -> None:
    """Prove that no two slots share a byte that both may need at once, and that all have the memory they ask for.

    Args:
        layout: The layout, made here or loaded from a file.
        members: The runners that are to use it.
        carries: Values that go from one member to another.

    Raises:
        LayoutError: All faults: a slot without a place, or with another's size or lifetime; an offset that is not
            aligned; slots that meet; a value that carries over between places that are not one.
    """
    slots = live_slots(members, layout.schedule, carries)
    separate = {member.device for member in members if not member.capabilities.arenas}
    faults = [*_misplaced(layout, slots, separate)] or [*_meeting(layout)]
    if faults:
        raise LayoutError(f"the layout is not safe: {'; '.join(faults)}")


def _misplaced(layout: Layout, slots: Mapping[Key, LiveSlot], separate: set[str]) -> Iterator[str]:
    """Places that are not those of the slots, or lie nowhere. separate: devices without arenas."""
    have = Counter((place.member, place.slot) for place in layout.places)
    for key in sorted({*have, *slots}):
        if have[key] != (key in slots):
            yield f"{'.'.join(key)} has {have[key]} places, and needs {int(key in slots)}"
    for place in layout.places:
        wanted = slots.get((place.member, place.slot), place)
        for field in attrs.fields(LiveSlot):
            mine, theirs = getattr(place, field.name), getattr(wanted, field.name)
            if mine != theirs:
                yield f"{place}: its {field.name} is {mine!r}, and should be {theirs!r}"
        if not 0 <= place.block < len(layout.blocks):
            yield f"{place} lies in block {place.block}, which is none"
            continue
        block = layout.blocks[place.block]
        mine, theirs = (f"{one.device}'s {one.placement} memory" for one in (place, block))
        if mine != theirs:
            yield f"{place} lies in {theirs}, not in {mine}"
        if place.offset % ALIGNMENT or (place.offset and place.device in separate):
            yield f"{place} begins at byte {place.offset}: not aligned, or not where its allocation begins"
        if not 0 <= place.offset <= place.stop <= block.nbytes:
            yield f"{place} ends at byte {place.stop} of a block of {block.nbytes}"


def _meeting(layout: Layout) -> Iterator[str]:
    """Pairs of slots that lie where they must not."""
    for one, other in itertools.combinations(layout.places, 2):
        if one.allocation == other.allocation:
            if (one.block, one.offset) != (other.block, other.offset):
                yield f"{one} and {other} hold one value, and do not begin at one address"
        elif one.touches(other) and (met := one.meeting(other, layout.schedule)) is not None:
            yield f"{one} and {other} share memory, but {one} is needed in {met[0]}, and {other} in {met[1]}"
