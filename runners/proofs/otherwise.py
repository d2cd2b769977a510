"""Tails that hold something else for a while: what a step then leaves otherwise belongs to padded rows.

Padded rows write where their cache locations say, all of them to one reserved row. Which of them comes last there is no
one's business on a device that runs them at once, and differs from run to run.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ...dataflow.inputs import Inputs
from ...dataflow.slots import Constant, Output, Slot
from ...dataflow.tails import Keep
from ..parts import Parts
from .replays import step_of
from .tails import poison_of, spread, tails_of


@contextlib.contextmanager
def other_tails(parts: Parts[Any], view: Inputs, seed: int) -> Iterator[None]:
    """For the block, tails of a filled view hold values that they bear, drawn with a seed; then what they held."""
    step, capabilities = step_of(view), parts.stage.backend.capabilities
    generator, kept = torch.Generator().manual_seed(seed), list[tuple[torch.Tensor, torch.Tensor]]()
    with torch.no_grad():
        for name, slot in parts.stage.declaration.slots.items():
            tensor: torch.Tensor = vars(view)[name]
            poison = poison_of(slot, tensor, step, capabilities) if tensor is not None and _is_safe(slot) else None
            values = () if poison is None else (poison.first, poison.second)[seed % 2]
            for part in tails_of(slot, tensor, step) if values else ():
                kept.append((part, part.clone()))
                part.copy_(spread(values, part, generator))
    try:
        yield
    finally:
        with torch.no_grad():
            for part, before in reversed(kept):
                part.copy_(before)


def _is_safe(slot: Slot) -> bool:
    """Whether rows that hold poison may be executed by the step as it is written, which checks indices."""
    dtype = slot.dtype if isinstance(slot.dtype, torch.dtype) else slot.dtype.default
    return not isinstance(slot, Output | Constant) and (dtype.is_floating_point or not isinstance(slot.rule(), Keep))
