"""Checking a runner: runs all checks on every bucket and pattern, with random or given batches."""

import collections
import contextlib
import functools
import itertools
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import torch

from ...dataflow.axes import BATCH, TOKENS
from ...dataflow.errors import CheckError, ConfigError, ReplayError, did_you_mean
from ...dataflow.plan import Absent
from ...dataflow.shown import Shown, Table, TableRow
from ..decode import DecodeRunner
from ..engine.capture import progress_over
from ..engine.config import PARITY, POISON, checked, checked_state, refuse
from ..engine.runner import Runner
from ..engine.sampling import NO_VALUES, Sample, Values, sample_batch, signed_slots
from ..engine.selection import BucketKey, frozen_by, sizes_of
from ..engine.state import State, draw_on
from ..engine.statistics import Decision
from ..modes import ModeRunner
from .memory import UNREAD, check_coverage, check_moves, check_races
from .replays import check_parity, check_poison
from .transitions import TRANSITION, check_transition
from .trial import Finding, Trial, unwatched
from .weights import WEIGHTS, check_weights

CHECKS: Final = {
    "poison": check_poison,
    "parity": check_parity,
    "addresses": check_moves,
    "coverage": check_coverage,
    "races": check_races,
    WEIGHTS: check_weights,
    TRANSITION: check_transition,
}
"""Every check, in the order in which they run."""
DRAWN: Final = (
    "the batches were drawn from the declaration: if live rows never have some of their values, such as a page that "
    "padded rows write, say which they have, values={'slot': (1, 9)}, or give batches of your own, batches="
)
Batches = Callable[[Any, torch.Generator], Any] | Iterable[Any]
"""Batches to check with, or a function that makes one of so many rows, or of such sizes if buckets have several axes.

Each may be a pair with side arguments.
"""
Makers = Sequence[Callable[[], Sample]]
"""Functions that each make one batch anew when it is needed, since there may be many, and large ones."""


@attrs.frozen(kw_only=True, repr=False)
class CheckReport(Shown):
    """The results of checks of one runner.

    Attributes:
        runner: The runner's kind.
        findings: What is wrong.
        steps: How many batches each check looked at.
        notes: What was not checked, and why.
        seconds: How long the checks took.
    """

    runner: str
    findings: tuple[Finding, ...]
    steps: Mapping[str, int]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def of(self, check: str) -> tuple[Finding, ...]:
        """Return what one check found."""
        return tuple(finding for finding in self.findings if finding.check == check)

    def raise_if_failed(self) -> None:
        """Raise CheckError with every finding, if there is one."""
        if self.findings:
            raise CheckError(str(self))

    def as_data(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {**attrs.asdict(self), "ok": self.ok}

    def tables(self) -> Iterator[Table]:
        """Yield a row a check, and below them what was found."""
        rows = list[TableRow]()
        for name, steps in self.steps.items():
            found = self.of(name)
            slots = [one.slot for one in found if one.slot]
            rows.append({"check": name, "steps": steps, "findings": len(found), "slots": slots})
        title, *lines = str(self).splitlines()
        yield Table(title, rows, "\n".join(lines))

    def __str__(self) -> str:
        """Return a line for the whole, then one a finding and one a note."""
        count = f"{len(self.findings) or 'no'} finding{'' if len(self.findings) == 1 else 's'}"
        total = ", ".join(f"{name} on {steps} steps" for name, steps in self.steps.items())
        lines = [*map(str, self.findings), *(f"note: {note}" for note in self.notes)]
        return "\n".join([f"{self.runner}: {count} ({total}; {self.seconds:.1f} s)", *lines])


def check(
    runner: Runner[Any] | ModeRunner[Any, Any],
    batches: Batches | None = None,
    *,
    state: Iterable[torch.Tensor] | None = None,
    only: str | Collection[str] = (),
    rounds: int = 2,
    seed: int = 0,
    values: Values = NO_VALUES,
    read_outside: Collection[str] = (),
    random: bool = False,
    progress: bool = True,
) -> CheckReport:
    """Check that a captured runner does what its declaration promises. The report names what was found by slot.

    Each bucket is replayed with poison in its tails, against the step as it is written, and over garbage. Weights that
    the step reaches are changed for a moment, and put back. If no batch reaches a graph, that is a finding. With
    several ranks, all call this at once, with batches for the same buckets. Findings of one are in all reports.

    Args:
        runner: The runner. A `ModeRunner` is checked mode by mode, each with the batches that it takes.
        batches: Batches to check with, or a function of rows and a generator that makes one. By default they are drawn.
        state: Tensors that the step changes besides its slots. By default one run of the step finds them.
        only: One of the checks, or several.
        rounds: Batches of random rows for each bucket, pattern and variant, besides the largest and smallest.
        seed: The seed of random batches.
        values: For batches that are drawn: see `slotgraph.testing.batches`.
        read_outside: Slots that are read between fill and replay.
        random: Whether the step draws random numbers on purpose, as a sampler does.
        progress: Show a progress bar with the time left, on standard error, if that is a terminal.

    Raises:
        ReplayError: The runner is not captured.
        ConfigError: A check or a slot is unknown, or a number is invalid.
        CheckError: The state is too large to copy.
        RankError: Other ranks do not come, or check something else. The error names them.
    """
    if isinstance(runner, ModeRunner):
        return _check_modes(**locals())
    checked("runner", "a runner", runner, Runner)
    start = time.perf_counter()
    graphs = runner.graphs
    wanted = _chosen(runner, {only} if isinstance(only, str) else only)
    state = checked_state(state)
    if graphs is None:
        note = "it captures nothing: there are no tails, and nothing is replayed"
        return CheckReport(runner=runner.name, findings=(), steps=dict.fromkeys(wanted, 0), notes=(note,))
    if graphs.report is None:
        raise ReplayError("this runner is not captured: call capture() before check()")
    runner.stage.declaration.check_names("read_outside", read_outside)
    makers = batches_of(runner, batches, rounds=rounds, seed=seed, values=values)
    signed = signed_slots(runner.stage.declaration, values) if batches is None else None
    trial = Trial(runner, graphs, seed=seed, read_outside=read_outside, random=random, signed=signed)
    with unwatched(runner.watch), trial.state.kept():
        draw_on(trial.backend)  # otherwise a step that draws on the host would repeat the numbers of its capture
        try:
            report = trial.ranks.run(lambda: _checked(trial, wanted, makers, state, progress=progress))
        finally:
            trial.buffers.distrust()
    return attrs.evolve(report, seconds=time.perf_counter() - start)


def _check_modes(runner: ModeRunner[Any, Any], batches: Batches | None, **options: Any) -> CheckReport:
    """Check each mode, with the given batches that take it, and join the reports."""
    start = time.perf_counter()
    samples = [] if batches is None or callable(batches) else [*map(_sample, batches)]
    found = list[Finding]()
    notes = list[str]()
    steps = collections.Counter[str]()
    times = 0
    for mode, one in runner.modes.items():
        own = [(each.batch, each.side) for each in samples if runner.decide(each.batch, **each.side).mode == mode]
        if samples and not own:
            notes.append(f"{mode}: not checked, since no batch takes it")
            continue
        report = check(one, own or batches, **options)
        found += [attrs.evolve(finding, message=f"{mode}: {finding.message}") for finding in report.findings]
        notes += [f"{mode}: {note}" for note in report.notes]
        steps.update(report.steps)
        times += 1
    unread = collections.Counter(one.slot for one in found if f": {UNREAD}" in one.message)
    findings = tuple(one for one in found if unread[one.slot] in (0, times) or f": {UNREAD}" not in one.message)
    name = type(runner).__name__
    seconds = time.perf_counter() - start
    return CheckReport(runner=name, findings=findings, steps=steps, notes=tuple(notes), seconds=seconds)


def _chosen(runner: Runner[Any], only: Collection[str]) -> list[str]:
    """Return the checks to run: the named ones, or all that the runner can have.

    Raise ConfigError for any other name.
    """
    known = list(CHECKS)
    reason = ""
    if not isinstance(runner, DecodeRunner):
        reason = f"a {runner.name} has no steps() in which slots advance"
    elif not runner.stage.declaration.rules:
        reason = "no slot has then="
    elif runner.coordinator.size > 1:
        reason = "it has several ranks"
    if reason:
        known.remove(TRANSITION)
    for name in only:
        if name not in CHECKS:
            raise ConfigError(f"there is no check {name!r}: checks are {', '.join(known)}{did_you_mean(name, known)}")
        if name not in known:
            raise ConfigError(f"check {name!r} is not for this runner: {reason}")
    return [name for name in known if name in only or not only]


def batches_of(
    runner: Runner[Any], batches: Batches | None, *, rounds: int, seed: int, values: Values = NO_VALUES
) -> Makers:
    """Return the given batches, or random ones for each bucket: full, with the longest tail, and of other sizes."""
    checked("rounds", "a whole number, at least 1", rounds, int, 1)
    checked("seed", "a whole number", seed, int)
    checked("values", "a mapping of slots and fields to their values", values, Mapping)
    _refuse_mapping(batches)
    if batches is not None and not callable(batches):
        given = [functools.partial(_sample, one) for one in batches]
        if not given:
            raise ConfigError("batches= is empty: pass batches, or a function of rows and a generator, or leave it out")
        return given
    stage = runner.stage
    axes = runner.axes

    def made(number: int, bucket: BucketKey, rows: tuple[int, ...], absent: Absent, frozen: Values) -> Sample:
        """Make a batch of these sizes for a bucket and a variant, by the caller's function or at random."""
        generator = torch.Generator().manual_seed(seed + number)
        live = dict(zip(axes, rows, strict=True))
        if batches is not None:
            return _sample(batches(rows[0] if len(axes) == 1 else rows, generator))
        for axis, size in runner.sizes[bucket].items():
            if axis.fixed:
                live[axis] = size
            elif axis not in axes and axis not in stage.relations:
                most = min(size, *rows) if axes == (TOKENS,) and axis == BATCH else size
                live[axis] = int(torch.randint(1, most + 1, (1,), device="cpu", generator=generator)) if most else 0
        live.update({axis: size.at(live) for axis, size in stage.relations.items()})
        given = stage.declaration, stage.backend.capabilities, live, generator
        return sample_batch(*given, absent=absent, values={**frozen, **values}, device=stage.backend.device)

    plans = list[tuple[BucketKey, tuple[int, ...], Absent, Values]]()
    generator = torch.Generator().manual_seed(seed)
    patterns = sorted(runner.patterns, key=sorted) if batches is None else [frozenset[str]()]
    variants = frozen_by(runner.variants if batches is None else ()).values()
    ladders = [*zip(*map(sizes_of, runner.sizes), strict=True)]
    for bucket in runner.sizes:  # the fewest rows for which the next smaller bucket is too small, and others
        every = list[list[int]]()
        for size, ladder in zip(sizes_of(bucket), ladders, strict=True):
            least = max((one for one in ladder if one < size), default=0) + 1
            drawn = torch.randint(least, size + 1, (rounds,), device="cpu", generator=generator).tolist()
            every.append([size, least, max(size - 1, least), *drawn])
        chosen = [*zip(*every, strict=True)]
        chosen = [*dict.fromkeys(chosen[:-rounds]), *chosen[-rounds:]]
        plans[:0] = itertools.product([bucket], chosen, patterns, variants)  # the largest first
    return [functools.partial(made, number, *plan) for number, plan in enumerate(plans)]


def _refuse_mapping(batches: Any) -> None:
    """Raise ConfigError for one batch, whose keys would be taken for batches."""
    if isinstance(batches, Mapping):
        refuse("batches", "batches in a list, or a function of rows and a generator", batches)


def _sample(made: Any) -> Sample:
    """Convert a batch, or a pair of a batch and its side arguments, to a `Sample`."""
    match made:
        case (batch, Mapping() as side) if isinstance(made, tuple):
            return Sample(batch, dict(side))
    return Sample(made, {})


def _checked(
    trial: Trial, wanted: Sequence[str], makers: Makers, state: Iterable[torch.Tensor] | None, *, progress: bool
) -> CheckReport:
    """Find the state, and run the checks on the batches that a graph takes. progress: Show a bar, on the first rank."""
    runner = trial.runner
    ranks = trial.ranks
    shown = progress and ranks.rank == 0
    state = runner.stage.state if state is None else state
    taken = list[Callable[[], Sample]]()
    decisions = list[Decision]()
    firsts = dict[Absent, Callable[[], Sample]]()
    for make in progress_over(makers, lambda _: "looking at batches", show=shown):
        one = make()
        decisions.append(runner.decide(one.batch, **one.side))
        firsts.setdefault(runner.stage.absent(one.batch, one.side), make)
        taken += [] if decisions[-1].bucket is None else [make]
    if ranks.size > 1:
        groups = itertools.groupby(one.bucket for one in decisions)  # the same on all ranks that run the same steps
        buckets = ", ".join(f"{len([*group])} for {bucket}" for bucket, group in groups)
        found = f"looked for on {len(firsts)} batches" if state is None else "known"
        ranks.gather(f"a check of {', '.join(wanted)}, on batches by buckets: {buckets}; its state {found}")
    known = trial.state if state is None else State.of(trial.backend, state, trial.buffers)
    for make in firsts.values() if state is None else ():
        trial.fill(make())
        with trial.raising("the look at what a step changes"):
            known = known.joined(trial.find_state())
    trial.state = known
    for reason, count in collections.Counter(one.reason for one in decisions if one.bucket is None).items():
        them = f"{count} batches were" if count > 1 else "a batch was"
        trial.notes[f"{them} passed over, which no graph takes: {reason}"] = None
    if taken:
        findings = [*_findings(trial, wanted, taken, shown=shown)]
    else:
        message = f"nothing was checked: {'; '.join(trial.notes)}; give batches that a captured bucket takes"
        findings = [Finding(wanted[0], None, message)]
    if trial.signed is not None and any(one.check in (POISON, PARITY) for one in findings):
        trial.notes[DRAWN] = None
    steps = dict.fromkeys(wanted, len(taken))
    return CheckReport(runner=runner.name, findings=tuple(findings), steps=steps, notes=tuple(trial.notes))


def _findings(trial: Trial, wanted: Sequence[str], makers: Makers, *, shown: bool) -> Iterator[Finding]:
    """Run the checks one by one, until the device fails. Report each slot and each output once per check."""
    slots = [None, *trial.slots]
    every = [(name, make) for name in wanted for make in makers]
    turns = progress_over(every, lambda turn: f"checking {turn[0]}", show=shown)  # one progress bar for all checks
    with contextlib.closing(turns):
        for name in wanted:
            left = itertools.islice(turns, len(makers))
            found: dict[str, Finding] = {}
            for one in CHECKS[name](trial, (make() for _, make in left)):
                found.setdefault(one.slot or re.split(" row |: ", one.message)[0], one)
            collections.deque(left, 0)  # the bar skips the rest of a check that ended early
            yield from found.values()
            own = next(iter(found.values()), Finding(name, None, ""))
            first = trial.first(own.message, slots.index(own.slot))
            if first is not None and not found:  # report what another rank has found
                rank, message, slot = first
                yield Finding(name, slots[slot], f"rank {rank} found: {message}")
            has_stopped = False
            try:
                trial.backend.synchronize()
            except Exception:  # noqa: BLE001 - a fault in a kernel, whose error differs by device
                has_stopped = True
            if trial.any(has_stopped):
                trial.notes["the device has stopped for good, and what was left to check was not checked"] = None
                return
