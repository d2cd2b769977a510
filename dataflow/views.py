"""Views: the objects that steps get. They hold aliases of slots, which a step may reshape, and can be narrowed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import attrs
import torch

from .axes import BATCH, TOKENS, Axis, Dim, Live, Step, extent
from .capabilities import DEVICE
from .computation import Computation, Results, ResultTail
from .declaration import LIVE_ROWS, Declaration
from .errors import BatchError, ReplayError, did_you_mean
from .guard import POINTER, Guard, outside_inference, own_guard
from .slots import Slot
from .sources import STEP, Field

T = TypeVar("T")
Views = Mapping[str, torch.Tensor | None]
Ranges = Mapping[Axis, tuple[int, int]]


def ordinary_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor over the same memory that may be written in any mode, even if `tensor` is an inference tensor."""
    with outside_inference():
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Make another tensor over the same memory. It is an ordinary tensor even in inference mode."""
    with outside_inference():
        return tensor.detach()


@attrs.define(eq=False)
class Aliases:
    """Aliases of some tensors, by name. They stay the same until one is changed in place (`unsqueeze_`, `.data =`).

    Attributes:
        tensors: The tensors.
        anew: If it is given, the first call returns `tensors` themselves, and a later one calls it to make others.
    """

    _tensors: Views
    _anew: Callable[[], Views] | None = None
    _handed_out: bool = False
    _made: Views = attrs.field(factory=dict)
    _own: tuple[torch.Tensor, ...] = ()
    _pointers: Sequence[int] = ()
    _guard: Guard | None = None

    def __call__(self) -> Views:
        """Return the aliases, with None for an absent tensor. Raise ReplayError if somebody resized their memory."""
        if self._anew is not None:
            if not self._handed_out:
                self._handed_out = True
                return self._tensors
            self._tensors = self._anew()
            self._anew = None
        if not self._own:
            self._make()  # no aliases were handed out yet
            return self._made
        if self._guard is None:
            self._guard = own_guard([one for one in self._tensors.values() if one is not None])
        if not self._guard(*self._own) or [*map(POINTER, self._own)] != self._pointers:
            self._make()
        return self._made

    def _make(self) -> None:
        present = {name: one for name, one in self._tensors.items() if one is not None}
        now = [*map(POINTER, present.values())]
        moved = [n for n, address, before in zip(present, now, self._pointers, strict=False) if address != before]
        if moved:
            raise ReplayError(
                f"the memory of {', '.join(map(repr, moved))} was resized in place, and graphs still read the old "
                f"memory: do not resize tensors of a view, and make a new runner"
            )
        with outside_inference():
            self._made = {**self._tensors, **{name: one.detach() for name, one in present.items()}}
        self._own = tuple([one for one in self._made.values() if one is not None])
        self._pointers = now


@attrs.frozen(eq=False)
class ViewInfo:
    """Facts about the fill that made a view.

    Attributes:
        step: The step's sizes.
        relations: Axes that follow from others.
        declaration: The runner's declaration.
        tails: The tails that are written behind the results of functions, by slot.
        whole: Slots that must not be cut, since operators take all of each.
        captured: Whether the view is for a capture, which would freeze what functions on the host return for a
            micro-batch.
        exact: Whether it has live rows only.
        placeholder: Whether its batch is the declaration's placeholder.
    """

    step: Step
    relations: Mapping[Axis, Dim]
    declaration: Declaration
    tails: Mapping[str, ResultTail]
    whole: frozenset[str] = frozenset()
    captured: bool = False
    exact: bool = False
    placeholder: bool = False


@attrs.define(eq=False)
class Viewer(Generic[T]):
    """Makes the views of a bucket's batches.

    Attributes:
        kind: The class of the views.
        shown: Returns the slots' tensors for live sizes.
        fields: The fields of the declaration that are not slots.
        info_of: Returns the `ViewInfo` for live sizes.
        frozen: Values of fields that replace those of batches.
    """

    _kind: type[T]
    _shown: Callable[[Live], Views]
    _fields: Mapping[str, Field]
    _info_of: Callable[[Live], ViewInfo]
    _frozen: Mapping[str, Any]
    _last: tuple[Live | None, ViewInfo | None] = (None, None)

    def __attrs_post_init__(self) -> None:
        """Leave out the fields that are frozen."""
        self._fields = {name: field for name, field in self._fields.items() if name not in self._frozen}

    def __call__(self, batch: Any, live: Live) -> T:
        """Make the view of a batch with these live sizes."""
        last, info = self._last
        if info is None or live != last:
            info = self._info_of(live)
            self._last = live, info
        made = self._kind.__new__(self._kind)
        values = made.__dict__
        values.update(self._shown(live))
        if self._fields:
            values.update(carried(self._fields, batch))
        if self._frozen:  # to update from an empty proxy takes as long as making the object
            values.update(self._frozen)
        values["_slotgraph_view"] = info
        if info.declaration.groups:
            values.update(info.declaration.grouped(values))
        return made


def carried(fields: Mapping[str, Field], batch: Any) -> dict[str, Any]:
    """Return the fields that are not slots: the batch's values, else the defaults. Fields with neither are left out."""
    found = {}
    plain = type(batch) is dict
    for name, field in fields.items():
        value = batch.get(name) if plain and field.convert is None else None
        if value is None:
            value = field.read(batch)
        if value is not None or field.default is not attrs.NOTHING:
            found[name] = value
    return found


def live_values(values: Mapping[str, Any], declaration: Declaration, info: ViewInfo) -> dict[str, Any]:
    """Return copies of a view's batch values: the live rows of copied slots, and the fields."""
    sizes = {**info.step.padded_sizes, **info.step.live_sizes}
    found = dict[str, Any]()
    for name in declaration.sources:
        tensor = values.get(name)
        rows = map(slice, extent(declaration.slots[name].shape, sizes))
        found[name] = None if tensor is None else tensor[tuple(rows)].clone()
    fields = {name: values[name] for name in declaration.fields if name in values}
    return {**found, **declaration.grouped(found), **fields}


def narrowed(view: T, declared: Mapping[str, Slot], info: ViewInfo | None, ranges: Ranges) -> T:
    """Narrow a view as `Inputs.narrow` does. Raise BatchError if it cannot be cut.

    `declared` has the slots of the view's class, enabled or not.
    """
    if info is None:
        raise BatchError("only a view, which a fill handed out, can be narrowed: slice a batch of your own yourself")
    sizes = info.step.padded_sizes
    every = _all_ranges(info, ranges)
    for name in info.whole:
        if not declared[name].axes.isdisjoint(every):
            raise BatchError(
                f"slot {name!r} is a host parameter, and a replay passes all of it to each operator of its graph, so "
                "that none can be captured on a part of it: cut the batch instead, or have them read a device slot"
            )
    if BATCH in every and TOKENS in info.declaration.axes and TOKENS not in every:
        raise BatchError(
            "requests of this batch differ in length: pass the range of their tokens, too, narrow(BATCH, a, b, "
            "tokens=(c, d))"
        )
    live = {axis: min(max(info.step.live_sizes[axis] - a, 0), b - a) for axis, (a, b) in every.items()}
    padded = {axis: stop - start for axis, (start, stop) in every.items()}
    step = Step({**info.step.live_sizes, **live}, {**sizes, **padded})
    made = type(view).__new__(type(view))
    values = _cut(view.__dict__, declared, info, every, step)
    for group in info.declaration.groups:
        values.pop(group, None)
    values.update(info.declaration.grouped(values), _slotgraph_view=attrs.evolve(info, step=step))
    made.__dict__.update(values)
    return made


def _all_ranges(info: ViewInfo, ranges: Ranges) -> dict[Axis, tuple[int, int]]:
    """Add the ranges on axes that follow from the given ones. Raise BatchError for rows that do not exist."""
    sizes = info.step.padded_sizes
    every = {axis: _checked(axis, rows, info) for axis, rows in ranges.items()}
    for axis, (start, stop) in [*every.items()]:
        if axis in info.relations and not set(ranges) & info.relations[axis].axes:
            raise BatchError(f"{axis} follows from {info.relations[axis]}: narrow that axis in its place")
        for other, size in info.relations.items():
            if axis in size.axes:
                follows = size.at({**sizes, axis: start}), size.at({**sizes, axis: stop})
                if every.setdefault(other, follows) != follows and other in ranges:
                    raise BatchError(
                        f"rows {start} to {stop} of {axis} have rows {follows} of {other}, which is {size}, and "
                        f"narrow() got {every[other]} of it: leave that range out"
                    )
    return every


def _checked(axis: Any, rows: Any, info: ViewInfo) -> tuple[int, int]:
    """Return the first row of a range and the one past its last. Raise BatchError if the view has no such rows."""
    sizes = info.step.padded_sizes
    if not isinstance(axis, Axis):
        raise BatchError(
            f"narrow() cuts the rows of an axis, such as BATCH, got {axis!r} of type {type(axis).__name__}"
        )
    if axis not in sizes:
        near = did_you_mean(axis, map(str, sizes))
        raise BatchError(f"no slot of {info.declaration.name} has rows on {axis}: narrow another axis{near}")
    found: list[Any] = [*rows] if isinstance(rows, tuple | list) else []
    are_whole = [hasattr(row, "__index__") and not isinstance(row, bool) for row in found]  # or a compiler's symbols
    if are_whole != [True, True]:
        raise BatchError(f"rows of {axis}: expected two whole numbers, the first and one past the last, got {rows!r}")
    start = found[0]
    stop = found[1]
    if not 0 <= start <= stop <= sizes[axis]:
        raise BatchError(f"rows {start} to {stop} do not lie within the {sizes[axis]} rows of {axis}")
    return start, stop


def _cut(
    values: Mapping[str, Any], declared: Mapping[str, Slot], info: ViewInfo, ranges: Ranges, step: Step
) -> dict[str, Any]:
    """Return the values of a micro-batch: slices, and the computed slots that can be computed for it."""
    made = dict(values)
    slots = info.declaration.slots
    functions = info.declaration.functions
    for name in (name for name in declared if name not in functions):
        tensor = values.get(name)
        made[name] = None if tensor is None else _slice(name, declared[name], tensor, info, ranges)
    for axis, (start, stop) in ranges.items():  # a graph, too, pads the micro-batch by live rows of its own
        if (count := values.get(LIVE_ROWS + axis.name)) is not None:
            made[LIVE_ROWS + axis.name] = (count - start).clamp(0, stop - start)
    computed = list[str]()
    for name, compute in functions.items():
        if values.get(name) is None or name.startswith(LIVE_ROWS):
            continue
        slot = declared[name]
        needed_slots = [need for need in compute.needs if need in slots]
        on_device = info.declaration.side(name) == DEVICE and all(need in made for need in needed_slots)
        if not info.captured or on_device:
            with outside_inference():
                made[name] = values[name].new_empty(extent(slot.shape, step.padded_sizes))  # padded
            computed.append(name)
            continue
        same = all(need in made and made[need] is values[need] for need in needed_slots)
        if not same or STEP in compute.needs or not slot.axes.isdisjoint(ranges):
            del made[name]  # its value for all rows is wrong for a part
    known = {**dict.fromkeys(info.declaration.fields), **info.declaration.given(step), **values, **made}
    results = Results()
    with torch.no_grad():
        for name in computed:
            tail = info.tails.get(name)
            Computation.bind(name, info.declaration, known, made[name], results=results, tail=tail).run(None, step)
    return made


def _slice(name: str, slot: Slot, tensor: torch.Tensor, info: ViewInfo, ranges: Ranges) -> torch.Tensor:
    """Return the rows of a slot that belong to the ranges.

    A constant starts with its first row in every micro-batch.
    """
    first, last = ({**info.step.padded_sizes, **{axis: ends[end] for axis, ends in ranges.items()}} for end in (0, 1))
    for dim, size in enumerate(slot.shape):
        if size.axes.isdisjoint(ranges):
            continue
        if any(sum(axis in ranges for axis in axes) != 1 for axes, _ in size.terms):
            raise BatchError(f"slot {name!r}: rows of dim {dim}, {size}, are not one range of rows: compute it instead")
        start = size.at(first)
        tensor = tensor.narrow(dim, start if slot.writers else 0, size.at(last) - start)
    return tensor
