"""What fills and steps take, beside the same by hand in the same run; saved, and held to what was saved."""

from collections.abc import Callable
from typing import Any

from inputs import PAGES, DecodeInputs
from model import ADAPTERS, LOCATIONS, VOCAB, make_runner

from slotgraph import BATCH
from slotgraph.backends import Backend

VALUES = {"input_ids": (0, VOCAB - 1), "block_tables": (1, LOCATIONS - 1), "adapters": (0, ADAPTERS - 1)}


def test_fill(benchmark_fill: Callable[..., Any]) -> None:
    """Each lowering of each backend, and two fills by hand, of a bucket as a server has it."""
    benchmark_fill(DecodeInputs, {BATCH: 256, PAGES: 64}, {BATCH: 200}, rounds=10)


def test_step(benchmark_runner: Callable[..., Any], slotgraph_backend: Backend) -> None:
    """The runner, the step without a graph, and the runner's graph behind a fill by hand."""
    benchmark_runner(make_runner(slotgraph_backend), live={BATCH: 7, PAGES: 4}, values=VALUES, rounds=10)
