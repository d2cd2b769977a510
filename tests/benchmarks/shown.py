"""Ways that take turns, timed as `slotgraph bench` times them, and their times in a table: run with -s to see it."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.table import Table

from slotgraph.backends import Backend
from slotgraph.runners.testing.timing import Run, Spread, measure


def race(
    title: str,
    ways: Mapping[str, Callable[[Any], Any]],
    batches: Sequence[Any],
    backend: Backend,
    *,
    rounds: int = 25,
    steps: int = 20,
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> None:
    """Time calls that each take a batch, and print what a call took on the host, and on the device if there is one."""
    runs = {name: Run(way, batches, around) for name, way in ways.items()}
    measure(list(runs.values()), backend, rounds, steps, device_rounds=5)
    show(f"{title}: host", {name: run.host for name, run in runs.items()})
    show(f"{title}: device", {name: run.device for name, run in runs.items() if run.device})


def show(title: str, times: Mapping[str, Sequence[float]]) -> None:
    """Print medians and spreads, and each median's ratio to the first."""
    table = Table(title=title, title_justify="left")
    for name in ("", "us, median", "p10", "p90", "of the first"):
        table.add_column(name, justify="right")
    spreads = {name: Spread.of(one) for name, one in times.items()}
    for name, one in spreads.items():
        ratio = one.median / next(iter(spreads.values())).median
        table.add_row(name, *(f"{value:.2f}" for value in (one.median, one.p10, one.p90)), f"{ratio:.4f}")
    if times:
        Console(width=110).print("\n", table)
