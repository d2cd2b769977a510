"""What each break of a stack in parts costs: many small kernels in one graph, and in as many as there are breaks.

pytest tests/benchmarks/test_breaks.py -m cuda -s
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slotgraph import TOKENS, BreakableRunner, Inputs, copied, graph_break
from slotgraph.backends import Backend, choose
from slotgraph.backends.cuda import CudaBackend
from tests.benchmarks.shown import race

BREAKS = 24


class Rows(Inputs):
    """One value a token."""

    values: torch.Tensor = copied(TOKENS, 64, dtype=torch.float32, pad=0.0)


class Chain(nn.Module):
    """As many small kernels as breaks, one before each. between: what is called there."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()
        self.between = between

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Count up."""
        for _ in range(BREAKS):
            answer = self.between(values := values + 1)
            values = values if answer is None else answer
        return values


def on_values(chain: Chain, view: Any) -> Any:
    """A step that is nothing but its stack."""
    return chain(view.values)


def nothing(values: torch.Tensor) -> torch.Tensor | None:
    """Written in place, or not at all: there is nothing to move."""
    del values
    return None


def same(values: torch.Tensor) -> torch.Tensor | None:
    """An answer, which is moved to where the next graph reads it."""
    return values


def race_breaks(backend: Backend, **how: Any) -> None:
    """No break, breaks without an answer, and breaks whose answers are moved."""
    batches = [{"values": torch.randn(16, 64, device=backend.device)} for _ in range(3)]
    told: dict[str, Any] = {"buckets": [16], "output_rows": TOKENS, "backend": backend, "progress": False}
    runners = {}
    ways = {"no break": nothing, "silent": graph_break(nothing), "answering": graph_break(same)}
    for name, between in ways.items():
        chain = Chain(between)
        runners[name] = BreakableRunner(Rows, functools.partial(on_values, chain), stack=chain, **told)
        runners[name].capture()
        torch.testing.assert_close(runners[name](batches[0]).clone(), batches[0]["values"] + BREAKS)
    race(f"{BREAKS} small kernels, with no break and with one after each", runners, batches, backend, **how)


@pytest.mark.cuda
def test_cost_of_a_segment(cuda: CudaBackend) -> None:
    """What each break adds on the host is one launch, and the call of a function that does nothing."""
    race_breaks(cuda, rounds=21, steps=50)


def test_on_a_cpu() -> None:
    """The same on a CPU, where the figures mean nothing: what is measured is right."""
    race_breaks(choose("cpu-capture"), rounds=2, steps=2)
