"""What all captures on one device share: a stream, a lock, and memory that graphs leave to one another."""

import contextlib
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import torch

from ..dataflow.errors import CaptureError
from .base import Interruption
from .faults import out_of_memory, ran_out_of_memory
from .runtime import Handle, Recorded, Runtime


class GraphPool:
    """Graph memory of one device: what one graph needs for its steps alone, the next one uses too.

    torch refuses a handle whose graphs are all gone, and may refuse one whose capture was broken off; so the handle is
    drawn anew then, and users keep the pool.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._handle: Handle | None = None
        self._graphs: weakref.WeakSet[Recorded] = weakref.WeakSet()

    def handle(self) -> Handle:
        """The handle for the next capture."""
        if self._handle is None or not self._graphs:
            self._handle = self._runtime.new_handle()
        return self._handle

    def graphs(self) -> list[Recorded]:
        """The graphs that use this memory."""
        return list(self._graphs)

    def add(self, graph: Recorded) -> None:
        """Note a captured graph."""
        self._graphs.add(graph)
        self._handle = self._runtime.handle_of(graph, self._handle)

    def forget(self) -> None:
        """Draw another handle next time; graphs that were captured keep what they have."""
        self._handle = None


class FixedPool(GraphPool):
    """A pool for one graph, or one that the caller has a handle of."""

    def __init__(self, runtime: Runtime, handle: Handle) -> None:
        super().__init__(runtime)
        self._given = handle

    def handle(self) -> Handle:
        """Always the same."""
        return self._given


def pool_of(pool: object | None, runtime: Runtime) -> GraphPool:
    """A pool as it is, one around torch's handle, or one for a single graph. CaptureError for anything else."""
    if isinstance(pool, GraphPool):
        return pool
    if pool is None:
        return FixedPool(runtime, runtime.new_handle())
    if isinstance(pool, tuple) and [type(part) for part in pool] == [int, int]:
        return FixedPool(runtime, pool)
    message = f"pool is what pool() or torch's graph_pool_handle() hands out, not {pool!r}"
    raise CaptureError(message)


def mode_of(error_mode: str | None, modes: Sequence[str]) -> str:
    """A mode of capture, by default the first. CaptureError where there is no such mode."""
    mode = modes[0] if error_mode is None else error_mode
    if mode not in modes:
        message = f"error_mode is one of {', '.join(map(repr, modes))}, not {error_mode!r}"
        raise CaptureError(message)
    return mode


@final
class Shared:
    """One device's capture stream, its pool, and the lock that lets one thread at a time warm up and capture.

    recording: the capture under way.
    """

    def __init__(self, device: torch.device, runtime: Runtime) -> None:
        self.device = device
        self.runtime = runtime
        self.stream = runtime.new_stream(device)
        self.pool = GraphPool(runtime)
        self.lock = threading.RLock()
        self.recording: Any = None  # a `Recording`
        with torch.inference_mode(mode=False):
            self._one = torch.zeros(1, device=device)
        self._broken: list[Recorded] = []
        self._checks = 0

    def interrupt(self, run: Interruption) -> Any:
        """Call it between two graphs, here and in each replay; outside a capture, once."""
        return run(None) if self.recording is None else self.recording.interrupt(run)

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """In a capture the same memory, without keeping the graph's pool from using it again."""
        return tensor if self.recording is None else self.recording.borrow(tensor)

    def discard(self, graph: Recorded, pool: GraphPool, handle: Handle) -> None:
        """Leave nothing of a capture that failed.

        Where the device has invalidated a capture, torch (2.6 to 2.13) does not end it on its own side: the allocator
        would refuse the next capture into the same memory, and the random generator any draw outside of captures.
        Raises RuntimeError where the device does not do what it is given any more.
        """
        graph.reset()
        if self.runtime.close(self.device, handle):
            self._broken.append(graph)  # torch may still ask this one whether an allocation is its own
            self._mend(pool)
        self.runtime.empty_cache()
        self._check()

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
            self._capture_nothing(self.runtime.new_handle())

    def _capture_nothing(self, handle: Handle) -> None:
        graph = self.runtime.new_graph()
        try:
            with self.runtime.recording(graph, handle, self.stream):
                self._one.fill_(1)
        except RuntimeError:
            self.runtime.close(self.device, handle)
            self._broken.append(graph)
            raise
        graph.reset()


_SHARED: Final[dict[tuple[str, str, int | None], Shared]] = {}
_LOCK: Final = threading.Lock()


def shared_on(device: torch.device, kind: Callable[[], Runtime]) -> Shared:
    """What all captures on a device share that go by one kind of runtime, made at its first use."""
    key = (getattr(kind, "__qualname__", repr(kind)), device.type, device.index)
    with _LOCK:
        if key not in _SHARED:
            _SHARED[key] = Shared(device, kind())
        return _SHARED[key]


@contextlib.contextmanager
def warming(shared: Shared) -> Iterator[Any]:
    """The device's capture stream, for warm-ups: it waits for the current one, which waits for it at the end.

    Raises CaptureError, which says what to lower, where the block runs out of the device's memory.
    """
    runtime, around = shared.runtime, shared.runtime.current_stream(shared.device)
    with shared.lock:
        shared.stream.wait_stream(around)
        try:
            with runtime.on(shared.stream):
                yield shared.stream
        except Exception as error:
            if isinstance(error, CaptureError) or not ran_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # the tensors that the error would keep alive
            runtime.empty_cache()
            raise out_of_memory(error, "before this bucket was captured") from error
        finally:
            around.wait_stream(shared.stream)
