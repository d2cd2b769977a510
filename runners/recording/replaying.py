"""Replaying: recorded steps run again, by the graph and eagerly, and the first places where their results differ."""

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal

import attrs
import torch

from ...dataflow.capabilities import DEVICE
from ...dataflow.declaration import Declaration
from ...dataflow.errors import CheckError, RecordingError
from ...dataflow.inputs import Inputs
from ...dataflow.sources import Answering, Call, Path, Side, SideArgument, Source
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
from ..decision import Decision
from ..parts import Parts
from ..runner import Runner
from ..stage import Stage
from .files import RecordedFile
from .ranks import RecordedRanks
from .records import RunnerRecord, StepRecord, Value, plain_from_text

Values = Mapping[str, Any]
UNPADDED: Final = ("graph", "eager without padding")
HOME: Final = ("here", "recorded")


@attrs.frozen(kw_only=True)
class Replayed:
    """The result of one recorded step."""

    number: int
    outcome: Literal["equal", "different", "raised", "left out"]
    path: str = ""  # the decision of this runner, or of all ranks
    bucket: int | None = None
    reason: str = ""
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
    name = file.path.name
    refused, noted = unlike(file.header.runner, runner.parts)
    if refused:
        raise RecordingError(f"{name} does not fit the runner: {'; '.join(refused)}")
    done = tuple(replay_step(step, runner) for step in file.steps(only))
    if all(step.outcome == "left out" for step in done):
        raise RecordingError(f"{name} has no step that can be run: {done[-1].lines[0]}")
    return ReplayReport(file=name, runner=runner.parts.name, notes=tuple(noted), steps=done)


def unlike(theirs: RunnerRecord, parts: Parts[Any]) -> tuple[list[str], list[str]]:
    """Where a runner differs from the recorded one: what keeps its steps from running, and what is worth a note."""
    ours, slots = RunnerRecord.of(parts), parts.stage.declaration.slots
    needed = {f"slot {name!r}": slot.optional for name, slot in slots.items() if slot.reads(name) is not None}
    old, new = theirs.facts, ours.facts
    refused: list[str] = []
    noted: list[str] = []
    for name in dict.fromkeys([*old, *new]):
        is_shared = name in old and name in new
        line = f"{name}: the file has {old.get(name) or 'none'}, the runner {new.get(name) or 'none'}"
        if old.get(name) == new.get(name) or (not is_shared and ":" in name):  # more of a slot that one does not have
            continue
        must = is_shared and name.startswith("size of ")
        if name in needed:
            must = is_shared or not needed[name]
        elif name == "ranks":
            must = theirs.ranks is not None or (ours.ranks is not None and ours.ranks.size > 1)
            line += "; make it of ranks=RecordedRanks.of(file), without a process group" if theirs.ranks else ""
        (refused if must else noted).append(line)
    return refused, noted


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
        elif isinstance(source, Path | SideArgument):
            holder: dict[str, Any] = batch if isinstance(source, Path) else side
            *outer, last = source.parts
            for part in outer:
                inner = holder.get(part, {})
                if not isinstance(inner, dict):
                    break
                holder[part] = holder = {**inner}
            else:
                if not isinstance(holder.get(last), dict):
                    holder[last] = value
                    continue
            raise RecordingError(
                f"slot {name!r}: its source {source} holds another source, or is inside of one: give it its own"
            )
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
        there = value.elements.to(device if value.where == DEVICE else "cpu", copy=True)
        return there if value.dense else torch.stack([there, there], -1)[..., 0]
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
    batch, side = batch_of(step, runner.parts.stage)
    done = Replayed(number=step.number, outcome="raised")
    before = runner.agreed
    try:
        done = _decided(done, runner.decide(batch, **side))
        with _others_of(step, runner.parts, lines):
            found = _compared(step, runner, lines)
    except Exception as error:  # noqa: BLE001 - what a step raises is a result
        lines.append(f"it raises {type(error).__name__}: {error}")
    else:
        lines += ["; ".join(map(str, apart)) for apart in found]
        apart = tuple(itertools.chain.from_iterable(found))
        done = attrs.evolve(done, outcome="different" if found else "equal", differences=apart)
    if runner.agreed is not None and runner.agreed is not before:
        done = _decided(done, runner.agreed)
    return attrs.evolve(done, lines=tuple(lines))


def _decided(done: Replayed, decision: Decision) -> Replayed:
    return attrs.evolve(done, path=decision.path, bucket=decision.bucket, reason=decision.reason)


def _others_of(step: StepRecord, parts: Parts[Any], lines: list[str]) -> AbstractContextManager[None]:
    """A block in which the other ranks tell what they told in this step, if there were any."""
    ranks = parts.stage.declaration.ranks
    if not isinstance(ranks, RecordedRanks):
        return contextlib.nullcontext()
    if step.ranks is None:
        lines.append("what the other ranks told is not in the file: they are taken to bring what this one brings")
    return ranks.telling(step, parts.coordinator.axes)


def _compared(step: StepRecord, runner: Runner[Any], lines: list[str]) -> list[list[Mismatch]]:
    """Where its runs differ here, and from the recorded one. Raises what the step raises."""
    parts = runner.parts
    batch, side = batch_of(step, parts.stage)  # once more: a step may write what it is given
    view, found = _staged(step, runner.fill(batch, **side)), list[Mismatch]()
    if graph_of(parts, view) is None:
        here = seen(view, runner.replay(view))
    else:
        kept = _keeping(runner, view, lines)
        with kept():
            exact = _staged(step, parts.eager.fill(batch, **side))
            plain = seen(exact, parts.eager.run(exact))
        view = _staged(step, runner.fill(batch, **side))
        with kept(), slots_kept(parts):
            eager = seen(view, ran_eagerly(parts, view))
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


def _keeping(runner: Runner[Any], view: Inputs, lines: list[str]) -> Callable[[], AbstractContextManager[None]]:
    """What puts the step's state back after a block."""
    try:
        return state_on(runner.parts, view).kept
    except CheckError as error:
        lines.append(f"its state is not put back between its runs, which may differ by that: {error}")
        return contextlib.nullcontext
