"""Ascend NPUs, by torch_npu, which is imported when the backend is asked for and not before.

How it behaves, where that is not obvious:

- Cache locations are int32, and nothing else is converted: other kernels demand int64.
- Host data goes up in one packet, cast on the host; then come grouped copies on the device. Nothing is copied by a
  foreach from host memory, and nothing asynchronously from memory that is not pinned.
- All captures on a device share one stream and one pool, as on CUDA; input buffers are never shared.
- Host parameters are handed over at each replay: see `npu_graph`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, final

import torch

from ..dataflow.capabilities import DEVICE, Capabilities
from ..dataflow.errors import BackendUnavailableError, ConfigError
from .base import NO_PARAMETERS, Availability, Backend, Event, Graph, Interruption, Memory, Placement, Upload
from .device_graph import Manner, capture
from .graph_pool import GraphPool, mode_of, pool_of, shared_on, warming
from .npu_graph import FENCES, Fence, UpdatedGraph, check_taken
from .npu_presence import why_not
from .npu_runtime import NpuRuntime, npu, npu_c, recording
from .runtime import Handle, Recorded
from .segments import streams_of
from .torch_ring import ring_on

_ERROR_MODES: Final = ("global", "thread_local", "relaxed")
_GRAPHS: Final = 1800
"""Graphs that a device's 2,048 streams bear, one stream a graph, with some left for all else: the number that
vLLM-Ascend settled on. A step that forks to other streams takes more of them."""
_CHUNK: Final = 48
"""Tensors that one foreach call takes at most."""
_CAPABILITIES: Final = Capabilities(
    roles={"cache_loc": torch.int32},
    fills={"seq_len_fill": 0},
    pools_inputs=False,
    foreach_host=False,
    foreach_chunk=_CHUNK,
    packed_uploads=True,
    arenas=False,
    host_parameters=True,
    capture_error_modes=_ERROR_MODES,
    graphs_hint=_GRAPHS,
)


@final
class NpuEvent(Event):
    """A point in the current stream's work, with the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._event = npu().Event(enable_timing=True)
        self._event.record(npu().current_stream(device))

    def query(self) -> bool:
        """Whether the device has passed this point."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Wait until the device has passed this point."""
        self._event.synchronize()

    def microseconds_since(self, earlier: Event) -> float:
        """Device time between two events that have passed, in microseconds."""
        if not isinstance(earlier, NpuEvent):
            message = f"expected an event of the NPU backend, got {type(earlier).__name__}"
            raise TypeError(message)
        return float(earlier._event.elapsed_time(self._event)) * 1e3  # noqa: SLF001 - of the same class


@final
class NpuBackend(Backend):
    """The NPU that is current when the backend is made.

    fence: who waits until a graph's launch has read its host parameters before the next ones are written, the "host"
    or the "device": see `npu_graph.FENCES`.
    """

    name: ClassVar[str] = "npu"
    priority: ClassVar[int] = 9

    def __init__(self, *, fence: Fence = "host") -> None:
        reason = why_not()
        if reason:
            raise BackendUnavailableError(reason)
        if fence not in FENCES:
            message = f"fence is one of {', '.join(map(repr, FENCES))}, not {fence!r}"
            raise ConfigError(message)
        self._device = torch.device("npu", npu().current_device())
        self._shared = shared_on(self._device, NpuRuntime)
        self._fence: Fence = fence

    @classmethod
    def is_available(cls) -> Availability:
        """Whether torch_npu and CANN are here and see a device."""
        reason = why_not()
        return Availability(available=not reason, reason=reason)

    @property
    def capabilities(self) -> Capabilities:
        """What is said at the head of this module, as a record."""
        return _CAPABILITIES

    @property
    def device(self) -> torch.device:
        """The device, with its index."""
        return self._device

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, placement: Placement) -> torch.Tensor:
        """Memory on the device, or pinned memory on the host."""
        with torch.inference_mode(mode=False):
            if placement == DEVICE:
                return torch.empty(shape, dtype=dtype, device=self._device)
            return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pool(self) -> GraphPool:
        """The pool that all captures on this device share."""
        return self._shared.pool

    def upload(self, nbytes: int) -> Upload:
        """A packet on the device, fed by a pinned ring with events."""
        return ring_on(self._device, nbytes)

    def stream(self) -> AbstractContextManager[Any]:
        """The device's one capture stream: it waits for the current stream, which waits for it at the end.

        Raises CaptureError, which says what to lower, where the block runs out of the device's memory.
        """
        return warming(self._shared)

    def capture(
        self,
        step: Callable[[], Any],
        *,
        pool: object | None = None,
        error_mode: str | None = None,
        parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS,
    ) -> Graph:
        """Record the step on the capture stream without running it; pool: as `pool()` or torch_npu hands it out.

        parameters: host tensors, whose values the operators of these arguments are told at each replay.
        Raises CaptureError for what an NPU refuses, naming the line and the way out; where a parameter reaches no
        operator, or an operator takes host arguments and none of the parameters; and from what the step raised.
        """
        made: list[UpdatedGraph] = []
        manner = self._manner(mode_of(error_mode, _ERROR_MODES), parameters, made)
        graph = capture(self._shared, step, pool_of(pool, self._shared.runtime), manner)
        if graph.is_whole:  # else what runs between the parts may take them
            check_taken(made, parameters)
        return graph

    def _manner(self, mode: str, parameters: Mapping[str, torch.Tensor], made: list[UpdatedGraph]) -> Manner:
        """How graphs are recorded: with torch_npu's record of operators where there are parameters."""
        if not parameters:
            plainly = functools.partial(recording, options={"capture_error_mode": mode})
            return Manner(self._shared.runtime.new_graph, plainly)
        options = {"capture_error_mode": mode, "auto_dispatch_capture": True}

        def new() -> Recorded:
            made.append(UpdatedGraph(self._device, parameters, self._fence))
            return made[-1]

        def begin(graph: Any, handle: Handle, stream: Any) -> AbstractContextManager[object]:
            updated: UpdatedGraph = graph
            return updated.recorded(recording(updated.native, handle, stream, options))

        return Manner(new, begin)

    def interrupt(self, run: Interruption) -> Any:
        """Call it between two graphs, here and in each replay; outside a capture, once."""
        return self._shared.interrupt(run)

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, without keeping the graph's pool from using it again."""
        return self._shared.borrow(tensor)

    def stream_key(self) -> Callable[[], int]:
        """A call that tells the current stream's handle, without waiting for torch_npu's queue."""
        return functools.partial(npu_c()._npu_getCurrentRawStreamNoWait, self._device.index)  # noqa: SLF001

    def order(self, first: int, then: int) -> None:
        """Have the stream of one handle wait for what was handed to that of another so far."""
        earlier, later = (self._stream_of(handle) for handle in (first, then))
        later.wait_stream(earlier)

    def _stream_of(self, handle: int) -> Any:
        default = npu().default_stream(self._device)
        return default if handle in {0, default.npu_stream} else npu().ExternalStream(handle, self._device)

    def streams_of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The stream that each tensor's memory was allocated on, from the allocator's own books."""
        return streams_of(npu().memory_snapshot(), tensors, self.stream_key()())

    def event(self) -> Event:
        """An event recorded now on the current stream."""
        return NpuEvent(self._device)

    def synchronize(self) -> None:
        """Wait until the device has done all work handed to it."""
        npu().synchronize(self._device)

    def memory(self) -> Memory:
        """The driver's account of the device, and what torch's allocator holds of it."""
        free, total = npu().mem_get_info(self._device)
        return Memory(total=total, free=free, allocated=self._shared.runtime.bytes_on(self._device)[0])


Adapter = NpuBackend
