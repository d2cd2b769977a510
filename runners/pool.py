"""Pools: input memory that several runners share, each in its phase."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeAlias, final

import attrs
import torch

from ..dataflow import log
from ..dataflow.axes import Sizes, extent
from ..dataflow.buffers import Bound, Buffers, BufferTurn, Exclusive, Ledger, SharedMemory, carve, check_bindings
from ..dataflow.capabilities import resolve_dtype
from ..dataflow.errors import ConfigError
from ..dataflow.sharing import Carry, Layout, Member, Schedule, lay_out
from .config import check_slots, checked, checked_by_slot, checked_names
from .running import Unique
from .stage import Stage, V


@attrs.frozen(eq=False)
class Phase:
    """One phase of a pool, as a runner is given it: `phase=pool["verify"]`.

    kept: slots of that runner whose bytes must hold from step to step.
    """

    pool: "InputPool"
    name: str
    kept: frozenset[str] = frozenset()

    def keeping(self, *slots: str) -> "Phase":
        """The phase for a runner of which some slots are never shared: a producer writes only what changed in them."""
        return attrs.evolve(self, kept=self.kept.union(checked_names("keeping", slots)))


@attrs.frozen
class Chain:
    """In a tensor's place among those to adopt: so many parts one behind the other, of which the slot is part 0."""

    parts: int


Bindings: TypeAlias = Mapping[str, "Bound | Chain"]


class Seat(Generic[V]):
    """Where a runner's buffers come from: memory of its own, or its pool's.

    runner: the runner's name. shares: whether they may come from the pool. name: the runner's among the members.
    layout: of the memory that it shares; None where it has its own. parents: all parts of chained slots,
    [parts, capacity...], once there are buffers; the slot is part 0.
    """

    def __init__(
        self,
        runner: str,
        stage: Stage[V],
        capacity: Sizes,
        bind: Bindings,
        phase: Phase | None,
        *,
        sharing: bool | None,
    ) -> None:
        self.runner, self.stage, self.capacity, self.phase = runner, stage, capacity, phase
        bind = checked_by_slot("bind", bind, "tensors")
        if phase is not None:
            expected = "a phase of a pool, such as pool['decode'], or None"
            check_slots("keeping", stage.declaration, checked("phase", expected, phase, Phase).kept)
        self.bind = {name: bound for name, bound in bind.items() if not isinstance(bound, Chain)}
        self.chained = {name: bound.parts for name, bound in bind.items() if isinstance(bound, Chain)}
        self.parents: dict[str, torch.Tensor] = {}
        capabilities = stage.backend.capabilities
        self.shares = capabilities.pools_inputs if sharing is None else sharing
        self.name = ""
        self.layout: Layout | None = None
        self._made: Buffers | None = None
        if phase is not None:
            check_bindings(stage.declaration, capacity, capabilities, stage.backend.empty, self.bind)
            phase.pool.join(self, phase)

    def buffers(self) -> Buffers:
        """The buffers, each with its initial value. A pool that was not sealed is sealed now."""
        if self.phase is not None:
            if self.shares:
                self.phase.pool.seal()
            self.phase.pool.check_carried(self, self.phase)
        return self.allocate() if self._made is None else self._made

    def allocate(self, shared: SharedMemory | None = None) -> Buffers:
        """Allocate what the pool does not give, and write all initial values."""
        declaration, backend = self.stage.declaration, self.stage.backend
        given = {} if shared is None else shared.tensors
        for name, parts in self.chained.items():
            slot = declaration.slots[name]
            shape, dtype = (parts, *extent(slot.shape, self.capacity)), resolve_dtype(slot.dtype, backend.capabilities)
            self.parents[name] = given[name] if name in given else backend.empty(shape, dtype, slot.placement)
        with torch.inference_mode(mode=False), torch.no_grad():
            first = {name: parent[0] for name, parent in self.parents.items()}
            own = {name: Exclusive(part) for name, part in first.items()}
            shared = shared and attrs.evolve(shared, tensors={**given, **first})
            self._made = self.stage.allocate(self.capacity, {**self.bind, **own}, shared)
            self._made.beside = tuple(parent[1:] for parent in self.parents.values())
            for parent in self.parents.values():
                parent[1:].copy_(parent[0])
        return self._made

    def member(self, phase: Phase) -> Member:
        """What the layout of the pool's memory must know of the runner."""
        return Member(
            name=self.name,
            phase=phase.name,
            declaration=self.stage.declaration,
            capacity=self.capacity,
            capabilities=self.stage.backend.capabilities,
            device=str(self.stage.backend.device),
            bound=self.bind,
            chained=self.chained,
            kept=phase.kept,
            shares=self.shares,
        )


@final
class InputPool(Unique):
    """Memory that runners share for their inputs, as far as their phases prove that they may.

    A phase begins with the first write to an input of one of its runners, by a fill or a producer, and ends when the
    step is done and its outputs have been read. Runners of one phase share nothing with one another. A runner joins by
    `phase=pool["verify"]`. The memory is laid out when the first of them needs it. A runner that joins later has memory
    of its own, and so has one whose backend pools no inputs, unless it is given `sharing=True`.

    Args:
        order: Phases that come one after the other, then from the first again.
        overlaps: Pairs of phases of which one may begin before the other has ended.
        anytime: Phases that keep to no order.

    Raises:
        ConfigError: The phases make no schedule.
    """

    def __init__(self, *order: str, overlaps: Iterable[tuple[str, str]] = (), anytime: Iterable[str] = ()) -> None:
        self.schedule = Schedule(order, overlaps, anytime)
        self.layout: Layout | None = None
        self._carries: list[tuple[str, str, str, str | None]] = []
        self._seats: list[tuple[Seat[Any], Phase]] = []
        self._apart: set[str] = set()
        self._readers: set[tuple[str, str]] = set()

    def __getitem__(self, phase: str) -> Phase:
        """One of its phases, to be given to a runner. ConfigError for an unknown one."""
        if phase not in self.schedule.phases:
            raise ConfigError(
                f"this pool has no phase {phase!r}: its phases are {', '.join(map(repr, self.schedule.phases))}"
            )
        return Phase(self, phase)

    def carry(self, slot: str, writer: str, reader: str, *, into: str | None = None) -> None:
        """Have a slot's value last from one phase to a later one, in the memory of both runners' slots.

        What one step leaves in an output or another slot is then where the next one reads it: a batch that brings it as
        a source brings it in place, and nothing is copied.

        Args:
            slot: The slot of the runner that writes the value.
            writer: That runner's phase.
            reader: The phase of the runner that reads it.
            into: The reader's slot, where it has another name.

        Raises:
            ConfigError: A phase is unknown, or the memory is laid out already.
        """
        if self.layout is not None:
            raise ConfigError(f"slot {slot!r} cannot be carried any more: the pool's memory is laid out; say so before")
        self._carries.append((slot, self[writer].name, self[reader].name, into))

    def join(self, seat: Seat[Any], phase: Phase) -> None:
        """Take a runner in, or tell it that it comes too late."""
        if self.layout is not None:
            log.info("joined_late", runner=seat.runner, phase=phase.name)
        elif seat.shares:
            self._seats.append((seat, phase))
        else:
            self._apart.add(phase.name)

    def seal(self) -> Layout:
        """Lay out and allocate the memory of all runners that have joined so far, unless that was done before."""
        if self.layout is None:
            members, counted = list[Member](), Counter[str]()
            for seat, phase in self._seats:
                counted[phase.name] += 1
                count = counted[phase.name]  # a phase's second runner is "verify 2"
                seat.name = phase.name if count == 1 else f"{phase.name} {count}"
                members.append(seat.member(phase))
            carries = [*self._between(members)]
            layout = lay_out(members, self.schedule, carries)
            seats = [seat for seat, _ in self._seats]
            for seat, shared in zip(seats, _allocated(layout, seats), strict=True):
                seat.allocate(shared)
                seat.layout = layout
            self.layout, self._seats, self._readers = layout, [], {carry.ends[1] for carry in carries}
            log.info("sealed", runners=[one.name for one in members], nbytes=layout.nbytes, saved=layout.saved)
        return self.layout

    def _between(self, members: Sequence[Member]) -> Iterator[Carry]:
        """Values that carry over between members. What goes to or from a runner with its own memory is copied."""
        for slot, writer, reader, into in self._carries:
            if self._apart.isdisjoint((writer, reader)):
                yield Carry(slot, _only(writer, slot, members), _only(reader, into or slot, members), into)

    def check_carried(self, seat: Seat[Any], phase: Phase) -> None:
        """ConfigError where a value is to be carried to a slot that shares nothing, and that no batch brings either."""
        slots = seat.stage.declaration.slots
        for slot, writer, reader, into in self._carries:
            name = into or slot
            if phase.name != reader or name not in slots or slots[name].reads(name):
                continue
            if (seat.name, name) not in self._readers:
                raise ConfigError(
                    f"slot {slot!r} of phase {writer!r} would never get to slot {name!r} of {seat.runner} in "
                    f"{reader!r}, which no batch brings: one of both has memory of its own; share, or declare it copied"
                )


def _only(phase: str, slot: str, members: Sequence[Member]) -> str:
    """The one member of a phase that has a slot. ConfigError where there is none, or more."""
    found = [one.name for one in members if one.phase == phase and slot in one.declaration.slots]
    if len(found) != 1:
        what = "none of its runners has that slot" if not found else f"{', '.join(found)} have that slot"
        raise ConfigError(f"carry of slot {slot!r}: expected one runner of phase {phase!r} with that slot, but {what}")
    return found[0]


def _allocated(layout: Layout, seats: Sequence[Seat[Any]]) -> Iterator[SharedMemory]:
    """Allocate what was laid out, and give each seat its part of it."""
    backends = {str(seat.stage.backend.device): seat.stage.backend for seat in seats}
    with torch.inference_mode(mode=False):
        blocks = [backends[one.device].empty((one.nbytes,), torch.uint8, one.placement) for one in layout.blocks]
        tensors = [carve(blocks[place.block], place.offset, place.shape, place.dtype) for place in layout.places]
    ledger, turns = Ledger(), {seat.name: BufferTurn() for seat in seats}
    for name, turn in turns.items():
        places = [place for place in layout.places if place.member == name]
        sharing = {place: layout.shared_with(name, place.slot) for place in places}
        others = {other.member for touching in sharing.values() for other in touching}
        turn.neighbours = tuple(turns[other] for other in sorted(others))
        turn.overwriters = {
            place.slot: tuple({turns[one.member]: None for one in touching if one.allocation != place.allocation})
            for place, touching in sharing.items()
        }
        mine = {place.slot: one for place, one in zip(layout.places, tensors, strict=True) if place.member == name}
        yield SharedMemory(mine, ledger, turn)
