"""Filling on CUDA: the upload, and the launch of the fused kernel.

The upload is a pinned ring with the driver's own copy, which takes two thirds of the time of torch's.
"""

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch

from ..dataflow import log
from .base import Fusion, Upload
from .ring import Ring, copy_slice, finish_on, mark_on, packet_on, pinned

MOST_INLINE: Final = 32 << 10
"""Bytes up to which a copy from pageable memory beats a pinned entry. One H200, driver 580, host and device us: 216
bytes 2.3 and 0.9 against 2.0 and 2.0 pinned; 4 KiB 2.3 and 1.2 against 2.1 and 10.5; 32 KiB 3.7 and 3.4 against 3.4 and
11.2; 64 KiB 6.6 and 5.6 against 4.2 and 11.9."""
_DRIVER: Final = "libcuda.so.1"


def upload_on(device: torch.device, nbytes: int) -> Upload:
    """A packet on the device, fed by a pinned ring."""
    packet = packet_on(device, nbytes)
    copies = _Copies(packet)
    mark, finish = functools.partial(mark_on, torch.cuda, device), functools.partial(finish_on, torch.cuda, device)
    return Ring(packet, pinned, copies.start, mark, finish, copies.inline, MOST_INLINE if copies.by_driver else 0)


def current_stream_on(device: torch.device) -> Callable[[], int]:
    """A call that tells the handle of a device's current stream, without making an object of it."""
    handle: Any = torch._C._cuda_getCurrentRawStream  # noqa: SLF001 - what torch's own generated code calls
    return functools.partial(handle, device.index)


class _Copies:
    """Starts copies to a packet: by the driver, else by torch.

    From memory that is not pinned, a driver reads what it copies before the call returns (CUDA's "API synchronization
    behavior"); torch would wait for the device there.
    """

    def __init__(self, packet: torch.Tensor) -> None:
        self._packet = packet
        self._target = packet.data_ptr()
        self._stream = current_stream_on(packet.device)
        self._copy = _driver_copy()
        self.by_driver = self._copy is not None

    def start(self, memory: torch.Tensor, at: int, nbytes: int) -> None:
        """Copy from pinned memory."""
        if self._copy is None or self._copy(self._target, memory.data_ptr() + at, nbytes, self._stream()):
            copy_slice(self._packet, memory, at, nbytes)

    def inline(self, data: bytes, nbytes: int) -> None:
        """Copy from bytes, which the driver has read when this returns."""
        if self._copy is None or self._copy(self._target, data, nbytes, self._stream()):
            with torch.cuda.device(self._packet.device):  # a thread that has not used the device yet: torch readies it
                self._packet[:nbytes].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _driver_copy() -> Callable[[int, int | bytes, int, int], int] | None:
    """The driver's asynchronous copy to the device; None where there is another driver than CUDA's."""
    if torch.version.hip is not None:
        return None
    try:
        function = ctypes.CDLL(_DRIVER).cuMemcpyHtoDAsync_v2
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


@final
class CudaFusion(Fusion):
    """The fused fill as a Triton kernel."""

    def __init__(self, device: torch.device) -> None:
        from . import cuda_kernel  # noqa: PLC0415 - triton is there only where the device is

        self._device = device
        self._module: Any = cuda_kernel
        self._try()

    @property
    def block(self) -> int:
        """Words that one program takes."""
        return int(self._module.BLOCK)

    def kernel(self, table: torch.Tensor, packet: torch.Tensor, targets: Sequence[torch.Tensor]) -> Callable[[], None]:
        """A launch of one program for each row of the table."""
        del targets  # the table has their addresses
        words, rows = packet.view(torch.int64), table.shape[0]
        return functools.partial(self._launch, rows, table, words)

    def _launch(self, rows: int, table: torch.Tensor, words: torch.Tensor) -> None:
        if rows:
            self._module.fill_lanes[(rows,)](table, words, BLOCK=self.block, num_warps=self._module.WARPS)

    def _try(self) -> None:
        """Compile and launch the kernel once, on nothing: a capture is no place to find out that it cannot be."""
        with torch.inference_mode(mode=False), torch.cuda.device(self._device):
            table = torch.zeros(8, dtype=torch.int64, device=self._device)
            words = torch.full((8,), -1, dtype=torch.int64, device=self._device)  # for no table
            self._launch(1, table.view(1, 8), words)
            torch.cuda.synchronize(self._device)


@functools.cache
def fusion_on(device: torch.device) -> CudaFusion | None:
    """The fused fill on a device; None, with one warning that says why, where it cannot be had."""
    if importlib.util.find_spec("triton") is None:
        log.warning("no_fused_fill", device=str(device), reason="triton is not installed: `pip install triton`")
        return None
    try:
        return CudaFusion(device)
    except Exception as error:  # noqa: BLE001 - triton raises what it likes: no compiler, no driver, an unknown chip
        log.warning("no_fused_fill", device=str(device), reason=f"{type(error).__name__}: {error}")
        return None
