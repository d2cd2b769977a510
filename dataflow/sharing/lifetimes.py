"""Lifetimes: the phases of a loop, the runners that are used in them, and when each slot's bytes must hold."""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch

from ..axes import Sizes, extent
from ..buffers import Room
from ..capabilities import HOST, Capabilities, Placement, resolve_dtype
from ..declaration import Declaration
from ..errors import ConfigError
from ..slots import Constant, Output, Slot, Staged
from ..tails import Keep, Once, Pad

Pair = tuple[str, str]


def _listed(value: Any, expected: str = "phases: expected names") -> tuple[Any, ...]:
    """The items of a list; a text alone would be a list of letters."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        message = f"{expected} in a list or tuple, got {value!r}"
        raise ConfigError(message)
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
    overlaps: tuple[Pair, ...] = attrs.field(default=(), converter=_pairs)
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
            message = f"no schedule: {'; '.join(dict.fromkeys(faults))}"
            raise ConfigError(message)

    @property
    def phases(self) -> tuple[str, ...]:
        """All phases: those in order, then those at any time."""
        return (*self.order, *self.anytime)

    def meet(self, first: str, second: str) -> bool:
        """Whether two phases may be in use at once; a phase meets itself."""
        free = first in self.anytime or second in self.anytime
        return first == second or free or (first, second) in self.overlaps or (second, first) in self.overlaps

    def span(self, first: str, last: str) -> tuple[str, ...]:
        """The phases from one to another in order, both included, past the end of a round where need be."""
        start, count = self.order.index(first), len(self.order)
        steps = (self.order.index(last) - start) % count
        return tuple(self.order[(start + step) % count] for step in range(steps + 1))

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
class LiveSlot:
    """A slot of a member, what its memory must be, and when its bytes must hold.

    Args:
        member: The member's name.
        phase: The phase that the member is used in.
        slot: The slot's name.
        device: The device that its memory belongs to.
        placement: Whether that is the device's own memory, or what the host has for it.
        shape: The slot's shape at full capacity. Of a chained slot: its parent's.
        dtype: The slot's dtype on that device.
        nbytes: Bytes, aligned.
        phases: The phases in which its bytes must hold, in the schedule's order.
        always: Whether they must hold in all phases and also between them.
        why: The reason for that, in words.
        allocation: A number that slots have in common which are one memory, because a value carries over.
    """

    member: str
    phase: str
    slot: str
    device: str
    placement: Placement
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    phases: tuple[str, ...]
    always: bool
    why: str
    allocation: int

    def meets(self, other: "LiveSlot", schedule: Schedule) -> bool:
        """Whether the bytes of both may have to hold at once."""
        return any(schedule.meet(mine, theirs) for mine in self.phases for theirs in other.phases)

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
        chained: By slot, the parts of its parent allocation, one behind the other. The slot itself is part 0.
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
    chained: Mapping[str, int] = MappingProxyType({})
    kept: Collection[str] = frozenset()
    shares: bool | None = None

    @property
    def pooled(self) -> bool:
        """Whether its slots may share."""
        return self.capabilities.pools_inputs if self.shares is None else self.shares

    def live_slot(self, name: str, schedule: Schedule, allocation: int) -> LiveSlot:
        """A slot by itself. A value that carries over makes it live longer. ConfigError for an unknown phase."""
        if self.phase not in schedule.phases:
            known = ", ".join(map(repr, schedule.phases)) or "none"
            message = f"member {self.name!r}: phase {self.phase!r} is not in the schedule: phases are {known}"
            raise ConfigError(message)
        slot, parts = self.declaration.slots[name], self.chained.get(name)
        part, dtype = extent(slot.shape, self.capacity), resolve_dtype(slot.dtype, self.capabilities)
        shape = part if parts is None else (parts, *part)
        why = lasting(slot, name, self.kept) if self.pooled else "its backend pools no inputs"
        return LiveSlot(
            member=self.name,
            phase=self.phase,
            slot=name,
            device=self.device,
            placement=slot.placement,
            shape=shape,
            dtype=dtype,
            nbytes=Room(name, shape, dtype, slot.placement).nbytes,
            phases=(self.phase,) if why is None else schedule.phases,
            always=why is not None,
            why=why or f"each step of {self.phase} writes it",
            allocation=allocation,
        )


def lasting(slot: Slot, name: str, kept: Collection[str] = ()) -> str | None:
    """Why a slot's bytes must hold beyond its runner's phase, or None where they need not.

    A kind of slot that is not known here is judged by what it says of itself, so that it is kept rather than not.
    """
    rule = slot.rule()
    reasons = {
        "a constant, which no step writes": is_constant(slot, name),
        "it is kept, because that was asked for": name in kept,
        "in host memory, where a fill may write what the device has yet to read": slot.placement == HOST,
        "its tail is set once": isinstance(rule, Once),
        "its tail is kept, and holds what the slot held before": isinstance(rule, Keep),
        "no fill writes all of it in each step": not _written(slot, name),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def is_constant(slot: Slot, name: str) -> bool:
    """Whether a slot's memory holds its initial value for good."""
    written = slot.rewritten or slot.restored or slot.reads(name) is not None or slot.computes() is not None
    return isinstance(slot, Constant) and slot.rule() is None and not written


def _written(slot: Slot, name: str) -> bool:
    """Whether each step, or a producer that the slot names, writes every row that the step reads."""
    if slot.computes() is not None:
        return True
    ruled = isinstance(slot.rule(), Pad) or not slot.varying
    return ruled if slot.reads(name) is not None else isinstance(slot, Output) or (isinstance(slot, Staged) and ruled)
