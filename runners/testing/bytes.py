"""Bytes of slots: spoilt before a fill, and compared after it, so that a fault is named by slot and row."""

from collections.abc import Iterator, Mapping

import torch

from ...dataflow.axes import Sizes, extent
from ...dataflow.buffers import Buffer, Buffers
from ...dataflow.slots import Constant, Output, Slot
from ...dataflow.tails import Keep, Once
from ..bits import first_unequal

Slots = Mapping[str, torch.Tensor | None]
_SPREAD = 100


def noise(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random numbers over a small range, zeros as rare as any other; of a dtype without signs, none below zero."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, device="cpu", generator=generator).bool()
    low = -_SPREAD if dtype.is_signed else 0
    return torch.randint(low, _SPREAD, shape, device="cpu", generator=generator).to(dtype)


def spoil(buffers: Buffers, generator: torch.Generator) -> None:
    """Random bytes wherever no declaration promises others: not in constants, nor where tails keep what they hold."""
    for buffer in buffers:
        values = noise(tuple(buffer.tensor.shape), buffer.tensor.dtype, generator)
        if not isinstance(buffer.slot, Constant) and not isinstance(buffer.slot.rule(), Keep | Once):
            buffer.tensor.copy_(values)
    buffers.distrust()


def scribble(buffers: Buffers, padded: Sizes, generator: torch.Generator) -> None:
    """What a step does to slots that it may write: anything, over every padded row."""
    for buffer in buffers:
        if buffer.slot.rewritten or isinstance(buffer.slot, Output):
            view = buffer.view(padded)
            view.copy_(noise(tuple(view.shape), view.dtype, generator))


def difference(mine: torch.Tensor, right: torch.Tensor) -> tuple[int, ...] | None:
    """Where two tensors of one shape and dtype first differ in a byte; None where they do not."""
    return first_unequal(mine.detach().cpu(), right.detach().cpu())


def differences(
    mine: Slots, right: Slots, slots: Mapping[str, Slot], live: Sizes, other: str = "the oracle's"
) -> Iterator[str]:
    """What is wrong with a fill, one sentence a slot."""
    for name, expected in right.items():
        got = mine[name]
        if (got is None) != (expected is None):
            yield f"slot {name!r} is {'absent' if got is None else 'there'}, and {other} is not"
        elif got is not None and expected is not None:
            if (got.dtype, got.shape) != (expected.dtype, expected.shape):
                facts = [f"{one.dtype} of shape {list(one.shape)}" for one in (got, expected)]
                yield f"slot {name!r} is {facts[0]}, and {other} {facts[1]}"
            elif (where := difference(got, expected)) is not None:
                rows = extent(slots[name].shape, live)
                part = "a live row" if all(i < size for i, size in zip(where, rows, strict=True)) else "its tail"
                values = got[where].item(), expected[where].item()
                yield f"slot {name!r}, row {_row(where)} ({part}): it holds {values[0]}, and {other} {values[1]}"


def untouched(mine: Buffers, right: Buffers) -> Iterator[str]:
    """Slots of which rows were written that no rule lets a fill write: kept tails, constants, other buckets' rows."""
    for buffer in mine:
        where = difference(buffer.tensor, right[buffer.name].tensor) if _is_whole(buffer) else None
        if where is not None:
            yield f"slot {buffer.name!r}, row {_row(where)}: written, though no rule has a fill write it"


def _is_whole(buffer: Buffer) -> bool:
    return isinstance(buffer.slot.rule(), Keep | Once) or buffer.slot.rule() is None


def _row(where: tuple[int, ...]) -> str:
    return str(where[0] if len(where) == 1 else list(where))
