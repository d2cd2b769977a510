"""Sharing: memory of several runners, laid out by their slots' lifetimes, and proven; a pure function of both.

A lifetime is made of the phases of a loop in which a slot's bytes must hold.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch

from ..dataflow.axes import Sizes, extent
from ..dataflow.buffers import ALIGNMENT, aligned
from ..dataflow.capabilities import HOST, Capabilities, Placement, resolve_dtype
from ..dataflow.declaration import Declaration
from ..dataflow.errors import ConfigError, LayoutError
from ..dataflow.slots import Constant, Output, Slot, Staged
from ..dataflow.tails import Keep, Once, Pad

Key = tuple[str, str]
"""A member's name and a slot's."""


def _listed(value: Any, expected: str = "phases: expected names") -> tuple[Any, ...]:
    """The items of a list; a text alone would be a list of letters."""
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
        anytime: Phases that keep to no order, and so may overlap with all others.

    Raises:
        ConfigError: A name is unknown, empty, or given twice.
    """

    order: tuple[str, ...] = attrs.field(converter=_listed)
    overlaps: tuple[Key, ...] = attrs.field(default=(), converter=_pairs)
    anytime: tuple[str, ...] = attrs.field(default=(), converter=_listed)

    def __attrs_post_init__(self) -> None:
        """Refuse names that make no schedule."""
        phases, known = self.phases, ", ".join(map(repr, self.phases))
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
        """Whether two phases may be in use at once; a phase meets itself."""
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
        """The round, and what may overlap."""
        parts = [" -> ".join(self.order)] if self.order else []
        parts += [f"{first} and {second} may overlap" for first, second in self.overlaps]
        parts += [f"{name} at any time" for name in self.anytime]
        return "; ".join(parts)


@attrs.frozen(kw_only=True)
class Place:
    """A slot of a member: what its memory must be, when its bytes must hold, and where it lies.

    placement: the device's own memory, or what the host has for it. shape: at full capacity. always: whether its bytes
    must hold in all phases and also between them, and not in the member's own phase alone; `why` says the reason.
    block: the index of its block in the layout. offset: bytes from the start of the block.
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
    block: int = 0
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes, aligned."""
        return aligned(self.shape, self.dtype)

    @property
    def stop(self) -> int:
        """One past its last byte."""
        return self.offset + self.nbytes

    @property
    def needed(self) -> str:
        """When its bytes must hold, in words."""
        return "always" if self.always else f"in {self.phase}"

    def touches(self, other: "Place") -> bool:
        """Whether two places have a byte in common."""
        return self.block == other.block and self.offset < other.stop and other.offset < self.stop

    def meets(self, other: "Place", schedule: Schedule) -> bool:
        """Whether the bytes of both may have to hold at once."""
        return self.always or other.always or schedule.meet(self.phase, other.phase)

    def __str__(self) -> str:
        """The slot as one writes it: draft.hidden."""
        return f"{self.member}.{self.slot}"


@attrs.frozen(kw_only=True, eq=False)
class Member:
    """A runner that shares memory with others, as far as the layout must know it.

    Args:
        name: The runner's name among the members.
        phase: The phase that the runner is used in.
        declaration: The runner's slots, under its settings.
        capacity: The size of every axis that buffers are made for.
        capabilities: The record of the runner's backend.
        device: The device that its device slots lie on.
        bound: Slots whose memory was handed in. They get no place.
        kept: Slots whose bytes must hold from step to step: their producer writes only what changed.
        shares: Whether the runner shares at all. None leaves it to the backend's record.
    """

    name: str
    phase: str
    declaration: Declaration = attrs.field(repr=lambda declaration: declaration.name)
    capacity: Sizes
    capabilities: Capabilities = attrs.field(repr=False)
    device: str = "cpu"
    bound: Collection[str] = frozenset()
    kept: Collection[str] = frozenset()
    shares: bool | None = None

    @property
    def pooled(self) -> bool:
        """Whether its slots may share."""
        return self.capabilities.pools_inputs if self.shares is None else self.shares

    def lifetimes(self) -> Iterator[Place]:
        """Its slots that need a place, each by itself."""
        for name, slot in self.declaration.slots.items():
            if name not in self.bound:
                why = lasting(slot, name, self.kept) if self.pooled else "its backend pools no inputs"
                yield Place(
                    member=self.name,
                    phase=self.phase,
                    slot=name,
                    device=self.device,
                    placement=slot.placement,
                    shape=extent(slot.shape, self.capacity),
                    dtype=resolve_dtype(slot.dtype, self.capabilities),
                    always=why is not None,
                    why=why or f"each step of {self.phase} writes it",
                )


def lasting(slot: Slot, name: str, kept: Collection[str]) -> str | None:
    """Why a slot's bytes must hold beyond its runner's phase, or None; they do of a kind that says too little."""
    rule, read, computed = slot.rule(), slot.reads(name) is not None, slot.computes()
    written = slot.rewritten or slot.restored or read or computed
    ruled = isinstance(rule, Pad) or not slot.varying
    reasons = {
        "a constant, which no step writes": isinstance(slot, Constant) and rule is None and not written,
        "it is kept, because that was asked for": name in kept,
        "in host memory, where a fill may write what the device has yet to read": slot.placement == HOST,
        "its tail is set once": isinstance(rule, Once),
        "its tail is kept, and holds what the slot held before": isinstance(rule, Keep),
        "no fill writes all of it in each step": not (
            computed or (ruled if read else isinstance(slot, Output) or (isinstance(slot, Staged) and ruled))
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
    """Where every slot of every member lies.

    Args:
        schedule: The phases, and which of them may overlap.
        blocks: The allocations.
        places: A place for each slot, in the order of members and of their declarations.
        peak: The most bytes that ever have to hold at once. No layout is smaller.
    """

    schedule: Schedule
    blocks: tuple[Block, ...]
    places: tuple[Place, ...]
    peak: int

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def apart(self) -> int:
        """Bytes that slots take where none shares."""
        return sum(place.nbytes for place in self.places)

    @property
    def saved(self) -> int:
        """Bytes saved by sharing."""
        return self.apart - self.nbytes

    def place(self, member: str, slot: str) -> Place:
        """Where a slot lies. ConfigError where it has no place here."""
        for place in self.places:
            if (place.member, place.slot) == (member, slot):
                return place
        raise ConfigError(
            f"the layout has no place for slot {slot!r} of member {member!r}: it is bound, or of no member"
        )

    def shared_with(self, member: str, slot: str) -> tuple[Place, ...]:
        """The places that have a byte in common with a slot's."""
        mine = self.place(member, slot)
        return tuple(place for place in self.places if place is not mine and place.touches(mine))

    def why(self, member: str, slot: str) -> str:
        """Why a slot lies where it does: what makes its lifetime, and who shares its memory."""
        mine, shared = self.place(member, slot), self.shared_with(member, slot)
        return f"{mine.why}; shares with {', '.join(map(str, shared)) or 'none'}"

    def __str__(self) -> str:
        """Each block with the slots in it, a line each, and why they lie there."""
        lines = [f"phases: {self.schedule}"]
        for one in sorted(self.places, key=lambda one: (one.block, one.offset, -one.nbytes, str(one))):
            where, why = f"block {one.block}, byte {one.offset:,}", self.why(one.member, one.slot)
            lines.append(f"{where}: {one}, {one.nbytes:,} bytes, needed {one.needed}: {why}")
        saved = f"{self.nbytes:,} bytes, {self.saved:,} fewer than {self.apart:,} without sharing"
        return "\n".join([*lines, f"{saved}; {self.peak:,} must hold at once"])


def lay_out(members: Sequence[Member], schedule: Schedule) -> Layout:
    """Lay out all slots of all members, so that no two share a byte that both may need at once, and prove it.

    Args:
        members: The runners.
        schedule: The phases that they are used in.

    Raises:
        ConfigError: Names or phases do not fit together.
        LayoutError: The proof fails.
    """
    names = [member.name for member in members]
    if len({*names}) < len(names):
        raise ConfigError(f"two members have one name, of {', '.join(names)}: give one another name")
    for one in members:
        if one.phase not in schedule.phases:
            known = ", ".join(map(repr, schedule.phases)) or "none"
            raise ConfigError(f"member {one.name!r}: phase {one.phase!r} is not in the schedule: phases are {known}")
    slots = [place for member in members for place in member.lifetimes()]
    homes: set[tuple[str, Placement]] = {(one.device, one.placement) for one in slots}
    blocks, spots, peak = list[Block](), dict[Place, Place](), 0
    for device, placement in sorted(homes):
        arenas = all(member.capabilities.arenas for member in members if member.device == device)
        mine = [one for one in slots if (one.device, one.placement) == (device, placement)]
        mine.sort(key=lambda one: (not one.always, -one.nbytes, str(one)))
        placed = _first_fit(mine, schedule, len(blocks), arenas=arenas)
        spots |= zip(mine, placed, strict=True)
        for block in sorted({one.block for one in placed}):
            nbytes = max(one.stop for one in placed if one.block == block)
            blocks.append(Block(device=device, placement=placement, nbytes=nbytes))
        peak += max(sum(one.nbytes for one in mine if one.always or one.phase in some) for some in schedule.at_once)
    layout = Layout(schedule=schedule, blocks=tuple(blocks), places=tuple(spots[one] for one in slots), peak=peak)
    check_layout(layout)
    return layout


def _first_fit(slots: Sequence[Place], schedule: Schedule, block: int, *, arenas: bool) -> list[Place]:
    """Each slot at the lowest place that is free while it is needed, the largest first. block: the first one's index.

    arenas: it holds all slots, at any offset; else all slots of a block begin where it does, the largest first.
    """
    taken, starts = [one.nbytes if arenas else 1 for one in slots], list[int]()
    for one, length in zip(slots, taken, strict=True):
        placed, start = zip(starts, taken, slots, strict=False), 0
        for at, size in sorted((at, size) for at, size, other in placed if one.meets(other, schedule)):
            if at - start >= length:
                break
            start = max(start, at + size)
        starts.append(start)
    spots = [(block, start) if arenas else (block + start, 0) for start in starts]
    return [attrs.evolve(one, block=at, offset=start) for one, (at, start) in zip(slots, spots, strict=True)]


def check_layout(layout: Layout) -> None:
    """Prove that each place lies in a block of its kind, and that no two share a byte that both may need at once.

    LayoutError names all places for which that does not hold.
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
