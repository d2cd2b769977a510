"""What tests of steps across ranks run in each rank: one runner on several ranks, and plain answers to hold it to."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, computed, copied
from slotgraph.runners.ranks import shared
from slotgraph.runners.ranks.group import Ranks
from slotgraph.runners.standard.counts import DP
from tests.runners.models import decoder

BUCKETS = (2, 4, 8)


class Counted(Inputs):
    """A number for each token, with tails that no live row has."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-5)
    weights: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=-3)


class Numbered(Counted):
    """With a number that the host computes of a field, without which there is no batch."""

    number: torch.Tensor = computed(lambda factor: factor, shape=1, dtype=torch.int32)
    factor: Any


def tokens_of_ranks(ranks: Ranks) -> list[int]:
    """Live tokens of each."""
    return list(ranks.live(TOKENS))


class Gathered(Counted):
    """With what the others bring."""

    global_num_tokens: torch.Tensor = computed(tokens_of_ranks, shape=DP, dtype=torch.int32)


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


def runner_on(ranks: Ranks, step: Callable[[Any], Any], inputs: type[Any] = Counted, **options: Any) -> Any:
    """A captured decode runner."""
    return decoder(inputs, step, ranks=ranks, **{"buckets": BUCKETS, **options})


class Unreadable(dict[str, Any]):
    """A batch that raises an error when a source is read; without one, a key is pressed then."""

    def __init__(self, batch: Mapping[str, Any], error: BaseException | None = None) -> None:
        super().__init__(batch)
        self.error = KeyboardInterrupt() if error is None else error

    def __getitem__(self, name: str) -> Any:
        """Raise it."""
        raise self.error


SOON: Final = 20.0
"""Seconds after which a rank gives up: no test that is about being told waits for it."""
OVER: Final = ("shared memory", "gloo")
"""What carries exchanges between host memories."""


def soon(over: str = OVER[0], **options: Any) -> Ranks:
    """Ranks over the default group that do not wait for long. over: gloo, as if each was on a host of its own."""
    host = mock.patch.object(shared, "host_of", return_value=f"host-{dist.get_rank()}")
    with host if over == "gloo" else contextlib.nullcontext():
        return Ranks(**{"timeout": SOON, "capture_timeout": SOON, **options})


class Kept:
    """What a process keeps from one function to the next."""

    runner: DecodeRunner[Counted]


def make(_: int, backend: str = "cpu", over: str = OVER[0]) -> tuple[int, ...]:
    """A captured runner, kept for `run`."""
    Kept.runner = runner_on(soon(over), step, backend=backend)
    assert Kept.runner.stats()["ranks"]["over"] == over
    assert Kept.runner.report is not None
    return Kept.runner.report.captured


def run(rank: int, rows: list[int], seed: int) -> tuple[bool, str, int | None, str, int | None]:
    """One step of so many rows by rank: whether its outputs are right; path, bucket, reason, and who forced it."""
    batch = batch_of(rows[rank], seed + rank)
    outputs = Kept.runner(batch)
    agreed, ranks = Kept.runner.agreed, Kept.runner.stage.declaration.ranks
    assert agreed is not None
    padded = sum(rows) if agreed.bucket is None else agreed.bucket * len(rows)
    wanted = torch.stack([batch["ids"] * 3 + batch["weights"].long(), torch.full_like(batch["ids"], padded)], 1)
    right = torch.equal(outputs, wanted) and ranks.live(BATCH) == tuple(rows)
    return right, agreed.path, agreed.bucket, agreed.reason, agreed.rank
