"""Arrangements: where tenants lie so that no two meet, in few bytes."""

from collections.abc import Callable, Collection, Iterator, Sequence

import attrs

from .phases import Schedule
from .tenants import Tenant

Order = Callable[[Tenant], tuple[object, ...]]


@attrs.frozen
class Arrangement:
    """A block and an offset within it for each tenant, in their order, and how large each block is."""

    places: tuple[tuple[int, int], ...]
    blocks: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(self.blocks)


@attrs.frozen
class Neighbours:
    """Tenants of one memory, and which of them may have to hold at once."""

    tenants: Sequence[Tenant]
    conflicts: Sequence[Sequence[bool]]

    @classmethod
    def of(cls, tenants: Sequence[Tenant], schedule: Schedule) -> "Neighbours":
        """Hold each tenant's lifetime against each other's."""
        lives = [tenant.lifetime for tenant in tenants]
        kinds = list(dict.fromkeys(lives))
        meets = {(a, b): a.meets(b, schedule) for a in kinds for b in kinds}
        return cls(tenants, [[meets[a, b] for b in lives] for a in lives])

    def fits(self, index: int, others: Sequence[int]) -> bool:
        """Whether a tenant may have the memory of all the others."""
        return not any(self.conflicts[index][other] for other in others)


def arranged(neighbours: Neighbours, schedule: Schedule, *, arenas: bool) -> Arrangement:
    """The smallest arrangement that was found.

    arenas: whether one block holds all, tenants at any offset; else each block is an allocation of its own, at whose
    start all its tenants begin. Never larger than blocks by name. Which one is the smallest is a hard problem (dynamic
    storage allocation), so that several orders of greedy placing are tried.
    """
    orders = [[*_ordered(neighbours, order)] for order in _orders(neighbours.tenants, schedule)]
    found = [blocks_by_name(neighbours)] + [_blocks(neighbours, order) for order in orders]
    if arenas:
        found = [_stacked(one) for one in found] + [_arena(neighbours, order) for order in orders]
    return min(found, key=lambda one: one.nbytes)


def _orders(tenants: Sequence[Tenant], schedule: Schedule) -> Iterator[Order]:
    """Largest first; longest living first; by the first phase; by phases times bytes; the fullest phases first."""
    full = fullest(tenants, schedule)
    phases = schedule.phases
    yield lambda one: (-one.nbytes,)
    yield lambda one: (-len(one.lifetime.phases), -one.nbytes)
    yield lambda one: (min(map(phases.index, one.lifetime.phases), default=0), -one.nbytes)
    yield lambda one: (-len(one.lifetime.phases) * one.nbytes,)
    yield lambda one: (full.isdisjoint(one.lifetime.phases), -one.nbytes)


def _ordered(neighbours: Neighbours, order: Order) -> list[int]:
    """Tenants in an order; before all others those that live always, below which no gap is left."""
    tenants = neighbours.tenants

    def key(index: int) -> tuple[object, ...]:
        return (not tenants[index].lifetime.always, *order(tenants[index]), tenants[index].names)

    return sorted(range(len(tenants)), key=key)


def live_bytes(tenants: Sequence[Tenant], phases: Collection[str]) -> int:
    """Bytes that must hold while some phases are in use at once."""
    return sum(one.nbytes for one in tenants if one.lifetime.always or not {*phases}.isdisjoint(one.lifetime.phases))


def fullest(tenants: Sequence[Tenant], schedule: Schedule) -> frozenset[str]:
    """The phases that may be in use at once and have the most live bytes: no arrangement is smaller than these."""
    sets = [frozenset(phases) for phases in schedule.at_once]
    return max(sets, key=lambda phases: live_bytes(tenants, phases))


def blocks_by_name(neighbours: Neighbours) -> Arrangement:
    """Tenants of one name in one block, where they never meet."""
    largest = _ordered(neighbours, lambda one: (-one.nbytes,))
    return _blocks(neighbours, largest, lambda one, other: one.names[0][1] == other.names[0][1])


def _blocks(
    neighbours: Neighbours, order: Sequence[int], alike: Callable[[Tenant, Tenant], bool] = lambda _, __: True
) -> Arrangement:
    """Each tenant in the block that grows least by it, and of those the smallest; of like tenants that never meet."""
    tenants, blocks, sizes = neighbours.tenants, list[list[int]](), list[int]()
    chosen: dict[int, int] = {}
    for index in order:
        nbytes = tenants[index].nbytes
        free = [
            number
            for number, block in enumerate(blocks)
            if neighbours.fits(index, block) and all(alike(tenants[index], tenants[other]) for other in block)
        ]
        best = min(free, key=lambda number: (max(nbytes - sizes[number], 0), sizes[number]), default=len(blocks))
        if best == len(blocks):
            blocks.append([])
            sizes.append(0)
        blocks[best].append(index)
        sizes[best] = max(sizes[best], nbytes)
        chosen[index] = best
    return Arrangement(tuple((chosen[index], 0) for index in range(len(tenants))), tuple(sizes))


def _stacked(apart: Arrangement) -> Arrangement:
    """Blocks one behind the other, as one."""
    starts = [sum(apart.blocks[:number]) for number in range(len(apart.blocks))]
    return Arrangement(tuple((0, starts[block]) for block, _ in apart.places), (apart.nbytes,))


def _arena(neighbours: Neighbours, order: Sequence[int]) -> Arrangement:
    """Each tenant in the smallest gap between those that it may meet; behind them where it fits in none."""
    tenants = neighbours.tenants
    placed: dict[int, int] = {}
    for index in order:
        taken = sorted(
            (start, start + tenants[other].nbytes)
            for other, start in placed.items()
            if neighbours.conflicts[index][other]
        )
        placed[index] = _best_fit(taken, tenants[index].nbytes)
    end = max((start + tenants[index].nbytes for index, start in placed.items()), default=0)
    return Arrangement(tuple((0, placed[index]) for index in range(len(tenants))), (end,))


def _best_fit(taken: Sequence[tuple[int, int]], nbytes: int) -> int:
    """Where the smallest gap begins that has room for so many bytes, or where the last range ends."""
    gaps, end = list[tuple[int, int]](), 0
    for start, stop in taken:
        if start - end >= nbytes:
            gaps.append((start - end, end))
        end = max(end, stop)
    return min(gaps)[1] if gaps else end
