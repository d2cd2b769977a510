"""What tests of steps across ranks run in each rank: one runner on several ranks, and plain answers to hold it to."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, computed, copied
from slotgraph.runners.ranks.group import Ranks
from slotgraph.runners.standard.axes import DP

BUCKETS = (2, 4, 8)


class Counted(Inputs):
    """A number for each token, with tails that no live row has."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-5)
    weights: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=-3)


def step(view: Counted) -> torch.Tensor:
    """[TOKENS, 2]: each row's own, and the number of padded rows of all ranks, which they find out together."""
    rows = torch.full((1,), view.ids.shape[0], device=view.ids.device)
    dist.all_reduce(rows)
    own = view.ids * 3 + view.weights.long()
    return torch.stack([own, rows.expand_as(own)], 1)


def batch_of(rows: int, seed: int) -> dict[str, Any]:
    """A batch of random numbers, none of them zero or a tail's."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(1, 99, (rows,), generator=draw),
        "weights": torch.randint(1, 9, (rows,), generator=draw).float(),
    }


class Held:
    """What a process keeps from one function to the next."""

    runner: DecodeRunner[Counted]


def runner_over(step: Callable[[Counted], torch.Tensor], **options: Any) -> DecodeRunner[Counted]:
    """A runner over the default group, not captured yet."""
    of_ranks: dict[str, Any] = {name: options.pop(name) for name in ("timeout", "equal", "shards") if name in options}
    limits: dict[str, Any] = {"timeout": 20.0, "capture_timeout": 20.0, **of_ranks}
    ranks = Ranks(**limits)
    given: dict[str, Any] = {"buckets": BUCKETS, "backend": "cpu", "progress": False, **options}
    return DecodeRunner(Counted, step, ranks=ranks, **given)


def make(rank: int, backend: str = "cpu", **options: Any) -> tuple[int, ...]:
    """A captured runner, kept for `run`."""
    del rank
    Held.runner = runner_over(step, backend=backend, **options)
    return Held.runner.capture().captured


def run(rank: int, rows: list[int], seed: int) -> tuple[bool, str, int | None, str, int | None]:
    """One step of so many rows by rank: whether its outputs are right; path, bucket, reason, and who forced it."""
    batch = batch_of(rows[rank], seed + rank)
    outputs = Held.runner(batch)
    agreed, ranks = Held.runner.agreed, Held.runner.parts.stage.declaration.ranks
    assert agreed is not None
    padded = sum(rows) if agreed.bucket is None else agreed.bucket * len(rows)
    wanted = torch.stack([batch["ids"] * 3 + batch["weights"].long(), torch.full_like(batch["ids"], padded)], 1)
    right = torch.equal(outputs, wanted) and ranks.live(BATCH) == tuple(rows)
    return right, agreed.path, agreed.bucket, agreed.reason, agreed.rank


def tokens_of_ranks(ranks: Ranks) -> list[int]:
    """Live tokens of each."""
    return list(ranks.live(TOKENS))


class Gathered(Counted):
    """With what the others bring."""

    global_num_tokens: torch.Tensor = computed(tokens_of_ranks, shape=DP, dtype=torch.int32)


def runner_of_counts(ranks: Ranks, *buckets: int) -> DecodeRunner[Gathered]:
    """Whose outputs are the live tokens of each rank; captured."""
    runner = DecodeRunner(
        Gathered,
        lambda view: view.global_num_tokens.clone(),
        buckets=buckets,
        output_rows=None,
        sizes={DP: ranks.size},
        ranks=ranks,
        backend="cpu",
        progress=False,
    )
    runner.capture()
    return runner
