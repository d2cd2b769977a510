"""Quiet ranks, which exchange nothing: their steps take the shortcuts of a runner without ranks, and give its bytes."""

import functools
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, computed, copied
from slotgraph.backends import Backend
from slotgraph.dataflow.errors import BatchError
from slotgraph.extend import HOST
from slotgraph.runners.ranks.group import Ranks
from slotgraph.runners.standard.counts import DP
from tests.ranks.stepping import runner_on, tokens_of_ranks
from tests.strategies import noise


class Alone(Inputs):
    """Slots on the device and on the host, of which one may be absent, and a field that graphs have seen."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    weights: torch.Tensor = copied(TOKENS, 3, dtype=torch.float32, pad=0.0)
    extra: torch.Tensor | None = copied(TOKENS, dtype=torch.float32, pad=0.0, default=None)
    lengths: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, placement=HOST)
    mode: str = "null"
    counts: torch.Tensor = computed(lambda step: step.live(TOKENS), shape=DP, dtype=torch.int32)


class Ranked(Alone):
    """The same, with counts that are asked of the ranks."""

    counts: torch.Tensor = computed(tokens_of_ranks, shape=DP, dtype=torch.int32)


def step(view: Any) -> torch.Tensor:
    """What every slot says."""
    out: torch.Tensor = view.weights.sum(1) * view.input_ids + view.counts.sum() * 1000
    return out if view.extra is None else out + view.extra


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    """One rank, whose two runners share what it knows of each step."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield Ranks()
    finally:
        dist.destroy_process_group()


@functools.cache
def runners_of(backend: str, of_one: Ranks) -> list[DecodeRunner[Any]]:
    """Two with ranks, two without, which all schedules share."""
    options: dict[str, Any] = {"backend": backend, "absent": [{"extra"}], "lowering": "in_graph", "sizes": {DP: 1}}
    return [
        runner_on(ranks, step, inputs, buckets=buckets, **options)
        for ranks, inputs in cast("Any", ((of_one, Ranked), (None, Alone)))
        for buckets in ([1, 2, 4, 8], [3, 6])
    ]


def batch_of(rows: int, seed: int, mode: str, *, extra: bool, device: torch.device) -> dict[str, Any]:
    """Random rows."""
    found: dict[str, Any] = {
        "input_ids": noise((rows,), torch.int64, seed).to(device),
        "weights": noise((rows, 2 if mode == "refused" else 3), torch.float32, seed + 1).to(device),
        "lengths": noise((rows,), torch.int32, seed + 3),
        "mode": mode,
    }
    return found | {"extra": noise((rows,), torch.float32, seed + 2).to(device)} if extra else found


modes = st.sampled_from(["null", "null", "null", "full", "refused"])
turn = st.tuples(st.integers(0, 1), st.integers(1, 9), st.integers(0, 1 << 20), st.booleans(), modes)


@given(schedule=st.lists(turn, min_size=4, max_size=14))
@settings(max_examples=25)
def test_any_schedule(backend: Backend, alone: Ranks, schedule: list[Any]) -> None:
    """Two runners with ranks, in any turn, have the bytes and books of two without; ranks bring what is."""
    if "in_graph" not in backend.capabilities.lowerings:
        pytest.skip(f"{backend.name} has no in_graph")
    runners = runners_of(backend.name, alone)
    for which, rows, seed, extra, mode in [*schedule, *schedule]:  # the second time all is bound
        batch = batch_of(rows, seed, mode, extra=extra, device=backend.device)
        if mode == "refused":
            for runner in runners[which::2]:
                with pytest.raises(BatchError, match="slot 'weights'"):
                    runner(batch)
            continue
        assert torch.equal(runners[which](batch), runners[which + 2](batch))
        assert alone.live(TOKENS) == alone.live(BATCH) == (rows,)
    for mine, other in zip(runners[:2], runners[2:], strict=True):
        own, others = mine.stats(), other.stats()
        assert (own["steps"], own["buckets"], own["eager"]) == (others["steps"], others["buckets"], others["eager"])
        assert own["ranks"] == others["ranks"]
        assert own["lowerings"] == others["lowerings"]
        assert mine.agreed is None
