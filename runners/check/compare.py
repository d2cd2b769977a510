"""Compares what two runs of a step made: slots, outputs and live rows, by slot, leaf and row."""

import copyreg
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import torch
from torch.nn import Module

from ...dataflow.axes import Step, extent
from ...dataflow.inputs import Inputs
from ...dataflow.slots import BY_STEP, Slot
from ...dataflow.views import ViewInfo
from ..engine.bits import text_of, unequal

MOST_NESTED: Final = 4
"""How many objects within objects are searched for outputs."""
Leaves = Mapping[str, Any]
"""Tensors and values by their path in what a step returns, or by slot."""
Tolerances = Mapping[torch.dtype, tuple[float, float]]
"""By dtype how far numbers may be apart: by a share of the second one, and by an absolute amount. Others must be equal.

Complex numbers have the tolerance of their parts.
"""
BITWISE: Final[Tolerances] = {}
"""Equal bit for bit, except that all NaN are equal."""
USUAL: Final[Tolerances] = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}
"""As `torch.testing.assert_close` documents its defaults."""
OTHER_SHAPES: Final[Tolerances] = {
    **USUAL,
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (5e-2, 5e-2),
    torch.float32: (1e-3, 1e-3),
}
"""How far a model's outputs for a padded batch may be from those for the batch alone.

Kernels for other shapes add in another order, layer after layer. The poison check, which asks for equal bits, finds
what padded rows do to live ones.
"""


@attrs.frozen(eq=False)
class Seen:
    """One run of a step: its sizes, live rows of its slots, and its results, in memory of their own.

    Attributes:
        step: The sizes.
        copied: Copied slots, without those that the step writes.
        computed: Computed slots.
        outputs: What the step returned, and its output slots.
    """

    step: Step
    copied: Leaves
    computed: Leaves
    outputs: Leaves


@attrs.frozen
class Mismatch:
    """The first difference between two runs in one leaf.

    Attributes:
        where: The slot, or the path in what the step returned.
        index: The first element that differs. It is empty if there are no dims, or if shapes or values differ.
        values: What the two runs have there.
        names: The names of the two runs.
        count: How many elements differ.
    """

    where: str
    index: tuple[int, ...]
    values: tuple[Any, Any]
    names: tuple[str, str]
    count: int = 1

    @property
    def slot(self) -> str | None:
        """The slot, or None for what the step returned."""
        return self.where[6:-1] if self.where.startswith("slot ") else None

    @property
    def row(self) -> int | None:
        """The row, or None if it has no rows."""
        return self.index[0] if self.index else None

    def __str__(self) -> str:
        """Return the difference, as `outputs[0] row 3: graph 1.5, eager 2.5`."""
        place = f" row {self.row}" if self.index else ""
        if len(self.index) > 1:
            place += f", at {[*self.index]}"
        more = f" ({self.count} elements differ)" if self.count > 1 else ""
        (one, other), (first, second) = self.values, self.names
        return f"{self.where}{place}: {first} {one}, {second} {other}{more}"


def info_of(view: Inputs) -> ViewInfo:
    """Return the sizes and the declaration of a view that a fill made."""
    info = view._slotgraph_view  # noqa: SLF001 - a fill sets it for runners
    if info is None:
        raise ValueError("only a view that a fill handed out has sizes")
    return info


def live_part(slot: Slot, tensor: torch.Tensor, step: Step) -> torch.Tensor:
    """Return the live rows of a padded view."""
    return tensor[tuple(map(slice, extent(slot.shape, step.live_sizes)))]


def tails_of(slot: Slot, tensor: torch.Tensor, step: Step) -> Iterator[torch.Tensor]:
    """Return the parts of a padded view beyond the live rows, one along each varying dim. They may overlap."""
    for dim in slot.varying:
        live = slot.shape[dim].at(step.live_sizes)
        if live < tensor.shape[dim]:
            yield tensor.narrow(dim, live, tensor.shape[dim] - live)


def seen(view: Inputs, outputs: Any) -> Seen:
    """Copy the live rows of a run's slots, and its results."""
    info, copied, computed, written = info_of(view), dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for name, slot in info.declaration.slots.items():
        tensor = vars(view)[name]
        if slot.writers == BY_STEP:
            part = written
        elif name in info.declaration.functions:
            part = computed
        elif name in info.declaration.sources and not slot.rewritten:
            part = copied
        else:
            continue
        part[f"slot {name!r}"] = None if tensor is None else live_part(slot, tensor, info.step).detach().clone()
    returned: dict[str, Any] = copies(outputs, "outputs")
    if not returned and not isinstance(outputs, Inputs):
        returned = {"outputs": outputs}
    return Seen(info.step, copied, computed, returned | written)


def copies(outputs: Any, name: str) -> dict[str, torch.Tensor]:
    """Return copies of the tensors of what a step returned, each by its path."""
    return {f"{name}{place}": tensor.detach().clone() for place, tensor in named(outputs)}


def named(
    value: Any, place: str = "", depth: int = MOST_NESTED, known: frozenset[int] = frozenset()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of what a step returned, each with its path in it. known: The objects around it."""
    parts: dict[str, Any] = {}
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        parts = {f"[{key!r}]": inner for key, inner in value.items()}
    elif isinstance(value, list | tuple):
        fields = getattr(value, "_fields", None)
        parts = {f"[{at}]" if fields is None else f".{fields[at]}": inner for at, inner in enumerate(value)}
    elif depth and id(value) not in known and not isinstance(value, Inputs | type | Module):
        depth, known = depth - 1, known | {id(value)}
        slots: list[str] = copyreg._slotnames(type(value))  # type: ignore[attr-defined]  # noqa: SLF001 - as pickle has them
        parts = {f".{name}": getattr(value, name, None) for name in (*slots, *getattr(value, "__dict__", ()))}
    for part, inner in parts.items():
        yield from named(inner, place + part, depth, known)


def differences(one: Seen, other: Seen, tolerance: Tolerances) -> Iterator[Mismatch]:
    """Compare two runs, maybe of other padding: copied slots bit for bit, then outputs, but no computed slots."""
    yield from mismatches(one.copied, other.copied)
    yield from mismatches(one.outputs, other.outputs, tolerance, step=one.step)


def mismatches(
    one: Leaves,
    other: Leaves,
    tolerance: Tolerances = BITWISE,
    names: tuple[str, str] = ("graph", "eager"),
    step: Step | None = None,
) -> Iterator[Mismatch]:
    """Yield the first difference of each leaf. step: The sizes, if leaves may be padded differently."""
    for where in dict.fromkeys((*one, *other)):
        mine, others = one.get(where), other.get(where)
        if isinstance(mine, torch.Tensor) and isinstance(others, torch.Tensor) and _comparable(mine, others, step):
            both = tuple(map(slice, map(min, mine.shape, others.shape)))
            mine, others = mine[both], others[both].to(mine.device)
            places = _apart(mine, others, tolerance).nonzero()
            if len(places):
                index = tuple(places[0].tolist())
                yield Mismatch(where, index, (mine[index].item(), others[index].item()), names, len(places))
        elif isinstance(mine, torch.Tensor) or not _same(mine, others):
            yield Mismatch(where, (), (text_of(mine), text_of(others)), names)


def _same(one: Any, other: Any) -> bool:
    """Return whether two values that are not tensors are equal, if their type defines that. NaN equals itself."""
    if one is other or type(one) is not type(other) or getattr(type(one), "__eq__", None) is object.__eq__:
        return type(one) is type(other)
    return bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124 - a test for NaN


def _comparable(one: torch.Tensor, other: torch.Tensor, step: Step | None) -> bool:
    """Return whether two tensors have the same dtype, and the same shape except for padding."""
    if one.dtype != other.dtype or step is None or one.dim() != other.dim():
        return (one.dtype, one.shape) == (other.dtype, other.shape)
    padding = [(step.padded_sizes[axis], live) for axis, live in step.live_sizes.items() if axis in step.padded_sizes]
    for pair in zip(one.shape[1:], other.shape[1:], strict=True):
        big, small = max(pair), min(pair)
        if big != small and all(big * live != small * padded for padded, live in padding):
            return False
    return True


def _apart(one: torch.Tensor, other: torch.Tensor, tolerance: Tolerances) -> torch.Tensor:
    """Return which elements are further apart than the tolerance."""
    differs = unequal(one, other)
    if differs.any() and (one.is_floating_point() or one.is_complex()):
        wide = torch.complex128 if one.is_complex() else torch.float64
        mine, others = one.to(wide), other.to(wide)
        differs &= ~(mine.isnan() & others.isnan())
        near = tolerance.get(one.dtype.to_real())
        if near is not None:
            differs &= ~torch.isclose(mine, others, *near)
    return differs
