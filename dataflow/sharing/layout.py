"""The layout: where slots of runners lie in shared memory, and why they may, as data and in words."""

import functools
from collections.abc import Iterator, Mapping

import attrs
from rich import box
from rich.table import Column, Table
from rich.text import Text

from ..capabilities import Placement
from ..errors import ConfigError
from .lifetimes import LiveSlot, Schedule


@attrs.frozen(kw_only=True)
class Block:
    """One allocation of the backend. pooled: whether slots of different members may share within it."""

    device: str
    placement: Placement
    nbytes: int
    pooled: bool


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
            message = f"the layout has no place for slot {slot!r} of member {member!r}: it is bound, or of no member"
            raise ConfigError(message)
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
            f"not with {other}: {self._why_apart(mine, other)}" for other in others if mine.meets(other, self.schedule)
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

    def _why_apart(self, mine: Place, other: Place) -> str:
        for place in (mine, other):
            if place.always:
                return f"{place} lives always: {place.why}"
        first, second = next((a, b) for a in mine.phases for b in other.phases if self.schedule.meet(a, b))
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
