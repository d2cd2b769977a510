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
from slotgraph.dataflow.errors import BatchError, ConfigError
from slotgraph.extend import HOST
from slotgraph.graphs import GraphRunner, variant
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
def test_equal_ranks_leave_the_bytes_of_a_runner_without_ranks(
    backend: Backend, alone: Ranks, schedule: list[Any]
) -> None:
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


class Advancing(Inputs):
    """Numbers that advance, and what ranks say of their sizes, for the device and for the host."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda ids: ids + 1)
    counts: torch.Tensor = computed(tokens_of_ranks, shape=DP, dtype=torch.int32)
    total: torch.Tensor = computed(lambda ranks: sum(ranks.live(TOKENS)), shape=1, dtype=torch.int64, placement=HOST)


@pytest.mark.parametrize("lowering", ["direct", "foreach", "in_graph", "fused"])
def test_steps_ahead_count_the_requests_of_this_step(backend: Backend, alone: Ranks, lowering: str) -> None:
    """After requests have left, joined or done both, slots that ask the ranks have the new number of rows."""
    if lowering not in backend.capabilities.lowerings:
        pytest.skip(f"{backend.name} has no {lowering}")
    runner = DecodeRunner(
        Advancing,
        lambda view: view.ids * 0 + view.counts.sum() * 100 + view.total.to(view.ids.device, non_blocking=True),
        buckets=[2, 4, 8],
        ranks=alone,
        backend=backend,
        lowering=lowering,
        sizes={DP: 1},
    )
    runner.capture()
    sizes = list[int]()
    for step in runner.steps({"ids": torch.arange(3, device=backend.device)}, ahead=0):
        assert step.tokens() == [(key, 101 * len(step.keys)) for key in step.keys]
        sizes.append(len(step.keys))
        if step.number == 1:
            step.leave([0, 1])
        if step.number == 3:
            step.join({"ids": torch.arange(4, device=backend.device)}, range(10, 14))
        if step.number == 5:
            step.leave([2, 10])
            step.join({"ids": torch.arange(1, device=backend.device)}, [20])
        if step.number == 7:
            step.edit([20], ids=torch.arange(1, device=backend.device))
        if step.number == 8:
            step.leave([11, 12, 13, 20])
    assert sizes == [3, 3, 1, 1, 5, 5, 4, 4, 4]


class Told(Inputs):
    table: torch.Tensor = copied(BATCH, TOKENS, dtype=torch.int64, pad=0)
    most: int = 4


def test_ranks_with_the_same_batches_have_grids_and_variants(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is exchanged, so a bucket may have several sizes, and a graph a value; other ranks are refused."""

    def made(ranks: Ranks | None, **options: Any) -> Any:
        keys: Any = {"buckets": {BATCH: [2, 4], TOKENS: [3, 9]}, "variants": [variant("most", at_least=[4, 8])]}
        given: Any = {**keys, "backend": "cpu-capture", "progress": False, "ranks": ranks, **options}
        return GraphRunner(Told, lambda view: view.table.sum(1) * view.most, **given)

    one, other = made(alone), made(None)
    for runner in (one, other):
        runner.capture()
    for requests, tokens, most in ((1, 2, 3), (3, 9, 7), (4, 4, 9), (5, 1, 1), (2, 2, 2)):
        batch = {"table": torch.ones(requests, tokens, dtype=torch.int64), "most": most}
        assert one.decide(batch) == other.decide(batch)
        assert torch.equal(one(batch), other(batch))
    assert one.stats()["rows"] == other.stats()["rows"]
    monkeypatch.setattr(Ranks, "quiet", property(lambda _: False))
    with pytest.raises(ConfigError, match="has buckets on BATCH and TOKENS and variants: only ranks that"):
        made(alone)
    with pytest.raises(ConfigError, match="GraphRunner has buckets on BATCH and variants"):
        made(alone, buckets={BATCH: [2]}, sizes={TOKENS: 9})
