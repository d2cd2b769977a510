"""The memory layout: where each slot lies, when its value counts, what alignment costs, and who has the same bytes."""

import collections
from collections.abc import Collection, Mapping
from typing import Final, Literal

import attrs

from ...dataflow.buffers import Buffer, Buffers
from ...dataflow.capabilities import DEVICE
from ...dataflow.declaration import Declaration
from ...dataflow.plan import FillPlan
from ...dataflow.sharing.lifetimes import lasting
from ...dataflow.slots import Output

Phase = Literal["fill", "kernel", "replay", "outputs"]
Shares = Mapping[str, tuple[str, ...]]
"""By slot, who else has some of its bytes."""
NONE: Final[Shares] = {}


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


def memory_of(
    buffers: Buffers | None,
    declaration: Declaration,
    plan: FillPlan | None,
    *,
    whole: bool,
    shares: Shares = NONE,
    kept: Collection[str] = (),
) -> MemoryFacts:
    """The memory layout of a runner, read off its buffers.

    Args:
        buffers: Of the runner, if it has any yet.
        declaration: Of their slots.
        plan: A bucket's, which tells when slots are written.
        whole: Whether graphs compute what the device does.
        shares: By slot, who else has some of its bytes.
        kept: Slots whose bytes were asked to be kept between steps.
    """
    by_kernel = () if plan is None else plan.fused
    phases: tuple[Phase, ...] = ("fill", *(("kernel",) if by_kernel else ()), "replay", "outputs")
    found: dict[tuple[int, str], list[Buffer]] = {}
    for buffer in buffers or ():  # storages without bytes are each by itself
        storage = buffer.tensor.untyped_storage()
        found.setdefault((storage.data_ptr(), "" if storage.nbytes() else buffer.name), []).append(buffer)
    chained = {tensor.untyped_storage().data_ptr() for tensor in (buffers.beside if buffers is not None else ())}
    kinds = collections.Counter(_kind(members[0]) for members in found.values())
    numbers = collections.Counter[str]()
    allocations, places = list[Allocation](), list[SlotPlace]()
    for (address, _), members in sorted(
        found.items(), key=lambda one: (one[1][0].adopted, one[1][0].slot.placement != DEVICE)
    ):
        first, kind = members[0], _kind(members[0])
        numbers[kind] += 1
        name = kind if kinds[kind] == 1 else f"{kind} {numbers[kind]}"
        nbytes = first.tensor.untyped_storage().nbytes()
        allocations.append(Allocation(name, nbytes, first.adopted and address not in chained))  # chained: its own
        members.sort(key=lambda buffer: (_offset(buffer), buffer.nbytes, buffer.name))
        for buffer, after in zip(members, [*map(_offset, members[1:]), nbytes], strict=True):
            slot, start = buffer.slot, _offset(buffer)
            lasts, since, until = lasting(slot, buffer.name, kept), phases[0], phases[-1]
            if lasts is None and not isinstance(slot, Output):
                until = "replay"
            if lasts is None:
                on_device = slot.computes() is not None and declaration.side(buffer.name) == DEVICE
                in_kernel = buffer.name in by_kernel and not slot.rewritten and not on_device
                late = isinstance(slot, Output) or (on_device and whole)
                since = "replay" if late else "kernel" if in_kernel else "fill"
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
                shares=shares.get(buffer.name, ()),
            )
            places.append(place)
    return MemoryFacts(phases, tuple(allocations), tuple(places))


def _offset(buffer: Buffer) -> int:
    """Its first byte within its storage. A tensor without elements has no address that would tell."""
    return int(buffer.tensor.storage_offset()) * buffer.tensor.itemsize


def _kind(buffer: Buffer) -> str:
    """What memory a buffer lies in, in words."""
    return f"{'pooled ' if buffer.pooled else ''}{buffer.slot.placement} memory"
