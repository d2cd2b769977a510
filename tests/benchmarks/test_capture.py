"""What true capture semantics cost on a CPU: a small step eager, called again, and replayed operator by operator."""

from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from slotgraph import TOKENS, DecodeRunner, EagerRunner, Inputs, copied
from slotgraph.runners.decode import DecodeRunner as Runner

ROWS = 8
LAYERS = 4
WIDTH = 64


class Step(Inputs):
    """What the step reads."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


class Model:
    """A few linear layers over an embedding: some twenty operators."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(128, WIDTH, generator=generator)
        self.weights = [torch.randn(WIDTH, WIDTH, generator=generator) / 8 for _ in range(LAYERS)]

    def __call__(self, view: Step) -> torch.Tensor:
        """One row of outputs a token."""
        hidden = self.table[view.input_ids] + view.positions[:, None]
        for weight in self.weights:
            hidden = hidden + torch.relu(hidden @ weight)
        return hidden


def batch_of(rows: int) -> Step:
    """A batch of so many tokens."""
    return Step(input_ids=torch.arange(rows), positions=torch.arange(rows))


def captured(backend: str) -> Runner[Step]:
    """A runner that has captured one bucket."""
    runner = DecodeRunner(Step, Model(), buckets=[ROWS], backend=backend, progress=False)
    runner.capture()
    return runner


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_step_replayed(benchmark: BenchmarkFixture, backend: str) -> None:
    """Fill and replay through the runner."""
    benchmark.group = f"a step of {LAYERS} layers, {ROWS} rows"
    runner, batch = captured(backend), batch_of(ROWS)
    outputs = benchmark(runner, batch)
    assert torch.equal(outputs, Model()(batch))


def test_step_eager(benchmark: BenchmarkFixture) -> None:
    """The same declaration without a graph."""
    benchmark.group = f"a step of {LAYERS} layers, {ROWS} rows"
    runner, batch = EagerRunner(Step, Model(), backend="cpu"), batch_of(ROWS)
    outputs = benchmark(runner, batch)
    assert torch.equal(outputs, Model()(batch))


def test_step_bare(benchmark: BenchmarkFixture) -> None:
    """The model on the batch's own tensors, no library in between: what the others are measured against."""
    benchmark.group = f"a step of {LAYERS} layers, {ROWS} rows"
    model, batch = Model(), batch_of(ROWS)
    with torch.no_grad():
        benchmark(model, batch)


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_capture(benchmark: BenchmarkFixture, backend: str) -> None:
    """Making a runner and capturing one bucket."""
    benchmark.group = "construct and capture one bucket"
    runner: Any = benchmark(captured, backend)
    assert runner.report.captured == (ROWS,)
