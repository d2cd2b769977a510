"""Wires: what one rank tells all others before a step, and the all-gathers that carry it."""

import datetime as dt
import struct
import time
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import Work

FITS, EAGER, REFUSED = range(3)
"""What a rank says of its batch: a bucket takes it, none does, or the rank refuses it."""
AXES: Final = 8
"""Varying axes whose live sizes one message holds, at most."""
_TEXT: Final = 256
_LAYOUT: Final = struct.Struct(f"<{5 + AXES}q{_TEXT}s")
_SPIN: Final = 0.02
"""Seconds that a rank asks a device without a pause: others mostly come within tens of microseconds."""
_PAUSE: Final = 0.0005


@attrs.frozen
class Message:
    """What one rank tells the others.

    place: a digest of the place in the program, the same on all ranks. answer: FITS, EAGER or REFUSED. bucket: the
    bucket that takes the batch, 0 for none, or any other number to tell. why: the reason's index among the known ones.
    idle: whether the rank has no requests. live: the batch's live sizes by axis; zeros follow them in a message that
    came. text: the reason, of which the first 256 bytes are sent.
    """

    place: int
    answer: int = FITS
    bucket: int = 0
    why: int = 0
    idle: bool = False
    live: tuple[int, ...] = ()
    text: str = ""

    def pack_into(self, memory: Any) -> None:
        """Write the message into a buffer of bytes."""
        raw, live = self.text.encode(), self.live + (0,) * (AXES - len(self.live))
        if len(raw) > _TEXT:
            raw = raw[: _TEXT - 3].decode(errors="ignore").encode() + b"..."
        _LAYOUT.pack_into(memory, 0, self.place, self.answer, self.bucket, self.why, self.idle, *live, raw)

    @classmethod
    def unpack_all(cls, memory: Any) -> "list[Message]":
        """Read the messages that lie in a buffer, one behind the other."""
        return [
            cls(place, answer, bucket, why, bool(idle), tuple(live), text.rstrip(b"\0").decode())
            for place, answer, bucket, why, idle, *live, text in _LAYOUT.iter_unpack(memory)
        ]


class HostWire:
    """Carries one exchange at a time over gloo, in host memory."""

    def __init__(self, group: "dist.ProcessGroup", size: int, *, pinned: bool = False) -> None:
        with torch.inference_mode(mode=False):
            self._own, self._all = (
                torch.zeros(count * _LAYOUT.size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                for count in (1, size)
            )
        self._group = group
        self._work: Work | None = None

    def send(self, message: Message) -> None:
        """Begin an exchange with this rank's message."""
        message.pack_into(self._own.numpy())
        self._begin()

    def arrives(self, seconds: float) -> bool:
        """Wait for the messages, for so many seconds at most. RuntimeError if a connection is lost."""
        work = self._work
        if work is not None:
            try:
                work.wait(dt.timedelta(seconds=max(seconds, 0.001)))
            except RuntimeError:
                if work.is_completed():
                    raise
                return False
        return True

    def messages(self) -> list[Message]:
        """Every rank's message, once they have arrived."""
        return Message.unpack_all(self._all.numpy())

    def _begin(self) -> None:
        self._work = _all_gather(self._all, self._own, self._group)


class DeviceWire(HostWire):
    """Carries one exchange at a time over the device's own group: an upload, an all-gather and a download.

    All three run on a stream of the wire's own, behind nothing but the exchange before.
    """

    def __init__(self, group: "dist.ProcessGroup", size: int, device: torch.device) -> None:
        super().__init__(group, size, pinned=True)
        self._module: Any = torch.get_device_module(device)
        with torch.inference_mode(mode=False):
            self._mine, self._every = self._own.to(device), self._all.to(device)
        self._stream, self._event = self._module.Stream(device), self._module.Event()

    def arrives(self, seconds: float) -> bool:
        """Wait for the messages, for so many seconds at most."""
        begin = time.monotonic()
        while not self._event.query():
            waited = time.monotonic() - begin
            if waited > seconds:
                return False
            if waited > _SPIN:
                time.sleep(_PAUSE)
        return True

    def _begin(self) -> None:
        with self._module.stream(self._stream), torch.inference_mode(mode=False):
            self._mine.copy_(self._own, non_blocking=True)
            _all_gather(self._every, self._mine, self._group).wait()
            self._all.copy_(self._every, non_blocking=True)
            self._event.record(self._stream)


def _all_gather(out: torch.Tensor, own: torch.Tensor, group: "dist.ProcessGroup") -> "Work":
    """Begin to gather every rank's tensor, under the name that this torch has for it."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: Work = gather(out, own, group=group, async_op=True)
    return work
