"""What torch's allocators tell of their memory: segments, piece by piece, and bytes in all."""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

Snapshot = Iterable[Mapping[str, Any]]
Segments = list[tuple[int, int, int]]
"""First and one past the last address, and the stream, in order."""


def ranges_of(snapshot: Snapshot) -> list[tuple[int, int]]:
    """First and one past the last address of each piece."""
    return [(one["address"], one["address"] + one["total_size"]) for one in snapshot]


def streams_of(snapshot: Snapshot, tensors: Sequence[torch.Tensor], otherwise: int) -> tuple[int, ...]:
    """The stream that each tensor's memory was allocated on; `otherwise` where the allocator knows nothing of it."""
    return _looked_up(_sorted(snapshot), tensors, otherwise)


class StreamTable:
    """The streams that an allocator's segments belong to, for one device.

    A snapshot takes milliseconds, so it is taken again only where the allocator has taken memory from the device or
    given some back since: a segment belongs to one stream for as long as it lives. snapshot, statistics: torch's calls.
    """

    def __init__(self, snapshot: Callable[[], Snapshot], statistics: Callable[[], Any]) -> None:
        self._snapshot = snapshot
        self._statistics = statistics
        self._changes: tuple[int, ...] = ()
        self._segments: Segments = []

    def streams_of(self, tensors: Sequence[torch.Tensor], otherwise: int) -> tuple[int, ...]:
        """As the function of that name."""
        changes = _changes_in(self._statistics())  # before the snapshot, which then is no older
        if changes != self._changes or not changes:
            self._segments, self._changes = _sorted(self._snapshot()), changes
        return _looked_up(self._segments, tensors, otherwise)


def _sorted(snapshot: Snapshot) -> Segments:
    return sorted((one["address"], one["address"] + one["total_size"], one["stream"]) for one in snapshot)


def _looked_up(segments: Segments, tensors: Sequence[torch.Tensor], otherwise: int) -> tuple[int, ...]:
    starts = [low for low, _, _ in segments]
    streams = []
    for tensor in tensors:
        address = tensor.data_ptr()
        at = bisect.bisect_right(starts, address) - 1
        is_known = at >= 0 and address < segments[at][1]
        streams.append(segments[at][2] if is_known else otherwise)
    return tuple(streams)


def _changes_in(stats: Any) -> tuple[int, ...]:
    """Numbers that change whenever an allocator takes memory from its device, or gives some back."""
    found = [stats.get(name, {}).get("all", {}) for name in ("segment", "reserved_bytes")]
    return tuple(int(one.get(how, 0)) for one in found for how in ("current", "allocated", "freed") if one)


def bytes_of(stats: Any) -> tuple[int, int]:
    """Bytes held and used, out of an allocator's nested statistics."""
    found = [stats.get(name, {}).get("all", {}).get("current", 0) for name in ("reserved_bytes", "allocated_bytes")]
    return int(found[0]), int(found[1])
