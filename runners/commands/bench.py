"""`slotgraph bench`: what a step's inputs cost host and device, against the two ways that engines hand-write them."""

import functools
import itertools
import json
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.console import Console

from ...backends.base import Backend
from ...dataflow.inputs import Inputs
from ..explained.tables import Table
from ..recording.records import versions
from ..testing.benchmarks import PER_SLOT, REGROUPED, SETS
from ..testing.timing import THREADS, Run, measure
from .screen import chosen, reported, screen
from .workload import FILL, STEP, Batch, contestants, declare_decode, draw, verify

SIZES: Final = ((1, 1), (7, 8), (37, 48), (200, 256), (4096, 4096))
"""Live and padded rows."""
CASES: Final = [*(("device", *size) for size in SIZES), ("numpy", *SIZES[3]), ("lists", *SIZES[3])]
"""What batches bring, with their live and padded rows."""
_LISTS: Final = 3
_MOST_SLOTS: Final = 1000
_WIDTH: Final = 110
_TITLES: Final = {FILL: "fill and view", STEP: "whole step: fill, view and replay"}
_TIMES: Final = {"host_us": "host", "gpu_us": "device"}

Row = dict[str, Any]


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

    \b
    Examples:
      slotgraph bench --quick --slots 12
      slotgraph bench --backend cuda --json figures.json
    """  # noqa: D301 - \b is what keeps the next paragraph's lines apart in the help
    parts = [part.strip() for part in slots.split(",")]
    if not all(re.fullmatch("[0-9]{1,4}", part) and 2 <= int(part) <= _MOST_SLOTS for part in parts):  # noqa: PLR2004 - one, and a count
        raise typer.BadParameter(
            f"expected numbers from 2 to {_MOST_SLOTS} with commas between them, as in 4,12,48, got {slots!r}",
            param_hint="--slots",
        )
    if json_file is not None and (json_file.is_dir() or not json_file.absolute().parent.is_dir()):
        raise typer.BadParameter(f"{str(json_file)!r} is no file in a folder that exists", param_hint="--json")
    with reported():
        on = chosen(backend)
        with Console(stderr=True).status("measuring"):
            rows = measured_rows(on, sorted({int(part) for part in parts}), QUICK if quick else FULL)
    ours = on.capabilities.lowerings[0]
    console = screen()
    console.width = max(console.width, _WIDTH)  # what does not fit a terminal is wrapped there, and not cut off
    show_rows(rows, ours, console)
    if json_file is not None:
        about = {"ours": ours, "backend": on.name, "device": str(on.device), "threads": THREADS, "quick": quick}
        data = {"rows": rows, "conditions": {**about, **dict(versions())}}
        json_file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def batch_of(case: str, inputs: type[Inputs], backend: Backend, rows: int, number: int = 0) -> Batch:
    """A batch of so many rows as a case has it; the number says which of several it is."""
    batch = draw(inputs, backend, rows, number)
    if case != "device":
        for index, (name, value) in enumerate([one for one in vars(batch).items() if one[0] != "rows"]):
            setattr(batch, name, value.tolist() if case == "lists" and index < _LISTS else value.cpu().numpy())
    return batch


def measured_rows(backend: Backend, counts: Sequence[int], effort: Effort) -> list[Row]:
    """Fills and whole steps of all contestants, for each number of slots. WrongBytesError if one fills wrongly."""
    rows, runs = list[Row](), list[Run]()
    for count, (case, live, padded) in itertools.product(counts, CASES):
        inputs = declare_decode(count)
        found, drawn = contestants(inputs, backend, padded), functools.partial(batch_of, case, inputs, backend)
        batches = [drawn(live, number) for number in range(SETS)]
        others = [(size, drawn(size)) for size in (padded, 1, live)]  # that grow and shrink
        verify(case, found, [*((live, batch) for batch in batches), *others])
        told = {"sources": case, "slots": count, "live": live, "padded": padded}
        rows += [{"what": one.what, "lowering": one.name, **told} for one in found]
        runs += [Run(one.call, batches) for one in found]
    measure(runs, backend, *effort)
    return [{**row, **run.as_data()} for row, run in zip(rows, runs, strict=True)]


def show_rows(rows: Sequence[Row], ours: str, console: Console) -> None:
    """Print medians of fills and of whole steps, and how many times more than `ours` the hand-written ones take."""
    for (what, title), (time, where) in itertools.product(_TITLES.items(), _TIMES.items()):
        timed = [row for row in rows if row["what"] == what and row[time] is not None]
        names = dict.fromkeys(row["lowering"] for row in timed)
        ratios = [name for name in (PER_SLOT, REGROUPED) if name in names and ours in names]
        shown = list[Row]()
        for key, group in itertools.groupby(
            timed, lambda row: (row["slots"], row["live"], row["padded"], row["sources"])
        ):
            times = {row["lowering"]: row[time] for row in group}
            base = times.get(ours, math.nan)
            more = {f"{name}_/ ours".replace("_", "\n"): f"{times.get(name, math.nan) / base:.1f} x" for name in ratios}
            case = {"slots": key[0], "rows": f"{key[1]}/{key[2]}", "sources": key[3]}
            shown.append({**case, **{name.replace("_", "\n"): times.get(name) for name in names}, **more})
        if shown:
            console.print(Table(f"{where} microseconds, {title}", shown))
    console.print(f"ours: {ours}, which this backend prefers. lists: three slots come as lists, the others as arrays")
