"""First fit: all slots of all runners laid into shared memory, as a pure function of what they are."""

from collections.abc import Sequence

import attrs

from ..capabilities import Placement
from .layout import Block, Layout, Place
from .lifetimes import LiveSlot, Member, Schedule
from .proof import check_layout
from .shared_allocations import Carry, live_slots


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
        arenas, pooled = all(one.capabilities.arenas for one in there), any(one.pooled for one in there)
        mine = [one for one in largest.values() if (one.device, one.placement) == (device, placement)]
        mine.sort(key=lambda one: (not one.always, -one.nbytes, str(one)))
        named = _first_fit(mine, schedule, arenas=arenas, by_name=True)
        sizes, found = min(_first_fit(mine, schedule, arenas=arenas), named, key=lambda fit: sum(fit[0]))
        spots |= {
            one.allocation: (len(blocks) + block, offset) for one, (block, offset) in zip(mine, found, strict=True)
        }
        blocks += [Block(device=device, placement=placement, nbytes=nbytes, pooled=pooled) for nbytes in sizes]
        by_name += sum(named[0])
        peak += max(sum(one.nbytes for one in mine if not some.isdisjoint(one.phases)) for some in schedule.at_once)
    places = []
    for one in slots:
        block, offset = spots[one.allocation]
        places.append(Place(**attrs.asdict(one, recurse=False), block=block, offset=offset))
    layout = Layout(schedule=schedule, blocks=tuple(blocks), places=tuple(places), peak=peak, by_name=by_name)
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
            (at, n) for other, at, n in placed if one.meets(other, schedule) or (by_name and one.slot != other.slot)
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
