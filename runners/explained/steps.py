"""A plan's steps in the order that they run in, with the calls that each takes and the bytes that it moves."""

import math
from collections.abc import Iterator, Mapping, Sequence

from ...dataflow.capabilities import DEVICE, HOST, Capabilities, dtype_text
from ...dataflow.declaration import Declaration
from ...dataflow.lanes import WORD, head_bytes, rounded
from ...dataflow.packet import UNIT
from ...dataflow.plan import FUSED, ComputeStep, CopyGroup, FillPlan
from ...dataflow.planner import slot_bytes
from .records import Fill, FillStep, Kind

Bytes = Mapping[str, int]
"""Bytes of each slot, padded."""


def fill_of(
    plan: FillPlan, declaration: Declaration, capabilities: Capabilities, *, parts: int = 1, whole: bool = True
) -> Fill:
    """A plan's steps and their sums.

    parts: graphs that the step is launched as; 0 where there is none. whole: whether the graph holds the whole step,
    and so computes what the device does.
    """
    sizes = {axis: size for axis in declaration.axes for name, size in plan.sizes if axis.name == name}
    nbytes = {name: slot_bytes(slot, sizes, capabilities) for name, slot in declaration.slots.items()}
    steps = tuple(_steps(plan, nbytes, parts, whole=whole and parts > 0))

    def calls(*kinds: Kind) -> int:
        return sum(step.calls for step in steps if step.kind in kinds)

    return Fill(
        plan=plan,
        steps=steps,
        uploads=calls("upload"),
        launches=calls("graph", "kernel"),
        copies=calls("copy"),
        resets=calls("reset"),
        computed=calls("compute"),
        copied=plan.nbytes,
        uploaded=sum(step.nbytes or 0 for step in steps if step.kind == "upload"),
    )


def _steps(plan: FillPlan, nbytes: Bytes, parts: int, *, whole: bool) -> Iterator[FillStep]:
    """As the lowering runs them."""
    between = plan.lowering not in FUSED and bool(plan.packed or plan.moved)
    yield from _resets(plan)
    yield from _copies(plan, [group for group in plan.copies if not between or group.placement == HOST], nbytes)
    ride = {one.slot for one in plan.computed if one.packed} | {*plan.moved}
    for one in plan.computed:
        if one.on == HOST:
            yield _compute(one, nbytes, calls=0 if one.slot in ride else 1)
    yield from _uploads(plan, nbytes)
    if between:
        yield from _copies(plan, [group for group in plan.copies if group.placement == DEVICE], nbytes)
    inside = whole and plan.lowering != "slot_by_slot"  # which computes all before the graph, too
    for one in plan.computed:
        if one.on == DEVICE:
            yield _compute(one, nbytes, calls=0 if inside else 1, inside=inside)
    if parts:
        label = "graph" if parts == 1 else f"{parts} graphs, breaks between"
        yield FillStep(kind="graph", label=label, slots=(), calls=parts)
    else:
        yield FillStep(kind="step", label="the step, without a graph", slots=(), calls=1)


def _resets(plan: FillPlan) -> Iterator[FillStep]:
    """Tails that no kernel resets: those in each step one by one, those found dirty with all zeros in one call."""
    apart = [tail for tail in plan.tails if not tail.fused]
    always, dirty = [tail for tail in apart if tail.always], [tail for tail in apart if not tail.always]
    if always:
        yield FillStep(kind="reset", label="reset tails", slots=tuple(tail.slot for tail in always), calls=len(always))
    if dirty:
        zeros = sum(tail.value == 0 and math.copysign(1.0, tail.value) > 0 for tail in dirty)
        slots, calls = tuple(tail.slot for tail in dirty), min(zeros, 1) + len(dirty) - zeros
        yield FillStep(kind="reset", label="reset dirty tails", slots=slots, calls=calls, maybe=True)


def _copies(plan: FillPlan, groups: Sequence[CopyGroup], nbytes: Bytes) -> Iterator[FillStep]:
    """One step for each group; one for all that a single foreach call takes."""
    together = [group for group in groups if group.how == "foreach"] if plan.mixed else []
    if together:
        names = tuple(name for group in together for name in group.slots)
        yield _moving("copy", "foreach of all dtypes", names, 1, nbytes)
    for group in groups:
        if group.how in ("foreach", "single") and group not in together:
            cast = "" if group.src_dtype == group.dst_dtype else f"{dtype_text(group.src_dtype)} to "
            how = f"{group.how}, {group.why}" if group.why else group.how
            label = f"{cast}{dtype_text(group.dst_dtype)} on the {group.placement}, {how}"
            yield _moving("copy", label, group.slots, 1 if group.how == "foreach" else len(group.slots), nbytes)


def _uploads(plan: FillPlan, nbytes: Bytes) -> Iterator[FillStep]:
    """The packet of words and values, values sent by themselves, and the kernel that takes a packet up."""
    fused = plan.lowering in FUSED
    slots, head, unit = (plan.fused, head_bytes(len(plan.fused)), WORD) if fused else (plan.packed, UNIT, UNIT)
    if slots:
        carried = plan.packed or [one.slot for one in plan.computed if one.packed]
        size = head + sum(rounded(nbytes[name], unit) for name in carried)
        yield FillStep(kind="upload", label="one packet", slots=slots, calls=1, nbytes=size)
    if not fused:
        yield from (_moving("upload", "by itself", (name,), 1, nbytes) for name in plan.moved)
    elif slots:
        inside = plan.lowering == "in_graph"
        label = "fused kernel, the graph's first node" if inside else "fused kernel"
        yield _moving("kernel", label, slots, 0 if inside else 1, nbytes, inside=inside)


def _compute(one: ComputeStep, nbytes: Bytes, *, calls: int, inside: bool = False) -> FillStep:
    return _moving("compute", f"{one.function} on the {one.on}", (one.slot,), calls, nbytes, inside=inside)


def _moving(
    kind: Kind, label: str, slots: tuple[str, ...], calls: int, nbytes: Bytes, *, inside: bool = False
) -> FillStep:
    """A step that moves all bytes of some slots."""
    size = sum(nbytes[name] for name in slots)
    return FillStep(kind=kind, label=label, slots=slots, calls=calls, nbytes=size, inside=inside)
