"""The oracle: a declaration filled slot by slot in the plainest code. Every lowering must leave the same bytes."""

from collections.abc import Mapping
from typing import Any

import torch

from .axes import Sizes, Step
from .buffers import Buffers
from .capabilities import Capabilities, resolve_dtype
from .computation import Computation
from .declaration import Declaration
from .hostdata import tensor_of
from .slots import Slot
from .sources import NO_SIDE, Side
from .tails import Pad, resolve_value
from .views import Views


@torch.no_grad()
def fill_slot_by_slot(
    declaration: Declaration,
    buffers: Buffers,
    capabilities: Capabilities,
    step: Step,
    batch: Any,
    side: Side = NO_SIDE,
    given: Mapping[str, Any] | None = None,
) -> Views:
    """Fill a bucket of `step`'s padded sizes from a batch of its live sizes, and return what the step sees.

    given: values in the place of the batch's own. No grouping, no memory of earlier fills, no checks: each tail is
    reset and each slot copied in each step.
    """
    views: dict[str, torch.Tensor | None] = dict.fromkeys(declaration.disabled)
    for name, slot in declaration.slots.items():
        source = slot.reads(name)
        value = _value(name, slot, batch, side, capabilities) if given is None else given.get(name)
        view = buffers[name].view(step.padded_sizes)
        _reset_tail(slot, view, step, capabilities, absent=source is not None and value is None)
        if value is not None:
            buffers[name].view(step.live_sizes).copy_(value)
        views[name] = None if source is not None and value is None else view
    for name in declaration.order:
        _compute(name, declaration, buffers, views, step, batch)
    return views


def _value(name: str, slot: Slot, batch: Any, side: Side, capabilities: Capabilities) -> torch.Tensor | None:
    """What the batch has for a slot, as a tensor; None where it has nothing."""
    source = slot.reads(name)
    value = source.read(batch, side) if source is not None else None
    return (
        value
        if value is None or isinstance(value, torch.Tensor)
        else tensor_of(value, resolve_dtype(slot.dtype, capabilities), len(slot.shape))
    )


def _reset_tail(slot: Slot, view: torch.Tensor, step: Step, capabilities: Capabilities, *, absent: bool) -> None:
    rule = slot.rule()
    if absent or not isinstance(rule, Pad):
        return
    number = resolve_value(rule.value, capabilities, _fixed(step.padded_sizes))
    for dim in slot.varying:
        live = slot.shape[dim].at(step.live_sizes)
        view.narrow(dim, live, view.shape[dim] - live).fill_(number)


def _fixed(sizes: Sizes) -> Sizes:
    return {axis: size for axis, size in sizes.items() if axis.fixed}


def _compute(name: str, declaration: Declaration, buffers: Buffers, views: Views, step: Step, batch: Any) -> None:
    compute = declaration.slots[name].computes()
    if compute is None:
        return
    target = buffers[name].view(step.padded_sizes)
    known = {**declaration.given(step.of(name)), **views}
    Computation.bind(name, compute, known, declaration.fields, target).run(batch)
