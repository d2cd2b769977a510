"""The upload where host and device are one: the packet is simply written."""

import ctypes
from typing import final

import torch

from .base import Upload


@final
class HostUpload(Upload):
    """A packet that is written at once: whoever read the one before has done so."""

    def __init__(self, nbytes: int) -> None:
        with torch.inference_mode(mode=False):
            self._packet = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
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
