"""What news about a ragged table costs a step of `steps()`: 8 of 256 requests get one page more.

pytest tests/benchmarks/test_append.py -s
"""

import collections
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

from slotgraph import BATCH, TOKENS, Axis, Inputs, copied, output
from slotgraph.backends import Backend
from slotgraph.extend import LaunchedStep
from tests.benchmarks.shown import race
from tests.runners.models import decoder

PAGES: Final = Axis("PAGES", fixed=True)
REQUESTS, FEW, WIDTH, PAGE = 256, 8, 64, 16


class Paged(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda next_ids: next_ids)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, then=lambda lens: lens + 1)
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=-1, ragged=lambda lens: (lens + PAGE - 1) // PAGE)
    next_ids: torch.Tensor = output(BATCH, dtype=torch.int64)


def step(view: Any) -> torch.Tensor:
    """As small as one can be."""
    return torch.add(view.ids, view.lens, out=view.next_ids)


@pytest.mark.slotgraph_backends("cpu", "cpu-capture", "cuda")
def test_append(backend: Backend) -> None:
    """Beside edits of the same rows, as a tensor on the device and as lists, and a step without news."""

    def looped(say: Callable[[LaunchedStep, list[int]], object]) -> Callable[[Any], None]:
        runner = decoder(Paged, step, backend=backend, buckets=[REQUESTS], sizes={PAGES: WIDTH}, output_rows=BATCH)
        batch = {"ids": [1] * REQUESTS, "lens": [1] * REQUESTS, "pages": [[row] for row in range(REQUESTS)]}
        steps, turns = runner.steps(batch, ahead=1, needs=["pages"]), collections.deque(range(REQUESTS))
        last = next(steps)

        def go_on(_: Any) -> None:
            nonlocal last
            turns.rotate(FEW)
            say(last, [*turns][:FEW])
            last = next(steps)

        return go_on

    rows = torch.arange(FEW * WIDTH, dtype=torch.int32).view(FEW, WIDTH)
    lists, on_device = rows.tolist(), rows.to(backend.device)
    ways = {
        "edit": looped(lambda step, keys: step.edit(keys, pages=on_device)),
        "edit, lists": looped(lambda step, keys: step.edit(keys, pages=lists)),
        "append": looped(lambda step, keys: step.append(keys, pages=[[7]] * FEW)),
        "needs": looped(lambda step, _: step.needs("pages")),
        "no news": looped(lambda *_: None),
    }
    race(f"{FEW} of {REQUESTS} rows, {WIDTH} pages", ways, [None], backend)
