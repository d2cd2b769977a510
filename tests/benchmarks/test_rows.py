"""Fills and whole steps of a decode step, by hand and by each lowering: the rows of `slotgraph bench`."""

import functools

import pytest

from slotgraph.backends import load
from slotgraph.runners.commands.workload import SIZES, Case, Contestant, cases, contestants, verify
from slotgraph.runners.testing.benchmarks import WaysBenchmark

pytestmark = pytest.mark.slotgraph_backends("cpu", "cuda")
NUMBERS = {f"{size[0]} rows": number for number, size in enumerate(SIZES)} | {"numpy": len(SIZES), "lists": -1}


@functools.cache
def held(backend: str, slots: int, number: int) -> tuple[Case, list[Contestant]]:
    """A case and its contestants, held to the oracle; the one that counts is second."""
    on = load(backend)()
    case = list(cases(slots, on))[number]
    first, *found = contestants(case)
    verify(case, [first, *found])
    return case, [first, *sorted(found, key=lambda one: one.name != on.capabilities.lowerings[0])]


@pytest.mark.parametrize("what", ["fill", "step"])
@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("slots", [4, 12, 48])
def test_row(benchmark_ways: WaysBenchmark, backend_name: str, slots: int, number: int, what: str) -> None:
    """All ways in turn."""
    case, found = held(backend_name, slots, number)
    ways = {one.name: way for one in found if (way := getattr(one, what)) is not None}
    benchmark_ways(ways, case.batches, f"{what}: {slots} slots, {case.sizes[0]}/{case.padded} rows, {case.name}")
