"""Fill and view of every runner over its standard declaration, against the same fill by hand: one group a runner."""

import functools

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from slotgraph.backends import load
from slotgraph.runners.commands.runner_kinds import kinds
from slotgraph.runners.commands.runner_races import Race
from tests.benchmarks.races import one_after_another, timed

KINDS = {kind.phase: kind for kind in kinds()}


@functools.cache
def race(backend: str, phase: str) -> Race:
    """A runner and its rival, held to each other."""
    return Race.of(KINDS[phase], load(backend)())


@pytest.mark.parametrize("row", ["per_slot", "ours"])
@pytest.mark.parametrize("phase", KINDS)
def test_fill_and_view(benchmark: BenchmarkFixture, backend_name: str, phase: str, row: str) -> None:
    """A server's sizes, the same in each step."""
    found = race(backend_name, phase)
    kind, (by_hand, ours) = found.kind, found.runs()
    benchmark.group = f"{backend_name}: fill and view: {phase}, {kind.runner}, {kind.live}/{kind.shown} rows"
    run = by_hand if row == "per_slot" else ours
    timed(benchmark, one_after_another(run.way, run.batches))
