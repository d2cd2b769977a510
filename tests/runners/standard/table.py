"""The table of a declaration, as docs/standard.md must have it: a row for each slot that the class declares itself."""

import inspect
import re
from pathlib import Path
from typing import Final

from slotgraph import Inputs, standard
from slotgraph.dataflow.capabilities import dtype_text
from slotgraph.dataflow.explain import SlotFacts, explain_declaration
from slotgraph.dataflow.tails import Pad
from slotgraph.extend import FillRole, Role, Slot
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
