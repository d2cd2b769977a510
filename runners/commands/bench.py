"""`slotgraph bench`: what a step's inputs cost host and device, against the two ways that engines hand-write them."""

import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import attrs
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ...backends.base import Backend
from .bench_tables import show
from .conditions import conditions_of
from .failures import chosen, fail, reported
from .figures import FILL, STEP, Figure, HabitFigure, Memory, Results, RunnerFigure, What
from .habit_races import run_habits
from .habits import habits
from .lowerings import IN_GRAPH, Contestant, Way, contestants
from .plot import ENDINGS, INSTALL, can_plot, draw
from .runner_races import Race, races
from .screen import screen
from .timing import Run, Spread, Times, device_times, measure
from .verifying import verify
from .workload import FLAT, MIXED, WALK, Batch, Case, Workload, cases_of, flat_cases

_MOST_SLOTS: Final = 1000


@attrs.frozen
class Effort:
    """How long to measure: rounds on host and device, and in each round the steps of one live size, and of a walk."""

    rounds: int
    device_rounds: int
    steps: int
    walk: int


FULL: Final = Effort(rounds=50, device_rounds=9, steps=20, walk=WALK)
QUICK: Final = Effort(rounds=5, device_rounds=3, steps=5, walk=8)

_Backend = Annotated[str, typer.Option(metavar="NAME", help="Measure on this backend; see `slotgraph backends`.")]
_Slots = Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of slots to declare.")]
_Plot = Annotated[pathlib.Path | None, typer.Option(metavar="FILE", help=f"Draw the figures ({', '.join(ENDINGS)}).")]
_Json = Annotated[pathlib.Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.")]
_Quick = Annotated[bool, typer.Option("--quick", help="A few rounds only: seconds, and rough figures.")]


def bench(
    *,
    backend: _Backend = "auto",
    slots: _Slots = "4,12,48",
    plot: _Plot = None,
    json_file: _Json = None,
    quick: _Quick = False,
) -> None:
    """Measure what a step's inputs cost host and device, against hand-written fills and a bare replay.

    \b
    per_slot    by hand: one tail reset and one copy a slot
    regrouped   by hand: foreach copies, grouped anew in each step
    in_graph, fused, foreach, slot_by_slot
                this library by each lowering that the backend has, whole: from
                sizing to the typed view, or to the outputs of the replay
    fill_alone  its fill without the runner's sizing, routing and view
    bare        the replay of a graph that holds the step alone, and no fill

    Each is first held to the oracle, byte for byte; then all take turns in one run, so that ratios can be trusted where
    the machine is noisy.

    One more table has a row for each runner over its standard declaration: fill and view, against the same by hand.
    Another has a row for each habit of serving loops, such as lists, other dtypes, absent slots or streams that take
    turns: a whole step, as a ratio to the same step without it.

    \b
    Examples:
      slotgraph bench --quick --slots 12
      slotgraph bench --backend cuda --json figures.json --plot figures.png
    """  # noqa: D301 - \b is what keeps the next paragraph's lines apart in the help
    counts = _counts(slots)
    _check_files(plot, json_file)
    with reported():
        on = chosen(backend)
        results = measured(on, counts, QUICK if quick else FULL)
    show(results, screen())
    with reported():
        _write(results, on, plot, json_file, quick=quick)


def _write(
    results: Results, backend: Backend, plot: pathlib.Path | None, json_file: pathlib.Path | None, *, quick: bool
) -> None:
    """Write the files that were asked for."""
    if json_file is not None:
        data = results.as_data({**conditions_of(backend), "quick": quick})
        json_file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        draw(results, plot)


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,4}", part) and 2 <= int(part) <= _MOST_SLOTS for part in parts):  # noqa: PLR2004 - one, and a count
        message = f"expected numbers from 2 to {_MOST_SLOTS} with commas between them, as in 4,12,48, got {text!r}"
        raise typer.BadParameter(message, param_hint="--slots")
    return sorted({int(part) for part in parts})


def _check_files(plot: pathlib.Path | None, json_file: pathlib.Path | None) -> None:
    """Refuse before minutes of measuring what could not be written after them."""
    for option, file in (("--plot", plot), ("--json", json_file)):
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            message = f"{str(file)!r} is no file in a folder that exists"
            raise typer.BadParameter(message, param_hint=option)
    if plot is not None and plot.suffix.lower() not in ENDINGS:
        message = f"expected a name that ends in {', '.join(ENDINGS)}, got {str(plot)!r}"
        raise typer.BadParameter(message, param_hint="--plot")
    if plot is not None and not can_plot():
        fail(f"--plot needs matplotlib: {INSTALL}")


@attrs.frozen(eq=False)
class _Measured:
    """One contestant on one case, and what is measured of it."""

    what: What
    name: str
    case: Case
    run: Run


def measured(backend: Backend, counts: Sequence[int], effort: Effort) -> Results:
    """Verify every contestant, then measure all of them by turns, for each number of slots."""
    steps: list[_Measured] = []
    workloads = []
    for workload, cases in _workloads(backend, counts, effort):
        found = contestants(workload)
        verify(workload, found, _to_verify(cases))
        steps += [one for case in cases for contestant in found for one in _of_case(case, contestant)]
        workloads.append((workload, found))
    each_runner = list(races(backend))
    with _progress() as progress:
        times = _timed([step.run for step in steps], effort, backend, progress)
        runners = _runners(each_runner, effort, backend, progress)
        habitual = _habits(effort, backend, progress)
    figures = [_figure(step, *time) for step, time in zip(steps, times, strict=True)]
    memory = [one for workload, found in workloads for one in _memory(workload, found)]
    return Results(figures, memory, backend.capabilities.lowerings[0], runners, habitual)


def _timed(runs: Sequence[Run], effort: Effort, backend: Backend, progress: Progress) -> list[Times]:
    """Each run's time on the host, and on the device."""
    host, device = (progress.add_task(f"measuring {name}", total=1) for name in ("the host", "the device"))
    spreads = measure(runs, effort.rounds, effort.steps, backend, lambda: progress.advance(host, 1 / effort.rounds))
    share = 1 / effort.device_rounds
    gpu = device_times(runs, effort.device_rounds, backend, lambda: progress.advance(device, share))
    return list(zip(spreads, gpu, strict=True))


def _runners(found: Sequence[Race], effort: Effort, backend: Backend, progress: Progress) -> list[RunnerFigure]:
    """Each runner's fill and the one by hand, all of them by turns."""
    times = _timed([run for race in found for run in race.runs()], effort, backend, progress)
    by_race = zip(found, times[::2], times[1::2], strict=True)
    return [RunnerFigure.of(race, per_slot, ours) for race, per_slot, ours in by_race]


def _habits(effort: Effort, backend: Backend, progress: Progress) -> list[HabitFigure]:
    """What each habit costs, by each lowering."""
    every = effort.rounds + (effort.device_rounds if backend.device.type != "cpu" else 0)
    task = progress.add_task("measuring habits", total=every)
    sizes = effort.rounds, effort.device_rounds, effort.steps
    return run_habits(habits(backend), backend, *sizes, lambda: progress.advance(task))


def _workloads(backend: Backend, counts: Sequence[int], effort: Effort) -> Iterator[tuple[Workload, list[Case]]]:
    for count in counts:
        workload = Workload.of(count, backend)
        yield workload, list(cases_of(workload, effort.walk))
        if count == MIXED:
            workload = Workload.of(count, backend, FLAT)
            yield workload, list(flat_cases(workload))


def _to_verify(cases: Sequence[Case]) -> list[Batch]:
    """Growing and shrinking batches of all kinds, the last of each case twice: what is uploaded is not sent again."""
    forth = [batch for case in cases for batch in (*case.batches[:WALK], case.batches[-1])]
    return [*forth, *(case.batches[0] for case in reversed(cases))]


def _of_case(case: Case, contestant: Contestant) -> Iterator[_Measured]:
    ways: tuple[tuple[What, Way | None], ...] = ((FILL, contestant.fill), (STEP, contestant.step))
    for what, way in ways:
        if way is not None:
            yield _Measured(what, contestant.name, case, Run(way, case.batches))


def _figure(measured_: _Measured, host: Spread, gpu: Spread | None) -> Figure:
    case = measured_.case
    return Figure(
        what=measured_.what,
        lowering=measured_.name,
        sources=case.sources,
        slots=case.slots,
        lowest=case.lowest,
        live=case.live,
        padded=case.padded,
        host=host,
        gpu=gpu,
    )


def _memory(workload: Workload, found: Sequence[Contestant]) -> Iterator[Memory]:
    """Of the runner that the backend prefers, and of one that feeds the fused kernel."""
    for contestant in found:
        if contestant.runner is not None and contestant.name in (workload.backend.capabilities.lowerings[0], IN_GRAPH):
            yield Memory.of(workload, contestant.runner)


def _progress() -> Progress:
    """Bars on stderr; none where that is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
