"""torch.accelerator's names for what captures ask of a device.

torch hands out no pool of its own: the first graph brings one, which the later ones are given.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, final

import torch

from ..dataflow.errors import CaptureError
from .faults import Advice, not_captured
from .runtime import Handle, Recorded, Runtime

_CONDITIONS: Final[Advice] = (("non-default stream", "the current stream is the default one: capture on another"),)
_ADVICE: Final[Advice] = (
    ("synchroniz", "it waits for the device: keep the value there, or hand it to the step in a slot"),
)


@final
class AcceleratorRuntime(Runtime):
    """torch.accelerator, of torch 2.13 or newer."""

    def new_graph(self) -> Recorded:
        """A graph that knows neither pool nor mode yet: torch asks for both when it is made."""
        return LateGraph()

    def recording(self, graph: Recorded, handle: Handle, stream: Any) -> AbstractContextManager[object]:
        """In torch's own mode."""
        return recording(graph, handle, stream, "default")

    def is_capturing(self) -> bool:
        """Whether the current stream is."""
        stream: Any = torch.accelerator.current_stream()
        return bool(stream.is_capturing())

    def new_handle(self) -> Handle:
        """None: only a graph has one."""
        return None

    def handle_of(self, graph: Recorded, handle: Handle) -> Handle:
        """The graph's own."""
        late: Any = graph
        return late.pool() if handle is None else handle

    def new_stream(self, device: torch.device) -> Any:
        """A stream of torch's own."""
        return torch.Stream(device)

    def current_stream(self, device: torch.device) -> Any:
        """The current one."""
        return torch.accelerator.current_stream(device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """The stream itself is a context."""
        return stream  # type: ignore[no-any-return] # torch.Stream has no type here

    def new_event(self, device: torch.device) -> Any:
        """A torch.Event."""
        return torch.Event(device, enable_timing=True)

    def synchronize(self, device: torch.device) -> None:
        """torch.accelerator.synchronize."""
        torch.accelerator.synchronize(device)

    def free_and_total(self, device: torch.device) -> tuple[int, int]:
        """torch.accelerator.get_memory_info."""
        free, total = torch.accelerator.get_memory_info(device)
        return int(free), int(total)

    def bytes_on(self, device: torch.device) -> tuple[int, int]:
        """As the allocator counts them."""
        return torch.accelerator.memory_reserved(device), torch.accelerator.memory_allocated(device)

    def empty_cache(self) -> None:
        """torch.accelerator.empty_cache."""
        torch.accelerator.empty_cache()

    def told(self, error: BaseException) -> CaptureError:
        """With what can be said of any device."""
        return not_captured(error, _ADVICE, _CONDITIONS)


@final
class LateGraph:
    """A torch.accelerator.Graph that is made when its recording begins."""

    def __init__(self) -> None:
        self._graph: Any = None

    def begin(self, handle: Handle, mode: str) -> Any:
        """The graph, to be recorded into a pool."""
        make: Any = torch.accelerator.Graph
        self._graph = make(pool=handle, capture_error_mode=mode)
        return self._graph

    def pool(self) -> Handle:
        """The pool that it was recorded into."""
        return self._graph.pool()

    def replay(self) -> None:
        """Launch it on the current stream."""
        self._graph.replay()

    def reset(self) -> None:
        """Let go of all that it holds."""
        if self._graph is not None:
            self._graph.reset()


@contextlib.contextmanager
def recording(graph: Any, handle: Handle, stream: Any, mode: str) -> Iterator[None]:
    """Record into a graph on a stream."""
    late: LateGraph = graph
    with stream, late.begin(handle, mode):
        try:
            yield
        finally:
            torch.accelerator.set_stream(stream)  # a capture ends on its own stream: with another, the device is lost
