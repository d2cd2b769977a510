"""What a fill has ready for one live size: every view sliced, every group built, every fact expected."""

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import torch

from .axes import Sizes, Step
from .buffers import Box, Buffer, Buffers
from .capabilities import DEVICE, HOST
from .computation import Computation, PackedValue
from .compute import SETTINGS, STEP
from .declaration import Declaration
from .errors import BatchError, DeclarationError
from .lanes import WORD
from .packet import UNIT
from .plan import FUSED, ComputeStep, CopyGroup, FillPlan
from .tails import Number
from .views import Aliases, Views

_FOREACH_ZERO: Final = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage] - no public name
_SIZES: Final = frozenset({STEP, SETTINGS})
"""What a function needs that depends on nothing but sizes."""
WHOLE_TAIL: Final = 64 << 10
"""Bytes of a slot in a bucket up to which its whole tail is reset where some of it is dirty. What is to be reset then
depends on one live size, and not on the one before it too, which may be any."""


@attrs.frozen(eq=False)
class Targets:
    """Slots that are copied together, and where their live rows go; one alone is copied by a plain copy."""

    names: tuple[str, ...]
    views: list[torch.Tensor]


@attrs.define(eq=False)
class Ready:
    """All that one live size needs of a plan, sliced and grouped.

    always: tails to reset in each step. early, late: copies to do before the upload, and after it. marks: buffers whose
    tail is kept clean, and how far they are dirty after this fill. host, device: computed slots. packed: computed slots
    whose values ride in the upload, and `moved` those that are taken up by themselves. views: what the step sees, by
    slot; the fill's own tensors, of which `shown` gives aliases to steps and callers. exact: whether the step sees live
    rows only, so that tails are dirtied and none is reset. notes: what a runner keeps beside them.
    """

    plan: FillPlan
    step: Step
    always: list[tuple[torch.Tensor, Number]]
    early: list[Targets]
    late: list[Targets]
    marks: "list[Mark]"
    host: list[Computation]
    device: list[Computation]
    packed: list[PackedValue]
    moved: list[PackedValue]
    views: Views
    shown: Callable[[], Views]
    exact: bool
    notes: dict[str, Any] = attrs.field(factory=dict)

    @property
    def beside(self) -> bool:
        """Whether there is anything to do beside an upload."""
        return bool(self.always or self.early or self.late or self.marks or self.host)

    def compute_on_device(self, batch: Any = None) -> None:
        """Run what the device computes from slots: inside the graph, or right after an eager fill from `batch`."""
        if self.device:
            with torch.no_grad():
                for computation in self.device:
                    computation.run(batch)

    def reset(self, buffers: Buffers) -> None:
        """Reset tails that may be dirty, and note how far this fill dirties them.

        Once producers were given some of the memory, every tail of the bucket is reset: nobody tells what they write.
        """
        buffers.take_turn()
        if buffers.unmarked:
            if self.plan.lowering not in FUSED:
                buffers.distrust()
            else:  # a slot that is apart here may be a lane of another bucket's kernel
                for mark in self.marks:
                    mark.buffer.distrust()
        if self.exact:
            for mark in self.marks:
                mark.buffer.mark = tuple(map(max, mark.buffer.mark, mark.live))
        elif buffers.ledger.handed_out:
            self._reset([(mark, mark.tails) for mark in self.marks])
        else:
            self._reset([(mark, mark.settled()) for mark in self.marks if mark.buffer.mark != mark.live])
        buffers.ledger.stamp = buffers.mine = self

    def _reset(self, marked: "list[tuple[Mark, list[torch.Tensor]]]") -> None:
        """Write the values of some tails."""
        zeros = [tail for mark, tails in marked if mark.is_zero for tail in tails]
        if zeros:
            _FOREACH_ZERO(zeros)
        for mark, tails in marked:
            if not mark.is_zero:
                for tail in tails:
                    tail.fill_(mark.value)


@attrs.define(eq=False)
class Mark:
    """A buffer whose tail is kept clean: how far one live size reaches, and the tail's value.

    padded: how far the bucket reaches. small: whether its whole tail is reset where some of it is dirty.
    """

    buffer: Buffer
    live: tuple[int, ...]
    value: Number
    padded: tuple[int, ...]
    small: bool
    is_zero: bool = attrs.field(init=False)
    _tails: list[torch.Tensor] | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        """Look at the value once."""
        self.is_zero = _is_zero(self.value)

    @property
    def tails(self) -> list[torch.Tensor]:
        """The tail in the bucket, cut when it is first asked for."""
        if self._tails is None:
            self._tails = [self.buffer.box(box) for box in boxes(self.live, self.padded)]
        return self._tails

    def settled(self) -> list[torch.Tensor]:
        """What to reset, where rows are dirty up to the buffer's mark, which is this live size from now on."""
        dirty, self.buffer.mark = self.buffer.mark, self.live
        if not self.small or any(map(operator.gt, dirty, self.padded)):
            return [self.buffer.box(box) for box in boxes(self.live, dirty)]
        return self.tails if any(map(operator.gt, dirty, self.live)) else []


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
        self._plan = plan
        self._declaration = declaration
        self._buffers = buffers
        self._padded = dict(padded)
        self._exact = exact
        self._absent = frozenset(plan.absent)
        slots = declaration.slots
        self._computes = {name: compute for name, slot in slots.items() if (compute := slot.computes()) is not None}
        self._bucket_views = self._views(self._padded)
        self._bucket_shown = Aliases(self._bucket_views)
        uploads = plan.lowering in FUSED or plan.packed or plan.moved
        self._early = [group for group in plan.copies if not uploads or group.placement == HOST]
        self._late = [group for group in plan.copies if uploads and group.placement != HOST]
        self._padded_tails = {tail.slot: self._padded_tail(buffers[tail.slot]) for tail in plan.tails}
        self._asked = False

    def __call__(self, live: tuple[int, ...]) -> Ready:
        """Everything for these live sizes, one for each varying axis. BatchError where they exceed the bucket."""
        for axis, rows in zip(self._declaration.varying, live, strict=True):
            if rows > self._padded[axis]:
                message = f"the batch has {rows} rows on {axis}, more than the {self._padded[axis]} of this bucket"
                raise BatchError(message)
        step = self._declaration.step(live, self._padded, exact=self._exact)
        if not self._asked:
            self._ask(step)
        sizes, plan = step.live_sizes, self._plan
        views = self._views(sizes) if self._exact else self._bucket_views
        unit = WORD if plan.lowering in FUSED else UNIT
        moved = [c for c in plan.computed if c.slot in plan.moved]
        host = [c for c in plan.computed if c.on == HOST and not c.packed and c not in moved]
        return Ready(
            plan=plan,
            step=step,
            always=[] if self._exact else list(self._always(sizes)),
            early=self._copies(self._early, sizes),
            late=self._copies(self._late, sizes),
            marks=list(self._marks(sizes)),
            host=[self._computation(c, step, views) for c in host],
            device=[self._computation(c, step, views) for c in plan.computed if c.on == DEVICE],
            packed=[PackedValue.of(self._computation(c, step, views), unit) for c in plan.computed if c.packed],
            moved=[PackedValue.of(self._computation(c, step, views), unit) for c in moved],
            views=views,
            shown=Aliases(views) if self._exact else self._bucket_shown,
            exact=self._exact,
        )

    def _ask(self, step: Step) -> None:
        """Call each function of sizes alone once, before anything is written, in case it asks for an unknown size.

        Raises DeclarationError then. Any other error waits for the fill that needs the function's value.
        """
        for planned in self._plan.computed:
            compute = self._computes[planned.slot]
            if STEP in compute.needs and set(compute.needs) <= _SIZES and not compute.writes_out:
                given = self._declaration.given(step.of(planned.slot))
                try:
                    compute.function(**{need: given[need] for need in compute.needs})
                except DeclarationError:
                    raise
                except Exception:  # noqa: BLE001, S112 - see above
                    continue
        self._asked = True

    def _views(self, sizes: Sizes) -> Views:
        views: dict[str, torch.Tensor | None] = dict.fromkeys(self._declaration.disabled)
        for name in self._declaration.slots:
            views[name] = None if name in self._absent else self._buffers[name].view(sizes)
        return views

    def _copies(self, groups: list[CopyGroup], sizes: Sizes) -> list[Targets]:
        """Where copies go. What the host computed has every padded row."""
        padded = sizes if self._exact else self._padded
        together: list[Targets] = []
        alone: list[Targets] = []
        for group in groups:
            views = [self._buffers[n].view(padded if n in self._computes else sizes) for n in group.slots]
            if group.how == "single":
                alone += [Targets((name,), [view]) for name, view in zip(group.slots, views, strict=True)]
            elif group.how == "foreach" and together and self._plan.mixed:
                together[0] = Targets((*together[0].names, *group.slots), together[0].views + views)
            elif group.how == "foreach":
                together.append(Targets(group.slots, views))
        return together + alone

    def _always(self, sizes: Sizes) -> Iterator[tuple[torch.Tensor, Number]]:
        for tail in self._plan.tails:
            buffer = self._buffers[tail.slot]
            if tail.always and not tail.fused:
                for box in boxes(buffer.reach(sizes), buffer.reach(self._padded)):
                    yield buffer.box(box), tail.value

    def _marks(self, sizes: Sizes) -> Iterator[Mark]:
        for tail in self._plan.tails:
            if not tail.always and not tail.fused:
                buffer = self._buffers[tail.slot]
                yield Mark(buffer, buffer.reach(sizes), tail.value, *self._padded_tails[tail.slot])

    def _padded_tail(self, buffer: Buffer) -> tuple[tuple[int, ...], bool]:
        """How far a slot reaches in the bucket, and whether it is small."""
        return buffer.reach(self._padded), buffer.view(self._padded).nbytes <= WHOLE_TAIL

    def _computation(self, planned: ComputeStep, step: Step, views: Views) -> Computation:
        compute = self._computes[planned.slot]
        target = None if self._exact else self._bucket_views[planned.slot]
        target = self._buffers[planned.slot].view(step.padded_sizes) if target is None else target
        known = {**self._declaration.given(step), **views}
        return Computation.bind(planned.slot, compute, known, self._declaration.fields, target)
