"""The tables of ready-made slots, which `make reference` writes into docs/standard.md and docs/attention.md."""

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Final

import torch

from slotgraph import Inputs, standard
from slotgraph.dataflow.capabilities import Capabilities, dtype_text
from slotgraph.dataflow.tails import Pad
from slotgraph.extend import FillRole, Role, Slot
from slotgraph.runners.explained.declared import SlotFacts, explain_declaration

CUDA: Final = Capabilities(roles={"cache_loc": torch.int64}, fills={"seq_len_fill": 1})
NPU: Final = Capabilities(roles={"cache_loc": torch.int32}, fills={"seq_len_fill": 0})


def tables(module: ModuleType) -> Iterator[str]:
    """A heading, a sentence and a table for each declaration of a module, with the slots that it adds."""
    for name in module.__all__:
        inputs = getattr(module, name)
        if not (inspect.isclass(inputs) and issubclass(inputs, Inputs)):
            continue
        yield from (f"### `{name}`", "", (inputs.__doc__ or "").split("\n")[0], "")
        rows = list(_rows(inputs))
        if rows:
            yield from (
                "| slot | shape | dtype | on | tail | comes from | why |",
                "|---|---|---|---|---|---|---|",
                *rows,
                "",
            )


def whys(inputs: type[Inputs]) -> dict[str, str]:
    """What a class's docstring says of its slots: `name: why.`, in a line or several."""
    body = inspect.cleandoc(inputs.__doc__ or "")
    found = re.findall(r"^(\w+): (.*(?:\n(?!\w+: |\n).*)*)", body, re.MULTILINE)
    return {name: " ".join(why.split()).removesuffix(".") for name, why in found}


def _rows(inputs: type[Inputs]) -> Iterator[str]:
    cuda, npu = ({s.name: s for s in explain_declaration(inputs.slotgraph, c, "").slots} for c in (CUDA, NPU))
    said = dict[str, str]()
    for base in reversed(inputs.__mro__):
        said |= whys(base)
    for name in inspect.get_annotations(inputs):
        if (slot := inputs.slotgraph.slots.get(name)) is not None:
            yield "| " + " | ".join(_cells(slot, cuda[name], npu[name], said[name])) + " |"


def _cells(slot: Slot, cuda: SlotFacts, npu: SlotFacts, why: str) -> tuple[str, ...]:
    dtype = cuda.dtype if cuda.dtype == npu.dtype else f"{cuda.dtype} / {npu.dtype}"
    if cuda.role == standard.MODEL_DTYPE.name:
        dtype = "the model's"
    rule, tail = slot.rule(), (cuda.tail or "-").removeprefix("pad=")
    if isinstance(rule, Pad) and isinstance(rule.value, FillRole):
        tail = f"{rule.value.on(CUDA)} / {rule.value.on(NPU)}"
    return f"`{cuda.name}`", f"`[{', '.join(cuda.shape)}]`", dtype, cuda.placement, tail, _origin(slot, cuda), why


def _origin(slot: Slot, facts: SlotFacts) -> str:
    if facts.function is not None:
        return f"computed on the {facts.runs_on}: `{facts.function}({', '.join(facts.needs)})`"
    if not slot.writers:
        value = slot.initial()
        return f"constant: `{getattr(value, '__qualname__', value)}`"
    words = [facts.kind if facts.source in (None, f"batch.{facts.name}") else f"copied from `{facts.source}`"]
    words += [f"also from {dtype_text(dtype)}" for dtype in slot.converts_from() if not isinstance(slot.dtype, Role)]
    words += [word for word in ("optional", "restored") if getattr(slot, word)]
    words += ["rewritten"] * (slot.rewritten and facts.kind == "copied")
    words += [f"at most {slot.limit}"] * (slot.limit is not None)
    words += ["a host parameter"] * (slot.argument is not None)
    return ", ".join(words)
