"""Recordings: the last steps of a runner are kept as they come, and written to a file when one of them fails."""

import collections
import os
import pathlib
import tempfile
import traceback
from collections.abc import Collection, Iterable
from typing import Any, Final, Self, final

import torch

from ...dataflow.capabilities import HOST
from ...dataflow.errors import ConfigError
from ...dataflow.inputs import Inputs
from ...dataflow.slots import Slot, Staged
from ...dataflow.sources import Side, look_up
from ..comparison import live_part, named
from ..config import checked, refuse
from ..hooks import Watcher
from ..runner import Runner
from .records import Raised, RecordedFile, RunnerRecord, StepRecord, Value, need, versions

_LONGEST: Final = 4000
"""The letters of an error that are kept."""


@final
class Recording(Watcher):
    """The recording of a runner's steps, from the moment `record` makes it until `close` or the end of its `with`.

    Values on the device are copied in the order of the stream, into pinned memory, and nobody waits for them. So a copy
    is what the step found, and copies that were made before a device failed can be read after it did.
    """

    def __init__(
        self, runner: Runner[Any], path: pathlib.Path, last: int, most: int, *, outputs: bool, staged: dict[str, Slot]
    ) -> None:
        self.path = path
        self.steps: collections.deque[StepRecord] = collections.deque(maxlen=last)
        self._runner = runner
        self._backend = runner.stage.backend
        self._most = most
        self._outputs = outputs
        self._staged = staged
        self._declaration = runner.stage.declaration
        self._fields = self._declaration.fields
        self._agreed = runner.agreed
        self._count = 0
        self._one = torch.ones(1, dtype=torch.uint8, device=self._backend.device)
        self._fault = ""  # why the device makes no more copies
        runner.watch.add(self)

    @property
    def nbytes(self) -> int:
        """The bytes of values that are kept now."""
        return sum(step.nbytes for step in self.steps)

    @property
    def _step(self) -> StepRecord | None:
        """The step that came last, while the device makes copies."""
        return self.steps[-1] if self.steps and not self._fault else None

    def before_fill(self, batch: Any, side: Side) -> None:
        """Keep what the batch brings, copied on the stream that the step will run on, and the runner's decision.

        The step itself says what is wrong with a batch.
        """
        if self._fault:
            return
        step, runner = StepRecord(number=self._count), self._runner
        self._count += 1
        self._agreed = runner.agreed
        self.steps.append(step)
        try:
            axes = [axis.name for axis in self._declaration.varying]
            step.live = tuple(zip(axes, runner.size(batch, side), strict=False))  # the leading axis comes last again
            step.decision = runner.decide(batch, **side)
        except Exception as error:  # noqa: BLE001 - batches and sources are the user's own
            step.note(f"nothing was decided: {type(error).__name__}: {error}"[:_LONGEST])
        try:
            sources = ((name, slot.reads(name)) for name, slot in self._declaration.slots.items())
            slots = [(name, source.read(batch, side)) for name, source in sources if source is not None]
            fields = [(name, look_up(batch, name)) for name in self._fields]
        except Exception as error:  # noqa: BLE001 - as above
            step.note(f"the batch could not be read: {type(error).__name__}: {error}"[:_LONGEST])
            return
        step.absent = tuple(name for name, value in slots if value is None)
        step.slots = self._take(step, slots)
        step.fields = self._take(step, fields)

    def filled(self, view: Inputs) -> None:
        """Keep what the ranks agreed on."""
        del view
        self._note_ranks()

    def _note_ranks(self) -> None:
        """Keep what the ranks told each other, and what they agreed on as the step's decision."""
        ranks, step = self._declaration.ranks, self._step
        if ranks is not None and step is not None and not (ranks.quiet or step.messages):
            step.messages, step.alone = ranks.said, "" if step.decision is None else step.decision.reason
            step.decision = self._runner.agreed or step.decision

    def before_replay(self, view: Inputs) -> None:
        """Copy what producers have written."""
        info = view._slotgraph_view  # noqa: SLF001 - what a fill leaves there for runners
        if self._staged and info is not None and (step := self._step) is not None:
            step.staged = ()  # of the run before
            rows = ((name, live_part(slot, vars(view)[name], info.step)) for name, slot in self._staged.items())
            step.staged = self._take(step, rows)

    def replayed(self, view: Inputs, outputs: Any) -> Any:
        """Count the run, and copy what it returned if that was asked for."""
        del view
        if (step := self._step) is not None:
            step.replays += 1
            if self._outputs:
                step.outputs = None  # of the run before
                step.outputs = self._take(step, ((f"outputs{place}", one) for place, one in named(outputs)))
        return outputs

    def failed(self, error: BaseException) -> None:
        """Write the file, and say so in a note of the error."""
        if not self.steps:
            return
        step = self.steps[-1]
        if self._runner.agreed is not self._agreed:  # the ranks agreed before it failed
            self._note_ranks()
        lines = "".join(traceback.format_tb(error.__traceback__))
        step.raised = Raised(kind=type(error).__name__, message=str(error)[:_LONGEST], traceback=lines[-_LONGEST:])
        try:
            self.save()
        except Exception as fault:  # noqa: BLE001 - it must not hide the step's own error
            error.add_note(f"slotgraph: step {step.number} could not be recorded: {fault}")
        else:
            error.add_note(f"slotgraph: the last steps are recorded in {self.path}; `slotgraph replay` runs them again")

    def save(self) -> pathlib.Path:
        """Write the steps that are kept to the file, in place of what it held, and return its path.

        It waits for the device.

        Raises:
            RecordingError: The file cannot be written, or would hold too much.
        """
        self._settle()
        notes = (f"the device failed: {self._fault}",) if self._fault else ()
        runner = RunnerRecord.of(self._runner)
        RecordedFile(versions=versions(), runner=runner, steps=tuple(self.steps), notes=notes).write(self.path)
        if self._fault:  # the file is the last that there is to say
            self.close()
        return self.path

    def close(self) -> None:
        """Record no more steps. Those that are kept can still be saved."""
        self._runner.watch.remove(self)

    def __enter__(self) -> Self:
        """Record the steps of a block, and write them at its end."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        """Write the file."""
        self.close()
        try:
            self.save()
        except Exception as fault:
            if error is None:
                raise
            error.add_note(f"slotgraph: the last steps could not be recorded: {fault}")

    def _take(self, step: StepRecord, sources: Iterable[tuple[str, Any]]) -> tuple[Value, ...]:
        """Values for the step that came last, copied if there is room for them. Without room, only their sizes.

        The oldest steps make room.
        """
        device = self._backend.device
        values = tuple(Value.of(name, source, device) for name, source in sources if source is not None)
        needed, why = step.nbytes + sum(value.nbytes for value in values), ""
        if needed > self._most:
            why = f"{needed:,} bytes are more than the {self._most:,} that max_bytes allows"
            step.note(f"only sizes are kept: {why}")
        else:
            while self.nbytes - step.nbytes + needed > self._most:
                self.steps.popleft()
            try:
                with torch.no_grad(), torch.inference_mode(mode=False):
                    self._copy([value for value in values if value.kind == "tensor"])
            except Exception as error:  # noqa: BLE001 - a device that has failed says so in many ways
                self._fault = f"{type(error).__name__}: {error}"[:_LONGEST]
                why = f"the device failed: {self._fault}"
        if why:
            for value in values:
                value.lose(why)
        return values

    def _copy(self, values: Iterable[Value]) -> None:
        """Copy tensors. Behind all of those on the device a flag is copied, which tells whether it got to them."""
        flag: torch.Tensor | None = None
        for value in values:
            source = value.elements
            if source is None:
                continue
            if source.is_cpu:
                value.elements = source.clone(memory_format=torch.contiguous_format).resolve_neg()
                continue
            if flag is None:
                flag = self._backend.empty((1,), torch.uint8, HOST).zero_()
            copied = self._backend.empty(tuple(source.shape), source.dtype, HOST)
            value.elements, value.arrived = copied.copy_(source, non_blocking=True), flag
        if flag is not None:
            flag.copy_(self._one, non_blocking=True)

    def _settle(self) -> None:
        """Wait for the device. If it has failed, give up the copies that it did not make before."""
        waiting = [value for step in self.steps for _, value in step.values() if value.arrived is not None]
        if waiting:
            try:
                self._backend.synchronize()
            except Exception as error:  # noqa: BLE001 - a device that has failed says so in many ways
                self._fault = f"{type(error).__name__}: {error}"[:_LONGEST]
        for value in waiting:
            if not value.arrived:
                value.lose(f"the device failed before it was copied: {self._fault}")
            value.arrived = None


def record(
    runner: Runner[Any],
    path: str | os.PathLike[str],
    *,
    last: int = 8,
    max_bytes: int = 1 << 28,
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
        max_bytes: How many bytes of values are kept. A step that is larger by itself leaves only its sizes.
        outputs: Keep what the steps return, too.
        staged: Slots that producers write beside the step, whose contents are kept, too.

    Raises:
        ConfigError: An argument makes no sense, or the path cannot be written.
    """
    for name, value in (("last", last), ("max_bytes", max_bytes)):
        if checked(name, "a whole number, at least 1", value, int) < 1:
            refuse(name, "a whole number, at least 1", value)
    declaration = runner.stage.declaration
    for name in staged:
        if not isinstance(declaration.slots.get(name), Staged):
            raise ConfigError(f"staged= names {name!r}, which is no staged slot of {declaration.name}")
    kept = {name: declaration.slots[name] for name in staged}
    return Recording(runner, _checked_place(path), last, max_bytes, outputs=outputs, staged=kept)


def _checked_place(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path of a file that can be written, as far as can be known now. ConfigError says why it cannot."""
    try:
        file = pathlib.Path(path)
        need(file.suffix == ".safetensors" and not file.is_dir(), "it is no .safetensors file")
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=file.name):
            return file
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path!r:.300} cannot be recorded to: {getattr(error, 'strerror', None) or error}: name a .safetensors "
            "file in a folder that you may write to"
        ) from error
