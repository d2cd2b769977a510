"""`slotgraph bench`: what a step's inputs cost host and device, against the two ways that engines hand-write them."""

import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ...backends.base import Backend
from ..recording.records import versions
from ..testing.contests import PER_SLOT, REGROUPED
from ..testing.timing import THREADS, Run, Spread, measure
from .habits import BASE, habits
from .screen import chosen, reported, screen
from .workload import FILL, ORACLE, STEP, Case, Contestant, by_lowering, cases, contestants, verify

_MOST_SLOTS: Final = 1000
_WIDTH: Final = 110
_TITLES: Final = {FILL: "fill and view", STEP: "whole step: fill, view and replay"}
_TIMES: Final = {"host_us": "host", "gpu_us": "device"}

Row = dict[str, Any]
Cell = tuple[tuple[str, ...], str, str]
"""A row's key, a column, and what stands there."""


class Effort(NamedTuple):
    """How long to measure: rounds on host and device, and the steps of each round."""

    rounds: int
    steps: int
    device_rounds: int


FULL: Final = Effort(rounds=50, steps=20, device_rounds=9)
QUICK: Final = Effort(rounds=5, steps=5, device_rounds=3)

_Backend = Annotated[str, typer.Option(metavar="NAME", help="Measure on this backend; see `slotgraph backends`.")]
_Slots = Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of slots to declare.")]
_Json = Annotated[pathlib.Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.")]
_Quick = Annotated[bool, typer.Option("--quick", help="A few rounds only: seconds, and rough figures.")]


def bench(
    *, backend: _Backend = "auto", slots: _Slots = "4,12,48", json_file: _Json = None, quick: _Quick = False
) -> None:
    """Measure what a step's inputs cost host and device, against hand-written fills and a bare replay.

    \b
    per_slot    by hand: one tail reset and one copy a slot
    regrouped   by hand: foreach copies, grouped anew in each step
    in_graph, fused, foreach, slot_by_slot
                this library by each lowering that the backend has, whole: from
                sizing to the typed view, or to the outputs of the replay
    bare        the replay of a graph that holds the step alone, and no fill

    Each is first held to the oracle, byte for byte; then all take turns in one run, so that ratios can be trusted where
    the machine is noisy.

    Another table has a row for each habit of serving loops, such as lists, other dtypes, absent slots or streams that
    take turns: a whole step, and its ratio to the same step without the habit.

    \b
    Examples:
      slotgraph bench --quick --slots 12
      slotgraph bench --backend cuda --json figures.json
    """  # noqa: D301 - \b is what keeps the next paragraph's lines apart in the help
    counts, effort = _counts(slots), QUICK if quick else FULL
    if json_file is not None and (json_file.is_dir() or not json_file.absolute().parent.is_dir()):
        message = f"{str(json_file)!r} is no file in a folder that exists"
        raise typer.BadParameter(message, param_hint="--json")
    with reported():
        on = chosen(backend)
        with Console(stderr=True).status("measuring"):
            rows, habitual = measured_rows(on, counts, effort), measured_habits(on, effort)
    ours = on.capabilities.lowerings[0]
    console = screen()
    console.width = max(console.width, _WIDTH)  # what does not fit a terminal is wrapped there, and not cut off
    show_rows(rows, ours, console)
    show_habits(habitual, console)
    if json_file is not None:
        about = {"ours": ours, "backend": on.name, "device": str(on.device), "threads": THREADS, "quick": quick}
        data = {"rows": rows, "habits": habitual, "conditions": {**about, **dict(versions())}}
        json_file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,4}", part) and 2 <= int(part) <= _MOST_SLOTS for part in parts):  # noqa: PLR2004 - one, and a count
        message = f"expected numbers from 2 to {_MOST_SLOTS} with commas between them, as in 4,12,48, got {text!r}"
        raise typer.BadParameter(message, param_hint="--slots")
    return sorted({int(part) for part in parts})


def measured_rows(backend: Backend, counts: Sequence[int], effort: Effort) -> list[Row]:
    """Fills and whole steps of all contestants, for each number of slots. WrongBytesError where one fills wrongly."""
    rows, runs = list[Row](), list[Run]()
    for count in counts:
        for case in cases(count, backend):
            found = contestants(case)
            verify(case, found)
            told = {"sources": case.name, "slots": count, "live": case.sizes[0], "padded": case.padded}
            for what, one in itertools.product((FILL, STEP), found):
                way = getattr(one, what)
                if way is not None:
                    rows.append({"what": what, "lowering": one.name, **told})
                    runs.append(Run(way, case.batches))
    measure(runs, backend, *effort)
    return [{**row, **_times(run)} for row, run in zip(rows, runs, strict=True)]


def measured_habits(backend: Backend, effort: Effort) -> list[Row]:
    """Whole steps of each habit by each lowering but the oracle, and their ratios to the base. WrongBytesError."""
    found: list[tuple[Case, Contestant, Run]] = []
    for case in habits(backend):
        ways = [by_lowering(case, one) for one in backend.capabilities.lowerings if one != ORACLE]
        verify(case, ways, (STEP,))
        found += [(case, way, Run(way.step, case.batches, case.around, case.before)) for way in ways]
    measure([run for *_, run in found], backend, *effort)
    bases = {way.name: run for case, way, run in found if case.name == BASE}
    return [
        {
            "habit": case.name,
            "lowering": way.name,
            "detours": 0 if way.runner is None else sum(way.runner.stats()["detours"].values()),
            **_times(run),
            "ratio": _ratio(run.spreads[0], bases[way.name].spreads[0]),
            "gpu_ratio": _ratio(run.spreads[1], bases[way.name].spreads[1]),
        }
        for case, way, run in found
    ]


def _times(run: Run) -> Row:
    """Microseconds a step; None on the device where that was not measured."""
    found: Row = {}
    for name, spread in zip(("host", "gpu"), run.spreads, strict=True):
        values = (None,) * 3 if spread is None else (spread.median, spread.p10, spread.p90)
        names = (f"{name}_us", f"{name}_p10_us", f"{name}_p90_us")
        found |= {key: value and round(value, 3) for key, value in zip(names, values, strict=True)}
    return found


def _ratio(one: Spread | None, base: Spread | None) -> float | None:
    return None if one is None or base is None else round(one.median / base.median, 3)


def show_rows(rows: Sequence[Row], ours: str, console: Console) -> None:
    """Print medians of fills and of whole steps, and how many times more than `ours` the hand-written ones take."""

    def cells(what: str, time: str) -> Iterator[Cell]:
        times: dict[tuple[tuple[str, ...], str], float] = {}
        for row in rows:
            if row["what"] == what and row[time] is not None:
                key = str(row["slots"]), f"{row['live']}/{row['padded']}", row["sources"]
                times[key, row["lowering"]] = row[time]
                yield key, row["lowering"], f"{row[time]:.1f}"
        for (at, name), took in times.items():
            if name in (PER_SLOT, REGROUPED) and (at, ours) in times:
                yield at, f"{name} / ours", f"{took / times[at, ours]:.1f} x"

    for (what, title), (time, where) in itertools.product(_TITLES.items(), _TIMES.items()):
        _print(console, f"{where} microseconds, {title}", ("slots", "rows", "sources"), cells(what, time))
    console.print(f"ours: {ours}, which this backend prefers. lists: three slots come as lists, the others as arrays")


def show_habits(rows: Sequence[Row], console: Console) -> None:
    """Print what a whole step takes under each habit by each lowering, with the ratio to the base."""
    for (time, where), ratio in zip(_TIMES.items(), ("ratio", "gpu_ratio"), strict=True):
        timed = [row for row in rows if row[time] is not None]
        cells = (((row["habit"],), row["lowering"], f"{row[time]:.1f} ({row[ratio]:.2f})") for row in timed)
        _print(console, f"{where} microseconds of a whole step under each habit (ratio to the base)", ("habit",), cells)
    detours = [f"{row['habit']} by {row['lowering']}: {row['detours']}" for row in rows if row["detours"]]
    console.print(f"steps filled by another lowering than the runner's: {', '.join(detours) or 'none'}")


def _print(console: Console, title: str, keys: Sequence[str], cells: Iterable[Cell]) -> None:
    """Print a table with a row a key and a column a lowering, if there are cells."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    columns: dict[str, None] = {}
    for key, column, text in cells:
        found.setdefault(key, {})[column] = text
        columns[column] = None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in (*keys, *columns):
        table.add_column(name.replace("_", "\n").replace(" /", "\n/"), justify="right", no_wrap=True)
    for key, texts in found.items():
        table.add_row(*key, *(texts.get(column, "-") for column in columns))
    if found:
        console.print(f"\n[bold]{title}[/]", table)
