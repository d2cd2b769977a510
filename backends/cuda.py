"""CUDA devices, and AMD's under ROCm, which torch serves under the same names.

How it behaves, where that is not obvious:

- All captures on a device share one stream and one pool, whichever runner makes them. A graph's outputs are therefore
  good until a graph that was captured before it on the same device is replayed; those of one runner last as ever.
- Replays run on the current stream; runners let a step wait for the one before it where that was on another.
- A host slot is pinned. A graph that copies from it reads it when the device gets there, not when replay returns; a
  runner's next fill waits for that.
- Outputs are ordinary tensors, also of a capture inside inference mode.
"""

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, final

import attrs
import torch

from ..dataflow.capabilities import LADDER
from ..dataflow.errors import BackendUnavailableError
from .base import (
    NO_PARAMETERS,
    Availability,
    Capabilities,
    Fusion,
    Graph,
    Upload,
)
from .cuda_fusion import fusion_on
from .cuda_runtime import CudaRuntime
from .cuda_upload import current_stream_on, upload_on
from .device_graph import Manner, capture
from .faults import first_line
from .graph_pool import Shared, mode_of, pool_of, shared_on
from .runtime import Handle
from .segments import StreamTable
from .streamed import StreamBackend

_ERROR_MODES: Final = ("global", "thread_local", "relaxed")
_CAPABILITIES: Final = Capabilities(
    packed_uploads=True,
    capture_copies=frozenset({"device", "pinned"}),
    capture_error_modes=_ERROR_MODES,
)
_WITH_FUSION: Final = attrs.evolve(_CAPABILITIES, lowerings=LADDER)
_VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_INSTALL: Final = "on Linux, `pip install --force-reinstall torch` brings one; for ROCm see torch's own install page"


@final
class CudaBackend(StreamBackend):
    """The CUDA device that is current when the backend is made.

    check_input_liveness: let torch (2.13 or newer) note every tensor that a capture reads, and refuse a replay after
    one of them was freed. It takes a stack trace for each of them, so it is for finding bugs.
    """

    name: ClassVar[str] = "cuda"
    priority: ClassVar[int] = 10

    def __init__(self, *, check_input_liveness: bool = False) -> None:
        self._shared = shared_on(torch.device("cuda", torch.cuda.current_device()), CudaRuntime)
        statistics = functools.partial(torch.cuda.memory_stats_as_nested_dict, self._shared.device)
        self._streams = StreamTable(torch.cuda.memory_snapshot, statistics)
        self._options: dict[str, Any] = _liveness() if check_input_liveness else {}

    @classmethod
    def is_available(cls) -> Availability:
        """Whether torch is built for such devices and sees one."""
        reason = _why_not()
        return Availability(available=not reason, reason=reason)

    @property
    def capabilities(self) -> Capabilities:
        """Foreach copies of one dtype a call, copies in a capture from the device and from pinned memory.

        The fused lowerings come first where triton can compile for the device.
        """
        return _CAPABILITIES if self.fusion() is None else _WITH_FUSION

    def upload(self, nbytes: int) -> Upload | None:
        """A packet on the device, fed by a pinned ring."""
        return upload_on(self.device, nbytes)

    def fusion(self) -> Fusion | None:
        """The fused fill, compiled on first use; None where triton is missing or cannot compile."""
        return fusion_on(self.device)

    def stream_key(self) -> Callable[[], int]:
        """A call that tells the current stream's handle."""
        return current_stream_on(self.device)

    def order(self, first: int, then: int) -> None:
        """Have the stream of one handle wait for what was handed to that of another so far."""
        (earlier, event), (later, _) = _stream_of(first, self.device), _stream_of(then, self.device)
        event.record(earlier)
        later.wait_event(event)

    def streams_of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The stream that each tensor's memory was allocated on, as the allocator tells it.

        Tens of microseconds; milliseconds where the allocator has taken or given back memory since the last call.
        """
        return self._streams.streams_of(tensors, self.stream_key()())

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
        """Record the step on the capture stream without running it; pool: as `pool()` or torch hands it out.

        Raises CaptureError for what CUDA refuses, naming the line and the way out, where memory ran out, saying what
        to lower, and from what the step raised.
        """
        del parameters  # host memory like any other
        options = {"capture_error_mode": mode_of(error_mode, _ERROR_MODES), **self._options}

        def begin(graph: Any, handle: Handle, stream: Any) -> AbstractContextManager[object]:
            return torch.cuda.graph(graph, pool=handle, stream=stream, **options)

        runtime = self._shared.runtime
        return capture(self._shared, step, pool_of(pool, runtime), Manner(runtime.new_graph, begin))


@functools.lru_cache(maxsize=128)
def _stream_of(handle: int, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Event]:
    """The stream of a handle, and an event to be recorded on it, again and again: what waited for it goes on waiting.

    torch takes 0, the default stream's handle, for none, and would draw a stream from its pool.
    """
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    if handle == 0:
        return torch.cuda.default_stream(device), event
    return torch.cuda.ExternalStream(handle, device), event  # type: ignore[no-untyped-call]


def _liveness() -> dict[str, Any]:
    if "check_input_liveness" not in inspect.signature(torch.cuda.graph).parameters:
        message = f"torch {torch.__version__} cannot check whether inputs are alive: torch 2.13 can"
        raise BackendUnavailableError(message)
    return {"check_input_liveness": True}


def _why_not() -> str:
    """Why no such device can be used here; nothing where one can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA: {_INSTALL}"
    if torch.cuda._is_in_bad_fork():  # noqa: SLF001 - torch has no public name for it
        return "this process was forked after CUDA was used: start it with multiprocessing's 'spawn' method"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it warns of, _no_device says
        return "" if torch.cuda.is_available() else _no_device()


def _no_device() -> str:
    hidden = [name for name in _VISIBLE if os.environ.get(name, "0").strip() in {"", "-1"}]
    if hidden:
        return f"no device is visible, because {hidden[0]} is {os.environ[hidden[0]]!r}: unset it, or name a device"
    visible = [f"{name}={os.environ[name]!r}" for name in _VISIBLE if name in os.environ]
    also = f" ({', '.join(visible)})" if visible else ""
    return f"torch finds no device{also}: {_driver_says()}; nvidia-smi or rocm-smi shows what the driver sees"


def _driver_says() -> str:
    """What torch says when it is made to start."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "the driver started, and has none"


Adapter = CudaBackend
