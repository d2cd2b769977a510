"""What a fill has ready for one live size: every view sliced, every group built, every tail known."""

import functools
import math
import operator
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs
import torch

from .admission import Kind
from .axes import Sizes, Step
from .buffers import Box, Buffer, Buffers
from .capabilities import DEVICE, HOST, Capabilities
from .computation import Computation, PackedValue
from .declaration import Declaration
from .errors import BatchError, DeclarationError
from .packet import UNIT, WORD, Lane, head_bytes, meta, rounded
from .plan import FUSED, LARGE_BYTES, NONE, ComputeStep, CopyGroup, FillPlan, TailReset, slot_bytes
from .slots import Slot
from .sources import SETTINGS, STEP
from .tails import Number
from .views import Aliases, Views

_FOREACH_ZERO: Final = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage] - no public name
_SIZES: Final = frozenset({STEP, SETTINGS})
"""What a function needs that depends on nothing but sizes."""
WHOLE_TAIL: Final = 64 << 10
"""Bytes of a slot in a bucket up to which its whole tail is reset where some of it is dirty. What is to be reset then
depends on one live size, and not on the one before it too, which may be any."""

Targets = Mapping[str, torch.Tensor]
"""Slots that are copied together, and where their live rows go; one alone is copied by a plain copy."""


ByValue = tuple[list[torch.Tensor], list[tuple[torch.Tensor, Number]]]
"""Tails that are zeroed together, and others with the number of each."""


@attrs.define(eq=False, slots=False)
class Ready:
    """All that one live size needs of a plan, sliced and grouped.

    always: tails to reset in each step. early, late: copies to do before the upload, and after it. marks: buffers whose
    tail is kept clean. host, device: computed slots. packed: computed slots whose values ride in the upload, and
    `moved` those that are taken up by themselves. views: what the step sees, by slot; the fill's own tensors, of which
    `shown` gives aliases to steps and callers. exact: whether the step sees live rows only, so that tails are dirtied
    and none is reset. live: its sizes. plan: the plan that it is of, where the whole tails of its marks are small.
    notes: what a runner keeps beside them.
    """

    fused: bool
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
    live: tuple[int, ...]
    plan: object | None
    notes: dict[str, Any] = attrs.field(factory=dict)

    def compute_on_device(self, batch: Any = None) -> None:
        """Run what the device computes from slots: inside the graph, or right after an eager fill from `batch`."""
        if self.device:
            with torch.no_grad():
                for computation in self.device:
                    computation.run(batch)

    def reset(self, buffers: Buffers) -> None:
        """Reset tails that may be dirty, and note how far this fill dirties them.

        Once producers were given some of the memory, every tail of the bucket is reset: nobody tells what they write.
        Where another size of the same plan came last, what is dirty depends on both sizes alone.
        """
        last, ledger = buffers.mine, buffers.ledger
        is_known = last is ledger.stamp and not (buffers.unmarked or ledger.handed_out)
        if is_known and isinstance(last, Ready) and last.plan is self.plan is not None:
            if any(map(operator.gt, last.live, self.live)):
                _clean(self._whole)
            for mark in self.marks:
                mark.buffer.mark = mark.live
        else:
            self._reset_each(buffers)
        ledger.stamp = buffers.mine = self

    def _reset_each(self, buffers: Buffers) -> None:
        if buffers.ledger.stamp is not buffers.mine or (buffers.unmarked and not self.fused):
            buffers.distrust()  # someone else's fill came between, to the same memory, or a kernel's
        elif buffers.unmarked:  # a slot that is apart here may be a lane of another bucket's kernel
            for mark in self.marks:
                mark.buffer.distrust()
        if self.exact:
            for mark in self.marks:
                mark.buffer.mark = tuple(map(max, mark.buffer.mark, mark.live))
            dirty = []
        elif buffers.ledger.handed_out:
            dirty = [(mark, mark.tails) for mark in self.marks]
        else:
            dirty = [(mark, mark.settled()) for mark in self.marks if mark.buffer.mark != mark.live]
        _clean(_by_value(dirty))

    @functools.cached_property
    def _whole(self) -> "ByValue":
        return _by_value([(mark, mark.tails) for mark in self.marks])


def _by_value(dirty: "list[tuple[Mark, list[torch.Tensor]]]") -> ByValue:
    zeros = [tail for mark, tails in dirty if mark.is_zero for tail in tails]
    return zeros, [(tail, mark.value) for mark, tails in dirty if not mark.is_zero for tail in tails]


def _clean(tails: ByValue) -> None:
    zeros, others = tails
    if zeros:
        _FOREACH_ZERO(zeros)
    for tail, number in others:
        tail.fill_(number)


@attrs.define(eq=False, slots=False)
class Mark:
    """A buffer whose tail is kept clean: how far one live size reaches, and the tail's value.

    padded: how far the bucket reaches. small: whether its whole tail is reset where some of it is dirty. is_zero:
    whether all bits of the value are zero: -0.0 equals 0 but is another number.
    """

    buffer: Buffer
    live: tuple[int, ...]
    value: Number
    padded: tuple[int, ...]
    small: bool
    is_zero: bool

    @functools.cached_property
    def tails(self) -> list[torch.Tensor]:
        """The tail in the bucket."""
        return [self.buffer.box(box) for box in boxes(self.live, self.padded)]

    def settled(self) -> list[torch.Tensor]:
        """What to reset, where rows are dirty up to the buffer's mark, which is this live size from now on."""
        dirty, self.buffer.mark = self.buffer.mark, self.live
        if not self.small or any(map(operator.gt, dirty, self.padded)):
            return [self.buffer.box(box) for box in boxes(self.live, dirty)]
        return self.tails if any(map(operator.gt, dirty, self.live)) else []


def boxes(live: tuple[int, ...], reach: tuple[int, ...]) -> Iterator[Box]:
    """The rows within `reach` that are not within `live`, as boxes that do not overlap."""
    for dim, (start, stop) in enumerate(zip(live, reach, strict=True)):
        if start < stop:
            before = tuple((0, min(a, b)) for a, b in zip(live[:dim], reach[:dim], strict=True))
            yield (*before, (start, stop), *((0, size) for size in reach[dim + 1 :]))


@attrs.frozen(eq=False)
class Lanes:
    """What one kernel writes: the lanes of a plan, in the order of `plan.fused`. owner: the number of their table."""

    lanes: tuple[Lane, ...]
    slots: tuple[Slot, ...]
    owner: int

    @classmethod
    def of(cls, plan: FillPlan, declaration: Declaration, buffers: Buffers, owner: int = 0) -> "Lanes":
        """The lanes of a plan over the buffers of its slots."""
        padded = {axis: size for axis in declaration.axes for name, size in plan.sizes if axis.name == name}
        pads = {tail.slot: tail.value for tail in plan.tails}
        slots = tuple(declaration.slots[name] for name in plan.fused)
        lanes = [
            Lane.of(name, buffers[name].view(padded), slot.varying, pads.get(name))
            for name, slot in zip(plan.fused, slots, strict=True)
        ]
        return cls(tuple(lanes), slots, owner)

    @property
    def most(self) -> int:
        """Bytes that a packet for them may have: their words, and all slots but large ones as host data."""
        return head_bytes(len(self.lanes)) + sum(body for body in self._bodies.values() if body <= LARGE_BYTES)

    @property
    def carried(self) -> frozenset[str]:
        """Slots whose host data a packet has room for."""
        return frozenset(name for name, body in self._bodies.items() if body <= LARGE_BYTES)

    @property
    def _bodies(self) -> dict[str, int]:
        """Bytes of each lane's padded rows, in the widest dtype that its sources may have."""
        pairs = [(one, (one.target.dtype, *slot.converts_from())) for one, slot in self._pairs]
        return {one.slot: rounded(one.outer * one.row * max(d.itemsize for d in dtypes)) for one, dtypes in pairs}

    @property
    def _pairs(self) -> Iterator[tuple[Lane, Slot]]:
        return zip(self.lanes, self.slots, strict=True)

    def words(self, kinds: Mapping[str, Kind], values: frozenset[str], live: Sizes) -> bytes:
        """A packet's words but for the addresses. values: slots that the host computes, of which every row is live."""
        metas, paces = [], []
        for lane, slot in self._pairs:
            kind, whole = kinds.get(lane.slot), lane.slot in values or not slot.varying
            rows = lane.row if whole else slot.shape[slot.varying[0]].at(live) * lane.inner
            metas.append(meta(rows, lane.target.dtype if kind is None else kind.dtype, lane.target.dtype))
            paces.append(rows if kind is None or kind.pace is None else kind.pace)
        return struct.pack(f"<{1 + 2 * len(metas)}q", self.owner, *metas, *paces)


def most_for_copies(declaration: Declaration, sizes: Sizes, capabilities: Capabilities) -> int:
    """Bytes that a packet for copies may have in a bucket: every slot on the device but large ones."""
    slots = [slot for slot in declaration.slots.values() if slot.placement == DEVICE]
    bodies = [slot_bytes(slot, sizes, capabilities) for slot in slots]
    return UNIT + sum(rounded(body, UNIT) for body in bodies if body < LARGE_BYTES)


class Planned:
    """One plan of a bucket, over its buffers; makes `Ready` for any live size.

    padded: the bucket's sizes. exact: whether the step sees live rows only. lanes: what the kernel writes by the plan,
    `fused` the slots that these are for. carried: slots whose host data a packet has room for.
    """

    def __init__(
        self,
        plan: FillPlan,
        declaration: Declaration,
        buffers: Buffers,
        padded: Sizes,
        *,
        exact: bool,
        lanes: Lanes | None = None,
        carried: frozenset[str] = NONE,
    ) -> None:
        self.plan = plan
        self.lanes = lanes
        self.carried = carried if lanes is None else lanes.carried
        self.fused = NONE if lanes is None else frozenset(plan.fused)
        self._declaration = declaration
        self._buffers = buffers
        self._padded = padded
        self._exact = exact
        slots = declaration.slots
        self._computes = {name: compute for name, slot in slots.items() if (compute := slot.computes()) is not None}
        self._bucket_views = self._views(padded)
        self._bucket_shown = Aliases(self._bucket_views)
        self._asked = False

    def ready(self, live: tuple[int, ...]) -> Ready:
        """Everything for these live sizes, one for each varying axis. BatchError where they exceed the bucket."""
        for axis, rows in zip(self._declaration.varying, live, strict=True):
            if rows > self._padded[axis]:
                raise BatchError(
                    f"the batch has {rows} rows on {axis}, more than the {self._padded[axis]} of this bucket"
                )
        step = self._declaration.step(live, self._padded, exact=self._exact)
        if not self._asked:
            self._ask(step)
        sizes, plan = step.live_sizes, self.plan
        is_fused, views = plan.lowering in FUSED, self._views(sizes) if self._exact else self._bucket_views
        uploads, unit = is_fused or plan.packed or plan.moved, WORD if is_fused else UNIT
        early = [group for group in plan.copies if not uploads or group.placement == HOST]
        late = [group for group in plan.copies if uploads and group.placement != HOST]

        def bound(wanted: Callable[[ComputeStep], bool]) -> list[Computation]:
            return [self._computation(one, step, views) for one in plan.computed if wanted(one)]

        marks = [self._mark(tail, sizes) for tail in plan.tails if not (tail.always or tail.fused)]
        return Ready(
            fused=is_fused,
            step=step,
            live=live,
            plan=None if self._exact or not all(mark.small for mark in marks) else plan,
            always=[] if self._exact else [*self._always(sizes)],
            early=self._copies(early, sizes),
            late=self._copies(late, sizes),
            marks=marks,
            host=bound(lambda one: one.on == HOST and not one.packed and one.slot not in plan.moved),
            device=bound(lambda one: one.on == DEVICE),
            packed=[PackedValue.of(one, unit) for one in bound(lambda one: one.packed)],
            moved=[PackedValue.of(one, unit) for one in bound(lambda one: one.slot in plan.moved)],
            views=views,
            shown=Aliases(views) if self._exact else self._bucket_shown,
            exact=self._exact,
        )

    def _ask(self, step: Step) -> None:
        """Call each function of sizes alone once, before anything is written, in case it asks for an unknown size.

        Raises DeclarationError then. Any other error waits for the fill that needs the function's value.
        """
        for planned in self.plan.computed:
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
        names, absent = self._declaration.slots, self.plan.absent
        views = {name: None if name in absent else self._buffers[name].view(sizes) for name in names}
        return {**dict.fromkeys(self._declaration.disabled), **views}

    def _copies(self, groups: list[CopyGroup], sizes: Sizes) -> list[Targets]:
        """Where copies go. What the host computed has every padded row."""
        padded = sizes if self._exact else self._padded
        together: list[dict[str, torch.Tensor]] = []
        alone: list[Targets] = []
        for group in groups:
            views = {n: self._buffers[n].view(padded if n in self._computes else sizes) for n in group.slots}
            if group.how == "single":
                alone += [{name: view} for name, view in views.items()]
            elif group.how == "foreach" and together and self.plan.mixed:
                together[0].update(views)
            elif group.how == "foreach":
                together.append(views)
        return [*together, *alone]

    def _always(self, sizes: Sizes) -> Iterator[tuple[torch.Tensor, Number]]:
        for tail in self.plan.tails:
            buffer = self._buffers[tail.slot]
            if tail.always and not tail.fused:
                for box in boxes(buffer.reach(sizes), buffer.reach(self._padded)):
                    yield buffer.box(box), tail.value

    def _mark(self, tail: TailReset, sizes: Sizes) -> Mark:
        buffer, whole = self._buffers[tail.slot], self._bucket_views[tail.slot]
        small = whole is not None and whole.nbytes <= WHOLE_TAIL
        is_zero = tail.value == 0 and math.copysign(1.0, tail.value) > 0
        return Mark(buffer, buffer.reach(sizes), tail.value, buffer.reach(self._padded), small, is_zero)

    def _computation(self, planned: ComputeStep, step: Step, views: Views) -> Computation:
        target = self._buffers[planned.slot].view(step.padded_sizes)
        known = {**self._declaration.given(step), **views}
        return Computation.bind(planned.slot, self._computes[planned.slot], known, self._declaration.fields, target)
