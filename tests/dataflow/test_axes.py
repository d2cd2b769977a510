"""Axes and the expressions over them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, Axis
from slotgraph.dataflow.axes import Dim, shape_of

STEPS = Axis("STEPS", fixed=True)
SIZES = st.fixed_dictionaries({BATCH: st.integers(0, 50), TOKENS: st.integers(0, 50), STEPS: st.integers(1, 5)})
WHOLE = st.integers(0, 7)


@given(sizes=SIZES, a=WHOLE, b=WHOLE)
def test_value_of_an_expression(sizes: dict[Axis, int], a: int, b: int) -> None:
    """Sums and products over axes come to what the same arithmetic on whole numbers comes to."""
    size = (BATCH * STEPS + a) * b + TOKENS * TOKENS
    batch, tokens, steps = sizes[BATCH], sizes[TOKENS], sizes[STEPS]
    assert size.at(sizes) == (batch * steps + a) * b + tokens * tokens


@given(a=WHOLE, b=WHOLE)
def test_equal_expressions_are_equal(a: int, b: int) -> None:
    """Expressions have a normal form: however one writes it, it is one value, with one hash and one text."""
    left, right = a * BATCH + b * BATCH, BATCH * (a + b)
    assert left == right
    assert hash(left) == hash(right)
    assert repr(left) == repr(right)
    assert Dim.of(3) + TOKENS == TOKENS + 3


def test_which_axis_an_expression_tells() -> None:
    """A size tells an axis where that is its one varying axis, to the first power."""
    assert (TOKENS * STEPS + 2).reveals() == TOKENS
    assert (TOKENS * BATCH).reveals() is None
    assert (TOKENS * TOKENS).reveals() is None
    assert Dim.of(STEPS).reveals() is None


@given(sizes=SIZES, width=st.integers(1, 5))
def test_axes_written_out(sizes: dict[Axis, int], width: int) -> None:
    """An axis that follows from another can be written out, and the value stays the same."""
    size = TOKENS * STEPS + TOKENS + 4
    written = size.replace({TOKENS: BATCH * width})
    assert TOKENS not in written.axes
    assert written.at(sizes) == size.at({**sizes, TOKENS: sizes[BATCH] * width})


@pytest.mark.parametrize(
    ("wrong", "error"), [(-1, ValueError), (1.5, TypeError), ("TOKENS", TypeError), (True, TypeError)]
)
def test_what_is_no_size(wrong: object, error: type[Exception]) -> None:
    """A size is an axis, an expression or a whole number of at least 0."""
    with pytest.raises(error, match="size"):
        shape_of((BATCH, wrong))
