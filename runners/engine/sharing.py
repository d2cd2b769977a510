"""Sharing: lays out the memory of several runners by the lifetimes of their slots, and proves the layout.

A lifetime is the set of a loop's phases in which a slot's bytes must keep their value.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import attrs
import torch

from ...dataflow.axes import Sizes, extent
from ...dataflow.buffers import ALIGNMENT, aligned
from ...dataflow.capabilities import HOST, Capabilities, Placement, resolve_dtype
from ...dataflow.declaration import Declaration
from ...dataflow.errors import ConfigError, LayoutError
from ...dataflow.slots import BY_PRODUCER, BY_STEP, Slot
from ...dataflow.tails import Keep, Once, Pad

SlotOfMember = tuple[str, str]
"""A member's name and a slot's, or two phases."""


def _listed(value: Any, expected: str = "phases: expected names") -> tuple[Any, ...]:
    """Return a list's items as a tuple. Raise ConfigError for a string, which would be a list of letters."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"{expected} in a list or tuple, got {value!r}")
    return tuple(value)


def _pairs(value: Any) -> tuple[Any, ...]:
    return tuple(map(_listed, _listed(value, "overlaps: expected pairs of phases")))


@attrs.frozen
class Schedule:
    """The phases of a loop, and which of them may be in use at once.

    A phase begins with the first write to an input of one of its runners, by a fill or a producer. It ends when the
    step is done and its outputs have been read.

    Args:
        order: Phases that run one after the other, then from the first again. A round may leave one out.
        overlaps: Pairs of phases of which one may begin before the other has ended.
        anytime: Phases that may come at any time, and so overlap with all others.

    Raises:
        ConfigError: A name is unknown, empty, or given twice.
    """

    order: tuple[str, ...] = attrs.field(converter=_listed)
    overlaps: tuple[SlotOfMember, ...] = attrs.field(default=(), converter=_pairs)
    anytime: tuple[str, ...] = attrs.field(default=(), converter=_listed)

    def __attrs_post_init__(self) -> None:
        """Raise ConfigError for names that are no valid schedule."""
        phases = self.phases
        known = ", ".join(map(repr, self.phases))
        faults = [
            f"phases: expected names, got {name!r}" for name in phases if not str(name).strip() or name != str(name)
        ]
        faults += [f"phase {name!r} is named {phases.count(name)} times" for name in phases if phases.count(name) > 1]
        for pair in self.overlaps:
            if len(pair) != 2 or pair[0] == pair[1] or not all(name in phases for name in pair):  # noqa: PLR2004 - two
                faults.append(f"overlaps: expected pairs of two of its phases, which are {known}, got {pair!r}")
        if faults:
            raise ConfigError(f"no schedule: {'; '.join(dict.fromkeys(faults))}")

    @property
    def phases(self) -> tuple[str, ...]:
        """All phases: those in order, then those at any time."""
        return (*self.order, *self.anytime)

    def meet(self, first: str, second: str) -> bool:
        """Return whether two phases may be in use at once. A phase meets itself."""
        free = first in self.anytime or second in self.anytime
        return first == second or free or (first, second) in self.overlaps or (second, first) in self.overlaps

    @property
    def at_once(self) -> list[frozenset[str]]:
        """The largest sets of phases that may all be in use at once."""
        sets = {frozenset[str]()}
        for phase in self.phases:
            sets |= {frozenset([phase, *(one for one in some if self.meet(one, phase))]) for some in sets}
            sets = {some for some in sets if not any(some < other for other in sets)}
        return [*sets]

    def __str__(self) -> str:
        """Return the order of the phases, and which may overlap."""
        parts = [" -> ".join(self.order)] if self.order else []
        parts += [f"{first} and {second} may overlap" for first, second in self.overlaps]
        parts += [f"{name} at any time" for name in self.anytime]
        return "; ".join(parts)


@attrs.frozen(kw_only=True)
class PooledSlot:
    """A slot in memory that runners share.

    Attributes:
        member: The name of its runner.
        phase: The phase that the runner is used in.
        slot: The slot's name.
        device: The device of the runner's slots.
        placement: Whether it lies in the memory of the device or of the host.
        shape: Its shape at full capacity.
        dtype: Its dtype.
        always: Whether its bytes must keep their value in all phases, not only in its own.
        why: The reason for that.
        arenas: Whether its backend lays several slots in one allocation.
        block: The index of its block in the layout.
        offset: Bytes from the start of the block.
    """

    member: str
    phase: str
    slot: str
    device: str
    placement: Placement
    shape: tuple[int, ...]
    dtype: torch.dtype
    always: bool
    why: str
    arenas: bool = True
    block: int = 0
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Its bytes, aligned."""
        return aligned(self.shape, self.dtype)

    @property
    def stop(self) -> int:
        """The offset one past its last byte."""
        return self.offset + self.nbytes

    @property
    def needed(self) -> str:
        """When its bytes must keep their value, in words."""
        return "always" if self.always else f"in {self.phase}"

    def touches(self, other: "PooledSlot") -> bool:
        """Return whether two slots have a byte in common."""
        return self.block == other.block and self.offset < other.stop and other.offset < self.stop

    def meets(self, other: "PooledSlot", schedule: Schedule) -> bool:
        """Return whether both slots may have to keep their bytes at the same time."""
        return self.always or other.always or schedule.meet(self.phase, other.phase)

    def __str__(self) -> str:
        """Return the slot's name with its member's, such as draft.hidden."""
        return f"{self.member}.{self.slot}"


def pooled_slots(
    declaration: Declaration,
    capacity: Sizes,
    capabilities: Capabilities,
    member: str,
    phase: str,
    device: str = "cpu",
    *,
    bound: Collection[str] = (),
    kept: Collection[str] = (),
) -> list[PooledSlot]:
    """Return the slots of a runner that shares memory, not yet laid out.

    Args:
        declaration: The runner's slots, under its settings.
        capacity: The largest size of each axis.
        capabilities: The record of the runner's backend.
        member: The runner's name among those that share.
        phase: The phase that the runner is used in.
        device: The device of its device slots.
        bound: Slots with memory of the user, which are left out.
        kept: Slots that must keep their bytes from step to step, since their producer writes only changed rows.
    """
    found = list[PooledSlot]()
    for name, slot in declaration.slots.items():
        if name in bound:
            continue
        why = lasting(slot, name, kept)
        pooled = PooledSlot(
            member=member,
            phase=phase,
            slot=name,
            device=device,
            placement=slot.placement,
            shape=extent(slot.shape, capacity),
            dtype=resolve_dtype(slot.dtype, capabilities),
            always=why is not None,
            why=why or f"each step of {phase} writes it",
            arenas=capabilities.arenas,
        )
        found.append(pooled)
    return found


def lasting(slot: Slot, name: str, kept: Collection[str]) -> str | None:
    """Return why a slot must keep its bytes beyond its runner's phase, or None.

    Any slot must, unless its kind allows otherwise.
    """
    rule = slot.rule()
    read = slot.reads(name) is not None
    computed = slot.computes()
    written = slot.rewritten or slot.restored or read or computed
    ruled = isinstance(rule, Pad) or not slot.varying
    reasons = {
        "a constant, which no step writes": not slot.writers and rule is None and not written,
        "it is kept, because that was asked for": name in kept,
        "state, which steps keep": slot.is_state,
        "in host memory, where a fill may write what the device has yet to read": slot.placement == HOST,
        "its tail is set once": isinstance(rule, Once),
        "its tail is kept, and holds what the slot held before": isinstance(rule, Keep),
        "no fill writes all of it in each step": not (
            (computed and not computed.again)
            or (ruled if read else slot.writers == BY_STEP or (slot.writers == BY_PRODUCER and ruled))
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@attrs.frozen(kw_only=True)
class Block:
    """One allocation of the backend."""

    device: str
    placement: Placement
    nbytes: int


@attrs.frozen(kw_only=True)
class Layout:
    """The place of every slot of every member.

    Args:
        schedule: The phases, and which of them may overlap.
        blocks: The allocations.
        places: A place for each slot, in the order of members and of their declarations.
        peak: The most bytes that are needed at the same time. No layout is smaller.
    """

    schedule: Schedule
    blocks: tuple[Block, ...]
    places: tuple[PooledSlot, ...]
    peak: int

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def apart(self) -> int:
        """The bytes of all slots if none shared memory."""
        return sum(place.nbytes for place in self.places)

    @property
    def saved(self) -> int:
        """The bytes that sharing saves."""
        return self.apart - self.nbytes

    def place(self, member: str, slot: str) -> PooledSlot:
        """Return a slot's place. Raise ConfigError if it has none in this layout."""
        for place in self.places:
            if (place.member, place.slot) == (member, slot):
                return place
        raise ConfigError(
            f"the layout has no place for slot {slot!r} of member {member!r}: it is bound, or of no member"
        )

    def shared_with(self, member: str, slot: str) -> tuple[PooledSlot, ...]:
        """Return the places that have a byte in common with a slot's."""
        mine = self.place(member, slot)
        return tuple(place for place in self.places if place is not mine and place.touches(mine))

    def why(self, member: str, slot: str) -> str:
        """Explain the place of a slot: the reason for its lifetime, and the slots that share its memory."""
        mine = self.place(member, slot)
        shared = self.shared_with(member, slot)
        return f"{mine.why}; shares with {', '.join(map(str, shared)) or 'none'}"

    def __str__(self) -> str:
        """Return a line for each slot, block by block, with the reason for its place."""
        lines = [f"phases: {self.schedule}"]
        for one in sorted(self.places, key=lambda one: (one.block, one.offset, -one.nbytes, str(one))):
            where = f"block {one.block}, byte {one.offset:,}"
            why = self.why(one.member, one.slot)
            lines.append(f"{where}: {one}, {one.nbytes:,} bytes, needed {one.needed}: {why}")
        saved = f"{self.nbytes:,} bytes, {self.saved:,} fewer than {self.apart:,} without sharing"
        return "\n".join([*lines, f"{saved}; {self.peak:,} must hold at once"])


def lay_out(slots: Sequence[PooledSlot], schedule: Schedule) -> Layout:
    """Lay out the slots of all members, and prove that no two share a byte that both may need at once.

    Args:
        slots: The slots of all members, as `pooled_slots` returns them. No two members have one name.
        schedule: The phases that the members are used in.

    Raises:
        LayoutError: The proof fails.
    """
    homes = dict[tuple[str, Placement], list[PooledSlot]]()
    for one in slots:
        homes.setdefault((one.device, one.placement), []).append(one)
    blocks = list[Block]()
    places = dict[str, PooledSlot]()
    peak = 0
    for (device, placement), mine in sorted(homes.items()):
        placed = _first_fit(mine, schedule, len(blocks))
        places |= {str(one): one for one in placed}
        for block in sorted({one.block for one in placed}):
            nbytes = max(one.stop for one in placed if one.block == block)
            blocks.append(Block(device=device, placement=placement, nbytes=nbytes))
        peak += max(sum(one.nbytes for one in mine if one.always or one.phase in some) for some in schedule.at_once)
    ordered = tuple(places[str(one)] for one in slots)
    layout = Layout(schedule=schedule, blocks=tuple(blocks), places=ordered, peak=peak)
    check_layout(layout)
    return layout


def _first_fit(slots: Sequence[PooledSlot], schedule: Schedule, block: int) -> list[PooledSlot]:
    """Give each slot the lowest place that is free while it is needed, the largest first.

    With arenas one block has all slots, at any offset. Without, every slot begins at the start of its block.

    Args:
        slots: The slots of one kind of memory.
        schedule: The phases.
        block: The index of the first block.
    """
    arenas = all(one.arenas for one in slots)
    starts = dict[PooledSlot, int]()
    for one in sorted(slots, key=lambda one: (not one.always, -one.nbytes, str(one))):
        start = 0
        length = one.nbytes if arenas else 1
        taken = [(at, other.nbytes if arenas else 1) for other, at in starts.items() if one.meets(other, schedule)]
        for at, size in sorted(taken):
            if at - start >= length:
                break
            start = max(start, at + size)
        starts[one] = start
    if arenas:
        return [attrs.evolve(one, block=block, offset=start) for one, start in starts.items()]
    return [attrs.evolve(one, block=block + start) for one, start in starts.items()]


def check_layout(layout: Layout) -> None:
    """Raise LayoutError unless all places are safe.

    Each place must lie in a block of its kind, and no two may share a byte that both may need at once. The error names
    all places that fail.
    """
    faults = list[str]()
    for place in layout.places:
        block = layout.blocks[place.block]
        if (block.device, block.placement) != (place.device, place.placement) or place.offset % ALIGNMENT:
            faults.append(f"{place} must not begin at byte {place.offset} of {block.device}'s {block.placement} memory")
        if not 0 <= place.offset <= place.stop <= block.nbytes:
            faults.append(f"{place} ends at byte {place.stop} of a block of {block.nbytes}")
    faults = faults or [
        f"{one} and {other} share memory, but {one} is needed {one.needed}, and {other} {other.needed}"
        for one, other in itertools.combinations(layout.places, 2)
        if one.touches(other) and one.meets(other, layout.schedule)
    ]
    if faults:
        raise LayoutError(f"the layout is not safe: {'; '.join(faults)}")
