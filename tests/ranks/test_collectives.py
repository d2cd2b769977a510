"""Collectives in a recorded step: done again in each replay, in the memory that the step gave them."""

import functools
from typing import Final

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from slotgraph.backends import choose
from tests.ranks.processes import Processes, all_gather, raised

SIZE = 5


def reduced(values: torch.Tensor) -> torch.Tensor:
    """Summed over ranks, in place."""
    own = values * 2
    dist.all_reduce(own)
    return own + 1


def reduced_later(values: torch.Tensor) -> torch.Tensor:
    """Waited for after something else."""
    own = values * 2
    work = dist.all_reduce(own, op=dist.ReduceOp.MAX, async_op=True)
    other = values + 5
    assert work is not None
    work.wait()
    return own + other


def gathered(values: torch.Tensor) -> torch.Tensor:
    """Side by side, in tensors of a list."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values * 3)
    return torch.cat(parts)


def gathered_into_one(values: torch.Tensor) -> torch.Tensor:
    """The same in one tensor."""
    out = torch.empty(dist.get_world_size() * values.numel())
    all_gather(out, values * 3)
    return out - 1


def from_the_first(values: torch.Tensor) -> torch.Tensor:
    """What rank 0 has."""
    own = values * 7
    dist.broadcast(own, 0)
    return own


def swapped(values: torch.Tensor) -> torch.Tensor:
    """Sent to the other rank."""
    own, theirs = values * 2, torch.empty_like(values)
    rank = dist.get_rank()
    if rank == 0:
        dist.send(own, 1)
        dist.recv(theirs, 1)
    else:
        dist.recv(theirs, 0)
        dist.send(own, 0)
    return theirs - own


STEPS: Final = (reduced, reduced_later, gathered, gathered_into_one, from_the_first, swapped)


def replayed(rank: int) -> dict[str, list[bool]]:
    """Whether replays over other values are what each step gives when it is run."""
    values, draw, found = torch.zeros(SIZE), torch.Generator().manual_seed(rank + 1), dict[str, list[bool]]()
    for step in STEPS:
        graph = choose("cpu-capture").capture(functools.partial(step, values))
        found[step.__name__] = []
        for _ in range(4):
            values.copy_(torch.rand(SIZE, generator=draw))
            graph.replay()
            outputs = graph.outputs.clone()
            found[step.__name__].append(torch.equal(outputs, step(values)))
    return found


def test_replays_do_them_again(two: Processes) -> None:
    """With what other ranks have by then."""
    assert two.run(replayed) == [{step.__name__: [True] * 4 for step in STEPS}] * 2


def functional_one(rank: int) -> str:
    """One whose result is new memory each time."""
    del rank
    values, everyone = torch.rand(SIZE), dist.distributed_c10d._get_default_group()
    return raised(choose("cpu-capture").capture, lambda: functional.all_reduce(values, "sum", everyone) + 1)


def test_functional_ones_are_refused(two: Processes) -> None:
    """With what to use instead."""
    for told in two.run(functional_one):
        assert told.startswith("CaptureError: ")
        assert "cannot use _c10d_functional::all_reduce, a functional collective" in told
        assert "use the one of torch.distributed that writes into a tensor of yours" in told
