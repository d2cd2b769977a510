"""The proof of a layout: no two slots whose bytes must hold at once have a byte in common."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import attrs

from ..buffers import ALIGNMENT
from ..errors import LayoutError
from .layout import Layout
from .lifetimes import LiveSlot, Member
from .shared_allocations import Carry, Key, live_slots


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
        message = f"the layout is not safe: {'; '.join(faults)}"
        raise LayoutError(message)


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
        elif one.block == other.block and max(one.offset, other.offset) < min(one.stop, other.stop):
            pairs = itertools.product(one.phases, other.phases)
            met = next((pair for pair in pairs if layout.schedule.meet(*pair)), None)
            if met is not None:
                yield f"{one} and {other} share memory, but {one} is needed in {met[0]}, and {other} in {met[1]}"
