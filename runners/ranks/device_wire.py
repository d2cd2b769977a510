"""An exchange over the device's own group: one small upload, one all-gather and one download on a stream of its own."""

import time
from typing import TYPE_CHECKING, Any, Final

import torch

from .message import NBYTES
from .wire import Wire, all_gather, messages_in

if TYPE_CHECKING:
    import torch.distributed as dist

_SPIN: Final = 0.02
"""Seconds that a rank asks again and again whether the others came: they mostly come within tens of microseconds."""
_PAUSE: Final = 0.0005


class DeviceWire(Wire):
    """Memory of one exchange on the host, pinned, and on a device, and the stream that both are used on."""

    def __init__(self, group: "dist.ProcessGroup", size: int, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        with torch.inference_mode(mode=False):
            self._own, self._all = (
                torch.zeros(n * NBYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for n in (1, size)
            )
            self._mine, self._every = self._own.to(device), self._all.to(device)
        self._group = group
        self._stream = self._module.Stream(device)
        self._event = self._module.Event()
        self.writable = self._own.numpy().data
        self.readable = messages_in(self._all, size)

    def begin(self) -> None:
        """Behind nothing but the exchange before."""
        with self._module.stream(self._stream), torch.inference_mode(mode=False):
            self._mine.copy_(self._own, non_blocking=True)
            all_gather(self._every, self._mine, self._group).wait()
            self._all.copy_(self._every, non_blocking=True)
            self._event.record(self._stream)

    def comes(self, seconds: float) -> bool:
        """Whether it ends in time; the first moments are spent asking without a pause."""
        begin = time.monotonic()
        while not self._event.query():
            waited = time.monotonic() - begin
            if waited > seconds:
                return False
            if waited > _SPIN:
                time.sleep(_PAUSE)
        return True
