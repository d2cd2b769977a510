"""One exchange: every rank's message to every rank, by one all-gather, with an end however others fare."""

import datetime as dt
from collections.abc import Sequence
from typing import Any, Final

import attrs
import torch
import torch.distributed as dist

from ...dataflow.errors import RankError
from .message import NBYTES, Message
from .rollcall import RollCall

PATIENCE: Final = 1.0
"""Seconds after which a rank that waits says in the store that it is there: as many as no good step takes."""


def all_gather(out: torch.Tensor, own: torch.Tensor, group: "dist.ProcessGroup") -> "dist.Work":
    """Begin to gather every rank's tensor of [NBYTES]; torch has had two names for it."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = gather(out, own, group=group, async_op=True)
    return work


@attrs.frozen(eq=False)
class Lines:
    """Memory of one exchange: a message of NBYTES bytes, and those of all ranks."""

    own: torch.Tensor
    all: torch.Tensor
    writable: memoryview
    readable: Sequence[memoryview]

    @classmethod
    def of(cls, size: int) -> "Lines":
        """Memory for so many ranks."""
        with torch.inference_mode(mode=False):
            own, every = torch.zeros(NBYTES, dtype=torch.uint8), torch.zeros(size * NBYTES, dtype=torch.uint8)
        whole = every.numpy().data
        parts = [whole[rank * NBYTES : (rank + 1) * NBYTES] for rank in range(size)]
        return cls(own, every, own.numpy().data, parts)

    def messages(self) -> list[Message]:
        """What the ranks said."""
        return [Message.read(one) for one in self.readable]


@attrs.frozen(eq=False)
class Exchange:
    """An exchange under way. told: what is said of it in an error."""

    work: "dist.Work"
    lines: Lines
    number: int
    roll: RollCall
    told: str

    def wait(self, seconds: float) -> list[Message]:
        """Every rank's message. RankError, which names those who did not come, after so many seconds at the latest."""
        first = min(PATIENCE, seconds)
        if not self._comes(first):
            self.roll.here(self.number)
            if not self._comes(seconds - first):
                lost = self._loss(f"within {seconds:g} s")
                raise lost
        return self.lines.messages()

    def _comes(self, seconds: float) -> bool:
        """Whether it ends in time. RankError where it cannot any more."""
        try:
            self.work.wait(dt.timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as error:
            if not self.work.is_completed():
                return False
            self.roll.here(self.number)
            lost = self._loss("before its connection was lost")
            raise lost from error
        return True

    def _loss(self, how: str) -> RankError:
        missing = self.roll.missing(self.number)
        if missing is None:
            return RankError(f"{self.told}: ranks were lost, and so was the store that could tell which: see its host")
        if not missing:
            return RankError(f"{self.told}: all ranks came, but not all {how}, or what connects them broke")
        told = "; ".join(self._told(rank, how) for rank in missing)
        return RankError(f"{self.told}: {told}")

    def _told(self, rank: int, how: str) -> str:
        """What is known of a rank that did not come."""
        words = self.roll.last_words(rank)
        why = f"it broke off a step before: {words}" if words else "it is dead, stuck, or does something else"
        return f"rank {rank} did not come {how}: {why}"
