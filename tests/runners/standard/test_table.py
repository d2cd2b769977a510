"""The page of the standard declarations says what they say: cell by cell, and a reason for every slot."""

import inspect
import re
from pathlib import Path
from typing import Final

import pytest
import torch

from slotgraph import Axis, Inputs, standard
from slotgraph.dataflow.capabilities import CACHE_LOC, dtype_text, resolve_dtype
from slotgraph.dataflow.tails import Pad
from slotgraph.extend import FillRole, Role, Slot
from slotgraph.runners.explained.declared import SlotFacts, explain_declaration
from tests.runners.standard.batches import CLASSES, CUDA, NPU

HEAD: Final = ("slot", "shape", "dtype", "on", "tail", "comes from", "why")
PAGE: Final = Path(__file__).parents[3] / "docs" / "standard.md"
Row = tuple[str, ...]


def own_slots(inputs: type[Inputs]) -> list[str]:
    """Slots that a class adds, or declares again."""
    return [name for name in inspect.get_annotations(inputs) if name in inputs.slotgraph.slots]


def whys_of(inputs: type[Inputs]) -> dict[str, str]:
    """What a class's docstring says of its slots: `name: why.`, a paragraph's line or several."""
    body = inspect.cleandoc(inputs.__doc__ or "")
    found = re.findall(r"^(\w+): (.*(?:\n(?!\w+: |\n).*)*)", body, re.MULTILINE)
    return {name: " ".join(why.split()).removesuffix(".") for name, why in found}


def rows_of(inputs: type[Inputs]) -> list[Row]:
    """The rows of a class, worked out from its declaration."""
    on_cuda, on_npu = (
        {slot.name: slot for slot in explain_declaration(inputs.slotgraph, c, "").slots} for c in (CUDA, NPU)
    )
    whys, slots = whys_of(inputs), inputs.slotgraph.slots
    return [_row(slots[name], on_cuda[name], on_npu[name], whys.get(name, "")) for name in own_slots(inputs)]


def _row(slot: Slot, cuda: SlotFacts, npu: SlotFacts, why: str) -> Row:
    shape = f"`[{', '.join(cuda.shape)}]`"
    return (f"`{cuda.name}`", shape, _dtype(cuda, npu), cuda.placement, _tail(slot, cuda), _origin(slot, cuda), why)


def _dtype(cuda: SlotFacts, npu: SlotFacts) -> str:
    if cuda.role == standard.MODEL_DTYPE.name:
        return "the model's"
    return cuda.dtype if cuda.dtype == npu.dtype else f"{cuda.dtype} / {npu.dtype}"


def _tail(slot: Slot, facts: SlotFacts) -> str:
    """The rule; a value that devices differ in as theirs."""
    rule = slot.rule()
    if isinstance(rule, Pad) and isinstance(rule.value, FillRole):
        return f"{rule.value.on(CUDA)} / {rule.value.on(NPU)}"
    return (facts.tail or "-").removeprefix("pad=")


def _origin(slot: Slot, facts: SlotFacts) -> str:
    if facts.function is not None:
        return f"computed on the {facts.runs_on}: `{facts.function}({', '.join(facts.needs)})`"
    if facts.value is not None:
        return f"constant: `{facts.value}`"
    words = [facts.kind if facts.source in (None, f"batch.{facts.name}") else f"copied from `{facts.source}`"]
    words += [f"also from {dtype_text(dtype)}" for dtype in slot.converts_from() if not isinstance(slot.dtype, Role)]
    words += [word for word in ("optional", "restored") if getattr(slot, word)]
    words += ["rewritten"] * (slot.rewritten and facts.kind == "copied")
    words += [f"at most {facts.limit}"] * (facts.limit is not None)
    words += ["a host parameter"] * (facts.parameter is not None)
    return ", ".join(words)


def tables_of(page: Path) -> dict[str, list[Row]]:
    """Every table of a page that stands below a heading with a class's name, cell by cell."""
    found: dict[str, list[Row]] = {}
    heading = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ").strip("`")
        elif line.startswith("|") and heading in CLASSES:
            found.setdefault(heading, []).append(tuple(cell.strip() for cell in line.strip("|").split("|")))
    return found


each_class = pytest.mark.parametrize("inputs", CLASSES.values(), ids=lambda inputs: inputs.__name__)


@each_class
def test_table(inputs: type[Inputs]) -> None:
    """Below a class's heading stand its sentence and a row for each slot that it adds, with the docstring's reason."""
    page, sentence = PAGE.read_text(encoding="utf-8"), (inputs.__doc__ or "").split("\n")[0]
    assert f"### `{inputs.__name__}`\n\n{sentence}" in page
    assert sorted(whys_of(inputs)) == sorted(own_slots(inputs))
    rows = rows_of(inputs)
    expected = [HEAD, ("---",) * len(HEAD), *rows] if rows else []
    assert tables_of(PAGE).get(inputs.__name__, []) == expected


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
