"""One upload and one launch where host and device are one: the packet is written, and the kernel runs, at once."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import final

import torch

from .base import Fusion, Upload
from .host_fill import BLOCK, fill_lanes


@final
class HostUpload(Upload):
    """A packet that is simply written: whoever read the one before has done so."""

    def __init__(self, nbytes: int) -> None:
        with torch.inference_mode(mode=False):
            self._packet = torch.zeros(nbytes, dtype=torch.uint8)
        self._address = self._packet.data_ptr()
        self._kept: object = None

    @property
    def packet(self) -> torch.Tensor:
        """The packet."""
        return self._packet

    @property
    def nbytes(self) -> int:
        """The packet's."""
        return self._packet.nbytes

    def send(self, data: bytes, kept: object) -> None:
        """Write the packet; what it points to lives until the next one."""
        self._kept = kept
        ctypes.memmove(self._address, data, len(data))


@final
class HostFusion(Fusion):
    """The fused fill in plain code, so that a laptop shows what a device will do."""

    @property
    def block(self) -> int:
        """More than a slot has, so that a table has one row for each outer row."""
        return BLOCK

    def upload(self, nbytes: int) -> Upload:
        """A packet in host memory."""
        return HostUpload(nbytes)

    def kernel(self, table: torch.Tensor, packet: torch.Tensor, targets: Sequence[torch.Tensor]) -> Callable[[], None]:
        """The operator over a table."""
        return functools.partial(fill_lanes, table, packet, list(targets))
