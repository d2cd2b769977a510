"""Comparison of two runs of one step: first what was filled into slots, then what came out, by slot, leaf and row."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import torch

from ...dataflow.axes import Step
from ...dataflow.inputs import Inputs
from ...dataflow.slots import Output, Slot
from ..bits import bits
from .replays import named, step_of
from .tails import live_part

Slots = Mapping[str, torch.Tensor | None]


@attrs.frozen
class Tolerance:
    """How far numbers may lie apart: by a share of the second one, and by so much."""

    rtol: float
    atol: float


EXACT: Final = Tolerance(0.0, 0.0)
"""Bit for bit, but that one NaN is as good as another."""
USUAL: Final[Mapping[torch.dtype, Tolerance]] = {
    torch.float16: Tolerance(1e-3, 1e-5),
    torch.bfloat16: Tolerance(1.6e-2, 1e-5),
    torch.float32: Tolerance(1.3e-6, 1e-5),
    torch.float64: Tolerance(1e-7, 1e-7),
    torch.complex32: Tolerance(1e-3, 1e-5),
    torch.complex64: Tolerance(1.3e-6, 1e-5),
    torch.complex128: Tolerance(1e-7, 1e-7),
}
"""By dtype, as `torch.testing.assert_close` documents its defaults; any other dtype is compared exactly."""


@attrs.frozen(eq=False)
class Seen:
    """One run of a step: its sizes, what its slots held, and what it returned, in memory of their own."""

    step: Step
    declared: Mapping[str, Slot]
    slots: Slots
    outputs: Mapping[str, Any]


@attrs.frozen
class Mismatch:
    """Where two runs part: a slot, or a leaf of what the step returned, an index in it, and both values.

    index: of the first element that differs; None where something else does, such as the shape. kind: of the slot.
    names: of the two runs. count: elements that differ.
    """

    where: str
    slot: str | None
    index: tuple[int, ...] | None
    values: tuple[Any, Any]
    names: tuple[str, str]
    count: int = 1
    kind: str = ""

    @property
    def row(self) -> int | None:
        """The row, where it has rows."""
        return self.index[0] if self.index else None

    def __str__(self) -> str:
        """What differs, as `outputs[0] row 3: graph 1.5, eager 2.5`."""
        place = "" if self.row is None else f" row {self.row}"
        if self.index is not None and len(self.index) > 1:
            place += f", at {list(self.index)}"
        (one, other), (first, second) = self.values, self.names
        more = f" ({self.count} elements differ)" if self.count > 1 else ""
        return f"{self.where}{place}: {first} {one}, {second} {other}{more}"


GRAPH_AND_EAGER: Final = ("graph", "eager")


def seen(view: Inputs, outputs: Any) -> Seen:
    """Keep what a run saw in its slots' live rows, and what came out: what it returned, and slots for outputs."""
    info = view._slotgraph_view  # noqa: SLF001 - what a fill leaves there for runners
    step, declared = step_of(view), {} if info is None else info.declaration.slots
    held = {name: (slot, view.__dict__[name]) for name, slot in declared.items()}
    slots = {name: None if one is None else _copied(live_part(slot, one, step)) for name, (slot, one) in held.items()}
    returned: dict[str, Any] = {f"outputs{place}": _copied(tensor) for place, tensor in named(outputs)}
    if not returned and not isinstance(outputs, Inputs):
        returned = {"outputs": outputs}
    written = {f"slot {name!r}": slots[name] for name, slot in declared.items() if isinstance(slot, Output)}
    return Seen(step, declared, slots, returned | written)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.detach().clone()


def first_difference(
    one: Seen,
    other: Seen,
    *,
    tolerance: Mapping[torch.dtype, Tolerance] = USUAL,
    names: tuple[str, str] = GRAPH_AND_EAGER,
) -> Mismatch | None:
    """Where two runs of one batch first part: in a copied slot's live rows, bit for bit, else in what came out.

    The number of rows may differ by padding; what both have is compared. Slots that are computed may differ with the
    padding, and slots that the step writes are its own affair: `computed_apart` tells of the former.
    """
    for name, slot in one.declared.items():
        if slot.reads(name) is not None and not slot.rewritten:
            found = _slot(name, one, other, names)
            if found is not None:
                return found
    return next(differences(one, other, tolerance=tolerance, names=names), None)


def computed_apart(one: Seen, other: Seen, names: tuple[str, str] = GRAPH_AND_EAGER) -> list[Mismatch]:
    """Computed slots of which both runs saw other values."""
    computed = [name for name, slot in one.declared.items() if slot.computes() is not None]
    return [found for name in computed if (found := _slot(name, one, other, names)) is not None]


def differences(
    one: Seen, other: Seen, *, tolerance: Mapping[torch.dtype, Tolerance], names: tuple[str, str]
) -> Iterator[Mismatch]:
    """The first difference of each leaf of what came out: of what the step returned, and of output slots."""
    for where in dict.fromkeys((*one.outputs, *other.outputs)):
        mine, others = one.outputs.get(where), other.outputs.get(where)
        found = _leaf(where, mine, others, one.step, tolerance, names)
        if found is not None:
            yield found


def _slot(name: str, one: Seen, other: Seen, names: tuple[str, str]) -> Mismatch | None:
    """The first difference of a slot that both runs have."""
    if name not in other.slots:
        return None
    found = _leaf(f"slot {name!r}", one.slots[name], other.slots[name], one.step, {}, names)
    return None if found is None else attrs.evolve(found, slot=name, kind=one.declared[name].kind)


def _leaf(
    where: str,
    one: Any,
    other: Any,
    step: Step,
    tolerance: Mapping[torch.dtype, Tolerance],
    names: tuple[str, str],
) -> Mismatch | None:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None if _same(one, other) else Mismatch(where, None, None, (_told(one), _told(other)), names)
    if one.dtype != other.dtype or not _may_differ(one, other, step):
        return Mismatch(where, None, None, (_told(one), _told(other)), names)
    for dim in range(one.dim()):
        size = min(one.shape[dim], other.shape[dim])
        one, other = one.narrow(dim, 0, size), other.narrow(dim, 0, size)
    index, count = _first(one, other.to(one.device), tolerance.get(one.dtype, EXACT))
    if index is None:
        return None
    return Mismatch(where, None, index, (one[index].item(), other[index].item()), names, count)


def _same(one: Any, other: Any) -> bool:
    """Whether two values that are no tensors are equal, where their type can tell; NaN equals itself."""
    if one is other or type(one) is not type(other):
        return one is other
    if getattr(type(one), "__eq__", None) is object.__eq__:  # what tensors they hold is compared by itself
        return True
    return bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124 - as NaN is told


def _may_differ(one: torch.Tensor, other: torch.Tensor, step: Step) -> bool:
    """Whether two shapes are one but for padding."""
    if one.dim() != other.dim():
        return False
    pairs = [(max(pair), min(pair)) for pair in zip(one.shape[1:], other.shape[1:], strict=True)]
    varying = [(step.padded_sizes[axis], live) for axis, live in step.live_sizes.items() if axis in step.padded_sizes]
    return all(big == small or any(big * live == small * padded for padded, live in varying) for big, small in pairs)


def _first(one: torch.Tensor, other: torch.Tensor, tolerance: Tolerance) -> tuple[tuple[int, ...] | None, int]:
    """The index of the first element that differs, and how many do."""
    differs = (bits(one) != bits(other)).any(-1)
    if not bool(differs.any()):
        return None, 0
    if one.dtype.is_floating_point or one.dtype.is_complex:
        wide = torch.complex128 if one.dtype.is_complex else torch.float64
        mine, others = one.to(wide).reshape(-1), other.to(wide).reshape(-1)
        alike = torch.isclose(mine, others, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)
        both_nan = mine.isnan() & others.isnan()
        differs &= ~(both_nan if tolerance == EXACT else alike)
    count = int(differs.sum())
    if not count:
        return None, 0
    first = differs.nonzero()[0].cpu()
    return tuple(int(at) for at in torch.unravel_index(first[0], one.shape)), count


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
    return repr(value)
