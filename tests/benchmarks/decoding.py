"""Decode steps to measure: their batches, as an engine has them, and captured runners."""

import types
from typing import Any

import torch

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs
from slotgraph.backends import Backend
from slotgraph.dataflow.capabilities import LoweringName
from slotgraph.runners.engine.sampling import sample_batch
from slotgraph.runners.testing.bench import smallest_step


class Batch(types.SimpleNamespace):
    """One batch: its sources as attributes, like an engine's own batch, with its live rows."""

    rows: int


def draw(inputs: type[Inputs], backend: Backend, rows: int, number: int = 0) -> Batch:
    """A batch with seeded values; under another number all of them differ, but for bools."""
    declaration, seeded = inputs.slotgraph, torch.Generator().manual_seed(rows)
    low = 100 * number
    values = {name: (low, low + 99) for name in declaration.sources if declaration.slots[name].dtype != torch.bool}
    live, capabilities = {BATCH: rows, TOKENS: rows}, backend.capabilities
    sample = sample_batch(declaration, capabilities, live, seeded, values=values, device=backend.device)
    return Batch(rows=rows, **sample.batch, **sample.side)


def captured_runner(
    inputs: type[Inputs], backend: Backend, padded: int, lowering: LoweringName, **options: Any
) -> DecodeRunner[Any]:
    """A captured runner of the smallest step: the public path, with sizing, routing and checks."""
    options |= {"buckets": [padded], "lowering": lowering, "progress": False}
    runner = DecodeRunner(inputs, smallest_step, backend=backend, **options)
    runner.capture()
    return runner
