"""The ring: host memory from which uploads start, of which no entry is written while its copy may be in flight.

A driver takes a small packet along in its own command stream, and has read it when the call returns. Only what is
larger goes by way of an entry; but every step takes one, to hold on to what its packet points to.

An event for each step would cost more than the upload, so one event closes each segment of entries. When the ring
enters a segment, it records the event of the one that it leaves and waits for that of the one that it enters, a whole
turn old. Until an event has passed, the ring keeps alive what the segment's packets point to.
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
    """An upload by way of a ring.

    pinned: makes host memory that the device copies from. start: copies so many bytes from a place in such memory to
    the packet, on the current stream. mark: records a point on that stream, anew in the event that it is given, if any.
    finish: waits for the device, before the ring's memory can go to others. inline: as start, from bytes that may change afterwards, `most_inline` of them.
    """

    packet: torch.Tensor
    _pinned: Callable[[int], torch.Tensor]
    _start: Start
    _mark: Callable[[Any], Any]
    _finish: Callable[[], None]
    _inline: Inline | None = None
    _most_inline: int = 0

    def __attrs_post_init__(self) -> None:
        """Have the ring wait for the device at its own end."""
        self.nbytes = self.packet.nbytes
        self._marks: list[Any] = [None] * SEGMENTS
        self._kept: list[object] = [None] * ENTRIES
        self._next = self._room = 0
        weakref.finalize(self, _end, self._finish, self._kept).atexit = False

    def send(self, data: bytes, kept: object) -> None:
        """Write the next entry and start its copy. One that is read at once, and keeps nothing, takes no entry."""
        size = len(data)
        inline = self._inline if size <= self._most_inline else None
        if inline is not None and kept is None:
            inline(data, size)
            return
        index = self._next
        if index % SEGMENT == 0:
            self._turn(index // SEGMENT)
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
        """By way of pinned memory of its own: an entry of the ring for it would be there 32 times, and for good."""
        with outside_inference(), torch.no_grad():
            held = self._pinned(source.nbytes).view(source.dtype).view(source.shape)
            return held.copy_(source).to(self.packet.device, non_blocking=True)

    def _turn(self, entered: int) -> None:
        """Leave a segment and enter the next, once the device is done with it; let go of what it has read."""
        self._marks[entered - 1] = self._mark(self._marks[entered - 1])
        mark = self._marks[entered]
        if mark is not None:
            mark.synchronize()
        for segment, passed in enumerate(self._marks):
            if passed is not None and passed.query():
                self._kept[segment * SEGMENT : (segment + 1) * SEGMENT] = [None] * SEGMENT

    def _grow(self, size: int) -> None:
        """Larger entries, once the device has done with all the others."""
        self._mark(None).synchronize()
        self._room = -(-size // _ALIGNMENT) * _ALIGNMENT
        self._memory = self._pinned(self._room * ENTRIES)
        self.nbytes = self.packet.nbytes + self._memory.nbytes
        array: Any = self._memory.numpy()
        self._bytes = memoryview(array)


def _end(finish: Callable[[], None], kept: list[object]) -> None:
    """Let the device finish reading before memory goes to someone else: the entries, and what packets point to."""
    finish()
    kept.clear()


def pinned(nbytes: int) -> torch.Tensor:
    """Host memory that the device copies from while the host goes on."""
    with outside_inference():
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def packet_on(device: torch.device, nbytes: int) -> torch.Tensor:
    """Zeros at an address that is a multiple of 256."""
    with outside_inference():
        room = torch.zeros(nbytes + _ALIGNMENT, dtype=torch.uint8, device=device)
        start = -room.data_ptr() % _ALIGNMENT
        return room[start : start + nbytes]


def copy_slice(packet: torch.Tensor, memory: torch.Tensor, at: int, nbytes: int) -> None:
    """Start a copy from a slice of pinned memory, on the current stream: of an address torch would not know that."""
    packet[:nbytes].copy_(memory[at : at + nbytes], non_blocking=True)


def ring_on(
    device: torch.device,
    nbytes: int,
    module: Any = None,
    memory: Callable[[int], torch.Tensor] = pinned,
    driver: Callable[[torch.Tensor], tuple[Start, Inline, int]] | None = None,
    stream: Callable[[], Any] | None = None,
) -> Ring:
    """A packet of so many bytes on a device, fed by torch's own copies, or by the driver's.

    module: what has the device's `Event`, `current_stream` and `synchronize`, if not torch's own. memory: makes host
    memory. driver: gives `start`, `inline` and `most_inline` of a `Ring` for a packet.
    stream: gives the current stream, if not the module.
    """
    packet, found = packet_on(device, nbytes), module or torch.get_device_module(device)
    current = functools.partial(found.current_stream, device) if stream is None else stream

    def mark(again: Any) -> Any:
        event: Any = found.Event() if again is None else again
        event.record(current())
        return event

    def finish() -> None:  # not in the middle of a capture, which that would break off
        if not getattr(found, "is_current_stream_capturing", bool)():
            found.synchronize(device)

    ways: tuple[Any, ...] = (functools.partial(copy_slice, packet),) if driver is None else driver(packet)
    return Ring(packet, memory, ways[0], mark, finish, *ways[1:])
