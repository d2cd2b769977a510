"""Benchmarks for pytest-benchmark: what they time, what they save, and what they hold against a saved baseline."""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, final

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.axes import Sizes
from ...dataflow.capabilities import Lowering
from ...dataflow.errors import ConfigError, RegressionError
from ...dataflow.inputs import Inputs
from ...dataflow.sampling import NO_VALUES, Values
from ...dataflow.sources import NO_SIDE
from ..runner import Runner
from ..stage import NO_SIZES
from .contests import Contest, Figures, Load, contest_of_fills, contest_of_steps, draw_for
from .ground import NO_RELATIONS, Ground, Relations

PADDED: Final = 256
LIVE: Final = 0.75
"""A bucket's rows, and what part of them is live, where nobody says others."""
ROUNDS: Final = 20
STEPS: Final = 20
ATTEMPTS: Final = 3
"""How often a ratio is measured before it counts as too high: another program may have had the core."""
KEY: Final = "slotgraph"
"""Under which name figures are saved in pytest-benchmark's `extra_info`."""


class Benchmark(Protocol):
    """What is used of pytest-benchmark's fixture."""

    disabled: bool
    extra_info: dict[str, Any]
    group: str | None
    fullname: str

    def pedantic(self, target: Callable[[], Any], *, rounds: int, iterations: int, warmup_rounds: int) -> Any:
        """Time a call."""


@attrs.frozen
class Baseline:
    """A saved run: its name, and by test what it saved. fail: by what part a ratio may be higher, or None for any."""

    path: str
    saved: Mapping[str, Mapping[str, Any]]
    fail: float | None

    def faults(self, fullname: str, figures: Figures, ours: str, base: str) -> list[str]:
        """In what one test's ratio is worse than it was."""
        before = self.saved.get(fullname, {}).get("extra_info", {}).get(KEY, {}).get("ratios", {}).get(ours)
        now = figures.ratios[ours]
        if before is None or self.fail is None or now <= before * (1 + self.fail):
            return []
        worse = now / before - 1
        was = f"{ours} takes {now:.3f} of the time of {base}, and took {before:.3f} in {self.path}"
        return [f"{was}: {worse:.0%} more, where {self.fail:.0%} is allowed"]


@final
class Timer:
    """Times a contest in one test, saves the figures, and says where they are worse than is allowed."""

    def __init__(self, benchmark: Benchmark, baselines: Iterable[Baseline]) -> None:
        self._benchmark = benchmark
        self._baselines = tuple(baselines)

    def __call__(self, contest: Contest, title: str, rounds: int, steps: int, most: float | None) -> Figures:
        """Time it. RegressionError where the ratio is over `most`, or that of a baseline, each time it is measured."""
        benchmark = self._benchmark
        if benchmark.disabled:
            rounds, steps = 1, 1
        benchmark.group = benchmark.group or title
        figures, faults = self._measured(contest, rounds, steps, most)
        for _ in range(ATTEMPTS - 1):
            if faults:
                figures, faults = self._measured(contest, rounds, steps, most)
        benchmark.extra_info[KEY] = figures.as_data()
        way, turns = contest.ways[contest.ours], itertools.cycle(contest.loads)
        with torch.no_grad():
            benchmark.pedantic(lambda: way(next(turns)), rounds=rounds, iterations=steps, warmup_rounds=1)
        if faults:
            message = f"{title}: {'; '.join(faults)} (measured {ATTEMPTS} times)"
            raise RegressionError(message)
        return figures

    def _measured(self, contest: Contest, rounds: int, steps: int, most: float | None) -> tuple[Figures, list[str]]:
        """Figures, and in what they are worse than is allowed; in nothing, where nothing is to be timed."""
        benchmark, ours = self._benchmark, contest.ours
        figures = contest.run(rounds, steps)
        if benchmark.disabled:
            return figures, []
        name, base = benchmark.fullname, contest.base
        faults = [fault for one in self._baselines for fault in one.faults(name, figures, ours, base)]
        ratio = figures.ratios[ours]
        if most is not None and ratio > most:
            faults.append(f"{ours} takes {ratio:.3f} of the time of {base}, where {most} is allowed")
        return figures, faults


@final
class FillBenchmark:
    """The fixture `benchmark_fill`."""

    def __init__(self, timer: Timer, backend: Backend) -> None:
        self._timer = timer
        self._backend = backend

    def __call__(
        self,
        inputs: type[Inputs],
        padded: Sizes = NO_SIZES,
        live: Sizes = NO_SIZES,
        *,
        values: Values = NO_VALUES,
        settings: object = None,
        relations: Relations = NO_RELATIONS,
        absent: Collection[str] = (),
        lowerings: Sequence[Lowering] = (),
        most: float | None = None,
        rounds: int = ROUNDS,
        steps: int = STEPS,
    ) -> Figures:
        """Time the fill and view of one bucket by each lowering, against two fills by hand, held to the oracle first.

        padded: the bucket's sizes, 256 on each varying axis and 3 on each fixed one where nothing is said. live: the
        batch's, three quarters of those. most: the largest ratio allowed, of the backend's first lowering (or the first
        of `lowerings`) to the fill slot by slot by hand. Others as `slotgraph.testing.batches` has them.
        Returns what each way took. WrongBytesError, RegressionError.
        """
        sizes = _varying(inputs, relations) | dict(padded)
        ground = Ground.of(inputs, self._backend, sizes, settings, relations)
        full = ground.sizes({axis: ground.most[axis] for axis in ground.leads})
        part = ground.sizes({axis: live.get(axis, max(1, int(full[axis] * LIVE))) for axis in ground.leads})
        over = [axis.name for axis in ground.leads if part[axis] > full[axis]]
        if over or set(live) - set(ground.leads):
            message = f"live: sizes of the axes {list(ground.leads)}, at most the padded ones, got {dict(live)}"
            raise ConfigError(message)
        contest = contest_of_fills(ground, part, full, values, absent, lowerings)
        return self._timer(contest, f"{self._backend.name}: fill of {inputs.__name__}", rounds, steps, most)


def _varying(inputs: type[Inputs], relations: Relations) -> dict[Any, int]:
    return {axis: PADDED for axis in inputs.slotgraph.varying if axis not in relations}


@final
class RunnerBenchmark:
    """The fixture `benchmark_runner`."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer

    def __call__(
        self,
        runner: Runner[Any],
        batches: Sequence[Any] = (),
        *,
        side: Mapping[str, Any] = NO_SIDE,
        live: Sizes = NO_SIZES,
        values: Values = NO_VALUES,
        absent: Collection[str] = (),
        most: float | None = None,
        rounds: int = ROUNDS,
        steps: int = STEPS,
    ) -> Figures:
        """Time whole steps of a captured runner, against eager ones, and against a fill by hand before its replay.

        batches: of one size, which take turns; all with the same side arguments. Where none is given they are drawn,
        of `live` rows on each varying axis, without the slots in `absent`, of `values` as `slotgraph.testing.batches`
        has them. most: the largest ratio allowed, of the runner to the fill by hand with its replay.
        Returns what each way took. ConfigError, RegressionError.
        """
        stage = runner.parts.stage
        given = [(batch, side) for batch in batches] or draw_for(stage, live, values, absent)
        title = f"{stage.backend.name}: step of {stage.inputs.__name__}"
        return self._timer(contest_of_steps(runner, given), title, rounds, steps, most)


@final
class WaysBenchmark:
    """The fixture `benchmark_ways`."""

    def __init__(self, timer: Timer, backend: Backend) -> None:
        self._timer = timer
        self._backend = backend

    def __call__(
        self,
        ways: Mapping[str, Callable[[Any], Any]],
        batches: Sequence[Any],
        title: str,
        *,
        most: float | None = None,
        rounds: int = ROUNDS,
        steps: int = STEPS,
    ) -> Figures:
        """Time ways of one's own to do the same, in turn, such as an engine's fill and this library's.

        ways: calls that take a batch, by name; all others are held to the first, and the second is the one that counts,
        in `most` and against a baseline. batches: of one size, which take turns. RegressionError.
        """
        if len(ways) < 2 or not batches:  # noqa: PLR2004 - a ratio is of two
            message = (
                f"ways to time: at least two, the one that others are held to first, and batches; got {list(ways)}"
            )
            raise ConfigError(message)
        base, ours, *_ = ways
        calls = {name: lambda load, way=way: way(load.batch) for name, way in ways.items()}
        loads = [Load(batch, NO_SIDE, ()) for batch in batches]
        contest = Contest(calls, loads, ours, self._backend, base)
        return self._timer(contest, f"{self._backend.name}: {title}", rounds, steps, most)
