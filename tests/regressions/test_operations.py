"""Class H: what operators of an engine cannot see."""

from typing import Any

import torch
from structlog.testing import capture_logs

from slotgraph import BATCH, Inputs, copied
from tests.regressions.engines import ByHand, captured, draw


class RankInputs(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


def twice(view: Any) -> torch.Tensor:
    """Any step."""
    result: torch.Tensor = view.ids * 2
    return result


def test_sglang_30242_ranks_that_choose_different_buckets() -> None:
    """Each rank chooses a bucket by its own batch, and all of them wait for a collective of different sizes."""
    batches = [{"ids": draw(1, 9, (rows,), rows)} for rows in (3, 7)]

    def choose(rows: int) -> int:
        return next(bucket for bucket in (4, 8) if bucket >= rows)

    gathered = {choose(len(batch["ids"])) for batch in batches}
    assert len(gathered) == 2  # a hang, on devices

    ranks = [captured(RankInputs, twice, buckets=[4, 8]) for _ in batches]
    decisions = [rank.decide(batch) for rank, batch in zip(ranks, batches, strict=True)]
    assert [(one.path, one.bucket, one.reason) for one in decisions] == [
        ("graph", 4, "bucket 4 fits"),
        ("graph", 8, "bucket 8 fits"),
    ]  # plain data, to be agreed upon before anything runs
    assert all(rank.stats()["steps"] == {"graph": 0, "eager": 0} for rank in ranks)
    alone = captured(RankInputs, twice, buckets=[8])  # what ranks do that agree on one bucket
    for batch in batches:
        assert alone.decide(batch).bucket == 8
        assert torch.equal(alone(batch), batch["ids"] * 2)


class Pool:
    """Room for so many requests."""

    def __init__(self, room: int) -> None:
        self.room = room

    def take(self) -> bool:
        """Room for one more, if there is any."""
        self.room -= self.room > 0
        return self.room > 0


def test_trtllm_16072_eager_for_good_and_nobody_knows() -> None:
    """A dummy request for padding is made at the first padded step; without room, all are eager for good."""
    engine = ByHand(lambda views: views["ids"] * 2, 4, ids=torch.zeros(4, dtype=torch.int64))
    pool, paths = Pool(1), list[str]()
    for rows in (3, 2, 1):
        batch = draw(1, 9, (rows,), rows)
        can_run = pool.take()  # a bare bool
        paths.append("graph" if can_run else "eager")
        assert torch.equal(engine(ids=batch) if can_run else batch * 2, batch * 2)
    assert paths == ["eager"] * 3

    runner = captured(RankInputs, twice)  # padding is a value in each slot's tail: it takes no request
    for rows in (3, 2, 1):
        batch = draw(1, 9, (rows,), rows)
        assert torch.equal(runner({"ids": batch}), batch * 2)
    assert runner.stats()["steps"] == {"graph": 3, "eager": 0}
    with capture_logs() as events:
        for seed in (1, 2):
            runner({"ids": draw(1, 9, (6,), seed)})
    reason = "6 rows are more than the largest bucket, 4"
    assert runner.decide({"ids": draw(1, 9, (6,), 1)}).reason == reason
    assert [(one["event"], one["reason"]) for one in events if one["event"] == "fallback"] == [("fallback", reason)]
    assert runner.stats()["eager"] == {"too_large": {"steps": 2, "live": 12}}
