"""The feed: a packet in memory on the device, and what sends one step's bytes to it."""

import abc
import itertools
from collections.abc import Callable
from typing import Final

import torch

from .errors import ConfigError
from .lanes import WORD


class Upload(abc.ABC):
    """A packet on the device, and what takes bytes to it while the device may still read those sent before."""

    @property
    @abc.abstractmethod
    def packet(self) -> torch.Tensor:
        """The packet, which is bytes on the device, at a fixed address that is a multiple of 64 at least."""

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


_UNARMED: Final = bytes(WORD)
_UNKNOWN: Final = b""


class Feed:
    """One packet that several buckets take turns to fill."""

    def __init__(self, upload: Upload) -> None:
        self.upload = upload
        self.address = upload.packet.data_ptr()
        self.room = upload.packet.nbytes
        self._send = upload.send
        self._data = _UNARMED
        self._numbers = itertools.count(1)

    def number(self) -> int:
        """A number for one more table that this packet feeds: it arms no other."""
        return next(self._numbers)

    def arm(self, data: bytes, kept: object) -> None:
        """Have the packet hold a step's bytes."""
        if data == self._data:
            return
        self._data = _UNKNOWN  # in case the next line raises
        self._send(data, kept)
        self._data = data

    def carry(self, data: bytes) -> None:
        """Have the packet hold what foreach copies read: bytes whose first word arms no table."""
        self._data = _UNKNOWN
        self._send(data, None)
        self._data = _UNARMED

    def disarm(self) -> None:
        """Have the kernel do nothing, where it was armed."""
        if self._data is not _UNARMED:
            self._data = _UNKNOWN
            self._send(_UNARMED, None)
            self._data = _UNARMED

    def was_disarmed(self) -> None:
        """Note that the device has disarmed the packet itself."""
        self._data = _UNARMED


class Feeder:
    """A feed that is made when it is first asked for: who brings no host data has no packet.

    upload: a backend's verb. room: bytes of the packet.
    """

    def __init__(self, upload: Callable[[int], Upload | None], room: int) -> None:
        self._upload = upload
        self._room = room
        self._feed: Feed | None = None

    def __call__(self) -> Feed:
        """The feed. ConfigError where the backend has no packet."""
        if self._feed is None:
            upload = self._upload(self._room)
            if upload is None:
                message = "the backend's record says packed_uploads, or names fused lowerings, but upload() gives None"
                raise ConfigError(message)
            self._feed = Feed(upload)
        return self._feed

    @property
    def made(self) -> Feed | None:
        """The feed, if anyone has asked for it."""
        return self._feed

    @property
    def nbytes(self) -> int:
        """Bytes of the packet, and of the host memory that uploads start from."""
        return self._feed.upload.nbytes if self._feed is not None else 0
