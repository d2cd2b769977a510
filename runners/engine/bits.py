"""Bits: byte-wise comparison of tensors, so that NaN equals itself and 0.0 differs from -0.0, and random bytes."""

from typing import Final

import torch

from ...dataflow.capabilities import dtype_text

NAMED: Final = 4
"""The most rows that `unequal_rows` names."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element, one element a row."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).unsqueeze(-1).view(torch.uint8)  # as a column, whose last stride is 1


def text_of(value: object) -> str:
    """Return a value as text for an error message, or a tensor's kind, such as `float32 of shape [2, 3]`."""
    return f"{dtype_text(value.dtype)} of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def unequal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return which elements of two tensors of one shape, dtype and device differ by a bit."""
    return (bits(one) != bits(other)).any(-1).reshape(one.shape)


def first_unequal(one: torch.Tensor, other: torch.Tensor) -> tuple[int, ...] | None:
    """Return the index of the first element in which two tensors differ by a bit, or None."""
    places = unequal(one, other).nonzero()
    return tuple(places[0].tolist()) if len(places) else None


def garbage(like: torch.Tensor, generator: torch.Generator, *, flipped: bool = False) -> torch.Tensor:
    """Draw random bytes as a CPU tensor of this shape and dtype. flipped: Whether to invert each bit."""
    if like.dtype == torch.bool:
        return (torch.randint(0, 2, like.shape, device="cpu", generator=generator) ^ flipped).bool()
    count = like.numel() * like.itemsize
    drawn = torch.randint(0, 256, (count,), dtype=torch.uint8, device="cpu", generator=generator)
    return (~drawn if flipped else drawn).view(like.dtype).reshape(like.shape)


def unequal_rows(one: torch.Tensor, other: torch.Tensor) -> str | None:
    """Name the first few rows in which two tensors differ by a bit, or return None."""
    differs = unequal(one, other)
    if not differs.any():
        return None
    if not one.dim():
        return "it"
    rows = differs.reshape(one.shape[0], -1).any(-1).nonzero()[:, 0].tolist()
    more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:NAMED]))}{more}"
