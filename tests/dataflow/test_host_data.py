"""Host data: what each lowering makes of lists, tuples and arrays is what torch makes of them, within their limits."""

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, Axis, Inputs, copied
from slotgraph.dataflow.buffers import allocate
from slotgraph.dataflow.capabilities import Capabilities, LoweringName
from slotgraph.dataflow.errors import BatchError
from slotgraph.dataflow.fill.bucket import Bucket
from slotgraph.dataflow.fill.kinds import KindTable
from slotgraph.dataflow.hostdata import tensor_of
from slotgraph.dataflow.sizing import Sizer, limits_of
from slotgraph.extend import HOST, side
from tests.packing import feed_for, filled, kernel_of
from tests.strategies import DTYPES, declaration_of, empty, noise, same_bytes

ODD: Final[tuple[Any, ...]] = (
    *(True, False, 0, 1, -1, 127, 128, 255, 256, -129, 1 << 31, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, -(1 << 70)),
    *(0.1, -0.0, 1.5, 65505.0, 1e39, 1e309, float("nan"), -1e-46, 16777217.0),
    *(np.int64(3), np.uint8(200), np.float32(2.5), np.float64(0.1), np.bool_(True)),  # noqa: FBT003 - numpy's own
    *(None, "3", b"3", 1j, [1], ()),
)
MOST = 5
SIZES: Final = {BATCH: MOST}
LOWERINGS: Final[tuple[LoweringName, ...]] = ("foreach", "in_graph")


class Way:
    """One slot of a dtype, filled by foreach and by the kernel, each over buffers of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        slots = declaration_of({"rows": copied(BATCH, dtype=dtype, pad=True if dtype == torch.bool else 1)}).slotgraph
        self.dtype, self.buckets = dtype, list[Bucket]()
        for lowering in LOWERINGS:
            buffers = allocate(slots, SIZES, Capabilities(), empty)
            feed = feed_for(buffers)
            self.buckets.append(Bucket(slots, SIZES, Capabilities(), buffers, lowering=lowering, feed=feed))
        self.kernel = kernel_of(self.buckets[1])

    def filled(self, bucket: Bucket, value: Any) -> torch.Tensor | None:
        """The slot, or nothing where the value is refused."""
        try:
            filled(bucket, {"rows": value}, (len(value),))
        except BatchError:
            return None
        self.kernel()
        return bucket.buffers["rows"].tensor


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    """A slot of each dtype."""
    return Way(request.param)


def assert_same(way: Way, value: Any) -> torch.Tensor | None:
    """Both lowerings refuse a value, or leave the same bytes, which are returned."""
    right, mine = (way.filled(bucket, value) for bucket in way.buckets)
    same = right is mine if right is None or mine is None else same_bytes(mine, right)
    assert same, f"{way.dtype}: {value!r} is {mine} by the kernel, {right} by foreach"
    return right


@given(value=st.lists(st.sampled_from(ODD), max_size=MOST), boxed=st.sampled_from([list, tuple]))
def test_odd_numbers_are_taken_or_refused_alike(way: Way, value: list[Any], boxed: type) -> None:
    """Lists of numbers on the verge, of mixed kinds or of no numbers are taken alike, or refused alike."""
    assert_same(way, boxed(value))


def test_each_odd_number_is_what_torch_makes_of_it(way: Way) -> None:
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
def test_a_bool_among_numbers_is_refused(way: Way, value: list[Any]) -> None:
    """One bool among numbers is refused, wherever it stands, by every dtype; bools alone are for bools alone."""
    bools = sum(type(one) in (bool, np.bool_) for one in value)
    right = assert_same(way, value)
    if bools:
        assert (right is not None) == (bools == len(value) and way.dtype == torch.bool)


@given(rows=st.integers(0, 4), columns=st.integers(1, 3), deep=st.booleans(), seed=st.integers(0, 1 << 30))
def test_nested_lists_come_through_bit_by_bit(way: Way, rows: int, columns: int, *, deep: bool, seed: int) -> None:
    """Nested lists come through bit by bit, in every dtype, whatever lists and tuples they are made of."""
    value = noise((rows, columns, 2) if deep else (rows, columns), way.dtype, seed)
    if way.dtype == torch.float64:
        value = value + torch.rand(value.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    brought = value.tolist()
    made = tensor_of(tuple(map(tuple, brought)) if seed % 2 else brought, way.dtype)
    assert same_bytes(made, value if rows else value.new_empty(0))


RAGGED: Final = "its rows are ragged, or mixed with numbers: pad them to one length"
REFUSED: Final[list[tuple[Any, torch.dtype, str]]] = [
    ([3.0, 1e300], torch.float32, r"float32 cannot hold 1e\+300"),
    ([[3.0, -1e39]], torch.float32, r"float32 cannot hold -1e\+39"),
    ([65520], torch.float16, r"float16 cannot hold 65520.0"),
    ([[3.4e38]], torch.bfloat16, r"bfloat16 cannot hold 3.4e\+38"),
    ([0.5, 10**400], torch.float64, "it holds float and int; give numbers of at most 64 bits"),
    ([3, -1], torch.uint8, r"uint8 cannot hold -1"),
    ([[3], [-7]], torch.uint16, r"uint16 cannot hold -7"),
    ([[2, 3], [True, 4]], torch.int64, r"bools and numbers together"),
    *((ragged, torch.int64, RAGGED) for ragged in ([[1], [1, 2]], [[1], 2], [[1], {2: 3}])),
]


def test_lists_of_arrays_are_of_a_known_kind_at_each_size() -> None:
    """They take the way of lists, whatever their number of rows. Rows of another length are another kind."""
    slots = declaration_of({"rows": copied(BATCH, 3, dtype=torch.int32, pad=0)}).slotgraph
    table = KindTable(slots, SIZES, Sizer(slots, {}, SIZES))
    kinds = table.add(([*np.arange(6, dtype=np.int32).reshape(2, 3)],))
    for rows in (1, MOST):
        sources = ([*np.ones((rows, 3), dtype=np.int32)],)
        assert table.find(sources) is kinds
        assert kinds.read(sources) == (rows,)
    assert kinds.read(([*np.ones((2, 4), dtype=np.int32)],)) is None
    assert kinds.read(([*np.ones((2, 3, 1), dtype=np.int32)],)) is None


def test_whole_numbers_of_64_bits_are_taken_as_they_are() -> None:
    """NumPy makes floats of those that int64 and uint64 hold apart, and a kind that torch does not know of others."""
    big, most = 1 << 63, (1 << 64) - 1
    wholes: list[Any] = [[big], [1, big], [most, 0, big + 1], [np.uint64(big), 1], (big, 1)]
    for numbers in wholes:
        assert tensor_of(numbers, torch.uint64, (-1,)).tolist() == [*map(int, numbers)]
        with pytest.raises(ValueError, match=r"int64 cannot hold [19]\d{18}"):
            tensor_of(numbers, torch.int64, (-1,))
        assert tensor_of(numbers, torch.float64, (-1,)).tolist() == [*map(float, numbers)]
    with pytest.raises(ValueError, match="uint64 cannot hold -1"):
        tensor_of([-1, big], torch.uint64, (-1,))
    with pytest.raises(TypeError, match="bools and numbers together"):
        tensor_of([True, big], torch.uint64, (-1,))


def test_what_is_no_box_of_numbers_is_refused() -> None:
    """What a dtype cannot hold, and lists that are no box, are refused with the reason, not changed."""
    for brought, dtype, said in REFUSED:
        with pytest.raises((RuntimeError, TypeError, ValueError), match=said):
            tensor_of(brought, dtype)


def test_empty_lists_keep_the_dims_that_they_show() -> None:
    """Empty lists keep the dims that they show."""
    values: list[Any] = [[], [[]], [[], []], [[[]]]]
    shapes = {repr(value): [*tensor_of(value, torch.int32).shape] for value in values}
    assert shapes == {"[]": [0], "[[]]": [1, 0], "[[], []]": [2, 0], "[[[]]]": [1, 1, 0]}
    assert str(tensor_of([[math.inf, math.nan]], torch.float16).tolist()) == "[[inf, nan]]"  # which were brought


ARRAYS: Final = ("<i8", ">i8", "u2", "u8", "f8", "f4", "f2", "i1", "?", "c8", "O", "U1", "M8[s]")


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_are_taken_in_the_slots_own_dtype_alone(way: Way, kind: str) -> None:
    """Arrays whose dtype is the slot's are taken; all others, and those that torch has no dtype for, are refused."""
    for rows in (0, 1, 3):
        array = np.arange(1, rows + 1).astype(kind)
        right = assert_same(way, array)
        is_same = array.dtype.isnative and array.dtype.name == str(way.dtype).removeprefix("torch.")
        assert (right is not None) == is_same
        if right is not None:
            assert right[:rows].tolist() == array.tolist()


CONTEXT: Final = Axis("CONTEXT", fixed=True)
LIMIT: Final = 40


class Limited(Inputs):
    """Limits on the host and on the device, in one dim and in two."""

    here: torch.Tensor | None = copied(BATCH, dtype=torch.int32, pad=1, placement=HOST, limit=CONTEXT, default=None)
    there: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1, limit=LIMIT)
    pairs: torch.Tensor = copied(
        BATCH, 2, dtype=torch.int64, pad=1, placement=HOST, limit=CONTEXT * 2, source=side("beside.pairs")
    )


def check_limits(batch: dict[str, Any], beside: dict[str, Any] | None = None, over: str | None = None) -> None:
    """What is over a limit is refused by slot, row and value; all else passes."""
    with nullcontext() if over is None else pytest.raises(BatchError, match=over):
        for limit in limits_of(Limited.slotgraph, {CONTEXT: LIMIT, BATCH: 8}):
            limit.check(batch, {"beside": beside or {}})


FORMS: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "list": list,
    "tuple": tuple,
    "array": np.array,
    "strided array": lambda rows: np.array(rows[::-1])[::-1],
    "numpy's numbers": lambda rows: list(np.array(rows)),
    "arrays of one": lambda rows: [np.array(row) for row in rows],
    "torch's numbers": lambda rows: [torch.tensor(row) for row in rows],
    "float32 array": lambda rows: np.array(rows, dtype=np.float32),
    "tensor": torch.tensor,
    "bfloat16 tensor": lambda rows: torch.tensor(rows, dtype=torch.bfloat16),
}
floats = st.sampled_from([math.nan, 3.0, 38.5, 39.5, 41.0, 77.0, math.inf, -math.inf])


@pytest.mark.parametrize("form", FORMS)
@given(rows=st.lists(st.integers(0, 3 * LIMIT), max_size=8) | st.lists(floats, max_size=6), there=st.booleans())
def test_host_data_is_held_to_its_limit(form: str, rows: list[Any], *, there: bool) -> None:
    """Host data is held to its limit, whatever form it has, and NaN hides nothing; no tensor for a device is read."""
    slot, limit = ("there", str(LIMIT)) if there else ("here", rf"CONTEXT = {LIMIT}")
    over = [row for row, one in enumerate(rows) if one > LIMIT and not (there and "tensor" in form)]
    said = rf"slot '{slot}': row {over[0]} is .*, over the limit of {limit}: " if over else None
    check_limits({slot: FORMS[form](rows)}, over=said)
    check_limits({slot: FORMS[form]([LIMIT, 1])})


BOXES: Final[list[Callable[[Any], Any]]] = [
    lambda rows: np.array(rows).reshape(-1, 2),
    lambda rows: torch.tensor(rows).view(-1, 2),
    *(functools.partial(lambda box, rows: [box(row) for row in rows], box) for box in (np.array, tuple, list)),
]


@given(
    rows=st.lists(st.lists(st.integers(0, 2 * LIMIT + 3), min_size=2, max_size=2), max_size=6),
    form=st.sampled_from(BOXES),
)
def test_an_element_over_the_limit_is_named_by_its_place(rows: list[list[int]], form: Any) -> None:
    """Lists of lists, tuples and arrays, arrays and tensors from a side argument: the element is named by its place."""
    over = [(i, j) for i, row in enumerate(rows) for j, one in enumerate(row) if one > 2 * LIMIT]
    said = None
    if over:
        i, j = over[0]
        said = rf"slot 'pairs': row \[{i}, {j}\] is {rows[i][j]}, over the limit of CONTEXT \* 2 = {2 * LIMIT}"
    check_limits({}, {"pairs": form(rows)}, said)


NO_NUMBERS: Final[list[Any]] = [None, "word", 3, [], (), [None], ["a", "b"], [[]], [[1], [1, 2]], [1, "b"], object()]


def test_limits_leave_other_faults_to_the_fill() -> None:
    """What is no box of numbers is left to the fill; what lies elsewhere is not read; no slot may have a limit."""
    for value in (*NO_NUMBERS, np.array("word"), np.int64(3), torch.full((3,), 99, device="meta")):
        check_limits({"here": value, "there": value})
    free = declaration_of({"ids": copied(BATCH, dtype=torch.int64, pad=1)}).slotgraph
    assert limits_of(free, {BATCH: 4}) == []
    assert CONTEXT in Limited.slotgraph.axes
