"""Every lowering of a declaration against the oracle, byte for byte, over random steps."""

from collections.abc import Sequence
from typing import final

import torch

from ...backends.base import Backend
from ...dataflow.axes import Sizes
from ...dataflow.bucket import Absent
from ...dataflow.capabilities import Lowering
from ...dataflow.errors import WrongBytesError
from ...dataflow.inputs import Inputs
from ...dataflow.oracle import fill_slot_by_slot
from ...dataflow.sampling import NO_VALUES, Values
from ..filler import Filler, Filling
from ..stage import NO_SIZES
from .bytes import differences, noise, scribble, spoil, untouched
from .drawing import hypothesis, st
from .ground import NO_RELATIONS, Ground, Relations, make_filling
from .strategies import TURNS, Turn, schedules_on

_CALM = [hypothesis.HealthCheck.too_slow]
"""Time says nothing where a device's first calls are slow."""


def assert_fill_equals_oracle(
    inputs: type[Inputs],
    max_sizes: Sizes = NO_SIZES,
    *,
    backend: str | Backend = "auto",
    lowerings: Sequence[Lowering] = (),
    values: Values = NO_VALUES,
    settings: object = None,
    relations: Relations = NO_RELATIONS,
    least: int = 1,
    max_examples: int | None = None,
) -> None:
    """Fill a declaration by every lowering that a backend has, and slot by slot; the bytes must be the same.

    Random steps follow one another over buffers full of random bytes: live and padded sizes, batches, absent slots,
    tensors and lists. Hypothesis draws and shrinks them; its settings hold, and `max_examples` where it is given. Slots
    that no computed slot reads get any numbers; for the others see `values` of `slotgraph.testing.batches`, as for all
    other options. Raises WrongBytesError, an AssertionError, which names lowering, step, slot and row.
    """
    ground = Ground.of(inputs, backend, max_sizes, settings, relations)
    capabilities = ground.backend.capabilities
    wild = {name: noise for name in ground.unread if ground.declaration.slots[name].limit is None}
    for lowering in lowerings or capabilities.lowerings:
        _hold(ground, lowering, {**wild, **values}, least, max_examples)


def _hold(ground: Ground, lowering: Lowering, values: Values, least: int, max_examples: int | None) -> None:
    """Hold one lowering to the oracle."""
    own = hypothesis.settings()

    @hypothesis.settings(
        own,
        deadline=None,
        max_examples=max_examples or own.max_examples,
        phases=[phase for phase in own.phases if phase is not hypothesis.Phase.explain],  # the message does
        suppress_health_check={*own.suppress_health_check, *_CALM},
    )
    @hypothesis.given(schedule=schedules_on(ground, values, least, TURNS), seed=st.integers(0, 1 << 30))
    def fills(schedule: list[Turn], seed: int) -> None:
        twins = Twins(ground, lowering, seed, [turn.padded for turn in schedule])
        for number, turn in enumerate(schedule, 1):
            twins.play(turn, f"step {number} of {len(schedule)}")

    fills()


@final
class Twins:
    """One declaration over two sets of buffers with the same bytes: one for a lowering, one for the oracle."""

    def __init__(self, ground: Ground, lowering: Lowering, seed: int, buckets: Sequence[Sizes]) -> None:
        self._ground, self._lowering = ground, lowering
        self._mine, self._right = (ground.stage.allocate(ground.most) for _ in range(2))
        for buffers in (self._mine, self._right):
            spoil(buffers, torch.Generator().manual_seed(seed))
        self._seed = seed
        self._filler = Filler(ground.stage, self._mine, lowering, list(buckets))
        self._fillings: dict[tuple[tuple[int, ...], Absent], Filling] = {}

    def play(self, turn: Turn, when: str) -> None:
        """One step of both, and what a model may do to slots after it. WrongBytesError where they differ."""
        ground, sample = self._ground, turn.sample
        filling, live = self._filling(turn), ground.live(turn.live)
        with torch.no_grad():
            ready = self._filler.fill(filling, sample.batch, live, turn.absent, sample.side, whole=False)
            if self._lowering != "slot_by_slot":  # which has done it all
                ready.compute_on_device(sample.batch)
            step, capabilities = ground.step(turn.live, turn.padded), ground.backend.capabilities
            right = fill_slot_by_slot(ground.declaration, self._right, capabilities, step, sample.batch, sample.side)
            ground.backend.synchronize()
            slots = ground.declaration.slots
            faults = [*differences(ready.views, right, slots, turn.live), *untouched(self._mine, self._right)]
            for buffers in (self._mine, self._right):
                scribble(buffers, turn.padded, torch.Generator().manual_seed(self._seed))
        if faults:
            message = f"{ground.declaration.name} filled by {self._lowering!r}, {when}, {turn!r}: {faults[0]}"
            raise WrongBytesError(message)

    def _filling(self, turn: Turn) -> Filling:
        """A bucket's fills, made once as a runner does."""
        key = self._ground.live(turn.padded), turn.absent
        if key not in self._fillings:
            self._fillings[key] = make_filling(self._filler, turn.padded, turn.absent)
        return self._fillings[key]
