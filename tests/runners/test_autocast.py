"""Autocast around a capture: torch keeps casts of weights until autocast ends, and no graph may read one of those."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from slotgraph import BATCH, DecodeRunner, Inputs, copied
from tests.regressions.engines import draw

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")],
)
BUCKETS = [2, 4, 8]


class Ids(Inputs):
    """One slot."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


class Model(torch.nn.Module):
    """Weights in float32, which autocast casts; autocast is on around it, inside of it, or both."""

    def __init__(self, where: str, device: str) -> None:
        super().__init__()
        self.where = where
        self.table = torch.nn.Parameter(torch.randn(32, 16))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        self.to(device)
        self.autocast = torch.autocast(device, torch.bfloat16)

    def forward(self, view: Ids) -> torch.Tensor:
        """Each weight is used twice."""
        with self.autocast if self.where != "around" else nullcontext():
            hidden = self.table[view.ids]
            for layer in [*self.layers, *self.layers]:
                hidden = torch.tanh(layer(hidden))
            return hidden


@pytest.mark.parametrize("device_backend", ["cpu-capture", CUDA])
@pytest.mark.parametrize("where", ["around", "inside", "both"])
@pytest.mark.parametrize("lazy", [False, True])
def test_graphs_cast_weights_themselves(device_backend: str, where: str, *, lazy: bool) -> None:
    """Each bucket's graph gives what the model gives, in any order, also once autocast has ended and weights change."""
    device = "cuda" if device_backend == "cuda" else "cpu"
    model = Model(where, device)
    outer: Any = nullcontext() if where == "inside" else torch.autocast(device, torch.bfloat16)
    with outer:
        warm = Ids(ids=torch.arange(3, device=device))
        model(warm)  # as engines do, which fills the cache of casts
        runner = DecodeRunner(Ids, model, buckets=BUCKETS, backend=device_backend, lazy=lazy, progress=False)
        runner.capture()
        for rows in BUCKETS if lazy else ():
            runner({"ids": draw(0, 31, (rows,), rows).to(device)})
    for turn in range(3):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(-0.75)
        torch.randn(1 << 16, device=device)  # which takes what was freed
        for rows in (1, 7, 3, 2, 8, 4):
            ids = draw(0, 31, (rows,), 10 * turn + rows).to(device)
            bucket = min(one for one in BUCKETS if one >= rows)
            padded = torch.nn.functional.pad(ids, (0, bucket - rows))
            with torch.no_grad(), outer:
                expected = model(Ids(ids=padded))[:rows]
            assert torch.equal(runner({"ids": ids}), expected)
