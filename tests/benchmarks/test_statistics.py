"""What books cost: whole steps of which no fill, one in so many, or each is timed; and reading them."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from slotgraph.backends import load
from slotgraph.dataflow.capabilities import Lowering
from slotgraph.runners import decision, shortcut
from slotgraph.runners.commands.lowerings import captured
from slotgraph.runners.commands.workload import BUCKETS, CASES, MIXED, Workload
from slotgraph.runners.filltimes import EVERY, FIRST
from slotgraph.runners.metrics import exposition
from tests.benchmarks.races import one_after_another, timed

pytestmark = pytest.mark.slotgraph_backends("cpu", "cuda")

TIMED = {"none timed": (1 << 20, 0), f"one in {EVERY} timed": (EVERY, FIRST), "each timed": (1, 1)}
"""How many fills there are for one that is timed, and which."""
LIVE, PADDED = CASES[-1]


@pytest.mark.parametrize("row", TIMED)
@pytest.mark.parametrize("lowering", ["in_graph", "foreach"])
def test_step(
    benchmark: BenchmarkFixture, backend_name: str, lowering: Lowering, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve slots, by shortcut where fills are in the graph, and by the general way."""
    benchmark.group = f"{backend_name}: whole step, {lowering}: {MIXED} slots, {LIVE}/{PADDED} rows"
    every, first = TIMED[row]
    monkeypatch.setattr(decision, "EVERY", every)
    monkeypatch.setattr(decision, "FIRST", first)
    monkeypatch.setattr(shortcut, "EVERY", every)
    workload = Workload.of(MIXED, load(backend_name)(), BUCKETS)
    runner, batches = captured(workload, lowering), workload.sets(LIVE)
    timed(benchmark, one_after_another(runner, batches))
    counted = sum(times["count"] for times in runner.stats()["fills"]["buckets"].values())
    assert counted <= 1 if first == 0 else counted >= 1 or not benchmark.enabled


@pytest.mark.parametrize("row", ["stats", "exposition"])
def test_read(benchmark: BenchmarkFixture, backend_name: str, row: str) -> None:
    """The books of a runner with four buckets, each with many numbers of live rows."""
    benchmark.group = f"{backend_name}: reading the books"
    workload = Workload.of(MIXED, load(backend_name)(), BUCKETS)
    runner = captured(workload, "in_graph")
    for live in range(1, LIVE):
        for batch in (*workload.sets(live), workload.sets(live)[0]):
            runner(batch)
    benchmark(runner.stats if row == "stats" else lambda: exposition(runner))
