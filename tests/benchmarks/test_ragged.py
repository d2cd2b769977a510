"""A page table of 256 x 64 as engines hold it, beside padding with NumPy and uploading. Run with -s to see times."""

import random
from collections.abc import Callable
from typing import Any, Final

import attrs
import numpy as np
import pytest
import torch

from slotgraph import BATCH, Axis, DecodeRunner, Inputs, copied
from slotgraph.backends import Backend
from slotgraph.extend import Ragged
from tests.benchmarks.shown import race

ROWS: Final = 256
WIDTH: Final = 64
BATCHES: Final = 8
PAD: Final = -1
PAGES: Final = Axis("PAGES", fixed=True)


class Paged(Inputs):
    """A page table alone."""

    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=PAD, ragged=True)


@attrs.frozen(eq=False)
class Tables:
    """One table in each form."""

    lists: list[list[int]]
    arrays: list[Any]
    values: torch.Tensor
    offsets: Any
    table: Any
    counts: Any

    @classmethod
    def drawn(cls, seed: int) -> "Tables":
        """Draw rows of one page up to all."""
        draw = random.Random(seed)
        lists = [[draw.randrange(1 << 20) for _ in range(draw.randint(1, WIDTH))] for _ in range(ROWS)]
        counts = np.array([*map(len, lists)])
        ends = np.cumsum([0, *counts])
        values = torch.tensor([page for row in lists for page in row], dtype=torch.int32)
        return cls(lists, [np.array(row, np.int32) for row in lists], values, ends, padded(lists), counts)


def padded(rows: list[list[int]]) -> Any:
    """A table as engines pad it."""
    table = np.full((ROWS, WIDTH), PAD, np.int32)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    return table


def smallest(view: Paged) -> torch.Tensor:
    """One kernel."""
    return view.pages + 1


@pytest.mark.slow
@pytest.mark.slotgraph_backends("cpu", "cuda")
def test_ragged_rows(backend: Backend) -> None:
    """Whole steps from each form of the table, the one by hand first."""
    runner: DecodeRunner[Any] = DecodeRunner(
        Paged, smallest, sizes={PAGES: WIDTH}, buckets=[ROWS], output_rows=BATCH, backend=backend, progress=False
    )
    runner.capture()
    slot = backend.empty((ROWS, WIDTH), torch.int32, "device")
    graph = backend.capture(lambda: slot + 1)

    def by_hand(batch: Tables) -> torch.Tensor:
        slot.copy_(torch.from_numpy(padded(batch.lists)), non_blocking=True)
        graph.replay()
        return graph.outputs  # type: ignore[no-any-return] # a tensor

    forms: dict[str, Callable[[Tables], Any]] = {
        "lists of lists": lambda batch: batch.lists,
        "lists of arrays": lambda batch: batch.arrays,
        "Ragged(values, offsets)": lambda batch: Ragged(batch.values, offsets=batch.offsets),
        "Ragged(array, counts)": lambda batch: Ragged(batch.table, counts=batch.counts),
        "padded lists": lambda batch: padded(batch.lists),
        "a dense array": lambda batch: batch.table,
    }
    batches = [Tables.drawn(seed) for seed in range(BATCHES)]
    jagged = {
        id(batch): torch.nested.nested_tensor_from_jagged(
            batch.values.to(backend.device), torch.from_numpy(batch.offsets).to(backend.device)
        )
        for batch in batches
    }
    forms["jagged, on the device"] = lambda batch: jagged[id(batch)]
    ways: dict[str, Callable[[Tables], Any]] = {
        name: lambda batch, form=form: runner({"pages": form(batch)})  # type: ignore[misc] # mypy infers no lambda's default
        for name, form in forms.items()
    }
    for batch in batches:
        wanted = torch.from_numpy(padded(batch.lists)) + 1
        for way in (by_hand, *ways.values()):
            assert torch.equal(way(batch).cpu(), wanted)
    race("256 x 64 pages", {"padded and uploaded by hand": by_hand, **ways}, batches, backend)
