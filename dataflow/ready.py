"""What a fill has ready for one live size: every view sliced, every group built, every fact expected."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs
import torch

from .admission import Fact, Wanted
from .aliases import Aliases
from .axes import Sizes, extent
from .buffers import Box, Buffer, Buffers
from .capabilities import DEVICE, HOST, Placement
from .cargo import UNIT, Cargo
from .computation import Computation
from .compute import SETTINGS, STEP
from .copies import Groups, Singles, grouped
from .declaration import Declaration
from .errors import BatchError, DeclarationError
from .feed import Feeder
from .guard import Guard
from .lanes import WORD
from .packed import PackedValue
from .plan import ComputeStep, FillPlan
from .step import Step
from .tails import Number

Views = Mapping[str, torch.Tensor | None]
Reset = tuple[list[torch.Tensor], list[tuple[torch.Tensor, Number]]]
_SIZES: Final = frozenset({STEP, SETTINGS})
"""What a function needs that depends on nothing but sizes."""
WHOLE_TAIL: Final = 64 << 10
"""Bytes of a slot in a bucket up to which its whole tail is reset where some of it is dirty. What is to be reset then
depends on one live size, and not on the one before it too, which may be any."""


@attrs.define(eq=False)
class Ready:
    """All that one live size needs; the hot loop only walks through it.

    facts: dtype, place and shape expected of each source; the place is a device, or True for "on the CPU" where all
    buffers are, which is cheaper to ask. always: tails to reset in each step. groups: destinations of each foreach
    call, and which sources. singles: destinations of plain copies, likewise. marks: buffers whose tail is kept clean,
    and how far they are dirty after this fill. host, device: computed slots. views: what the step sees, by slot; the
    fill's own tensors, of which `shown` gives aliases to steps and callers.
    exact: whether the step sees live rows only, so that tails are dirtied and none is reset. packed: computed slots
    whose values ride in the upload. plain: whether nothing is left to do beside the upload. cargo: what is taken up
    before foreach copies, which then begin with its sources. guard: what tells sources like the last ones at one call.
    manifests: what uploads hold, the last one used first.
    notes: what a runner keeps beside them.
    """

    step: Step
    facts: list[Fact]
    always: list[tuple[torch.Tensor, Number]]
    groups: Groups
    singles: Singles
    marks: "list[Mark]"
    host: list[Computation]
    device: list[Computation]
    views: Views
    shown: Callable[[], Views]
    exact: bool
    packed: list[PackedValue] = attrs.field(factory=list)
    plain: bool = False
    cargo: Cargo | None = None
    guard: Guard | None = None
    manifests: list[Any] = attrs.field(factory=list)
    notes: dict[str, Any] = attrs.field(factory=dict)

    def reset_from_marks(self) -> Reset:
        """The tail work where buffers are dirty up to their marks: tensors to zero in one call, others with a value.

        A buffer's marks are brought to this live size.
        """
        zeros: list[torch.Tensor] = []
        others: list[tuple[torch.Tensor, Number]] = []
        for mark in self.marks:
            buffer, live = mark.buffer, mark.live
            if buffer.mark != live:
                tails = mark.tails_to(buffer.mark)
                buffer.mark = live
                if mark.is_zero:
                    zeros += tails
                else:
                    others += [(tail, mark.value) for tail in tails]
        return zeros, others


@attrs.define(eq=False)
class Mark:
    """A buffer whose tail is kept clean: how far one live size reaches, and the tail's value.

    whole: the padded reach, where a tail up to there is small.
    """

    buffer: Buffer
    live: tuple[int, ...]
    value: Number
    whole: tuple[int, ...] | None
    is_zero: bool = attrs.field(init=False)
    _whole_tails: list[torch.Tensor] | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        """Look at the value once."""
        self.is_zero = _is_zero(self.value)

    def tails_to(self, dirty: tuple[int, ...]) -> list[torch.Tensor]:
        """What to reset where rows are dirty up to there."""
        buffer, live, whole = self.buffer, self.live, self.whole
        if whole is None or any(map(operator.gt, dirty, whole)):
            return [buffer.box(box) for box in boxes(live, dirty)]
        if not any(map(operator.gt, dirty, live)):
            return []
        if self._whole_tails is None:
            self._whole_tails = [buffer.box(box) for box in boxes(live, whole)]
        return self._whole_tails


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
    """Makes `Ready` for any live size of one plan; exact fills see live rows only, padded ones the whole bucket.

    feeder: what gives the packet, where the plan has use for one.
    """

    def __init__(
        self,
        plan: FillPlan,
        declaration: Declaration,
        buffers: Buffers,
        padded: Sizes,
        *,
        exact: bool,
        feeder: Feeder | None = None,
    ) -> None:
        self.plan = plan
        self.declaration = declaration
        self.buffers = buffers
        self.padded = dict(padded)
        self.exact = exact
        self.feeder = feeder
        self.where = "is_cpu" if all(buffer.tensor.is_cpu for buffer in buffers) else DEVICE
        self._absent = frozenset(plan.absent)
        slots = declaration.slots
        self._computes = {name: compute for name, slot in slots.items() if (compute := slot.computes()) is not None}
        planned = [(n, group) for group in plan.copies for n in group.slots if n not in self._computes]
        self.wanted = [Wanted(n, slots[n], group.dst_dtype, buffers[n].tensor.device) for n, group in planned]
        self.source_dtypes = [group.src_dtype for _, group in planned]
        self._from_host = frozenset(name for name in (*plan.packed, *plan.moved) if name in self._computes)
        self._bucket_views = self._views(self.padded)
        self._asked = False
        self._bucket_shown = Aliases(self._bucket_views)

    def __call__(self, live: tuple[int, ...]) -> Ready:
        """Everything for these live sizes, one for each varying axis. BatchError where they exceed the bucket."""
        for axis, rows in zip(self.declaration.varying, live, strict=True):
            if rows > self.padded[axis]:
                message = f"the batch has {rows} rows on {axis}, more than the {self.padded[axis]} of this bucket"
                raise BatchError(message)
        step = self.declaration.step(live, self.padded, exact=self.exact)
        if not self._asked:
            self._ask(step)
        sizes = step.live_sizes
        views = self._views(sizes) if self.exact else self._bucket_views
        carries = bool(self.plan.packed or self.plan.moved)
        groups, singles = self._destinations(sizes, DEVICE if carries else None)
        always = [] if self.exact else list(self._always(sizes))
        marks = list(self._marks(sizes))
        apart = [c for c in self.plan.computed if c.on == HOST and not c.packed and c.slot not in self._from_host]
        host = [self._computation(c, step, views) for c in apart]
        facts = [self._fact(w.name, dtype, sizes) for w, dtype in zip(self.wanted, self.source_dtypes, strict=True)]
        return Ready(
            step=step,
            facts=facts,
            always=always,
            groups=groups,
            singles=singles,
            marks=marks,
            exact=self.exact,
            host=host,
            device=[self._computation(c, step, views) for c in self.plan.computed if c.on == DEVICE],
            views=views,
            shown=Aliases(views) if self.exact else self._bucket_shown,
            packed=[] if carries else [self._value(c, step, views) for c in self.plan.computed if c.packed],
            plain=not (always or groups or singles or marks or host),
            cargo=self._cargo(sizes, step, views, facts, host) if carries else None,
        )

    def _ask(self, step: Step) -> None:
        """Call each function of sizes alone once, before anything is written, in case it asks for an unknown size.

        Raises DeclarationError then. Any other error waits for the fill that needs the function's value.
        """
        for planned in self.plan.computed:
            compute = self._computes[planned.slot]
            if STEP in compute.needs and set(compute.needs) <= _SIZES and not compute.writes_out:
                given = self.declaration.given(step.of(planned.slot))
                try:
                    compute.function(**{need: given[need] for need in compute.needs})
                except DeclarationError:
                    raise
                except Exception:  # noqa: BLE001, S112 - see above
                    continue
        self._asked = True

    def _cargo(self, sizes: Sizes, step: Step, views: Views, facts: list[Fact], host: list[Computation]) -> Cargo:
        if self.feeder is None:
            message = "this plan takes host data out of a packet, and there is none: give the bucket a feeder"
            raise ValueError(message)
        values = [self._value(c, step, views, UNIT) for c in self.plan.computed if c.slot in self._from_host]
        early = self._destinations(sizes, HOST)
        return Cargo(self.plan, self.wanted, facts, values, self.buffers, self.feeder, early=early, host=host)

    def _views(self, sizes: Sizes) -> Views:
        views: dict[str, torch.Tensor | None] = dict.fromkeys(self.declaration.disabled)
        for name in self.declaration.slots:
            views[name] = None if name in self._absent else self.buffers[name].view(sizes)
        return views

    def _fact(self, name: str, dtype: torch.dtype, sizes: Sizes) -> Fact:
        buffer = self.buffers[name]
        where = buffer.tensor.device if self.where == DEVICE else True
        return (dtype, where, extent(buffer.slot.shape, sizes))

    def _destinations(self, sizes: Sizes, placement: Placement | None = None) -> tuple[Groups, Singles]:
        """Where copies go; those to one placement alone, where it is said. What is computed has every padded row."""
        padded = sizes if self.exact else self.padded
        parts = []
        for group in self.plan.copies:
            how = group.how if placement in (None, group.placement) else ""
            views = [self.buffers[n].view(padded if n in self._computes else sizes) for n in group.slots]
            parts.append((how, views))
        return grouped(parts, mixed=self.plan.mixed)

    def _always(self, sizes: Sizes) -> Iterator[tuple[torch.Tensor, Number]]:
        for tail in self.plan.tails:
            buffer = self.buffers[tail.slot]
            if tail.always and not tail.fused:
                for box in boxes(buffer.reach(sizes), buffer.reach(self.padded)):
                    yield buffer.box(box), tail.value

    def _marks(self, sizes: Sizes) -> Iterator[Mark]:
        for tail in self.plan.tails:
            if not tail.always and not tail.fused:
                buffer = self.buffers[tail.slot]
                whole = buffer.reach(self.padded) if buffer.view(self.padded).nbytes <= WHOLE_TAIL else None
                yield Mark(buffer, buffer.reach(sizes), tail.value, whole)

    def _computation(self, planned: ComputeStep, step: Step, views: Views) -> Computation:
        compute = self._computes[planned.slot]
        target = self.buffers[planned.slot].view(step.padded_sizes)
        known = {**self.declaration.given(step), **views}
        return Computation.bind(planned.slot, compute, known, self.declaration.fields, target)

    def _value(self, planned: ComputeStep, step: Step, views: Views, unit: int = WORD) -> PackedValue:
        return PackedValue.of(self._computation(planned, step, views), unit)
