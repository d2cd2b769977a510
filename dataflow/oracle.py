"""The oracle: fills a declaration slot by slot in the simplest code. Every lowering must leave the same bytes."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch

from .axes import Step, extent
from .buffers import Buffers
from .capabilities import Capabilities
from .computation import Computation, Results
from .declaration import Declaration
from .done import reset_of, resets
from .hostdata import plain_rows, tensor_for
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
    *,
    left: Collection[str] = (),
    frozen: Mapping[str, Any] = MappingProxyType({}),
) -> Views:
    """Fill a bucket of `step`'s padded sizes from a batch of its live sizes, and return the slots.

    It does no grouping and no checks, and remembers no earlier fills. `given` has values that replace the batch's own,
    `left` names slots that stay as they are, and `frozen` has values of fields that replace those of the batch.
    """
    views: dict[str, torch.Tensor | None] = dict.fromkeys(declaration.disabled)
    for name, slot in declaration.slots.items():
        source = slot.reads(name)
        view = buffers[name].view(step.padded_sizes)
        value = given.get(name) if given is not None else None if source is None else source.read(batch, side)
        shape = extent(slot.shape, step.live_sizes)
        if slot.ragged:
            value = plain_rows(slot, value, shape[1])
        if value is not None and not isinstance(value, torch.Tensor):
            value = tensor_for(slot, value, view.dtype, shape)
        if name in left:
            views[name] = view
            continue
        is_absent = source is not None and value is None
        views[name] = None if is_absent else view
        if not is_absent:
            reset_tail(slot, view, capabilities, step)
        if value is not None:
            buffers[name].view(step.live_sizes).copy_(value)
    for reset in resets(declaration, views, step.padded_sizes, capabilities):
        reset.run(batch)
    known = {**declaration.given(step), **frozen, **views}
    results = Results()
    for name in (name for name in declaration.functions if name not in left):
        view = buffers[name].view(step.padded_sizes)
        Computation.bind(name, declaration, known, view, results=results).run(batch)
        reset_tail(declaration.slots[name], view, capabilities, step)
        if ended := reset_of(name, declaration, views, step.padded_sizes, capabilities):
            ended.run(batch)
    return views


def reset_tail(slot: Slot, view: torch.Tensor, capabilities: Capabilities, step: Step) -> None:
    """Write the declared value into a slot's padded rows, if its rule has one."""
    rule = slot.rule()
    if isinstance(rule, Pad):
        number = resolve_value(rule.value, capabilities, step.padded_sizes)
        for dim in slot.varying:
            live = slot.shape[dim].at(step.live_sizes)
            view.narrow(dim, live, view.shape[dim] - live).fill_(number)


@torch.no_grad()
def advance_slot_by_slot(
    declaration: Declaration, buffers: Buffers, capabilities: Capabilities, step: Step
) -> Mapping[str, torch.Tensor]:
    """Advance slots by their rules, one by one in dependency order, and return the live rows of copied slots.

    A rule sees the declared tails, whatever the step wrote there.
    """
    views = {name: buffers[name].view(step.padded_sizes) for name in declaration.slots}
    for name, view in views.items():
        reset_tail(declaration.slots[name], view, capabilities, step)
    live = {name: buffers[name].view(step.live_sizes) for name in declaration.sources}
    for name, rule in declaration.rules.items():
        made = views[name].clone()
        Computation.bind(name, declaration, {**declaration.given(step), **views}, made, rule).run(None)
        live[name].copy_(made[tuple(map(slice, live[name].shape))])
    for reset in resets(declaration, views, step.padded_sizes, capabilities):
        reset.run(None)
    return live
