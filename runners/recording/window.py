"""The window: the last steps that are kept, within so many bytes."""

import collections
from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from ...backends.base import Backend
from .keeping import Copies, Found, Keeper
from .records import Part, StepRecord

LONGEST: Final = 4000
"""Letters that are kept of what an error says."""


@attrs.define(eq=False)
class Step:
    """A step that is kept: its record, filled in as it goes on, and copies of its values."""

    record: StepRecord
    slots: Copies = attrs.field(factory=Copies)
    fields: Copies = attrs.field(factory=Copies)
    staged: Copies = attrs.field(factory=Copies)
    outputs: Copies | None = None

    def parts(self) -> list[tuple[Part, Copies]]:
        """The copies of each part of the step."""
        inputs: list[tuple[Part, Copies]] = [("slots", self.slots), ("fields", self.fields), ("staged", self.staged)]
        return inputs if self.outputs is None else [*inputs, ("outputs", self.outputs)]

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(one.nbytes for _, one in self.parts())

    def note(self, text: str) -> None:
        """Say something of the step in the file."""
        self.record = attrs.evolve(self.record, notes=(*self.record.notes, text[:LONGEST]))

    def finished(self) -> StepRecord:
        """The record with what became of each value."""
        values = {part: tuple(one.value for one in copies.kept) for part, copies in self.parts()}
        return attrs.evolve(self.record, **values)  # type: ignore[arg-type] # parts are fields of the record


class Window:
    """Keeps `last` steps, and `most` bytes of their values at any time; the oldest steps go first.

    fault: why the device makes no more copies, once it has failed.
    """

    def __init__(self, backend: Backend, last: int, most: int) -> None:
        self._backend = backend
        self._most = most
        self.keeper = Keeper(backend, most)
        self.steps: collections.deque[Step] = collections.deque(maxlen=last)
        self.fault = ""

    @property
    def nbytes(self) -> int:
        """Bytes that are kept now."""
        return sum(step.nbytes for step in self.steps)

    def __iter__(self) -> Iterator[Step]:
        """The steps, the oldest first."""
        return iter(self.steps)

    def take(self, step: Step, found: Sequence[Found]) -> Copies:
        """Copies of values for a step, where there is room for all of them; else their sizes."""
        nbytes, before = sum(one.nbytes for one in found), step.nbytes
        if before + nbytes > self._most:
            why = f"{before + nbytes:,} bytes are more than the {self._most:,} that max_bytes allows"
            step.note(f"only sizes are kept: {why}")
            return Copies.sizes_of(found, why)
        own = 0 if step in self.steps else before
        while self.steps and self.nbytes + own + nbytes > self._most:
            self.steps.popleft()
        try:
            return self.keeper.keep(found)
        except Exception as error:  # noqa: BLE001 - a device that has failed says so in many ways
            self.fail(error)
            return Copies.sizes_of(found, f"the device failed: {self.fault}")

    def fail(self, error: Exception) -> None:
        """The device has failed: what it has copied is all there will be."""
        self.fault = f"{type(error).__name__}: {error}"[:LONGEST]

    def settle(self) -> None:
        """Wait for the device; where it has failed, give up the copies that it did not make before."""
        if not any(copies.arrived is not None for step in self for _, copies in step.parts()):
            return
        try:
            self._backend.synchronize()
        except Exception as error:  # noqa: BLE001 - as above
            self.fail(error)
        for step in self:
            for _, copies in step.parts():
                copies.give_up(f"the device failed before it was copied: {self.fault}")
