"""One allocation a placement for all slots, so that an address tells at once whether it lies in a buffer."""

import math
from collections.abc import Iterable, Mapping
from typing import Final

import attrs
import torch

from .binding import Allocate
from .capabilities import DEVICE, HOST, Placement

ALIGNMENT: Final = 256
"""Bytes that each slot's address is a multiple of: what CUDA's allocator gives, and wide loads need."""


@attrs.frozen
class Room:
    """What one slot asks for."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement

    @property
    def nbytes(self) -> int:
        """Bytes, rounded up to the alignment; never nothing, so that no two slots begin at one address."""
        return max(math.ceil(math.prod(self.shape) * self.dtype.itemsize / ALIGNMENT), 1) * ALIGNMENT


def separate(rooms: Iterable[Room], empty: Allocate) -> Mapping[str, torch.Tensor]:
    """Every slot in an allocation of its own."""
    return {room.name: empty(room.shape, room.dtype, room.placement) for room in rooms}


def together(rooms: Iterable[Room], empty: Allocate) -> Mapping[str, torch.Tensor]:
    """All slots of one placement in one allocation, the largest first."""
    tensors: dict[str, torch.Tensor] = {}
    asked = sorted(rooms, key=lambda room: (room.placement, -room.nbytes, room.name))
    with torch.inference_mode(mode=False):
        for placement in (DEVICE, HOST):
            mine = [room for room in asked if room.placement == placement]
            if not mine:
                continue
            arena = empty((sum(room.nbytes for room in mine),), torch.uint8, placement)
            start = 0
            for room in mine:
                tensors[room.name] = carve(arena, start, room.shape, room.dtype)
                start += room.nbytes
    return tensors


def carve(block: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in the bytes of a block, from one of them on."""
    used = math.prod(shape) * dtype.itemsize
    return block[start : start + used].view(dtype).view(shape)
