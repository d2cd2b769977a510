"""Fill and view of a decode step, against hand-written fills: one group a shape, so that ratios show in one run."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from slotgraph.runners.commands.workload import BUCKETS, CASES, WALK, Case
from tests.benchmarks.races import BY_HAND, LIBRARY, field, one_after_another, timed, way_of

pytestmark = pytest.mark.slotgraph_backends("cpu", "cuda")

each_row = pytest.mark.parametrize("row", [*BY_HAND, *LIBRARY, "fill_alone"])
each_slots = pytest.mark.parametrize("slots", [4, 12, 48])


@each_row
@pytest.mark.parametrize(("live", "padded"), CASES)
@each_slots
def test_steady(benchmark: BenchmarkFixture, backend_name: str, slots: int, live: int, padded: int, row: str) -> None:
    """The same live size in each step, as in most steps of a server under load."""
    benchmark.group = f"{backend_name}: fill and view: {slots} slots, {live}/{padded} rows"
    workload, found = field(backend_name, slots, BUCKETS)
    timed(benchmark, one_after_another(way_of(found, row, "fill"), workload.sets(live)))


@each_row
@each_slots
def test_changing(benchmark: BenchmarkFixture, backend_name: str, slots: int, row: str) -> None:
    """Sixty-four steps of which each has another live size, so that tails need work."""
    benchmark.group = f"{backend_name}: {WALK} fills and views of changing sizes: {slots} slots, {BUCKETS[-1]} rows"
    workload, found = field(backend_name, slots, BUCKETS)
    fill, batches = way_of(found, row, "fill"), Case.walk(workload, WALK).batches

    def steps() -> None:
        for batch in batches:
            fill(batch)

    timed(benchmark, steps)
