"""Two GPUs, of which one is lost: captured collectives wait for it for ever, and ranks do not."""

import os
import pathlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slotgraph import DecodeRunner
from slotgraph.dataflow.errors import RankError
from slotgraph.runners.ranks.group import Ranks
from tests.ranks.processes import ranks
from tests.ranks.stepping import Counted, batch_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="cuda: two GPUs are needed, each for a rank of its own"),
]


def on_device(rows: int, rank: int) -> dict[str, Any]:
    """A batch."""
    return {name: value.to(f"cuda:{rank}") for name, value in batch_of(rows, 3).items()}


def die() -> None:
    """As a process does that the system kills."""
    os.kill(os.getpid(), 9)


def replays(rank: int, equal: bool) -> str:  # noqa: FBT001 - sent as it is
    """Steps of two ranks, before one of which rank 1 is killed; what rank 0 is told."""

    def step(view: Counted) -> torch.Tensor:
        out = view.ids * 3
        dist.all_reduce(out)
        return out

    made = Ranks(equal=equal, timeout=4.0)
    runner = DecodeRunner(Counted, step, buckets=[2, 4], ranks=made, backend="cuda", progress=False)
    runner.capture()
    batch = on_device(3, rank)
    for _ in range(5):
        outputs = runner(batch)
        runner.wait()
        assert torch.equal(outputs, 6 * batch["ids"])
    if rank == 1 and equal:
        die()
    try:
        runner(batch)
        if rank == 1:
            die()
        dist.all_reduce(torch.ones(1, device=f"cuda:{rank}"))  # what waits for the other on the device in any case
        runner.wait()
        told = "nothing"
    except RankError as error:
        told = str(error)
    torch.cuda.synchronize()
    return told


@pytest.mark.parametrize("equal", [True, False])
def test_a_rank_is_killed_between_steps(tmp_path: pathlib.Path, equal: bool) -> None:  # noqa: FBT001 - a parameter
    """The one that is left gets its name in time, and its device is free again."""
    with ranks(2, tmp_path, backend="cpu:gloo,cuda:nccl") as made:
        first, second = made.outcomes(replays, equal)
    assert second is None
    assert first is not None
    assert first.kind is None, first.trace
    assert "the end of a step on the device: rank 1 did not come within 4 s" in first.value


def captures(rank: int, stalls: bool) -> str:  # noqa: FBT001 - sent as it is
    """A capture of two ranks, in the second bucket of which rank 1 is killed, or does something else for long."""
    seen: list[int] = []

    def step(view: Counted) -> torch.Tensor:
        rows = view.ids.shape[0]
        if rank == 1 and rows == 2 and seen:
            if not stalls:
                die()
            time.sleep(12)
        seen.extend([rows] * (rows == 4))
        out = view.ids * 3
        dist.all_reduce(out)
        return out

    made = Ranks(capture_timeout=5.0, timeout=5.0)
    runner = DecodeRunner(Counted, step, buckets=[2, 4], ranks=made, backend="cuda", progress=False)
    try:
        runner.capture()
    except RankError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("stalls", [False, True], ids=["killed", "stalled"])
def test_a_rank_is_lost_in_a_warm_up(tmp_path: pathlib.Path, stalls: bool) -> None:  # noqa: FBT001 - a parameter
    """The other one's device waits for its part of a sum, and its capture ends with its name."""
    with ranks(2, tmp_path, backend="cpu:gloo,cuda:nccl") as made:
        first = made.outcomes(captures, stalls)[0]
    assert first is not None
    assert first.kind is None, first.trace
    assert "rank 1 did not come within 5 s" in first.value
