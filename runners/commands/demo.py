"""`slotgraph demo`: a stale row in a handwritten loop, the same loop with declared inputs, a check, and fill times."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from ...backends.base import Backend
from ...dataflow.axes import TOKENS
from ...dataflow.inputs import Inputs
from ...dataflow.slots import copied
from ...dataflow.tails import keep
from ..check.checks import check
from ..decode import DecodeRunner
from ..testing.bench import BARE, QUICK, cases, declare_decode, runner_of
from ..testing.benchmarks import PADDED
from ..testing.by_hand import PER_SLOT
from ..testing.timing import Spread, measure

BUCKET = 4
ROWS = 8
"""Rows of the table of sums. Row 0 takes what padded rows add."""
STEPS = (([11, 42, 7], [1, 2, 3]), ([12, 43], [1, 2]))
"""Two steps: the ids of their requests, and the row in the table of each. In the second, the third request waits."""
BAR = 34
"""Columns of the longest bar."""
TIMED = 200
"""Live rows of the step that is timed."""
THOUGHT = "no one reads padded rows"
BY_HAND = """\
  ids[:n].copy_(batch.ids)
  rows[:n].copy_(batch.rows)  # rows behind n keep what the last step left,
  graph.replay()              # and run, too"""
DECLARED = """\
  class Summed(Inputs):
      ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
      rows: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)"""


class Summed(Inputs):
    """The inputs of a step that sums up each request's ids."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, poison=())
    rows: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, poison=())


class Forgetful(Inputs):
    """The same without a reset of the tail, as if nothing read padded rows. Checks may put any live id there."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=keep(THOUGHT), poison=(1, 99))
    rows: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=keep(THOUGHT), poison=(1, ROWS - 1))


def sum_into(sums: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    """Return a step that adds each request's id to its sum."""

    def step(view: Any) -> torch.Tensor:
        return sums.index_add_(0, view.rows, view.ids)[view.rows]

    return step


def run_by_hand(backend: Backend) -> list[int]:
    """Run the steps in a handwritten loop, without a tail reset. Return the sums."""
    sums = _zeros(backend, ROWS)
    view = types.SimpleNamespace(ids=_zeros(backend, BUCKET), rows=_zeros(backend, BUCKET))
    step = functools.partial(sum_into(sums), view)
    with backend.stream():
        step()  # torch requires a warm-up
        backend.synchronize()
        graph = backend.capture(step)
    for ids, rows in STEPS:
        view.ids[: len(ids)].copy_(torch.tensor(ids, device="cpu"))
        view.rows[: len(rows)].copy_(torch.tensor(rows, device="cpu"))
        graph.replay()
    return sums.tolist()


def run_declared(backend: Backend) -> list[int]:
    """Run the steps through a runner. Return the sums."""
    sums = _zeros(backend, ROWS)
    runner = DecodeRunner(Summed, sum_into(sums), buckets=[BUCKET], backend=backend, progress=False)
    runner.capture()
    for ids, rows in STEPS:
        runner({"ids": ids, "rows": rows})
    return sums.tolist()


def _zeros(backend: Backend, rows: int) -> torch.Tensor:
    return torch.zeros(rows, dtype=torch.int64, device=backend.device)


def finding(backend: Backend) -> str:
    """Return the first finding of a check of `Forgetful`."""
    step = sum_into(_zeros(backend, ROWS))
    runner = DecodeRunner(Forgetful, step, buckets=[BUCKET], backend=backend, progress=False)
    runner.capture()
    report = check(runner, rounds=1, values={"ids": (1, 99), "rows": (1, ROWS - 1)})
    return str(report.findings[0])


def costs(backend: Backend) -> dict[str, float]:
    """Return the host's microseconds for a decode step of 12 inputs: by hand, by this library, and without inputs."""
    runner = runner_of(declare_decode(12), output_rows=TOKENS, backend=backend)
    names = {PER_SLOT: "by hand", backend.capabilities.lowerings[0]: "slotgraph", BARE: "no inputs"}
    runs = {row["lowering"]: run for row, run in cases(runner, (TIMED,), (PER_SLOT,)) if row["lowering"] in names}
    measure([*runs.values()], backend, *QUICK)
    return {name: Spread.of(runs[way].host).median for way, name in names.items()}


def show(backend: Backend, console: Console) -> None:
    """Print the demo: three parts, and the times of a step."""

    def say(text: str, style: str = "") -> None:
        console.print(Padding(text, (0, 0, 0, 2), style=style, expand=False))

    title = "[bold]slotgraph[/bold]: why the inputs of a captured step are declared"
    console.print(f"{title}; on {backend.name}, {backend.device}")
    console.print("\n[bold]1. By hand: a wrong number, and no error[/bold]")
    say("A step adds the ids of requests to their sums, captured for 4 rows. First 3 requests run, then 2 of them:")
    say(BY_HAND, "cyan")
    say(f"The sum of the third request is [bold red]{run_by_hand(backend)[3]}[/bold red]; it should be 7.")
    console.print("\n[bold]2. The same, declared[/bold]")
    say("Each input says what its padded rows hold. Row 0 of the sums is nobody's:")
    say(DECLARED, "cyan")
    say(f"The sum of the third request is [bold green]{run_declared(backend)[3]}[/bold green].")
    console.print("\n[bold]3. A check finds the mistake before anybody is served[/bold]")
    say(f'Somebody says pad=keep("{THOUGHT}"). slotgraph.check(runner) puts other values there:')
    say(escape(finding(backend)), "yellow")
    console.print(f"\n[bold]4. What the inputs of a decode step cost: 12 slots, {TIMED} of {PADDED} rows[/bold]")
    found = costs(backend)
    for name, each in found.items():
        bar = "\u2588" * max(1, round(BAR * each / max(found.values())))
        style = "bold green" if name == "slotgraph" else "dim"
        say(f"{name:10} [{style}]{bar}[/{style}] {each:.0f} us")
    page = "https://github.com/slotgraph/slotgraph/blob/main/docs/quick-start.md"
    console.print(f"\nNext: {page}\nslotgraph bench, check and explain take a runner of your own.")
