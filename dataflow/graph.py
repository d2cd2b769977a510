"""The dependency graph: who needs whom, in which order, and whether on the host or on the device."""

import difflib
import graphlib
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from .capabilities import DEVICE, HOST, Placement
from .compute import OUT, RANKS, SETTINGS, STEP
from .slots import Output, Slot

RESERVED: Final = frozenset({STEP, SETTINGS, OUT, "narrow", "placeholder"})

_GIVEN: Final = (STEP, SETTINGS, RANKS)


def needs_of(slot: Slot) -> tuple[str, ...]:
    """Names that a slot needs, `step`, `settings` and `ranks` among them; none for a slot that is not computed."""
    compute = slot.computes()
    return compute.needs if compute else ()


def side_of(slot: Slot, slots: Mapping[str, Slot]) -> Placement:
    """Where a computed slot's function runs: on the device as soon as it needs a slot there, else on the host."""
    on_device = any(name in slots and slots[name].placement == DEVICE for name in needs_of(slot))
    return DEVICE if on_device else HOST


def order(slots: Mapping[str, Slot]) -> tuple[str, ...]:
    """Computed slots, each after all that it needs; the same for any order of declaration.

    Raises graphlib.CycleError, whose second argument is the path, where slots need each other in a circle.
    """
    edges = {
        name: sorted(need for need in needs_of(slot) if need in slots)
        for name, slot in sorted(slots.items())
        if slot.computes()
    }
    return tuple(name for name in graphlib.TopologicalSorter(edges).static_order() if name in edges)


def faults(slots: Mapping[str, Slot], fields: Collection[str]) -> Iterator[tuple[str, str]]:
    """What is wrong with how slots depend on each other: pairs of a slot's name and the fault with its way out."""
    for name, slot in slots.items():
        if name in RESERVED:
            yield name, "the name has a meaning of its own in slotgraph: choose another"
        if slot.computes() and slot.reads(name) is not None:
            yield name, "it is copied from the batch and computed, and would hold one or the other: make it two slots"
        for need in needs_of(slot):
            yield from ((name, fault) for fault in _need_faults(need, slots, fields))
        yield from ((name, fault) for fault in _side_faults(slot, slots))


def _need_faults(need: str, slots: Mapping[str, Slot], fields: Collection[str]) -> Iterator[str]:
    if need in slots:
        if isinstance(slots[need], Output):
            yield f"it needs {need!r}, an output, which the step has not written yet when inputs are computed"
    elif need in _GIVEN:
        if need in fields:
            yield f"it needs {need!r}, which has a meaning of its own in slotgraph, but is a field, too: rename that"
    elif need not in fields:
        near = difflib.get_close_matches(need, [*slots, *fields, *_GIVEN], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = "slot nor field of the declaration, nor `step`, `settings` or `ranks`"
        yield f"it needs {need!r}, which is neither {known}{hint}"


def _side_faults(slot: Slot, slots: Mapping[str, Slot]) -> Iterator[str]:
    if not slot.computes() or side_of(slot, slots) == HOST:
        return
    if slot.placement == HOST:
        yield "it needs slots on the device but is placed on the host: that would read the device back in each step"
    for need in needs_of(slot):
        if need != SETTINGS and (need not in slots or slots[need].placement == HOST):  # settings never change
            yield (
                f"its function runs on the device, inside the graph, where the host value {need!r} would be frozen at "
                f"capture: put what it takes from {need!r} into a slot that is computed on the host, and need that"
            )
