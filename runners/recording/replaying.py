"""Replaying: recorded steps run again, by the graph and eagerly, and the first places where their results differ."""

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, final

import attrs
import torch

from ...backends.base import Event
from ...dataflow.capabilities import DEVICE
from ...dataflow.declaration import Declaration
from ...dataflow.errors import CheckError, RecordingError
from ...dataflow.inputs import Inputs
from ...dataflow.sources import Answering, Call, Path, Side, Source
from ..comparison import (
    USUAL,
    Mismatch,
    Seen,
    computed_apart,
    differences,
    graph_of,
    info_of,
    live_part,
    mismatches,
    ran_eagerly,
    seen,
    slots_kept,
    state_on,
)
from ..ranks.group import HOST, Exchange, Message, Ranks
from ..runner import Runner
from ..stage import Stage
from ..statistics import Decision
from .records import RanksRecord, RecordedFile, RunnerRecord, StepRecord, Value, plain_from_text

Values = Mapping[str, Any]
UNPADDED: Final = ("graph", "eager without padding")
HOME: Final = ("here", "recorded")


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
        self._others: Sequence[Message] = ()

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "RecordedRanks":
        """Those of a file's runner. RecordingError where it is none that can be read, or its runner had no ranks."""
        file = RecordedFile.read(path)
        if file.runner.ranks is None:
            raise RecordingError(f"{file.name}: its runner had no ranks")
        return cls(file.runner.ranks)

    @contextlib.contextmanager
    def telling(self, messages: Sequence[Message]) -> Iterator[None]:
        """While a step is replayed, the others tell what they did in it."""
        self._others = messages
        try:
            yield
        finally:
            self._others = ()

    def begin(self, message: Message, told: str) -> Exchange:
        """All have told what they have to tell."""
        del told
        self.exchanges += 1
        others = self._others or [message] * self.size
        said = [attrs.evolve(one, place=message.place) for one in others]
        said[self.rank] = message
        return lambda _: said

    def wait(self, event: Event, device: torch.device, warm_up: str = "") -> None:
        """Wait until the device is past an event: no collective of it waits for another rank."""
        del device, warm_up
        event.synchronize()

    def broke_off(self, error: BaseException) -> None:
        """Nobody waits for this rank."""


@attrs.frozen(kw_only=True)
class Replayed:
    """The result of one recorded step."""

    number: int
    outcome: Literal["equal", "different", "raised", "left out"]
    decision: Decision | None = None  # of this runner, or of all ranks
    differences: tuple[Mismatch, ...] = ()  # between two runs of the step, slots before outputs
    lines: tuple[str, ...] = ()  # all that there is to say


@attrs.frozen(kw_only=True)
class ReplayReport:
    """The results of a file's steps. notes: where the runner differs from the recorded one."""

    file: str
    runner: str
    notes: tuple[str, ...]
    steps: tuple[Replayed, ...]

    @property
    def ok(self) -> bool:
        """Whether all steps that could run gave equal results."""
        return all(step.outcome in ("equal", "left out") for step in self.steps)


def replay_file(file: RecordedFile, runner: Runner[Any], only: int | None = None) -> ReplayReport:
    """Run a file's steps one after the other, or one of them alone, as `replay_step` does. The runner is captured.

    Raises:
        RecordingError: The file does not fit the runner, has no such step, or has none that can run.
    """
    theirs, ours = file.runner, RunnerRecord.of(runner)
    refused = unlike(theirs.needed, ours.needed)
    if refused:
        way = "; make it of ranks=RecordedRanks.of(file), without a process group" if theirs.ranks != ours.ranks else ""
        raise RecordingError(f"{file.name} does not fit the runner: {'; '.join(refused)}{way}")
    done = tuple(replay_step(step, runner) for step in file.only(only))
    if all(step.outcome == "left out" for step in done):
        raise RecordingError(f"{file.name} has no step that can be run: {done[-1].lines[0]}")
    return ReplayReport(file=file.name, runner=runner.name, notes=tuple(unlike(theirs.facts, ours.facts)), steps=done)


def unlike(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """What a runner has otherwise than the recorded one, a line each."""
    names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    return [f"{one}: the file has {theirs.get(one) or 'none'}, the runner {ours.get(one) or 'none'}" for one in names]


class RecordedBatch(dict[str, Any], Answering):
    """A batch made of what was recorded. It answers for functions of the batch, which are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[int, Any] = {}

    def answer(self, source: Source) -> Any:
        """What the source found when it was recorded. None if it found nothing."""
        return self.answers.get(id(source))


def batch_of(step: StepRecord, stage: Stage[Any]) -> tuple[RecordedBatch, Side]:
    """A recorded step's batch and side arguments, in memory of their own, for a runner's stage.

    Raises:
        RecordingError: The file says things of a value that cannot be true, or as `rebuilt`.
    """
    device = stage.backend.device
    slots, fields = ({one.name: _value_of(one, device) for one in part} for part in (step.slots, step.fields))
    return rebuilt(stage.declaration, slots, fields)


def rebuilt(declaration: Declaration, slots: Values, fields: Values) -> tuple[RecordedBatch, Side]:
    """The batch and the side arguments that bring given values for slots and fields.

    Raises:
        RecordingError: A slot's source is of a class of its own, or the sources of two slots exclude one another.
    """
    batch, side = RecordedBatch(), dict[str, Any]()
    batch.update(fields)
    for name, value in slots.items():
        slot = declaration.slots.get(name)
        source = None if slot is None else slot.reads(name)
        if isinstance(source, Call):
            batch.answers[id(source)] = value
        elif isinstance(source, Path):
            holder: Any = side if source.beside else batch
            *outer, last = source.parts
            for part in outer:
                holder = holder.setdefault(part, {}) if isinstance(holder, dict) else None
            if not isinstance(holder, dict) or isinstance(holder.get(last), dict):
                raise RecordingError(
                    f"slot {name!r}: its source {source} holds another source, or is inside of one: give it its own"
                )
            holder[last] = value
        elif source is not None:
            raise RecordingError(
                f"slot {name!r}: its source is a {type(source).__name__}, which a recorded batch cannot stand in for: "
                "declare a path, side(...) or a function of the batch"
            )
    return batch, side


def _value_of(value: Value, device: torch.device) -> Any:
    """What the batch brought. device: where a tensor goes that was on the device."""
    if value.kind == "plain":
        return plain_from_text(value.data)
    if value.elements is None:
        return None
    try:
        if value.kind == "array":
            return value.elements.clone().numpy()
        return value.elements.to(device if value.where == DEVICE else "cpu", copy=True)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecordingError(f"{value.name!r} is no {value.kind}: {error}") from error


def replay_step(step: StepRecord, runner: Runner[Any]) -> Replayed:
    """Run a recorded step on a runner: eagerly on its live rows, eagerly on its graph's padded slots, by its graph.

    What it changes outside of its slots is put back before each run. After the last it stays, so the next step finds
    caches as it did when it was recorded.
    """
    missing = step.missing()
    if missing:
        return Replayed(number=step.number, outcome="left out", lines=tuple(missing))
    lines = [f"field {one.name!r} is not in the file: {one}" for one in step.fields if one.why]
    if step.raised is not None:
        lines.append(f"at home it raised {step.raised.kind}: {step.raised.message}")
    before = runner.agreed
    batch, side = batch_of(step, runner.stage)
    decision: Decision | None = None
    outcome: Literal["equal", "different", "raised"] = "raised"
    found: list[list[Mismatch]] = []
    try:
        decision = runner.decide(batch, **side)
        ranks = runner.stage.declaration.ranks
        if isinstance(ranks, RecordedRanks) and not (ranks.quiet or step.messages):
            lines.append("what the other ranks told is not in the file: they are taken to bring what this one brings")
        with ranks.telling(step.messages) if isinstance(ranks, RecordedRanks) else contextlib.nullcontext():
            found = _compared(step, runner, lines)
        outcome = "different" if found else "equal"
    except Exception as error:  # noqa: BLE001 - what a step raises is a result
        lines.append(f"it raises {type(error).__name__}: {error}")
    lines += ["; ".join(map(str, apart)) for apart in found]
    return Replayed(
        number=step.number,
        outcome=outcome,
        decision=decision if runner.agreed is before else runner.agreed,
        differences=tuple(itertools.chain.from_iterable(found)),
        lines=tuple(lines),
    )


def _compared(step: StepRecord, runner: Runner[Any], lines: list[str]) -> list[list[Mismatch]]:
    """Where its runs differ here, and from the recorded one. Raises what the step raises."""
    batch, side = batch_of(step, runner.stage)  # once more: a step may write what it is given
    view, found = _staged(step, runner.fill(batch, **side)), list[Mismatch]()
    if graph_of(runner, view) is None:
        here = seen(view, runner.replay(view))
    else:
        try:
            kept: Callable[[], AbstractContextManager[None]] = state_on(runner, view).kept
        except CheckError as error:
            lines.append(f"its state is not put back between its runs, which may differ by that: {error}")
            kept = contextlib.nullcontext
        with kept():
            exact = _staged(step, runner.eager.fill(batch, **side))
            plain = seen(exact, runner.eager.run(exact))
        view = _staged(step, runner.fill(batch, **side))
        with kept(), slots_kept(runner):
            eager = seen(view, ran_eagerly(runner, view))
        here = seen(view, runner.replay(view))
        found = _apart(here, eager, plain)
    recorded = [] if step.outputs is None else list(mismatches(*_returned(here, step.outputs), USUAL, HOME, here.step))
    every = (sorted(apart, key=lambda one: not one.where.startswith("slot ")) for apart in (found, recorded))
    return [apart for apart in every if apart]


def _returned(here: Seen, outputs: Sequence[Value]) -> tuple[Values, Values]:
    """The tensors that the step returned, here and when it was recorded, but for those that the file does not have."""
    lost = {one.name for one in outputs if one.elements is None}
    mine = {name: one for name, one in here.outputs.items() if isinstance(one, torch.Tensor) and name not in lost}
    known = {one.name: one.elements for one in outputs if one.elements is not None}
    return {name: one for name, one in mine.items() if name.startswith("outputs")}, known


def _apart(graph: Seen, eager: Seen, plain: Seen) -> list[Mismatch]:
    """Where a graph differs from the step on the same padded slots, or else from the step without padding."""
    found = list(mismatches(graph.outputs, eager.outputs, step=graph.step))
    unpadded = [] if found else list(differences(graph, plain, USUAL, UNPADDED))
    if unpadded and unpadded[0].where in graph.copied:  # what the batch brought, from which all else follows
        return unpadded[:1]
    if unpadded:
        return [*unpadded, *computed_apart(graph, plain, UNPADDED)]
    return found


def _staged(step: StepRecord, view: Inputs) -> Any:
    """The view with the recorded contents of staged slots written into it, as producers did."""
    info = info_of(view)
    slots = info.declaration.slots
    for one in step.staged:
        place = live_part(slots[one.name], vars(view)[one.name], info.step) if one.name in slots else None
        if place is None or one.elements is None or place.shape != one.elements.shape:
            raise RecordingError(f"slot {one.name!r}: the file has {one}, which cannot be staged on this runner")
        with torch.no_grad():
            place.copy_(one.elements)
    return view
