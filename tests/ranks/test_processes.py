"""The processes that tests across ranks run in."""

import pathlib

import pytest
import torch
import torch.distributed as dist

from tests.ranks.processes import Processes, RankFailedError, ranks


def summed(rank: int, start: int) -> int:
    """Over all ranks."""
    number = torch.tensor([start + rank])
    dist.all_reduce(number)
    return int(number.item())


def first_raises(rank: int) -> int:
    """Rank 0 does."""
    if rank == 0:
        message = "on purpose"
        raise ValueError(message)
    return rank


def test_results_and_errors(two: Processes) -> None:
    """Results come in the order of ranks; an error is told with its rank, and the processes go on."""
    assert two.run(summed, 5) == [11, 11]
    with pytest.raises(RankFailedError, match=r"(?s)rank 0: .*on purpose"):
        two.run(first_raises)
    assert [None if one is None else one.kind for one in two.outcomes(first_raises)] == ["ValueError", None]
    assert two.run(summed, 1) == [3, 3]


def test_a_dead_process_is_told(tmp_path: pathlib.Path) -> None:
    """It has no outcome."""
    with ranks(2, tmp_path) as made:
        made.run(summed, 0)
        made.processes[1].kill()
        made.processes[1].join()
        assert made.outcomes(first_raises)[1] is None
