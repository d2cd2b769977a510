"""One exchange: every rank's message to every rank, by one all-gather, with an end however others fare."""

from typing import Final

import attrs

from ...dataflow.errors import RankError
from .message import Message
from .rollcall import EXCHANGE, RollCall
from .wire import Wire

PATIENCE: Final = 1.0
"""Seconds after which a rank that waits says in the store that it is there: as many as no good step takes."""


@attrs.define(eq=False)
class Exchange:
    """An exchange under way. told: what is said of it in an error. messages: every rank's, once it has ended."""

    wire: Wire
    number: int
    roll: RollCall
    told: str
    messages: list[Message] | None = None

    def wait(self, seconds: float) -> list[Message]:
        """Every rank's message. RankError, which names those who did not come, after so many seconds at the latest."""
        first = min(PATIENCE, seconds)
        if not self._comes(first):
            self.roll.here(EXCHANGE, self.number)
            if not self._comes(seconds - first):
                lost = self._loss(f"within {seconds:g} s")
                raise lost
        return [Message.read(one) for one in self.wire.readable]

    def _comes(self, seconds: float) -> bool:
        """Whether it ends in time. RankError where it cannot any more."""
        try:
            return self.wire.comes(seconds)
        except RuntimeError as error:
            self.roll.here(EXCHANGE, self.number)
            lost = self._loss("before its connection was lost")
            raise lost from error

    def _loss(self, how: str) -> RankError:
        return self.roll.loss(EXCHANGE, self.number, self.told, how)
