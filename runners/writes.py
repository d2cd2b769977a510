"""Writes: whether a step changes an input that it was declared only to read."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..dataflow.buffers import Buffer, Buffers
from ..dataflow.errors import CaptureError
from ..dataflow.slots import Output


def check_writes(step: Callable[[], Any], buffers: Buffers) -> None:
    """Run a step once. CaptureError, with the inputs as they were, where it changed slots that it should only read.

    A slot that the step writes would keep that in its tail, which a fill believes to be clean.
    """
    before = {buffer.name: buffer.tensor.clone() for buffer in buffers if _only_read(buffer)}
    step()
    changed = _changed({name: (buffers[name].tensor, kept) for name, kept in before.items() if kept.numel()})
    for name in changed:
        buffers[name].tensor.copy_(before[name])
    if changed:
        names = ", ".join(map(repr, changed))
        message = f"the step writes {names}: declare what it writes with rewritten=True, or as staged() or output()"
        raise CaptureError(message)


def _only_read(buffer: Buffer) -> bool:
    slot = buffer.slot
    return not (slot.rewritten or slot.computes() or isinstance(slot, Output))


def _changed(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> list[str]:
    """Those of which any byte differs (NaN equals itself there), asking the device once for each kind of memory."""
    found: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, (one, other) in pairs.items():
        differs = (one.view(-1).view(torch.uint8) != other.view(-1).view(torch.uint8)).any()
        found.setdefault(one.device, []).append((name, differs))
    return [
        name
        for flags in found.values()
        for (name, _), differs in zip(flags, torch.stack([flag for _, flag in flags]).tolist(), strict=True)
        if differs
    ]
