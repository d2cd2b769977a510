"""What torch's allocators tell of their memory: segments, piece by piece, and bytes in all."""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

Snapshot = Iterable[Mapping[str, Any]]


def ranges_of(snapshot: Snapshot) -> list[tuple[int, int]]:
    """First and one past the last address of each piece."""
    return [(one["address"], one["address"] + one["total_size"]) for one in snapshot]


def streams_of(snapshot: Snapshot, tensors: Sequence[torch.Tensor], otherwise: int) -> tuple[int, ...]:
    """The stream that each tensor's memory was allocated on; `otherwise` where the allocator knows nothing of it."""
    found = sorted((one["address"], one["address"] + one["total_size"], one["stream"]) for one in snapshot)
    starts = [low for low, _, _ in found]
    streams = []
    for tensor in tensors:
        at = bisect.bisect_right(starts, tensor.data_ptr()) - 1
        is_known = at >= 0 and tensor.data_ptr() < found[at][1]
        streams.append(found[at][2] if is_known else otherwise)
    return tuple(streams)


def bytes_of(stats: Any) -> tuple[int, int]:
    """Bytes held and used, out of an allocator's nested statistics."""
    found = [stats.get(name, {}).get("all", {}).get("current", 0) for name in ("reserved_bytes", "allocated_bytes")]
    return int(found[0]), int(found[1])
