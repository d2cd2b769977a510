"""Reads: which slots of a view the operators of a step take, by the addresses of what they are given."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from ...backends.torch_modes import run_under
from ...dataflow.binding import overlaps, span
from ...dataflow.compute import OUT
from ...dataflow.declaration import Declaration
from ...dataflow.inputs import Inputs
from ..parts import Parts
from ..traffic import Traffic, run_seen
from .eagerly import ran_eagerly
from .replays import named

_BY_HOST: Final = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})


def read_slots(parts: Parts[Any], view: Inputs) -> frozenset[str]:
    """Run the step without its graph on the view that was filled last, and name the slots that something reads.

    Functions of computed slots read what they name. An operator reads what it takes, but to look at a part of a slot
    is not to read it. What is launched without an operator, as a kernel by itself may be, is not seen.
    """
    declaration = parts.stage.declaration
    values = vars(view)
    spans = {name: span(values[name]) for name in declaration.slots if values[name] is not None}
    seen = needed_slots(declaration)

    def note(tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel():
                seen.update(name for name, place in spans.items() if overlaps(tensor, [place]))

    traffic = Traffic(done=lambda _, taken, __: note(taken))
    outputs = run_under(_HostReads(note), lambda: run_seen(traffic, lambda: ran_eagerly(parts, view)))
    note(tensor for _, tensor in named(outputs))
    return frozenset(seen)


class _HostReads(TorchFunctionMode):
    """Tells of tensors that the host takes as numbers, which is no operator's work where they are on the CPU."""

    def __init__(self, note: Callable[[Iterable[torch.Tensor]], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Tell of one, and call it."""
        del types
        if getattr(func, "__name__", "") in _BY_HOST:
            self._note(args[:1])
        return func(*args, **(kwargs or {}))


def needed_slots(declaration: Declaration) -> set[str]:
    """Slots that computed ones are made of."""
    computes = (slot.computes() for slot in declaration.slots.values())
    return {need for compute in computes if compute is not None for need in compute.needs if need != OUT}
