"""Host data: what each lowering makes of lists, tuples and arrays, good and bad, is what torch makes of them."""

import math
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, Inputs, copied
from slotgraph.dataflow.bucket import Bucket
from slotgraph.dataflow.buffers import allocate
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import BatchError
from slotgraph.dataflow.hostdata import tensor_of
from tests.fused import feed_for, kernel_of
from tests.strategies import DTYPES, declaration_of, empty, noise, same_bytes

ODD: Final[tuple[Any, ...]] = (
    *(True, False, 0, 1, -1, 127, 128, 255, 256, -129, 1 << 31, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, -(1 << 70)),
    *(0.1, -0.0, 1.5, 65505.0, 1e39, 1e309, float("nan"), -1e-46, 16777217.0),
    *(np.int64(3), np.uint8(200), np.float32(2.5), np.float64(0.1), np.bool_(True)),  # noqa: FBT003 - numpy's own
    *(None, "3", b"3", 1j, [1], ()),
)
MOST = 5


class Way:
    """One slot of a dtype, filled by foreach and by the kernel, each over buffers of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        made: type[Inputs] = declaration_of(
            {"rows": copied(BATCH, dtype=dtype, pad=True if dtype == torch.bool else 1)}
        )
        sizes, capabilities = {BATCH: MOST}, Capabilities()
        slots, memory = made.slotgraph, [allocate(made.slotgraph, sizes, capabilities, empty) for _ in range(2)]
        self.buckets = [
            Bucket(slots, sizes, capabilities, memory[0]),
            Bucket(slots, sizes, capabilities, memory[1], lowering="in_graph", feed=feed_for(memory[1])),
        ]
        self.kernel = kernel_of(self.buckets[1])

    def foreach(self, value: Any) -> torch.Tensor | None:
        """The slot, or nothing where the value is refused."""
        return self._filled(0, value)

    def by_kernel(self, value: Any) -> torch.Tensor | None:
        """The same by the kernel, which takes all that foreach takes."""
        filled = self._filled(1, value)
        if filled is not None:
            self.kernel()
        return filled

    def _filled(self, which: int, value: Any) -> torch.Tensor | None:
        bucket = self.buckets[which]
        try:
            bucket.fill({"rows": value}, (len(value),))
        except BatchError:
            return None
        return bucket.buffers["rows"].tensor


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    """A slot of each dtype."""
    return Way(request.param)


def assert_same(way: Way, value: Any) -> torch.Tensor | None:
    """Both lowerings refuse a value, or leave the same bytes, which are returned."""
    right, mine = way.foreach(value), way.by_kernel(value)
    if right is None or mine is None:
        assert right is mine, f"{way.dtype}: {value!r} is {mine} by the kernel, {right} by foreach"
    else:
        assert same_bytes(mine, right), f"{way.dtype}: {value!r} is {mine} by the kernel, {right} by foreach"
    return right


@given(value=st.lists(st.sampled_from(ODD), max_size=MOST), boxed=st.sampled_from([list, tuple]))
def test_odd_numbers(way: Way, value: list[Any], boxed: type) -> None:
    """Lists of numbers on the verge, of mixed kinds or of no numbers are taken alike, or refused alike."""
    assert_same(way, boxed(value))


def test_each_odd_number(way: Way) -> None:
    """The same for each of them alone, and what is taken is what torch makes of it."""
    for value in ODD:
        right = assert_same(way, [value, value])
        if right is not None:
            exact = torch.tensor([value, value], dtype=way.dtype)
            torch.testing.assert_close(right[:2], exact, rtol=0, atol=0, equal_nan=True)
            if way.dtype.is_floating_point:
                assert right[:2].isfinite().tolist() == [math.isfinite(value)] * 2


BOOLS: Final[tuple[Any, ...]] = (True, False, np.bool_(True))  # noqa: FBT003 - numpy's own
NUMBERS: Final[tuple[Any, ...]] = (0, 1, 7, 0.5, 1.0, np.int64(1), np.float32(0.0))


@given(value=st.lists(st.sampled_from([*BOOLS, *NUMBERS]), min_size=2, max_size=MOST))
def test_bools_among_numbers(way: Way, value: list[Any]) -> None:
    """One bool among numbers is refused, wherever it stands, by every dtype; bools alone are for bools alone."""
    bools = sum(type(one) in (bool, np.bool_) for one in value)
    right = assert_same(way, value)
    if bools:
        assert (right is not None) == (bools == len(value) and way.dtype == torch.bool)


@given(rows=st.integers(0, 4), columns=st.integers(1, 3), deep=st.booleans(), seed=st.integers(0, 1 << 30))
def test_nested_lists(way: Way, rows: int, columns: int, *, deep: bool, seed: int) -> None:
    """Nested lists come through bit by bit, in every dtype, whatever lists and tuples they are made of."""
    value = noise((rows, columns, 2) if deep else (rows, columns), way.dtype, seed)
    if way.dtype == torch.float64:
        value = value + torch.rand(value.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    brought = value.tolist()
    made = tensor_of(tuple(map(tuple, brought)) if seed % 2 else brought, way.dtype)
    assert same_bytes(made, value if rows else value.new_empty(0))


REFUSED: Final[dict[str, tuple[Any, torch.dtype, str]]] = {
    "too large for float32": ([3.0, 1e300], torch.float32, r"float32 cannot hold 1e\+300"),
    "nested": ([[3.0, -1e39]], torch.float32, r"float32 cannot hold -1e\+39"),
    "too large for float16": ([65520], torch.float16, r"float16 cannot hold 65520.0"),
    "too large for bfloat16": ([[3.4e38]], torch.bfloat16, r"bfloat16 cannot hold 3.4e\+38"),
    "too large for any": ([0.5, 10**400], torch.float64, r"can't convert np.ndarray of type numpy.object_"),
    "negative": ([3, -1], torch.uint8, r"uint8 cannot hold -1"),
    "negative and nested": ([[3], [-7]], torch.uint16, r"uint16 cannot hold -7"),
    "bools among numbers": ([[2, 3], [True, 4]], torch.int64, r"bools and numbers together"),
    "unlike lengths": (
        [[1], [1, 2]],
        torch.int64,
        r"its rows are ragged, or stand beside numbers: pad them to one length",
    ),
    "a number beside a list": ([[1], 2], torch.int64, r"its rows are ragged, or stand beside numbers"),
    "a mapping beside a list": ([[1], {2: 3}], torch.int64, r"its rows are ragged, or stand beside numbers"),
}


@pytest.mark.parametrize("value", REFUSED)
def test_what_is_no_box_of_numbers(value: str) -> None:
    """What a dtype cannot hold, and lists that are no box, are refused with the reason, not changed."""
    given_value, dtype, said = REFUSED[value]
    with pytest.raises((RuntimeError, TypeError, ValueError), match=said):
        tensor_of(given_value, dtype)


def test_lists_of_nothing() -> None:
    """Empty lists keep the dims that they show."""
    values: list[Any] = [[], [[]], [[], []], [[[]]]]
    shapes = {repr(value): [*tensor_of(value, torch.int32).shape] for value in values}
    assert shapes == {"[]": [0], "[[]]": [1, 0], "[[], []]": [2, 0], "[[[]]]": [1, 1, 0]}


def test_infinity_is_a_float() -> None:
    """Infinity and NaN that were brought are taken."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        made = tensor_of([[math.inf, -math.inf, math.nan]], dtype)
        assert str(made.tolist()) == "[[inf, -inf, nan]]"


ARRAYS: Final = ("<i8", ">i8", "u2", "u8", "f8", "f4", "f2", "i1", "?", "c8", "O", "U1", "M8[s]")


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_of_every_dtype(way: Way, kind: str) -> None:
    """Arrays whose dtype is the slot's are taken; all others, and those that torch has no dtype for, are refused."""
    for rows in (0, 1, 3):
        array = np.arange(1, rows + 1).astype(kind)
        right = assert_same(way, array)
        is_same = array.dtype.isnative and array.dtype.name == str(way.dtype).removeprefix("torch.")
        assert (right is not None) == is_same
        if right is not None:
            assert right[:rows].tolist() == array.tolist()


@given(rows=st.integers(0, MOST), seed=st.integers(0, 1 << 30))
def test_plain_numbers(way: Way, rows: int, seed: int) -> None:
    """What a tensor of the slot's dtype holds comes through as lists, tuples and arrays, bit by bit."""
    value = noise((rows,), way.dtype, seed)
    for brought in (value.tolist(), tuple(value.tolist()), value if way.dtype == torch.bfloat16 else value.numpy()):
        right = assert_same(way, brought)
        assert right is not None
        assert same_bytes(right[:rows], value)


def test_an_array_over_a_slot_that_is_copied_apart() -> None:
    """An array that lies in a slot's memory is read before that slot is written, whichever way the two go."""
    fields = {
        "rows": copied(BATCH, dtype=torch.int64, pad=0),
        "apart": copied(BATCH, dtype=torch.int64, pad=0, placement="host"),
    }
    slots, sizes = declaration_of(fields).slotgraph, {BATCH: MOST}
    buffers = allocate(slots, sizes, Capabilities(), empty)
    bucket = Bucket(slots, sizes, Capabilities(), buffers, lowering="in_graph", feed=feed_for(buffers))
    kernel = kernel_of(bucket)
    for seed in range(3):
        rows = bucket.buffers["apart"].tensor[:3].numpy()
        right, apart = rows.tolist(), noise((3,), torch.int64, seed)
        bucket.fill({"rows": rows, "apart": apart}, (3,))
        kernel()
        assert bucket.buffers["rows"].tensor[:3].tolist() == right
        assert bucket.buffers["apart"].tensor[:3].tolist() == apart.tolist()
