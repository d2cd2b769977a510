"""What backends have in common whose devices work through streams: captures, events, memory, and uploads."""

import abc
import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, final

import torch

from ..dataflow.errors import CaptureError
from .base import (
    DEVICE,
    NO_PARAMETERS,
    Availability,
    Backend,
    Event,
    Graph,
    Interruption,
    Memory,
    Placement,
    Upload,
    mode_of,
)
from .device import GraphDevice, GraphPool, pool_of
from .device_graph import capture
from .faults import out_of_memory, ran_out_of_memory
from .ring import ring_on


@final
class StreamEvent(Event):
    """A point in a stream's work, with the device's own clock.

    event: torch's, recorded. backend: the name of the backend that it belongs to.
    """

    def __init__(self, event: Any, backend: str) -> None:
        self._event = event
        self._backend = backend

    def query(self) -> bool:
        """Whether the device has passed this point."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Wait until the device has passed this point."""
        self._event.synchronize()

    def microseconds_since(self, earlier: Event) -> float:
        """Device time between two events that have passed, in microseconds; a clock may tick about twice in one."""
        if not isinstance(earlier, StreamEvent) or earlier._backend != self._backend:  # noqa: SLF001 - of the same class
            message = f"expected an event of the backend {self._backend!r}, got {type(earlier).__name__}"
            raise TypeError(message)
        return float(earlier._event.elapsed_time(self._event)) * 1e3  # noqa: SLF001 - likewise


class StreamBackend(Backend):
    """A device with streams, and graphs that are captured off them.

    error_modes: torch's modes of capture, the default first. shared: what all captures on the device share. options:
    torch's own for each capture.
    """

    error_modes: ClassVar[tuple[str, ...]] = ("global", "thread_local", "relaxed")

    def __init__(self, shared: GraphDevice, **options: Any) -> None:
        self._shared = shared
        self._options = options

    @classmethod
    @abc.abstractmethod
    def why_not(cls) -> str:
        """Why no such device can be used here; nothing where one can."""

    @classmethod
    def is_available(cls) -> Availability:
        """Whether torch, the device's package and its driver are here and see a device."""
        reason = cls.why_not()
        return Availability(available=not reason, reason=reason)

    @property
    def device(self) -> torch.device:
        """The device, with its index."""
        return self._shared.device

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, placement: Placement) -> torch.Tensor:
        """Memory on the device, or pinned memory on the host."""
        with torch.inference_mode(mode=False):
            if placement == DEVICE:
                return torch.empty(shape, dtype=dtype, device=self.device)
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def upload(self, nbytes: int) -> Upload | None:
        """A packet on the device, fed by a pinned ring with events."""
        return ring_on(self.device, nbytes)

    def pool(self) -> GraphPool:
        """The pool that all captures on this device share."""
        return self._shared.pool

    @contextlib.contextmanager
    def stream(self) -> Iterator[Any]:
        """The device's one capture stream: it waits for the current stream, which waits for it at the end.

        Raises CaptureError, which says what to lower, where the block runs out of the device's memory.
        """
        shared, around = self._shared, self._shared.current_stream()
        with shared.lock:
            shared.stream.wait_stream(around)
            try:
                with shared.on(shared.stream):
                    yield shared.stream
            except Exception as error:
                if isinstance(error, CaptureError) or not ran_out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)  # the tensors that the error would keep alive
                shared.module.empty_cache()
                raise out_of_memory(error, "before this bucket was captured") from error
            finally:
                around.wait_stream(shared.stream)

    def capture(
        self,
        step: Callable[[], Any],
        *,
        pool: object | None = None,
        error_mode: str | None = None,
        parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS,
    ) -> Graph:
        """Record the step on the capture stream without running it; pool: as `pool()` or torch hands it out.

        parameters: host memory like any other. Raises CaptureError for what the device refuses, naming the line and
        the way out, where memory ran out, saying what to lower, and from what the step raised.
        """
        del parameters
        mode = mode_of(error_mode, self.error_modes)
        begin = functools.partial(self._shared.begin, capture_error_mode=mode, **self._options)
        return capture(self._shared, step, pool_of(pool, self._shared), begin)

    def interrupt(self, run: Interruption) -> Any:
        """Call it between two graphs, here and in each replay; outside a capture, once."""
        recording = self._shared.recording
        return run(None) if recording is None else recording.interrupt(run)

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, without keeping the graph's pool from using it again, where the allocator tells of that."""
        recording = self._shared.recording
        return tensor if recording is None else recording.borrow(tensor)

    def event(self) -> Event:
        """An event recorded now on the current stream."""
        event = self._shared.new_event()
        event.record(self._shared.current_stream())
        return StreamEvent(event, self.name)

    def synchronize(self) -> None:
        """Wait until the device has done all work handed to it."""
        self._shared.module.synchronize(self.device)

    def memory(self) -> Memory:
        """The driver's account of the device, and what torch's allocator holds of it."""
        free, total = self._shared.free_and_total()
        return Memory(total=total, free=free, allocated=self._shared.held_and_used()[0])
