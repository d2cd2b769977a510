"""Fill and view of a decode step, against hand-written fills: one group a shape, so that ratios show in one run."""

from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from slotgraph.backends import choose
from slotgraph.runners.commands.lowerings import LOWERINGS, Lowering, verify
from slotgraph.runners.commands.workload import CASES, declare_decode, make_batches, walk_sizes

BACKEND = choose("cpu")
SLOTS = (4, 12, 48)

each_lowering = pytest.mark.parametrize("kind", LOWERINGS, ids=lambda kind: kind.name)


def made(kind: type[Any], slots: int, sizes: list[int]) -> tuple[Lowering, list[Any]]:
    """A lowering that was held to the oracle, and its batches."""
    inputs = declare_decode(slots)
    lowering: Lowering = kind(inputs, BACKEND)
    batches = make_batches(inputs, sizes, BACKEND)
    verify(lowering, inputs, BACKEND, batches)
    return lowering, batches


@each_lowering
@pytest.mark.parametrize(("live", "padded"), CASES)
@pytest.mark.parametrize("slots", SLOTS)
def test_steady(benchmark: BenchmarkFixture, slots: int, live: int, padded: int, kind: type[Any]) -> None:
    """The same live size in each step, as in most steps of a server under load."""
    benchmark.group = f"fill and view: {slots} slots, {live}/{padded} rows"
    lowering, (batch,) = made(kind, slots, [live])
    with torch.no_grad():
        benchmark(lowering, batch)


@each_lowering
@pytest.mark.parametrize("slots", SLOTS)
def test_changing(benchmark: BenchmarkFixture, slots: int, kind: type[Any]) -> None:
    """Sixty-four steps of which each has another live size, so that tails need work."""
    benchmark.group = f"64 fills and views of changing sizes: {slots} slots, 256 rows"
    lowering, batches = made(kind, slots, walk_sizes(256, 48))

    def steps() -> None:
        for batch in batches:
            lowering(batch)

    with torch.no_grad():
        benchmark(steps)
