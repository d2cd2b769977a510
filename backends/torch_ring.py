"""A ring on any device that torch has streams, events and pinned memory for."""

import functools
from collections.abc import Callable
from typing import Any, Final, final

import torch

from .ring import ENTRIES, Mark, Ring

_ALIGNMENT: Final = 256
_KEPT: Final = 2 * ENTRIES
"""Copies of the same place and length that one ring keeps sliced: two lengths in turn, as from two buckets."""


def pinned(nbytes: int) -> torch.Tensor:
    """Host memory that the device copies from while the host goes on."""
    with torch.inference_mode(mode=False):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def ring_on(
    device: torch.device, nbytes: int, module: Any = None, memory: Callable[[int], torch.Tensor] = pinned
) -> Ring:
    """A packet on a device, fed by torch's own copies.

    module: what has the device's `Event`, `current_stream` and `synchronize`; torch's module for it where it is None.
    memory: makes host memory.
    """
    packet = packet_on(device, nbytes)
    found = torch.get_device_module(device) if module is None else module
    mark, finish = functools.partial(mark_on, found, device), functools.partial(finish_on, found, device)
    return Ring(packet, memory, Slices(packet).copy, mark, finish)


def packet_on(device: torch.device, nbytes: int) -> torch.Tensor:
    """Zeros at an address that is a multiple of 256."""
    with torch.inference_mode(mode=False):
        room = torch.zeros(nbytes + _ALIGNMENT, dtype=torch.uint8, device=device)
        start = -room.data_ptr() % _ALIGNMENT
        return room[start : start + nbytes]


def mark_on(module: Any, device: torch.device) -> Mark:
    """An event recorded now on the current stream."""
    event: Any = module.Event()
    event.record(module.current_stream(device))
    marked: Mark = event
    return marked


def finish_on(module: Any, device: torch.device) -> None:
    """Wait for the device; not in the middle of a capture, which that would break off."""
    is_capturing: Callable[[], bool] | None = getattr(module, "is_current_stream_capturing", None)
    if is_capturing is None or not is_capturing():
        module.synchronize(device)


@final
class Slices:
    """Copies to a packet from slices of one tensor, which tells torch that the memory is pinned: no address would."""

    def __init__(self, packet: torch.Tensor) -> None:
        self._packet = packet
        self._memory: torch.Tensor | None = None
        self._known: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def copy(self, memory: torch.Tensor, at: int, nbytes: int) -> None:
        """Start a copy of so many bytes from a place in pinned memory, on the current stream."""
        if memory is not self._memory:
            self._memory = memory
            self._known.clear()
        pair = self._known.get((at, nbytes))
        if pair is None:
            pair = self._slice(memory, at, nbytes)
        pair[0].copy_(pair[1], non_blocking=True)

    def _slice(self, memory: torch.Tensor, at: int, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self._known) >= _KEPT:
            self._known.clear()
        with torch.inference_mode(mode=False):
            pair = self._known[at, nbytes] = self._packet[:nbytes], memory[at : at + nbytes]
        return pair
