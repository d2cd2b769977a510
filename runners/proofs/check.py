"""Checking a runner: every bucket and pattern, on random batches or on given ones, by one proof after the other."""

import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypedDict, overload

import attrs
import rich.console
import rich.progress
import torch

from ...backends.base import Backend
from ...dataflow.errors import ConfigError, ReplayError
from ...dataflow.sampling import NO_VALUES, Values
from ..runner import Runner
from ..state import State
from . import addresses, coverage, parity, poison, races
from .cases import Batches, Cases, cases_of
from .comparison import USUAL, Tolerance
from .fills import buffers_of
from .replays import unwatched
from .report import CHECKS, Case, CheckReport, Finding
from .state import state_of
from .together import Together

OTHER_SHAPES: Final[Mapping[torch.dtype, Tolerance]] = {
    **USUAL,
    torch.float16: Tolerance(1e-2, 1e-2),
    torch.bfloat16: Tolerance(5e-2, 5e-2),
    torch.float32: Tolerance(1e-3, 1e-3),
}
"""How far a model's outputs for a padded batch may be from those for the batch alone: kernels for other shapes add in
another order, layer after layer. What padded rows do to live ones is for poison to find, which asks for equal bits."""


MOST_ROUNDS: Final = 10_000
"""Batches of random rows for each bucket and pattern: more would take days."""
MOST_SEED: Final = 1 << 62
"""Seeds are counted up from batch to batch, and torch takes 64 bits."""


class CheckOptions(TypedDict, total=False):
    """What `check` may be told beside the batches."""

    state: Iterable[torch.Tensor] | None
    only: Collection[str]
    rounds: int
    seed: int
    values: Values
    read_outside: Collection[str]
    progress: bool


def check(
    runner: Runner[Any],
    batches: Batches | None = None,
    *,
    state: Iterable[torch.Tensor] | None = None,
    only: Collection[str] = (),
    rounds: int = 2,
    seed: int = 0,
    values: Values = NO_VALUES,
    read_outside: Collection[str] = (),
    progress: bool = True,
) -> CheckReport:
    """Hold a captured runner to what its declaration promises; the report tells what was found, by slot.

    Each bucket is replayed with poison in its tails, beside the step as it is written, and over garbage.
    batches: what to check with, or a function of rows and a generator that makes it; drawn, where nothing is said.
    state: tensors that the step changes beside its slots; found by a run of it, where nothing is said. only: some of
    the checks. rounds: batches of random rows for each bucket and pattern, beside the largest and smallest, 10,000 at
    most. seed: where random batches begin. values: for batches that are drawn, see `sample_batch`. read_outside: slots
    that are read between fill and replay. Where no batch reaches a graph, that is a finding: nothing was checked.
    Of several ranks all call it at once, with batches for the same buckets; what one finds is in the report of each.
    RankError, which names them, where others do not come, or check something else. ReplayError before `capture`,
    ConfigError for a check that is none, CheckError where the state is too large to keep.
    """
    wanted, start, parts = _wanted(only), time.perf_counter(), runner.parts
    _check_numbers(rounds=(rounds, 1, MOST_ROUNDS), seed=(seed, 0, MOST_SEED))
    if parts.graphs is None:
        note = "it captures nothing: there are no tails, and nothing is replayed"
        return CheckReport(runner=parts.name, findings=(), steps=dict.fromkeys(wanted, 0), notes=(note,))
    _check_ready(runner, read_outside)
    together = Together(parts)
    cases = cases_of(runner, batches, rounds=rounds, seed=seed, values=values)

    def run() -> CheckReport:
        together.begin(lambda: _begun(runner, wanted, cases, is_known=state is not None))
        checks = _Checks(runner, cases, state_of(runner, cases.pattern_samples, state), seed, tuple(read_outside))
        taken = checks.count()
        findings = checks.run(wanted, progress=progress and together.is_first) if taken else checks.nothing(wanted)
        steps, notes, seconds = dict.fromkeys(wanted, taken), tuple(checks.notes), time.perf_counter() - start
        return CheckReport(runner=parts.name, findings=findings, steps=steps, notes=notes, seconds=seconds)

    with unwatched(runner.watch):
        return together.run(run)


@attrs.frozen(eq=False)
class _Checks:
    """The checks of one runner, and the notes that they make."""

    runner: Runner[Any]
    cases: Cases
    state: State
    seed: int
    read_outside: tuple[str, ...]
    notes: dict[str, None] = attrs.field(factory=dict)

    def count(self) -> int:
        """How many cases a graph takes; a note for each reason for which one does not."""
        passed: dict[str, int] = {}
        for case in self.cases:
            decision = self.runner.decide(case.batch, **case.side)
            if decision.bucket is None:
                passed[decision.reason] = passed.get(decision.reason, 0) + 1
        for reason, count in passed.items():
            batches = "a batch was" if count == 1 else f"{count} batches were"
            self.notes[f"{batches} passed over, which no graph takes: {reason}"] = None
        return len(self.cases) - sum(passed.values())

    def nothing(self, wanted: Sequence[str]) -> tuple[Finding, ...]:
        """That nothing was checked, which must not look as if nothing was found."""
        message = f"nothing was checked: {'; '.join(self.notes)}; give batches that a captured bucket takes"
        return (Finding(wanted[0], None, message),)

    def run(self, wanted: Sequence[str], *, progress: bool) -> tuple[Finding, ...]:
        """One check after the other, until the device answers no more."""
        findings: list[Finding] = []
        backend, buffers = self.runner.parts.stage.backend, buffers_of(self.runner)
        try:
            for name, cases in _shown(wanted, self.cases, show=progress):
                findings += self._with_others(name, self._run(name, cases))
                if Together(self.runner.parts).any(not _answers(backend)):
                    self.notes["the device has stopped for good, and what was left to check was not checked"] = None
                    break
        finally:
            buffers.distrust()
        return tuple(findings)

    def _with_others(self, name: str, found: list[Finding]) -> list[Finding]:
        """The findings, or, of a rank that has none, the first one of another rank."""
        slots = [None, *self.runner.parts.stage.declaration.slots]
        own = next(iter(found), None)
        said = ("", 0) if own is None else (own.message, slots.index(own.slot))
        first = Together(self.runner.parts).first(*said)
        if found or first is None:
            return found
        rank, message, slot = first
        return [Finding(name, slots[slot], f"rank {rank} found: {message}")]

    def _run(self, name: str, cases: Sequence[Case]) -> list[Finding]:
        runner, state = self.runner, self.state
        match name:
            case "poison":
                return poison.check(runner, cases, state, self.notes, self.seed)
            case "coverage":
                return coverage.check(runner, cases, state, self.notes, self.seed, self.read_outside)
            case "parity":
                return parity.check(runner, cases, state, unpadded=OTHER_SHAPES)
            case "addresses":
                return addresses.check(runner, cases, state)
            case _:
                return races.check(runner, cases, state)


def _wanted(only: Collection[str]) -> list[str]:
    """The checks to run, in their order. ConfigError for one that is none."""
    for name in only:
        if name not in CHECKS:
            message = f"there is no check {name!r}: checks are {', '.join(CHECKS)}"
            raise ConfigError(message)
    return [name for name in CHECKS if name in only or not only]


def _check_numbers(**given: tuple[int, int, int]) -> None:
    """ConfigError where an option is no whole number in its bounds: its value, the least and the most."""
    for name, (value, least, most) in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            text = "another one" if isinstance(value, int) else repr(value)
            message = f"{name}= is a whole number from {least:,} to {most:,}, got {text:.100}"
            raise ConfigError(message)


def _begun(runner: Runner[Any], wanted: Sequence[str], cases: Cases, *, is_known: bool) -> str:
    """A check in words, which are the same on ranks whose checks take the same steps."""
    taken = [runner.decide(case.batch, **case.side).bucket for case in cases]
    groups = ((bucket, len(list(group))) for bucket, group in itertools.groupby(taken))
    buckets = ", ".join(f"{count} for {'none' if bucket is None else bucket}" for bucket, count in groups)
    state = "known" if is_known else f"looked for on {len(cases.pattern_samples)} batches"
    return f"a check of {', '.join(wanted)}, on batches by buckets: {buckets}; its state {state}"


def _answers(backend: Backend) -> bool:
    """Whether the device still works: a fault in a kernel may stop it."""
    try:
        backend.synchronize()
    except Exception:  # noqa: BLE001 - each device says it in words of its own
        return False
    return True


def _check_ready(runner: Runner[Any], read_outside: Collection[str]) -> None:
    """ReplayError where nothing was captured, ConfigError where a name is no slot."""
    parts = runner.parts
    if parts.graphs is not None and parts.graphs.report is None:
        message = "this runner is not captured: call capture() before check()"
        raise ReplayError(message)
    declaration = parts.stage.declaration
    for name in read_outside:
        if name not in declaration.slots and name not in declaration.disabled:
            message = f"read_outside names {name!r}, which is no slot of {declaration.name}"
            raise ConfigError(message)


class _Counted(Sequence[Case]):
    """Cases that tell when one is done."""

    def __init__(self, cases: Cases, done: Callable[[], None]) -> None:
        self._cases = cases
        self._done = done

    def __len__(self) -> int:
        return len(self._cases)

    @overload
    def __getitem__(self, index: int) -> Case: ...
    @overload
    def __getitem__(self, index: slice) -> list[Case]: ...
    def __getitem__(self, index: int | slice) -> Case | list[Case]:
        return self._cases[index]

    def __iter__(self) -> Iterator[Case]:
        for case in self._cases:
            yield case
            self._done()


def _shown(checks: Sequence[str], cases: Cases, *, show: bool) -> Iterator[tuple[str, Sequence[Case]]]:
    """Each check with its cases, under a progress bar on a terminal."""
    console = rich.console.Console(stderr=True)
    columns = (
        rich.progress.TextColumn("checking {task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
    )
    hidden = not (show and console.is_terminal)
    with rich.progress.Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        for name in checks:
            task = progress.add_task(name, total=len(cases))
            yield name, _Counted(cases, functools.partial(progress.advance, task))
            progress.remove_task(task)
