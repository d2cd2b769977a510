"""Replaying: runs recorded steps again, by the graph and eagerly, and finds the first differences of the results."""

import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, final

import attrs
import torch

from ...backends.base import Event
from ...dataflow.capabilities import DEVICE
from ...dataflow.errors import CheckError, RecordingError
from ...dataflow.inputs import Inputs
from ...dataflow.shown import Shown, Table
from ..check.replays import COPIES, apart_from_step
from ..check.trial import USUAL, Trial, copies, info_of, live_part, mismatches, unwatched
from ..engine.config import checked
from ..engine.runner import ONE_RUNNER, Runner
from ..engine.sampling import Sample, rebuilt
from ..engine.stage import Stage
from ..engine.statistics import Decision
from ..ranks.group import CallSite, Exchange, Message, Ranks
from .records import RanksRecord, RecordedFile, RecordedValue, RunnerRecord, StepRecord, plain_from_text


@final
class RecordedRanks(Ranks):
    """Stands for the ranks of a recorded runner, so that one process can run it without a process group.

    While a recorded step is replayed, the other ranks seem to send their recorded messages, and at any other time the
    same message as this rank.
    """

    alone = True

    def __init__(self, record: RanksRecord) -> None:  # unlike `Ranks`, it has no group
        self.group: Any = None
        self.rank, self.size = record.rank, record.size
        self.equal, self.shards = record.equal, record.shards
        self.timeout = self.capture_timeout = math.inf  # it waits for no other rank
        self.exchanges = 0
        self.broken = None
        self.others: Sequence[Message] = ()  # the recorded messages, while a step is replayed

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "RecordedRanks":
        """Return the ranks of a file's runner.

        Raise RecordingError if the file is invalid, or its runner had no ranks.
        """
        file = RecordedFile.read(path)
        if file.runner.ranks is None:
            raise RecordingError(f"{file.name}: its runner had no ranks")
        return cls(file.runner.ranks)

    def begin(self, message: Message, site: CallSite, timeout: float, loop: int = 0) -> Exchange:
        """Receive the recorded messages at once."""
        del site, timeout, loop
        self.exchanges += 1
        messages = [attrs.evolve(one, place=message.place) for one in self.others or [message] * self.size]
        messages[self.rank] = message
        return lambda: messages

    def wait(self, event: Event, device: torch.device, what: str, seconds: float, *, together: bool) -> None:
        """Wait until the device has passed an event. No collective on it waits for another rank."""
        del device, what, seconds, together
        event.synchronize()

    def stop(self, answer: int, text: str, loop: int = 0, *, is_new: bool = False) -> str:
        """Leave a loop. No other rank waits for this one."""
        del answer, text, is_new
        self.open_loops &= ~loop
        return ""


@attrs.frozen(kw_only=True)
class Replayed:
    """The result of one recorded step."""

    number: int
    outcome: Literal["equal", "different", "raised", "left out"]
    decision: Decision | None = None  # the decision of the runner, or of all ranks
    lines: tuple[str, ...] = ()  # notes first, then differences


@attrs.frozen(kw_only=True, repr=False)
class ReplayReport(Shown):
    """The results of a file's steps.

    Attributes:
        notes: How the runner differs from the recorded one.
    """

    file: str
    runner: str
    notes: tuple[str, ...]
    steps: tuple[Replayed, ...]

    @property
    def ok(self) -> bool:
        """Whether all steps that could run gave equal results."""
        return all(step.outcome in ("equal", "left out") for step in self.steps)

    def tables(self) -> Iterator[Table]:
        """Yield a row a step, and below them the differences."""
        notes = [f"note: {note}" for note in self.notes]
        notes += [f"step {one.number}: {line}" for one in self.steps for line in one.lines]
        results = [
            {**_decided(step), "result": step.outcome, "why": step.decision and step.decision.reason}
            for step in self.steps
        ]
        yield Table(f"{self.file} on {self.runner}", results, "\n".join(notes))


def replay_file(file: RecordedFile, runner: Runner[Any], only: int | None = None) -> ReplayReport:
    """Run a file's steps one after the other, or only one of them, as `replay_step` does. The runner must be captured.

    Raises:
        RecordingError: The file does not fit the runner, has no such step, or has none that can run.
    """
    checked("file", "a RecordedFile, as RecordedFile.read(path) gives it", file, RecordedFile)
    checked("runner", ONE_RUNNER, runner, Runner)
    theirs = file.runner
    ours = RunnerRecord.of(runner)
    refused = unlike(theirs.needed, ours.needed)
    if refused:
        way = "; make it of ranks=RecordedRanks.of(file), without a process group" if theirs.ranks != ours.ranks else ""
        raise RecordingError(f"{file.name} does not fit the runner: {'; '.join(refused)}{way}")
    done = tuple(replay_step(step, runner) for step in file.only(only))
    if all(step.outcome == "left out" for step in done):
        raise RecordingError(f"{file.name} has no step that can be run: {done[-1].lines[0]}")
    return ReplayReport(file=file.name, runner=runner.name, notes=tuple(unlike(theirs.facts, ours.facts)), steps=done)


def unlike(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """Return a line for each difference of a runner from the recorded one."""
    names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    return [f"{one}: the file has {theirs.get(one) or 'none'}, the runner {ours.get(one) or 'none'}" for one in names]


def batch_of(step: StepRecord, stage: Stage[Any]) -> Sample:
    """Make a recorded step's batch, in memory of its own.

    Raise RecordingError if a value cannot be made, as `rebuilt` does.
    """
    slots, fields = ({one.name: _value_of(one, stage) for one in part} for part in (step.slots, step.fields))
    return rebuilt(stage.declaration, slots, fields)


def _value_of(value: RecordedValue, stage: Stage[Any]) -> Any:
    """Return the batch's value. A tensor that was on the device goes to the stage's device."""
    if value.kind == "plain":
        return plain_from_text(value.data)
    if value.elements is None:
        return None
    try:
        if value.kind == "array":
            return value.elements.clone().numpy()
        return value.elements.to(stage.backend.device if value.where == DEVICE else "cpu", copy=True)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecordingError(f"{value.name!r} is not a {value.kind}: {error}") from error


def replay_step(step: StepRecord, runner: Runner[Any]) -> Replayed:
    """Compare a recorded step's graph with the step, as the check `parity` does, then run it and compare with the file.

    Of the changes outside of its slots, only those of the last run are kept, for the next step.
    """
    missing = step.missing()
    if missing:
        return Replayed(number=step.number, outcome="left out", lines=tuple(missing))
    lines = [f"field {one.name!r} is not in the file: {one}" for one in step.fields if one.why]
    if step.raised is not None:
        lines.append(f"at home it raised {step.raised.kind}: {step.raised.message}")
    before = runner.agreed
    stage = runner.stage
    decision = None
    outcome: Literal["equal", "different", "raised"] = "raised"
    one = batch_of(step, stage)
    ranks = stage.declaration.ranks
    recorded = ranks if isinstance(ranks, RecordedRanks) else None
    try:
        decision = runner.decide(one.batch, **one.side)
        if recorded is not None:
            recorded.others = step.messages
            if not (recorded.quiet or step.messages):
                lines.append(
                    "the other ranks' messages are not in the file: they are assumed to have the same batches as this "
                    "one"
                )
        apart = _apart(step, runner, lines)
        outcome = "different" if apart else "equal"
        lines += apart
    except Exception as error:  # noqa: BLE001 - what a step raises is a result
        lines.append(f"it raises {type(error).__name__}: {error}")
    finally:
        if recorded is not None:
            recorded.others = ()
    agreed = decision if runner.agreed is before else runner.agreed
    return Replayed(number=step.number, outcome=outcome, decision=agreed, lines=tuple(lines))


def _apart(step: StepRecord, runner: Runner[Any], lines: list[str]) -> list[str]:
    """Find differences between graph and step, and between graph and file.

    Raises the errors of the step.
    """
    found = list[str]()
    produce = functools.partial(_produce, step)
    if runner.graphs is not None:
        trial = Trial(runner, runner.graphs, produce=produce)
        trial.fill(batch_of(step, runner.stage))
        if trial.graph is not None:
            try:
                trial.state = trial.find_state()
                trial.state.check_room(COPIES)
            except CheckError as error:
                lines.append(f"its graph is not compared with the step: {error}")
            else:
                with unwatched(runner.watch):
                    finding = apart_from_step(trial, batch_of(step, runner.stage))  # a step may write its batch
                found += [] if finding is None else [finding.message]
    one = batch_of(step, runner.stage)
    view = runner.fill(one.batch, **one.side)
    produce(view)
    view = runner.fill(one.batch, **one.side)  # functions on the host may read what producers wrote
    outputs = copies(runner.replay(view), "outputs")
    if step.outputs is not None:
        known = {one.name: one.elements for one in step.outputs if one.elements is not None}
        for lost in (one.name for one in step.outputs if one.why):
            outputs.pop(lost, None)
        apart = [*mismatches(outputs, known, USUAL, ("here", "recorded"), info_of(view).step)]
        found += ["; ".join(map(str, apart))] if apart else []
    return found


def _produce(step: StepRecord, view: Inputs) -> None:
    """Write the recorded contents of staged slots into a view, as producers did."""
    info = info_of(view)
    for one in step.staged:
        slot = info.declaration.slots.get(one.name)
        place = None if slot is None else live_part(slot, vars(view)[one.name], info.step)
        if place is None or one.elements is None or place.shape != one.elements.shape:
            raise RecordingError(f"slot {one.name!r}: the file has {one}, which cannot be staged on this runner")
        with torch.no_grad():
            place.copy_(one.elements)


def tables_of(found: RecordedFile | StepRecord) -> Iterator[Table]:
    """Return tables of a file and its last step, or of one step."""
    if isinstance(found, StepRecord):
        yield _shown_step(found, "" if found.raised is None else found.raised.traceback)
    else:
        facts = found.runner.facts
        ranks = found.runner.ranks
        rows = [
            {
                **_decided(step),
                "live": dict(step.live),
                "absent": step.absent,
                "values": f"{len(step.slots) - len(step.missing())} of {len(step.slots)}",
                "outputs": None if step.outputs is None else len(step.outputs),
                "replays": step.replays,
                "raised": step.raised and step.raised.kind,
            }
            for step in found.steps
        ]
        title = f"{found.name}: {facts.get('kind')} over {facts.get('inputs')} on {facts.get('backend')}"
        title += "" if ranks is None else f", rank {ranks.rank} of {ranks.size}"
        recorded = ", ".join(f"{name} {version}" for name, version in found.versions.items())
        yield Table(title, rows, "\n".join((f"recorded with {recorded}", *found.notes)))
        for last in found.steps[-1:]:
            yield _shown_step(last, f"where it was raised: --step {last.number}")


def _decided(step: StepRecord | Replayed) -> dict[str, Any]:
    decision = step.decision
    return {"step": step.number, "path": decision and decision.path, "bucket": decision and decision.bucket}


def _shown_step(step: StepRecord, place: str) -> Table:
    """Return a table of one step's batch. place: The line of the error."""
    rows = [{"slot or field": one.name, "what it brought": str(one)} for one in (*step.slots, *step.fields)]
    lines = list(step.notes)
    if step.messages:
        brought = "; ".join(", ".join(map(str, one.live[: len(step.live)])) for one in step.messages)
        lines.append(f"ranks brought {brought}; alone, this one: {step.alone}")
    if step.raised is not None:
        lines += [f"it raised {step.raised.kind}: {step.raised.message}", place]
    decided = "no decision" if step.decision is None else step.decision.reason
    return Table(f"step {step.number}: {decided}", rows, "\n".join(lines))
