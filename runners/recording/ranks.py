"""Recorded ranks: what the others told in a recorded step, and ranks that tell it again on one process at home."""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final, get_args

import attrs
import torch

from ...backends.base import Event
from ...dataflow.axes import Axis
from ...dataflow.errors import RecordingError
from ..decision import Why
from ..ranks.group import EAGER, FITS, HOST, Exchange, Message, Ranks
from .files import RecordedFile
from .records import RanksRecord, StepRanks, StepRecord


@final
class RecordedRanks(Ranks):
    """The ranks of a recorded runner, to make it of at home: one process, and no process group.

    While a recorded step is replayed, the others tell what they told then, so that the same is agreed on. At any other
    time, as when graphs are captured, they tell what this one tells.
    """

    alone = True

    def __init__(self, record: RanksRecord) -> None:  # no group is asked, as those of the base are
        self.group: Any = None
        self.rank, self.size = record.rank, record.size
        self.equal, self.shards = record.equal, record.shards
        self.timeout = self.capture_timeout = math.inf  # nobody is waited for
        self.on = HOST
        self.exchanges = 0
        self.broken = None
        self._live = {}
        self._others: Sequence[Message] | None = None

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "RecordedRanks":
        """Those of a file's runner. RecordingError where it is none that can be read, or its runner had no ranks."""
        file = RecordedFile.read(path)
        if file.header.runner.ranks is None:
            raise RecordingError(f"{file.path.name}: its runner had no ranks")
        return cls(file.header.runner.ranks)

    @contextlib.contextmanager
    def telling(self, step: StepRecord, axes: Sequence[Axis]) -> Iterator[None]:
        """While a step is replayed: the others tell what they did in it. axes: whose rows are told, in that order."""
        self._others = None if step.ranks is None else _messages(step, step.ranks, axes, self.size)
        try:
            yield
        finally:
            self._others = None

    def begin(self, message: Message, told: str) -> Exchange:
        """All have told what they have to tell."""
        del told
        self.exchanges += 1
        others = self._others
        said = [message] * self.size if others is None else [attrs.evolve(one, place=message.place) for one in others]
        said[self.rank] = message
        return lambda _: said

    def wait(self, event: Event, device: torch.device, warm_up: str = "") -> None:
        """Wait until the device is past an event: no collective of it waits for another rank."""
        del device, warm_up
        event.synchronize()

    def broke_off(self, error: BaseException) -> None:
        """Nobody waits for this rank."""


def _messages(step: StepRecord, told: StepRanks, axes: Sequence[Axis], size: int) -> list[Message]:
    """What each rank told of a step: its rows, and, of the one that forced it, what it needs."""
    rows: Mapping[str, Sequence[int]] = dict(told.live)
    missing = [axis.name for axis in axes if axis.name not in rows]
    if missing:
        raise RecordingError(f"step {step.number}: the file does not have what ranks brought on {missing[0]}")
    found = [Message(0, FITS, live=tuple(rows[axis.name][rank] for axis in axes)) for rank in range(size)]
    forced = told.forced
    if forced is not None and step.bucket is not None:
        found[forced] = attrs.evolve(found[forced], bucket=step.bucket)
    elif forced is not None:
        why, text = get_args(Why).index(told.why), step.reason.removeprefix(f"rank {forced}: ")
        found[forced] = attrs.evolve(found[forced], answer=EAGER, why=why, text=text)
    return found
