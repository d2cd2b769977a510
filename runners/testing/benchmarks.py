"""Benchmarks: fills and steps by this library and by hand, in turn in one run, for pytest-benchmark."""

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, final

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.axes import Sizes
from ...dataflow.capabilities import Lowering
from ...dataflow.errors import ConfigError, RegressionError, WrongBytesError
from ...dataflow.inputs import Inputs
from ...dataflow.sampling import NO_VALUES, Sample, Values, sample_batch
from ...dataflow.slots import Output, Slot, Staged
from ...dataflow.sources import NO_SIDE
from ...dataflow.tails import Keep, Once
from ..runner import Runner
from ..stage import NO_SIZES, Stage
from .by_hand import FillByHand
from .ground import NO_RELATIONS, Ground, Lowered, Relations, differences
from .timing import Run, Spread, measure

SETS: Final = 4
"""Sets of sources that take turns, each with addresses and values of its own: a step that found what the last one left
could spare itself the upload."""
PER_SLOT: Final = "per_slot"
REGROUPED: Final = "regrouped"
EAGER: Final = "eager"
RUNNER: Final = "runner"
PADDED: Final = 256
LIVE: Final = 0.75
"""A bucket's rows, and the part of them that is live, by default."""
ROUNDS: Final = 20
STEPS: Final = 20
ATTEMPTS: Final = 3
"""How often a ratio is measured before it counts as too high: another program may have had the core."""
KEY: Final = "slotgraph"
"""The name of the figures in pytest-benchmark's `extra_info`."""
_UNTIMED: Final[frozenset[Lowering]] = frozenset({"slot_by_slot", "in_graph"})
"""Lowerings that no race of fills shows: the oracle, which is not there for speed, and the fused kernel under another
name: what is spared by launching it in the step's graph, only whole steps show."""

Way = Callable[[Any], Any]
"""Takes a batch, or what stands for one."""


@attrs.frozen
class Figures:
    """What each way took, in microseconds a step, and its ratio to the way that all are held to.

    Ratios are medians over the rounds of one run, so that a slow machine is slow for both.
    """

    microseconds: Mapping[str, Spread]
    ratios: Mapping[str, float]

    @classmethod
    def of(cls, samples: Mapping[str, Sequence[float]], rounds: int, base: str = PER_SLOT) -> "Figures":
        """Figures of all steps' times, as many a round; ratios are to the way named `base`."""
        medians = {}
        for name, times in samples.items():
            each = len(times) // rounds
            medians[name] = [statistics.median(times[start : start + each]) for start in range(0, each * rounds, each)]
        pairs = {name: zip(found, medians[base], strict=True) for name, found in medians.items() if name != base}
        ratios = {name: statistics.median(one / other for one, other in pair) for name, pair in pairs.items()}
        return cls({name: Spread.of(times) for name, times in samples.items()}, ratios)


@attrs.frozen(eq=False)
class Contest:
    """Ways to do the same, and the batches that take turns.

    Attributes:
        title: What is done.
        ways: By name.
        batches: What each way is called with.
        ours: The way whose time is the library's.
        backend: Where it is done.
        base: The way that all others are held to.
        around: What a round of some ways runs in.
    """

    title: str
    ways: Mapping[str, Way]
    batches: Sequence[Any]
    ours: str
    backend: Backend
    base: str = PER_SLOT
    around: Mapping[str, Callable[[], AbstractContextManager[object]]] = attrs.field(factory=dict)

    def run(self, rounds: int, steps: int) -> Figures:
        """Time all ways, round by round in turn."""
        none = contextlib.nullcontext
        runs = {name: Run(way, self.batches, self.around.get(name, none)) for name, way in self.ways.items()}
        measure(list(runs.values()), self.backend, rounds, steps)
        return Figures.of({name: run.host for name, run in runs.items()}, rounds, self.base)


def contest_of_fills(
    ground: Ground, live: Sizes, values: Values, absent: Collection[str], lowerings: Sequence[Lowering]
) -> Contest:
    """Fill and view of one bucket: two by hand, and each lowering. WrongBytesError if one leaves other bytes.

    lowerings: those that are timed, the one that counts first; by default all that the backend has.
    """
    stage, padded, rows, gone = ground.stage, ground.most, ground.live(live), frozenset(absent)
    had = ground.backend.capabilities.lowerings
    timed = tuple(lowerings) or tuple(one for one in had if one not in _UNTIMED) or had

    def by_hand(name: str) -> Way:
        fill = FillByHand(ground.declaration, ground.backend, padded, grouped=name == REGROUPED)
        return lambda one: fill(one.batch, rows, one.side)

    def lowered(lowering: Lowering) -> Way:
        made = Lowered(ground, lowering, [padded])
        fill, filling = made.fill, made.filling(padded, gone)
        return lambda one: stage.view(fill(filling, one.batch, one.side, rows, gone), one.batch)

    ways = {name: by_hand(name) for name in (PER_SLOT, REGROUPED)} | {name: lowered(name) for name in timed}
    samples = draw_for(stage, live, values, absent)
    with torch.no_grad():
        _verify(ways, samples, ground, live)
    return Contest(f"fill of {stage.inputs.__name__}", ways, samples, timed[0], ground.backend)


def _verify(ways: Mapping[str, Way], samples: Sequence[Sample], ground: Ground, live: Sizes) -> None:
    """Hold what each way leaves to the oracle, but for tails that no one reads."""
    slots, buffers = ground.declaration.slots, ground.stage.allocate(ground.most)
    for one in samples:
        right = ground.oracle(buffers, one.batch, one.side, live, ground.most)
        wanted = {name: view for name, view in right.items() if not _is_loose(slots[name])}
        for name, way in ways.items():
            view = way(one)
            ground.backend.synchronize()
            got = {slot: None if held is None else getattr(view, slot) for slot, held in wanted.items()}
            for fault in differences(got, wanted, slots, live):
                raise WrongBytesError(f"{ground.declaration.name} filled by {name!r}: {fault}")


def _is_loose(slot: Slot) -> bool:
    """Whether a slot's bytes are not all a fill's: of kept tails, of outputs, of what a producer writes."""
    return isinstance(slot, Output | Staged) or isinstance(slot.rule(), Keep | Once)


def draw_for(stage: Stage[Any], live: Sizes, values: Values = NO_VALUES, absent: Collection[str] = ()) -> list[Sample]:
    """Batches of given live sizes that take turns."""
    sizes = {axis: size for axis, size in stage.sizes.items() if axis.fixed} | dict(live)
    sizes |= {axis: size.at(sizes) for axis, size in stage.relations.items() if size.axes <= sizes.keys()}
    given = stage.declaration, stage.backend.capabilities, sizes
    drawn: dict[str, Any] = {"absent": absent, "values": values, "device": stage.backend.device}
    return [sample_batch(*given, torch.Generator().manual_seed(seed), **drawn) for seed in range(SETS)]


def contest_of_steps(runner: Runner[Any], samples: Sequence[Sample]) -> Contest:
    """Whole steps of a captured runner: its own, eager ones, and a fill by hand before the same replay.

    Raises:
        ConfigError: Nothing is captured, or the batches differ in what a step's time depends on.
    """
    parts = runner.parts
    stage = parts.stage
    if parts.graphs is None or parts.graphs.report is None:
        raise ConfigError(f"{parts.name} has captured nothing: call capture() first, and give a runner that has graphs")
    kinds = set[tuple[Any, ...]]()
    for one in samples:
        decision, absent = runner.decide(one.batch, **one.side), stage.absent(one.batch, one.side)
        live = tuple(parts.size(one.batch, one.side)[: len(stage.declaration.varying)])
        kinds.add((decision.bucket, live, decision.path, tuple(sorted(absent))))
    bucket, rows, *_ = next(iter(kinds), (None, ()))
    if len(kinds) != 1 or bucket is None:
        took = ", ".join(sorted(map(str, kinds))) or "nothing"
        raise ConfigError(
            f"batches must be of one size, without the same slots, and take one bucket's graph; they took {took}"
        )
    by_hand = FillByHand(stage.declaration, stage.backend, parts.sizes[bucket])
    view: Any = None

    @contextlib.contextmanager
    def filled() -> Iterator[None]:
        """Fill by the runner, so that there is a view to replay."""
        nonlocal view
        view = runner.fill(samples[0].batch, **samples[0].side)
        yield

    def replayed(one: Sample) -> Any:
        by_hand.fill(one.batch, rows, one.side)
        return runner.replay(view)

    ways: dict[str, Way] = {
        PER_SLOT: replayed,
        EAGER: lambda one: parts.eager(one.batch, **one.side),
        RUNNER: lambda one: runner(one.batch, **one.side),
    }
    return Contest(f"step of {stage.inputs.__name__}", ways, samples, RUNNER, stage.backend, around={PER_SLOT: filled})


@final
@attrs.frozen
class Timer:
    """Times contests in one test by pytest-benchmark's fixture, which saves their figures."""

    benchmark: Any

    def fill(
        self,
        backend: Backend,
        inputs: type[Inputs],
        padded: Sizes = NO_SIZES,
        live: Sizes = NO_SIZES,
        *,
        values: Values = NO_VALUES,
        settings: object = None,
        relations: Relations = NO_RELATIONS,
        absent: Collection[str] = (),
        lowerings: Sequence[Lowering] = (),
        **options: Any,
    ) -> Figures:
        """Time the fill and view of one bucket by each lowering, against two fills by hand, held to the oracle first.

        Args:
            backend: Where it is filled; the fixture gives it.
            inputs: The declaration.
            padded: The bucket's sizes, by default 256 on each varying axis and 3 on each fixed one.
            live: The batch's sizes, by default three quarters of those.
            values: As `slotgraph.testing.batches` has them.
            settings: What `when=` of slots refers to.
            relations: Axes that follow from others.
            absent: Optional slots that batches come without.
            lowerings: The one that counts first. By default all that the backend has.
            **options: As `contest` has them; the ratio is to the fill slot by slot by hand.

        Returns:
            What each way took.

        Raises:
            WrongBytesError: A way leaves other bytes than the oracle.
            RegressionError: The ratio is too high.
        """
        sizes = {axis: PADDED for axis in inputs.slotgraph.varying if axis not in relations} | dict(padded)
        ground = Ground.of(inputs, backend, sizes, settings, relations)
        full = ground.most
        part = ground.sizes({axis: live.get(axis, max(1, int(full[axis] * LIVE))) for axis in ground.leads})
        if set(live) - set(ground.leads) or any(part[axis] > full[axis] for axis in ground.leads):
            raise ConfigError(
                f"live: sizes of the axes {list(ground.leads)}, at most the padded ones, got {dict(live)}"
            )
        return self.contest(contest_of_fills(ground, part, values, absent, lowerings), **options)

    def runner(
        self,
        runner: Runner[Any],
        batches: Sequence[Any] = (),
        *,
        side: Mapping[str, Any] = NO_SIDE,
        live: Sizes = NO_SIZES,
        values: Values = NO_VALUES,
        absent: Collection[str] = (),
        **options: Any,
    ) -> Figures:
        """Time whole steps of a captured runner, against eager ones, and against a fill by hand before its replay.

        Args:
            runner: The runner.
            batches: Batches of one size that take turns. By default they are drawn.
            side: The side arguments of all of them.
            live: Rows of drawn batches on each varying axis.
            values: For drawn batches, as `slotgraph.testing.batches` has them.
            absent: Optional slots that drawn batches come without.
            **options: As `contest` has them; the ratio is to the fill by hand with the runner's replay.

        Returns:
            What each way took.

        Raises:
            ConfigError: The runner has captured nothing, or batches differ in size.
            RegressionError: The ratio is too high.
        """
        samples = [Sample(batch, dict(side)) for batch in batches] or draw_for(runner.parts.stage, live, values, absent)
        return self.contest(contest_of_steps(runner, samples), **options)

    def ways(
        self, backend: Backend, ways: Mapping[str, Way], batches: Sequence[Any], title: str, **options: Any
    ) -> Figures:
        """Time ways of one's own to do the same, in turn, such as an engine's fill and this library's.

        Args:
            backend: Where it is done; the fixture gives it.
            ways: Calls that take a batch, by name. All are held to the first, and the second is the one that counts.
            batches: Batches of one size that take turns.
            title: What is done.
            **options: As `contest` has them.

        Returns:
            What each way took.

        Raises:
            RegressionError: The ratio is too high.
        """
        if len(ways) < 2 or not batches:  # noqa: PLR2004 - a ratio is of two
            raise ConfigError(
                f"ways to time: at least two, the one that others are held to first, and batches; got {list(ways)}"
            )
        base, ours, *_ = ways
        return self.contest(Contest(title, ways, batches, ours, backend, base), **options)

    def contest(
        self, contest: Contest, *, most: float | None = None, rounds: int = ROUNDS, steps: int = STEPS
    ) -> Figures:
        """Time a contest. If pytest-benchmark is disabled, each way runs once, and no ratio is held to anything.

        Args:
            contest: The contest.
            most: The largest ratio that is allowed.
            rounds: Rounds in which the ways take turns.
            steps: Steps of each round.

        Raises:
            RegressionError: The ratio is over `most` each time that it is measured.
        """
        benchmark, title = self.benchmark, f"{contest.backend.name}: {contest.title}"
        limit = math.inf if most is None or benchmark.disabled else most
        if benchmark.disabled:
            rounds, steps = 1, 1
        benchmark.group = benchmark.group or title
        figures = contest.run(rounds, steps)
        for _ in range(ATTEMPTS - 1):
            if figures.ratios[contest.ours] > limit:
                figures = contest.run(rounds, steps)
        benchmark.extra_info[KEY] = attrs.asdict(figures)
        way, turns = contest.ways[contest.ours], itertools.cycle(contest.batches)
        with torch.no_grad():
            benchmark.pedantic(lambda: way(next(turns)), rounds=rounds, iterations=steps, warmup_rounds=1)
        ratio = figures.ratios[contest.ours]
        if ratio > limit:
            told = f"{contest.ours} takes {ratio:.3f} of the time of {contest.base}, where {limit} is allowed"
            raise RegressionError(f"{title}: {told} (measured {ATTEMPTS} times)")
        return figures
