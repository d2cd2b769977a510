"""One exchange: every rank's message to every rank, by one all-gather, with an end however others fare."""

from typing import Final

import attrs

from ...dataflow.errors import RankError
from .message import Message
from .rollcall import RollCall
from .wire import Wire

PATIENCE: Final = 1.0
"""Seconds after which a rank that waits says in the store that it is there: as many as no good step takes."""


@attrs.frozen(eq=False)
class Exchange:
    """An exchange under way. told: what is said of it in an error."""

    wire: Wire
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
        return [Message.read(one) for one in self.wire.readable]

    def _comes(self, seconds: float) -> bool:
        """Whether it ends in time. RankError where it cannot any more."""
        try:
            return self.wire.comes(seconds)
        except RuntimeError as error:
            self.roll.here(self.number)
            lost = self._loss("before its connection was lost")
            raise lost from error

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
