"""Buckets from traffic, beside every choice that there is."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph.backends import Backend
from slotgraph.config import Buckets, plan_buckets
from slotgraph.errors import ConfigError
from slotgraph.runners.engine import ladder
from tests.runners.models import Ids, decoder

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
