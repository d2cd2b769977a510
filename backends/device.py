"""One device with streams and graphs: torch's calls for it, and what all captures on it share."""

import abc
import bisect
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, Protocol, TypeAlias

import torch

from ..dataflow.errors import CaptureError
from .faults import Advice, not_captured

Handle: TypeAlias = Any
"""What torch calls a pool: two numbers, of a type without a public name; None where the first graph brings it."""


class Recorded(Protocol):
    """A graph as torch has it."""

    def replay(self) -> None:
        """Launch it on the current stream."""
        ...

    def reset(self) -> None:
        """Let go of all that it holds."""
        ...


Opened: TypeAlias = tuple[Recorded, AbstractContextManager[object]]
"""A graph with nothing in it, and the context that records what is called inside into it."""


class GraphPool:
    """Graph memory of one device: what one graph needs for its steps alone, the next one uses too.

    torch refuses a handle whose graphs are all gone, and may refuse one whose capture was broken off. The pool then
    draws another handle, and its users keep the pool. given: the one handle of a pool that never draws another.
    """

    def __init__(self, device: "GraphDevice", *given: Handle) -> None:
        self._device = device
        self._given = given
        self._handle: Handle | None = None
        self._graphs: weakref.WeakSet[Recorded] = weakref.WeakSet()

    def handle(self) -> Handle:
        """The handle for the next capture."""
        if self._given:
            return self._given[0]
        if self._handle is None or not self._graphs:
            self._handle = self._device.new_handle()
        return self._handle

    def graphs(self) -> list[Recorded]:
        """The graphs that use this memory."""
        return list(self._graphs)

    def add(self, graph: Recorded) -> None:
        """Note a captured graph."""
        self._graphs.add(graph)
        self._handle = self._device.handle_of(graph, self._handle)

    def forget(self) -> None:
        """Draw another handle next time; graphs that were captured keep what they have."""
        self._handle = None


class GraphDevice(abc.ABC):
    """A device's capture stream, its pool, the lock under which one thread warms up or captures, and torch's calls.

    module: what has the calls, such as `torch.cuda`; the names here are those of CUDA and NPU. recording: the capture
    under way. advice, conditions: what the device says when it refuses a capture, and the ways out. native: torch's own
    side of the allocator, where it has one. warns_of_empty: what a warning says where a graph has nothing in it.
    """

    advice: ClassVar[Advice] = ()
    conditions: ClassVar[Advice] = ()
    warns_of_empty: ClassVar[str] = ""

    def __init__(self, device: torch.device, module: Any, native: Any = None) -> None:
        self.device = device
        self.module = module
        self.native = native
        self.stream = self.new_stream()
        self.pool = GraphPool(self)
        self.lock = threading.RLock()
        self.recording: Any = None  # a `DeviceCapture`
        with torch.inference_mode(mode=False):
            self._one = torch.zeros(1, device=device)
        self._broken: list[Recorded] = []
        self._checks = 0
        self._changes: tuple[int, ...] = ()
        self._segments: list[tuple[int, int, int]] = []

    @abc.abstractmethod
    def begin(self, handle: Handle, **options: Any) -> Opened:
        """A new graph, and the context that records into it on the capture stream; options: torch's own."""

    @abc.abstractmethod
    def alias_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, which it does not keep; the tensor where the device has no such thing."""

    def new_stream(self) -> Any:
        """A stream that is not the default one."""
        return self.module.Stream(self.device)

    def current_stream(self) -> Any:
        """The current one."""
        return self.module.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Make a stream the current one for a while."""
        context: AbstractContextManager[object] = self.module.stream(stream)
        return context

    def new_event(self) -> Any:
        """An event that takes the time, not recorded yet."""
        return self.module.Event(enable_timing=True)

    def is_capturing(self) -> bool:
        """Whether the current stream is."""
        return bool(self.module.is_current_stream_capturing())

    def new_handle(self) -> Handle:
        """A handle for a pool that no graph has yet; None where only a graph has one."""
        return self.module.graph_pool_handle()

    def handle_of(self, graph: Recorded, handle: Handle) -> Handle:
        """The handle of the pool that a graph was recorded into."""
        del graph
        return handle

    def free_and_total(self) -> tuple[int, int]:
        """Bytes that are free on the device, and all that it has, as its driver counts them."""
        free, total = self.module.mem_get_info(self.device)
        return int(free), int(total)

    def held_and_used(self) -> tuple[int, int]:
        """Bytes that torch's allocator holds, and those of them that tensors use."""
        stats = self.module.memory_stats_as_nested_dict(self.device)
        found = [stats.get(name, {}).get("all", {}).get("current", 0) for name in ("reserved_bytes", "allocated_bytes")]
        return int(found[0]), int(found[1])

    def release_workspaces(self) -> None:  # noqa: B027 - a device whose libraries keep none has nothing to do
        """Have libraries free the workspaces that they keep between calls, so that the next operator allocates anew."""

    def close(self, handle: Handle) -> bool:
        """End the allocator's recording into a pool, where a broken capture left it open; whether it was."""
        if self.native is None:
            return False
        kind = self.device.type
        try:
            getattr(self.native, f"_{kind}_endAllocateToPool")(self.device.index, handle)
        except RuntimeError:  # "not currently recording": the capture ended in order
            return False
        getattr(self.native, f"_{kind}_releasePool")(self.device.index, handle)  # what an ended capture's reset does
        return True

    def ranges(self, handle: Handle) -> list[tuple[int, int]]:
        """First and one past the last address of each piece of memory in a pool, where the allocator tells."""
        if self.native is None:
            return []
        try:
            segments = self.module.memory_snapshot(handle)
        except TypeError:  # an older torch tells of all pools at once
            segments = [one for one in self.module.memory_snapshot() if tuple(one["segment_pool_id"]) == tuple(handle)]
        return [(one["address"], one["address"] + one["total_size"]) for one in segments]

    def streams_of(self, tensors: Sequence[torch.Tensor]) -> list[int | None]:
        """The handle of the stream that each tensor's memory was allocated on; None where the allocator cannot tell.

        A snapshot takes milliseconds. It is taken again only where the allocator has taken memory from the device or
        given some back since: a segment belongs to one stream for as long as it lives.
        """
        changes = _changes_in(self.module.memory_stats_as_nested_dict(self.device))  # before the snapshot: no newer
        if changes != self._changes or not changes:
            found = self.module.memory_snapshot()
            ends = ((one["address"], one["address"] + one["total_size"], one["stream"]) for one in found)
            self._segments, self._changes = sorted(ends), changes
        segments = self._segments
        starts = [low for low, _, _ in segments]
        streams: list[int | None] = []
        for address in (tensor.data_ptr() for tensor in tensors):
            at = bisect.bisect_right(starts, address) - 1
            streams.append(segments[at][2] if at >= 0 and address < segments[at][1] else None)
        return streams

    def error(self, refused: BaseException) -> CaptureError:
        """The error for a step that raised, or that the device refused, while it was captured."""
        return not_captured(refused, self.advice, self.conditions)

    def discard(self, graph: Recorded | None, pool: GraphPool, handle: Handle) -> None:
        """Leave nothing of a capture that failed.

        Where the device has invalidated a capture, torch (2.6 to 2.13) does not end it on its own side: the allocator
        would refuse the next capture into the same memory, and the random generator any draw outside of captures.
        Raises RuntimeError where the device does not do what it is given any more.
        """
        if graph is not None:
            graph.reset()
        if self.close(handle):
            self._keep(graph)
            self._mend(pool)
        self.module.empty_cache()
        self._check()

    def _keep(self, graph: Recorded | None) -> None:
        """Keep a broken graph: torch may still ask it whether an allocation is its own."""
        if graph is not None:
            self._broken.append(graph)

    def _check(self) -> None:
        """Have the device do something: some that have failed take on work, and never do it."""
        self._checks += 1
        if int(self._one.fill_(self._checks).item()) != self._checks:
            message = "it takes on work and does not do it"
            raise RuntimeError(message)

    def _mend(self, pool: GraphPool) -> None:
        """Run one good capture, which brings the generator back; into another handle if this one cannot be mended."""
        try:
            self._capture_nothing(pool.handle())
        except RuntimeError:
            pool.forget()
            self._capture_nothing(self.new_handle())

    def _capture_nothing(self, handle: Handle) -> None:
        graph, opened = self.begin(handle)
        try:
            with opened:
                self._one.fill_(1)
        except RuntimeError:
            self.close(handle)
            self._keep(graph)
            raise
        graph.reset()


def _changes_in(stats: Any) -> tuple[int, ...]:
    """Numbers that change whenever an allocator takes memory from its device, or gives some back."""
    found = [stats.get(name, {}).get("all", {}) for name in ("segment", "reserved_bytes")]
    return tuple(int(one.get(how, 0)) for one in found for how in ("current", "allocated", "freed") if one)


def pool_of(pool: object | None, device: GraphDevice) -> GraphPool:
    """A pool as it is, one around torch's handle, or one for a single graph. CaptureError for anything else."""
    if isinstance(pool, GraphPool):
        return pool
    if pool is None:
        return GraphPool(device, device.new_handle())
    if isinstance(pool, tuple) and [type(part) for part in pool] == [int, int]:
        return GraphPool(device, pool)
    message = f"pool is what pool() or torch's graph_pool_handle() hands out, not {pool!r}"
    raise CaptureError(message)


_DEVICES: Final[dict[tuple[str, str, int | None], GraphDevice]] = {}
_LOCK: Final = threading.Lock()


def device_of(kind: Callable[[torch.device], GraphDevice], device: torch.device) -> GraphDevice:
    """What all captures on a device share that go by one kind of calls, made at its first use."""
    key = (getattr(kind, "__qualname__", repr(kind)), device.type, device.index)
    with _LOCK:
        if key not in _DEVICES:
            _DEVICES[key] = kind(device)
        return _DEVICES[key]
