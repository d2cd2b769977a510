"""Collectives in a recorded step: done again in each replay, in the memory that the step gave them."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from slotgraph.backends import choose
from tests.ranks.processes import Processes, all_gather, raised

SIZE = 5


def step(values: torch.Tensor) -> torch.Tensor:
    """Collectives in place, waited for later, into a list and into one tensor; a broadcast; sends both ways."""
    rank, own, most, first = dist.get_rank(), values * 2, values * 3, values * 7
    work = dist.all_reduce(most, op=dist.ReduceOp.MAX, async_op=True)
    dist.all_reduce(own)
    assert work is not None
    work.wait()
    parts, out, theirs = [torch.empty_like(values) for _ in range(2)], torch.empty(2 * SIZE), torch.empty_like(values)
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
    values, draw, found = torch.zeros(SIZE), torch.Generator().manual_seed(rank + 1), list[bool]()
    backend, everyone = choose("cpu-capture"), dist.distributed_c10d._get_default_group()
    graph = backend.capture(lambda: step(values))
    for _ in range(4):
        values.copy_(torch.rand(SIZE, generator=draw))
        graph.replay()
        outputs = graph.outputs.clone()
        found.append(torch.equal(outputs, step(values)))
    return found, raised(backend.capture, lambda: functional.all_reduce(values, "sum", everyone) + 1)


def test_replays_do_them_again(two: Processes) -> None:
    """With what other ranks have by then; functional ones are refused, with what to use instead."""
    for right, told in two.run(replayed):
        assert right == [True] * 4
        assert told.startswith("CaptureError: ")
        assert "cannot use _c10d_functional::all_reduce, a functional collective" in told
        assert "use the one of torch.distributed that writes into a tensor of yours" in told
