"""A runner's fill and the same by hand: held to each other, byte for byte, before anything is timed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.capabilities import DEVICE
from ...dataflow.errors import WrongBytesError
from ...dataflow.slots import Output
from .fill_by_hand import FillByHand
from .runner_kinds import SERVING, Kind, Runner, Scale, kinds
from .timing import Run
from .verifying import same_bytes
from .workload import SETS, Batch


@attrs.frozen(eq=False)
class Race:
    """One runner and its rival, and batches that take turns."""

    kind: Kind
    backend: Backend
    runner: Runner
    by_hand: Callable[[Batch], Any]
    batches: Sequence[Batch]

    @classmethod
    def of(cls, kind: Kind, backend: Backend) -> "Race":
        """A captured runner and buffers by hand. WrongBytesError where the two do not fill the same."""
        race = cls(kind, backend, kind.make(kind, backend), FillByHand.of(kind, backend), kind.sets(backend))
        race.verify()
        return race

    def runs(self) -> tuple[Run, Run]:
        """What is timed: by hand, and ours."""
        return Run(self.by_hand, self.batches), Run(self.runner.fill, self.batches)

    @property
    def nbytes(self) -> int:
        """Bytes that a step copies."""
        return sum(value.nbytes for value in vars(self.batches[0]).values() if isinstance(value, torch.Tensor))

    @property
    def filled(self) -> list[str]:
        """Slots that both fill: no outputs, and nothing that a graph computes."""
        declaration, computes = self.kind.declaration, self.kind.computes
        return [
            name
            for name, slot in declaration.slots.items()
            if not isinstance(slot, Output)
            and (computes or slot.computes() is None or declaration.side(name) != DEVICE)
        ]

    def verify(self) -> None:
        """Fill growing and shrinking batches both ways, from memory that is spoilt; WrongBytesError names a fault."""
        live, padded = self.kind.live, self.kind.padded
        with torch.no_grad():
            self._spoil(padded)
            for number, rows in enumerate((live, padded, live, 1, live, live)):
                batch = self.kind.batch(self.backend, rows, number % SETS)
                self._compare(self.runner.fill(batch), self.by_hand(batch), batch)
                self._spoil(rows)

    def _spoil(self, rows: int) -> None:
        """Have both write a batch that nobody else has, and then a producer what it likes into the slots it may."""
        batch, slots = self.kind.batch(self.backend, rows, SETS), self.kind.declaration.slots
        mine, other = self.runner.fill(batch), self.by_hand(batch)
        for name, slot in slots.items():
            if slot.rewritten:
                values = torch.randint(0, 100, getattr(other, name).shape, device="cpu").to(getattr(other, name))
                getattr(mine, name).copy_(values)
                getattr(other, name).copy_(values)

    def _compare(self, mine: Any, other: Any, batch: Batch) -> None:
        self.backend.synchronize()
        for name in self.filled:
            if not same_bytes(getattr(mine, name), getattr(other, name)):
                message = (
                    f"the fill of {self.kind.runner} for {self.kind.phase} and the one by hand left different bytes in "
                    f"slot {name!r}, {batch.rows}/{batch.padded} rows"
                )
                raise WrongBytesError(message)


def races(backend: Backend, scale: Scale = SERVING) -> Iterator[Race]:
    """One for each runner."""
    return (Race.of(kind, backend) for kind in kinds(scale))
