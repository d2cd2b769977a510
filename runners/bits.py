"""Bits: tensors compared byte by byte, so that NaN equals itself and 0.0 is not -0.0."""

import numpy as np
import torch


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, in a row of their own."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).unsqueeze(-1).view(torch.uint8)  # one row may have any stride, and its last dim may not


def first_unequal(one: torch.Tensor, other: torch.Tensor) -> tuple[int, ...] | None:
    """Where two tensors of one shape, dtype and device first differ by a bit; None where they do not."""
    differs = bits(one) != bits(other)
    if not differs.any():
        return None
    first = int(differs.any(-1).nonzero()[0])
    return tuple(int(i) for i in np.unravel_index(first, one.shape))
