"""Fills and whole steps of a decode step, by hand and by each lowering: the rows of `slotgraph bench`."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from slotgraph.backends import load
from slotgraph.runners.commands.bench import SIZES, Contestant, contestants, declare_decode, draw, verify
from slotgraph.runners.testing.benchmarks import SETS

pytestmark = pytest.mark.slotgraph_backends("cpu", "cuda")


@functools.cache
def held(backend: str, slots: int, live: int, padded: int) -> tuple[list[Any], list[Contestant]]:
    """Batches and contestants, held to the oracle; the one that counts is second."""
    on, inputs = load(backend)(), declare_decode(slots)
    batches = [draw(inputs, on, live, number) for number in range(SETS)]
    found = contestants(inputs, on, padded)
    verify(f"{slots} slots", found, [(live, batch) for batch in batches])
    first = ["per_slot", on.capabilities.lowerings[0]]
    return batches, sorted(found, key=lambda one: first.index(one.name) if one.name in first else len(first))


@pytest.mark.parametrize("what", ["fill", "step"])
@pytest.mark.parametrize(("live", "padded"), SIZES)
@pytest.mark.parametrize("slots", [4, 12, 48])
def test_row(
    benchmark_ways: Callable[..., Any], backend_name: str, slots: int, live: int, padded: int, what: str
) -> None:
    """All ways in turn."""
    batches, found = held(backend_name, slots, live, padded)
    ways = {one.name: one.call for one in found if one.what == what}
    benchmark_ways(ways, batches, f"{what}: {slots} slots, {live}/{padded} rows")
