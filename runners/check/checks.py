"""Checking a runner: every bucket and pattern, on drawn batches or on given ones, by one check after the other."""

import collections
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import attrs
import rich.console
import rich.progress
import torch

from ...backends.base import Backend
from ...dataflow.errors import ConfigError, ReplayError
from ...dataflow.sampling import NO_VALUES, Values
from ..decision import Decision
from ..runner import Runner
from ..state import State
from . import addresses, coverage, parity, poison, races
from .batches import Batches, CheckedBatch, Makers, batches_of, by_pattern
from .report import CheckReport, Finding
from .trial import Subject, state_of, unwatched

Check: TypeAlias = Callable[[Subject[Any], Iterable[CheckedBatch]], list[Finding]]
CHECKS: Final[Mapping[str, Check]] = {one.NAME: one.check for one in (poison, parity, addresses, coverage, races)}
"""Every check, in the order in which they are run."""
MOST_ROUNDS: Final = 10_000
"""Batches of random rows for each bucket and pattern: more would take days."""
MOST_SEED: Final = 1 << 62
"""Seeds are counted up from batch to batch, and torch takes 64 bits."""


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
    """Hold a captured runner to what its declaration promises. The report names what was found by slot.

    Each bucket is replayed with poison in its tails, beside the step as it is written, and over garbage. If no batch
    reaches a graph, that is a finding: nothing was checked. Of several ranks all call this at once, with batches for
    the same buckets. What one finds is in the report of each.

    Args:
        runner: The runner.
        batches: Batches to check with, or a function of rows and a generator that makes one. By default they are drawn.
        state: Tensors that the step changes beside its slots. By default they are found by a run of it.
        only: Some of the checks.
        rounds: Batches of random rows for each bucket and pattern, beside the largest and smallest; 10,000 at most.
        seed: Where random batches begin.
        values: For batches that are drawn, see `sample_batch`.
        read_outside: Slots that are read between fill and replay.
        progress: Show a progress bar on a terminal.

    Raises:
        ReplayError: The runner is not captured.
        ConfigError: A check, a slot or a number is none.
        CheckError: The state is too large to keep.
        RankError: Other ranks do not come, or check something else. The error names them.
    """
    wanted, start, parts, graphs = _wanted(only), time.perf_counter(), runner.parts, runner.parts.graphs
    _check_number("rounds", rounds, 1, MOST_ROUNDS)
    _check_number("seed", seed, 0, MOST_SEED)
    if graphs is None:
        note = "it captures nothing: there are no tails, and nothing is replayed"
        return CheckReport(runner=parts.name, findings=(), steps=dict.fromkeys(wanted, 0), notes=(note,))
    _check_ready(runner, read_outside)
    makers = batches_of(runner, batches, rounds=rounds, seed=seed, values=values)
    subject = Subject(runner, graphs, State(parts.stage.backend), seed, tuple(read_outside))
    with unwatched(runner.watch):
        report = subject.together.ranks.run(lambda: _checked(subject, wanted, makers, state, progress=progress))
    return attrs.evolve(report, seconds=time.perf_counter() - start)


def _checked(
    subject: Subject[Any],
    wanted: Sequence[str],
    makers: Makers,
    state: Iterable[torch.Tensor] | None,
    *,
    progress: bool,
) -> CheckReport:
    """Find the state, and run the checks on the batches that a graph takes."""
    runner, ranks = subject.runner, subject.together.ranks
    decisions = [runner.decide(one.batch, **one.side) for one in (make() for _, make in makers)]
    taken = [maker for maker, one in zip(makers, decisions, strict=True) if one.bucket is not None]
    if ranks.size > 1:
        found = "known" if state is not None else f"looked for on {len(by_pattern(makers))} batches"
        ranks.tell(f"a check of {', '.join(wanted)}, on batches by buckets: {_buckets(decisions)}; its state {found}")
    known = state_of(runner, (make() for _, make in by_pattern(makers)), state)
    subject = attrs.evolve(subject, state=known, notes=_notes(decisions))
    if taken:
        findings = _run(subject, wanted, taken, progress=progress and ranks.rank == 0)
    else:
        message = f"nothing was checked: {'; '.join(subject.notes)}; give batches that a captured bucket takes"
        findings = (Finding(wanted[0], None, message),)
    steps = dict.fromkeys(wanted, len(taken))
    return CheckReport(runner=subject.parts.name, findings=findings, steps=steps, notes=tuple(subject.notes))


def _wanted(only: Collection[str]) -> list[str]:
    """The checks to run, in their order. Raises ConfigError for one that is none."""
    for name in only:
        if name not in CHECKS:
            message = f"there is no check {name!r}: checks are {', '.join(CHECKS)}"
            raise ConfigError(message)
    return [name for name in CHECKS if name in only or not only]


def _check_number(name: str, value: int, least: int, most: int) -> None:
    """Raise ConfigError if an option is no whole number in its bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        text = "another one" if isinstance(value, int) else repr(value)
        message = f"{name}= is a whole number from {least:,} to {most:,}, got {text:.100}"
        raise ConfigError(message)


def _check_ready(runner: Runner[Any], read_outside: Collection[str]) -> None:
    """Raise ReplayError if nothing was captured, ConfigError if a name is no slot."""
    parts = runner.parts
    if parts.graphs is not None and parts.graphs.report is None:
        message = "this runner is not captured: call capture() before check()"
        raise ReplayError(message)
    declaration = parts.stage.declaration
    for name in read_outside:
        if name not in declaration.slots and name not in declaration.disabled:
            message = f"read_outside names {name!r}, which is no slot of {declaration.name}"
            raise ConfigError(message)


def _buckets(decisions: Iterable[Decision]) -> str:
    """In words the buckets of batches, which are the same on ranks whose checks take the same steps."""
    groups = itertools.groupby("none" if one.bucket is None else str(one.bucket) for one in decisions)
    return ", ".join(f"{len(list(group))} for {bucket}" for bucket, group in groups)


def _notes(decisions: Iterable[Decision]) -> dict[str, None]:
    """A note for each reason for which a graph does not take batches."""
    passed = collections.Counter(one.reason for one in decisions if one.bucket is None)
    counts = {reason: "a batch was" if count == 1 else f"{count} batches were" for reason, count in passed.items()}
    return {f"{them} passed over, which no graph takes: {reason}": None for reason, them in counts.items()}


def _run(subject: Subject[Any], wanted: Sequence[str], makers: Makers, *, progress: bool) -> tuple[Finding, ...]:
    """One check after the other, under a progress bar on a terminal, until the device answers no more."""
    findings: list[Finding] = []
    console = rich.console.Console(stderr=True)
    columns = (
        rich.progress.TextColumn("checking {task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
    )
    hidden = not (progress and console.is_terminal)
    try:
        with rich.progress.Progress(*columns, console=console, transient=True, disable=hidden) as bar:
            for name in wanted:
                batches = bar.track((make() for _, make in makers), total=len(makers), description=name)
                findings += _with_others(subject, name, CHECKS[name](subject, batches))
                if subject.together.any(not _answers(subject.parts.stage.backend)):
                    subject.notes["the device has stopped for good, and what was left to check was not checked"] = None
                    break
    finally:
        subject.graphs.buffers.distrust()
    return tuple(findings)


def _with_others(subject: Subject[Any], name: str, found: list[Finding]) -> list[Finding]:
    """The findings, or, of a rank that has none, the first one of another rank."""
    slots = [None, *subject.parts.stage.declaration.slots]
    said = (found[0].message, slots.index(found[0].slot)) if found else ("", 0)
    first = subject.together.first(*said)
    if found or first is None:
        return found
    rank, message, slot = first
    return [Finding(name, slots[slot], f"rank {rank} found: {message}")]


def _answers(backend: Backend) -> bool:
    """Whether the device still works: a fault in a kernel may stop it."""
    try:
        backend.synchronize()
    except Exception:  # noqa: BLE001 - each device says it in words of its own
        return False
    return True
