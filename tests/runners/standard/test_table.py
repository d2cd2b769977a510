"""The page of the standard declarations is made from them: a row and a reason for every slot, and each axis by hand.

tests/test_pages.py finds tables that are not up to date.
"""

import importlib.util
import inspect
from pathlib import Path
from typing import Any, Final

import torch

from slotgraph import Axis, standard
from slotgraph.dataflow.capabilities import CACHE_LOC, resolve_dtype
from tests.runners.standard.batches import CLASSES, CUDA, NPU

DOCS: Final = Path(__file__).parents[3] / "docs"


def standard_slots() -> Any:
    """What makes the page's tables, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("standard_slots", DOCS / "standard_slots.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_slot_has_a_row_and_a_reason() -> None:
    """Below each class's heading stand its sentence and a row for each slot that it adds, with the reason."""
    tables = "\n".join(standard_slots().tables(standard))
    for inputs in CLASSES.values():
        own = [name for name in inspect.get_annotations(inputs) if name in inputs.slotgraph.slots]
        assert sorted(standard_slots().whys(inputs)) == sorted(own)
        section = tables.split(f"### `{inputs.__name__}`\n\n")[1].split("\n### ")[0]
        assert section.startswith((inputs.__doc__ or "").split("\n")[0])
        rows = [line for line in section.splitlines() if line.startswith("| `")]
        assert [row.split("`")[1] for row in rows] == own
        assert all(row.count(" | ") == 6 for row in rows)


def test_every_axis_is_listed() -> None:
    """The page lists the axes that the package adds."""
    page = (DOCS / "standard.md").read_text(encoding="utf-8")
    axes = [name for name in standard.__all__ if isinstance(getattr(standard, name), Axis)]
    assert [name for name in axes if f"| `standard.{name}` |" not in page] == []
    assert all(getattr(standard, name).name == name for name in axes)


def test_an_npu_decides_the_dtype_of_cache_locations() -> None:
    """Of all slots, those with the role of cache locations are int32 there, and only these differ."""
    for inputs in CLASSES.values():
        for name, slot in inputs.slotgraph.slots.items():
            there, here = resolve_dtype(slot.dtype, NPU), resolve_dtype(slot.dtype, CUDA)
            assert (there != here) == (slot.dtype is CACHE_LOC) == (name == "out_cache_loc"), name
            assert slot.dtype is not CACHE_LOC or there == torch.int32
