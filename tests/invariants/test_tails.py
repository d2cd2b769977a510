"""What lies behind live rows, and what is absent: the same after whatever came before, by each lowering."""

import random
from typing import Any

import pytest
import torch

from slotgraph.backends import Backend
from slotgraph.errors import BatchError, ComputeError
from slotgraph.testing import assert_fill_equals_oracle
from tests.invariants.steps import (
    BEYOND,
    BUCKETS,
    EITHER,
    Quick,
    Slots,
    Values,
    apart,
    breaking,
    drawn,
    each_lowering,
    neighbours,
    on,
    runner_of,
    wrong,
)

ADOPTED = {"ids": torch.int64, "weights": torch.float32, "here": torch.int64}

ACTS = ("step", "step", "halves", "fill", "refused", "broken", "written", "produced")
"""The last only after a while: no fill believes tails once a producer has the slots."""


def after_anything(
    backend: Backend, runners: list[Any], owned: Values, seed: int, inputs: type[Quick] = Slots, *, few: bool = False
) -> set[str]:
    """Slots that were wrong in a step, among other acts. few: without the optional slot fills are exact, no graph's."""
    draw, found = random.Random(seed), set[str]()
    acts = ("written", "turned", *ACTS) if owned else ACTS
    for number in range(40):
        runner, rows = draw.choice(runners), draw.choice((0, 1, 3, 3, 3, 5, 6 if owned else BEYOND))
        values = drawn(rows, number, absent=draw.random() < 0.3, inputs=inputs)
        batch: dict[str, Any] = on(backend, values)
        buckets = () if few and "extra" not in values else BUCKETS
        match draw.choice(acts[: len(acts) - (number < 20)]):
            case "step":
                found |= {*wrong(runner(batch), values, buckets)}
            case "halves":
                found |= {*wrong(runner.replay(runner.fill(batch)), values, buckets)}
            case "fill":
                runner.fill(batch)
            case "refused":
                with pytest.raises(BatchError):
                    runner({**batch, "weights": batch["ids"]})
            case "produced":
                runner(batch)
                runner.inputs(6).weights.fill_(77)
                found |= {*wrong(runner(batch), values, buckets)}
            case "broken":
                with pytest.raises(ComputeError), breaking():
                    runner(batch)
            case "turned" if "weights" in owned:
                owned["weights"].t_()  # the tensor is its owner's, and so is its shape
            case _:
                for tensor in owned.values():
                    tensor.fill_(draw.randint(100, 200))
    return found


@pytest.mark.parametrize("adopted", [False, True], ids=["own", "adopted"])
def test_tails_hold_their_values(backend: Backend, *, adopted: bool) -> None:
    """Whatever came before: live rows are the batch's, the others the tail's, also where their owner writes them."""
    shapes = {name: (6, 2) if name == "weights" else (6,) for name in ADOPTED if adopted}
    owned = on(backend, {name: torch.zeros(shape, dtype=ADOPTED[name]) for name, shape in shapes.items()})
    if backend.device.type == "cuda":  # whose graphs copy from pinned memory alone
        owned = {name: one.pin_memory() if one.is_cpu else one for name, one in owned.items()}
    for seed in range(2):
        runners = [runner_of(backend, lowering, bind=owned) for lowering in backend.capabilities.lowerings]
        assert after_anything(backend, runners, owned, seed) == set()


@each_lowering
@pytest.mark.parametrize("inputs", EITHER)
def test_tails_after_exact_fills(backend: Backend, lowering: str, inputs: type[Quick]) -> None:
    """Whatever steps without a graph came between, in the memory that graphs read."""
    runner = runner_of(backend, lowering, inputs, absent=[])
    for rows in (3, 5, 3):  # the second one eagerly, with more rows
        values = drawn(rows, rows, absent=rows == 5, inputs=inputs)
        assert [*wrong(runner(on(backend, values)), values, () if "extra" not in values else BUCKETS)] == []
    for seed in range(2):
        runner = runner_of(backend, lowering, inputs, absent=[])
        assert after_anything(backend, [runner], {}, seed, inputs, few=True) == set()


@each_lowering
def test_tails_after_neighbours(backend: Backend, lowering: str) -> None:
    """Whatever runners of the same pool came between."""
    for seed in range(2):
        assert after_anything(backend, neighbours(backend, lowering, 3), {}, seed, Quick) == set()


def unlike_oracle(mine: Any, right: Any, backend: Backend) -> set[str]:
    """Slots of which a fill, padded or exact, left other bytes than one slot by slot."""
    found = set[str]()
    for number, rows in enumerate((6, 1, 0, BEYOND, 2, 5, 3, BEYOND - 1, 4, 1)):
        batch = on(backend, drawn(rows, number, absent=number % 4 == 1))
        found |= {*apart(mine(batch), right(batch))}
        found |= {*apart(mine.replay(mine.fill(batch)), right(batch))}
    return found


def test_lowerings_leave_the_same_bytes(backend: Backend) -> None:
    """As slot by slot: by steps of runners, and by fills over buffers of random bytes."""
    right = runner_of(backend, "slot_by_slot")
    for lowering in backend.capabilities.lowerings:
        assert unlike_oracle(runner_of(backend, lowering), right, backend) == set()
    assert_fill_equals_oracle(Slots, backend=backend, max_examples=6)


def shown_where_absent(backend: Backend, lowering: str, missing: dict[str, None]) -> list[torch.Tensor]:
    """What steps without the optional slot saw of it, each after a step with it."""
    runner, seen = runner_of(backend, lowering), []
    for number, rows in enumerate((3, 6, BEYOND, 1)):
        present, absent = (drawn(rows, number + part, absent=bool(part)) for part in range(2))
        here, gone = on(backend, present), on(backend, absent)
        for act in (runner, lambda batch, runner=runner: runner.replay(runner.fill(batch))):
            assert wrong(act(here), present) == []
            seen += [act({**gone, **missing})["extra"]]
    return [one for one in seen if one is not None]


@pytest.mark.parametrize("absent", [{}, {"extra": None}], ids=["no key", "None"])
def test_absent_slots_are_none(backend: Backend, absent: dict[str, None]) -> None:
    """Never the rows of the step before, in graphs and eagerly."""
    for lowering in backend.capabilities.lowerings:
        assert shown_where_absent(backend, lowering, absent) == []
