"""Limits: host data that holds more than a slot takes is refused, by row and value; all else passes."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, Axis, Inputs, copied
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import BatchError, DeclarationErrors
from slotgraph.dataflow.explain import explain_declaration
from slotgraph.dataflow.limits import Limits
from slotgraph.extend import HOST, side
from slotgraph.runners.explained.tables import tables

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


def limits() -> Limits:
    """The limits at a context of MOST."""
    found = Limits.of(Limited.slotgraph, {CONTEXT: MOST, BATCH: 8, TOKENS: 8})
    assert found is not None
    return found


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
        limits().check({slot: value})
        return
    limit = str(MOST) if there else rf"CONTEXT = {MOST}"
    with pytest.raises(BatchError, match=rf"slot '{slot}': row {over[0]} is .*, over the limit of {limit}: "):
        limits().check({slot: value})


@given(
    rows=st.lists(st.tuples(*[st.integers(0, 2 * MOST + 3)] * 2), max_size=6),
    form=st.sampled_from(["list", "array", "tensor"]),
)
def test_two_dims_beside_the_batch(rows: list[tuple[int, int]], form: str) -> None:
    """Nested lists, arrays and tensors from a side argument: the element is named by its place."""
    nested: Any = [list(row) for row in rows]
    if form != "list":
        nested = np.array(nested, dtype=np.int64).reshape(-1, 2)
    beside = {"beside": {"pairs": torch.from_numpy(nested) if form == "tensor" else nested}}
    over = [[i, j] for i, row in enumerate(rows) for j, one in enumerate(row) if one > 2 * MOST]
    if not over:
        limits().check({}, beside)
        return
    i, j = over[0]
    said = rf"slot 'pairs': row \[{i}, {j}\] is {rows[i][j]}, over the limit of CONTEXT \* 2 = {2 * MOST}"
    with pytest.raises(BatchError, match=said):
        limits().check({}, beside)


@given(rows=st.lists(st.lists(st.integers(0, 3 * MOST), min_size=2, max_size=2), min_size=1, max_size=5), at=st.data())
def test_boxes_in_a_list(rows: list[list[int]], at: st.DataObject) -> None:
    """A list of arrays, of tuples or of both is looked into as a nested list is."""
    kinds: list[Any] = [np.array, tuple, list]
    boxes = [at.draw(st.sampled_from(kinds))(row) for row in rows]
    over = [[i, j] for i, row in enumerate(rows) for j, one in enumerate(row) if one > 2 * MOST]
    if not over:
        limits().check({}, {"beside": {"pairs": boxes}})
        return
    with pytest.raises(BatchError, match=rf"slot 'pairs': row \[{over[0][0]}, {over[0][1]}\] is "):
        limits().check({}, {"beside": {"pairs": boxes}})


@pytest.mark.parametrize("form", ["list", "tuple", "float32 array", "float tensor"])
@given(rows=st.lists(st.sampled_from([math.nan, 3.0, 38.5, 39.5, 41.0, 77.0, math.inf, -math.inf]), max_size=6))
def test_beside_no_number(form: str, rows: list[float]) -> None:
    """NaN, wherever it stands, hides nothing that is over the limit."""
    forms: dict[str, Any] = {**FORMS, "float32 array": lambda rows: np.array(rows, dtype=np.float32)}
    over = [row for row, one in enumerate(rows) if one > MOST]
    if not over:
        limits().check({"here": forms[form](rows)})
        return
    with pytest.raises(BatchError, match=rf"slot 'here': row {over[0]} is .*, over the limit of CONTEXT = {MOST}"):
        limits().check({"here": forms[form](rows)})


NO_NUMBERS: list[Any] = [None, "word", 3, [], (), [None], ["a", "b"], [[]], [[1], [1, 2]], [1, "b"], object()]
NO_NUMBERS += [np.array("word"), np.int64(3)]


def test_no_numbers_are_left_to_the_fill() -> None:
    """What is no box of numbers passes here: the fill says what is wrong with it."""
    for value in NO_NUMBERS:
        limits().check({"here": value, "there": value})


def test_what_lies_elsewhere_is_not_looked_into() -> None:
    """No tensor on a device is read back, also where its slot is on the host."""
    limits().check({"here": torch.full((3,), 99, device="meta"), "there": torch.full((3,), 99)})


def test_none_where_no_slot_has_one() -> None:
    """A runner without limits has nothing to ask."""

    class Free(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1)

    assert Limits.of(Free.slotgraph, {BATCH: 4}) is None


def test_axis_of_a_limit_must_be_given() -> None:
    """A limit's axis is one of the declaration, so that a runner asks for its size."""
    assert CONTEXT in Limited.slotgraph.axes


def test_wrong_limits() -> None:
    """A limit that varies, or on what is no whole number, is refused when it is declared."""
    with pytest.raises(DeclarationErrors) as refused:

        class Wrong(Inputs):
            a: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, limit=TOKENS)
            b: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0, limit=4)
            c: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=False, limit=4)
            d: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, limit=1.5)  # type: ignore[arg-type]
            e: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, limit=-1)

    said = sorted(str(fault) for fault in refused.value.exceptions)
    assert len(said) == 5
    assert "slot 'a': its limit TOKENS varies by step: give a number or a fixed axis" in said[0]
    assert "slot 'b': it has a limit, but float32 is no whole number" in said[1]
    assert "slot 'c': it has a limit, but bool is no whole number" in said[2]
    assert "slot 'd': limit=1.5: a size is an axis" in said[3]
    assert "slot 'e': limit=-1: a size is at least 0" in said[4]


def test_explained() -> None:
    """An explanation tells the limit, in its data and in its table."""
    found = explain_declaration(Limited.slotgraph, Capabilities(), "cpu")
    assert {slot.name: slot.limit for slot in found.slots} == {
        "here": "CONTEXT",
        "there": "40",
        "pairs": "CONTEXT * 2",
        "free": None,
    }
    assert tables(found).renderables
