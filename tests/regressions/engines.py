"""What the scenarios share: an engine that keeps its graph inputs by hand, and random numbers."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from slotgraph import DecodeRunner, Inputs
from slotgraph.backends import load
from slotgraph.backends.base import Graph

BACKEND: Final = "cpu-capture"
Views = Mapping[str, torch.Tensor]


def draw(low: int, high: int, shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Random whole numbers from low to high."""
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class ByHand:
    """Buffers of full size, a step captured on the first rows of each, and copies of the live rows: as many do it."""

    def __init__(self, step: Callable[[Views], Any], rows: int, /, **buffers: torch.Tensor) -> None:
        self.buffers = buffers
        self.rows = rows
        self.graph: Graph = load(BACKEND)().capture(lambda: step({n: one[:rows] for n, one in buffers.items()}))

    def __call__(self, **sources: torch.Tensor) -> torch.Tensor:
        """Copy the live rows to where the graph reads them, replay, and cut the outputs."""
        live = 0
        for name, source in sources.items():
            live = len(source)
            self.buffers[name][:live].copy_(source)
        self.graph.replay()
        outputs: torch.Tensor = self.graph.outputs
        return outputs[:live]


def captured(inputs: type[Inputs], step: Callable[[Any], Any], **options: Any) -> DecodeRunner[Any]:
    """A runner over one bucket of four requests, unless told otherwise."""
    given: dict[str, Any] = {"buckets": [4], "backend": BACKEND, "progress": False, **options}
    runner = DecodeRunner(inputs, step, **given)
    runner.capture()
    return runner
