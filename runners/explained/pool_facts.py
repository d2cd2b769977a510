"""Shared memory: where all runners of a pool have their slots, who shares with whom, and why that is safe, as data."""

import itertools
from collections.abc import Mapping

import attrs

from ...dataflow.capabilities import Placement
from ...dataflow.roles import dtype_text
from ...dataflow.sharing import Layout


@attrs.frozen(kw_only=True)
class PoolBlock:
    """One allocation of a pool; pooled: whether slots share within it."""

    device: str
    placement: Placement
    nbytes: int
    pooled: bool


@attrs.frozen(kw_only=True)
class PoolPlace:
    """Where one slot of one runner lies in a pool.

    phases: in which its bytes must hold; always: in all of them, and between them. why: what makes it so.
    allocation: a number that slots have in common which are one memory, because a value carries over. shares: those
    that have a byte in common.
    """

    member: str
    slot: str
    dtype: str
    shape: tuple[int, ...]
    block: int
    offset: int
    nbytes: int
    phases: tuple[str, ...]
    always: bool
    why: str
    allocation: int
    shares: tuple[str, ...]

    @property
    def name(self) -> str:
        """The runner's slot."""
        return f"{self.member}.{self.slot}"


@attrs.frozen(kw_only=True)
class PoolFacts:
    """The memory that a runner shares with others.

    member: its name among them. phases: in order, then those that keep to none. overlaps: pairs of phases that may be
    in use at once. members: each runner's phase. nbytes: of all blocks. peak: the most bytes that ever have to hold at
    once. apart: bytes without sharing. by_name: bytes where only slots of one name share.
    """

    member: str
    phases: tuple[str, ...]
    overlaps: tuple[tuple[str, str], ...]
    members: tuple[tuple[str, str], ...]
    blocks: tuple[PoolBlock, ...]
    places: tuple[PoolPlace, ...]
    nbytes: int
    peak: int
    apart: int
    by_name: int


def pool_facts(layout: Layout, member: str) -> PoolFacts:
    """A layout as one of its runners sees it."""
    schedule = layout.schedule
    return PoolFacts(
        member=member,
        phases=schedule.phases,
        overlaps=tuple(pair for pair in itertools.combinations(schedule.phases, 2) if schedule.meet(*pair)),
        members=tuple({place.member: place.phase for place in layout.places}.items()),
        blocks=tuple(
            PoolBlock(device=one.device, placement=one.placement, nbytes=one.nbytes, pooled=one.pooled)
            for one in layout.blocks
        ),
        places=tuple(
            PoolPlace(
                member=place.member,
                slot=place.slot,
                dtype=dtype_text(place.dtype),
                shape=place.shape,
                block=place.block,
                offset=place.offset,
                nbytes=place.nbytes,
                phases=place.phases,
                always=place.always,
                why=place.why,
                allocation=place.allocation,
                shares=tuple(map(str, layout.shared_with(place.member, place.slot))),
            )
            for place in layout.places
        ),
        nbytes=layout.nbytes,
        peak=layout.peak,
        apart=layout.apart,
        by_name=layout.by_name,
    )


def sharers_of(facts: PoolFacts) -> Mapping[str, tuple[str, ...]]:
    """By slot of the runner, who else has some of its bytes."""
    return {place.slot: place.shares for place in facts.places if place.member == facts.member}
