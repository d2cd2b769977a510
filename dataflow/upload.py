"""The upload: the packet's memory on the device, and the way there."""

import abc

import torch


class Upload(abc.ABC):
    """A packet on the device, and what takes bytes to it while the device may still read those sent before."""

    @property
    @abc.abstractmethod
    def packet(self) -> torch.Tensor:
        """The packet: bytes on the device, at a fixed address."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes that this holds, on the device and on the host."""

    @abc.abstractmethod
    def send(self, data: bytes, kept: object) -> None:
        """Start one copy of `data` to the packet on the current stream; `kept` stays alive until the device is past it.

        What the packet held beyond stays as it was.
        """
