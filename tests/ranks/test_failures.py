"""Ranks that fail: each failure is an error on every rank, soon, and names the rank that failed."""

import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from slotgraph.dataflow.errors import CaptureError, ConfigError
from slotgraph.runners.ranks.group import Ranks
from tests.ranks import stepping
from tests.ranks.processes import Outcome, Processes, ranks
from tests.ranks.stepping import Held


def kinds(outcomes: list[Outcome | None]) -> list[str | None]:
    """What was raised, by rank; None where nothing was, or where the process is gone."""
    return [None if one is None else one.kind for one in outcomes]


def refused(rank: int, how: str) -> tuple[str, bool]:
    """A batch that does not fit, on rank 1 alone; then all go on."""
    batch: dict[str, Any] = stepping.batch_of(3, rank)
    before = [buffer.tensor.clone() for buffer in Held.runner.graphs.buffers]
    if rank == 1:
        batch |= {
            "missing": {"ids": None},
            "dtype": {"weights": batch["weights"].to(torch.complex64)},
            "shape": {"weights": batch["weights"][None, None]},
        }[how]
    told = "nothing"
    try:
        Held.runner(batch)
    except Exception as error:  # noqa: BLE001 - told to the test
        told = f"{type(error).__name__}: {error}"
    after = [buffer.tensor for buffer in Held.runner.graphs.buffers]
    return told, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("how", ["missing", "dtype", "shape"])
def test_a_refused_batch(two: Processes, how: str) -> None:
    """Nobody runs the step, nothing is written anywhere, each is told, and the next step is as good as any."""
    two.run(stepping.make)
    two.run(stepping.run, [3, 2], 5)
    (other, same), (own, unchanged) = two.run(refused, how)
    assert same
    assert unchanged
    assert own.startswith(("BatchError: slot ", "MissingSourceError: slot "))
    assert other.startswith("RankError: rank 1 refused its batch, so that no rank runs the step: slot ")
    assert own.partition(": ")[2][:100] in other
    assert two.run(stepping.run, [3, 6], 6)[0][:3] == (True, "graph", 8)


def behind(rank: int) -> None:
    """Rank 1 is a bucket list behind."""
    stepping.make(rank, buckets=(2, 4) if rank == 1 else stepping.BUCKETS)


def test_a_bucket_list_behind(two: Processes) -> None:
    """It is refused when captures begin, with both lists."""
    for one in two.outcomes(behind):
        assert one is not None
        assert one.kind == "RankError"
        assert "rank 0 is at DecodeRunner: captures begin, of buckets 2, 4, 8; rank 1 is at" in one.message
        assert one.message.endswith("of buckets 2, 4")


def fails_in_capture(rank: int) -> tuple[str, dict[int, str], tuple[int, ...]]:
    """Rank 1 cannot capture bucket 4."""

    def step(view: stepping.Counted) -> torch.Tensor:
        if rank == 1 and view.ids.shape[0] == 4:
            message = "no room for this one"
            raise ValueError(message)
        return view.ids * 2

    runner = stepping.runner_over(step)
    with pytest.raises(CaptureError) as raised:
        runner.capture()
    report = runner.report
    assert report is not None
    decision = runner.decide(stepping.batch_of(3, 1))
    assert decision.why == "not_captured"
    return str(raised.value), report.failed, report.captured


def test_a_bucket_that_one_cannot_capture(two: Processes) -> None:
    """All leave it out, rank 0 says whose error it was, and the others are usable."""
    first, second = two.run(fails_in_capture)
    assert first[1].keys() == second[1].keys() == {4}
    assert first[2] == second[2] == (2, 8)
    assert first[1][4].startswith("rank 1: ")
    assert "no room for this one" in first[0]
    assert "no room for this one" in second[1][4]


def raises_in_step(rank: int) -> None:
    """Rank 1 raises in the middle of an eager step, goes on with something else, and comes to no other step."""

    def step(view: stepping.Counted) -> torch.Tensor:
        if rank == 1 and view.ids.shape[0] == 9:
            message = "lost a page"
            raise ValueError(message)
        return view.ids * 2

    runner = stepping.runner_over(step, timeout=4.0)
    runner.capture()
    batch = stepping.batch_of(9, rank)
    if rank == 1:
        with pytest.raises(ValueError, match="lost a page"):
            runner(batch)
        return
    runner(batch)
    runner(batch)


def test_one_raises_in_a_step(tmp_path: pathlib.Path) -> None:
    """Who waits for it in the next step is told what happened."""
    with ranks(2, tmp_path) as made:
        first, second = made.outcomes(raises_in_step)
    assert second is not None
    assert second.kind is None
    assert first is not None
    assert first.kind == "RankError"
    assert "rank 1 did not come within 4 s: it broke off a step before: ValueError: lost a page" in first.message


def steps_until_told(rank: int, stalls: bool) -> str:  # noqa: FBT001 - sent as it is
    """Step until an error says that others are lost; rank 2 stops after some steps, for good or for long."""
    stepping.make(rank, timeout=4.0)
    for number in range(1000):
        if rank == 2 and number == 5:
            if not stalls:
                os.kill(os.getpid(), 9)
            time.sleep(14)
            return "slept"
        try:
            stepping.run(rank, [1, 2, 3], number)
        except Exception as error:  # noqa: BLE001 - told to the test
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("stalls", [False, True], ids=["killed", "stalled"])
def test_a_rank_is_lost(tmp_path: pathlib.Path, stalls: bool) -> None:  # noqa: FBT001 - a parameter
    """The others are told which, and none waits for ever."""
    with ranks(3, tmp_path, timeout=20) as made:
        outcomes = made.outcomes(steps_until_told, stalls)
    for one in outcomes[:2]:
        assert one is not None
        assert one.value.startswith("RankError: a step of DecodeRunner with buckets 2, 4, 8: rank 2 did not come ")
        assert "rank 0" not in one.value
        assert "rank 1" not in one.value


def test_a_lost_group_stays_lost(tmp_path: pathlib.Path) -> None:
    """Whoever tries again is told at once why nothing is exchanged any more."""
    with ranks(2, tmp_path) as made:
        found = made.outcomes(tries_twice)[0]
    assert found is not None
    assert found.value[1].startswith(
        "a step of DecodeRunner with buckets 2, 4, 8: these ranks are lost to each other: "
    )
    assert "rank 1 did not come within 1 s" in found.value[1]


def tries_twice(rank: int) -> list[str]:
    """Rank 1 does not come at all."""
    stepping.make(rank, timeout=1.0)
    told = []
    for _ in range(2 if rank == 0 else 0):
        with pytest.raises(Exception, match="rank 1") as raised:
            Held.runner(stepping.batch_of(1, 1))
        told.append(str(raised.value))
    if rank == 1:
        time.sleep(5)
    return told


def test_what_makes_no_sense_is_refused(two: Processes) -> None:
    """When it is declared."""
    two.run(refusals)


def refusals(rank: int) -> None:
    """Numbers, groups, buckets that do not divide, late captures."""
    del rank
    with pytest.raises(ConfigError, match=r"timeout: expected seconds, more than 0 .*, got 0 of type int"):
        Ranks(timeout=0)
    with pytest.raises(ConfigError, match="expected a process group that this process is in, got 'tp'"):
        Ranks("tp")  # type: ignore[arg-type] # on purpose
    with pytest.raises(ConfigError, match="bucket 3 has 3 tokens, which do not divide among 2 shards"):
        stepping.runner_over(stepping.step, buckets=(2, 3), shards=2)
    with pytest.raises(ConfigError, match="lazy=True puts captures off"):
        stepping.runner_over(stepping.step, lazy=True)


def test_a_torch_without_process_groups() -> None:
    """Some builds have none: slotgraph is imported all the same, and ranks say what is missing."""
    code = (
        "import torch.distributed as dist\n"
        "for name in ('ProcessGroup', 'new_group', 'Work', 'isend', 'group', 'get_rank'): delattr(dist, name)\n"
        "dist.is_available = lambda: False\n"
        "import slotgraph\n"
        "slotgraph.Ranks()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603 - ours
    assert done.stderr.splitlines()[-1].startswith(
        "slotgraph.dataflow.errors.ConfigError: ranks need a process group: call torch.distributed.init_process_group"
    )
