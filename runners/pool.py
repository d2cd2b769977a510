"""Pools: input memory that several runners share, each in its phase."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeAlias, final

import attrs
import torch

from ..dataflow import log
from ..dataflow.axes import Sizes, extent
from ..dataflow.binding import Bound, Exclusive, check_bindings
from ..dataflow.buffers import Buffers
from ..dataflow.errors import ConfigError
from ..dataflow.roles import resolve_dtype
from ..dataflow.sharing.layout import Layout, Place
from ..dataflow.sharing.lifetimes import Carry, Member
from ..dataflow.sharing.phases import Pair, Schedule
from ..dataflow.sharing.planner import lay_out
from ..dataflow.sharing.tenants import ALIKE, CARRIED
from ..dataflow.turns import Ledger, Tenancy, Turn
from ..dataflow.values import initial_value, write_all
from .arguments import check_slots, checked, checked_by_slot, checked_names
from .stage import Stage, V
from .unique import Unique


class Named(Protocol):
    """A runner, as far as its pool must know it."""

    name: str


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

    sharing: whether it may share them; None for what its backend's record says. parents: all parts of chained slots,
    [parts, capacity...], once there are buffers; the slot is part 0.
    """

    def __init__(
        self,
        runner: Named,
        stage: Stage[V],
        capacity: Sizes,
        bind: Bindings,
        phase: Phase | None,
        *,
        sharing: bool | None,
    ) -> None:
        self._runner = runner
        self.stage = stage
        self.capacity = capacity
        bind = checked_by_slot("bind", bind, "tensors")
        if phase is not None:
            expected = "a phase of a pool, such as pool['decode'], or None"
            check_slots("keeping", stage.declaration, checked("phase", expected, phase, Phase).kept)
        self.bind = {name: bound for name, bound in bind.items() if not isinstance(bound, Chain)}
        self.chained = {name: bound.parts for name, bound in bind.items() if isinstance(bound, Chain)}
        self.parents: dict[str, torch.Tensor] = {}
        self.phase = phase
        capabilities = stage.backend.capabilities
        self.shares = capabilities.pools_inputs if sharing is None else sharing
        self.tenancy: Tenancy | None = None
        self.name = ""
        self._made: Buffers | None = None
        if phase is not None:
            check_bindings(stage.declaration, capacity, capabilities, stage.backend.empty, self.bind)
            phase.pool.join(self)

    @property
    def runner(self) -> str:
        """The runner's name, in events."""
        return self._runner.name

    @property
    def phase_name(self) -> str:
        """The name of its phase; nothing where it has none."""
        return "" if self.phase is None else self.phase.name

    @property
    def layout(self) -> Layout | None:
        """The layout of the memory that it shares; None where it has its own."""
        return self.phase.pool.layout if self.phase is not None and self.tenancy is not None else None

    def buffers(self) -> Buffers:
        """The buffers, each with its initial value. A pool that was not sealed is sealed now."""
        if self.phase is not None and self.shares:
            self.phase.pool.seal()
        if self.phase is not None:
            self.phase.pool.check_carried(self)
        return self._allocated() if self._made is None else self._made

    def settle(self, tenancy: Tenancy) -> None:
        """Take what the pool gives, and write initial values there before anyone steps."""
        self.tenancy = tenancy
        self._made = self._allocated()

    def _allocated(self) -> Buffers:
        given = {} if self.tenancy is None else self.tenancy.tensors
        self.parents = {name: self._parent(name, parts, given) for name, parts in self.chained.items()}
        first = {name: parent[0] for name, parent in self.parents.items()}
        tenancy = self.tenancy and attrs.evolve(self.tenancy, tensors={**given, **first})
        own = {name: Exclusive(part) for name, part in first.items()}
        made = self.stage.allocate(self.capacity, {**self.bind, **own}, tenancy)
        made.beside = tuple(parent[1:] for parent in self.parents.values())
        return made

    def _parent(self, name: str, parts: int, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Memory for all parts of a slot, its pool's or new, each part with the slot's initial value."""
        slot, backend = self.stage.declaration.slots[name], self.stage.backend
        value = initial_value(name, slot, self.capacity, backend.capabilities)
        with torch.inference_mode(mode=False), torch.no_grad():
            shape, dtype = (parts, *extent(slot.shape, self.capacity)), resolve_dtype(slot.dtype, backend.capabilities)
            parent = given[name] if name in given else backend.empty(shape, dtype, slot.placement)
            for part in parent:
                write_all(part, value, f"slot {name!r}")
        return parent


@final
class InputPool(Unique):
    """Memory that runners share for their inputs, as far as their phases prove that they may.

    order: phases that come one after the other, then from the first again. overlaps: pairs of phases of which one may
    begin before the other has ended. anytime: phases that keep to no order. A phase begins with the first write to an
    input of one of its runners, by a fill or a producer, and ends when the step is done and its outputs have been read;
    runners of one phase share nothing with one another. A runner joins by `phase=pool["verify"]`. The memory is laid
    out when the first of them needs it; who joins later has memory of its own, and so has one whose backend pools no
    inputs, where it is not told `sharing=True`. Raises ConfigError for phases that are no schedule.
    """

    def __init__(self, *order: str, overlaps: Iterable[Pair] = (), anytime: Iterable[str] = ()) -> None:
        self.schedule = Schedule(order, overlaps, anytime)
        self.layout: Layout | None = None
        self._carries: list[tuple[str, str, str, str | None]] = []
        self._seats: list[Seat[Any]] = []
        self._apart: set[str] = set()

    def __getitem__(self, phase: str) -> Phase:
        """One of its phases, to be given to a runner. ConfigError for an unknown one."""
        if phase not in self.schedule.phases:
            message = f"this pool has no phase {phase!r}: its phases are {', '.join(map(repr, self.schedule.phases))}"
            raise ConfigError(message)
        return Phase(self, phase)

    def carry(self, slot: str, writer: str, reader: str, *, into: str | None = None) -> None:
        """Have a slot's value last from one phase to a later one, in the memory of both runners' slots.

        So what one step leaves in an output or another slot is where the next one reads it: a batch that brings it as
        a source brings it in place, and nothing is copied. into: the reader's slot, where its name is another.
        ConfigError for an unknown phase, or when the memory is laid out already.
        """
        if self.layout is not None:
            message = f"slot {slot!r} cannot be carried any more: the pool's memory is laid out; say so before"
            raise ConfigError(message)
        self._carries.append((slot, self[writer].name, self[reader].name, into))

    def join(self, seat: Seat[Any]) -> None:
        """Take a runner in, or tell it that it comes too late."""
        if self.layout is not None:
            log.info("joined_late", runner=seat.runner, phase=seat.phase_name)
        elif seat.shares:
            self._seats.append(seat)
        else:
            self._apart.add(seat.phase_name)

    def seal(self) -> Layout:
        """Lay out and allocate the memory of all runners that have joined so far, unless that was done before."""
        if self.layout is None:
            seats, self._seats = self._seats, []
            try:
                self.layout = self._sealed(seats)
            except BaseException:
                self._seats = seats
                raise
        return self.layout

    def _sealed(self, seats: list[Seat[Any]]) -> Layout:
        for number, seat in enumerate(seats):  # a phase's second runner is "verify 2"
            before = sum(other.phase_name == seat.phase_name for other in seats[:number])
            seat.name = f"{seat.phase_name} {before + 1}" if before else seat.phase_name
        members = {seat.name: _member(seat) for seat in seats}
        layout = lay_out([*members.values()], self.schedule, [*self._carried(members)])
        for seat, tenancy in zip(seats, _tenancies(layout, seats), strict=True):
            seat.settle(tenancy)
        log.info("sealed", runners=[*members], nbytes=layout.nbytes, saved=layout.saved)
        return layout

    def check_carried(self, seat: Seat[Any]) -> None:
        """ConfigError where a value is to be carried to a slot that shares nothing, and that no batch brings either."""
        slots = seat.stage.declaration.slots
        for slot, writer, reader, into in self._carries:
            name = into or slot
            if seat.phase is None or seat.phase.name != reader or name not in slots or slots[name].reads(name):
                continue
            if seat.layout is None or seat.layout.place(seat.name, name).tie != CARRIED:
                message = (
                    f"slot {slot!r} of phase {writer!r} would never get to slot {name!r} of {seat.runner} in "
                    f"{reader!r}, which no batch brings: one of both has memory of its own; share, or declare it copied"
                )
                raise ConfigError(message)

    def _carried(self, members: Mapping[str, Member]) -> Iterator[Carry]:
        """Values that carry over between members. One to or from a runner with memory of its own is copied, as ever."""
        for slot, writer, reader, into in self._carries:
            if self._apart.isdisjoint((writer, reader)):
                yield Carry(slot, _only(writer, slot, members), _only(reader, into or slot, members), into)


def _member(seat: Seat[Any]) -> Member:
    stage = seat.stage
    return Member(
        name=seat.name,
        phase=seat.phase_name,
        declaration=stage.declaration,
        capacity=seat.capacity,
        capabilities=stage.backend.capabilities,
        device=str(stage.backend.device),
        bound=seat.bind,
        chained=seat.chained,
        kept=seat.phase.kept if seat.phase is not None else frozenset(),
        shares=seat.shares,
    )


def _only(phase: str, slot: str, members: Mapping[str, Member]) -> str:
    """The one member of a phase that has a slot. ConfigError where there is none, or more."""
    found = [name for name, one in members.items() if one.phase == phase and slot in one.declaration.slots]
    if len(found) != 1:
        what = "none of its runners has that slot" if not found else f"{', '.join(found)} have that slot"
        message = f"carry of slot {slot!r}: expected one runner of phase {phase!r} with that slot, but {what}"
        raise ConfigError(message)
    return found[0]


def _tenancies(layout: Layout, seats: Sequence[Seat[Any]]) -> Iterator[Tenancy]:
    """Allocate what was laid out, and each seat's part of it."""
    backends = {str(seat.stage.backend.device): seat.stage.backend for seat in seats}
    with torch.inference_mode(mode=False):
        blocks = [
            backends[block.device].empty((block.nbytes,), torch.uint8, block.placement) for block in layout.blocks
        ]
        tensors = {
            seat.name: {place.slot: _carved(blocks[place.block], place) for place in layout.of(seat.name)}
            for seat in seats
        }
    ledger, turns = Ledger(), {seat.name: Turn() for seat in seats}
    for seat in seats:
        turn = turns[seat.name]
        turn.neighbours = tuple(turns[name] for name in sorted(layout.neighbours(seat.name) - {seat.name}))
        turn.overwriters = {
            place.slot: tuple(dict.fromkeys(turns[name] for name in _overwriters(layout, place)))
            for place in layout.of(seat.name)
        }
        yield Tenancy(tensors[seat.name], ledger, turn)


def _overwriters(layout: Layout, place: Place) -> Iterable[str]:
    """Members whose steps leave something else in the bytes of a slot than it holds."""
    others = layout.shared_with(place.member, place.slot)
    return (other.member for other in others if other.tenant != place.tenant or other.tie == ALIKE)


def _carved(block: torch.Tensor, place: Place) -> torch.Tensor:
    """A slot's part of a block."""
    used = math.prod(place.shape) * place.dtype.itemsize
    return block[place.offset : place.offset + used].view(place.dtype).view(place.shape)
