"""What a fill has ready for one live size: every view sliced, every group built, every tail known."""

import functools
import math
import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from .admission import Kind
from .axes import BATCH, Dim, Live, Sizes, Step
from .buffers import Box, Buffers, Ledger
from .capabilities import DEVICE, HOST, Placement
from .computation import Computation, PackedValue
from .declaration import Declaration
from .errors import BatchError, DeclarationError, blame
from .packet import Lane, head_bytes, meta, table_of
from .plan import FUSED, ComputeStep, CopyGroup, FillPlan
from .slots import Slot
from .sources import SETTINGS, STEP
from .tails import Number
from .transition import Transition, rows_of_requests
from .views import Aliases, Views

_FOREACH_ZERO: Final = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage] - no public name
_SIZES: Final = frozenset({STEP, SETTINGS})  # what a function needs that depends on nothing but sizes

Targets = Mapping[str, torch.Tensor]
"""Slots that are copied together, and where their live rows go; one alone is copied by a plain copy."""
TailRows = list[tuple[torch.Tensor, Number]]
"""Padded rows, and what they must hold."""


@attrs.define(eq=False, slots=False)
class Ready:
    """All that one live size needs of a plan, sliced and grouped.

    live: rows on each varying axis. always: tails to reset in each step. early, late: copies before the upload, and
    after it. packed: computed slots whose values ride in the upload. views: what the step sees, the fill's own tensors,
    of which `shown` gives aliases to steps and callers. notes: what a runner keeps beside them.
    """

    planned: "Planned"
    step: Step
    live: Live
    always: TailRows
    early: list[Targets]
    late: list[Targets]
    host: list[Computation]
    device: list[Computation]
    packed: list[PackedValue]
    views: Views
    shown: Callable[[], Views]
    notes: dict[str, Any] = attrs.field(factory=dict)

    def compute_on_device(self, batch: Any = None) -> None:
        """Run what the device computes from slots: inside the graph, or right after an eager fill from `batch`."""
        if self.device:
            with torch.no_grad():
                for computation in self.device:
                    computation.run(batch)

    def reset(self, ledger: Ledger) -> None:
        """Reset the tails that may be dirty: none where the same plan filled the memory last, with no more rows."""
        last, now = ledger.stamp, self.live
        clean = isinstance(last, Ready) and last.planned is self.planned and not any(map(operator.gt, last.live, now))
        if clean and not ledger.handed_out:
            return
        zeros, others = self._tails
        if zeros:
            _FOREACH_ZERO(zeros)
        for tail, number in others:
            tail.fill_(number)

    @functools.cached_property
    def _tails(self) -> tuple[list[torch.Tensor], TailRows]:
        """Tails that are zeroed together, and others; -0.0 equals 0 but is another number."""
        rows, zeros, others = self.planned.tails(self.step.live_sizes, always=False), list[torch.Tensor](), TailRows()
        for tail, number in rows:
            if number == 0 and math.copysign(1.0, number) > 0:
                zeros.append(tail)
            else:
                others.append((tail, number))
        return zeros, others


def boxes(live: Live, reach: Live) -> Iterator[Box]:
    """The rows within `reach` that are not within `live`, as boxes that do not overlap."""
    for dim, (start, stop) in enumerate(zip(live, reach, strict=True)):
        if start < stop:
            yield (*((0, size) for size in live[:dim]), (start, stop), *((0, size) for size in reach[dim + 1 :]))


class Planned:
    """One plan of a bucket, over its buffers; makes `Ready` for any live size.

    padded: the bucket's sizes. exact: whether the step sees live rows only. partial: whether lanes for which nothing is
    brought are left alone. owner: the number of the kernel's table. lanes: what the kernel writes, in the order of
    `plan.fused`. uploads: whether each fill sends a packet.
    """

    def __init__(
        self,
        plan: FillPlan,
        declaration: Declaration,
        buffers: Buffers,
        padded: Sizes,
        *,
        exact: bool,
        partial: bool = False,
        owner: int = 0,
    ) -> None:
        self.plan, self.owner, self.fused = plan, owner, frozenset(plan.fused)
        self.uploads = plan.lowering in FUSED or bool(plan.packed)
        self.has_tails = not exact and any(not (tail.always or tail.fused) for tail in plan.tails)
        self._declaration, self.buffers, self._padded, self.exact = declaration, buffers, padded, exact
        self._partial = partial
        slots, pads = declaration.slots, {tail.slot: tail.value for tail in plan.tails}
        self._bucket_views = self._views(padded)
        self.lanes = tuple([self._lane(name, slots[name], pads.get(name)) for name in plan.fused])
        self._bucket_shown = Aliases(self._bucket_views)
        self._asked = False

    def _lane(self, name: str, slot: Slot, pad: Number | None) -> Lane:
        """One slot's way through the kernel, and what it advances to there."""
        lane = Lane.of(name, self.buffers[name].view(self._padded), slot.varying, pad)
        requests = self._padded.get(BATCH)
        source, add = self.transitions[DEVICE].sources.get(name, (None, 0))
        view = None if source is None else source.view(self._padded)
        each = lane.row // requests if requests and rows_of_requests(slot, self._padded) else 0
        size = slot.shape[slot.varying[0]] if slot.varying else Dim.of(1)
        return attrs.evolve(lane, source=view, add=add, each=each, count=self._declaration.counted.index(size))

    @functools.cached_property
    def transitions(self) -> Mapping[Placement, Transition]:
        """The rules of slots on the device, and of those on the host."""
        slots, over = self._declaration.slots, (self._declaration, self.buffers, self._bucket_views, self._padded)
        written = {tail.slot: tail.value for tail in self.plan.tails if tail.always}
        found: dict[Placement, Transition] = {}
        for side in (DEVICE, HOST):
            rules = [one for one in self.plan.advances if slots[one.slot].placement == side]
            lanes = self.fused if self.plan.lowering == "in_graph" and side == DEVICE else None
            found[side] = Transition(rules, written, lanes, *over)
        return found

    def step(self, live: Live) -> Step:
        """The sizes of a step of so many live rows on each varying axis."""
        return self._declaration.step(live, self._padded, exact=self.exact)

    def ready(self, live: Live) -> Ready:
        """Everything for these live sizes, one for each varying axis. BatchError where they exceed the bucket."""
        for axis, rows in zip(self._declaration.varying, live, strict=True):
            if rows > self._padded[axis]:
                raise BatchError(
                    f"the batch has {rows} rows on {axis}, more than the {self._padded[axis]} of this bucket"
                )
        step = self.step(live)
        if not self._asked:
            self._ask(step)
        sizes, plan = step.live_sizes, self.plan
        views = self._views(sizes) if self.exact else self._bucket_views
        groups = () if self._partial else plan.copies
        early = [group for group in groups if not self.uploads or group.placement == HOST]
        packed = [self.computation(one, step, views) for one in plan.computed if one.packed and not self._partial]
        others = [(one.on, self.computation(one, step, views)) for one in plan.computed if not one.packed]
        return Ready(
            planned=self,
            step=step,
            live=live,
            always=[] if self.exact else [*self.tails(sizes, always=True)],
            early=self._copies(early, sizes),
            late=self._copies((group for group in groups if group not in early), sizes),
            host=[computation for on, computation in others if on == HOST],
            device=[computation for on, computation in others if on == DEVICE],
            packed=[*map(PackedValue.of, packed)],
            views=views,
            shown=Aliases(views) if self.exact else self._bucket_shown,
        )

    def table(self, block: int) -> npt.NDArray[np.int64]:
        """The kernel's table of the lanes, in blocks of so many words."""
        return table_of(self.lanes, block, self.owner, len(self._declaration.counted))

    @property
    def head_bytes(self) -> int:
        """Bytes of a packet before what it carries itself."""
        return head_bytes(len(self.lanes), len(self._declaration.counted))

    def words(self, kinds: Mapping[str, Kind], values: frozenset[str], live: Sizes) -> bytes:
        """A packet's words but for the addresses. values: slots that the host computes, of which every row is live."""
        metas, paces = [], []
        for lane in self.lanes:
            kind, slot = kinds.get(lane.slot), self._declaration.slots[lane.slot]
            whole = lane.slot in values or not slot.varying
            rows = lane.row if whole else slot.shape[slot.varying[0]].at(live) * lane.inner
            if self._partial and kind is None:
                rows = -1
            metas.append(meta(rows, lane.target.dtype if kind is None else kind.dtype, lane.target.dtype))
            paces.append(rows if kind is None or kind.pace is None else kind.pace)
        counts = self._declaration.counts(live)
        words = (self.owner, 0, 0, 0, *counts, *[0] * len(counts), *metas, *paces)
        return struct.pack(f"<{len(words)}q", *words)

    def tails(self, sizes: Sizes, *, always: bool) -> Iterator[tuple[torch.Tensor, Number]]:
        """The padded rows that copies leave, of tails that each step resets, or of those that may be clean."""
        for tail in self.plan.tails:
            if tail.always == always and not tail.fused:
                buffer = self.buffers[tail.slot]
                for box in boxes(buffer.reach(sizes), buffer.reach(self._padded)):
                    yield buffer.box(box), tail.value

    def _ask(self, step: Step) -> None:
        """Call each function of sizes alone once: DeclarationError where it asks for an unknown size.

        Any other error waits for the fill that needs the function's value.
        """
        for planned in self.plan.computed:
            compute = self._declaration.functions[planned.slot]
            if STEP in compute.needs and set(compute.needs) <= _SIZES and not compute.writes_out:
                given = self._declaration.given(step)
                try:
                    compute.function(**{need: given[need] for need in compute.needs})
                except DeclarationError as error:
                    blame(planned.slot, compute.function, error)
                except Exception:  # noqa: BLE001, S112 - see above
                    continue
        self._asked = True

    def _views(self, sizes: Sizes) -> Views:
        names, absent = self._declaration.slots, self.plan.absent
        views = {name: None if name in absent else self.buffers[name].view(sizes) for name in names}
        return {**dict.fromkeys(self._declaration.disabled), **views}

    def _copies(self, groups: Iterable[CopyGroup], sizes: Sizes) -> list[Targets]:
        """Where copies go. What the host computed has every padded row."""
        padded, names = sizes if self.exact else self._padded, self._declaration.functions
        together: list[dict[str, torch.Tensor]] = []
        alone: list[Targets] = []
        for group in groups:
            views = {n: self.buffers[n].view(padded if n in names else sizes) for n in group.slots}
            if group.how == "single":
                alone += [{name: view} for name, view in views.items()]
            elif group.how == "foreach" and together and self.plan.mixed:
                together[0].update(views)
            elif group.how == "foreach":
                together.append(views)
        return [*together, *alone]

    def computation(self, planned: ComputeStep, step: Step, views: Views) -> Computation:
        """A computed slot's function, given what it needs of the views and the step."""
        target = self.buffers[planned.slot].view(step.padded_sizes)
        known = {**self._declaration.given(step), **views}
        return Computation.bind(planned.slot, self._declaration, known, target)
