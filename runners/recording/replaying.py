"""Replaying: recorded steps run again, by the graph and eagerly, and where their results differ first."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, TypeAlias

import attrs
import torch

from ...dataflow.errors import CheckError, RecordingError
from ...dataflow.inputs import Inputs
from ..decision import Decision
from ..proofs.comparison import GRAPH_AND_EAGER, USUAL, Mismatch, Seen, computed_apart, first_difference, seen
from ..proofs.comparison import differences as differences_of
from ..proofs.eagerly import graph_of, ran_eagerly
from ..proofs.parity import BITWISE, written_slots_kept
from ..proofs.replays import step_of
from ..proofs.state import state_on
from ..proofs.tails import live_part
from ..runner import Runner
from .files import RecordedFile
from .fingerprint import Differences, differences
from .ranks import RecordedRanks
from .rebuilding import batch_of
from .records import StepRecord, key_of

Outcome: TypeAlias = Literal["equal", "different", "raised", "left out"]
UNPADDED: Final = ("graph", "eager without padding")
HOME: Final = ("here", "recorded")
_SLOT: Final = "slot "


@attrs.frozen(kw_only=True)
class Difference:
    """Where two runs of a step part first.

    between: which two. where: the slot or the output. row: of its first dim, None where it has none or shapes differ.
    index: all of the place. values: those of both. text: that, and what else parts.
    """

    between: tuple[str, str]
    where: str
    row: int | None
    index: tuple[int, ...]
    values: tuple[Any, Any]
    text: str

    @classmethod
    def of(cls, found: Sequence[Mismatch]) -> "Difference | None":
        """What a comparison found, slots before what was returned; None where that is nothing."""
        every = sorted(found, key=lambda one: not one.where.startswith(_SLOT))
        if not every:
            return None
        first, text = every[0], "; ".join(map(str, every))
        between, index = first.names, first.index or ()
        return cls(between=between, where=first.where, row=first.row, index=index, values=first.values, text=text)


@attrs.frozen(kw_only=True)
class Replayed:
    """What became of one recorded step.

    path, bucket, reason: this runner's own decision, that of all ranks where there are some. lines: all there is to say
    of it.
    """

    number: int
    outcome: Outcome
    path: str = ""
    bucket: int | None = None
    reason: str = ""
    differences: tuple[Difference, ...] = ()
    lines: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class ReplayReport:
    """What a file's steps came to.

    notes: where the runner differs from the recorded one, though its steps can be run.
    """

    file: str
    runner: str
    notes: tuple[str, ...]
    steps: tuple[Replayed, ...]

    @property
    def ok(self) -> bool:
        """Whether every step that could be run was the same in all ways."""
        return all(step.outcome in ("equal", "left out") for step in self.steps)


def replay_file(file: RecordedFile, runner: Runner[Any], only: int | None = None) -> ReplayReport:
    """Run a file's steps one after the other, or one of them alone, as `Replayer` does; the runner is captured.

    RecordingError where the file does not fit the runner, has no such step, or has none that can be run.
    """
    found = differences(file.header.runner, runner.parts)
    _check_fits(file, found)
    steps = [step for step in file.header.steps if only is None or step.number == only]
    if not steps:
        known = ", ".join(str(step.number) for step in file.header.steps) or "none"
        message = f"{file.path.name} has no step {only}: it has {known}" if only is not None else _empty(file)
        raise RecordingError(message)
    replayer = Replayer(runner)
    done = tuple(replayer.run(step, file.tensors(step)) for step in steps)
    if all(step.outcome == "left out" for step in done):
        message = f"{file.path.name} has no step that can be run: {done[-1].lines[0]}"
        raise RecordingError(message)
    return ReplayReport(file=file.path.name, runner=runner.parts.name, notes=found.noted, steps=done)


def _empty(file: RecordedFile) -> str:
    return f"{file.path.name} has no steps: none was run while it was recorded"


def _check_fits(file: RecordedFile, found: Differences) -> None:
    if found.refused:
        lines = "; ".join(found.refused)
        message = f"{file.path.name} does not fit the runner: {lines}"
        raise RecordingError(message)


class Replayer:
    """Runs recorded steps on a runner.

    A step is run eagerly with its live rows alone, eagerly on the padded slots that its graph reads, and by its graph.
    What it changes outside of its slots is put back before each, and stays after the last: so the next step finds the
    caches as they were at home.
    """

    def __init__(self, runner: Runner[Any]) -> None:
        self._runner = runner
        self._parts = runner.parts

    def run(self, step: StepRecord, tensors: Mapping[str, torch.Tensor]) -> Replayed:
        """One step, from its record and the elements of its values."""
        missing = step.missing()
        if missing:
            return Replayed(number=step.number, outcome="left out", lines=tuple(missing))
        lines = [f"field {one.name!r} is not in the file: {one}" for one in step.fields if one.is_lost]
        if step.raised is not None:
            lines.append(f"at home it raised {step.raised.kind}: {step.raised.message}")
        done = Replayed(number=step.number, outcome="raised")
        batch, side = batch_of(step, tensors, self._parts.stage)
        before = self._runner.agreed
        try:
            done = _by(done, self._runner.decide(batch, **side))
            with self._among_ranks(step, lines):
                found = self._compared(step, tensors, lines)
        except Exception as error:  # noqa: BLE001 - what a step raises is a result
            lines.append(f"it raises {type(error).__name__}: {error}")
            return attrs.evolve(self._agreed(done, before), lines=tuple(lines))
        done = self._agreed(done, before)
        outcome: Outcome = "different" if found else "equal"
        lines += [one.text for one in found]
        return attrs.evolve(done, outcome=outcome, differences=tuple(found), lines=tuple(lines))

    def _among_ranks(self, step: StepRecord, lines: list[str]) -> AbstractContextManager[None]:
        """The other ranks of the step, where it had some."""
        ranks = self._parts.stage.declaration.ranks
        if not isinstance(ranks, RecordedRanks):
            return contextlib.nullcontext()
        if step.ranks is None:
            lines.append("what the other ranks told is not in the file: they are taken to bring what this one brings")
        return ranks.telling(step, self._parts.coordinator.axes)

    def _agreed(self, done: Replayed, before: Decision | None) -> Replayed:
        """With what ranks agreed on, if they have since."""
        agreed = self._runner.agreed
        return done if agreed is None or agreed is before else _by(done, agreed)

    def _compared(self, step: StepRecord, tensors: Mapping[str, torch.Tensor], lines: list[str]) -> list[Difference]:
        """Run it in every way. Raises what it raises."""
        runner, parts = self._runner, self._parts
        batch, side = batch_of(step, tensors, parts.stage)  # anew: a step may write what it is given
        stage, buffers = self._stager(step, tensors), parts.graphs.buffers if parts.graphs is not None else None
        view = stage(runner.fill(batch, **side))
        if graph_of(parts, view) is None:
            here, found = seen(view, runner.replay(view)), None
        else:
            kept = self._keeping(view, lines)
            with kept():
                exact = stage(parts.eager.fill(batch, **side))
                plain = seen(exact, parts.eager.run(exact))
            view = stage(runner.fill(batch, **side))
            with kept(), written_slots_kept(buffers):
                eager = seen(view, ran_eagerly(parts, view))
            here = seen(view, runner.replay(view))
            found = _first(here, eager, plain)
        home = self._home(step, tensors, here)
        apart = () if home is None else tuple(differences_of(here, home, tolerance=USUAL, names=HOME))
        return [one for one in (found, Difference.of(apart)) if one is not None]

    def _stager(self, step: StepRecord, tensors: Mapping[str, torch.Tensor]) -> Callable[[Any], Any]:
        """What writes the recorded contents of staged slots into a view, as producers did at home."""
        slots = self._parts.stage.declaration.slots

        def stage(view: Inputs) -> Inputs:
            for one in step.staged:
                elements = tensors.get(key_of(step.number, "staged", one.name))
                place = live_part(slots[one.name], vars(view)[one.name], step_of(view)) if one.name in slots else None
                if place is None or elements is None or place.shape != elements.shape:
                    message = f"slot {one.name!r}: the file has {one}, which cannot be staged on this runner"
                    raise RecordingError(message)
                with torch.no_grad():
                    place.copy_(elements)
            return view

        return stage

    def _keeping(self, view: Inputs, lines: list[str]) -> Callable[[], AbstractContextManager[None]]:
        """What keeps the step's state over a block."""
        try:
            return state_on(self._runner, view).kept
        except CheckError as error:
            lines.append(f"its state is not put back between its runs, which may differ by that: {error}")
            return contextlib.nullcontext

    @staticmethod
    def _home(step: StepRecord, tensors: Mapping[str, torch.Tensor], here: Seen) -> Seen | None:
        """What the step returned at home, by the names of what it returns here; None where that is not in the file."""
        if step.outputs is None:
            return None
        slots = {f"{_SLOT}{name!r}" for name in here.declared}
        names = [name for name, one in here.outputs.items() if isinstance(one, torch.Tensor) and name not in slots]
        elements = [tensors.get(key_of(step.number, "outputs", one.name)) for one in step.outputs]
        if len(names) != len(elements):
            return attrs.evolve(here, outputs={"outputs": f"{len(elements)} tensors"})
        known = {name: one for name, one in zip(names, elements, strict=True) if one is not None}
        return attrs.evolve(here, outputs={**here.outputs, **known})


def _by(done: Replayed, decision: Decision) -> Replayed:
    return attrs.evolve(done, path=decision.path, bucket=decision.bucket, reason=decision.reason)


def _first(graph: Seen, eager: Seen, plain: Seen) -> Difference | None:
    """Where a graph parts from the step on the same padded slots, else from the step on the batch without padding."""
    found = Difference.of(list(differences_of(graph, eager, tolerance=BITWISE, names=GRAPH_AND_EAGER)))
    if found is not None:
        return found
    first = first_difference(graph, plain, tolerance=USUAL, names=UNPADDED)
    if first is None or first.slot is not None:  # a slot that the batch brought, from which all else follows
        return Difference.of([] if first is None else [first])
    apart = list(differences_of(graph, plain, tolerance=USUAL, names=UNPADDED))
    found = Difference.of(apart)
    computed = "; ".join(map(str, computed_apart(graph, plain, UNPADDED)))
    return attrs.evolve(found, text=f"{found.text}; {computed}") if found is not None and computed else found
