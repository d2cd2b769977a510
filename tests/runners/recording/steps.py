"""What tests of recordings share: a declaration with every way to bring a value, a step over it, and its batches."""

import types
from typing import Any

import numpy as np
import torch

from slotgraph import BATCH, TOKENS, Inputs, computed, copied, output
from slotgraph.backends import load
from slotgraph.extend import side
from tests.runners.models import decoder

WIDE, WORDS = 3, 40
TABLE = torch.randn(WORDS, WIDE, generator=torch.Generator().manual_seed(5))


def lengths_of(batch: Any) -> Any:
    """A source that is a function of the batch, which only the user's own class of batches bears."""
    return batch.requests.lengths


class Mixed(Inputs):
    """Host and device data, lists, arrays, functions, side arguments, an optional slot, fields, an output."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    lengths: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, source=lengths_of)
    weights: torch.Tensor = copied(TOKENS, dtype=torch.float32, pad=0, source="nested.weights")
    mask: torch.Tensor = copied(TOKENS, dtype=torch.bool, pad=False, source=side("proxy.mask"))
    bias: torch.Tensor | None = copied(TOKENS, WIDE, dtype=torch.bfloat16, pad=0, default=None)
    live: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int32)
    scores: torch.Tensor = output(TOKENS, WIDE, dtype=torch.float32)
    tag: Any


class Flaw:
    """What is wrong with a step: a number that graphs freeze, or an error that it raises."""

    frozen = 1.0
    error: BaseException | None = None


class Scored:
    """[TOKENS, WIDE] floats that depend on every slot; also written to the output slot."""

    def __init__(self, device: torch.device | str = "cpu", flaw: Flaw | None = None) -> None:
        self.flaw = flaw or Flaw()
        self.table = TABLE.to(device)

    def __call__(self, view: Mixed) -> torch.Tensor:
        if self.flaw.error is not None:
            raise self.flaw.error
        scores = self.table[view.ids] * view.weights[:, None] * self.flaw.frozen
        scores = torch.where(view.mask[:, None], scores, scores + view.lengths[:, None] + view.live)
        view.scores.copy_(scores if view.bias is None else scores + view.bias)
        return view.scores


def mixed_runner(backend: str, flaw: Flaw | None = None, **options: Any) -> Any:
    """A captured runner over two buckets, with graphs for batches without the optional slot."""
    given: dict[str, Any] = {"buckets": [2, 4], "absent": [{"bias"}], "backend": backend, **options}
    return decoder(Mixed, Scored(load(backend)().device, flaw), **given)


def mixed_batch(rows: int, seed: int, device: torch.device | str = "cpu", *, bias: bool = True) -> Any:
    """A batch that is an object, with tensors on the device, a list, an array and a function's hidden value."""
    draw = torch.Generator().manual_seed(seed)
    return types.SimpleNamespace(
        ids=torch.randint(1, WORDS, (rows,), generator=draw).to(device),
        requests=types.SimpleNamespace(lengths=torch.randint(1, 90, (rows,), generator=draw).tolist()),
        nested={"weights": (torch.rand(rows, generator=draw) + 0.5).numpy().astype(np.float32)},
        bias=torch.randn(rows, WIDE, generator=draw).to(torch.bfloat16).to(device) if bias else None,
        tag={"mode": "decode", "shares": (0.25, float("inf")), "none": None, "deep": [[1, True]]},
    )


def mixed_side(rows: int, seed: int, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The side argument, neither all true nor all false where there are two rows."""
    mask = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[:1], mask[1:2] = True, False
    return {"proxy": {"mask": mask.to(device)}}
