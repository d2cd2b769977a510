"""The page of the standard declarations says what they say: cell by cell, and a reason for every slot."""

import pytest
import torch

from slotgraph import Axis, Inputs, standard
from slotgraph.dataflow.capabilities import CACHE_LOC, resolve_dtype
from tests.runners.standard.batches import CLASSES, CUDA, NPU
from tests.runners.standard.table import HEAD, PAGE, own_slots, rows_of, tables_of, whys_of

each_class = pytest.mark.parametrize("inputs", CLASSES.values(), ids=lambda inputs: inputs.__name__)


@each_class
def test_table(inputs: type[Inputs]) -> None:
    """The table below a class's heading has a row for each slot that it adds, and no other."""
    rows = rows_of(inputs)
    expected = [HEAD, ("---",) * len(HEAD), *rows] if rows else []
    assert tables_of(PAGE).get(inputs.__name__, []) == expected


@each_class
def test_heading_and_sentence(inputs: type[Inputs]) -> None:
    """Each class has a heading, and below it the sentence of its docstring."""
    page, sentence = PAGE.read_text(encoding="utf-8"), (inputs.__doc__ or "").split("\n")[0]
    assert f"### `{inputs.__name__}`\n\n{sentence}" in page


@each_class
def test_every_slot_has_a_reason(inputs: type[Inputs]) -> None:
    """The docstring says why each slot that the class adds is what it is, and speaks of no other."""
    assert sorted(whys_of(inputs)) == sorted(own_slots(inputs))


def test_every_axis_is_listed() -> None:
    """The page lists the axes that the package adds."""
    page = PAGE.read_text(encoding="utf-8")
    axes = [name for name in standard.__all__ if isinstance(getattr(standard, name), Axis)]
    assert [name for name in axes if f"| `standard.{name}` |" not in page] == []
    assert all(getattr(standard, name).name == name for name in axes)


def test_what_an_npu_decides() -> None:
    """Of all slots, those with the role of cache locations are int32 there, and only these differ."""
    for inputs in CLASSES.values():
        for name, slot in inputs.slotgraph.slots.items():
            there, here = resolve_dtype(slot.dtype, NPU), resolve_dtype(slot.dtype, CUDA)
            assert (there != here) == (slot.dtype is CACHE_LOC) == (name == "out_cache_loc"), name
            assert slot.dtype is not CACHE_LOC or there == torch.int32
