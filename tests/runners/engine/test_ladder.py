"""Buckets from traffic, beside every choice that there is."""

import collections
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, Axis, Inputs, copied
from slotgraph.backends import Backend
from slotgraph.config import Buckets, plan_buckets
from slotgraph.errors import ConfigError
from slotgraph.graphs import GraphRunner
from slotgraph.runners.engine import ladder
from slotgraph.runners.engine.statistics import CaptureReport, MemoryAccount
from tests.runners.models import Ids, decoder, ready

KV = Axis("KV")

TRAFFIC = st.dictionaries(st.integers(0, 40), st.integers(0, 30), min_size=1, max_size=7).filter(
    lambda rows: sum(rows.values())
)


def padded(buckets: Any, rows: dict[int, int]) -> int:
    """Return the padded rows of all steps."""
    return sum(min(one for one in buckets if one >= max(size, 1)) * count for size, count in rows.items())


@given(TRAFFIC, st.integers(1, 8))
def test_no_other_buckets_pad_less(rows: dict[int, int], graphs: int) -> None:
    """Of all choices of so many buckets, and it has no bucket more than it needs for that."""
    planned, largest = plan_buckets(rows, graphs), max(*rows, 1)
    known = {max(one, 1) for one in rows}
    choices = [{*few, largest} for count in range(graphs) for few in itertools.combinations(known, count)]
    least = min(padded(one, rows) for one in choices)
    assert padded(planned.sizes, rows) == least
    assert len(planned.sizes) == min(len(one) for one in choices if padded(one, rows) == least)
    live = sum(max(size, 1) * count for size, count in rows.items())
    assert planned.waste == pytest.approx(1 - live / least)
    assert sum(planned.steps) == sum(rows.values())


@given(TRAFFIC)
def test_the_default_ladder_needs_no_fewer_graphs(rows: dict[int, int]) -> None:
    """For the same padding it has as many buckets or more, of those that had steps."""
    found = plan_buckets(rows)
    used = {min(one for one in found.ladder if one >= max(size, 1)) for size, count in rows.items() if count}
    again = plan_buckets(rows, waste=min(found.ladder_waste, 1.0))
    assert again.waste <= found.ladder_waste + 1e-9
    assert len(again.sizes) <= len({*used, found.ladder[-1]})
    assert found.ladder == Buckets.ladder(max(*rows, 1)).sizes


def test_many_sizes_are_planned_by_their_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put together is held by the largest of it."""
    monkeypatch.setattr(ladder, "MOST_SIZES", 16)
    rows = {size: 1 + size % 3 for size in range(1, 101)}
    planned = plan_buckets(rows, 8)
    assert len(planned.sizes) == 8
    assert planned.sizes[-1] == 100
    assert planned.waste < plan_buckets(rows, 4).waste < 0.25


def test_a_runner_counts_the_rows_that_buckets_are_planned_from(backend: Backend) -> None:
    """A new runner with the planned buckets pads less."""
    runner: Any = decoder(Ids, lambda view: view.ids * 2, backend=backend, buckets=[8, 16])
    sizes = [3, 3, 3, 3, 5, 5, 12]
    for size in sizes:
        runner({"ids": torch.arange(size, device=backend.device)})
    assert runner.stats()["rows"] == {3: 4, 5: 2, 12: 1}
    planned = plan_buckets(runner.stats()["rows"], graphs=2, largest=16)
    assert planned.sizes == (5, 16)
    assert plan_buckets(runner.stats()["rows"], graphs=3, largest=16).sizes == (3, 5, 16)
    better: Any = decoder(Ids, lambda view: view.ids * 2, backend=backend, buckets=planned.sizes)
    for size in sizes:
        better({"ids": torch.arange(size, device=backend.device)})
    counts = better.stats()["buckets"].values()
    assert 1 - sum(one["live"] for one in counts) / sum(one["padded"] for one in counts) == pytest.approx(planned.waste)
    assert str(planned).startswith("2 buckets, ")
    assert "the default ladder: 5 buckets, " in str(planned)


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        ({}, {}, "rows has no steps"),
        ([3, 4], {}, "rows: expected a mapping of live rows to numbers of steps, got"),
        ({"3": 4}, {}, "rows: expected live rows between 0 and"),
        ({3: 1.5}, {}, "rows: expected numbers of steps, got 1.5"),
        ({3: 4}, {"graphs": 0}, "graphs: expected a whole number, at least 1, or None, got 0"),
        ({3: 4}, {"waste": 2}, "waste: expected a share between 0 and 1, got 2"),
        ({3: 4}, {"largest": 2}, "largest: expected at least 3, the largest size in rows, got 2"),
    ],
)
def test_what_is_no_traffic_is_refused(given: Any, options: dict[str, Any], says: str) -> None:
    """The error says what was expected."""
    with pytest.raises(ConfigError, match=says):
        plan_buckets(given, **options)


PAIRS = st.dictionaries(
    st.tuples(st.integers(0, 9), st.integers(0, 40)), st.integers(0, 30), min_size=1, max_size=12
).filter(lambda rows: sum(rows.values()))


def padded_pairs(buckets: Any, rows: Any) -> int:
    """Return the padded rows of all steps: each takes the bucket of the least product that holds it."""
    return sum(
        count * min(x * y for x, y in buckets if x >= max(first, 1) and y >= max(second, 1))
        for (first, second), count in rows.items()
    )


@given(PAIRS, st.integers(1, 7))
def test_no_ladders_on_two_axes_pad_less(rows: Any, graphs: int) -> None:
    """Of all grids of so many graphs, whatever their sizes, none pads less; all batches fit."""
    planned = plan_buckets(rows, graphs)
    assert len(planned.sizes) <= graphs
    known = collections.Counter[tuple[int, int]]()
    for (first, second), count in rows.items():
        known[max(first, 1), max(second, 1)] += count
    tops = [max(column) for column in zip(*known, strict=True)]
    own = padded_pairs(planned.sizes, rows)
    assert max(one[0] for one in planned.sizes) == tops[0]
    assert max(one[1] for one in planned.sizes) == tops[1]
    firsts, seconds = ({*column} - {top} for column, top in zip(zip(*known, strict=True), tops, strict=True))
    for few, more in itertools.product(range(graphs), range(graphs)):
        if (few + 1) * (more + 1) > graphs:
            continue
        for xs, ys in itertools.product(itertools.combinations(firsts, few), itertools.combinations(seconds, more)):
            assert padded_pairs([*itertools.product([*xs, tops[0]], [*ys, tops[1]])], rows) >= own
    live = sum(x * y * count for (x, y), count in known.items())
    assert planned.waste == pytest.approx(1 - live / own)
    assert sum(planned.steps) == sum(rows.values())


@given(PAIRS, st.integers(0, 20))
def test_two_axes_are_planned_no_worse_than_powers_of_two(rows: Any, more: int) -> None:
    """With as many graphs as the default grid has, or more, there is no more padding; for the same, no more graphs."""
    grid = plan_buckets(rows, 1).ladder
    planned = plan_buckets(rows, len(grid) + more)
    assert padded_pairs(planned.sizes, rows) <= padded_pairs(grid, rows)
    again = plan_buckets(rows, len(grid), waste=max(planned.ladder_waste, 0))
    assert again.waste <= planned.ladder_waste + 1e-9
    assert len(again.sizes) <= len(planned.sizes)


def test_many_pairs_are_planned_by_their_neighbours() -> None:
    """Contexts that are all different, as steps have them; more graphs pad less."""
    rows = {(1 + size % 13, size): 1 for size in range(1, 2000, 3)}
    found = [plan_buckets(rows, graphs) for graphs in (2, 6, 12)]
    assert [len(one.sizes) for one in found] == [2, 6, 12]
    assert found[0].waste > found[1].waste > found[2].waste
    assert all(one.sizes[-1] == (13, max(size for _, size in rows)) for one in found)
    assert "the default ladder" in str(found[0])


def test_a_runner_on_two_axes_is_planned_from_its_traffic(backend: Backend) -> None:
    """Its statistics are a histogram of pairs, and the planned buckets go into its options with their axes."""

    class Wide(Inputs):
        table: torch.Tensor = copied(BATCH, KV, dtype=torch.int64, pad=0)

    def made(buckets: Any) -> Any:
        return ready(GraphRunner(Wide, lambda view: view.table.sum(1), buckets=buckets, backend=backend))

    traffic = [(1, 9), (1, 9), (1, 8), (4, 2), (3, 2), (2, 5)]
    runner = made({BATCH: [8], KV: [16]})
    for sizes in traffic:
        runner({"table": torch.ones(sizes, dtype=torch.int64, device=backend.device)})
    planned = plan_buckets(runner.stats()["rows"], graphs=3, largest=(4, 16))
    assert planned.waste < 1 - 85 / (6 * 64)
    better = made(planned.over(BATCH, KV))
    for sizes in traffic:
        better({"table": torch.ones(sizes, dtype=torch.int64, device=backend.device)})
    counts = better.stats()["buckets"]
    assert {bucket: one["steps"] for bucket, one in counts.items()} == {
        bucket: steps for bucket, steps in zip(planned.sizes, planned.steps, strict=True) if steps
    }
    assert 1 - sum(one["live"] for one in counts.values()) / sum(
        one["padded"] for one in counts.values()
    ) == pytest.approx(planned.waste)


def test_memory_and_time_limit_the_graphs() -> None:
    """As many graphs as are affordable, if each takes what those of the report took; at least one."""
    report = CaptureReport((1, 2), seconds=4.0, memory=MemoryAccount(graphs=1000), graphs=4)
    rows = dict.fromkeys(range(1, 20), 1)
    assert len(plan_buckets(rows, bytes=1800, report=report).sizes) == 7
    assert len(plan_buckets(rows, 5, bytes=1800, report=report).sizes) == 5
    assert len(plan_buckets(rows, bytes=1800, seconds=3, report=report).sizes) == 3
    assert len(plan_buckets(rows, seconds=0.1, report=report).sizes) == 1


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        ({(3, 4): 4, 3: 1}, {}, "rows: expected live rows, or two sizes for each step, and largest= alike"),
        ({(3, 4, 5): 4}, {}, "rows: expected live rows, or two sizes for each step"),
        ({(3,): 4}, {}, "rows: expected live rows, or two sizes for each step"),
        ({(3, "4"): 4}, {}, "rows: expected live rows between 0 and .* got '4'"),
        ({(3, -4): 4}, {}, "rows: expected live rows between 0 and .* got -4"),
        ({(3, 4): 4}, {"largest": 4}, "rows: expected live rows, or two sizes for each step, and largest= alike"),
        ({(3, 4): 4}, {"largest": (4, 3)}, "largest: expected at least 4, the largest size in rows, got 3"),
        ({3: 4}, {"largest": (4, 3)}, "rows: expected live rows, or two sizes for each step, and largest= alike"),
        ({3: 4}, {"bytes": 0}, "bytes: expected a number, more than 0, got 0"),
        ({3: 4}, {"seconds": -1}, "seconds: expected a number, more than 0, got -1"),
        ({3: 4}, {"bytes": 4}, "report: expected the report of a runner with graphs, with bytes=, got None"),
    ],
)
def test_what_is_no_traffic_of_pairs_is_refused(given: Any, options: dict[str, Any], says: str) -> None:
    """The error says what was expected."""
    with pytest.raises(ConfigError, match=says):
        plan_buckets(given, **options)
