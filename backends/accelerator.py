"""Any device that torch.accelerator can capture on, and that has no adapter of its own: slower, and right.

torch 2.13 has graphs, streams, events and memory under one set of names for every device whose package registers them.
Nothing is known beyond that, so nothing is taken for granted: no fused fill, no foreach from host memory, one packed
upload for host data, and memory that an interrupted capture hands on is kept for as long as the graph.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, final

import torch

from ..dataflow.capabilities import DEVICE, Capabilities
from ..dataflow.errors import BackendUnavailableError
from .accelerator_runtime import AcceleratorRuntime, LateGraph, recording
from .base import NO_PARAMETERS, Availability, Backend, Event, Graph, Interruption, Memory, Placement, Upload
from .device_graph import Manner, capture
from .faults import first_line
from .graph_pool import GraphPool, mode_of, pool_of, shared_on, warming
from .torch_ring import ring_on

_ERROR_MODES: Final = ("default", "global", "thread_local", "relaxed")
_CAPABILITIES: Final = Capabilities(foreach_host=False, packed_uploads=True, capture_error_modes=_ERROR_MODES)


@final
class AcceleratorEvent(Event):
    """A point in the current stream's work, with the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = torch.Event(device, enable_timing=True)
        self._event.record(torch.accelerator.current_stream(device))

    def query(self) -> bool:
        """Whether the device has passed this point."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Wait until the device has passed this point."""
        self._event.synchronize()

    def microseconds_since(self, earlier: Event) -> float:
        """Device time between two events that have passed, in microseconds."""
        if not isinstance(earlier, AcceleratorEvent):
            message = f"expected an event of the accelerator backend, got {type(earlier).__name__}"
            raise TypeError(message)
        return float(earlier._event.elapsed_time(self._event)) * 1e3  # noqa: SLF001 - of the same class


@final
class AcceleratorBackend(Backend):
    """The accelerator that is current when the backend is made."""

    name: ClassVar[str] = "accelerator"
    priority: ClassVar[int] = 5

    def __init__(self) -> None:
        reason = _why_not()
        if reason:
            raise BackendUnavailableError(reason)
        self._device = torch.device(_kind(), torch.accelerator.current_device_index())
        self._shared = shared_on(self._device, AcceleratorRuntime)

    @classmethod
    def is_available(cls) -> Availability:
        """Whether torch has graphs for any device, and sees one that has registered its own."""
        reason = _why_not()
        return Availability(available=not reason, reason=reason)

    @property
    def capabilities(self) -> Capabilities:
        """Foreach between device tensors, host data in one upload, nothing fused."""
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
        """Record the step on the capture stream without running it; pool: as `pool()` or a graph's pool() hands it out.

        Raises CaptureError for what the device refuses, naming the line, and from what the step raised.
        """
        del parameters  # host memory like any other
        begin = functools.partial(recording, mode=mode_of(error_mode, _ERROR_MODES))
        return capture(self._shared, step, pool_of(pool, self._shared.runtime), Manner(LateGraph, begin))

    def interrupt(self, run: Interruption) -> Any:
        """Call it between two graphs, here and in each replay; outside a capture, once."""
        return self._shared.interrupt(run)

    def stream_key(self) -> Callable[[], int]:
        """A call that tells the current stream's number."""
        return functools.partial(_stream_number, self._device)

    def order(self, first: int, then: int) -> None:
        """Have the stream of one number wait for what was handed to that of another so far."""
        earlier, later = (self._stream_of(number) for number in (first, then))
        later.wait_stream(earlier)

    def _stream_of(self, number: int) -> Any:
        kind: Any = torch.Stream
        like = self._shared.stream
        return kind(stream_id=number, device_index=like.device_index, device_type=like.device_type)

    def event(self) -> Event:
        """An event recorded now on the current stream."""
        return AcceleratorEvent(self._device)

    def synchronize(self) -> None:
        """Wait until the device has done all work handed to it."""
        torch.accelerator.synchronize(self._device)

    def memory(self) -> Memory:
        """The driver's account of the device, and what torch's allocator holds of it."""
        free, total = torch.accelerator.get_memory_info(self._device)
        return Memory(total=total, free=free, allocated=self._shared.runtime.bytes_on(self._device)[0])


def _stream_number(device: torch.device) -> int:
    return int(torch.accelerator.current_stream(device).stream_id)


def _kind() -> str:
    current = torch.accelerator.current_accelerator()
    return "" if current is None else current.type


def _why_not() -> str:
    """Why no device can be used here in this way; nothing where one can."""
    if not hasattr(torch, "accelerator") or not hasattr(torch.accelerator, "Graph"):
        return f"torch {torch.__version__} has no graphs for devices in general: torch 2.13 has"
    if not torch.accelerator.is_available():
        return "torch sees no accelerator; a device's own package must be imported first, where torch does not do that"
    try:
        torch.accelerator.Graph()
    except RuntimeError as error:
        return f"{_kind()!r} has no graphs under torch.accelerator ({first_line(error)})"
    return ""


Adapter = AcceleratorBackend
