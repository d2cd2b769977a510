"""Steps that follow one another on several ranks, each with requests of its own: one bucket for all in each step."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slotgraph import BATCH, Axis, DecodeRunner, computed
from tests.ranks.processes import Processes, raised
from tests.ranks.stepping import soon
from tests.runners.steps.counting import LOWERINGS, Counting, batch, count, counting, made

DP = Axis("DP", fixed=True)


def together(view: Counting) -> torch.Tensor:
    """As `count`; fails where ranks run other buckets, whose rows gloo does not add up."""
    dist.all_reduce(view.ids.clone())
    return count(view)


def own_requests(rank: int, backend: str, lowering: str, ahead: int, seed: int) -> dict[str, Any]:
    """A loop of requests at random on each rank, all tokens looked at; what it counted."""
    draw, since = random.Random(seed * 2 + rank), dict[int, tuple[int, int]]()
    runner = counting(backend, together, ranks=soon(), lowering=lowering)
    begun = None if rank == seed % 2 else batch(1, 2, 3)
    since.update({} if begun is None else {key: (0, key + 1) for key in range(3)})
    number, new, idle = 0, 10, 0
    for step in runner.steps(begun, keys=[*since], ahead=ahead):
        assert step.number == number
        number, idle = number + 1, idle + (not step.keys)
        assert [key for key in step.keys if key in since] == [key for key, _ in step.tokens()]
        assert step.tokens() == [(key, made(since[key][1], step.number - since[key][0])) for key, _ in step.tokens()]
        going = step.number < 40 + 15 * rank  # then each rank runs out of requests
        if draw.random() < 0.3 or not going:
            gone = draw.sample([*since], draw.randint(0, max(0, len(since) - 1)) if going else len(since))
            step.leave(gone)
            since = {key: one for key, one in since.items() if key not in gone}
        if going and draw.random() < 0.3 and len(since) < 8:
            joins = range(new, new := new + draw.randint(1, 8 - len(since)))
            step.join(batch(*joins), joins)
            since |= {key: (step.lands, key) for key in joins}
    assert not since
    return {"steps": number, "idle": idle, "counted": {*runner.stats()["ahead"]}}


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_each_rank_steps_with_its_own_requests(two: Processes, backend: str, lowering: str, ahead: int) -> None:
    """All ranks run each step in one bucket, also without a request, until none has any."""
    for seed in range(3):
        first, second = two.run(own_requests, backend, lowering, ahead, seed)
        assert first["steps"] == second["steps"] >= 56
        assert first["idle"] + second["idle"] > 10
        assert (
            first["counted"] == second["counted"] == {"held: the lowering is fused" if lowering == "fused" else "ahead"}
        )


class Sized(Counting):
    sizes: torch.Tensor = computed(lambda ranks: list(ranks.live(BATCH)), shape=DP, dtype=torch.int64)


def sized(rank: int, backend: str, equal: bool) -> tuple[list[int], list[list[int]]]:
    """How many requests each step had here, and what its slot said of all ranks."""
    given: dict[str, Any] = {"buckets": (2, 4, 8), "sizes": {DP: 2}, "output_rows": None, "ranks": soon(equal=equal)}
    runner = DecodeRunner(Sized, lambda view: view.sizes.clone(), backend=backend, **given)
    runner.capture()
    own, all_ranks, live = list[int](), list[list[int]](), [-1]
    for step in runner.steps(batch(1), keys=live, ahead=1):
        own.append(len(step.keys))
        all_ranks.append(step.outputs.tolist())
        if step.number < 4 + 2 * rank * (not equal):
            step.join(batch(5), [step.number])
            live.append(step.number)
        else:
            step.leave(live[:2])
            del live[:2]
    return own, all_ranks


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_a_slot_has_the_sizes_of_all_ranks(two: Processes, backend: str, equal: bool) -> None:
    """A slot has the sizes that all ranks bring to the very step."""
    (own, told), (others, told_others) = two.run(sized, backend, equal)
    assert told == told_others == [list(pair) for pair in zip(own, others, strict=True)]
    assert max(others) > (max(own) if not equal else 4)


def failing(rank: int, how: str) -> str:
    """What a rank's loop raises where rank 1 does otherwise than rank 0."""
    calls = list[int]()

    def step(view: Counting) -> torch.Tensor:
        calls.append(1)
        assert not (rank and how == "raises" and len(calls) == 12)
        return count(view)

    runner, other = counting("cpu", step, ranks=soon(timeout=2.0)), rank > 0
    calls.clear()

    def loop() -> None:
        begun = batch(*range(9 if other and how == "refused" else 2))
        for step in runner.steps(begun, ahead=1):
            if step.number == 5:
                if other and how == "left":
                    break
                step.join(batch(4), [4, 5] if other and how == "wrong" else [4])
            if step.number == 50:
                break

    return raised(loop)


def test_a_rank_that_does_otherwise_is_named(two: Processes) -> None:
    """Every rank gets an error that says who did what."""
    why = "steps() needs a graph, and this batch has none: 9 rows are more than the largest bucket, 8"
    assert two.run(failing, "refused") == [
        f"RankError: rank 1 refused its batch, so that no rank starts the loop: {why}",
        f"BatchError: {why}",
    ]
    left = "RankError: rank 1 left its loop of steps() of runner 1 (DecodeRunner of Counting)"
    for how, told, own in (
        ("left", "", ""),
        ("wrong", "", "BatchError: 2 keys for 1 requests that join"),
        ("raises", ": ReplayError: the step raised AssertionError", "ReplayError: the step raised AssertionError"),
    ):
        first, second = two.run(failing, how)
        assert first.startswith(left + told), (how, first)
        assert second.startswith(own), (how, second)
