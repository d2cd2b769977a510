"""Fill and view of every runner over its standard declaration, against the same by hand: one benchmark a runner."""

import functools

import pytest

from slotgraph.backends import load
from slotgraph.runners.commands.runner_kinds import kinds
from slotgraph.runners.commands.runner_races import Race
from slotgraph.runners.testing.benchmarks import WaysBenchmark

pytestmark = pytest.mark.slotgraph_backends("cpu", "cuda")

KINDS = {kind.phase: kind for kind in kinds()}


@functools.cache
def race(backend: str, phase: str) -> Race:
    """A runner and its rival, held to each other."""
    return Race.of(KINDS[phase], load(backend)())


@pytest.mark.parametrize("phase", KINDS)
def test_fill_and_view(benchmark_ways: WaysBenchmark, backend_name: str, phase: str) -> None:
    """A server's sizes, the same in each step; by hand and by the runner, round by round in turn."""
    found = race(backend_name, phase)
    kind, (by_hand, ours) = found.kind, found.runs()
    title = f"fill and view: {phase}, {kind.runner}, {kind.live}/{kind.shown} rows"
    benchmark_ways({"per_slot": by_hand.way, "ours": ours.way}, found.batches, title)
