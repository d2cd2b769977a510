"""What books cost: whole steps of which no fill, one in so many, or each is timed; and reading them."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from slotgraph.backends import load
from slotgraph.dataflow.capabilities import Lowering
from slotgraph.runners import runner as runners
from slotgraph.runners import statistics
from slotgraph.runners.commands.bench import captured, declare_decode, draw
from slotgraph.runners.metrics import exposition
from slotgraph.runners.statistics import EVERY, FIRST

pytestmark = pytest.mark.slotgraph_backends("cpu", "cuda")
SLOTS = 12
LIVE, PADDED = 200, 256
TIMED = {"none timed": (1 << 20, 0), f"one in {EVERY} timed": (EVERY, FIRST), "each timed": (1, 1)}
"""How many fills there are for one that is timed, and which."""


def draw_and_runner(backend: str, lowering: Lowering) -> tuple[Callable[[int, int], Any], Any]:
    """What draws batches of so many rows, and a captured runner."""
    inputs, on = declare_decode(SLOTS), load(backend)()
    return functools.partial(draw, inputs, on), captured(inputs, on, PADDED, lowering)


@pytest.mark.parametrize("row", TIMED)
@pytest.mark.parametrize("lowering", ["in_graph", "foreach"])
def test_step(
    benchmark: BenchmarkFixture, backend_name: str, lowering: Lowering, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By shortcut where fills are in the graph, and by the general way."""
    benchmark.group = f"{backend_name}: whole step, {lowering}: {SLOTS} slots, {LIVE} rows"
    every, first = TIMED[row]
    monkeypatch.setattr(statistics, "EVERY", every)
    monkeypatch.setattr(statistics, "FIRST", first)
    monkeypatch.setattr(runners, "EVERY", every)
    drawn, runner = draw_and_runner(backend_name, lowering)
    turns = itertools.cycle([drawn(LIVE, number) for number in range(4)])
    with torch.no_grad():
        benchmark(lambda: runner(next(turns)))
    counted = sum(times["count"] for times in runner.stats()["fills"]["buckets"].values())
    assert counted <= 1 if first == 0 else counted >= 1 or not benchmark.enabled


@pytest.mark.parametrize("row", ["stats", "exposition"])
def test_read(benchmark: BenchmarkFixture, backend_name: str, row: str) -> None:
    """The books of a runner that has seen many numbers of live rows."""
    benchmark.group = f"{backend_name}: reading the books"
    drawn, runner = draw_and_runner(backend_name, "in_graph")
    for live in range(1, LIVE):
        for number in range(3):
            runner(drawn(live, number))
    benchmark(runner.stats if row == "stats" else lambda: exposition(mine=runner))
