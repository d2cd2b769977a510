"""Pools: input memory that several runners share, each in its phase."""

from collections.abc import Iterable, Mapping
from typing import Any, Generic, final

import attrs
import torch

from ..dataflow import log
from ..dataflow.axes import Sizes
from ..dataflow.buffers import Bound, Buffers, BufferTurn, SharedMemory, carve, check_bindings
from ..dataflow.errors import ConfigError, did_you_mean
from ..dataflow.fill.tails import CleanTails
from ..dataflow.guard import outside_inference
from .config import checked, checked_keys, checked_names
from .running import Unique
from .sharing import Layout, Member, Schedule, lay_out
from .stage import Stage, V


@attrs.frozen(eq=False)
class Phase:
    """One phase of a pool, `phase=pool["verify"]`; kept: slots of a runner whose bytes must hold from step to step."""

    pool: "InputPool"
    name: str
    kept: frozenset[str] = frozenset()

    def keeping(self, *slots: str) -> "Phase":
        """The phase for a runner of which some slots are never shared: a producer writes only what changed in them."""
        return attrs.evolve(self, kept=self.kept.union(checked_names("keeping", slots)))


@attrs.define(eq=False)
class Seat(Generic[V]):
    """Where a runner's buffers come from: memory of its own, or its pool's. name: the runner's among the members.

    sharing: whether they may come from the pool; None for what the backend says. layout: of memory that it shares.
    """

    runner: str
    stage: Stage[V]
    capacity: Sizes
    bind: Mapping[str, Bound]
    phase: Phase | None
    sharing: bool | None
    name: str = ""
    layout: Layout | None = None
    _made: Buffers | None = None

    def __attrs_post_init__(self) -> None:
        """Check what was given, and join the pool."""
        self.bind = checked_keys("bind", "a mapping of slots' names to tensors", self.bind, str)
        if self.phase is not None:
            stage, expected = self.stage, "a phase of a pool, such as pool['decode'], or None"
            stage.declaration.check_names("keeping", checked("phase", expected, self.phase, Phase).kept)
            backend = stage.backend
            check_bindings(stage.declaration, self.capacity, backend.capabilities, backend.empty, self.bind)
            if self.shares:
                self.phase.pool.join(self, self.phase)

    @property
    def shares(self) -> bool:
        """Whether the buffers may come from the pool."""
        return self.stage.backend.capabilities.pools_inputs if self.sharing is None else self.sharing

    def buffers(self) -> Buffers:
        """The buffers, each with its initial value. A pool that was not sealed is sealed now."""
        if self.phase is not None and self.shares:
            self.phase.pool.seal()
        return self.allocate() if self._made is None else self._made

    def allocate(self, shared: SharedMemory | None = None) -> Buffers:
        """Allocate what the pool does not give, and write all initial values."""
        self._made = self.stage.allocate(self.capacity, self.bind, shared)
        return self._made


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
        self._joined: list[tuple[Seat[Any], Member]] = []

    def __getitem__(self, phase: str) -> Phase:
        """One of its phases, to be given to a runner. ConfigError for an unknown one."""
        if phase not in self.schedule.phases:
            raise ConfigError(
                f"this pool has no phase {phase!r}: its phases are {', '.join(map(repr, self.schedule.phases))}"
                f"{did_you_mean(phase, self.schedule.phases)}"
            )
        return Phase(self, phase)

    def join(self, seat: Seat[Any], phase: Phase) -> None:
        """Take a runner in, or tell it that it comes too late."""
        if self.layout is not None:
            log.info("joined_late", runner=seat.runner, phase=phase.name)
            return
        stage, before = seat.stage, sum(member.phase == phase.name for _, member in self._joined)
        seat.name = f"{phase.name} {before + 1}" if before else phase.name  # such as "verify 2"
        member = Member(
            name=seat.name,
            phase=phase.name,
            declaration=stage.declaration,
            capacity=seat.capacity,
            capabilities=stage.backend.capabilities,
            device=str(stage.backend.device),
            bound=seat.bind,
            kept=phase.kept,
            shares=seat.sharing,
        )
        self._joined.append((seat, member))

    def seal(self) -> Layout:
        """Lay out and allocate the memory of all runners that have joined so far, unless that was done before."""
        if self.layout is None:
            seats = [seat for seat, _ in self._joined]
            layout = lay_out([member for _, member in self._joined], self.schedule)
            backends = {str(seat.stage.backend.device): seat.stage.backend for seat in seats}
            with outside_inference():
                blocks = [
                    backends[one.device].empty((one.nbytes,), torch.uint8, one.placement) for one in layout.blocks
                ]
                memory = {one: carve(blocks[one.block], one.offset, one.shape, one.dtype) for one in layout.places}
            clean, turns = CleanTails(), {seat.name: BufferTurn() for seat in seats}
            for seat in seats:
                turn, mine = turns[seat.name], [place for place in layout.places if place.member == seat.name]
                sharing = {place.slot: layout.shared_with(seat.name, place.slot) for place in mine}
                others = {other.member for touching in sharing.values() for other in touching}
                turn.neighbours = tuple(turns[other] for other in sorted(others))
                turn.overwriters = {
                    slot: tuple({turns[one.member]: None for one in touching}) for slot, touching in sharing.items()
                }
                seat.allocate(SharedMemory({place.slot: memory[place] for place in mine}, clean, turn))
                seat.layout = layout
            self.layout, self._joined = layout, []
            log.info("sealed", runners=[seat.name for seat in seats], nbytes=layout.nbytes, saved=layout.saved)
        return self.layout
