"""What fills and steps take, beside the same by hand in the same run; saved, and held to a bound."""

from collections.abc import Callable
from typing import Any

import torch
from inputs import PAGES, DecodeInputs
from model import make_runner

from slotgraph import BATCH, EagerRunner
from slotgraph.backends import Backend


def test_fill(benchmark_fill: Callable[..., Any]) -> None:
    """Each lowering of each backend, and two fills by hand, of a bucket as a server has it."""
    benchmark_fill(DecodeInputs, {BATCH: 256, PAGES: 64}, {BATCH: 200}, rounds=10)


def test_step(benchmark_ways: Callable[..., Any], slotgraph_backend: Backend) -> None:
    """The step without a graph, and the runner."""
    runner, rows = make_runner(slotgraph_backend), torch.arange(7, device=slotgraph_backend.device)
    batch = {
        "input_ids": rows,
        "positions": rows,
        "seq_lens": rows.new_ones(7).int(),
        "out_cache_loc": rows + 1,
        "tables": {"blocks": (rows[:, None] + 1).int()},
        "temperatures": rows.new_ones(7).float(),
    }
    eager = EagerRunner(DecodeInputs, runner.stage.step, backend=slotgraph_backend)
    benchmark_ways({"eager": eager, "runner": runner}, [batch, {**batch}], "a decode step", rounds=10)
