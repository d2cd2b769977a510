"""Two GPUs: collectives in graphs, ranks that agree on which graph it is, and ranks that lose each other there."""

import os
import pathlib
import random
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from slotgraph import TOKENS, EagerRunner, copied
from slotgraph.runners.standard.counts import DP
from tests.ranks import stepping
from tests.ranks.processes import Processes, all_gather, raised, ranks
from tests.ranks.stepping import SOON, Counted, Gathered, runner_on, soon
from tests.runners.steps import counting

HIDDEN: Final = 64
BOTH: Final = "cpu:gloo,cuda:nccl"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="cuda: two GPUs are needed, each for a rank of its own"),
]


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Two ranks, each on a GPU of its own."""
    with ranks(2, tmp_path_factory.mktemp("gpus"), backend=BOTH) as made:
        yield made


def batch_of(rows: int, seed: int, rank: int) -> dict[str, Any]:
    """Random numbers, on a rank's device."""
    return {name: value.to(f"cuda:{rank}") for name, value in stepping.batch_of(rows, seed).items()}


class Tailed(Counted):
    """Tails that a table can be read at."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=7)


def tensor_parallel(rank: int) -> tuple[int, int, float]:
    """A layer of which each rank has half: captured steps that are as the eager ones, of how many."""
    draw, device = torch.Generator().manual_seed(1), torch.device("cuda", rank)
    table, up, down = (
        torch.randn(shape, generator=draw) for shape in ((99, HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN))
    )
    mine = slice(rank * 2 * HIDDEN, (rank + 1) * 2 * HIDDEN)
    weights = table.to(device), up[:, mine].contiguous().to(device), down[mine].contiguous().to(device)

    def step(view: Counted) -> torch.Tensor:
        hidden = weights[0][view.ids] * view.weights[:, None]
        out = torch.relu(hidden @ weights[1]) @ weights[2]
        dist.all_reduce(out)
        return out

    runner = runner_on(soon(equal=True), step, Tailed, backend="cuda")
    eager, right, whole_apart = EagerRunner(Tailed, step, ranks=soon(equal=True), backend="cuda"), 0, 0.0
    for seed in range(40):
        rows = 1 + seed * 3 % 8
        batch = batch_of(rows, seed, rank)
        outputs = runner(batch).clone()
        right += torch.allclose(outputs, eager(batch), rtol=1e-4, atol=1e-3)
        whole = torch.relu((table[batch["ids"].cpu()] * batch["weights"].cpu()[:, None]) @ up) @ down
        whole_apart = max(whole_apart, float(((outputs.cpu() - whole).abs() / whole.abs().max()).max()))
    return right, runner.stats()["steps"]["graph"], whole_apart


def test_reductions_are_part_of_the_graph(gpus: Processes) -> None:
    """NCCL's reductions are part of the graph, and nothing is exchanged before a step."""
    for right, steps, apart in gpus.run(tensor_parallel):
        assert right == steps == 40
        assert apart < 1e-4


def data_parallel(rank: int, steps: int) -> list[tuple[bool, str, int | None, int]]:
    """Ranks with batches of their own, gathered in the step: a bucket of each other's size would hang, or be wrong."""

    def step(view: Gathered) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own = view.ids * 3 + view.weights.long()
        gathered = torch.empty(2 * own.shape[0], dtype=own.dtype, device=own.device)
        all_gather(gathered, own)
        return own, gathered.expand(own.shape[0], -1), view.global_num_tokens.expand(own.shape[0], -1)

    runner = runner_on(soon(), step, Gathered, sizes={DP: 2}, backend="cuda")
    draw = random.Random(5)
    found: list[tuple[bool, str, int | None, int]] = []
    for seed in range(steps):
        rows = [draw.choice([0, draw.randint(1, 8), draw.randint(1, 8)]) for _ in range(2)]
        batches = [batch_of(count, 2 * seed + one, rank) for one, count in enumerate(rows)]
        outputs = runner(batches[rank]) if rows[rank] else runner.idle()
        if outputs is None:
            found.append((max(rows) == 0 and torch.cuda.current_stream().query(), "none", None, 0))
            continue
        own, gathered, counts = outputs
        wanted = [batch["ids"] * 3 + batch["weights"].long() for batch in batches]
        right = torch.equal(own, wanted[rank])
        if rows[rank]:
            bucket = gathered.shape[1] // 2
            right &= all(torch.equal(gathered[0, one * bucket :][: rows[one]], wanted[one]) for one in range(2))
            right &= counts[0].tolist() == rows
        found.append((right, runner.agreed.path, runner.agreed.bucket, max(rows)))
    return found


def test_each_step_is_a_graph_of_the_largest_batchs_bucket(gpus: Processes) -> None:
    """Each step is a graph of the bucket that the largest batch needs, on both; idle ranks gather with the other."""
    first, second = gpus.run(data_parallel, 1000)
    assert first == second
    for right, path, bucket, rows in first:
        assert right
        if path != "none":  # somebody had a request
            assert (path, bucket) == ("graph", next(size for size in (2, 4, 8) if size >= rows))


def die() -> None:
    """As a process does that the system kills."""
    os.kill(os.getpid(), 9)


def reduced(view: Counted) -> torch.Tensor:
    """A sum over ranks."""
    out = view.ids * 3
    dist.all_reduce(out)
    return out


def replays(rank: int, equal: bool) -> str:
    """Steps of two ranks, before one of which rank 1 is killed; what rank 0 is told."""
    runner, batch = runner_on(soon(equal=equal, timeout=4.0), reduced, backend="cuda"), batch_of(3, 3, rank)
    for _ in range(5):
        outputs = runner(batch)
        runner.wait()
        assert torch.equal(outputs, 6 * batch["ids"])
    if rank == 1 and equal:
        die()

    def last() -> None:
        runner(batch)
        if rank == 1:
            die()
        dist.all_reduce(torch.ones(1, device=f"cuda:{rank}"))  # what waits for the other on the device in any case
        runner.wait()

    told = raised(last)
    torch.cuda.synchronize()
    return told


@pytest.mark.parametrize("equal", [True, False])
def test_a_rank_killed_between_steps_is_named(tmp_path: pathlib.Path, equal: bool) -> None:
    """The one that is left gets its name in time, and its device is free again."""
    with ranks(2, tmp_path, backend=BOTH) as made:
        first, second = made.outcomes(replays, equal)
    assert second is None
    assert first is not None
    assert first.kind is None, first.trace
    assert "RankError: the end of a step on the device: rank 1 did not come within 4 s" in first.value


def captures(rank: int, stalls: bool) -> str:
    """A capture of two ranks, in the second bucket of which rank 1 is killed, or does something else for long."""
    seen: list[int] = []

    def step(view: Counted) -> torch.Tensor:
        rows = view.ids.shape[0]
        if rank == 1 and rows == 2 and seen:
            if not stalls:
                die()
            time.sleep(12)
        seen.extend([rows] * (rows == 4))
        return reduced(view)

    return raised(runner_on, soon(capture_timeout=5.0, timeout=5.0), step, buckets=[2, 4], backend="cuda")


@pytest.mark.parametrize("stalls", [False, True], ids=["killed", "stalled"])
def test_a_rank_lost_in_a_warm_up_is_named(tmp_path: pathlib.Path, stalls: bool) -> None:
    """The other one's device waits for its part of a sum, and its capture ends with its name."""
    with ranks(2, tmp_path, backend=BOTH) as made:
        first = made.outcomes(captures, stalls)[0]
    assert first is not None
    assert first.kind is None, first.trace
    assert "rank 1 did not come within 5 s" in first.value


def added_up(view: counting.Counting) -> torch.Tensor:
    """Count, and wait on the device for the other rank's part of a sum."""
    dist.all_reduce(view.ids.clone())
    return counting.count(view)


def loops(rank: int, how: str, equal: bool) -> tuple[int, str, float, str]:
    """Run steps() on both ranks, of which rank 1 ends its loop in step 5.

    Returns: steps whose tokens were right, the error, the seconds from the last of these steps to it, and the error of
    a call after that.
    """
    runner = counting.counting("cuda", added_up, ranks=soon(equal=equal, timeout=4.0))
    begun, right, last = counting.batch(1, 2), 0, time.monotonic()

    def loop() -> None:
        nonlocal right, last
        for step in runner.steps(begun, keys=[1, 2], ahead=1):
            assert step.tokens() == [(tag, counting.made(tag, step.number)) for tag in (1, 2)]
            right, last = right + 1, time.monotonic()
            if rank and step.number == 5:
                if how == "is killed":
                    die()
                if how == "raises":
                    raise KeyError("not mine")
                return

    error = raised(loop)
    seconds = time.monotonic() - last
    return right, error, seconds, "" if how == "is killed" else raised(lambda: runner(counting.batch(3)).tolist())


@pytest.mark.parametrize("equal", [True, False], ids=["equal", "agreed"])
@pytest.mark.parametrize("how", ["is killed", "raises", "leaves"])
def test_a_rank_that_ends_in_a_loop_is_named_and_no_token_is_wrong(
    tmp_path: pathlib.Path, how: str, equal: bool
) -> None:
    """The other rank's loop ends with an error that names it, in time, though its device may wait for a sum."""
    with ranks(2, tmp_path, backend=BOTH) as made:
        first, second = made.outcomes(loops, how, equal)
    assert first is not None
    assert first.kind is None, first.trace
    right, error, seconds, after = first.value
    assert right >= 5
    assert error.startswith("RankError"), first.value
    assert "rank 1" in error
    assert seconds < SOON
    if how == "is killed":
        assert second is None
    else:
        assert second is not None
        assert second.kind is None, second.trace
        # equal ranks do not agree before a step: the sum that rank 0 launched alone is aborted, and with it the group
        for error in (after, second.value[3]):
            assert error.startswith("RankError") if equal else error == ""
