"""The layout: all slots of all runners laid into shared memory, as a pure function of what they are."""

from collections.abc import Iterator, Sequence

import attrs

from .arrangement import Arrangement, Neighbours, arranged, blocks_by_name, fullest, live_bytes
from .carries import carried
from .layout import Block, Layout, Place
from .lifetimes import Carry, Home, Member
from .phases import Schedule
from .proof import check_layout
from .tenants import Company, Tenant, alone, tenants


def lay_out(members: Sequence[Member], schedule: Schedule, carries: Sequence[Carry] = ()) -> Layout:
    """Lay out all slots of all members, so that no two share a byte that both may need at once, and prove it.

    carries: values that go from one member to another, for which both have the same memory.
    Raises ConfigError where names, phases or carries do not fit together, LayoutError where the proof fails.
    """
    company = Company.of(schedule, members)
    groups = carried(company, carries)
    each, joined = alone(company), tenants(company, groups)
    homes = sorted({tenant.home for tenant in each})
    parts = [_Part.of(company, home, joined) for home in homes]
    layout = Layout(
        schedule=schedule,
        blocks=tuple(block for part in parts for block in part.blocks()),
        places=_in_order(company, parts),
        peak=sum(part.peak for part in parts),
        apart=sum(tenant.nbytes for tenant in each),
        by_name=sum(part.by_name for part in parts),
        blindly=sum(_blindly(each)),
    )
    check_layout(layout, members, carries)
    return layout


def _blindly(each: Sequence[Tenant]) -> Iterator[int]:
    """The largest slot of each name."""
    names = {(tenant.home, tenant.names[0][1]) for tenant in each}
    for home, slot in names:
        yield max(tenant.nbytes for tenant in each if (tenant.home, tenant.names[0][1]) == (home, slot))


@attrs.frozen
class _Part:
    """What is laid into one kind of memory."""

    company: Company
    home: Home
    tenants: Sequence[Tenant]
    arrangement: Arrangement
    peak: int
    by_name: int

    @classmethod
    def of(cls, company: Company, home: Home, joined: Sequence[Tenant]) -> "_Part":
        able = [one.capabilities for one in company.members.values() if one.device == home.device]
        mine, schedule = [tenant for tenant in joined if tenant.home == home], company.schedule
        neighbours = Neighbours.of(mine, schedule)
        return cls(
            company,
            home,
            mine,
            arranged(neighbours, schedule, arenas=all(one.arenas for one in able)),
            live_bytes(mine, fullest(mine, schedule)),
            blocks_by_name(neighbours).nbytes,
        )

    def blocks(self) -> Iterator[Block]:
        home, members = self.home, self.company.members.values()
        pooled = any(member.pooled for member in members if member.device == home.device)
        for nbytes in self.arrangement.blocks:
            yield Block(device=home.device, placement=home.placement, nbytes=nbytes, pooled=pooled)

    def places(self, first_block: int, first_tenant: int) -> Iterator[Place]:
        """Places, with the numbers that blocks and tenants have among those of all parts."""
        lain = zip(self.tenants, self.arrangement.places, strict=True)
        for number, (tenant, (block, offset)) in enumerate(lain, start=first_tenant):
            for name in tenant.names:
                room = self.company.member(name).room(name[1])
                yield Place(
                    member=name[0],
                    phase=self.company.member(name).phase,
                    slot=name[1],
                    block=first_block + block,
                    offset=offset,
                    nbytes=room.nbytes,
                    shape=room.shape,
                    dtype=room.dtype,
                    lifetime=tenant.lifetime,
                    tenant=number,
                    tie=tenant.tie,
                )


def _in_order(company: Company, parts: Sequence[_Part]) -> tuple[Place, ...]:
    """The places of all parts, in the order of members and of their declarations."""
    found = dict[tuple[str, str], Place]()
    block = tenant = 0
    for part in parts:
        found |= {(place.member, place.slot): place for place in part.places(block, tenant)}
        block, tenant = block + len(part.arrangement.blocks), tenant + len(part.tenants)
    return tuple(found[name] for name in company)
