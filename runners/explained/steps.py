"""A plan's steps in the order that they run in, with the calls that each takes and the bytes that it moves."""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Final

import attrs

from ...dataflow.capabilities import DEVICE, HOST, Capabilities
from ...dataflow.declaration import Declaration
from ...dataflow.lanes import WORD, head_bytes, rounded
from ...dataflow.packet import UNIT
from ...dataflow.plan import FUSED, ComputeStep, CopyGroup, FillPlan, TailReset
from ...dataflow.planner import slot_bytes
from ...dataflow.roles import dtype_text
from .records import Fill, FillStep, Kind

_CALLS: Final[Collection[Kind]] = ("graph", "kernel")


def fill_of(
    plan: FillPlan,
    declaration: Declaration,
    capabilities: Capabilities,
    *,
    parts: int = 1,
    whole: bool = True,
) -> Fill:
    """A plan's steps and their sums.

    parts: graphs that the step is launched as; 0 where there is none. whole: whether the graph holds the whole step,
    and so computes what the device does.
    """
    sizes = {axis: size for axis in declaration.axes for name, size in plan.sizes if axis.name == name}
    nbytes = {name: slot_bytes(slot, sizes, capabilities) for name, slot in declaration.slots.items()}
    steps = tuple(_Steps(plan, nbytes, parts, whole and parts > 0).in_order())

    def calls(*kinds: Kind) -> int:
        return sum(step.calls for step in steps if step.kind in kinds)

    return Fill(
        plan=plan,
        steps=steps,
        uploads=calls("upload"),
        launches=calls(*_CALLS) if parts else 0,
        copies=calls("copy"),
        resets=calls("reset"),
        computed=calls("compute"),
        copied=plan.nbytes,
        uploaded=sum(step.nbytes or 0 for step in steps if step.kind == "upload"),
    )


@attrs.frozen
class _Steps:
    """The steps of one plan; nbytes: of each slot, padded."""

    plan: FillPlan
    nbytes: Mapping[str, int]
    parts: int
    whole: bool

    def in_order(self) -> Iterator[FillStep]:
        """As the lowering runs them."""
        plan = self.plan
        yield from self._resets()
        if plan.lowering in FUSED:
            yield from self._copies(plan.copies)
            yield from self._computed_on_host()
            yield from self._packet(plan.fused, head_bytes(len(plan.fused)), WORD)
            yield from self._kernel()
        elif plan.packed or plan.moved:
            yield from self._copies(group for group in plan.copies if group.placement == HOST)
            yield from self._computed_on_host()
            yield from self._packet(plan.packed, UNIT, UNIT)
            yield from self._moved()
            yield from self._copies(group for group in plan.copies if group.placement == DEVICE)
        else:
            yield from self._copies(plan.copies)
            yield from self._computed_on_host()
        yield from self._computed_on_device()
        yield self._step()

    def _resets(self) -> Iterator[FillStep]:
        """Tails that no kernel resets: those in each step one by one, those found dirty with all zeros in one call."""
        apart = [tail for tail in self.plan.tails if not tail.fused]
        always = [tail for tail in apart if tail.always]
        if always:
            yield FillStep(kind="reset", label="reset tails", slots=_slots(always), calls=len(always))
        dirty = [tail for tail in apart if not tail.always]
        if dirty:
            zeros = sum(_is_zero(tail) for tail in dirty)
            calls = min(zeros, 1) + len(dirty) - zeros
            yield FillStep(kind="reset", label="reset dirty tails", slots=_slots(dirty), calls=calls, maybe=True)

    def _copies(self, groups: Collection[CopyGroup] | Iterator[CopyGroup]) -> Iterator[FillStep]:
        """One step for each group; one for all that a single foreach call takes."""
        moved = [group for group in groups if group.how in ("foreach", "single")]
        together = [group for group in moved if group.how == "foreach"] if self.plan.mixed else []
        if together:
            names = tuple(name for group in together for name in group.slots)
            yield self._copy("foreach of all dtypes", names, 1)
        for group in moved:
            if group not in together:
                each = group.how == "foreach"
                yield self._copy(_told(group), group.slots, 1 if each else len(group.slots))

    def _copy(self, label: str, names: tuple[str, ...], calls: int) -> FillStep:
        return FillStep(kind="copy", label=label, slots=names, calls=calls, nbytes=self._bytes(names))

    def _bytes(self, names: Collection[str]) -> int:
        return sum(self.nbytes[name] for name in names)

    def _carried(self) -> frozenset[str]:
        """Slots whose values the host computes for an upload."""
        return frozenset(one.slot for one in self.plan.computed if one.packed) | frozenset(self.plan.moved)

    def _computed_on_host(self) -> Iterator[FillStep]:
        for one in self.plan.computed:
            if one.on == HOST:
                rides = one.slot in self._carried()
                yield self._compute(one, 0 if rides else 1)

    def _compute(self, one: ComputeStep, calls: int, *, inside: bool = False) -> FillStep:
        label = f"{one.function} on the {one.on}"
        size = self.nbytes[one.slot]
        return FillStep(kind="compute", label=label, slots=(one.slot,), calls=calls, nbytes=size, inside=inside)

    def _packet(self, slots: tuple[str, ...], head: int, unit: int) -> Iterator[FillStep]:
        """The upload of words and values; host data of the batch would ride with it."""
        if slots:
            carried = self.plan.packed or [one.slot for one in self.plan.computed if one.packed]
            size = head + sum(rounded(self.nbytes[name], unit) for name in carried)
            yield FillStep(kind="upload", label="one packet", slots=slots, calls=1, nbytes=size)

    def _moved(self) -> Iterator[FillStep]:
        for name in self.plan.moved:
            yield FillStep(kind="upload", label="by itself", slots=(name,), calls=1, nbytes=self.nbytes[name])

    def _kernel(self) -> Iterator[FillStep]:
        names = self.plan.fused
        if names:
            inside = self.plan.lowering == "in_graph"
            label = "fused kernel, the graph's first node" if inside else "fused kernel"
            size, calls = self._bytes(names), 0 if inside else 1
            yield FillStep(kind="kernel", label=label, slots=names, calls=calls, nbytes=size, inside=inside)

    def _computed_on_device(self) -> Iterator[FillStep]:
        inside = self.whole and self.plan.lowering != "slot_by_slot"  # which computes all before the graph, too
        for one in self.plan.computed:
            if one.on == DEVICE:
                yield self._compute(one, 0 if inside else 1, inside=inside)

    def _step(self) -> FillStep:
        if not self.parts:
            return FillStep(kind="step", label="the step, without a graph", slots=(), calls=1)
        label = "graph" if self.parts == 1 else f"{self.parts} graphs, breaks between"
        return FillStep(kind="graph", label=label, slots=(), calls=self.parts)


def _slots(tails: Collection[TailReset]) -> tuple[str, ...]:
    return tuple(tail.slot for tail in tails)


def _is_zero(tail: TailReset) -> bool:
    return tail.value == 0 and math.copysign(1.0, tail.value) > 0


def _told(group: CopyGroup) -> str:
    """How a group is copied, in a few words."""
    cast = "" if group.src_dtype == group.dst_dtype else f"{dtype_text(group.src_dtype)} to "
    how = f"{group.how}, {group.why}" if group.why else group.how
    return f"{cast}{dtype_text(group.dst_dtype)} on the {group.placement}, {how}"
