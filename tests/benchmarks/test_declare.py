"""Declaring, checking and planning fifty slots: what a runner's construction costs before it allocates anything."""

from pytest_benchmark.fixture import BenchmarkFixture

from slotgraph import BATCH, TOKENS, Inputs
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.plan import FillPlan
from slotgraph.dataflow.planner import plan_fill
from slotgraph.dataflow.serial import plan_from_json, plan_to_json
from slotgraph.runners.commands.workload import declare_decode

SLOTS = 50
SIZES = {BATCH: 256, TOKENS: 256}


def test_declare_and_plan(benchmark: BenchmarkFixture) -> None:
    """Goal: under 20 ms for declaring, checking and planning together."""
    benchmark.group = f"{SLOTS} slots"

    def declare_and_plan() -> FillPlan:
        return plan_fill(declare_decode(SLOTS).slotgraph, SIZES, Capabilities())

    plan = benchmark(declare_and_plan)
    assert sum(len(group.slots) for group in plan.copies) == SLOTS - 1


def test_declare(benchmark: BenchmarkFixture) -> None:
    """Declaring and checking alone."""
    benchmark.group = f"{SLOTS} slots"
    declared: type[Inputs] = benchmark(declare_decode, SLOTS)
    assert len(declared.slotgraph.slots) == SLOTS


def test_plan(benchmark: BenchmarkFixture) -> None:
    """Planning alone, as for each bucket."""
    benchmark.group = f"{SLOTS} slots"
    plan = benchmark(plan_fill, declare_decode(SLOTS).slotgraph, SIZES, Capabilities())
    assert plan.calls < SLOTS


def test_plan_through_json(benchmark: BenchmarkFixture) -> None:
    """A plan to JSON and back."""
    benchmark.group = f"{SLOTS} slots"
    plan = plan_fill(declare_decode(SLOTS).slotgraph, SIZES, Capabilities())
    assert benchmark(lambda: plan_from_json(plan_to_json(plan))) == plan
