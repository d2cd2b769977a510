"""The memory layout: where each slot lies, when its value counts, what alignment costs, and who has the same bytes."""

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from ...dataflow.buffers import Buffer, Buffers
from ...dataflow.capabilities import DEVICE
from ...dataflow.declaration import Declaration
from ...dataflow.plan import FUSED, FillPlan
from ...dataflow.sharing.lifetimes import lasting
from ...dataflow.slots import Output
from .records import Allocation, MemoryFacts, Phase, SlotPlace

Shares = Mapping[str, tuple[str, ...]]
"""By slot, who else has some of its bytes."""
NONE: Final[Shares] = {}


def memory_of(
    buffers: Buffers | None,
    declaration: Declaration,
    plan: FillPlan | None,
    *,
    whole: bool,
    shares: Shares = NONE,
    kept: Collection[str] = (),
) -> MemoryFacts:
    """The memory layout of a runner, read off its buffers, if it has any yet.

    plan: a bucket's, which tells when slots are written. whole: whether graphs compute what the device does. shares: by
    slot, who else has some of its bytes. kept: slots whose bytes were asked to be kept between steps.
    """
    has_kernel = plan is not None and plan.lowering in FUSED and bool(plan.fused)
    phases: tuple[Phase, ...] = ("fill", "kernel", "replay", "outputs") if has_kernel else ("fill", "replay", "outputs")
    allocations, places = list[Allocation](), list[SlotPlace]()
    for allocation, members in _allocations(buffers) if buffers is not None else ():
        allocations.append(allocation)
        starts = [*map(_offset, members), allocation.nbytes]
        for buffer, start, following in zip(members, starts, starts[1:], strict=False):
            lasts = lasting(buffer.slot, buffer.name, kept)
            since, until = _counts(buffer, declaration, plan, whole=whole)
            own = not (buffer.adopted or buffer.pooled)
            place = SlotPlace(
                slot=buffer.name,
                allocation=allocation.name,
                offset=start,
                nbytes=buffer.nbytes,
                gap=max(0, following - start - buffer.nbytes) if own else 0,
                shape=tuple(buffer.tensor.shape),
                since=since if lasts is None else phases[0],
                until=until if lasts is None else phases[-1],
                lasting=lasts,
                shares=shares.get(buffer.name, ()),
            )
            places.append(place)
    return MemoryFacts(phases=phases, allocations=tuple(allocations), places=tuple(places))


def _allocations(buffers: Buffers) -> Iterator[tuple[Allocation, list[Buffer]]]:
    """Each storage and the buffers in it, in the order of their offsets; storages without bytes each by itself."""
    found: dict[tuple[int, str], list[Buffer]] = {}
    for buffer in buffers:
        storage = buffer.tensor.untyped_storage()
        found.setdefault((storage.data_ptr(), "" if storage.nbytes() else buffer.name), []).append(buffer)
    chained = {tensor.untyped_storage().data_ptr() for tensor in buffers.beside}  # the runner's own, though adopted
    order = sorted(found.items(), key=lambda one: (one[1][0].adopted, one[1][0].slot.placement != DEVICE))
    kinds = [_kind(members[0]) for _, members in order]
    for number, ((address, _), members) in enumerate(order):
        members.sort(key=lambda buffer: (_offset(buffer), buffer.nbytes, buffer.name))
        kind, nbytes = kinds[number], members[0].tensor.untyped_storage().nbytes()
        used = reached = 0
        for buffer in members:  # bytes that several slots have count once
            end = _offset(buffer) + buffer.nbytes
            used += max(0, end - max(_offset(buffer), reached))
            reached = max(reached, end)
        allocation = Allocation(
            name=kind if kinds.count(kind) == 1 else f"{kind} {kinds[: number + 1].count(kind)}",
            placement=members[0].slot.placement,
            nbytes=nbytes,
            adopted=members[0].adopted and address not in chained,
            unused=nbytes - used,
        )
        yield allocation, members


def _offset(buffer: Buffer) -> int:
    """Its first byte within its storage; a tensor without elements has no address that would tell."""
    return int(buffer.tensor.storage_offset()) * buffer.tensor.itemsize


def _kind(buffer: Buffer) -> str:
    """What memory a buffer lies in, in words."""
    return f"{'pooled ' if buffer.pooled else ''}{buffer.slot.placement} memory"


def _counts(buffer: Buffer, declaration: Declaration, plan: FillPlan | None, *, whole: bool) -> tuple[Phase, Phase]:
    """The first and the last phase in which the value of a slot counts that need not last between steps."""
    slot, name = buffer.slot, buffer.name
    if isinstance(slot, Output):
        return "replay", "outputs"
    if slot.computes() is not None and declaration.side(name) == DEVICE:
        return ("replay" if whole else "fill"), "replay"
    by_kernel = plan is not None and name in plan.fused and not slot.rewritten
    return ("kernel" if by_kernel else "fill"), "replay"
