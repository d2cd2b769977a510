"""The planner: from a declaration, a bucket's sizes and a device's capabilities to a plan. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import attrs
import torch

from .axes import Sizes, extent
from .capabilities import DEVICE, Capabilities
from .compute import OUT
from .declaration import Declaration
from .plan import ComputeStep, CopyGroup, FillPlan, TailReset
from .roles import resolve_dtype
from .slots import Slot
from .tails import Pad, resolve_value

LARGE_BYTES: Final = 1 << 20
"""From here on a plain copy beats a share in a foreach: field figures put the crossover at about 1 MB on an H200."""

NO_CASTS: Final[Mapping[str, torch.dtype]] = {}


def plan_fill(
    declaration: Declaration,
    sizes: Sizes,
    capabilities: Capabilities,
    *,
    absent: Iterable[str] = (),
    source_dtypes: Mapping[str, torch.dtype] = NO_CASTS,
) -> FillPlan:
    """The plan that fills one bucket.

    sizes: padded size of every axis. absent: optional slots that the batch comes without. source_dtypes: for slots
    whose source has another dtype than the slot, which one.
    """
    missing = frozenset(absent)
    present = {name: slot for name, slot in declaration.slots.items() if name not in missing}
    copied = {name: slot for name, slot in present.items() if slot.reads(name) is not None}
    return FillPlan(
        declaration=declaration.name,
        sizes=tuple((axis.name, sizes[axis]) for axis in declaration.axes),
        absent=tuple(sorted(missing)),
        tails=tuple(_tails(present, sizes, capabilities)),
        copies=_copies(copied, sizes, capabilities, source_dtypes),
        computed=tuple(_computed(declaration)),
        nbytes=sum(slot_bytes(slot, sizes, capabilities) for slot in copied.values()),
        mixed=capabilities.foreach_mixed and not capabilities.foreach_chunk,
    )


def slot_bytes(slot: Slot, sizes: Sizes, capabilities: Capabilities) -> int:
    """A slot's size in bytes at given sizes."""
    return math.prod(extent(slot.shape, sizes)) * resolve_dtype(slot.dtype, capabilities).itemsize


def _tails(slots: Mapping[str, Slot], sizes: Sizes, capabilities: Capabilities) -> Iterable[TailReset]:
    for name, slot in sorted(slots.items()):
        rule = slot.rule()
        if slot.varying and isinstance(rule, Pad):
            yield TailReset(name, slot.varying, resolve_value(rule.value, capabilities, sizes), slot.rewritten)


def _computed(declaration: Declaration) -> Iterable[ComputeStep]:
    for name in declaration.order:
        compute = declaration.slots[name].computes()
        if compute is not None:
            needs = (*compute.needs, OUT) if compute.writes_out else compute.needs
            yield ComputeStep(name, compute.name, needs, declaration.side(name))


def _copies(
    slots: Mapping[str, Slot], sizes: Sizes, capabilities: Capabilities, source_dtypes: Mapping[str, torch.dtype]
) -> tuple[CopyGroup, ...]:
    groups: dict[tuple[str, ...], list[CopyGroup]] = {}
    for name, slot in sorted(slots.items()):
        dtype = resolve_dtype(slot.dtype, capabilities)
        source = source_dtypes.get(name, dtype)
        why = _apart(slot, sizes, capabilities)
        single = CopyGroup((name,), dtype, source, slot.placement, together=not why, why=why)
        groups.setdefault((str(dtype), str(source), slot.placement, why), []).append(single)
    chunk = capabilities.foreach_chunk
    merged = [group for _, singles in sorted(groups.items()) for group in _merged(singles, chunk)]
    return tuple(sorted(merged, key=lambda group: not group.together))


def _apart(slot: Slot, sizes: Sizes, capabilities: Capabilities) -> str:
    """Why a slot cannot share a foreach call, or nothing."""
    foreach = capabilities.foreach_device if slot.placement == DEVICE else capabilities.foreach_host
    if not foreach:
        return f"no foreach on the {slot.placement}"
    if slot.takes_strided() or any(dim > 0 for dim in slot.varying):
        return "strided"
    return "large" if slot_bytes(slot, sizes, capabilities) >= LARGE_BYTES else ""


def _merged(singles: list[CopyGroup], chunk: int) -> Iterator[CopyGroup]:
    size = chunk if chunk and singles[0].together else len(singles)
    for start in range(0, len(singles), size):
        names = tuple(single.slots[0] for single in singles[start : start + size])
        yield attrs.evolve(singles[0], slots=names)
