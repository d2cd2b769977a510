"""Limits: host data that holds more than a slot takes is refused, by row and value; all else passes."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, Axis, Inputs, copied
from slotgraph.dataflow.errors import BatchError
from slotgraph.dataflow.sizing import limits_of
from slotgraph.dataflow.sources import NO_SIDE, Side
from slotgraph.extend import HOST, side

CONTEXT = Axis("CONTEXT", fixed=True)
MOST = 40


class Limited(Inputs):
    """Limits on the host and on the device, in one dim and in two."""

    here: torch.Tensor | None = copied(BATCH, dtype=torch.int32, pad=1, placement=HOST, limit=CONTEXT, default=None)
    there: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1, limit=MOST)
    pairs: torch.Tensor = copied(
        BATCH, 2, dtype=torch.int64, pad=1, placement=HOST, limit=CONTEXT * 2, source=side("beside.pairs")
    )
    free: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=1)


def check(batch: dict[str, Any], side: Side = NO_SIDE) -> None:
    """Hold a batch to the limits at a context of MOST."""
    for limit in limits_of(Limited.slotgraph, {CONTEXT: MOST, BATCH: 8, TOKENS: 8}):
        limit.check(batch, side)


FORMS: dict[str, Any] = {
    "list": lambda rows: rows,
    "tuple": tuple,
    "int64 array": lambda rows: np.array(rows, dtype=np.int64),
    "uint16 array": lambda rows: np.array(rows, dtype=np.uint16),
    "strided array": lambda rows: np.array(rows, dtype=np.int32)[::-1],
    "numpy numbers": lambda rows: list(np.array(rows, dtype=np.int64)),
    "int32 tensor": lambda rows: torch.tensor(rows, dtype=torch.int32),
    "arrays of one": lambda rows: [np.array(row) for row in rows],
    "numbers of torch": lambda rows: [torch.tensor(row) for row in rows],
    "float tensor": lambda rows: torch.tensor(rows, dtype=torch.bfloat16),
}
values = st.lists(st.integers(0, MOST), max_size=8) | st.lists(st.integers(0, 3 * MOST), max_size=8)


@given(rows=values, form=st.sampled_from(sorted(FORMS)), there=st.booleans())
def test_one_dim(rows: list[int], form: str, *, there: bool) -> None:
    """Host data is held to its limit, whatever form it has; a tensor for a slot on the device is not looked into."""
    value, slot = FORMS[form](rows), "there" if there else "here"
    order = [*reversed(rows)] if form == "strided array" else rows
    over = [row for row, one in enumerate(order) if one > MOST]
    if not over or (there and "tensor" in form):
        check({slot: value})
        return
    limit = str(MOST) if there else rf"CONTEXT = {MOST}"
    with pytest.raises(BatchError, match=rf"slot '{slot}': row {over[0]} is .*, over the limit of {limit}: "):
        check({slot: value})


def test_the_limit_itself() -> None:
    """Exactly the limit is no more than it, in a list, a tuple and an array."""
    for form in (list, tuple, np.array):
        check({"there": form([1, MOST]), "here": form([MOST, 1])})


@given(
    rows=st.lists(st.lists(st.integers(0, 2 * MOST + 3), min_size=2, max_size=2), max_size=6),
    form=st.sampled_from(["array", "tensor", "boxes"]),
    data=st.data(),
)
def test_two_dims_beside_the_batch(rows: list[list[int]], form: str, data: st.DataObject) -> None:
    """Lists of lists, tuples and arrays, arrays and tensors from a side argument: the element is named by its place."""
    kinds: list[Any] = [np.array, tuple, list]
    array = np.array(rows, dtype=np.int64).reshape(-1, 2)
    boxes = [data.draw(st.sampled_from(kinds))(row) for row in rows]
    value = {"array": array, "tensor": torch.from_numpy(array), "boxes": boxes}[form]
    over = [[i, j] for i, row in enumerate(rows) for j, one in enumerate(row) if one > 2 * MOST]
    if not over:
        check({}, {"beside": {"pairs": value}})
        return
    i, j = over[0]
    said = rf"slot 'pairs': row \[{i}, {j}\] is {rows[i][j]}, over the limit of CONTEXT \* 2 = {2 * MOST}"
    with pytest.raises(BatchError, match=said):
        check({}, {"beside": {"pairs": value}})


@pytest.mark.parametrize("form", ["list", "tuple", "float32 array", "float tensor"])
@given(rows=st.lists(st.sampled_from([math.nan, 3.0, 38.5, 39.5, 41.0, 77.0, math.inf, -math.inf]), max_size=6))
def test_beside_no_number(form: str, rows: list[float]) -> None:
    """NaN, wherever it stands, hides nothing that is over the limit."""
    forms: dict[str, Any] = {**FORMS, "float32 array": lambda rows: np.array(rows, dtype=np.float32)}
    over = [row for row, one in enumerate(rows) if one > MOST]
    if not over:
        check({"here": forms[form](rows)})
        return
    with pytest.raises(BatchError, match=rf"slot 'here': row {over[0]} is .*, over the limit of CONTEXT = {MOST}"):
        check({"here": forms[form](rows)})


NO_NUMBERS: list[Any] = [None, "word", 3, [], (), [None], ["a", "b"], [[]], [[1], [1, 2]], [1, "b"], object()]
NO_NUMBERS += [np.array("word"), np.int64(3)]


def test_no_numbers_are_left_to_the_fill() -> None:
    """What is no box of numbers passes here: the fill says what is wrong with it."""
    for value in NO_NUMBERS:
        check({"here": value, "there": value})


def test_what_lies_elsewhere_is_not_looked_into() -> None:
    """No tensor on a device is read back, also where its slot is on the host."""
    check({"here": torch.full((3,), 99, device="meta"), "there": torch.full((3,), 99)})


def test_none_where_no_slot_has_one() -> None:
    """A runner without limits has nothing to ask; one with limits asks for the size of their axes."""

    class Free(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1)

    assert limits_of(Free.slotgraph, {BATCH: 4}) == []
    assert CONTEXT in Limited.slotgraph.axes
