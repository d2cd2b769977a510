"""The memory layout: where each slot lies, when its value counts, what alignment costs, and who has the same bytes."""

import collections
from typing import Any, Literal

import attrs

from ...dataflow.buffers import Buffer
from ...dataflow.capabilities import DEVICE
from ...dataflow.plan import FillPlan
from ...dataflow.sharing import Layout, lasting
from ...dataflow.slots import Output
from ..parts import Parts

Phase = Literal["fill", "kernel", "replay", "outputs"]


@attrs.frozen
class Allocation:
    """One piece of memory that slots lie in, and its bytes. adopted: whether it was handed in by `bind=`."""

    name: str
    nbytes: int
    adopted: bool


@attrs.frozen(kw_only=True)
class SlotPlace:
    """Where a slot lies: its allocation, the offset there, its bytes, and those behind it that alignment costs.

    shape: at full capacity. since, until: the phases of a step between which its value counts. lasting: why its bytes
    must hold between steps, too. None if they need not. shares: slots of other runners that have some of its bytes,
    as "runner.slot".
    """

    slot: str
    allocation: str
    offset: int
    nbytes: int
    gap: int
    shape: tuple[int, ...]
    since: Phase
    until: Phase
    lasting: str | None
    shares: tuple[str, ...]


@attrs.frozen
class MemoryFacts:
    """The memory layout: the phases of a step, allocations, and each slot's place."""

    phases: tuple[Phase, ...]
    allocations: tuple[Allocation, ...]
    places: tuple[SlotPlace, ...]


def memory_of(parts: Parts[Any], plan: FillPlan | None, pool: Layout | None) -> MemoryFacts:
    """The memory layout of a runner, read off its buffers, if it has any yet.

    Args:
        parts: Of the runner.
        plan: A bucket's, which tells when slots are written.
        pool: The layout of the memory that it shares, if it shares any.
    """
    seat, buffers = parts.seat, parts.eager.buffers if parts.graphs is None else parts.graphs.buffers
    member, kept, shared = "", frozenset[str](), frozenset[str]()
    if seat is not None and seat.phase is not None and pool is not None:
        member, kept = seat.name, seat.phase.kept
        shared = frozenset(place.slot for place in pool.places if place.member == member)
    phases: tuple[Phase, ...] = ("fill", "kernel", "replay", "outputs")
    if plan is None or not plan.fused:
        phases = ("fill", "replay", "outputs")
    found: dict[tuple[int, str], list[Buffer]] = {}
    for buffer in buffers or ():  # storages without bytes are each by itself
        storage = buffer.tensor.untyped_storage()
        found.setdefault((storage.data_ptr(), "" if storage.nbytes() else buffer.name), []).append(buffer)
    numbers, allocations, places = collections.Counter[str](), list[Allocation](), list[SlotPlace]()
    order = sorted(found.items(), key=lambda one: (one[1][0].adopted, one[1][0].slot.placement != DEVICE))
    for _, members in order:
        first, nbytes = members[0], members[0].tensor.untyped_storage().nbytes()
        kind = f"{'pooled ' if first.pooled else ''}{first.slot.placement} memory"
        numbers[kind] += 1
        name = kind if numbers[kind] == 1 else f"{kind} {numbers[kind]}"
        allocations.append(Allocation(name, nbytes, first.adopted))
        members.sort(key=lambda buffer: (_offset(buffer), buffer.nbytes, buffer.name))
        for buffer, after in zip(members, [*map(_offset, members[1:]), nbytes], strict=True):
            lasts, start = lasting(buffer.slot, buffer.name, kept), _offset(buffer)
            since, until = _span(buffer, parts, plan) if lasts is None else (phases[0], phases[-1])
            place = SlotPlace(
                slot=buffer.name,
                allocation=name,
                offset=start,
                nbytes=buffer.nbytes,
                gap=0 if buffer.adopted or buffer.pooled else max(0, after - start - buffer.nbytes),
                shape=tuple(buffer.tensor.shape),
                since=since,
                until=until,
                lasting=lasts,
                shares=tuple(map(str, pool.shared_with(member, buffer.name))) if pool and buffer.name in shared else (),
            )
            places.append(place)
    return MemoryFacts(phases, tuple(allocations), tuple(places))


def _span(buffer: Buffer, parts: Parts[Any], plan: FillPlan | None) -> tuple[Phase, Phase]:
    """The first and the last phase in which the value of a slot counts that need not last between steps."""
    slot, name = buffer.slot, buffer.name
    if isinstance(slot, Output):
        return "replay", "outputs"
    if slot.computes() is not None and parts.stage.declaration.side(name) == DEVICE:
        return ("replay" if parts.tally.path == "graph" else "fill"), "replay"
    by_kernel = plan is not None and name in plan.fused and not slot.rewritten
    return ("kernel" if by_kernel else "fill"), "replay"


def _offset(buffer: Buffer) -> int:
    """Its first byte within its storage. A tensor without elements has no address that would tell."""
    return int(buffer.tensor.storage_offset()) * buffer.tensor.itemsize
