"""What a rank tells the others before a step, as bytes of one length, so that one collective carries all of it."""

import struct
from typing import Final

import attrs

FITS, EAGER, REFUSED, FAILED = range(4)
"""What a rank has to say: a bucket takes its batch, none does, it refuses the batch, it could not capture."""
AXES: Final = 8
"""Varying axes whose live sizes are told, at most."""
TEXT: Final = 256
"""Bytes of a reason, of which longer ones lose the end."""
_HEAD: Final = struct.Struct(f"<{5 + AXES}q?H")
NBYTES: Final = _HEAD.size + TEXT


@attrs.frozen
class Message:
    """One rank's message.

    place: a digest of where in its program the rank is, which must be the same for all. verdict: FITS, EAGER, REFUSED
    or FAILED. bucket: the one that takes its batch, 0 for none. why: the reason's place among the known ones. live:
    live sizes of its batch, by axis. idle: whether it has none, and only takes part. text: the reason.
    """

    place: int
    verdict: int = FITS
    bucket: int = 0
    why: int = 0
    live: tuple[int, ...] = ()
    idle: bool = False
    text: str = ""

    def write(self, memory: memoryview) -> None:
        """Write NBYTES bytes."""
        live, text = self.live + (0,) * (AXES - len(self.live)), _cut(self.text)
        head = self.place, self.verdict, self.bucket, self.why, len(self.live), *live, self.idle, len(text)
        _HEAD.pack_into(memory, 0, *head)
        if text:
            memory[_HEAD.size : _HEAD.size + len(text)] = text

    @classmethod
    def read(cls, memory: memoryview) -> "Message":
        """What `write` wrote."""
        place, verdict, bucket, why, axes, *live, idle, length = _HEAD.unpack_from(memory)
        text = bytes(memory[_HEAD.size : _HEAD.size + length]).decode() if length else ""
        return cls(place, verdict, bucket, why, tuple(live[:axes]), idle, text)


def _cut(text: str) -> bytes:
    """As much of a text as there is room for, in whole characters."""
    raw = text.encode()
    return raw if len(raw) <= TEXT else raw[: TEXT - 3].decode(errors="ignore").encode() + b"..."
