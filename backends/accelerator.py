"""Any device that torch.accelerator can capture on and that has no adapter of its own: slower, but correct.

Torch 2.13 has graphs, streams, events and memory under one set of names for every device whose package registers them.
Nothing else is assumed: there is no fused fill and no foreach from host memory, and host data goes in one packed
upload. A tensor that a break returns keeps its memory as long as the graph. Later graphs share the first graph's pool.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final, final

import torch

from ..dataflow.capabilities import Capabilities
from ..dataflow.errors import BackendUnavailableError
from .device import StreamBackend
from .device_graph import Handle, Opened, first_line

_ERROR_MODES: Final = ("default", "global", "thread_local", "relaxed")
_CAPABILITIES: Final = Capabilities(packed_uploads=True, capture_error_modes=_ERROR_MODES)


@contextlib.contextmanager
def _recorded(graph: Any, stream: Any) -> Iterator[None]:
    with stream, graph:
        try:
            yield
        finally:
            torch.accelerator.set_stream(stream)  # a capture must end on its own stream, or the device is lost


@final
class AcceleratorBackend(StreamBackend):
    """The accelerator that is current when the backend is made."""

    name = "accelerator"
    priority = 5
    error_modes = _ERROR_MODES
    advice = (("synchroniz", "it waits for the device: keep the value there, or hand it to the step in a slot"),)
    conditions = (("non-default stream", "the current stream is the default one: capture on another"),)

    def __init__(self) -> None:
        reason = self.why_not()
        if reason:
            raise BackendUnavailableError(reason)
        device = torch.device(_kind(), torch.accelerator.current_device_index())
        accelerator = vars(torch.accelerator)
        own = {  # torch.accelerator's calls, under the names that torch.cuda uses
            "Stream": torch.Stream,
            "Event": torch.Event,
            "stream": lambda stream: stream,  # a stream is a context itself
            "is_current_stream_capturing": lambda: accelerator["current_stream"]().is_capturing(),
            "graph_pool_handle": lambda: None,  # torch gives a pool only through a graph
            "mem_get_info": accelerator["get_memory_info"],
        }
        super().__init__(device, SimpleNamespace(**accelerator | own))

    @classmethod
    def why_not(cls) -> str:
        """Return why torch cannot make graphs on an accelerator, or ""."""
        if not hasattr(torch.accelerator, "Graph"):
            return f"torch {torch.__version__} has no graphs for devices in general: torch 2.13 has"
        if not torch.accelerator.is_available():
            return "torch sees no accelerator: import the device's own package first, where torch does not do that"
        if getattr(torch.get_device_module(_kind()), "_is_in_bad_fork", lambda: False)():
            return f"this process was forked after {_kind()!r} was used: start it with multiprocessing's 'spawn' method"
        try:
            torch.accelerator.Graph()
        except RuntimeError as error:
            return f"{_kind()!r} has no graphs under torch.accelerator ({first_line(error)})"
        return ""

    @property
    def capabilities(self) -> Capabilities:
        """The record: foreach copies between device tensors, one upload of host data, and no fused kernel."""
        return _CAPABILITIES

    def begin(self, handle: Handle, **options: Any) -> Opened:
        """Make a graph, which gets its pool and mode on construction, and the context that records into it."""
        make: Any = torch.accelerator.Graph
        graph = make(pool=handle, **options)
        return graph, _recorded(graph, self.state.stream)

    def stream_key(self) -> Callable[[], int]:
        """Return a call that gives the current stream's number."""
        return lambda: int(torch.accelerator.current_stream(self.device).stream_id)


def _kind() -> str:
    current = torch.accelerator.current_accelerator()
    return "" if current is None else current.type
