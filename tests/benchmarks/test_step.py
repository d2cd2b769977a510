"""Whole steps, fill, view and replay of the smallest graph, against hand-written copies and against a bare replay."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from slotgraph.runners.commands.workload import BUCKETS, CASES, FLAT, MIXED, Sources
from tests.benchmarks.races import BY_HAND, NAMES, field, one_after_another, timed, way_of

pytestmark = pytest.mark.slotgraph_backends("cpu", "cuda")

each_row = pytest.mark.parametrize("row", [*BY_HAND, *NAMES, "bare"])


@each_row
@pytest.mark.parametrize(
    ("slots", "sources"), [(4, "device"), (12, "device"), (48, "device"), (12, "numpy"), (12, "lists")]
)
def test_step(benchmark: BenchmarkFixture, backend_name: str, slots: int, sources: Sources, row: str) -> None:
    """The largest case, from tensors on the device and from host data."""
    live, padded = CASES[-1]
    benchmark.group = f"{backend_name}: whole step: {slots} slots, {live}/{padded} rows, {sources}"
    workload, found = field(backend_name, slots, BUCKETS)
    timed(benchmark, one_after_another(way_of(found, row, "step"), workload.sets(live, sources)))


@each_row
@pytest.mark.parametrize("rows", FLAT)
def test_flat(benchmark: BenchmarkFixture, backend_name: str, rows: int, row: str) -> None:
    """Full buckets from one row to thousands, over which a step's cost should not grow."""
    benchmark.group = f"{backend_name}: whole step: {MIXED} slots, {rows}/{rows} rows"
    workload, found = field(backend_name, MIXED, FLAT)
    timed(benchmark, one_after_another(way_of(found, row, "step"), workload.sets(rows)))
