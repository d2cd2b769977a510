"""Ways that take turns, timed as `slotgraph bench` times them, and their times in a table: run with -s to see it."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
from rich.console import Console

from slotgraph.backends import Backend
from slotgraph.dataflow.shown import Table
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
    """Print medians and spreads in microseconds, and each median's ratio to the first."""
    spreads = {name: Spread.of(one) for name, one in times.items()}
    first = next(iter(spreads.values()), None)
    rows = [
        {"way": name, **attrs.asdict(one), "of the first": f"{one.median / first.median:.4f}"}
        for name, one in spreads.items()
        if first is not None
    ]
    if rows:
        Console(width=110).print(f"\n{Table(title, rows).lines(110)}", highlight=False, markup=False)
