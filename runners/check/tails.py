"""Tails of padded slots: where they lie, what they must bear, and copies of slots with poison in their tails."""

import math
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import torch

from ...dataflow.axes import Sizes, Step
from ...dataflow.capabilities import CACHE_LOC, Capabilities, Role
from ...dataflow.slots import Output, Slot
from ...dataflow.tails import STALE, Keep, Number, Once, Pad, resolve_value
from ..bits import first_unequal
from .comparison import live_part

MOST: Final = 4096
"""Values of live rows that are looked at to choose from."""
Poison: TypeAlias = tuple[tuple[Number, ...], tuple[Number, ...]]
"""Values for a tail, to be drawn from, in one run and in another."""


def tails_of(slot: Slot, tensor: torch.Tensor, step: Step) -> Iterator[torch.Tensor]:
    """The parts of a padded view beyond the live rows, one along each varying dim. They may overlap."""
    for dim in slot.varying:
        live = slot.shape[dim].at(step.live_sizes)
        if live < tensor.shape[dim]:
            yield tensor.narrow(dim, live, tensor.shape[dim] - live)


def tail_rows(slot: Slot, step: Step, least: Callable[[int], int]) -> Iterator[tuple[str, int, int]]:
    """The rows of a tail: what each is called, its dim and its number. least: where to begin, from live rows."""
    for dim in slot.varying:
        live, padded = (slot.shape[dim].at(sizes) for sizes in (step.live_sizes, step.padded_sizes))
        for row in range(least(live), padded):
            yield f"row {row}" if dim == 0 else f"row {row} along dim {dim}", dim, row


def poison_of(slot: Slot, filled: torch.Tensor, step: Step, capabilities: Capabilities) -> Poison | None:
    """What a slot's tail must bear, by what it declares. None if it must hold what its rule says.

    The step executes padded rows. So whole numbers are those of live rows, and floats are whatever a float can be.
    A tail that no one reads (`keep`) bears any number. A tail that is set once bears what live rows had. An output's
    buffer may hold anything, live rows and all.
    """
    if isinstance(slot, Output):
        return _free(filled.dtype, (), unread=True)
    rule, said = slot.rule(), slot.poison
    fixed: Sizes = {axis: size for axis, size in step.padded_sizes.items() if axis.fixed}
    if isinstance(said, tuple):
        values = tuple(resolve_value(value, capabilities, fixed) for value in said)
        return (values, values[::-1]) if values else None
    says_where = isinstance(slot.dtype, Role) and slot.dtype.name == CACHE_LOC.name  # the step writes
    if said is None and (rule is None or says_where):
        return None
    usual = [resolve_value(rule.value, capabilities, fixed)] if isinstance(rule, Pad | Once) else []
    live = live_part(slot, filled, step).reshape(-1)[:MOST].tolist()
    lived = tuple(dict.fromkeys([*live, *usual]))
    if said != STALE and not isinstance(rule, Once):
        return _free(filled.dtype, lived, unread=isinstance(rule, Keep))
    return (lived, lived[::-1]) if lived else None


def _free(dtype: torch.dtype, lived: tuple[Number, ...], *, unread: bool) -> Poison | None:
    """What padded rows bear of a type, or what nobody reads at all."""
    if dtype.is_floating_point or dtype.is_complex:
        most = torch.finfo(dtype).max
        return (math.nan,), (most, -most, math.inf)
    if dtype == torch.bool:
        return (True,), (False,)
    if unread:
        ends = torch.iinfo(dtype)
        return lived or (ends.min,), (ends.max, ends.min)
    return (lived, lived[::-1]) if lived else None


def poisoned(
    slot: Slot, filled: torch.Tensor, poison: Poison | None, turn: int, step: Step, seed: torch.Generator
) -> torch.Tensor | None:
    """A copy of a padded view with poison in its tail, in all of it for an output. None if it would be no other."""
    if poison is None:
        return None
    tensor = filled.clone()
    for part in [tensor] if isinstance(slot, Output) else tails_of(slot, tensor, step):
        part.copy_(spread(poison[turn], part, seed))
    return None if first_unequal(filled, tensor) is None else tensor


def spread(values: tuple[Number, ...], like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values drawn over a shape, as a tensor on the CPU. The first of all is the first of them."""
    order = torch.randint(0, len(values), (like.numel(),), device="cpu", generator=generator)
    order[:1] = 0
    exact = torch.complex128 if like.dtype.is_complex else torch.float64 if like.dtype.is_floating_point else like.dtype
    return torch.tensor(values, dtype=exact, device="cpu")[order].to(like.dtype).reshape(like.shape)
