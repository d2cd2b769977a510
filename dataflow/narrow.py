"""Micro-batches: the part of a view that belongs to a range of rows."""

from collections.abc import Mapping
from typing import Any, TypeVar

import attrs
import torch

from .axes import BATCH, TOKENS, Axis, Sizes, Step, extent
from .capabilities import DEVICE
from .computation import Computation
from .compute import STEP
from .errors import BatchError
from .graph import needs_of
from .slots import Constant, Slot
from .views import ViewInfo, Views, make_view

T = TypeVar("T")
Ranges = Mapping[Axis, tuple[int, int]]


def narrowed(view: T, declared: Mapping[str, Slot], info: ViewInfo | None, ranges: Ranges) -> T:
    """The micro-batch of a range of rows on some axes: see `Inputs.narrow`. BatchError where it cannot be cut.

    declared: the slots of the view's class, of which a runner may have switched some off, or carry them as fields.
    """
    if info is None:
        message = "only a view, which a fill handed out, can be narrowed: slice a batch of your own yourself"
        raise BatchError(message)
    for axis, (start, stop) in ranges.items():
        if axis not in info.step.padded_sizes:
            message = f"this view has no rows on {axis}, which no slot of {info.declaration.name} tells: narrow another"
            raise BatchError(message)
        if not 0 <= start <= stop <= info.step.padded(axis):
            message = f"rows {start} to {stop} do not lie within the {info.step.padded(axis)} rows of {axis}"
            raise BatchError(message)
        if axis in info.relations and not set(ranges) & info.relations[axis].axes:
            message = f"{axis} follows from {info.relations[axis]} here: narrow that axis, and {axis} goes with it"
            raise BatchError(message)
    every = {**_following(info, ranges), **ranges}
    for name in info.whole:
        if not declared[name].axes.isdisjoint(every):
            message = (
                f"slot {name!r} is a host parameter, and a replay hands all of it to each operator of its graph, so "
                "that none can be captured on a part of it: cut the batch instead, or have them read a device slot"
            )
            raise BatchError(message)
    if BATCH in every and TOKENS in info.declaration.axes and TOKENS not in every:
        message = "requests differ in length here: say which tokens these rows have, narrow(BATCH, a, b, tokens=(c, d))"
        raise BatchError(message)
    return _Cut(declared, info, every).apply(view)


def _following(info: ViewInfo, ranges: Ranges) -> dict[Axis, tuple[int, int]]:
    """The ranges on axes that follow from a cut one."""
    sizes = info.step.padded_sizes
    return {
        axis: (size.at({**sizes, cut: start}), size.at({**sizes, cut: stop}))
        for axis, size in info.relations.items()
        for cut, (start, stop) in ranges.items()
        if cut in size.axes
    }


@attrs.frozen
class _Cut:
    """Ranges on some axes of a view, and the micro-batch that they leave."""

    declared: Mapping[str, Slot]
    info: ViewInfo
    ranges: Ranges

    def apply(self, view: T) -> T:
        step, values = self._step(), view.__dict__
        order = [name for name in self.info.declaration.order if values.get(name) is not None]
        lost = {name for name in self.info.declaration.order if name not in values}
        fields = {name: values[name] for name in self.info.declaration.fields if name in values}
        tensors: dict[str, torch.Tensor | None] = {}
        for name in (name for name in self.declared if name not in lost):
            tensor, slot = values.get(name), self.declared[name]
            tensors[name] = tensor if tensor is None or name in order else self._slice(name, slot, tensor)
        for name in order:
            if not self.info.captured or self._is_on_device(name, tensors):
                tensors[name] = self._computed(name, {**values, **tensors}, step)
            elif not self._is_as_before(name, values, tensors):
                del tensors[name]
        return make_view(type(view), {**fields, **tensors}, {}, attrs.evolve(self.info, step=step))

    def _is_on_device(self, name: str, tensors: Views) -> bool:
        """Whether a computed slot follows from slots on the device, all of which the micro-batch has."""
        slots = self.info.declaration.slots
        has_all = all(need in tensors for need in needs_of(slots[name]) if need in slots)
        return has_all and self.info.declaration.side(name) == DEVICE

    def _is_as_before(self, name: str, values: Mapping[str, Any], tensors: Views) -> bool:
        """Whether what the host computed for all rows is as right for the micro-batch: nothing that it needs is cut."""
        slot, slots = self.declared[name], self.info.declaration.slots
        needs = needs_of(slot)
        same = all(need in tensors and tensors[need] is values[need] for need in needs if need in slots)
        return same and STEP not in needs and slot.axes.isdisjoint(self.ranges)

    def _step(self) -> Step:
        live, padded = dict(self.info.step.live_sizes), dict(self.info.step.padded_sizes)
        for axis, (start, stop) in self.ranges.items():
            live[axis] = min(max(live[axis] - start, 0), stop - start)
            padded[axis] = stop - start
        return Step(live, padded)

    def _slice(self, name: str, slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
        for dim, size in enumerate(slot.shape):
            if size.axes.isdisjoint(self.ranges):
                continue
            if any(sum(axis in self.ranges for axis in axes) != 1 for axes, _ in size.terms):
                message = f"slot {name!r}: dim {dim} is {size}, whose rows belong to no one range; compute it instead"
                raise BatchError(message)
            first, last = size.at(self._ends(0)), size.at(self._ends(1))
            tensor = tensor.narrow(dim, 0 if isinstance(slot, Constant) else first, last - first)
        return tensor

    def _ends(self, end: int) -> Sizes:
        return {**self.info.step.padded_sizes, **{axis: ends[end] for axis, ends in self.ranges.items()}}

    def _computed(self, name: str, values: Mapping[str, Any], step: Step) -> torch.Tensor:
        """A computed slot of the micro-batch, in memory of its own: its rows, its tail and all."""
        before: torch.Tensor = values[name]
        slot, declaration = self.declared[name], self.info.declaration
        compute = slot.computes()
        if compute is None:  # an order holds computed slots only; this tells the type checkers
            return before
        with torch.inference_mode(mode=False):
            target = torch.empty(extent(slot.shape, step.padded_sizes), dtype=before.dtype, device=before.device)
        known = {**dict.fromkeys(declaration.fields), **values, **declaration.given(step)}
        with torch.no_grad():
            Computation.bind(name, compute, known, {}, target).run(None)
        return target
