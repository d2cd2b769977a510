"""Compares two runs of one step, by its graph and eagerly, from the same slots, by slot, leaf and row."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import torch
from torch.nn import Module

from ..dataflow.axes import BATCH, Step
from ..dataflow.buffers import span
from ..dataflow.inputs import Inputs
from ..dataflow.slots import BY_STEP, Slot
from ..dataflow.views import ViewInfo
from .engine.bits import text_of, unequal
from .engine.current import CurrentStep, with_current
from .engine.graphs import Captured
from .engine.runner import Runner
from .engine.state import State

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
    """The first difference between two runs in one leaf."""

    where: str  # the slot, or the path in what the step returned
    index: tuple[int, ...] | None  # the first element that differs; None if shapes or values differ
    values: tuple[Any, Any]
    names: tuple[str, str]  # the names of the two runs
    count: int = 1  # how many elements differ

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
        place = "" if self.row is None else f" row {self.row}"
        if self.index is not None and len(self.index) > 1:
            place += f", at {list(self.index)}"
        (one, other), (first, second) = self.values, self.names
        more = f" ({self.count} elements differ)" if self.count > 1 else ""
        return f"{self.where}{place}: {first} {one}, {second} {other}{more}"


def info_of(view: Inputs) -> ViewInfo:
    """Return the sizes and the declaration of a view that a fill made."""
    info = view._slotgraph_view  # noqa: SLF001 - a fill sets it for runners
    if info is None:
        raise ValueError("only a view that a fill handed out has sizes")
    return info


def live_part(slot: Slot, tensor: torch.Tensor, step: Step) -> torch.Tensor:
    """Return the live rows of a padded view."""
    for dim in slot.varying:
        tensor = tensor.narrow(dim, 0, min(slot.shape[dim].at(step.live_sizes), tensor.shape[dim]))
    return tensor


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
        tensor, text = vars(view)[name], f"slot {name!r}"
        held = None if tensor is None else live_part(slot, tensor, info.step).detach().clone()
        if slot.writers == BY_STEP:
            written[text] = held
        elif name in info.declaration.functions:
            computed[text] = held
        elif name in info.declaration.sources and not slot.rewritten:
            copied[text] = held
    returned: dict[str, Any] = copies(outputs, "outputs")
    if not returned and not isinstance(outputs, Inputs):
        returned = {"outputs": outputs}
    return Seen(info.step, copied, computed, returned | written)


def copies(outputs: Any, name: str) -> dict[str, torch.Tensor]:
    """Return copies of the tensors of what a step returned, each by its path."""
    return {f"{name}{place}": tensor.detach().clone() for place, tensor in named(outputs)}


def named(
    value: Any, place: str = "", depth: int = MOST_NESTED, known: set[int] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of what a step returned, each with its path in it. known: Objects that were searched."""
    known = set() if known is None else known
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from named(inner, f"{place}[{key!r}]", depth, known)
    elif isinstance(value, list | tuple):
        fields = getattr(value, "_fields", None)
        for index, inner in enumerate(value):
            where = f"{place}[{index}]" if fields is None else f"{place}.{fields[index]}"
            yield from named(inner, where, depth, known)
    elif depth and id(value) not in known and not isinstance(value, Inputs | type | Module):
        known.add(id(value))
        kind = type(value)
        fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else getattr(kind, "__attrs_attrs__", ())
        for name in [field.name for field in fields] or list(getattr(value, "__dict__", ())):
            yield from named(getattr(value, name), f"{place}.{name}", depth - 1, known)


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
            for dim in range(mine.dim()):
                size = min(mine.shape[dim], others.shape[dim])
                mine, others = mine.narrow(dim, 0, size), others.narrow(dim, 0, size)
            index, count = _first(mine, others.to(mine.device), tolerance)
            if count:
                yield Mismatch(where, index, (mine[index].item(), others[index].item()), names, count)
        elif isinstance(mine, torch.Tensor) or not _same(mine, others):
            yield Mismatch(where, None, (text_of(mine), text_of(others)), names)


def _same(one: Any, other: Any) -> bool:
    """Return whether two values that are not tensors are equal, if their type defines that. NaN equals itself."""
    if one is other or type(one) is not type(other) or getattr(type(one), "__eq__", None) is object.__eq__:
        return type(one) is type(other)
    return bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124 - a test for NaN


def _comparable(one: torch.Tensor, other: torch.Tensor, step: Step | None) -> bool:
    """Return whether two tensors have the same dtype, and the same shape except for padding."""
    if one.dtype != other.dtype or step is None or one.dim() != other.dim():
        return (one.dtype, one.shape) == (other.dtype, other.shape)
    pairs = [(max(pair), min(pair)) for pair in zip(one.shape[1:], other.shape[1:], strict=True)]
    varying = [(step.padded_sizes[axis], live) for axis, live in step.live_sizes.items() if axis in step.padded_sizes]
    return all(big == small or any(big * live == small * padded for padded, live in varying) for big, small in pairs)


def _first(one: torch.Tensor, other: torch.Tensor, tolerance: Tolerances) -> tuple[tuple[int, ...], int]:
    """Return the index of the first element that differs, and how many do."""
    differs = unequal(one, other)
    if differs.any() and (one.is_floating_point() or one.is_complex()):
        wide = torch.complex128 if one.is_complex() else torch.float64
        mine, others = one.to(wide), other.to(wide)
        alike, near = mine.isnan() & others.isnan(), tolerance.get(one.dtype.to_real())
        if near is not None:
            alike |= torch.isclose(mine, others, *near)
        differs &= ~alike
    places = differs.nonzero()
    return tuple(places[0].tolist()) if len(places) else (), len(places)


def graph_of(runner: Runner[Any], view: Inputs) -> Captured | None:
    """Return the graph of a filled view, or None if its bucket has none, or it runs eagerly."""
    info, graphs, declaration = view._slotgraph_view, runner.graphs, runner.stage.declaration  # noqa: SLF001 - for runners
    if info is None or info.exact or graphs is None:
        return None
    axes = [axis for axis in declaration.varying if axis != BATCH or runner.tally.path == "graph"]
    fitting = (rows for rows, sizes in runner.sizes.items() if all(sizes[a] == info.step.padded_sizes[a] for a in axes))
    return graphs.captured.get((next(fitting, 0), runner.stage.absent_in(view)))


def ran_eagerly(runner: Runner[Any], view: Inputs) -> Any:
    """Run the step without its graph on a filled view: as its graph would, with padded rows."""
    captured = graph_of(runner, view)
    with torch.no_grad():
        if captured is not None and runner.tally.path == "graph":  # only the graph computes on the device
            captured.filling.bucket.compute_on_device()
        return with_current(CurrentStep(view), runner.stage.run, view)


@contextlib.contextmanager
def slots_kept(runner: Runner[Any]) -> Iterator[None]:
    """Run a block, and put the contents of all slots back. The next fill then resets their tails."""
    buffers = runner.eager.buffers if runner.graphs is None else runner.graphs.buffers
    wait = runner.stage.backend.synchronize  # steps may still read slots in host memory
    wait()
    with torch.no_grad():
        kept = [(one.tensor, one.tensor.clone()) for one in buffers or () if one.slot.writers]
    try:
        yield
    finally:
        wait()
        with torch.no_grad():
            for tensor, held in kept:
                tensor.copy_(held)
        if buffers is not None:
            buffers.distrust()


def state_on(runner: Runner[Any], view: Any) -> State:
    """Return what a runner's step changes on the view that was filled last. Slots and state are put back."""
    backend, given = runner.stage.backend, runner.stage.state
    if given is not None:
        return State.of(backend, given)
    with slots_kept(runner):
        return State.found(backend, spans_of_slots(runner), lambda: ran_eagerly(runner, view))


def spans_of_slots(runner: Runner[Any]) -> list[tuple[int, int]]:
    """Return the address ranges of the slots of a runner."""
    buffers = (runner.eager.buffers, None if runner.graphs is None else runner.graphs.buffers)
    return [span(one.tensor) for held in buffers for one in held or () if one.nbytes]
