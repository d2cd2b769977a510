"""Sources whose strides differ from batch to batch: right in every lowering, and of few kinds."""

from collections.abc import Callable
from typing import Final

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from slotgraph import BATCH, InputBuffers, Inputs, computed, copied
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.fill.kinds import KINDS, STRIDES
from tests.packing import backend_of

WIDE: Final = 5
ROWS: Final = 8
BUCKETS: Final = (3, 5, ROWS)


class Tables(Inputs):  # tables whose rows come first, or last, a number for each row, and what depends on a table
    pages: torch.Tensor = copied(BATCH, WIDE, dtype=torch.int32, pad=-1, strided=True)
    places: torch.Tensor = copied(3, BATCH, dtype=torch.int64, pad=0, strided=True)
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, strided=True)
    ends: torch.Tensor = computed(lambda pages: pages.sum(1), shape=BATCH, dtype=torch.int64, pad=-5)


LAYOUTS: Final[dict[str, Callable[[torch.Tensor, int], torch.Tensor]]] = {
    "in one piece": lambda rows, _: rows.contiguous(),
    "a part of something wider": lambda rows, more: torch.nn.functional.pad(rows, (0, more))[:, : rows.shape[1]],
    "in another order": lambda rows, _: rows.t().contiguous().t(),
    "every second": lambda rows, more: rows.repeat_interleave(more + 1, 1)[:, :: more + 1],
}
layouts = st.tuples(st.sampled_from([*LAYOUTS]), st.integers(1, 9))


@pytest.mark.parametrize("backend", ["cpu", "packing", pytest.param("cuda", marks=pytest.mark.cuda)])
@given(
    lowering=st.sampled_from(LADDER),
    steps=st.lists(st.tuples(layouts, layouts), min_size=1, max_size=4).flatmap(
        lambda few: st.lists(st.tuples(st.integers(0, ROWS), st.sampled_from(few)), min_size=2, max_size=12)
    ),
    seed=st.integers(0, 99),
)
def test_any_strides_are_right(
    backend: str, lowering: str, steps: list[tuple[int, tuple[tuple[str, int], tuple[str, int]]]], seed: int
) -> None:
    """Whatever came before, the slots have the batch's rows, and their tails.

    A source of one row or none is contiguous whatever its strides are, and others with these strides follow it.
    """
    made = backend_of(backend)
    assume(lowering in made.capabilities.lowerings)
    buffers = InputBuffers(Tables, {BATCH: ROWS}, backend=made, lowering=lowering)
    draw = torch.Generator().manual_seed(seed)
    for rows, ((first, more), (second, other)) in steps:
        pages = torch.randint(1, 99, (ROWS, WIDE), generator=draw, dtype=torch.int32)
        places = torch.randint(1, 99, (3, ROWS), generator=draw)
        batch = {  # parts of tables of one size, so that their strides are the same in each step
            "pages": LAYOUTS[first](pages.to(made.device), more)[:rows],
            "places": LAYOUTS[second](places.to(made.device), other)[:, :rows],
            "ids": LAYOUTS[second](places.to(made.device), other)[0, :rows],
        }
        pages = pages[:rows]
        places = places[:, :rows]
        view = buffers.fill(batch, {BATCH: next(size for size in BUCKETS if size >= rows)})
        assert view.pages[:rows].tolist() == pages.tolist()
        assert view.places[:, :rows].tolist() == places.tolist()
        assert view.ids.tolist() == [*places[0].tolist(), *[0] * (len(view.ids) - rows)]
        assert view.ends[:rows].tolist() == pages.sum(1).tolist()
        assert bool((view.pages[rows:] == -1).all() and not view.places[:, rows:].any())


@pytest.mark.parametrize("backend", ["cpu", "packing"])
def test_strides_that_vary_make_no_new_kinds(backend: str) -> None:
    """The plan of a batch in one piece runs them, after one copy of the slot's source."""
    buffers = InputBuffers(Tables, {BATCH: ROWS}, backend=backend_of(backend))
    for more in range(3 * KINDS):
        rows = 1 + more % ROWS
        pages = LAYOUTS["a part of something wider"](torch.full((rows, WIDE), more, dtype=torch.int32), more + 1)
        batch = {"pages": pages, "places": torch.zeros(3, rows, dtype=torch.int64), "ids": torch.zeros(rows).long()}
        view = buffers.fill(batch)
        assert view.pages[:rows].tolist() == pages.tolist()
    assert len(buffers._layer.table.known) <= STRIDES + 2
