"""What a test asserts: fills leave the oracle's bytes, padding changes nothing, and graphs do what the step does."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from ...backends.base import Backend
from ...dataflow.axes import Sizes
from ...dataflow.capabilities import Lowering
from ...dataflow.errors import FailedCheckError, WrongBytesError
from ...dataflow.inputs import Inputs
from ...dataflow.sampling import NO_VALUES, Values, sampled_slots
from ..check.checks import Batches, CheckReport, check
from ..runner import Runner
from ..stage import NO_SIZES
from .ground import NO_RELATIONS, Ground, Lowered, Relations, differences, scribble, spoilt, untouched
from .strategies import TURNS, Turn, hypothesis, schedules_on, st

_SPREAD = 100


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
    tensors and lists. Hypothesis draws and shrinks them, under its own settings. Slots that no computed slot reads get
    any numbers; for the others see `values` of `slotgraph.testing.batches`.

    Args:
        inputs: The declaration.
        max_sizes: The largest sizes of varying axes, by default 8, and the sizes of fixed ones, by default 3.
        backend: Where it is filled, by name or as an instance.
        lowerings: By default all that the backend has.
        values: What slots hold, see `slotgraph.testing.batches`.
        settings: What `when=` of slots refers to.
        relations: Axes that follow from others, as {TOKENS: BATCH * 4}.
        least: The fewest rows on an axis.
        max_examples: For each lowering. By default that of Hypothesis's profile.

    Raises:
        WrongBytesError: An AssertionError, which names lowering, step, slot and row.
    """
    ground, own = Ground.of(inputs, backend, max_sizes, settings, relations), hypothesis.settings()
    slots = ground.declaration.slots
    read = {need for slot in slots.values() if (made := slot.computes()) is not None for need in made.needs}
    free = {name for name, slot in sampled_slots(ground.declaration) if name not in read and slot.limit is None}
    drawn = schedules_on(ground, {**dict.fromkeys(free, _noise), **values}, least, TURNS)

    @hypothesis.settings(
        own,
        deadline=None,
        max_examples=max_examples or own.max_examples,
        phases=[phase for phase in own.phases if phase is not hypothesis.Phase.explain],  # the message does
        suppress_health_check={
            *own.suppress_health_check,
            hypothesis.HealthCheck.too_slow,
        },  # of a device's first calls
    )
    @hypothesis.given(schedule=drawn, seed=st.integers(0, 1 << 30))
    def fills(lowering: Lowering, schedule: list[Turn], seed: int) -> None:
        _play(ground, lowering, schedule, seed)

    for lowering in lowerings or ground.backend.capabilities.lowerings:
        fills(lowering)


def _noise(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random numbers over a small range, zeros as rare as any other; of a dtype without signs, none below zero."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, device="cpu", generator=generator).bool()
    low = -_SPREAD if dtype.is_signed else 0
    return torch.randint(low, _SPREAD, shape, device="cpu", generator=generator).to(dtype)


def _play(ground: Ground, lowering: Lowering, schedule: list[Turn], seed: int) -> None:
    """Fill two sets of buffers with the same bytes, by a lowering and by the oracle, step after step, and compare.

    After each step the slots that a step may write hold anything.
    """
    mine, right = Lowered(ground, lowering, [turn.padded for turn in schedule], seed), spoilt(ground, seed)
    declaration = ground.declaration
    for number, turn in enumerate(schedule, 1):
        batch, side = turn.sample.batch, turn.sample.side
        with torch.no_grad():
            ready = mine.fill(mine.filling(turn.padded, turn.absent), batch, side, ground.live(turn.live), turn.absent)
            wanted = ground.oracle(right, batch, side, turn.live, turn.padded)
            ground.backend.synchronize()
            faults = [*differences(ready.views, wanted, declaration.slots, turn.live), *untouched(mine.buffers, right)]
            for buffers in (mine.buffers, right):
                scribble(buffers, turn.padded, torch.Generator().manual_seed(seed))
        if faults:
            step = f"step {number} of {len(schedule)}, {turn!r}"
            raise WrongBytesError(f"{declaration.name} filled by {lowering!r}, {step}: {faults[0]}")


def assert_padding_independent(
    runner: Runner[Any],
    batches: Batches | None = None,
    *,
    values: Values = NO_VALUES,
    state: Iterable[torch.Tensor] | None = None,
    rounds: int = 1,
    seed: int = 0,
) -> CheckReport:
    """Replay with poison in every tail: live outputs must be the same, bit for bit, whatever padded rows hold.

    Args:
        runner: A captured runner.
        batches: Batches, or a function of rows and a generator. By default they are drawn.
        values: For batches that are drawn.
        state: Tensors that the step changes beside its slots. By default they are found.
        rounds: Batches of a random size for each bucket.
        seed: Where random batches begin.

    Returns:
        The report.

    Raises:
        FailedCheckError: An AssertionError, which names the slot through which a difference came.
    """
    return _assert(runner, {"poison"}, batches, values=values, state=state, rounds=rounds, seed=seed)


def assert_parity(
    runner: Runner[Any],
    batches: Batches | None = None,
    *,
    values: Values = NO_VALUES,
    state: Iterable[torch.Tensor] | None = None,
    rounds: int = 1,
    seed: int = 0,
) -> CheckReport:
    """Run batches through the graphs, and by the step as it is written: all buckets, and all captured patterns.

    Arguments as for `assert_padding_independent`.

    Raises:
        FailedCheckError: An AssertionError, which names the slot or row.
    """
    return _assert(runner, {"parity"}, batches, values=values, state=state, rounds=rounds, seed=seed)


def _assert(runner: Runner[Any], only: Collection[str], batches: Batches | None, **options: Any) -> CheckReport:
    report = check(runner, batches, only=only, progress=False, **options)
    if not report.ok:
        raise FailedCheckError(str(report))
    return report
