"""Tails as checks see them: which parts of a padded slot they are, and what may be put there."""

import math
from collections.abc import Callable, Iterator
from typing import Final

import attrs
import torch

from ...dataflow.axes import Sizes, Step
from ...dataflow.capabilities import CACHE_LOC, Capabilities, Role
from ...dataflow.slots import Constant, Output, Slot
from ...dataflow.tails import STALE, Keep, Number, Once, Pad, resolve_value

MOST: Final = 4096
"""Values of live rows that are looked at to choose from."""


def tails_of(slot: Slot, tensor: torch.Tensor, step: Step) -> Iterator[torch.Tensor]:
    """The parts of a padded view beyond the live rows, one along each varying dim; they may overlap."""
    for dim in slot.varying:
        live = slot.shape[dim].at(step.live_sizes)
        if live < tensor.shape[dim]:
            yield tensor.narrow(dim, live, tensor.shape[dim] - live)


def tail_rows(slot: Slot, step: Step, least: Callable[[int], int]) -> Iterator[tuple[str, int, int]]:
    """Their rows, each with what it is called, its dim and its number there; least: where to begin, from live rows."""
    for dim in slot.varying:
        live, padded = (slot.shape[dim].at(sizes) for sizes in (step.live_sizes, step.padded_sizes))
        for row in range(least(live), padded):
            yield f"row {row}" if dim == 0 else f"row {row} along dim {dim}", dim, row


def live_part(slot: Slot, tensor: torch.Tensor, step: Step) -> torch.Tensor:
    """The live rows of a padded view."""
    for dim in slot.varying:
        tensor = tensor.narrow(dim, 0, min(slot.shape[dim].at(step.live_sizes), tensor.shape[dim]))
    return tensor


def written_parts(name: str, slot: Slot, tensor: torch.Tensor, step: Step) -> list[torch.Tensor]:
    """The parts of a padded view that every fill must write; device-computed slots are written with the step."""
    if isinstance(slot, Constant | Output):
        return []
    rule = slot.rule()
    if slot.computes() is not None or (slot.reads(name) is not None and not isinstance(rule, Keep | Once)):
        return [tensor]
    if slot.reads(name) is not None:
        return [live_part(slot, tensor, step)]
    return list(tails_of(slot, tensor, step)) if isinstance(rule, Pad) else []


@attrs.frozen
class Poison:
    """Values for a tail, to be drawn from, in one replay and in another."""

    first: tuple[Number, ...]
    second: tuple[Number, ...]


def poison_of(slot: Slot, filled: torch.Tensor, step: Step, capabilities: Capabilities) -> Poison | None:
    """What a slot's tail must bear, by what it declares; None where it must hold what its rule says.

    What its rule leaves there, or has there in each step, is executed: so whole numbers are those of live rows, but
    in tails that no one reads (`keep`), and floats are whatever a float can be, but where only live rows were (`once`).
    An output's buffer may hold anything, live rows and all.
    """
    if isinstance(slot, Output):
        return _free(filled.dtype, (), unread=True)
    rule, said = slot.rule(), slot.bears()
    fixed: Sizes = {axis: size for axis, size in step.padded_sizes.items() if axis.fixed}
    if isinstance(said, tuple):
        values = tuple(resolve_value(value, capabilities, fixed) for value in said)
        return Poison(values, values[::-1]) if values else None
    if said is None and (rule is None or _addresses(slot)):
        return None
    usual = [resolve_value(rule.value, capabilities, fixed)] if isinstance(rule, Pad | Once) else []
    lived = tuple(dict.fromkeys([*_lived(slot, filled, step), *usual]))
    if said != STALE and not isinstance(rule, Once):
        return _free(filled.dtype, lived, unread=isinstance(rule, Keep))
    return Poison(lived, lived[::-1]) if lived else None


def _free(dtype: torch.dtype, lived: tuple[Number, ...], *, unread: bool) -> Poison | None:
    """What padded rows bear of a type, or what nobody reads at all."""
    if dtype.is_floating_point or dtype.is_complex:
        most = torch.finfo(dtype).max
        return Poison((math.nan,), (most, -most, math.inf))
    if dtype == torch.bool:
        return Poison((True,), (False,))
    if unread:
        ends = torch.iinfo(dtype)
        return Poison(lived or (ends.min,), (ends.max, ends.min))
    return Poison(lived, lived[::-1]) if lived else None


def _addresses(slot: Slot) -> bool:
    """Whether rows of it say where the step writes to."""
    return isinstance(slot.dtype, Role) and slot.dtype.name == CACHE_LOC.name


def _lived(slot: Slot, filled: torch.Tensor, step: Step) -> list[Number]:
    """Values that live rows have, each once."""
    live = live_part(slot, filled, step).reshape(-1)[:MOST]
    return list(dict.fromkeys(live.tolist()))


def spread(values: tuple[Number, ...], like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values drawn over a shape, as a tensor on the CPU; the first of all is the first of them."""
    order = torch.randint(0, len(values), (like.numel(),), device="cpu", generator=generator)
    order[:1] = 0
    exact = torch.float64 if like.dtype.is_floating_point else like.dtype
    exact = torch.complex128 if like.dtype.is_complex else exact
    return torch.tensor(values, dtype=exact, device="cpu")[order].to(like.dtype).reshape(like.shape)
