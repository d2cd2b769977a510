"""Whole steps, by hand and by each lowering: the rows of `slotgraph bench`."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from slotgraph import BATCH, TOKENS
from slotgraph.backends import load
from slotgraph.runners.commands.bench import ORACLE, SIZES, contestants, declare_decode, draw
from slotgraph.runners.testing.benchmarks import SETS, verify

pytestmark = pytest.mark.slotgraph_backends("cpu", "cuda")


@functools.cache
def held(backend: str, slots: int, live: int, padded: int) -> tuple[list[Any], dict[str, Any]]:
    """Batches and contestants, compared with the oracle; the one that counts is second."""
    on, inputs = load(backend)(), declare_decode(slots)
    batches = [draw(inputs, on, live, number) for number in range(SETS)]
    found = contestants(inputs, on, padded)
    sizes = {BATCH: live, TOKENS: live}
    verify(f"{slots} slots", inputs.slotgraph, on, found[ORACLE], found, [(sizes, batch) for batch in batches])
    first = ["per_slot", on.capabilities.lowerings[0]]
    return batches, {name: found[name].call for name in [*first, *(found.keys() - {*first})]}


@pytest.mark.parametrize(("live", "padded"), SIZES)
@pytest.mark.parametrize("slots", [4, 12, 48])
def test_row(benchmark_ways: Callable[..., Any], backend_name: str, slots: int, live: int, padded: int) -> None:
    """All ways in turn."""
    batches, ways = held(backend_name, slots, live, padded)
    benchmark_ways(ways, batches, f"{slots} slots, {live}/{padded} rows")
