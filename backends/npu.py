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

from ..dataflow.capabilities import Capabilities
from ..dataflow.errors import BackendUnavailableError, ConfigError
from .base import NO_PARAMETERS, Availability, Graph
from .device_graph import Manner, capture
from .graph_pool import Shared, mode_of, pool_of, shared_on
from .npu_graph import FENCES, Fence, UpdatedGraph, check_taken
from .npu_presence import why_not
from .npu_runtime import NpuRuntime, npu, recording
from .npu_streams import numbered, order, stream_number
from .runtime import Handle, Recorded
from .segments import streams_of
from .streamed import StreamBackend

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
class NpuBackend(StreamBackend):
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
        self._shared = shared_on(torch.device("npu", npu().current_device()), NpuRuntime)
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
            made.append(UpdatedGraph(self.device, parameters, self._fence))
            return made[-1]

        def begin(graph: Any, handle: Handle, stream: Any) -> AbstractContextManager[object]:
            updated: UpdatedGraph = graph
            return updated.recorded(recording(updated.native, handle, stream, options))

        return Manner(new, begin)

    def stream_key(self) -> Callable[[], int]:
        """A call that tells the current stream's number."""
        return functools.partial(stream_number, self.device)

    def order(self, first: int, then: int) -> None:
        """Have the stream of one number wait for what was handed to that of another so far."""
        order(self.device, first, then)

    def streams_of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The stream that each tensor's memory was allocated on, from the allocator's own books."""
        known = [npu().default_stream(self.device), npu().current_stream(self.device), self._shared.stream]
        return streams_of(numbered(npu().memory_snapshot(), known), tensors, stream_number(self.device))


Adapter = NpuBackend
