"""The common base of devices with streams: captures, events, memory and uploads, through torch's own calls."""

import abc
import contextlib
import functools
import gc
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final

import attrs
import torch
from torch.utils import _pytree as pytree

from ..dataflow.capabilities import DEVICE, Placement
from ..dataflow.errors import CaptureError
from ..dataflow.guard import outside_inference
from ..dataflow.packet import Upload
from .base import NO_PARAMETERS, Availability, Backend, Capturable, Event, Graph, Interruption, Memory, mode_of
from .device_graph import (
    Advice,
    DeviceGraph,
    GraphPool,
    Handle,
    Opened,
    Part,
    Recorded,
    first_line,
    not_captured,
    ordinary,
    out_of_memory,
    ran_out_of_memory,
)
from .operators import tensors_in
from .ring import ring_on


@attrs.define(eq=False)
class CaptureState:
    """State that all captures on one device share."""

    stream: Any  # the stream that captures run on
    pool: GraphPool
    one: torch.Tensor  # the operand of a small computation that tests whether the device works
    lock: Any = attrs.field(factory=threading.RLock)  # one thread at a time warms up or captures
    recording: "DeviceCapture | None" = None
    broken: list[Recorded] = attrs.field(factory=list)  # torch may still ask which allocations are theirs
    checks: int = 0


_STATES: Final[dict[tuple[str, str, int | None], CaptureState]] = {}
_LOCK: Final = threading.Lock()


class StreamBackend(Backend):
    """A device with streams, and with graphs that are captured from them.

    Attributes:
        error_modes: The capture modes, the default first.
        advice: Error texts for faults of the step, each with what to do.
        conditions: Error texts for conditions outside the step, each with what to do.
        warns_of_empty: The text of the warning about an empty graph.

    Args:
        device: The device.
        module: Has torch's calls by the names of `torch.cuda`.
        native: Torch's bindings of the allocator.
        options: Torch's own options for each capture.
    """

    error_modes: ClassVar[tuple[str, ...]] = ("global", "thread_local", "relaxed")
    advice: ClassVar[Advice] = ()
    conditions: ClassVar[Advice] = ()
    warns_of_empty: ClassVar[str] = ""

    def __init__(self, device: torch.device, module: Any, native: Any = None, **options: Any) -> None:
        self._device = device
        self._module = module
        self._native = native
        self._options = options
        with _LOCK, outside_inference():
            key = (self.name, device.type, device.index)
            if key not in _STATES:
                pool = GraphPool(module.graph_pool_handle)
                one = torch.zeros(1, device=device)
                _STATES[key] = CaptureState(module.Stream(device), pool, one)
            self.state = _STATES[key]

    @classmethod
    @abc.abstractmethod
    def why_not(cls) -> str:
        """Return why no such device can be used on this machine, or ""."""

    @classmethod
    def is_available(cls) -> Availability:
        """Return whether torch, the device's package and its driver are installed and see a device."""
        reason = cls.why_not()
        return Availability(available=not reason, reason=reason)

    @property
    def device(self) -> torch.device:
        """The device, with its index."""
        return self._device

    @abc.abstractmethod
    def begin(self, handle: Handle, **options: Any) -> Opened:
        """Make a new graph, and the context that records into it on the capture stream. `options` are torch's own."""

    def alias_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a tensor that shares the memory but does not keep it alive, or return the tensor itself."""
        return tensor

    def held_and_used(self) -> tuple[int, int]:
        """Return the bytes that torch's allocator has reserved, and how many of them tensors use."""
        return int(self._module.memory_reserved(self._device)), int(self._module.memory_allocated(self._device))

    def release_workspaces(self) -> None:
        """Free the workspaces that libraries keep between calls, so that the next operator allocates new ones."""

    def ranges(self, handle: Handle) -> list[tuple[int, int]]:
        """Return the address range of each piece of memory in a pool, as far as the allocator reveals them."""
        if self._native is None:
            return []
        try:
            segments = self._module.memory_snapshot(handle)
        except TypeError:  # an older torch reports all pools at once
            segments = [one for one in self._module.memory_snapshot() if tuple(one["segment_pool_id"]) == tuple(handle)]
        return [(one["address"], one["address"] + one["total_size"]) for one in segments]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, placement: Placement) -> torch.Tensor:
        """Allocate memory on the device, or pinned memory on the host."""
        with outside_inference():
            if placement == DEVICE:
                return torch.empty(shape, dtype=dtype, device=self._device)
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def upload(self, nbytes: int) -> Upload | None:
        """Make a packet on the device, sent through a pinned ring with events."""
        return ring_on(self._device, nbytes)

    def pool(self) -> GraphPool:
        """Return the pool that all captures on this device share."""
        return self.state.pool

    @contextlib.contextmanager
    def stream(self) -> Iterator[Any]:
        """Enter the device's one capture stream. It waits for the current stream, which waits for it at the end.

        Raises CaptureError, which says what to lower, if the block runs out of the device's memory.
        """
        state = self.state
        around = self._module.current_stream(self._device)
        with state.lock:
            state.stream.wait_stream(around)
            try:
                with self._module.stream(state.stream):
                    yield state.stream
            except Exception as error:
                if isinstance(error, CaptureError) or not ran_out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)  # the error would keep the frames' tensors alive
                self._module.empty_cache()
                raise out_of_memory(error, "before this bucket was captured") from error
            finally:
                around.wait_stream(state.stream)

    def capture(
        self,
        step: Capturable,
        *,
        pool: object | None = None,
        error_mode: str | None = None,
        parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS,
    ) -> Graph:
        """Record the step on the capture stream without running it. `pool` comes from `pool()` or from torch.

        Raises CaptureError, with the way out, for what the device refuses, if memory runs out, and for what the step
        raised.
        """
        del parameters
        mode = mode_of(error_mode, self.error_modes)
        return self.record(step, pool, functools.partial(self.begin, capture_error_mode=mode, **self._options))

    def interrupt(self, run: Interruption) -> Any:
        """Call `run` between two graphs, now and in each replay; outside a capture, call it once."""
        recording = self.state.recording
        return run(None) if recording is None else recording.interrupt(run)

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias that lets the graph's pool reuse the memory, if the allocator reveals the pool's ranges."""
        recording = self.state.recording
        return tensor if recording is None else recording.borrow(tensor)

    def order(self, first: int, then: int) -> None:
        """Make stream number `then` wait for the work submitted so far to stream number `first`."""
        make = self._module.Stream
        index = self._device.index
        kind = self.state.stream.device_type
        earlier, later = (make(stream_id=one, device_index=index, device_type=kind) for one in (first, then))
        later.wait_stream(earlier)

    def event(self, again: Event | None = None) -> Event:
        """Return an event recorded now on the current stream."""
        recorded: Any = self._module.Event(enable_timing=True) if again is None else again
        recorded.record(self.current_stream())
        event: Event = recorded
        return event

    def current_stream(self) -> Any:
        """Return the current stream, as events take it."""
        return self._module.current_stream(self._device)

    def synchronize(self) -> None:
        """Wait until the device has done all submitted work."""
        self._module.synchronize(self._device)

    def memory(self) -> Memory:
        """Return the device's memory as the driver reports it, and what torch's allocator has reserved of it."""
        free, total = self._module.mem_get_info(self._device)
        return Memory(total=int(total), free=int(free), allocated=self.held_and_used()[0])

    def record(self, step: Capturable, pool: object | None, begin: Callable[[Handle], Opened]) -> DeviceGraph:
        """Record a step into graphs that `begin` makes. A CaptureError leaves the device as it was before."""
        used = self._pool_of(pool)
        state = self.state
        if self._module.is_current_stream_capturing():
            raise CaptureError("a step that is being captured cannot capture another")
        with state.lock, self._module.stream(state.stream), _no_collections():
            alive = used.graphs()
            recording = DeviceCapture(self, used.handle(), begin)
            around = state.recording
            state.recording = recording
            try:
                outputs, error, before = recording.attempt(step)
            except BaseException:  # only an interrupt comes here, since `attempt` returns all other errors
                self._discard(recording, used)
                raise
            finally:
                state.recording = around
            del alive  # kept alive until here, so that the handle stays valid
            if error is not None:
                raise self._cleaned_up(recording, used, error) from error
            used.add(recording.graphs, recording.handle)
            after = self.held_and_used()
            grown = (after[0] - before[0]) - (after[1] - before[1])  # without the outputs, which are still in use
            return DeviceGraph(recording.parts, ordinary(outputs), max(0, grown))

    def _pool_of(self, pool: object | None) -> GraphPool:
        """Return a pool unchanged, one around torch's handle, or one for a single graph.

        Raise CaptureError for anything else.
        """
        if isinstance(pool, GraphPool):
            return pool
        if pool is not None and not (isinstance(pool, tuple) and [type(part) for part in pool] == [int, int]):
            raise CaptureError(f"pool is what pool() or torch's graph_pool_handle() hands out, not {pool!r}")
        handle = self._module.graph_pool_handle() if pool is None else pool
        return GraphPool(lambda: handle)

    def _cleaned_up(self, recording: "DeviceCapture", pool: GraphPool, error: Exception) -> CaptureError:
        """Discard a capture and return the error to raise, which says so if the device cannot go on."""
        if ran_out_of_memory(error):
            traceback.clear_frames(error.__traceback__)  # the error would keep the step's tensors alive
        left = ""
        try:
            self._discard(recording, pool)
        except RuntimeError as refused:
            left = f". After this the device runs nothing more in this process ({first_line(refused)}): start it again"
        known = isinstance(error, CaptureError)
        return CaptureError(f"{error if known else not_captured(error, self.advice, self.conditions)}{left}")

    def _discard(self, recording: "DeviceCapture", pool: GraphPool) -> None:
        """Leave nothing of a capture that failed. Raise RuntimeError if the device has stopped working.

        Torch (2.9 to 2.13) does not end a capture that the device has invalidated: its allocator would refuse the next
        capture into the same memory, and its random generator any draw outside of captures.
        """
        for graph in recording.graphs:
            graph.reset()
        if recording.graph is not None:
            recording.graph.reset()
        if self._close(recording.handle):
            if recording.graph is not None:
                self.state.broken.append(recording.graph)
            self._mend(pool)
        self._module.empty_cache()
        self._check()

    def _close(self, handle: Handle) -> bool:
        """End the allocator's recording into a pool if a broken capture left it open. Return whether it was open."""
        if self._native is None:
            return False
        kind = self._device.type
        index = self._device.index
        try:
            getattr(self._native, f"_{kind}_endAllocateToPool")(index, handle)
        except RuntimeError:  # "not currently recording": the capture ended normally
            return False
        getattr(self._native, f"_{kind}_releasePool")(index, handle)  # as `reset` does if the capture has ended
        return True

    def _check(self) -> None:
        """Run a small computation, since some failed devices accept work and never do it."""
        state = self.state
        state.checks += 1
        if int(state.one.fill_(state.checks).item()) != state.checks:
            raise RuntimeError("it accepts work and never does it")

    def _mend(self, pool: GraphPool) -> None:
        """Run one capture that succeeds, which repairs the generator. If the handle stays broken, draw another."""
        try:
            self._capture_nothing(pool.handle())
        except RuntimeError:
            pool.forget()
            self._capture_nothing(self._module.graph_pool_handle())

    def _capture_nothing(self, handle: Handle) -> None:
        graph, opened = self.begin(handle)
        try:
            with opened:
                self.state.one.fill_(1)
        except RuntimeError:
            self._close(handle)
            self.state.broken.append(graph)
            raise
        graph.reset()


class DeviceCapture:
    """A capture in progress: the graphs so far, the calls between them, and the graph that is being recorded.

    Libraries release their workspaces when a graph begins and before it ends, so that those of its operators lie in its
    own pool: clearing one of a warm-up would free memory that replays read (pytorch issues 192061 and 193402).
    """

    def __init__(self, backend: StreamBackend, handle: Handle, begin: Callable[[Handle], Opened]) -> None:
        self.parts: list[Part] = []
        self.graphs: list[Recorded] = []  # all that are recorded, including empty ones
        self.graph: Recorded | None = None
        self.handle = handle
        self._backend = backend
        self._begin = begin
        self._open: AbstractContextManager[object] | None = None
        self._answers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._ranges: list[tuple[int, int]] | None = None  # of the pool, read before it allocates

    def attempt(self, step: Capturable) -> tuple[Any, Exception | None, tuple[int, int]]:
        """Run and record the step. Return its outputs, the first error, and the bytes that were allocated before."""
        outputs = None
        raised = None
        before = (0, 0)
        empty = self._backend.warns_of_empty
        try:
            with contextlib.ExitStack() as quietly, contextlib.ExitStack() as ending:
                ending.callback(self._stop)  # `_start` may raise after the capture has begun
                self._start()
                before = self._backend.held_and_used()
                try:
                    outputs = step()
                except Exception as error:  # noqa: BLE001 - raised again, once the capture is ended
                    raised = error
                    quietly.enter_context(warnings.catch_warnings())
                    warnings.simplefilter("ignore")  # an empty graph is no fault: it is discarded
                if self.parts and empty:  # after a break there may be nothing left to record
                    quietly.enter_context(warnings.catch_warnings())
                    warnings.filterwarnings("ignore", message=f".*{empty}")
        except Exception as error:  # noqa: BLE001 - likewise; torch raises when the capture begins or ends
            raised = raised or error
        return outputs, raised, before

    def _start(self) -> None:
        """Begin a graph."""
        self._ranges = None
        self.graph, opened = self._begin(self.handle)
        opened.__enter__()
        self._open = opened
        self._backend.release_workspaces()

    def _stop(self) -> None:
        """End the graph, if one is being recorded, and keep it."""
        if self._open is not None and self.graph is not None:
            try:
                self._backend.release_workspaces()
            finally:  # even after an interrupt, since a capture that is left open makes the device unusable
                opened = self._open
                self._open = None
                opened.__exit__(None, None, None)
            self.parts.append((self.graph.replay, self.graph))
            self.graphs.append(self.graph)
            if self.handle is None:  # torch gives the handle only through a graph
                self.handle = self.graph.pool()

    def interrupt(self, run: Interruption) -> Any:
        """End the graph and replay it, so that `run` sees its effects; call `run`; begin the next graph."""
        if self._open is None:  # inside a break, where nothing is being recorded
            return run(None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._stop()
        for place, answer in self._answers:
            place.copy_(answer)
        self._answers = []
        is_empty = False
        empty = self._backend.warns_of_empty
        for warning in caught:
            if empty and empty in str(warning.message):
                is_empty = True
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        replay, _ = self.parts[-1]
        if is_empty:  # an empty graph between two breaks is kept, because memory lives as long as its graph
            self.parts.pop()
        else:
            replay()
        answer = run(None)
        self._start()
        # From here on, allocations are the graph's own memory, which later parts reuse once it is free.
        places = pytree.tree_map_only(torch.Tensor, torch.empty_like, answer)
        self._answers = list(zip(tensors_in(places), tensors_in(answer), strict=True))
        kept = pytree.tree_leaves(pytree.tree_map_only(torch.Tensor, self._alias, places))
        self.parts.append((functools.partial(run, kept), None))
        return places

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        is_ours = tensor.device.type == self._backend.device.type
        alias: torch.Tensor = ordinary(self._backend.alias_of(tensor)) if is_ours else tensor
        return alias

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias of a tensor in the memory that this capture allocates from, or any other tensor unchanged."""
        plain = tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()
        if not plain or tensor.device.type != self._backend.device.type:
            return tensor
        if self._ranges is None:
            self._ranges = self._backend.ranges(self.handle)
        address = tensor.data_ptr()
        return self._alias(tensor) if any(low <= address < high for low, high in self._ranges) else tensor


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Keep Python's collector from freeing graphs and events during a capture, which would break it off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
