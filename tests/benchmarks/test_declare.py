"""Declaring, checking and planning fifty slots: what a runner's construction costs before it allocates anything."""

from collections.abc import Callable
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from slotgraph import BATCH, TOKENS
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.plan import plan_fill
from slotgraph.runners.commands.bench import declare_decode

SLOTS = 50
SIZES = {BATCH: 256, TOKENS: 256}
DECLARED = declare_decode(SLOTS).slotgraph
PLAN = plan_fill(DECLARED, SIZES, Capabilities())
CALLS: dict[str, Callable[[], Any]] = {
    "declare and plan": lambda: plan_fill(declare_decode(SLOTS).slotgraph, SIZES, Capabilities()),
    "plan": lambda: plan_fill(DECLARED, SIZES, Capabilities()),
}
"""Goal: under 20 ms for the first."""


@pytest.mark.parametrize("call", CALLS)
def test_plan(benchmark: BenchmarkFixture, call: str) -> None:
    """Each gives the same plan."""
    benchmark.group = f"{SLOTS} slots"
    assert benchmark(CALLS[call]) == PLAN
