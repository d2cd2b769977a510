"""Rebuilding: a recorded step's batch and side arguments, such that a runner finds in them what it found at home."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from ...dataflow.capabilities import DEVICE
from ...dataflow.declaration import Declaration
from ...dataflow.errors import RecordingError
from ...dataflow.sources import Answering, Call, Path, Side, SideArgument, Source
from ..stage import Stage
from .plain import plain_from_data
from .records import StepRecord, Value, key_of

Values = Mapping[str, Any]


class RecordedBatch(Mapping[str, Any], Answering):
    """A batch made of what was recorded: by name and path as ever, and by source for functions of a batch.

    A function of the batch (`source=lambda batch: ...`) is not called: the file has what it returned at home.
    """

    def __init__(self, names: Values, answers: Mapping[int, Any]) -> None:
        self._names = dict(names)
        self._answers = dict(answers)

    def __getitem__(self, name: str) -> Any:
        """What the batch had under a name."""
        return self._names[name]

    def __iter__(self) -> Iterator[str]:
        """Its names."""
        return iter(self._names)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._names)

    def answer(self, source: Source) -> Any:
        """What the source found at home; None where it found nothing."""
        return self._answers.get(id(source))


def batch_of(step: StepRecord, tensors: Mapping[str, torch.Tensor], stage: Stage[Any]) -> tuple[RecordedBatch, Side]:
    """A recorded step's batch and side arguments, from the elements of its values, for a runner's stage."""
    device = stage.backend.device
    slots, fields = (
        {one.name: _value_of(one, tensors.get(key_of(step.number, part, one.name)), device) for one in found}
        for part, found in step.parts()[:2]
    )
    return rebuilt(stage.declaration, slots, fields)


def rebuilt(declaration: Declaration, slots: Values, fields: Values) -> tuple[RecordedBatch, Side]:
    """The batch and the side arguments that bring given values for slots and fields.

    RecordingError where a slot's source is of a class that cannot be told apart from the batch it reads, or two
    sources exclude one another.
    """
    names: dict[str, Any] = dict(fields)
    side: dict[str, Any] = {}
    answers: dict[int, Any] = {}
    grown: set[int] = set()
    for name, slot in declaration.slots.items():
        source = slot.reads(name)
        if name not in slots or source is None:
            continue
        match source:
            case Path(parts):
                _put(names, parts, slots[name], name, grown)
            case SideArgument(parts):
                _put(side, parts, slots[name], name, grown)
            case Call():
                answers[id(source)] = slots[name]
            case _:
                message = (
                    f"slot {name!r}: its source is a {type(source).__name__}, which a recorded batch cannot stand in "
                    "for: declare a path, side(...) or a function of the batch"
                )
                raise RecordingError(message)
    return RecordedBatch(names, answers), side


_TWICE: Final = (
    "slot {!r}: {!r} holds another source, and what is inside of it another still: give it a path of its own"
)


def _put(names: dict[str, Any], parts: tuple[str, ...], value: Any, slot: str, grown: set[int]) -> None:
    """A value at a dotted path of nested mappings. grown: those mappings that were made here."""
    for part in parts[:-1]:
        inner = names.get(part)
        if inner is None or (id(inner) not in grown and isinstance(inner, dict)):
            inner = names[part] = dict(inner or {})
            grown.add(id(inner))
        elif id(inner) not in grown:
            raise RecordingError(_TWICE.format(slot, part))
        names = inner
    if id(names.get(parts[-1])) in grown:
        raise RecordingError(_TWICE.format(slot, parts[-1]))
    names[parts[-1]] = value


def _value_of(value: Value, tensor: torch.Tensor | None, device: torch.device) -> Any:
    """What the batch brought, from its record and its elements; device: where tensors lie that lay on the device."""
    if value.kind == "plain":
        return plain_from_data(value.value)
    if value.is_lost or tensor is None:
        return None
    if value.kind == "array":
        return tensor.numpy()
    if value.kind in ("list", "tuple"):
        return tensor.tolist() if value.kind == "list" else tuple(tensor.tolist())
    there = tensor.to(device) if value.where == DEVICE else tensor
    return there if value.dense else _apart(there)


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not in one piece."""
    wide = tensor.new_empty((*tensor.shape, 2))
    wide[..., 0] = tensor
    return wide[..., 0]
