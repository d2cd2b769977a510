"""What a fill has ready for one live size: every view sliced, every group built, every fact expected."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import torch

from .axes import Sizes, extent
from .buffers import Box, Buffer, Buffers
from .caches import keep_newest
from .capabilities import DEVICE, HOST
from .computation import Computation
from .compute import SETTINGS, STEP
from .declaration import Declaration
from .errors import BatchError
from .guard import Guard
from .packed import PackedValue
from .plan import ComputeStep, FillPlan
from .step import Step
from .tails import Number

Fact = tuple[torch.dtype, torch.device | bool, tuple[int, ...]]
Views = Mapping[str, torch.Tensor | None]
Reset = tuple[list[torch.Tensor], list[tuple[torch.Tensor, Number]]]
KEPT_RESETS: Final = 64
"""Transitions from other live sizes that one live size remembers."""


@attrs.define(eq=False)
class Ready:
    """All that one live size needs; the hot loop only walks through it.

    facts: dtype, place and shape expected of each source; the place is a device, or True for "on the CPU" where all
    buffers are, which is cheaper to ask. always: tails to reset in each step. groups: destinations of each foreach
    call, and which sources. singles: destinations of plain copies, likewise. marks: buffers whose tail is kept clean,
    and how far they are dirty after this fill. host, device: computed slots. views: what the step sees, by slot.
    exact: whether the step sees live rows only, so that tails are dirtied and none is reset. packed: computed slots
    whose values ride in the upload. plain: whether nothing is left to do beside the upload. guard: what tells sources
    like the last ones at one call. manifests: what uploads hold, the last one used first.
    notes: what a runner keeps beside them. resets: tail work by the marks it was found at.
    """

    step: Step
    facts: list[Fact]
    always: list[tuple[torch.Tensor, Number]]
    groups: list[tuple[list[torch.Tensor], int, int]]
    singles: list[tuple[torch.Tensor, int]]
    marks: list[tuple[Buffer, tuple[int, ...], Number]]
    host: list[Computation]
    device: list[Computation]
    views: Views
    exact: bool
    packed: list[PackedValue] = attrs.field(factory=list)
    plain: bool = False
    guard: Guard | None = None
    manifests: list[Any] = attrs.field(factory=list)
    notes: dict[str, Any] = attrs.field(factory=dict)
    resets: dict[tuple[tuple[int, ...], ...], Reset] = attrs.field(factory=dict)

    def reset_from(self, marks: tuple[tuple[int, ...], ...]) -> Reset:
        """The tail work where buffers are dirty up to `marks`: tensors to zero in one call, and others with a value."""
        known = self.resets.get(marks)
        if known is None:
            work = [
                (buffer.box(box), value)
                for (buffer, live, value), mark in zip(self.marks, marks, strict=True)
                for box in boxes(live, mark)
            ]
            zeros = [tail for tail, value in work if _is_zero(value)]
            known = (zeros, [(tail, value) for tail, value in work if not _is_zero(value)])
            keep_newest(self.resets, KEPT_RESETS)[marks] = known
        return known


def _is_zero(value: Number) -> bool:
    """Whether all bits are zero: -0.0 equals 0 but is another number."""
    return value == 0 and math.copysign(1.0, value) > 0


def boxes(live: tuple[int, ...], reach: tuple[int, ...]) -> Iterator[Box]:
    """The rows within `reach` that are not within `live`, as boxes that do not overlap."""
    for dim, (start, stop) in enumerate(zip(live, reach, strict=True)):
        if start < stop:
            before = tuple((0, min(a, b)) for a, b in zip(live[:dim], reach[:dim], strict=True))
            yield (*before, (start, stop), *((0, size) for size in reach[dim + 1 :]))


class Preparer:
    """Makes `Ready` for any live size of one plan; exact fills see live rows only, padded ones the whole bucket."""

    def __init__(
        self, plan: FillPlan, declaration: Declaration, buffers: Buffers, padded: Sizes, *, exact: bool
    ) -> None:
        self.plan = plan
        self.declaration = declaration
        self.buffers = buffers
        self.padded = dict(padded)
        self.exact = exact
        self.where = "is_cpu" if all(buffer.tensor.is_cpu for buffer in buffers) else DEVICE
        self._absent = frozenset(plan.absent)
        slots = declaration.slots.items()
        self._computes = {name: compute for name, slot in slots if (compute := slot.computes()) is not None}
        self._bucket_views = self._views(self.padded)

    def __call__(self, live: tuple[int, ...]) -> Ready:
        """Everything for these live sizes, one for each varying axis. BatchError where they exceed the bucket."""
        for axis, rows in zip(self.declaration.varying, live, strict=True):
            if rows > self.padded[axis]:
                message = f"the batch has {rows} rows on {axis}, more than the {self.padded[axis]} of this bucket"
                raise BatchError(message)
        sizes = {**self.padded, **dict(zip(self.declaration.varying, live, strict=True))}
        step = Step(sizes, sizes if self.exact else self.padded)
        views = self._views(sizes) if self.exact else self._bucket_views
        groups, singles = self._destinations(sizes)
        always = [] if self.exact else list(self._always(sizes))
        marks = list(self._marks(sizes))
        host = [self._computation(c, step, views) for c in self.plan.computed if c.on == HOST and not c.packed]
        return Ready(
            step=step,
            facts=[self._fact(name, dtype, sizes) for name, dtype in self._copied()],
            always=always,
            groups=groups,
            singles=singles,
            marks=marks,
            exact=self.exact,
            host=host,
            device=[self._computation(c, step, views) for c in self.plan.computed if c.on == DEVICE],
            views=views,
            packed=[PackedValue.of(self._computation(c, step, views)) for c in self.plan.computed if c.packed],
            plain=not (always or groups or singles or marks or host),
        )

    def _views(self, sizes: Sizes) -> Views:
        views: dict[str, torch.Tensor | None] = dict.fromkeys(self.declaration.disabled)
        for name in self.declaration.slots:
            views[name] = None if name in self._absent else self.buffers[name].view(sizes)
        return views

    def _copied(self) -> Iterator[tuple[str, torch.dtype]]:
        return ((name, group.src_dtype) for group in self.plan.copies for name in group.slots)

    def _fact(self, name: str, dtype: torch.dtype, sizes: Sizes) -> Fact:
        buffer = self.buffers[name]
        where = buffer.tensor.device if self.where == DEVICE else True
        return (dtype, where, extent(buffer.slot.shape, sizes))

    def _destinations(
        self, sizes: Sizes
    ) -> tuple[list[tuple[list[torch.Tensor], int, int]], list[tuple[torch.Tensor, int]]]:
        groups: list[tuple[list[torch.Tensor], int, int]] = []
        singles: list[tuple[torch.Tensor, int]] = []
        start = 0
        for group in self.plan.copies:
            views = [self.buffers[name].view(sizes) for name in group.slots]
            if group.how == "single":
                singles += [(view, start + i) for i, view in enumerate(views)]
            elif group.how != "foreach":
                pass
            elif groups and self.plan.mixed:
                groups[0][0].extend(views)
                groups[0] = (groups[0][0], 0, start + len(views))
            else:
                groups.append((views, start, start + len(views)))
            start += len(views)
        lone = [(views[0], at) for views, at, _ in groups if len(views) == 1]
        return [group for group in groups if len(group[0]) > 1], singles + lone

    def _always(self, sizes: Sizes) -> Iterator[tuple[torch.Tensor, Number]]:
        for tail in self.plan.tails:
            buffer = self.buffers[tail.slot]
            if tail.always and not tail.fused:
                for box in boxes(buffer.reach(sizes), buffer.reach(self.padded)):
                    yield buffer.box(box), tail.value

    def _marks(self, sizes: Sizes) -> Iterator[tuple[Buffer, tuple[int, ...], Number]]:
        for tail in self.plan.tails:
            if not tail.always and not tail.fused:
                buffer = self.buffers[tail.slot]
                yield buffer, buffer.reach(sizes), tail.value

    def _computation(self, planned: ComputeStep, step: Step, views: Views) -> Computation:
        compute = self._computes[planned.slot]
        target = self.buffers[planned.slot].view(step.padded_sizes)
        known = {STEP: step, SETTINGS: self.declaration.settings, **views}
        return Computation.bind(planned.slot, compute, known, self.declaration.fields, target)
