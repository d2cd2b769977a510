"""The ring: host buffers that packets are uploaded from. No entry is overwritten while its copy may be in flight.

A driver copies a small packet into its own command stream before the call returns. Only a larger packet is copied from
an entry. Each step still takes an entry, which keeps alive the memory that its packet points to.

An event for each step would cost more than the upload, so one event closes each segment of entries. When the ring
enters a segment, it records the event of the segment that it leaves, and waits for the event of the one that it enters,
which was recorded one round earlier. Until an event has passed, the ring keeps alive what the segment's packets point
to.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Final, final

import attrs
import torch

from ..dataflow.guard import outside_inference
from ..dataflow.packet import Upload

SEGMENT: Final = 8
"""Entries that one event guards."""
SEGMENTS: Final = 4
ENTRIES: Final = SEGMENT * SEGMENTS
_ALIGNMENT: Final = 256
Start = Callable[[torch.Tensor, int, int], None]
Inline = Callable[[bytes, int], None]


@final
@attrs.define(eq=False, slots=False)
class Ring(Upload):
    """The upload of a packet through a ring.

    Attributes:
        packet: The packet on the device.
        pinned: Makes host memory that the device copies from.
        start: Copies a number of bytes from an offset in such memory to the packet, on the current stream.
        mark: Records an event on that stream. It reuses the event that it is given, if any.
        finish: Waits for the device, before the ring's memory is freed.
        inline: Copies like `start`, but from bytes that may change afterwards.
        most_inline: The most bytes that `inline` copies.
    """

    packet: torch.Tensor
    _pinned: Callable[[int], torch.Tensor]
    _start: Start
    _mark: Callable[[Any], Any]
    _finish: Callable[[], None]
    _inline: Inline | None = None
    _most_inline: int = 0

    def __attrs_post_init__(self) -> None:
        """Register a finalizer that waits for the device before the ring's memory is freed."""
        self.nbytes = self.packet.nbytes
        self._marks: list[Any] = [None] * SEGMENTS
        self._kept: list[object] = [None] * ENTRIES
        self._next = self._room = 0
        weakref.finalize(self, _end, self._finish, self._kept).atexit = False

    def send(self, data: bytes, kept: object) -> None:
        """Write the next entry and start its copy. Small data that points to no memory takes no entry."""
        size = len(data)
        inline = self._inline if size <= self._most_inline else None
        if inline is not None and kept is None:
            inline(data, size)
            return
        index = self._next
        if index % SEGMENT == 0:
            self._enter(index // SEGMENT)
        self._kept[index] = kept
        if inline is not None:
            inline(data, size)
        else:
            if size > self._room:
                self._grow(size)
            at = index * self._room
            self._bytes[at : at + size] = data
            self._start(self._memory, at, size)
        self._next = (index + 1) % ENTRIES

    def move(self, source: torch.Tensor) -> torch.Tensor:
        """Copy through new pinned memory. A ring entry would not do: all 32 of them would stay that large."""
        with outside_inference(), torch.no_grad():
            pinned = self._pinned(source.nbytes).view(source.dtype).view(source.shape)
            return pinned.copy_(source).to(self.packet.device, non_blocking=True)

    def _enter(self, entered: int) -> None:
        """Leave a segment and enter the next once the device is done with it. Release what the device has read."""
        self._marks[entered - 1] = self._mark(self._marks[entered - 1])
        mark = self._marks[entered]
        if mark is not None:
            mark.synchronize()
        for segment, passed in enumerate(self._marks):
            if passed is not None and passed.query():
                self._kept[segment * SEGMENT : (segment + 1) * SEGMENT] = [None] * SEGMENT

    def _grow(self, size: int) -> None:
        """Make the entries larger, once the device is done with all of them."""
        self._mark(None).synchronize()
        self._room = -(-size // _ALIGNMENT) * _ALIGNMENT
        self._memory = self._pinned(self._room * ENTRIES)
        self.nbytes = self.packet.nbytes + self._memory.nbytes
        array: Any = self._memory.numpy()
        self._bytes = memoryview(array)


def _end(finish: Callable[[], None], kept: list[object]) -> None:
    """Wait until the device has read the entries and what packets point to, before that memory is freed."""
    finish()
    kept.clear()


def pinned(nbytes: int) -> torch.Tensor:
    """Allocate pinned host memory, from which the device copies asynchronously."""
    with outside_inference():
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def packet_on(device: torch.device, nbytes: int) -> torch.Tensor:
    """Allocate zeros at an address that is a multiple of 256."""
    with outside_inference():
        room = torch.zeros(nbytes + _ALIGNMENT, dtype=torch.uint8, device=device)
        start = -room.data_ptr() % _ALIGNMENT
        return room[start : start + nbytes]


def copy_slice(packet: torch.Tensor, memory: torch.Tensor, at: int, nbytes: int) -> None:
    """Start a copy from a slice of pinned memory, on the current stream.

    Torch recognizes pinned memory by its storage, which a slice keeps and a bare address does not.
    """
    packet[:nbytes].copy_(memory[at : at + nbytes], non_blocking=True)


def ring_on(
    device: torch.device,
    nbytes: int,
    module: Any = None,
    memory: Callable[[int], torch.Tensor] = pinned,
    driver: Callable[[torch.Tensor], tuple[Start, Inline, int]] | None = None,
    stream: Callable[[], Any] | None = None,
) -> Ring:
    """Make a packet of `nbytes` bytes on a device, filled by torch's own copies or by the driver's.

    Args:
        device: The device.
        nbytes: The packet's bytes.
        module: Has the device's `Event`, `current_stream` and `synchronize`, if not torch's own.
        memory: Makes host memory.
        driver: Returns `start`, `inline` and `most_inline` of a `Ring` for a packet.
        stream: Returns the current stream, if it is not the module's.
    """
    packet = packet_on(device, nbytes)
    found = module or torch.get_device_module(device)

    def mark(again: Any) -> Any:
        event: Any = found.Event() if again is None else again
        event.record(found.current_stream(device) if stream is None else stream())
        return event

    def finish() -> None:  # a wait would break off a capture
        if not getattr(found, "is_current_stream_capturing", bool)():
            found.synchronize(device)

    ways: tuple[Any, ...] = (functools.partial(copy_slice, packet),) if driver is None else driver(packet)
    return Ring(packet, memory, ways[0], mark, finish, *ways[1:])
