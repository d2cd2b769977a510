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
    """In place, and waited for after something else."""
    own, most = values * 2, values * 3
    work = dist.all_reduce(most, op=dist.ReduceOp.MAX, async_op=True)
    dist.all_reduce(own)
    assert work is not None
    work.wait()
    return own + most


def gathered(values: torch.Tensor) -> torch.Tensor:
    """In tensors of a list, and in one tensor."""
    parts = [torch.empty_like(values) for _ in range(2)]
    dist.all_gather(parts, values * 3)
    out = torch.empty(2 * values.numel())
    all_gather(out, values * 5)
    return torch.cat(parts) - out


def swapped(values: torch.Tensor) -> torch.Tensor:
    """What rank 0 has, and what the other rank sends."""
    first, own, theirs = values * 7, values * 2, torch.empty_like(values)
    dist.broadcast(first, 0)
    if dist.get_rank() == 0:
        dist.send(own, 1)
        dist.recv(theirs, 1)
    else:
        dist.recv(theirs, 0)
        dist.send(own, 0)
    return theirs - first


STEPS: Final = (reduced, gathered, swapped)


def replayed(rank: int) -> tuple[list[bool], str]:
    """Whether replays over other values are what each step gives when it is run; what a functional one raises."""
    values, draw, found = torch.zeros(SIZE), torch.Generator().manual_seed(rank + 1), list[bool]()
    backend, everyone = choose("cpu-capture"), dist.distributed_c10d._get_default_group()
    for step in STEPS:
        graph = backend.capture(functools.partial(step, values))
        for _ in range(4):
            values.copy_(torch.rand(SIZE, generator=draw))
            graph.replay()
            outputs = graph.outputs.clone()
            found.append(torch.equal(outputs, step(values)))
    return found, raised(backend.capture, lambda: functional.all_reduce(values, "sum", everyone) + 1)


def test_replays_do_them_again(two: Processes) -> None:
    """With what other ranks have by then; functional ones are refused, with what to use instead."""
    for right, told in two.run(replayed):
        assert right == [True] * 12
        assert told.startswith("CaptureError: ")
        assert "cannot use _c10d_functional::all_reduce, a functional collective" in told
        assert "use the one of torch.distributed that writes into a tensor of yours" in told
