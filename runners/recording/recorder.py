"""Recordings: keep the last steps of a runner, and write them to a file when one of them fails."""

import collections
import os
import pathlib
import tempfile
import traceback
from collections.abc import Iterable
from typing import Any, Final, Self, final

import attrs
import torch

from ...dataflow.capabilities import HOST
from ...dataflow.errors import ConfigError
from ...dataflow.guard import outside_inference
from ...dataflow.inputs import Inputs
from ...dataflow.slots import BY_PRODUCER
from ...dataflow.sources import Side, look_up
from ..check.trial import live_part, named
from ..engine.config import checked
from ..engine.hooks import Watcher
from ..engine.runner import ONE_RUNNER, Runner
from .records import Raised, RecordedFile, RecordedValue, RunnerRecord, StepRecord, need, versions

_LONGEST: Final = 4000  # the most characters of an error that are kept


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST]


@final
@attrs.define(eq=False, slots=False)
class Recording(Watcher):
    """The recording of a runner's steps, from `record` until `close` or the end of its `with` block.

    Values on the device are copied in stream order, into pinned memory, without a wait. So a copy has the values that
    the step read, and copies that were made before a device failed can still be read.

    Attributes:
        path: The file.
        steps: The kept steps.
    """

    _runner: Runner[Any]
    path: pathlib.Path
    steps: collections.deque[StepRecord]
    _outputs: bool
    _count: int = 0
    _fault: str = ""  # the error after which the device makes no more copies

    def __attrs_post_init__(self) -> None:
        """Begin with the next step."""
        stage = self._runner.stage
        self._backend, self._declaration, self._agreed = stage.backend, stage.declaration, self._runner.agreed
        self._one = torch.ones(1, dtype=torch.uint8, device=self._backend.device)
        self._runner.watch.add(self)

    @property
    def _step(self) -> StepRecord | None:
        """The last step, or None if the device makes no more copies."""
        return self.steps[-1] if self.steps and not self._fault else None

    def before_fill(self, batch: Any, side: Side) -> None:
        """Keep the batch's values and the runner's decision. Errors of the batch are left to the step."""
        if self._fault:
            return
        step = StepRecord(number=self._count)
        runner = self._runner
        self._count += 1
        self._agreed = runner.agreed
        self.steps.append(step)
        try:
            axes = [axis.name for axis in self._declaration.varying]
            step.live = tuple(zip(axes, runner.size(batch, side), strict=False))  # without the leading axis
            step.decision = runner.decide(batch, **side)
        except Exception as error:  # noqa: BLE001 - batches and sources are the user's own
            step.notes += (f"nothing was decided: {_text_of(error)}",)
        try:
            slots = [(name, source.read(batch, side)) for name, source in self._declaration.sources.items()]
            fields = [(name, look_up(batch, name)) for name in self._declaration.fields]
        except Exception as error:  # noqa: BLE001 - as above
            step.notes += (f"the batch could not be read: {_text_of(error)}",)
            return
        step.absent = tuple(name for name, value in slots if value is None)
        step.slots, step.fields = self._take(slots), self._take(fields)

    def filled(self, view: Inputs | None) -> None:
        """Keep the messages of the ranks, and their common decision as the step's."""
        del view
        ranks = self._declaration.ranks
        step = self._step
        if ranks is not None and step is not None and not (ranks.quiet or step.messages):
            step.messages, step.alone = ranks.messages, "" if step.decision is None else step.decision.reason
            step.decision = self._runner.agreed or step.decision

    def before_replay(self, view: Inputs) -> None:
        """Copy the slots that producers have written."""
        info = view._slotgraph_view  # noqa: SLF001 - a fill sets it for runners
        staged = [(name, slot) for name, slot in self._declaration.slots.items() if slot.writers == BY_PRODUCER]
        if staged and info is not None and (step := self._step) is not None:
            step.staged = self._take((name, live_part(slot, vars(view)[name], info.step)) for name, slot in staged)

    def replayed(self, view: Inputs, outputs: Any) -> Any:
        """Count the run, and copy its outputs if the caller asked for that."""
        del view
        if (step := self._step) is not None:
            step.replays += 1
            if self._outputs:
                step.outputs = self._take((f"outputs{place}", one) for place, one in named(outputs))
        return outputs

    def failed(self, error: BaseException) -> None:
        """Write the file, and name it in a note of the error."""
        if not self.steps:
            return
        step = self.steps[-1]
        if self._runner.agreed is not self._agreed:  # the ranks had agreed before the step failed
            self.filled(None)
        lines = "".join(traceback.format_tb(error.__traceback__))
        step.raised = Raised(kind=type(error).__name__, message=str(error)[:_LONGEST], traceback=lines[-_LONGEST:])
        try:
            self.save()
        except Exception as fault:  # noqa: BLE001 - it must not hide the step's own error
            error.add_note(f"slotgraph: step {step.number} could not be recorded: {fault}")
        else:
            error.add_note(f"slotgraph: the last steps are recorded in {self.path}; `slotgraph replay` runs them again")

    def save(self) -> pathlib.Path:
        """Write the kept steps to the file, in place of its contents, and return its path.

        It waits for the device.

        Raises:
            RecordingError: The file cannot be written, or would be too large.
        """
        waiting = [value for step in self.steps for _, value in step.values() if value.arrived is not None]
        if waiting:
            try:
                self._backend.synchronize()
            except Exception as error:  # noqa: BLE001 - devices fail in many ways
                self._fault = _text_of(error)
        for value in waiting:
            if not value.arrived:  # the device failed before it made the copy
                value.lose(f"the device failed before it was copied: {self._fault}")
            value.arrived = None
        notes = (f"the device failed: {self._fault}",) if self._fault else ()
        runner = RunnerRecord.of(self._runner)
        RecordedFile(versions=versions(), runner=runner, steps=tuple(self.steps), notes=notes).write(self.path)
        if self._fault:  # nothing will write the file later
            self.close()
        return self.path

    def close(self) -> None:
        """Record no more steps. The kept ones can still be saved."""
        self._runner.watch.remove(self)

    def __enter__(self) -> Self:
        """Return the recording. It is written at the end of the block."""
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

    def _take(self, sources: Iterable[tuple[str, Any]]) -> tuple[RecordedValue, ...]:
        """Copy values in stream order, and then a flag by which the host sees that the copies are done."""
        device = self._backend.device
        flag = None
        values = tuple(RecordedValue.of(name, source, device) for name, source in sources if source is not None)
        try:
            with torch.no_grad(), outside_inference():
                for value in values:
                    source = value.elements if value.kind == "tensor" else None
                    if source is None:
                        continue
                    if source.is_cpu:
                        value.elements = source.clone(memory_format=torch.contiguous_format).resolve_neg()
                        continue
                    if flag is None:
                        flag = self._backend.empty((1,), torch.uint8, HOST).zero_()
                    copied = self._backend.empty(tuple(source.shape), source.dtype, HOST)
                    value.elements = copied.copy_(source, non_blocking=True)
                    value.arrived = flag
                if flag is not None:
                    flag.copy_(self._one, non_blocking=True)
        except Exception as error:  # noqa: BLE001 - devices fail in many ways
            self._fault = _text_of(error)
            for value in values:
                value.lose(f"the device failed: {self._fault}")
        return values


def record(runner: Runner[Any], path: str | os.PathLike[str], *, last: int = 8, outputs: bool = False) -> Recording:
    """Keep the inputs of a runner's last steps from now on, and write them to a file when a step raises.

    The file is also written by `save()` and at the end of `with record(runner, path):`. `close()` ends the recording.
    `slotgraph replay` runs the file's steps again.

    Args:
        runner: Any runner.
        path: The file, `.safetensors`.
        last: How many steps are kept.
        outputs: Whether to keep the steps' outputs, too.

    Raises:
        ConfigError: An argument makes no sense, or the path cannot be written.
    """
    checked("runner", ONE_RUNNER, runner, Runner)
    checked("last", "a whole number, at least 1", last, int, 1)
    try:
        file = pathlib.Path(path)
        need(file.suffix == ".safetensors" and not file.is_dir(), "it is not a .safetensors file")
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=file.name):
            return Recording(runner, file, collections.deque(maxlen=last), outputs)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path!r:.300} cannot be recorded to: {getattr(error, 'strerror', None) or error}: name a .safetensors "
            "file in a folder that you may write to"
        ) from error
