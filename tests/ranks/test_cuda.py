"""Two GPUs: collectives that are captured in graphs, and ranks that agree on which graph it is."""

import random
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from slotgraph import BATCH, TOKENS, DecodeRunner, EagerRunner, Inputs, computed, copied
from slotgraph.runners.ranks.group import Ranks
from slotgraph.runners.standard.axes import DP
from tests.ranks.processes import Processes, all_gather, ranks

HIDDEN: Final = 64
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="cuda: two GPUs are needed, each for a rank of its own"),
]


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two ranks, each on a GPU of its own."""
    with ranks(2, tmp_path_factory.mktemp("gpus"), backend="cpu:gloo,cuda:nccl") as made:
        yield made


class Tokens(Inputs):
    """Tokens with tails that would show, and what each rank brings."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=7)
    weights: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=-3)
    global_num_tokens: torch.Tensor = computed(lambda ranks: list(ranks.live(TOKENS)), shape=DP, dtype=torch.int32)


def batch_of(rows: int, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Random numbers."""
    draw = torch.Generator().manual_seed(seed)
    ids, weights = torch.randint(1, 99, (rows,), generator=draw), torch.randint(1, 9, (rows,), generator=draw)
    return {"ids": ids.to(device), "weights": weights.float().to(device)}


def tensor_parallel(rank: int) -> tuple[int, int, float]:
    """A layer of which each rank has half: captured steps that are as the eager ones, of how many."""
    device = torch.device("cuda", rank)
    draw = torch.Generator().manual_seed(1)
    table, up, down = (
        torch.randn(shape, generator=draw) for shape in ((99, HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN))
    )
    mine = slice(rank * 2 * HIDDEN, (rank + 1) * 2 * HIDDEN)
    weights = table.to(device), up[:, mine].contiguous().to(device), down[mine].contiguous().to(device)

    def step(view: Tokens) -> torch.Tensor:
        hidden = weights[0][view.ids] * view.weights[:, None]
        out = torch.relu(hidden @ weights[1]) @ weights[2]
        dist.all_reduce(out)
        return out

    given: dict[str, Any] = {"ranks": Ranks(equal=True), "sizes": {DP: 2}, "backend": "cuda"}
    runner = DecodeRunner(Tokens, step, buckets=[2, 4, 8], progress=False, **given)
    assert runner.capture().captured == (2, 4, 8)
    eager, right, whole_apart = EagerRunner(Tokens, step, **given), 0, 0.0
    for seed in range(40):
        rows = 1 + seed * 3 % 8
        batch = batch_of(rows, seed, device)
        outputs = runner(batch).clone()
        right += torch.equal(outputs, eager(batch)) or torch.allclose(outputs, eager(batch), rtol=1e-4, atol=1e-3)
        hidden = table[batch["ids"].cpu()] * batch["weights"].cpu()[:, None]
        whole = torch.relu(hidden @ up) @ down
        whole_apart = max(whole_apart, float(((outputs.cpu() - whole).abs() / whole.abs().max()).max()))
    return right, runner.stats()["steps"]["graph"], whole_apart


def test_tensor_parallel(gpus: Processes) -> None:
    """NCCL's reductions are part of the graph, and nothing is exchanged before a step."""
    for right, steps, apart in gpus.run(tensor_parallel):
        assert right == steps == 40
        assert apart < 1e-4


def data_parallel(rank: int, steps: int, on: str) -> list[tuple[bool, str, int | None, int]]:
    """Ranks with batches of their own, gathered in the step: a bucket of each other's size would hang, or be wrong."""
    device = torch.device("cuda", rank)

    def step(view: Tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own = view.ids * 3 + view.weights.long()
        gathered = torch.empty(2 * own.shape[0], dtype=own.dtype, device=device)
        all_gather(gathered, own)
        return own, gathered.expand(own.shape[0], -1), view.global_num_tokens.expand(own.shape[0], -1)

    runner = DecodeRunner(
        Tokens, step, buckets=[2, 4, 8], sizes={DP: 2}, ranks=Ranks(timeout=20, on=on), backend="cuda", progress=False
    )
    runner.capture()
    draw = random.Random(5)  # noqa: S311 - sizes, no secrets
    found: list[tuple[bool, str, int | None, int]] = []
    for seed in range(steps):
        rows = [draw.choice([0, draw.randint(1, 8), draw.randint(1, 8)]) for _ in range(2)]
        batches = [batch_of(count, 2 * seed + one, device) for one, count in enumerate(rows)]
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
        agreed = runner.agreed
        assert agreed is not None
        found.append((right, agreed.path, agreed.bucket, max(rows)))
    return found


@pytest.mark.parametrize("on", ["host", "cuda"])
def test_data_parallel(gpus: Processes, on: str) -> None:
    """Each step is a graph of the bucket that the largest batch needs, on both; idle ranks gather with the other."""
    first, second = gpus.run(data_parallel, 1000, on)
    assert first == second
    for right, path, bucket, rows in first:
        assert right
        if path == "none":  # nobody had a request
            continue
        assert (path, bucket) == ("graph", next(size for size in (2, 4, 8) if size >= rows))
