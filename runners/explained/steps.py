"""A plan's steps in the order that they run in, with the calls that each takes and the bytes that it moves."""

import collections
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import attrs

from ...dataflow.capabilities import DEVICE, HOST, Capabilities, dtype_text
from ...dataflow.declaration import Declaration
from ...dataflow.packet import UNIT, WORD, head_bytes, rounded
from ...dataflow.plan import FUSED, CopyGroup, FillPlan, slot_bytes

Kind = Literal["reset", "copy", "compute", "upload", "kernel", "graph", "step"]
_KERNEL: Final = {"in_graph": "fused kernel, the graph's first node", "fused": "fused kernel"}


@attrs.frozen(kw_only=True)
class FillStep:
    """One thing that a step does.

    kind: what it does. "step" runs the step without a graph. calls: into torch, the driver or a function. 0 if it rides
    in another call, such as the graph's. nbytes: that it moves if every row is live. None if that depends on the batch.
    inside: whether the graph does it. maybe: whether most steps leave it out. slots: what it writes, or takes up.
    """

    kind: Kind
    label: str
    calls: int
    nbytes: int | None
    inside: bool = False
    maybe: bool = False
    slots: tuple[str, ...] = ()


@attrs.frozen
class Fill:
    """How the slots are filled: the plan, and what a step does in which order."""

    plan: FillPlan
    steps: tuple[FillStep, ...]

    @property
    def calls(self) -> Mapping[str, int]:
        """The calls of each kind of step."""
        found = collections.Counter[str]()
        for step in self.steps:
            found[step.kind] += step.calls
        return dict(found)


@attrs.frozen
class _Listing:
    """The steps of a plan while they are listed. nbytes: of each slot, padded."""

    plan: FillPlan
    nbytes: Mapping[str, int]
    steps: list[FillStep] = attrs.field(factory=list)

    def add(self, kind: Kind, label: str, slots: Iterable[str], calls: int, **more: Any) -> None:
        """One more step, which moves all bytes of its slots if nothing else is said."""
        names = tuple(slots)
        told = {"nbytes": sum(self.nbytes[name] for name in names), **more}
        self.steps.append(FillStep(kind=kind, label=label, slots=names, calls=calls, **told))

    def reset(self) -> None:
        """Tails that no kernel resets. Those that are found dirty are set to zero in one call."""
        for label, always in (("reset tails", True), ("reset dirty tails", False)):
            tails = [tail for tail in self.plan.tails if tail.always == always and not tail.fused]
            zeros = 0 if always else sum(tail.value == 0 and math.copysign(1.0, tail.value) > 0 for tail in tails)
            if tails:
                calls = len(tails) - max(zeros - 1, 0)
                self.add("reset", label, (tail.slot for tail in tails), calls, nbytes=None, maybe=not always)

    def copy(self, groups: Iterable[CopyGroup]) -> None:
        """One step for each group, and one for all that a single foreach call takes."""
        apart = [group for group in groups if group.how in ("foreach", "single")]
        together = [group for group in apart if self.plan.mixed and group.how == "foreach"]
        if together:
            self.add("copy", "foreach of all dtypes", (name for group in together for name in group.slots), 1)
        for group in apart:
            if group not in together:
                label = ", ".join(filter(None, (dtype_text(group.dst_dtype), group.placement, group.how, group.why)))
                self.add("copy", label, group.slots, 1 if group.how == "foreach" else len(group.slots))

    def upload(self) -> None:
        """The packet of words and values, the kernel that takes it up, and values sent by themselves."""
        plan, how = self.plan, self.plan.lowering
        slots, head, unit = plan.packed, UNIT, UNIT
        if how in FUSED:
            slots, head, unit = plan.fused, head_bytes(len(plan.fused)), WORD
        carried = plan.packed or [one.slot for one in plan.computed if one.packed]
        if slots:
            size = head + sum(rounded(self.nbytes[name], unit) for name in carried)
            self.add("upload", "one packet", slots, 1, nbytes=size)
        if plan.fused:
            self.add("kernel", _KERNEL[how], slots, int(how == "fused"), inside=how == "in_graph")
        for name in plan.moved:
            self.add("upload", "by itself", (name,), 1)

    def compute(self, place: str, ride: Iterable[str] = (), *, inside: bool = False) -> None:
        """Computed slots of one place. ride: those that another call sends."""
        for one in self.plan.computed:
            if one.on == place:
                calls = 0 if inside or one.packed or one.slot in ride else 1
                self.add("compute", f"{one.function} on the {place}", (one.slot,), calls, inside=inside)


def fill_of(
    plan: FillPlan, declaration: Declaration, capabilities: Capabilities, *, parts: int = 1, whole: bool = True
) -> Fill:
    """A plan's steps, in the order that the lowering runs them in.

    Args:
        plan: The plan.
        declaration: Of its slots.
        capabilities: Of the backend.
        parts: Graphs that the step is launched as. 0 if there is none.
        whole: Whether the graph holds the whole step, and so computes what the device does.
    """
    sizes = {axis: size for axis in declaration.axes for name, size in plan.sizes if axis.name == name}
    listing = _Listing(plan, {name: slot_bytes(one, sizes, capabilities) for name, one in declaration.slots.items()})
    between = plan.lowering not in FUSED and bool(plan.packed or plan.moved)  # an upload comes between copies
    listing.reset()
    listing.copy(group for group in plan.copies if not between or group.placement == HOST)
    listing.compute(HOST, plan.moved)
    listing.upload()
    listing.copy(group for group in plan.copies if between and group.placement == DEVICE)
    listing.compute(DEVICE, inside=whole and parts > 0 and plan.lowering != "slot_by_slot")
    if parts:
        listing.add("graph", "graph" if parts == 1 else f"{parts} graphs, breaks between", (), parts, nbytes=None)
    else:
        listing.add("step", "the step, without a graph", (), 1, nbytes=None)
    return Fill(plan, tuple(listing.steps))
