"""Any device that torch.accelerator can capture on, and that has no adapter of its own: slower, and right.

torch 2.13 has graphs, streams, events and memory under one set of names for every device whose package registers them.
Nothing is known beyond that, so nothing is taken for granted: no fused fill, no foreach from host memory, one packed
upload for host data, and memory that an interrupted capture hands on is kept for as long as the graph.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, final

import torch

from ..dataflow.capabilities import Capabilities
from ..dataflow.errors import BackendUnavailableError
from .accelerator_runtime import AcceleratorRuntime, LateGraph, recording
from .base import NO_PARAMETERS, Availability, Graph
from .device_graph import Manner, capture
from .faults import first_line
from .graph_pool import Shared, mode_of, pool_of, shared_on
from .streamed import StreamBackend

_ERROR_MODES: Final = ("default", "global", "thread_local", "relaxed")
_CAPABILITIES: Final = Capabilities(foreach_host=False, packed_uploads=True, capture_error_modes=_ERROR_MODES)


@final
class AcceleratorBackend(StreamBackend):
    """The accelerator that is current when the backend is made."""

    name: ClassVar[str] = "accelerator"
    priority: ClassVar[int] = 5

    def __init__(self) -> None:
        reason = _why_not()
        if reason:
            raise BackendUnavailableError(reason)
        device = torch.device(_kind(), torch.accelerator.current_device_index())
        self._shared = shared_on(device, AcceleratorRuntime)

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
    def shared(self) -> Shared:
        """What all captures on the device share."""
        return self._shared

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

    def stream_key(self) -> Callable[[], int]:
        """A call that tells the current stream's number."""
        return functools.partial(_stream_number, self.device)

    def order(self, first: int, then: int) -> None:
        """Have the stream of one number wait for what was handed to that of another so far."""
        earlier, later = (self._stream_of(number) for number in (first, then))
        later.wait_stream(earlier)

    def _stream_of(self, number: int) -> Any:
        kind: Any = torch.Stream
        like = self._shared.stream
        return kind(stream_id=number, device_index=like.device_index, device_type=like.device_type)


def _stream_number(device: torch.device) -> int:
    return int(torch.accelerator.current_stream(device).stream_id)


def _kind() -> str:
    current = torch.accelerator.current_accelerator()
    return "" if current is None else current.type


def _never() -> bool:
    return False


def _why_not() -> str:
    """Why no device can be used here in this way; nothing where one can."""
    if not hasattr(torch, "accelerator") or not hasattr(torch.accelerator, "Graph"):
        return f"torch {torch.__version__} has no graphs for devices in general: torch 2.13 has"
    if not torch.accelerator.is_available():
        return "torch sees no accelerator; a device's own package must be imported first, where torch does not do that"
    if getattr(torch.get_device_module(_kind()), "_is_in_bad_fork", _never)():
        return f"this process was forked after {_kind()!r} was used: start it with multiprocessing's 'spawn' method"
    try:
        torch.accelerator.Graph()
    except RuntimeError as error:
        return f"{_kind()!r} has no graphs under torch.accelerator ({first_line(error)})"
    return ""


Adapter = AcceleratorBackend
