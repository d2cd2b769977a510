"""A limit sees every number that a fill takes, whatever object in a list stands for it."""

import enum
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from slotgraph import BATCH, DecodeRunner, Inputs, SlotGraphError, copied

MOST = 40
LOWERINGS = ["foreach", "fused", "slot_by_slot"]


class Indexed:
    """A whole number of an engine's own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        """The number."""
        return self.number


class Token(enum.IntEnum):
    """A whole number with a name."""

    SMALL = 7
    LARGE = 90


NUMBERS: list[Any] = [
    int,
    Indexed,
    np.int64,
    np.uint8,
    lambda row: Token.LARGE if row > MOST else Token.SMALL,
]
BOXES: list[Any] = [np.array, torch.tensor]
"""A fill may take them among numbers, or refuse them."""
NO_NUMBERS: list[Any] = ["90", None, object(), np.array([90]), [90], b"Z", 90.5]


class Device(Inputs):
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1, limit=MOST)


class Host(Inputs):
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, limit=MOST, placement="host")


def _lens(view: Any) -> torch.Tensor:
    """A step that gives back what it was given."""
    return torch.as_tensor(view.lens + 0)


RUNNERS = [
    DecodeRunner(inputs, _lens, buckets=[4], backend="cpu", lowering=lowering, progress=False)
    for inputs in (Device, Host)
    for lowering in LOWERINGS
]
for runner in RUNNERS:
    runner.capture()


def number_of(item: Any) -> int:
    """The whole number that an object stands for."""
    return item.__index__()  # type: ignore[no-any-return]


rows = st.lists(st.tuples(st.integers(0, 100), st.sampled_from(NUMBERS)), min_size=1, max_size=3)


@given(drawn=rows, boxed=st.sampled_from([list, tuple]), at=st.integers(0, len(RUNNERS) - 1))
def test_numbers(drawn: list[tuple[int, Any]], boxed: Any, at: int) -> None:
    """Objects of all kinds in one list: the first over the limit is refused, else the step gets the numbers."""
    items = [kind(row) for row, kind in drawn]
    over = [place for place, item in enumerate(items) if number_of(item) > MOST]
    if not over:
        assert RUNNERS[at]({"lens": boxed(items)}).tolist() == [number_of(item) for item in items]
        return
    said = rf"slot 'lens': row {over[0]} is {number_of(items[over[0]])}, over the limit of {MOST}"
    with pytest.raises(SlotGraphError, match=said):
        RUNNERS[at]({"lens": boxed(items)})


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy.ndarrays")  # torch's advice, given once
@given(
    drawn=rows,
    place=st.integers(0, 3),
    box=st.sampled_from(BOXES),
    row=st.integers(0, 100),
    at=st.integers(0, len(RUNNERS) - 1),
)
def test_boxed_numbers(drawn: list[tuple[int, Any]], place: int, box: Any, row: int, at: int) -> None:
    """A number in an array or a tensor of its own is taken for that number, or refused by the slot's name."""
    items = [kind(row) for row, kind in drawn]
    items.insert(place, box(row))
    try:
        shown = RUNNERS[at]({"lens": items}).tolist()
    except SlotGraphError as error:
        assert "slot 'lens': " in str(error)  # noqa: PT017 - either way is right
    else:
        assert shown == [number_of(item) for item in items]
        assert max(shown) <= MOST


@example(drawn=[(90, int)], wrong=np.array([90]), place=1, at=0)  # over the limit, beside an array
@given(
    drawn=rows,
    wrong=st.sampled_from(NO_NUMBERS),
    place=st.integers(0, 4),
    at=st.integers(0, len(RUNNERS) - 1),
)
def test_beside_no_number(drawn: list[tuple[int, Any]], wrong: Any, place: int, at: int) -> None:
    """What is no whole number among numbers is refused by the slot's name, by the limit or by the fill."""
    items = [kind(row) for row, kind in drawn]
    items.insert(place, wrong)
    with pytest.raises(SlotGraphError, match=re.escape("slot 'lens': ")):
        RUNNERS[at]({"lens": items})
