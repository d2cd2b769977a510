"""Steps that follow one another on several ranks, each with requests of its own: one bucket for all in each step."""

import pytest

from slotgraph.runners.ranks.group import Ranks
from tests.ranks.processes import Processes
from tests.runners.test_ahead import batch, counting, made


def own_requests(rank: int, backend: str) -> tuple[dict[str, int], set[int | None]]:
    """Requests leave and join at other times on each rank; what was made last, and the buckets that all agreed on."""
    runner, buckets = counting(backend, ranks=Ranks(timeout=60)), set[int | None]()
    found: dict[str, int] = {}
    for step in runner.steps(batch(*[10 + rank] * (1 + 3 * rank)), keys="abcd"[: 1 + 3 * rank], ahead=2):
        found |= step.tokens()
        assert runner.agreed is not None
        buckets.add(runner.agreed.bucket)
        if step.number == 2 + rank:
            step.join(batch(7, 8), "xy")
        if step.number == 5 - rank:
            step.leave("a")
        if step.number == 9:
            break
    assert runner.stats()["ahead"] == {"held: ranks agree on each step": 10}
    return found, buckets


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_each_rank_has_its_own_requests(two: Processes, backend: str) -> None:
    """The bucket is that of the rank with the most, and each request is as on one rank."""
    (first, buckets), (second, others) = two.run(own_requests, backend)
    assert buckets == others == {4, 8}
    assert first == {"a": made(10, 5), "x": made(7, 6), "y": made(8, 6)}
    assert second == {"a": made(11, 4), **dict.fromkeys("bcd", made(11, 9)), "x": made(7, 5), "y": made(8, 5)}
