"""What backends have in common whose devices work through streams: events, memory, one stream for all captures."""

import abc
from contextlib import AbstractContextManager
from typing import Any, final

import torch

from .base import DEVICE, Backend, Event, Interruption, Memory, Placement, Upload
from .graph_pool import GraphPool, Shared, warming
from .torch_ring import ring_on


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
    """A device with streams, and graphs that are captured off them."""

    @property
    @abc.abstractmethod
    def shared(self) -> Shared:
        """What all captures on the device share."""

    @property
    def device(self) -> torch.device:
        """The device, with its index."""
        return self.shared.device

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
        return self.shared.pool

    def stream(self) -> AbstractContextManager[Any]:
        """The device's one capture stream: it waits for the current stream, which waits for it at the end.

        Raises CaptureError, which says what to lower, where the block runs out of the device's memory.
        """
        return warming(self.shared)

    def interrupt(self, run: Interruption) -> Any:
        """Call it between two graphs, here and in each replay; outside a capture, once."""
        return self.shared.interrupt(run)

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, without keeping the graph's pool from using it again, where the allocator tells of that."""
        return self.shared.borrow(tensor)

    def event(self) -> Event:
        """An event recorded now on the current stream."""
        runtime = self.shared.runtime
        event = runtime.new_event(self.device)
        event.record(runtime.current_stream(self.device))
        return StreamEvent(event, self.name)

    def synchronize(self) -> None:
        """Wait until the device has done all work handed to it."""
        self.shared.runtime.synchronize(self.device)

    def memory(self) -> Memory:
        """The driver's account of the device, and what torch's allocator holds of it."""
        runtime = self.shared.runtime
        free, total = runtime.free_and_total(self.device)
        return Memory(total=total, free=free, allocated=runtime.bytes_on(self.device)[0])
