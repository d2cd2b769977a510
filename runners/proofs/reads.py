"""Reads: which slots of a view the operators of a step take, by the addresses of what they are given."""

import functools
from typing import Any, Final

import torch

from ...dataflow.binding import overlaps, span
from ...dataflow.compute import OUT
from ...dataflow.declaration import Declaration
from ...dataflow.inputs import Inputs
from ..parts import Parts
from ..traffic import Traffic, seen_by
from .eagerly import ran_eagerly

_C: Final[Any] = torch._C  # noqa: SLF001 - schemas by name have no public way


def read_slots(parts: Parts[Any], view: Inputs) -> frozenset[str]:
    """Run the step without its graph on the view that was filled last, and name the slots that something reads.

    Functions of computed slots read what they name. An operator reads what it takes, but to look at a part of a slot
    is not to read it. What is launched without an operator, as a kernel by itself may be, is not seen.
    """
    declaration = parts.stage.declaration
    values = vars(view)
    spans = {name: span(values[name]) for name in declaration.slots if values[name] is not None}
    seen = needed_slots(declaration)

    def note(tensor: torch.Tensor, operator: str) -> None:
        if tensor.numel() and not _only_looks(operator):
            seen.update(name for name, place in spans.items() if overlaps(tensor, [place]))

    with seen_by(Traffic(reads=note)):
        ran_eagerly(parts, view)
    return frozenset(seen)


def needed_slots(declaration: Declaration) -> set[str]:
    """Slots that computed ones are made of."""
    computes = (slot.computes() for slot in declaration.slots.values())
    return {need for compute in computes if compute is not None for need in compute.needs if need != OUT}


@functools.cache
def _only_looks(operator: str) -> bool:
    """Whether an operator hands out a part of its argument's memory, and does nothing else."""
    schemas = _C._jit_get_schemas_for_operator(operator)  # noqa: SLF001 - as above
    return bool(schemas) and all(_is_view(schema) for schema in schemas)


def _is_view(schema: Any) -> bool:
    aliases = [argument.alias_info for argument in schema.arguments if argument.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)
