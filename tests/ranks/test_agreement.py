"""Steps that ranks run together: one path and one bucket for all, agreed on before; and their collectives in graphs."""

import os
import random
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from slotgraph.backends import choose
from slotgraph.dataflow.errors import BatchError, ConfigError, RankError
from tests.ranks import stepping
from tests.ranks.processes import Processes, all_gather, raised
from tests.ranks.stepping import OVER, Counted, Kept, Numbered, runner_on, soon
from tests.runners.models import decoder

THOROUGH: Final = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_the_largest_bucket_is_everyones(two: Processes, backend: str) -> None:
    """Also an idle rank's; each rank is told who needed it, or who runs eagerly, and why."""
    assert two.run(stepping.make, backend) == [stepping.BUCKETS] * 2
    for rows, bucket, rank in (([1, 7], 8, 1), ([3, 2], 4, 0), ([0, 5], 8, 1), ([0, 0], 2, 0), ([2, 2], 2, 0)):
        reason = f"bucket {bucket} fits the {rows[rank]} rows of rank {rank}, the most of all"
        assert two.run(stepping.run, rows, 7) == [(True, "graph", bucket, reason, rank)] * 2
    reason = "rank 1: 9 rows are more than the largest bucket, 8"
    assert two.run(stepping.run, [2, 9], 3) == [(True, "eager", None, reason, 1)] * 2


def many_steps(rank: int, steps: int, ahead: float, over: str) -> tuple[int, int, int]:
    """Random sizes, the same for all who draw them, some told while the step before runs.

    How many steps were right, how many went eagerly, and how many exchanges there were.
    """
    stepping.make(rank, over=over)
    draw, right, eager = random.Random(3), 0, 0
    before = Kept.runner.stats()["ranks"]["exchanges"]
    for seed in range(steps):
        rows = [draw.choice([0, draw.randint(1, 8), draw.randint(1, 8), draw.randint(1, 9)]) for _ in range(4)]
        if draw.random() < ahead:
            Kept.runner.agree_ahead(stepping.batch_of(rows[rank], seed + rank))
        found = stepping.run(rank, rows, seed)
        wanted = next((size for size in stepping.BUCKETS if size >= max(rows)), None)
        right += found[0] and found[1:3] == ("eager" if wanted is None else "graph", wanted)
        eager += wanted is None
    return right, eager, Kept.runner.stats()["ranks"]["exchanges"] - before


@pytest.mark.parametrize(("ahead", "over"), [(0, OVER[0]), *((0.4, over) for over in OVER)])
def test_no_rank_waits_for_one_that_does_something_else(four: Processes, ahead: float, over: str) -> None:
    """No rank waits for another that does something else; each step is right everywhere, and one exchange."""
    steps = 600 if THOROUGH else 300
    (right, eager, exchanges), *others = four.run(many_steps, steps, ahead, over)
    assert right == exchanges == steps
    assert 0 < eager < steps // 2
    assert others == [(right, eager, exchanges)] * 3


def idles(rank: int) -> tuple[list[Any], dict[str, Any], dict[int, Any]]:
    """Rank 1 has nothing to do in some steps, one of which is too large for graphs; at last nobody has."""
    stepping.make(rank)
    shapes = []
    for rows in (3, 8, 9, 1, 0):
        outputs = Kept.runner(stepping.batch_of(rows, rows)) if rank == 0 and rows else Kept.runner.idle()
        shapes.append(None if outputs is None else tuple(outputs.shape))
    stats = Kept.runner.stats()
    ranks: Any = stats["ranks"]
    return shapes, ranks, {size: one["steps"] for size, one in stats["buckets"].items()}


def test_an_idle_rank_takes_part_without_a_batch(two: Processes) -> None:
    """It takes part without a batch, with no rows, in the others' buckets; books on both sides say who forced what."""
    (first, ranks, buckets), (second, others, same) = two.run(idles)
    assert first == [(3, 2), (8, 2), (9, 2), (1, 2), None]
    assert second == [(0, 2)] * 4 + [None]
    assert buckets == same == {2: 1, 4: 1, 8: 1}
    assert ranks["forced"] == others["forced"] == {0: {"fits": 3, "too_large": 1}}
    assert (ranks["rank"], ranks["size"], others["rank"]) == (0, 2, 1)


def idles_with(rank: int) -> list[str]:
    """Rank 1 is idle with no batch, with one that has rows, and with one that has none; rank 0 has a batch."""
    runner, batch = runner_on(soon(), lambda view: view.ids * view.number, Numbered), stepping.batch_of(3, 1)
    if rank == 0:
        return [raised(runner, {**batch, "factor": 2}) for _ in range(3)]
    empty = {**stepping.batch_of(0, 1), "factor": 2}
    return [raised(runner.idle), raised(runner.idle, {**batch, "factor": 2}), raised(runner.idle, empty)]


def test_an_idle_ranks_batch_has_no_rows(two: Processes) -> None:
    """Has no rows, and is to be given where the declaration does not tell how one looks; the others are told."""
    first, second = two.run(idles_with)
    assert second[0].startswith(f"{ConfigError.__name__}: idle() cannot make a batch without rows, so give it one")
    assert second[1].startswith(f"{BatchError.__name__}: an idle rank's batch has no rows, and this one has 3")
    assert [one.startswith("RankError: rank 1 refused its batch") for one in first] == [True, True, False]
    assert (first[2], second[2]) == ("", "")


def another_batch(rank: int, over: str) -> list[str]:
    """Rank 1 brings another batch than it told; rank 0 steps with what it was told."""
    runner = runner_on(soon(over), lambda view: view.ids * 2)
    runner.agree_ahead(stepping.batch_of(3, 1))
    with pytest.raises(RankError, match="has not been run"):
        runner.agree_ahead(stepping.batch_of(3, 1))
    found = [raised(runner, stepping.batch_of(3 + rank, 1)), raised(runner, stepping.batch_of(2, 1))]
    runner(stepping.batch_of(2, 1))
    return found


@pytest.mark.parametrize("over", OVER)
def test_another_batch_than_was_agreed_on_is_refused(two: Processes, over: str) -> None:
    """It is told where it is noticed, and in the next call everywhere; the one after it is right."""
    (first, after), (second, also) = two.run(another_batch, over)
    assert first == ""
    told = "RankError: this is not the batch that was agreed on ahead, with sizes (3, 3, 3); it has sizes (4, 4, 4)"
    assert second.startswith(told)
    assert after == also
    assert after.startswith(f"RankError: rank 1 failed in a step of runner 1 (DecodeRunner of Counted): {told}")


def test_a_runner_without_ranks_agrees_with_itself() -> None:
    """A runner without ranks agrees with itself: whatever is asked of ranks does nothing."""
    runner = decoder(Counted, lambda view: view.ids, buckets=[2])
    runner.agree_ahead(stepping.batch_of(2, 3))
    assert runner.idle() is None
    assert runner.idle(stepping.batch_of(0, 3)) is None
    with pytest.raises(BatchError, match="this one has 2: call the runner with it"):
        runner.idle(stepping.batch_of(2, 3))
    assert runner.agreed is None
    assert runner.stats()["ranks"] == {"rank": 0, "size": 1, "quiet": True, "over": None, "exchanges": 0, "forced": {}}
    assert runner(stepping.batch_of(2, 3)).shape[0] == 2
    runner.wait()


ROWS = 5


def collectives(values: torch.Tensor) -> torch.Tensor:
    """Collectives in place, waited for later, into a list and into one tensor; a broadcast; sends both ways."""
    rank, own, most, first = dist.get_rank(), values * 2, values * 3, values * 7
    work = dist.all_reduce(most, op=dist.ReduceOp.MAX, async_op=True)
    dist.all_reduce(own)
    assert work is not None
    work.wait()
    parts, out, theirs = [torch.empty_like(values) for _ in range(2)], torch.empty(2 * ROWS), torch.empty_like(values)
    dist.all_gather(parts, values * 3)
    all_gather(out, values * 5)
    dist.broadcast(first, 0)
    for sends in (rank == 0, rank == 1):
        if sends:
            dist.send(own + rank, 1 - rank)
        else:
            dist.recv(theirs, 1 - rank)
    return torch.stack([own, most, *parts, *out.chunk(2), first, theirs])


def replayed(rank: int) -> tuple[list[bool], str]:
    """Whether replays over other values are what the step gives when it is run; what a functional one raises."""
    values, draw, found = torch.zeros(ROWS), torch.Generator().manual_seed(rank + 1), list[bool]()
    backend, everyone = choose("cpu-capture"), dist.distributed_c10d._get_default_group()
    graph = backend.capture(lambda: collectives(values))
    for _ in range(4):
        values.copy_(torch.rand(ROWS, generator=draw))
        graph.replay()
        outputs = graph.outputs.clone()
        found.append(torch.equal(outputs, collectives(values)))
    return found, raised(backend.capture, lambda: functional.all_reduce(values, "sum", everyone) + 1)


def test_replays_repeat_collectives(two: Processes) -> None:
    """With what other ranks have by then; functional ones are refused, with what to use instead."""
    for right, told in two.run(replayed):
        assert right == [True] * 4
        assert told.startswith("CaptureError: ")
        assert "cannot use _c10d_functional::all_reduce, a functional collective" in told
        assert "use the one of torch.distributed that writes into a tensor of yours" in told
