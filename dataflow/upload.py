"""The upload: the packet's memory on the device, and the way there."""

import abc

import torch


class Upload(abc.ABC):
    """A packet on the device, and what takes bytes to it while the device may still read those sent before."""

    @property
    @abc.abstractmethod
    def packet(self) -> torch.Tensor:
        """The packet: bytes on the device, at a fixed address that is a multiple of 64 at least."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes that this holds, on the device and on the host."""

    @abc.abstractmethod
    def send(self, data: bytes, kept: object) -> None:
        """Start one copy of `data` to the packet on the current stream; `kept` stays alive until the device is past it.

        What the packet held beyond stays as it was.
        """

    def move(self, source: torch.Tensor) -> torch.Tensor:
        """A copy of a dense host tensor in memory of its own on the device, beside the packet.

        The source may change as soon as this returns. By default it waits until the device has read it.
        """
        with torch.inference_mode(mode=False):
            return source.detach().to(self.packet.device, copy=True)
