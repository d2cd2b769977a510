"""`slotgraph bench`: what a fill costs the host, against the two ways that engines hand-write it."""

import json
import pathlib
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Final

import attrs
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ...backends.base import Backend
from .failures import chosen, fail, reported
from .figures import Figure, as_data, as_tables
from .lowerings import LOWERINGS, verify
from .plot import ENDINGS, INSTALL, can_plot, draw
from .screen import screen
from .timing import Run, device_times, measure
from .workload import CASES, WALK, declare_decode, make_batches, walk_sizes

_MOST_SLOTS: Final = 1000
_WIDE: Final = 130
"""Columns from which percentiles have room beside medians."""


@attrs.frozen
class Effort:
    """How long to measure: rounds, and in each the steps of one live size, and of a walk through several."""

    rounds: int
    steps: int
    walk: int


FULL: Final = Effort(rounds=100, steps=20, walk=WALK)
QUICK: Final = Effort(rounds=5, steps=5, walk=8)

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
    """Measure the host's time for filling a decode step and making its view, against hand-written fills.

    \b
    per_slot    one tail reset and one copy a slot, views sliced in each step
    regrouped   foreach copies, grouped anew in each step
    foreach     this library, whole: runner.fill(batch), from sizing to the typed view
    fill_alone  its fill without the runner's sizing and routing

    Each is first held to the oracle, byte for byte; then all take turns in one run, so that ratios can be trusted where
    the machine is noisy.

    \b
    Examples:
      slotgraph bench
      slotgraph bench --quick --slots 12
      slotgraph bench --json figures.json --plot figures.png
    """  # noqa: D301 - \b is what keeps the next paragraph's lines apart in the help
    counts = _counts(slots)
    _check_files(plot, json_file)
    with reported():
        on = chosen(backend)
        figures = measured(on, counts, QUICK if quick else FULL)
    console = screen()
    console.print(as_tables(figures, spread=console.width >= _WIDE))
    if json_file is not None:
        json_file.write_text(
            json.dumps(as_data(figures, _conditions(on, quick=quick)), indent=2) + "\n", encoding="utf-8"
        )
    if plot is not None:
        draw(figures, plot)


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 2 <= int(part) <= _MOST_SLOTS for part in parts):  # noqa: PLR2004 - one, and a count
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


def measured(backend: Backend, counts: Sequence[int], effort: Effort) -> list[Figure]:
    """Verify every lowering, then measure all of them by turns, for each number of slots."""
    cases = [case for count in counts for case in _cases(count, backend, effort)]
    runs = [run for _, run in cases]
    with _progress() as progress:
        task = progress.add_task("measuring", total=effort.rounds)
        host = measure(runs, effort.rounds, backend, lambda: progress.advance(task))
    device = device_times(runs, min(effort.rounds, QUICK.rounds), backend)
    return [case(host, gpu) for (case, _), host, gpu in zip(cases, host, device, strict=True)]


def _cases(count: int, backend: Backend, effort: Effort) -> Iterator[tuple[Callable[..., Figure], Run]]:
    """What is measured for one number of slots: steady live sizes, and a walk in the largest bucket."""
    inputs = declare_decode(count)
    padded = CASES[-1][1]
    steady = make_batches(inputs, [live for live, _ in CASES], backend)
    walk = make_batches(inputs, walk_sizes(padded, CASES[-2][1])[: effort.walk], backend)
    sizes = [batch.rows for batch in walk]
    for kind in LOWERINGS:
        lowering = kind(inputs, backend)
        verify(lowering, inputs, backend, [*steady, *walk, *steady])
        for batch, (live, bucket) in zip(steady, CASES, strict=True):
            yield partial(Figure, count, live, live, bucket, kind.name), Run(lowering, [batch] * effort.steps)
        yield partial(Figure, count, min(sizes), max(sizes), padded, kind.name), Run(lowering, walk)


def _progress() -> Progress:
    """A bar on stderr; none where that is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _conditions(backend: Backend, *, quick: bool) -> dict[str, Any]:
    """What a reader must know to judge the figures."""
    return {
        "backend": backend.name,
        "device": str(backend.device),
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "quick": quick,
    }
