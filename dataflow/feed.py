"""The feed: what the packet on the device holds, so that it is sent only what it does not hold already."""

import itertools
from typing import Final

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

    def disarm(self) -> None:
        """Have the kernel do nothing, where it was armed."""
        if self._data is not _UNARMED:
            self._data = _UNKNOWN
            self._send(_UNARMED, None)
            self._data = _UNARMED

    def was_disarmed(self) -> None:
        """Note that the device has disarmed the packet itself."""
        self._data = _UNARMED
