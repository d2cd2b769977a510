"""Buckets: explicit and laddered, which one a row count goes to, and how much padding that makes."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import Buckets
from slotgraph.dataflow.errors import ConfigError

sizes = st.lists(st.integers(1, 600), min_size=1, max_size=12, unique=True)
largest = st.integers(1, 2000)


@given(largest)
def test_ladder_ascends_to_the_largest(top: int) -> None:
    """A ladder begins at 1, ascends without repeating itself, and ends at the largest size, even one off its steps."""
    ladder = Buckets.ladder(top)
    assert ladder.sizes[0] == 1
    assert ladder.sizes[-1] == ladder.largest == top
    assert all(a < b for a, b in itertools.pairwise(ladder.sizes))


@given(largest, st.data())
def test_ladder_wastes_little(top: int, data: st.DataObject) -> None:
    """A row count is padded by less than the ladder's step: to twice itself below 8, by 8, 16 and 32 rows beyond."""
    rows = data.draw(st.integers(1, top))
    bucket = Buckets.ladder(top).fit(rows)
    assert bucket is not None
    step = next(step for stop, step in ((256, 8), (512, 16), (3000, 32)) if rows <= stop)
    assert 0 <= bucket - rows < (rows if rows <= 8 else step)


@given(largest)
def test_ladder_is_short(top: int) -> None:
    """A ladder has few graphs: no more than one for each 8 rows, and the few smallest."""
    assert len(Buckets.ladder(top).sizes) <= 5 + top // 8


@given(sizes)
def test_sizes_are_sorted(given_sizes: list[int]) -> None:
    """Sizes come in any order, and are kept ascending; one that is given twice is refused."""
    assert list(Buckets(tuple(given_sizes)).sizes) == sorted(given_sizes)
    with pytest.raises(ConfigError, match="given once each"):
        Buckets((*given_sizes, given_sizes[-1]))


@given(sizes, st.integers(0, 700))
def test_fit_is_the_smallest_that_holds(given_sizes: list[int], rows: int) -> None:
    """A row count goes to the smallest bucket that holds it, and to none where it is larger than all."""
    holding = [size for size in given_sizes if size >= rows]
    assert Buckets(tuple(given_sizes)).fit(rows) == (min(holding) if holding else None)


@given(sizes, st.floats(0, 1))
def test_table_keeps_the_waste_limit(given_sizes: list[int], limit: float) -> None:
    """The table sends each row count to its bucket, to none where too much would be padding; no rows waste nothing."""
    buckets = Buckets(tuple(given_sizes), limit)
    table = buckets.table()
    assert len(table) == buckets.largest + 1
    for rows, bucket in enumerate(table):
        fit = buckets.fit(rows)
        assert fit is not None
        assert bucket == (fit if not rows or (fit - rows) / fit <= limit else None)


def test_waste_of_a_bucket() -> None:
    """37 rows in a bucket of 48 waste 11 of its 48 rows."""
    assert Buckets((48,)).waste(37, 48) == pytest.approx(11 / 48)
    assert Buckets((48,)).waste(48, 48) == 0


@pytest.mark.parametrize("bad", [(), (0,), (4, -1), (True,), (2.0,), ("4",)])
def test_bad_sizes(bad: tuple[Any, ...]) -> None:
    """Sizes are whole numbers of at least 1, and there is at least one."""
    with pytest.raises(ConfigError, match="buckets are whole numbers of at least 1"):
        Buckets(bad)


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
def test_bad_waste(bad: float) -> None:
    """The limit is a share."""
    with pytest.raises(ConfigError, match="max_waste is a share"):
        Buckets((4,), bad)


@pytest.mark.parametrize("top", [0, -5])
def test_ladder_to_nothing(top: int) -> None:
    """A ladder up to no rows is refused, not empty."""
    with pytest.raises(ConfigError, match="whole numbers of at least 1"):
        Buckets.ladder(top)
