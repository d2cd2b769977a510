"""One launch on CUDA: the fused kernel."""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch

from ..dataflow import log
from .base import Fusion

_NO_TRITON: Final = "triton is not installed: `pip install triton`"


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
        log.warning("no_fused_fill", device=str(device), reason=_NO_TRITON)
        return None
    try:
        return CudaFusion(device)
    except Exception as error:  # noqa: BLE001 - triton raises what it likes: no compiler, no driver, an unknown chip
        log.warning("no_fused_fill", device=str(device), reason=f"{type(error).__name__}: {error}")
        return None
