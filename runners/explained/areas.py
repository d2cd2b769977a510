"""Allocations as pictures show them: a runner's own over the phases of one step, a pool's over those of its loop."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from .memory_picture import Area, Spot, memory_picture
from .pool_facts import PoolFacts, PoolPlace
from .records import MemoryFacts, Phase, Place
from .svg import Picture

_OTHERS: Final = "outside"
"""The colour of other runners' slots."""


def own_picture(memory: MemoryFacts, owner: str, name: str = "memory") -> Picture:
    """A runner's slots over the phases of a step."""
    areas = [
        Area(
            f"{one.name}{', handed in' if one.adopted else ''}: {one.nbytes:,} bytes, {one.unused:,} in no slot",
            [_spot(place, memory.phases) for place in memory.places if place.allocation == one.name],
        )
        for one in memory.allocations
    ]
    count, total = len(memory.places), sum(one.nbytes for one in memory.allocations)
    told = f"{count} slots in {len(areas)} allocations of {total:,} bytes, at their addresses over a step's phases."
    return memory_picture(areas, memory.phases, title=f"Memory of {owner} over a step", told=told, name=name)


def pool_picture(pool: PoolFacts, kinds: Mapping[str, str], name: str = "pool") -> Picture:
    """All runners' slots of a pool over its phases; kinds: of this runner's slots, for their colours."""
    areas = [
        Area(
            f"{'pooled' if block.pooled else 'unshared'} {block.placement} memory on {block.device}: "
            f"{block.nbytes:,} bytes",
            [*_shared_spots(pool, index, kinds)],
        )
        for index, block in enumerate(pool.blocks)
    ]
    saved = pool.apart - pool.nbytes
    told = f"{len(pool.places)} slots of {len(pool.members)} runners in {pool.nbytes:,} bytes; {saved:,} saved."
    return memory_picture(areas, pool.phases, title="Shared memory over the phases", told=told, name=name)


def _spot(place: Place, phases: Sequence[Phase]) -> Spot:
    columns = range(phases.index(place.since), phases.index(place.until) + 1)
    return Spot(
        label=place.slot,
        kind=place.kind,
        start=place.offset,
        stop=place.offset + place.nbytes,
        columns=tuple(columns),
        held=True,
        gap=place.gap,
        told="\n".join(_lines(place)),
    )


def _lines(place: Place) -> list[str]:
    lines = [f"{place.slot}: {place.kind}, {place.dtype} [{', '.join(map(str, place.shape))}]"]
    lines.append(f"bytes {place.offset:,} to {place.offset + place.nbytes:,} of {place.allocation}")
    lines += [f"then {place.gap:,} bytes to the next address that is aligned"] if place.gap else []
    lines += [f"kept between steps: {place.lasting}"] if place.lasting else []
    lines += [f"shared with {', '.join(place.shares)}"] if place.shares else []
    return lines


def _shared_spots(pool: PoolFacts, block: int, kinds: Mapping[str, str]) -> Iterator[Spot]:
    """A spot for all slots that hold the same on purpose; this runner's in the colour of its kind."""
    allocations: dict[int, list[PoolPlace]] = {}
    for place in pool.places:
        if place.block == block:
            allocations.setdefault(place.allocation, []).append(place)
    for places in allocations.values():
        mine = [place for place in places if place.member == pool.member]
        names = [*(place.slot for place in mine), *(place.name for place in places if place not in mine)]
        yield Spot(
            label=" = ".join(names),
            kind=kinds.get(mine[0].slot, _OTHERS) if mine else _OTHERS,
            start=places[0].offset,
            stop=max(place.offset + place.nbytes for place in places),
            columns=tuple(sorted({pool.phases.index(phase) for place in places for phase in place.phases})),
            held=False,
            gap=0,
            told="\n".join(text for place in places for text in _shared_lines(place)),
        )


def _shared_lines(place: PoolPlace) -> list[str]:
    lines = [f"{place.name}: {place.dtype} [{', '.join(map(str, place.shape))}]"]
    lines.append(f"bytes {place.offset:,} to {place.offset + place.nbytes:,}")
    lines.append(f"holds {'always' if place.always else 'in ' + ', '.join(place.phases)}: {place.why}")
    return [*lines, *([f"shared with {', '.join(place.shares)}"] if place.shares else [])]
