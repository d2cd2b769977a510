"""The feed: what the packet on the device holds, so that it is sent only what it does not hold already."""

import itertools
from collections.abc import Callable
from typing import Final

from .errors import ConfigError
from .lanes import WORD
from .upload import Upload

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
