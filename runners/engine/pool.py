"""Pools: input memory that several runners share, each in its own phase."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import attrs
import torch

from ...backends.base import Backend
from ...dataflow import log
from ...dataflow.axes import Sizes
from ...dataflow.buffers import Bound, Buffers, BufferUse, SharedMemory, carve, check_bindings
from ...dataflow.errors import ConfigError, did_you_mean
from ...dataflow.fill.tails import CleanTails
from ...dataflow.guard import outside_inference
from .config import checked_names
from .current import Unique
from .sharing import Layout, PooledSlot, Schedule, lay_out, pooled_slots
from .stage import Stage


@attrs.frozen(eq=False)
class Phase:
    """One phase of a pool, `phase=pool["verify"]`.

    Attributes:
        pool: The pool.
        name: The phase's name.
        kept: Slots of a runner whose bytes must last from step to step.
        member: The runner's name in the pool, or empty if it has memory of its own.
    """

    pool: "InputPool"
    name: str
    kept: frozenset[str] = frozenset()
    member: str = ""

    def keeping(self, *slots: str) -> "Phase":
        """Return the phase for a runner that never shares these slots: their producer writes only changed rows."""
        return attrs.evolve(self, kept=self.kept.union(checked_names("keeping", slots)))

    @property
    def layout(self) -> Layout | None:
        """The layout of the memory that the runner shares, if it shares any."""
        return self.pool.layout if self.member else None


@final
class InputPool(Unique):
    """Input memory that runners share where their phases prove that it is safe.

    A phase begins with the first write to an input of one of its runners, by a fill or a producer. It ends when the
    step is done and its outputs have been read. Runners of one phase share nothing with one another. A runner joins by
    `phase=pool["verify"]`. The memory is laid out when the first runner needs it. A runner has memory of its own if it
    joins later, or if its backend pools no inputs, unless it is given `sharing=True`.

    Args:
        order: Phases that come one after the other, then from the first again.
        overlaps: Pairs of phases of which one may begin before the other has ended.
        anytime: Phases that may come at any time.

    Attributes:
        layout: Where each slot lies, and `layout.why(runner, slot)`. None before the first runner needs its memory.

    Raises:
        ConfigError: The phases are no valid schedule.
    """

    def __init__(self, *order: str, overlaps: Iterable[tuple[str, str]] = (), anytime: Iterable[str] = ()) -> None:
        self.schedule = Schedule(order, overlaps, anytime)
        self.layout: Layout | None = None
        self._slots: list[PooledSlot] = []
        self._backends: dict[str, Backend] = {}  # by device
        self._allocations: dict[str, Callable[[SharedMemory], Buffers]] = {}  # by member, until the pool is sealed
        self._buffers: dict[str, Buffers] = {}  # by member, until `take`

    def __getitem__(self, phase: str) -> Phase:
        """Return one of the pool's phases, for a runner. Raise ConfigError for an unknown one."""
        if phase not in self.schedule.phases:
            raise ConfigError(
                f"this pool has no phase {phase!r}: its phases are {', '.join(map(repr, self.schedule.phases))}"
                f"{did_you_mean(phase, self.schedule.phases)}"
            )
        return Phase(self, phase)

    def join(
        self,
        phase: Phase,
        runner: str,
        stage: Stage[Any],
        capacity: Sizes,
        bind: Mapping[str, Bound],
        allocate: Callable[..., Buffers],
        *,
        sharing: bool | None,
    ) -> Phase:
        """Let a runner join in a phase, and return the phase with the runner's name in the pool.

        Args:
            phase: The phase that the runner was given.
            runner: The runner's kind, for the log.
            stage: Its declaration and backend.
            capacity: The largest size of each axis.
            bind: Tensors to adopt, by slot.
            allocate: Makes its buffers. Its argument has the shared memory of slots.
            sharing: Whether it shares memory. None leaves it to the backend.
        """
        declaration = stage.declaration
        backend = stage.backend
        capabilities = backend.capabilities
        device = str(backend.device)
        declaration.check_names("keeping", phase.kept)
        check_bindings(declaration, capacity, capabilities, backend.empty, bind)
        if not (capabilities.pools_inputs if sharing is None else sharing):
            return phase
        if self.layout is not None:
            log.info("joined_late", runner=runner, phase=phase.name)
            return phase
        member = phase.name
        number = 2
        while member in self._allocations:
            member, number = f"{phase.name} {number}", number + 1  # such as "verify 2"
        self._backends[device] = backend
        self._allocations[member] = allocate
        self._slots += pooled_slots(
            declaration, capacity, capabilities, member, phase.name, device, bound=bind, kept=phase.kept
        )
        return attrs.evolve(phase, member=member)

    def take(self, member: str) -> Buffers:
        """Return a runner's buffers, each with its initial value.

        It may be called once. The first call seals the pool.
        """
        self.seal()
        return self._buffers.pop(member)

    def seal(self) -> Layout:
        """Lay out and allocate the memory of all runners that have joined, unless that was done before.

        Return the layout.
        """
        if self.layout is not None:
            return self.layout
        layout = lay_out(self._slots, self.schedule)
        with outside_inference():
            blocks = [
                self._backends[block.device].empty((block.nbytes,), torch.uint8, block.placement)
                for block in layout.blocks
            ]
            tensors: dict[str, dict[str, torch.Tensor]] = {member: {} for member in self._allocations}
            for place in layout.places:
                block = blocks[place.block]
                tensors[place.member][place.slot] = carve(block, place.offset, place.shape, place.dtype)
        clean = CleanTails()
        uses = {member: BufferUse() for member in self._allocations}
        for member, allocate in self._allocations.items():
            use = uses[member]
            use.overwriters = {
                mine.slot: tuple(dict.fromkeys(uses[other.member] for other in layout.shared_with(member, mine.slot)))
                for mine in layout.places
                if mine.member == member
            }
            use.neighbours = tuple(dict.fromkeys(itertools.chain(*use.overwriters.values())))
            self._buffers[member] = allocate(SharedMemory(tensors[member], clean, use))
        log.info("sealed", runners=[*uses], nbytes=layout.nbytes, saved=layout.saved)
        self.layout = layout
        self._slots = []
        self._backends = {}
        self._allocations = {}
        return layout
