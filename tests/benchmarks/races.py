"""What the suites of fills and of steps share: contestants held to the oracle, and batches that take turns."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from slotgraph.backends import load
from slotgraph.runners.commands.lowerings import Contestant, Way, contestants
from slotgraph.runners.commands.verifying import verify
from slotgraph.runners.commands.workload import HOST_SOURCES, Batch, Workload

Field = tuple[Workload, dict[str, Contestant]]
BY_HAND = ("per_slot", "regrouped")
LIBRARY = {"fused_in_graph": "in_graph", "fused": "fused", "foreach": "foreach"}
"""Names of rows, and of lowerings."""
NAMES = {**LIBRARY, "oracle": "slot_by_slot"}


@functools.cache
def field(backend: str, slots: int, buckets: tuple[int, ...]) -> Field:
    """All contestants for one declaration, held to the oracle."""
    workload = Workload.of(slots, load(backend)(), buckets)
    found = contestants(workload)
    verify(workload, found, [batch for rows in (*buckets, *buckets[::-1]) for batch in workload.sets(rows)])
    for sources in HOST_SOURCES:
        verify(workload, found, workload.sets(buckets[-1], sources))
    return workload, {one.name: one for one in found}


def way_of(found: dict[str, Contestant], row: str, what: str) -> Way:
    """How a row's contestant fills or steps; skips where the backend has no such lowering."""
    contestant = found.get(NAMES.get(row, row))
    way: Way | None = None if contestant is None else getattr(contestant, what)
    if way is None:
        pytest.skip(f"this backend has no {row}")
    return way


def one_after_another(way: Way, batches: Sequence[Batch]) -> Callable[[], Any]:
    """A call that takes the next batch: a step must not find the addresses and values of the one before."""
    turns = itertools.cycle(batches)
    return lambda: way(next(turns))


def timed(benchmark: BenchmarkFixture, call: Callable[[], Any]) -> None:
    """As engines step: without gradients."""
    with torch.no_grad():
        benchmark(call)
