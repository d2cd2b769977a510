"""Requests that count: a loop of steps whose outputs plain Python knows."""

from collections.abc import Callable
from typing import Any

import torch

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, copied, output
from slotgraph.backends import Backend
from tests.runners.models import decoder

LOWERINGS = ["direct", "foreach", "in_graph", "fused"]


class Counting(Inputs):  # the plainest: a number that grows, and what the step made of it before
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1, then=lambda made: made)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, then=lambda lens: lens + 1, limit=50)
    tag: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    made: torch.Tensor = output(BATCH, dtype=torch.int64)


def count(view: Counting) -> torch.Tensor:
    """[BATCH]: the last number, plus the length, plus the tag."""
    view.made.copy_(view.ids + view.lens + view.tag)
    return view.made


def counting(backend: str | Backend, step: Callable[[Counting], Any] = count, **options: Any) -> DecodeRunner[Counting]:
    """A captured runner for up to eight requests."""
    made: DecodeRunner[Counting] = decoder(
        Counting, step, backend=backend, buckets=(2, 4, 8), output_rows=BATCH, **options
    )
    return made


def batch(*tags: int) -> dict[str, Any]:
    """Requests that begin at 0, of length 1."""
    return {"ids": [0] * len(tags), "lens": [1] * len(tags), "tag": torch.tensor(tags)}


def made(tag: int, step: int) -> int:
    """What a request has made in a step, counted from its own first one."""
    return sum(1 + tag + number for number in range(step + 1))
