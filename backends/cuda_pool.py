"""What all captures on one CUDA device share: a stream, a lock, and memory that graphs leave to one another."""

import threading
import weakref
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import torch

_C: Final[Any] = torch._C  # noqa: SLF001 - the allocator's side of a capture has no public name
Handle: TypeAlias = Any
"""What torch calls a pool: two numbers, of a type without a public name."""


class GraphPool:
    """Graph memory of one device: what one graph needs for its steps alone, the next one uses too.

    torch refuses a handle whose graphs are all gone, and may refuse one whose capture was broken off; so the handle is
    drawn anew then, and users keep the pool.
    """

    def __init__(self) -> None:
        self._handle: Handle | None = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def handle(self) -> Handle:
        """The handle for the next capture."""
        if self._handle is None or not self._graphs:
            self._handle = new_handle()
        return self._handle

    def graphs(self) -> list[torch.cuda.CUDAGraph]:
        """The graphs that use this memory."""
        return list(self._graphs)

    def add(self, graph: torch.cuda.CUDAGraph) -> None:
        """Note a captured graph."""
        self._graphs.add(graph)

    def forget(self) -> None:
        """Draw another handle next time; graphs that were captured keep what they have."""
        self._handle = None


class FixedPool(GraphPool):
    """A pool for one graph, or one that the caller has a handle of."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self._given = handle

    def handle(self) -> Handle:
        """Always the same."""
        return self._given


def new_handle() -> Handle:
    """A handle that no graph has yet."""
    return torch.cuda.graph_pool_handle()


class Shared:
    """One device's capture stream, its pool, and the lock that lets one thread at a time warm up and capture."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = GraphPool()
        self.lock = threading.RLock()
        with torch.inference_mode(mode=False):
            self._one = torch.zeros(1, device=device)
        self._broken: list[torch.cuda.CUDAGraph] = []
        self.recording: Any = None  # the capture under way

    def discard(self, graph: torch.cuda.CUDAGraph, pool: GraphPool, handle: Handle) -> None:
        """Leave nothing of a capture that failed.

        Where CUDA has invalidated a capture, torch (2.6 to 2.13) does not end it on its own side: the allocator would
        refuse the next capture into the same memory, and the random generator any draw outside of captures.
        """
        graph.reset()
        if self._close(handle):
            self._broken.append(graph)  # torch may still ask this one whether an allocation is its own
            self._mend(pool)
        torch.cuda.empty_cache()

    def _close(self, handle: Handle) -> bool:
        """End the allocator's recording into a pool; whether it was still open."""
        try:
            _C._cuda_endAllocateToPool(self.device.index, handle)  # noqa: SLF001
        except RuntimeError:  # "not currently recording": the capture ended in order
            return False
        _C._cuda_releasePool(self.device.index, handle)  # noqa: SLF001 - what an ended capture's reset does
        return True

    def _mend(self, pool: GraphPool) -> None:
        """Run one good capture, which brings the generator back; into another handle if this one cannot be mended."""
        try:
            self._capture_nothing(pool.handle())
        except RuntimeError:
            pool.forget()
            self._capture_nothing(new_handle())

    def _capture_nothing(self, handle: Handle) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=handle, stream=self.stream):
                self._one.fill_(1)
        except RuntimeError:
            self._close(handle)
            self._broken.append(graph)
            raise
        graph.reset()


_SHARED: Final[dict[int, Shared]] = {}
_LOCK: Final = threading.Lock()


def shared_on(device: torch.device) -> Shared:
    """What all captures on a device share, made at its first use."""
    with _LOCK:
        if device.index not in _SHARED:
            _SHARED[device.index] = Shared(device)
        return _SHARED[device.index]


def pool_ranges(handle: Handle) -> list[tuple[int, int]]:
    """First and one past the last address of each piece of memory in a pool."""
    snapshot: Any = torch.cuda.memory_snapshot
    try:
        segments = snapshot(handle)
    except TypeError:  # an older torch tells of all pools at once
        segments = [one for one in snapshot() if tuple(one["segment_pool_id"]) == tuple(handle)]
    return [(one["address"], one["address"] + one["total_size"]) for one in segments]


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which it does not keep: as torch's own graph trees hold what lies in a pool."""
    storage = tensor.untyped_storage()
    with torch.inference_mode(mode=False):
        bare = _C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())  # noqa: SLF001
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return fresh.set_(bare, tensor.storage_offset(), tensor.size(), tensor.stride())


def bytes_on(device: torch.device) -> tuple[int, int]:
    """Bytes that torch's allocator holds on a device, and those of them that tensors use."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    names: Iterable[str] = ("reserved_bytes", "allocated_bytes")
    reserved, used = (int(stats.get(name, {}).get("all", {}).get("current", 0)) for name in names)
    return reserved, used
