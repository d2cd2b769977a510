"""What true capture semantics cost on a CPU: a small step eager, called again, and replayed operator by operator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from slotgraph import TOKENS, DecodeRunner, EagerRunner, Inputs, copied
from slotgraph.backends import choose

ROWS = 8
LAYERS = 4
WIDTH = 64


class Step(Inputs):
    """What the step reads."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


class Model:
    """A few linear layers over an embedding: some twenty operators."""

    def __init__(self, device: torch.device | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(512, WIDTH, generator=generator).to(device)
        self.weights = [torch.randn(WIDTH, WIDTH, generator=generator).to(device) / 8 for _ in range(LAYERS)]

    def __call__(self, view: Any) -> torch.Tensor:
        """One row of outputs a token."""
        hidden: torch.Tensor = self.table[view.input_ids] + view.positions[:, None]
        for weight in self.weights:
            hidden = hidden + torch.relu(hidden @ weight)
        return hidden


def captured(backend: str) -> DecodeRunner[Step]:
    """A runner that has captured one bucket."""
    runner = DecodeRunner(Step, Model(), buckets=[ROWS], backend=backend, progress=False)
    runner.capture()
    return runner


@pytest.mark.slotgraph_backends("cpu")
def test_step(benchmark_ways: Callable[..., Any]) -> None:
    """The model on the batch's own tensors, the same declaration without a graph, and replays."""
    batch, model = Step(input_ids=torch.arange(ROWS), positions=torch.arange(ROWS)), Model()
    runners = {"bare": model, "eager": EagerRunner(Step, model, backend=choose("cpu"))}
    ways: dict[str, Any] = runners | {name: captured(name) for name in ("cpu", "cpu-capture")}
    for way in ways.values():
        assert torch.equal(way(batch), model(batch))
    benchmark_ways(ways, [batch], f"a step of {LAYERS} layers, {ROWS} rows")


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_capture(benchmark: BenchmarkFixture, backend: str) -> None:
    """Making a runner and capturing one bucket."""
    benchmark.group = "construct and capture one bucket"
    runner: Any = benchmark(captured, backend)
    assert runner.report.captured == (ROWS,)
