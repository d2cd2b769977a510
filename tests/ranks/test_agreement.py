"""Steps that ranks run together: one path and one bucket for all, and every failure told by its rank."""

import os
import random
from typing import Any, Final

import pytest
import torch

from slotgraph import BATCH, DecodeRunner, EagerRunner
from slotgraph.dataflow.errors import RankError
from slotgraph.runners.ranks.group import Ranks
from slotgraph.runners.standard.axes import DP
from tests.ranks import stepping
from tests.ranks.processes import Processes
from tests.ranks.stepping import Gathered, Held
from tests.runners import prefilled

THOROUGH: Final = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_the_largest_bucket_is_everyones(two: Processes, backend: str) -> None:
    """Also an idle rank's; each rank is told who needed it."""
    assert two.run(stepping.make, backend) == [stepping.BUCKETS] * 2
    for rows, bucket, rank in (([1, 7], 8, 1), ([3, 2], 4, 0), ([0, 5], 8, 1), ([0, 0], 2, 0), ([2, 2], 2, 0)):
        reason = f"bucket {bucket} fits the {rows[rank]} rows of rank {rank}, the most of all"
        assert two.run(stepping.run, rows, 7) == [(True, "graph", bucket, reason, rank)] * 2


def test_one_runs_eagerly_and_all_do(two: Processes) -> None:
    """With the reason of the rank that must."""
    two.run(stepping.make)
    reason = "rank 1: 9 rows are more than the largest bucket, 8"
    assert two.run(stepping.run, [2, 9], 3) == [(True, "eager", None, reason, 1)] * 2


def test_random_schedules(four: Processes) -> None:
    """Any sizes by rank, idle ranks among them, give the same bucket everywhere, and right outputs and counts."""
    four.run(stepping.make)
    draw = random.Random(11)  # noqa: S311 - sizes, no secrets
    for seed in range(150):
        rows = [draw.choice([0, 0, draw.randint(1, 4), draw.randint(1, 8), draw.randint(1, 10)]) for _ in range(4)]
        found = four.run(stepping.run, rows, seed)
        assert len(set(found)) == 1
        right, path, bucket, _, _ = found[0]
        assert right
        wanted = next((size for size in stepping.BUCKETS if size >= max(rows)), None)
        assert (path, bucket) == (("eager", None) if wanted is None else ("graph", wanted))


def counted(rank: int, kind: str) -> list[list[int]]:
    """What a step sees of the others' tokens, by step: in graphs, and eagerly."""
    ranks = Ranks(timeout=20.0)
    given: dict[str, Any] = {"backend": "cpu", "sizes": {DP: ranks.size}, "ranks": ranks}
    if kind == "eager":
        runner: Any = EagerRunner(Gathered, lambda view: view.global_num_tokens.clone(), **given)
    else:
        runner = DecodeRunner(
            Gathered,
            lambda view: view.global_num_tokens.clone(),
            buckets=[4, 8],
            output_rows=None,
            progress=False,
            **given,
        )
        runner.capture()
    return [runner(stepping.batch_of((step * 5 + rank * 3) % 10, step)).tolist() for step in range(30)]


@pytest.mark.parametrize("kind", ["eager", "decode"])
def test_counts_of_all_ranks(four: Processes, kind: str) -> None:
    """A computed slot that asks for `ranks` has each one's live tokens, of this very step, without another exchange."""
    wanted = [[(step * 5 + rank * 3) % 10 for rank in range(4)] for step in range(30)]
    assert four.run(counted, kind) == [wanted] * 4


def equal_ranks(rank: int) -> tuple[int, list[list[int]]]:
    """Steps of ranks that are known to get the same batches, and of one rank alone: the exchanges that they made."""
    del rank
    ranks = Ranks(equal=True)
    runner = stepping.runner_of_counts(ranks, 4)
    before = ranks.exchanges
    seen = [runner(stepping.batch_of(rows, rows)).tolist() for rows in (3, 1, 9, 4)]
    return ranks.exchanges - before, seen


def test_equal_ranks_exchange_nothing(two: Processes) -> None:
    """Nor is anything asked: what one brings, all bring."""
    assert two.run(equal_ranks) == [(0, [[3, 3], [1, 1], [9, 9], [4, 4]])] * 2


def many_steps(rank: int, steps: int) -> tuple[int, int]:
    """Random sizes, the same for all who draw them: how many steps were right, and how many went eagerly."""
    stepping.make(rank)
    draw, right, eager = random.Random(3), 0, 0  # noqa: S311 - sizes, no secrets
    for seed in range(steps):
        rows = [draw.choice([0, draw.randint(1, 8), draw.randint(1, 8), draw.randint(1, 9)]) for _ in range(4)]
        found = stepping.run(rank, rows, seed)
        wanted = next((size for size in stepping.BUCKETS if size >= max(rows)), None)
        right += found[0] and found[2] == wanted
        eager += found[1] == "eager"
    return right, eager


def test_many_steps(four: Processes) -> None:
    """No rank waits for another that does something else; each step is right everywhere."""
    steps = 2000 if THOROUGH else 500
    (right, eager), *others = four.run(many_steps, steps)
    assert right == steps
    assert 0 < eager < steps // 2
    assert others == [(right, eager)] * 3


def idles(rank: int) -> tuple[list[tuple[int, ...]], dict[str, Any], dict[int, Any]]:
    """Rank 1 has nothing to do in any step, one of which is too large for graphs."""
    stepping.make(rank)
    shapes = []
    for rows in (3, 8, 9, 1):
        outputs = Held.runner(stepping.batch_of(rows, rows)) if rank == 0 else Held.runner.idle()
        shapes.append(tuple(outputs.shape))
    stats = Held.runner.stats()
    ranks: Any = stats["ranks"]
    return shapes, ranks, {size: one["steps"] for size, one in stats["buckets"].items()}


def test_an_idle_rank(two: Processes) -> None:
    """It takes part without a batch, with no rows, in the others' buckets; books on both sides say who forced what."""
    (first, ranks, buckets), (second, others, same) = two.run(idles)
    assert first == [(3, 2), (8, 2), (9, 2), (1, 2)]
    assert second == [(0, 2)] * 4
    assert buckets == same == {2: 1, 4: 1, 8: 1}
    assert ranks["forced"] == others["forced"] == {0: {"fits": 3, "too_large": 1}}
    assert (ranks["rank"], ranks["size"], others["rank"]) == (0, 2, 1)
    assert ranks["exchanges"] == others["exchanges"] > 4


def idle_everywhere(rank: int) -> tuple[list[bool], int, list[tuple[int, ...]], tuple[int, ...]]:
    """Steps of two ranks, some of them without a request on any; in the last one rank 0 has a batch of no rows."""
    ran: list[int] = []

    def counted(view: stepping.Counted) -> torch.Tensor:
        ran.append(1)
        return stepping.step(view)

    runner = Held.runner = stepping.runner_over(counted)
    runner.capture()
    before, live, nothing = len(ran), list[tuple[int, ...]](), list[bool]()
    ranks = runner.parts.stage.declaration.ranks
    for rows in ((0, 0), (3, 0), (0, 0), (0, 5)):
        outputs = runner(stepping.batch_of(rows[rank], rank)) if rows[rank] else runner.idle()
        nothing.append(outputs is None)
        live.append(ranks.live(BATCH))
    steps = len(ran) - before
    outputs = runner(stepping.batch_of(0, 1)) if rank == 0 else runner.idle()
    return nothing, steps, live, tuple(outputs.shape)


def test_where_all_are_idle(two: Processes) -> None:
    """No rank runs the step, and all know it; a batch without rows is one, whose step all run."""
    first, second = two.run(idle_everywhere)
    assert first == second == ([True, False, True, False], 2, [(0, 0), (3, 0), (0, 0), (0, 5)], (0, 2))


PREFILLS: Final[tuple[list[int], ...]] = ([3], [2, 4, 1], [], [16], [9, 8], [1] * 6, [5, 5])


def prefills(rank: int, kind: str) -> list[tuple[bool, str, int | None, int | None]]:
    """Prefill runners on two ranks, each with requests of its own, held to an eager runner on this rank alone."""
    models = [prefilled.Model(named=kind == "piecewise") for _ in range(2)]
    runner = prefilled.runner_of(kind, models[0], "cpu", ranks=Ranks(timeout=20.0))
    runner.capture()
    twin = EagerRunner(prefilled.Prefill, models[1], backend="cpu")
    found: list[tuple[bool, str, int | None, int | None]] = []
    for number, _ in enumerate(PREFILLS):
        lengths = PREFILLS[(number + 3 * rank) % len(PREFILLS)]
        batch = prefilled.batch_of(lengths, number, "cpu")
        right = torch.equal(runner(batch), twin(batch))
        assert runner.agreed is not None
        found.append((right, runner.agreed.path, runner.agreed.bucket, runner.agreed.rank))
    return found


@pytest.mark.parametrize("kind", prefilled.KINDS)
def test_prefill(two: Processes, kind: str) -> None:
    """By tokens; a rank whose requests are too many, or too long together, has all run eagerly."""
    first, second = two.run(prefills, kind)
    assert first == second
    assert all(right for right, *_ in first)
    needed = [[sum(PREFILLS[(n + 3 * rank) % 7]) for rank in range(2)] for n in range(7)]
    many = [[len(PREFILLS[(n + 3 * rank) % 7]) > 5 for rank in range(2)] for n in range(7)]
    for (_, path, bucket, _), tokens, over in zip(first, needed, many, strict=True):
        wanted = None if max(tokens) > 16 or any(over) else 4 if max(tokens) <= 4 else 16
        assert (path, bucket) == (kind if wanted else "eager", wanted)


def ahead(rank: int, steps: int) -> tuple[int, int]:
    """Steps of random sizes, each of which was told while the one before it ran: right ones, and exchanges a step."""
    stepping.make(rank)
    draw, right = random.Random(8), 0  # noqa: S311 - sizes, no secrets
    rows = [[draw.randint(0, 9) for _ in range(2)] for _ in range(steps)]
    before = Held.runner.stats()["ranks"]["exchanges"]
    Held.runner.agree_ahead(stepping.batch_of(rows[0][rank], 0 + rank))
    for seed in range(steps):
        found = stepping.run(rank, rows[seed], seed)
        right += found[0]
        if seed + 1 < steps:
            Held.runner.agree_ahead(stepping.batch_of(rows[seed + 1][rank], seed + 1 + rank))
    return right, Held.runner.stats()["ranks"]["exchanges"] - before


def test_agreed_ahead(two: Processes) -> None:
    """The same steps, and no more exchanges."""
    assert two.run(ahead, 60) == [(60, 60)] * 2


def another_batch(rank: int) -> str:
    """Rank 1 brings another batch than it told; rank 0 steps with what it was told."""
    runner = stepping.runner_over(lambda view: view.ids * 2)
    runner.capture()
    runner.agree_ahead(stepping.batch_of(3, 1))
    with pytest.raises(RankError, match="has not been run"):
        runner.agree_ahead(stepping.batch_of(3, 1))
    if rank == 0:
        return str(runner(stepping.batch_of(3, 1)).shape)
    with pytest.raises(RankError) as raised:
        runner(stepping.batch_of(4, 1))
    return str(raised.value)


def test_another_batch_than_was_agreed_on(two: Processes) -> None:
    """It is told where it is noticed; the next step is as good as any."""
    first, second = two.run(another_batch)
    assert first == "torch.Size([3])"
    assert second.startswith(
        "this is not the batch that was agreed on ahead, with sizes (3, 3, 3); it has sizes (4, 4, 4)"
    )
    two.run(stepping.make)
    assert two.run(stepping.run, [1, 2], 1)[1][:3] == (True, "graph", 2)
