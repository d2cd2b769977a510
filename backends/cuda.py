"""CUDA devices, and AMD's under ROCm, which torch serves under the same names.

Behaviour that is not obvious:

- All captures on a device share one stream and one pool, whichever runner makes them. A graph's outputs are therefore
  valid until a graph that was captured before it on the same device is replayed. Within one runner, they last until
  its next replay, as always.
- Replays run on the current stream. Runners make a step wait for the one before it if that was on another stream.
- A host slot is pinned. A graph that copies from it reads it when the device gets there, not when replay returns. A
  runner's next fill waits for that.
- Outputs are ordinary tensors, even if the capture ran in inference mode.
"""

import ctypes
import functools
import importlib.util
import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any, Final, final

import attrs
import torch

from ..dataflow import log
from ..dataflow.capabilities import Capabilities
from ..dataflow.errors import BackendUnavailableError
from ..dataflow.guard import outside_inference
from ..dataflow.packet import COLUMNS, HEAD, Upload
from .base import Fusion
from .device import StreamBackend
from .device_graph import Advice, Handle, Opened, first_line
from .ring import Inline, Start, copy_slice, ring_on

DriverCopy = Callable[[ctypes.c_uint64, ctypes.c_void_p | bytes, ctypes.c_size_t, ctypes.c_void_p], int]
_C: Final[Any] = torch._C  # noqa: SLF001 - the allocator's side of a capture has no public name
_CAPABILITIES: Final = Capabilities(packed_uploads=True, capture_error_modes=StreamBackend.error_modes)
_WITH_FUSION: Final = attrs.evolve(
    _CAPABILITIES, compiles=True, lowerings=("in_graph", "fused", *_CAPABILITIES.lowerings)
)
_MOST_INLINE: Final = 32 << 10
"""The most bytes for which a copy from pageable memory beats a pinned entry.

One H200, driver 580, host and device us: 216 bytes 2.3 and 0.9 against 2.0 and 2.0 pinned; 4 KiB 2.3 and 1.2 against
2.1 and 10.5; 32 KiB 3.7 and 3.4 against 3.4 and 11.2; 64 KiB 6.6 and 5.6 against 4.2 and 11.9.
"""
_DRIVER: Final = "libcuda.so.1"
_VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_ON_DEVICE: Final = (
    "it waits for the device, as item(), tolist(), cpu(), bool(), nonzero, x[mask], unique, torch.tensor(device=...), "
    "blocking copies and synchronize do. Keep the value on the device (torch.where, index_select), or hand it to the "
    "step in a slot"
)
_STREAMS: Final = (
    "it uses a stream or an event that is no part of this capture. Let the other stream wait for the current one "
    "first, and the current one for it before the step ends"
)
_ADVICE: Final[Advice] = (
    (
        "unless the cpu tensor is pinned",
        "copy from a device slot, or from a slot with placement='host', which is pinned (row by row if not contiguous)",
    ),
    ("operation not permitted when stream is capturing", _ON_DEVICE),
    (
        "previous error during capture",
        "an operation of the step was refused, and the step went on after it: let its error through",
    ),
    ("uncaptured work in another stream", _STREAMS),
    ("legacy stream depend on a capturing", _STREAMS),
    ("unjoined work", _STREAMS),
    ("last recorded in a capturing stream", _STREAMS),
    ("outside graph capture", "a graph draws from the device's default generator alone: leave out generator="),
    ("not registered to the graph", "a graph draws from the device's default generator alone: leave out generator="),
    (
        "cublas_status_not_initialized",
        "its libraries set themselves up at first use: capture after a warm-up, as warmups= does",
    ),
    ("cuda graph is empty", "nothing was recorded: the step works on another stream or device, or does nothing at all"),
)


@final
class CudaBackend(StreamBackend):
    """The CUDA device that is current when the backend is made.

    Args:
        check_input_liveness: Let torch (2.13 or newer) record every tensor that a capture reads, and refuse a replay
            after one of them was freed. It takes a stack trace for each of them, so it is for finding bugs.
    """

    name = "cuda"
    priority = 10
    advice = _ADVICE
    warns_of_empty = "CUDA Graph is empty"

    def __init__(self, *, check_input_liveness: bool = False) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(device, torch.cuda, _C, **_liveness() if check_input_liveness else {})

    @classmethod
    def why_not(cls) -> str:
        """Return why torch is not built for such devices or sees none, or ""."""
        if torch.version.cuda is None and torch.version.hip is None:
            return (
                f"torch {torch.__version__} is built without CUDA: on Linux, `pip install --force-reinstall torch` "
                "brings one; for ROCm see torch's own install page"
            )
        if torch.cuda._is_in_bad_fork():  # noqa: SLF001 - torch has no public name for it
            return "this process was forked after CUDA was used: start it with multiprocessing's 'spawn' method"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `_no_device` reports the same as a reason
            return "" if torch.cuda.is_available() else _no_device()

    @property
    def capabilities(self) -> Capabilities:
        """The record: one foreach call for each dtype, and the fused lowerings first if triton can compile."""
        return _CAPABILITIES if self.fusion() is None else _WITH_FUSION

    def upload(self, nbytes: int) -> Upload | None:
        """Make a packet on the device with a pinned ring, which uses CUDA's own driver copy if there is one."""
        copy = _driver_copy()
        driver = None if copy is None else functools.partial(_copies, copy)
        return ring_on(self.device, nbytes, driver=driver, stream=self.current_stream)

    def fusion(self) -> Fusion | None:
        """Return the fused fill, compiled on first use, or None if triton is missing or cannot compile."""
        return fusion_on(self.device)

    def begin(self, handle: Handle, **options: Any) -> Opened:
        """Make a CUDAGraph and its torch.cuda.graph."""
        graph = torch.cuda.CUDAGraph()
        return graph, torch.cuda.graph(graph, pool=handle, stream=self.state.stream, **options)

    def release_workspaces(self) -> None:
        """Free cuBLAS's and cuBLASLt's workspaces of all streams, as torch's graph trees do around each recording."""
        _C._cuda_clearCublasWorkspaces()  # noqa: SLF001

    def alias_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a tensor that shares the memory but does not keep it alive, as torch's graph trees do in a pool."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        nbytes = storage.nbytes()
        with outside_inference():
            bare = _C._construct_storage_from_data_pointer(address, self.device, nbytes)  # noqa: SLF001
            fresh = torch.empty(0, dtype=tensor.dtype, device=self.device)
            return fresh.set_(bare, tensor.storage_offset(), tensor.size(), tensor.stride())

    def mapped(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias that kernels can write, since pinned memory has one address for the host and for kernels.

        The host's tensor must outlive the alias.
        """
        return self.alias_of(tensor) if tensor.is_pinned() else tensor

    def stream_key(self) -> Callable[[], int]:
        """Return a call that gives the current stream's handle."""
        return _current_stream_on(self.device)

    def current_stream(self) -> torch.cuda.Stream:
        """Return the current stream. torch takes three times as long to make an object of it."""
        return _stream_of(self.stream_key()(), self.device)[0]

    def order(self, first: int, then: int) -> None:
        """Make the stream of handle `then` wait for the work submitted so far to that of handle `first`."""
        earlier, event = _stream_of(first, self.device)
        later, _ = _stream_of(then, self.device)
        event.record(earlier)
        later.wait_event(event)


@functools.lru_cache(maxsize=128)
def _stream_of(handle: int, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Event]:
    """Return the stream of a handle, and an event for it.

    Handle 0 is the default stream's. An external stream of that handle would be one from torch's pool.
    """
    event = torch.cuda.Event()
    if handle == 0:
        return torch.cuda.default_stream(device), event
    return torch.cuda.ExternalStream(handle, device), event


def _liveness() -> dict[str, Any]:
    if "check_input_liveness" not in inspect.signature(torch.cuda.graph).parameters:
        raise BackendUnavailableError(
            f"torch {torch.__version__} cannot check whether inputs are alive: torch 2.13 can"
        )
    return {"check_input_liveness": True}


def _no_device() -> str:
    hidden = [name for name in _VISIBLE if os.environ.get(name, "0").strip() in {"", "-1"}]
    if hidden:
        return f"no device is visible, because {hidden[0]} is {os.environ[hidden[0]]!r}: unset it, or name a device"
    visible = [f"{name}={os.environ[name]!r}" for name in _VISIBLE if name in os.environ]
    also = f" ({', '.join(visible)})" if visible else ""
    return f"torch finds no device{also}: {_driver_says()}; nvidia-smi or rocm-smi shows what the driver sees"


def _driver_says() -> str:
    """Initialize CUDA through torch, and return torch's error message, if any."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "the driver started, and has none"


def _current_stream_on(device: torch.device) -> Callable[[], int]:
    """Return a call that gives the handle of a device's current stream, without making a stream object."""
    return functools.partial(_C._cuda_getCurrentRawStream, device.index)  # noqa: SLF001 - what torch's own code calls


def _copies(copy: DriverCopy, packet: torch.Tensor) -> tuple[Start, Inline, int]:
    """Return functions that start copies to a packet through the driver, in two thirds of torch's time.

    From memory that is not pinned, a driver reads what it copies before the call returns (CUDA's "API synchronization
    behavior"). Torch would wait for the device there.
    """
    target = ctypes.c_uint64(packet.data_ptr())
    stream = _current_stream_on(packet.device)
    size = functools.cache(ctypes.c_size_t)
    handle = functools.cache(ctypes.c_void_p)  # ctypes converts ints slowly

    def start(memory: torch.Tensor, at: int, nbytes: int) -> None:
        if copy(target, ctypes.c_void_p(memory.data_ptr() + at), size(nbytes), handle(stream())):
            copy_slice(packet, memory, at, nbytes)

    def inline(data: bytes, nbytes: int) -> None:
        if copy(target, data, size(nbytes), handle(stream())):
            with torch.cuda.device(packet.device):  # in a thread that has not used the device yet, torch sets it up
                packet[:nbytes].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    return start, inline, _MOST_INLINE


@functools.cache
def _driver_copy() -> DriverCopy | None:
    """Return the driver's asynchronous copy to the device, or None if the driver is not CUDA's."""
    if torch.version.hip is not None:
        return None
    try:
        function = ctypes.CDLL(_DRIVER).cuMemcpyHtoDAsync_v2
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_int
    return function


@functools.cache
def fusion_on(device: torch.device) -> Fusion | None:
    """Return the fused fill as a Triton kernel on a device.

    If that fails, log one warning with the reason and return None.
    """
    if importlib.util.find_spec("triton") is None:
        log.warning("no_fused_fill", device=str(device), reason="triton is not installed: `pip install triton`")
        return None
    try:
        from . import cuda_kernel  # noqa: PLC0415 - triton is installed only with the device

        fusion = Fusion(cuda_kernel.BLOCK, cuda_kernel.filling, cuda_kernel.editing)
        with outside_inference(), torch.cuda.device(device):  # compile now, not inside a capture
            table = torch.zeros(1, COLUMNS, dtype=torch.int64, device=device)
            words = torch.zeros(2 * HEAD, dtype=torch.int64, device=device)  # an empty packet, which addresses no table
            fusion.kernel(table, words, ())()
            torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001 - triton may raise anything: no compiler, no driver, an unknown chip
        log.warning("no_fused_fill", device=str(device), reason=f"{type(error).__name__}: {error}")
        return None
    return fusion
