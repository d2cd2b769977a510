"""Replaying: recorded steps run again, by the graph and eagerly, and the first places where their results differ."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, TypeAlias

import attrs
import torch

from ...dataflow.capabilities import DEVICE
from ...dataflow.declaration import Declaration
from ...dataflow.errors import CheckError, RecordingError
from ...dataflow.inputs import Inputs
from ...dataflow.sources import Answering, Call, Path, Side, SideArgument, Source
from ..check.comparison import (
    BITWISE,
    GRAPH_AND_EAGER,
    USUAL,
    Mismatch,
    Seen,
    computed_apart,
    first_difference,
    live_part,
    seen,
    step_of,
)
from ..check.comparison import differences as differences_of
from ..check.trial import graph_of, ran_eagerly, slots_kept, state_on
from ..decision import Decision
from ..parts import Parts
from ..runner import Runner
from ..stage import Stage
from .files import RecordedFile
from .ranks import RecordedRanks
from .records import LIST_DIMS, RunnerRecord, StepRecord, Value, plain_from_data

Outcome: TypeAlias = Literal["equal", "different", "raised", "left out"]
Values: TypeAlias = Mapping[str, Any]
UNPADDED: Final = ("graph", "eager without padding")
HOME: Final = ("here", "recorded")
_SLOT: Final = "slot "


@attrs.frozen(kw_only=True)
class Difference:
    """Where two runs of a step first differ."""

    between: tuple[str, str]
    where: str  # the slot or the output
    row: int | None  # None if it has no rows, or shapes differ
    index: tuple[int, ...]
    values: tuple[Any, Any]
    text: str  # all of that, and further differences


@attrs.frozen(kw_only=True)
class Replayed:
    """The result of one recorded step."""

    number: int
    outcome: Outcome
    path: str = ""  # the decision of this runner, or of all ranks
    bucket: int | None = None
    reason: str = ""
    differences: tuple[Difference, ...] = ()
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
    refused, noted = differences(file.header.runner, runner.parts)
    if refused:
        message = f"{name} does not fit the runner: {'; '.join(refused)}"
        raise RecordingError(message)
    steps = [step for step in file.header.steps if only is None or step.number == only]
    if not steps:
        known = ", ".join(str(step.number) for step in file.header.steps) or "none"
        none = f"{name} has no steps: none was run while it was recorded"
        message = none if only is None else f"{name} has no step {only}: it has {known}"
        raise RecordingError(message)
    done = tuple(replay_step(step, runner) for step in steps)
    if all(step.outcome == "left out" for step in done):
        message = f"{name} has no step that can be run: {done[-1].lines[0]}"
        raise RecordingError(message)
    return ReplayReport(file=name, runner=runner.parts.name, notes=tuple(noted), steps=done)


def differences(theirs: RunnerRecord, parts: Parts[Any]) -> tuple[list[str], list[str]]:
    """Where a runner differs from the recorded one: what keeps its steps from running, and what is worth a note."""
    ours, slots = RunnerRecord.of(parts), parts.stage.declaration.slots
    needed = {f"slot {name!r}": slot.optional for name, slot in slots.items() if slot.reads(name) is not None}
    old, new = ({"kind": one.kind, "inputs": one.inputs, "backend": one.backend, **one.facts} for one in (theirs, ours))
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

    def __init__(self, names: Values, answers: Mapping[int, Any]) -> None:
        super().__init__(names)
        self._answers = answers

    def answer(self, source: Source) -> Any:
        """What the source found when it was recorded. None if it found nothing."""
        return self._answers.get(id(source))


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
    names: dict[str, Any] = dict(fields)
    side: dict[str, Any] = {}
    answers: dict[int, Any] = {}
    for name, value in slots.items():
        slot = declaration.slots.get(name)
        match None if slot is None else slot.reads(name):
            case None:
                continue
            case Path(parts):
                _put(names, parts, value, name)
            case SideArgument(parts):
                _put(side, parts, value, name)
            case Call() as source:
                answers[id(source)] = value
            case source:
                message = (
                    f"slot {name!r}: its source is a {type(source).__name__}, which a recorded batch cannot stand in "
                    "for: declare a path, side(...) or a function of the batch"
                )
                raise RecordingError(message)
    return RecordedBatch(names, answers), side


class _Made(dict[str, Any]):
    """A mapping that was made to hold what dotted paths lead to."""


def _put(names: dict[str, Any], parts: tuple[str, ...], value: Any, slot: str) -> None:
    """Put a value at a dotted path of nested mappings."""
    *outer, last = parts
    for part in outer:
        inner = names.get(part, {})
        if not isinstance(inner, dict):
            raise RecordingError(_TWICE.format(slot, part))
        names[part] = inner if isinstance(inner, _Made) else _Made(inner)
        names = names[part]
    if isinstance(names.get(last), _Made):
        raise RecordingError(_TWICE.format(slot, last))
    names[last] = value


_TWICE: Final = (
    "slot {!r}: {!r} holds another source, and what is inside of it another still: give it a path of its own"
)


def _value_of(value: Value, device: torch.device) -> Any:
    """What the batch brought. device: where a tensor goes that was on the device."""
    if value.kind == "plain":
        return plain_from_data(value.value)
    if value.elements is None:
        return None
    try:
        if value.kind == "array":
            return value.elements.clone().numpy()
        if value.kind == "tensor":
            there = value.elements.to(device if value.where == DEVICE else "cpu", copy=True)
            return there if value.dense else torch.stack([there, there], -1)[..., 0]
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"{value.name!r} is no {value.kind}: {error}"
        raise RecordingError(message) from error
    if 0 in value.shape or not 0 < len(value.shape) <= LIST_DIMS:  # lists that could take far more than their numbers
        message = f"{value.name!r} is no {value.kind} of numbers: its shape is {list(value.shape)}"
        raise RecordingError(message)
    rows = value.elements.tolist()
    return rows if value.kind == "list" else tuple(rows)


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
        lines += [one.text for one in found]
        done = attrs.evolve(done, outcome="different" if found else "equal", differences=tuple(found))
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


def _compared(step: StepRecord, runner: Runner[Any], lines: list[str]) -> list[Difference]:
    """Run it in every way, and compare. Raises what the step raises."""
    parts = runner.parts
    batch, side = batch_of(step, parts.stage)  # once more: a step may write what it is given
    view = _staged(step, runner.fill(batch, **side))
    found = None
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
        found = _first(here, eager, plain)
    recorded = _recorded(step, here)
    apart = [] if recorded is None else list(differences_of(here, recorded, tolerance=USUAL, names=HOME))
    return [one for one in (found, _difference(apart)) if one is not None]


def _staged(step: StepRecord, view: Inputs) -> Any:
    """The view with the recorded contents of staged slots written into it, as producers did."""
    info = view._slotgraph_view  # noqa: SLF001 - what a fill leaves there for runners
    slots = {} if info is None else info.declaration.slots
    for one in step.staged:
        place = live_part(slots[one.name], vars(view)[one.name], step_of(view)) if one.name in slots else None
        if place is None or one.elements is None or place.shape != one.elements.shape:
            message = f"slot {one.name!r}: the file has {one}, which cannot be staged on this runner"
            raise RecordingError(message)
        with torch.no_grad():
            place.copy_(one.elements)
    return view


def _keeping(runner: Runner[Any], view: Inputs, lines: list[str]) -> Callable[[], AbstractContextManager[None]]:
    """What puts the step's state back after a block."""
    try:
        return state_on(runner, view).kept
    except CheckError as error:
        lines.append(f"its state is not put back between its runs, which may differ by that: {error}")
        return contextlib.nullcontext


def _recorded(step: StepRecord, here: Seen) -> Seen | None:
    """What the step returned when it was recorded, named as what it returns here. None if the file does not say."""
    if step.outputs is None:
        return None
    slots = {f"{_SLOT}{name!r}" for name in here.declared}
    names = [name for name, one in here.outputs.items() if isinstance(one, torch.Tensor) and name not in slots]
    if len(names) != len(step.outputs):
        return attrs.evolve(here, outputs={"outputs": f"{len(step.outputs)} tensors"})
    pairs = zip(names, step.outputs, strict=True)
    known = {name: one.elements for name, one in pairs if one.elements is not None}
    return attrs.evolve(here, outputs={**here.outputs, **known})


def _first(graph: Seen, eager: Seen, plain: Seen) -> Difference | None:
    """Where a graph differs from the step on the same padded slots, or else from the step without padding."""
    found = _difference(list(differences_of(graph, eager, tolerance=BITWISE, names=GRAPH_AND_EAGER)))
    first = first_difference(graph, plain, tolerance=USUAL, names=UNPADDED)
    if found is not None or first is None:
        return found
    if first.slot is not None:  # a slot that the batch brought, from which all else follows
        return _difference([first])
    apart = list(differences_of(graph, plain, tolerance=USUAL, names=UNPADDED))
    return _difference(apart, computed_apart(graph, plain, UNPADDED))


def _difference(apart: Sequence[Mismatch], more: Sequence[Mismatch] = ()) -> Difference | None:
    """What a comparison found, slots before outputs. None if that is nothing."""
    if not apart:
        return None
    every = sorted(apart, key=lambda one: not one.where.startswith(_SLOT))
    first, text = every[0], "; ".join(map(str, [*every, *more]))
    return Difference(
        between=first.names, where=first.where, row=first.row, index=first.index or (), values=first.values, text=text
    )
