"""Turns: what several sets of buffers in one piece of memory must know of one another."""

from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch

from .errors import ReplayError

NO_MEMORY: Final[Mapping[str, torch.Tensor]] = {}


@attrs.define(eq=False)
class Ledger:
    """What all that fill a piece of memory write down.

    stamp: the fill that came last to any of them. handed_out: whether producers were given views of some of it, so that
    they may write any row of these at any time.
    """

    stamp: object | None = None
    handed_out: bool = False


@attrs.define(eq=False)
class BufferTurn:
    """One set of buffers' turns in memory that others use in theirs.

    Attributes:
        fills: How often it was filled.
        eager_runs: How often a step ran on it without a graph.
        stream: The one that its last fill or step was on.
        reading: An event behind the last step that copies from slots in host memory; None where none does.
        neighbours: All with whom it shares a byte.
        overwriters: The same by slot.
    """

    fills: int = 0
    eager_runs: int = 0
    stream: int | None = None
    reading: Any = None
    neighbours: tuple["BufferTurn", ...] = ()
    overwriters: Mapping[str, tuple["BufferTurn", ...]] = attrs.field(factory=dict)

    def follows(self, stream: int | None) -> bool:
        """Whether nothing of the neighbours' was handed to another stream than this one."""
        for other in self.neighbours:  # noqa: SIM110 - `all` takes twice as long, and it is asked in each step
            if other.stream != stream and other.stream is not None:
                return False
        return True

    @property
    def others(self) -> int:
        """A number that grows whenever another's fill may have written some of this memory."""
        return sum([other.fills for other in self.neighbours]) if self.neighbours else 0  # asked at each fill

    def check_others(self, seen: int) -> None:
        """ReplayError where another's fill came since that number was seen."""
        if self.others != seen:
            raise ReplayError(
                "another runner of this one's pool was filled since, in memory that both use: replay a view before the "
                "next phase begins, or declare that the phases overlap"
            )

    def overwritten(self, slot: str) -> int:
        """A number that grows whenever another's fill may have written a slot's memory."""
        return sum(other.fills for other in self.overwriters.get(slot, ()))


@attrs.frozen(eq=False)
class SharedMemory:
    """What a pool gives one set of buffers: memory for some of its slots, and what to know of the others in it."""

    tensors: Mapping[str, torch.Tensor] = NO_MEMORY
    ledger: Ledger = attrs.field(factory=Ledger)
    turn: BufferTurn = attrs.field(factory=BufferTurn)
