"""Recordings: the last steps of one runner, kept as they come, and written to a file when one of them fails."""

import os
import pathlib
import traceback
from collections.abc import Collection
from types import TracebackType
from typing import Any, Final, Self, final

import attrs
import torch

from ...dataflow.errors import ConfigError
from ...dataflow.inputs import Inputs
from ...dataflow.slots import Slot, Staged
from ...dataflow.sources import Side, Source, look_up
from ..outputs import map_tensors
from ..parts import Parts
from ..proofs.tails import live_part
from ..runner import Runner
from ..watching import Watcher
from .files import check_place, write
from .fingerprint import runner_record, versions
from .keeping import Copies
from .ranks import together
from .records import FORMAT, Header, Raised, StepRecord, key_of
from .window import LONGEST, Step, Window

LAST: Final = 8
"""Steps that are kept where it is not said."""
MAX_BYTES: Final = 1 << 28
"""Bytes that are kept where it is not said: 256 MiB."""


@final
class Recording(Watcher):
    """Keeps the inputs of a runner's last steps, from the moment it is made until `close`, or the end of its `with`.

    path: the file, `.safetensors`. last: steps that are kept. max_bytes: of their values; the oldest go first, and of a
    step that is larger than that by itself only the sizes are kept. outputs: keep what steps return, too. staged:
    slots that producers write beside the step, to be kept as they are when it begins. ConfigError where one of these
    makes no sense. See `record`.
    """

    def __init__(
        self,
        runner: Runner[Any],
        path: str | os.PathLike[str],
        *,
        last: int = LAST,
        max_bytes: int = MAX_BYTES,
        outputs: bool = False,
        staged: Collection[str] = (),
    ) -> None:
        self.path = check_place(path)
        _check(last, max_bytes)
        self._staged = {name: _staged_slot(runner.parts, name) for name in staged}
        self._runner = runner
        self._outputs = outputs
        parts = runner.parts
        self._window = Window(parts.stage.backend, last, max_bytes)
        self._sources, self._fields, self._size = _sources_of(parts), _fields_of(parts), parts.size
        self._axes = [axis.name for axis in parts.stage.declaration.varying]
        self._ranks, self._agreed = parts.stage.declaration.ranks, runner.agreed
        self._count = 0
        self._is_last_word = False
        runner.watch.add(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the values that are kept now."""
        return self._window.nbytes

    def before_fill(self, batch: Any, side: Side) -> None:
        """Copy what the batch brings, on the stream that the step will run on."""
        if not self._window.fault:
            step = Step(StepRecord(number=self._count))
            self._count += 1
            self._agreed = self._runner.agreed
            self._look(step, batch, side)
            self._window.steps.append(step)

    def filled(self, view: Inputs) -> None:
        """Keep what ranks agreed on."""
        del view
        self._note_ranks()

    def before_replay(self, view: Inputs) -> None:
        """Copy what producers have written."""
        info = view._slotgraph_view  # noqa: SLF001 - what a fill leaves there for runners
        if self._staged and info is not None and self._window.steps and not self._window.fault:
            step, values = self._window.steps[-1], vars(view)
            step.staged = Copies()  # of the run before
            found = [(name, live_part(slot, values[name], info.step)) for name, slot in self._staged.items()]
            step.staged = self._window.take(step, [self._window.keeper.find(*one) for one in found])

    def replayed(self, view: Inputs, outputs: Any) -> Any:
        """Count the run, and copy what it returned where that is asked for."""
        del view
        if self._window.steps and not self._window.fault:
            step = self._window.steps[-1]
            step.record = attrs.evolve(step.record, replays=step.record.replays + 1)
            if self._outputs:
                step.outputs = None  # of the run before
                step.outputs = self._window.take(step, [self._window.keeper.find(*one) for one in leaves_of(outputs)])
        return outputs

    def failed(self, error: BaseException) -> None:
        """Write the file, and tell of it in a note of the error."""
        if not self._window.steps or self._is_last_word:
            return
        step = self._window.steps[-1]
        if self._runner.agreed is not self._agreed:  # it came so far
            self._note_ranks()
        step.record = attrs.evolve(step.record, raised=_raised(error))
        try:
            self.save()
        except Exception as fault:  # noqa: BLE001 - the step's own error must not be lost for whatever this one is
            error.add_note(f"slotgraph: step {step.record.number} could not be recorded: {fault}")
        else:
            error.add_note(f"slotgraph: the last steps are recorded in {self.path}; `slotgraph replay` runs them again")

    def save(self) -> pathlib.Path:
        """Write the steps that are kept to the file, in the place of what it held; returns its path.

        Waits for the device. RecordingError where the file cannot be written, or would hold too much.
        """
        self._window.settle()
        tensors = {
            key_of(step.record.number, part, one.value.name): one.tensor
            for step in self._window
            for part, copies in step.parts()
            for one in copies.kept
            if one.tensor is not None
        }
        steps = tuple(step.finished() for step in self._window)
        notes = (f"the device failed: {self._window.fault}",) if self._window.fault else ()
        runner = runner_record(self._runner.parts)
        write(self.path, Header(format=FORMAT, versions=versions(), runner=runner, steps=steps, notes=notes), tensors)
        self._is_last_word = bool(self._window.fault)
        return self.path

    def close(self) -> None:
        """Record no more steps; those that are kept can still be saved."""
        self._runner.watch.remove(self)

    def __enter__(self) -> Self:
        """Record the steps of a block, and write them at its end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Write the file, but where the device has failed and that is written."""
        self.close()
        if self._is_last_word:
            return
        try:
            self.save()
        except Exception as fault:
            if error is None:
                raise
            error.add_note(f"slotgraph: the last steps could not be recorded: {fault}")

    def _note_ranks(self) -> None:
        """Fill in what ranks told of the step, and what they agreed on in its decision's place."""
        if self._ranks is None or not self._window.steps or self._window.fault:
            return
        step, agreed = self._window.steps[-1], None if self._ranks.quiet else self._runner.agreed
        if step.record.ranks is not None:
            return
        told = together(self._ranks, self._runner.parts.coordinator.axes, agreed, step.record.reason)
        step.record = attrs.evolve(step.record, ranks=told)
        if agreed is not None:
            step.record = attrs.evolve(step.record, path=agreed.path, bucket=agreed.bucket, reason=agreed.reason)

    def _look(self, step: Step, batch: Any, side: Side) -> None:
        """Fill in a step's record from its batch. Never raises: the step itself says what is wrong with a batch."""
        self._decide(step, batch, side)
        try:
            found = [(name, source.read(batch, side)) for name, source in self._sources]
            fields = [(name, look_up(batch, name)) for name in self._fields]
        except Exception as error:  # noqa: BLE001 - sources are the user's functions and objects
            step.note(f"the batch could not be read: {type(error).__name__}: {error}")
            return
        absent = tuple(name for name, value in found if value is None)
        if absent:
            step.record = attrs.evolve(step.record, absent=absent)
        find, take = self._window.keeper.find, self._window.take
        step.slots = take(step, [find(name, value) for name, value in found if value is not None])
        step.fields = take(step, [find(name, value) for name, value in fields if value is not None])

    def _decide(self, step: Step, batch: Any, side: Side) -> None:
        live: tuple[tuple[str, int], ...] = ()
        try:
            live = tuple(zip(self._axes, self._size(batch, side), strict=False))  # at last the leading axis once more
            decision = self._runner.decide(batch, **side)
        except Exception as error:  # noqa: BLE001 - as above
            reason = f"{type(error).__name__}: {error}"[:LONGEST]
            step.record = attrs.evolve(step.record, live=live, reason=reason)
        else:
            path, bucket, reason = decision.path, decision.bucket, decision.reason
            step.record = attrs.evolve(step.record, live=live, path=path, bucket=bucket, reason=reason)


def _sources_of(parts: Parts[Any]) -> list[tuple[str, Source]]:
    """Where a batch is looked at for copied slots."""
    slots = parts.stage.declaration.slots
    return [(name, source) for name, slot in slots.items() if (source := slot.reads(name)) is not None]


def _staged_slot(parts: Parts[Any], name: str) -> Slot:
    """A slot that producers write. ConfigError where there is none of that name."""
    slot = parts.stage.declaration.slots.get(name)
    if not isinstance(slot, Staged):
        message = f"staged= names {name!r}, which is no staged slot of {parts.stage.declaration.name}"
        raise ConfigError(message)
    return slot


def _fields_of(parts: Parts[Any]) -> list[str]:
    """Fields, and slots that are carried where a step runs eagerly."""
    own = parts.stage.declaration
    carried = [name for name in parts.eager.stage.declaration.fields if name not in own.fields]
    return [*own.fields, *(name for name in carried if own.slots[name].reads(name) is None)]


def leaves_of(outputs: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of what a step returned, in the order in which `map_tensors` finds them, by number."""
    found: list[tuple[str, torch.Tensor]] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append((str(len(found)), tensor))
        return tensor

    map_tensors(outputs, note)
    return found


def _raised(error: BaseException) -> Raised:
    lines = "".join(traceback.format_tb(error.__traceback__))
    return Raised(kind=type(error).__name__, message=str(error)[:LONGEST], traceback=lines[-LONGEST:])


def _check(last: int, max_bytes: int) -> None:
    for name, value in (("last", last), ("max_bytes", max_bytes)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            message = f"{name}= is a whole number of at least 1, got {value!r}"
            raise ConfigError(message)


def record(
    runner: Runner[Any],
    path: str | os.PathLike[str],
    *,
    last: int = LAST,
    max_bytes: int = MAX_BYTES,
    outputs: bool = False,
    staged: Collection[str] = (),
) -> Recording:
    """Keep the inputs of a runner's last steps from now on, and write them to a file when a step raises.

    The file is also written by `save()` and at the end of `with record(runner, path):`; `close()` ends the recording.
    `slotgraph replay` runs the file's steps again.

    Args:
        runner: Any runner.
        path: The file, `.safetensors`.
        last: How many steps are kept.
        max_bytes: Bytes of all that is kept. A step that is larger by itself leaves only its sizes.
        outputs: Keep what the steps return, too.
        staged: Slots that producers write beside the step, whose contents are kept, too.

    Raises:
        ConfigError: An argument makes no sense.
        RecordingError: The path cannot be written.
    """
    return Recording(runner, path, last=last, max_bytes=max_bytes, outputs=outputs, staged=staged)
