"""What carries one exchange: memory for a message, and for those of all ranks, and the collective between."""

import abc
import datetime as dt
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .message import NBYTES

if TYPE_CHECKING:
    from torch.distributed import Work


class Wire(abc.ABC):
    """One exchange at a time. writable: this rank's message. readable: every rank's, once `comes` says so."""

    writable: memoryview
    readable: Sequence[memoryview]

    @abc.abstractmethod
    def begin(self) -> None:
        """Send what was written."""

    @abc.abstractmethod
    def comes(self, seconds: float) -> bool:
        """Whether all that was sent is there within so many seconds. RuntimeError where a connection is lost."""


class HostWire(Wire):
    """Over gloo, in host memory."""

    def __init__(self, group: "dist.ProcessGroup", size: int) -> None:
        with torch.inference_mode(mode=False):
            self._own, self._all = (torch.zeros(n * NBYTES, dtype=torch.uint8, device="cpu") for n in (1, size))
        self._group = group
        self._work: Work | None = None
        self.writable = self._own.numpy().data
        self.readable = messages_in(self._all, size)

    def begin(self) -> None:
        """In the background."""
        self._work = all_gather(self._all, self._own, self._group)

    def comes(self, seconds: float) -> bool:
        """Whether it ends in time."""
        work = self._work
        if work is None:
            return True
        try:
            work.wait(dt.timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError:
            if work.is_completed():
                raise
            return False
        return True


def all_gather(out: torch.Tensor, own: torch.Tensor, group: "dist.ProcessGroup") -> "Work":
    """Begin to gather every rank's tensor; torch has had two names for it."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: Work = gather(out, own, group=group, async_op=True)
    return work


def messages_in(gathered: torch.Tensor, size: int) -> list[memoryview]:
    """The parts of gathered memory on the host, by rank."""
    whole = gathered.numpy().data
    return [whole[rank * NBYTES : (rank + 1) * NBYTES] for rank in range(size)]
