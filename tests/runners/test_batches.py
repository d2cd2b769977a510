"""Batches that do not fit: an error names the slot and the way out, and nothing has changed; good ones come between."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, DecodeRunner, EagerRunner, Inputs, computed, copied, errors
from slotgraph.dataflow.errors import BatchError, ComputeError, MissingSourceError
from slotgraph.errors import SlotGraphError
from tests.runners.models import (
    PlainInputs,
    assert_right,
    expected,
    nothing_changes,
    plain_runner,
    plain_step,
    random_batch,
)
from tests.strategies import declaration_of

SLOTS = ("ids", "places", "weights", "pairs")

Spoil = Callable[[torch.Tensor], Any]


def other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """A dtype that no slot here converts from."""
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int16)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with room between the rows."""
    return torch.stack([tensor, tensor + 1], 1)[:, 0]


def texts(tensor: torch.Tensor) -> list[Any]:
    """Nested lists of words."""
    return [texts(row) if row.dim() else str(row.item()) for row in tensor]


KINDS: dict[str, tuple[Spoil, str]] = {
    "dtype": (other_dtype, "convert it, or declare converts="),
    "bool": (lambda tensor: tensor > 1, "convert it, or declare converts="),
    "device": (lambda tensor: tensor.to("meta"), "move it there first"),
    "rank": (lambda tensor: tensor[..., None], "expected"),
    "scalar": (lambda tensor: tensor.flatten()[0], "expected"),
    "short": (lambda tensor: tensor[:-1], "expected"),
    "long": (lambda tensor: torch.cat([tensor, tensor[:1]]), "expected"),
    "length one": (lambda tensor: tensor[:1], "expected"),
    "strided": (strided, "pass `.contiguous()`, or declare strided=True"),
    "list of bools": (lambda tensor: (tensor > 1).tolist(), "convert it, or declare converts="),
    "list of words": (texts, "got list: "),
    "ragged list": (lambda tensor: [*tensor[:-1].tolist(), [[1], [2, 3]]], "got list: "),
    "short list": (lambda tensor: tensor[:-1].tolist(), "expected"),
    "deep list": (lambda tensor: tensor[..., None].tolist(), "expected"),
    "array of another dtype": (lambda tensor: other_dtype(tensor).numpy(), "convert it, or declare converts="),
    "array of objects": (lambda tensor: tensor.numpy().astype(object), "got ndarray: "),
    "long array": (lambda tensor: torch.cat([tensor, tensor[:1]]).numpy(), "expected"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_source_that_does_not_fit(runner: DecodeRunner[PlainInputs], kind: str) -> None:
    """A source of the wrong dtype, device, rank, length, layout or type is refused, on a graph's path and eagerly."""
    spoil, way_out = KINDS[kind]
    for turn, slot in enumerate(SLOTS):
        batch = random_batch((6, 20)[(turn + len(kind)) % 2], seed=1)
        batch[slot] = spoil(batch[slot])
        with nothing_changes(runner, batch), pytest.raises(BatchError) as refused:
            runner(batch)
        assert repr(slot) in str(refused.value)
        assert way_out in str(refused.value)


def test_missing_source(runner: DecodeRunner[PlainInputs]) -> None:
    """A required source that the batch lacks, or has as None, is refused: last step's rows are never used for it."""
    for turn, slot in enumerate(SLOTS):
        batch = random_batch((6, 20)[turn % 2], seed=2)
        left_out = {name: value for name, value in batch.items() if name != slot}
        for lacking in (left_out, {**batch, slot: None}):
            says = rf"slot '{slot}'.* is missing; "
            with nothing_changes(runner, lacking), pytest.raises(MissingSourceError, match=says):
                runner(lacking)


def test_every_fault_at_once(runner: DecodeRunner[PlainInputs]) -> None:
    """Two faults of one batch arrive in one message."""
    batch = random_batch(6, seed=3)
    batch["weights"], batch["places"] = batch["weights"].double(), ["here"] * 6
    with nothing_changes(runner, batch), pytest.raises(BatchError) as refused:
        runner(batch)
    assert "slot 'places': expected int64 of shape [6] on cpu, got list: " in str(refused.value)
    assert "slot 'weights': expected float32 of shape [6] on cpu, got float64" in str(refused.value)


def test_float_into_an_index_slot(runner: DecodeRunner[PlainInputs]) -> None:
    """Floats are not truncated into an index slot, even where each is a whole number, nor where they come in a list."""
    for slot in ("ids", "places"):
        batch = random_batch(6, seed=4)
        for floats in (batch[slot].float(), batch[slot].float().tolist(), batch[slot].float().numpy()):
            bad = {**batch, slot: floats}
            says = rf"'{slot}': expected int64.*got float32; round it yourself"
            with nothing_changes(runner, bad), pytest.raises(BatchError, match=says):
                runner(bad)


class MarkedInputs(PlainInputs):
    """A slot computed on the host from a value that the batch carries."""

    mark: torch.Tensor = computed(lambda flag: flag, shape=1, dtype=torch.int32)
    flag: Any


def marked_runner(backend: str) -> DecodeRunner[MarkedInputs]:
    """A captured runner over slots of which one is computed from the batch's `flag`."""
    runner = DecodeRunner(MarkedInputs, plain_step, backend=backend, buckets=[4, 8])
    runner.capture()
    return runner


def test_host_function_that_returns_nonsense(cpu: str) -> None:
    """What a function returns and its slot cannot hold is an error with the slot's name; the next batch is right."""
    runner = marked_runner(cpu)
    for nonsense in ("text", 2.5, True, [1, 2], 1 << 40, None):
        with pytest.raises(ComputeError, match="slot 'mark'"):
            runner({**random_batch(5, seed=11), "flag": nonsense})
        good = {**random_batch(3, seed=12), "flag": 4}
        assert_right(runner(good), good)


def test_replay_after_a_fill_that_broke_off(cpu: str) -> None:
    """A fill that broke off half-way has overwritten the view before it, so that view must not be replayed."""
    runner = marked_runner(cpu)
    first = {**random_batch(3, seed=13), "flag": 4}
    view = runner.fill(first)
    with pytest.raises(ComputeError):
        runner.fill({**random_batch(3, seed=14), "flag": "text"})
    try:
        outputs = runner.replay(view)
    except SlotGraphError:
        return
    assert_right(outputs, first)


class IndexInputs(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    marks: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


def test_error_says_what_came(cpu: str) -> None:
    """A source that is no box of numbers at all is told what it is, whether or not the size is read off it."""
    runner = DecodeRunner(IndexInputs, lambda view: view.ids, backend=cpu, buckets=[4])
    runner.capture()
    good = torch.tensor([1, 2])
    for value in ("text", 3, {1, 2}, range(2), object()):
        kind = type(value).__name__
        with pytest.raises(BatchError, match=rf"slot 'ids': expected a size of 1 \* BATCH on dim 0.*got {kind}"):
            runner({"ids": value, "marks": good})
        with pytest.raises(BatchError, match=rf"slot 'marks': expected int64 of shape \[2\] on cpu, got {kind}"):
            runner({"ids": good, "marks": value})
    assert runner({"ids": good, "marks": [3, 4]}).tolist() == [1, 2]


def test_whole_numbers_in_a_list_for_floats(runner: DecodeRunner[PlainInputs]) -> None:
    """They are floats where the slot's are, beside floats or alone; those of a tensor are not."""
    batch = random_batch(6, seed=40)
    batch["weights"], batch["pairs"][:, 0] = torch.arange(6).float(), 3.0
    pairs = [[3, second] for second in batch["pairs"][:, 1].tolist()]
    assert_right(runner({**batch, "weights": list(range(6)), "pairs": pairs}), batch)


class NotedInputs(PlainInputs):
    note: str = "usual"


def test_many_live_sizes(cpu: str) -> None:
    """More live sizes than a fill keeps ready, twice over and backwards, are all right, tails included."""
    runner = plain_runner(cpu, buckets=[1, 64, 1100])
    sizes = [*range(1, 1100, 9), 2, 1100, 1, *range(1099, 1, -13)]
    for requests in sizes:
        batch = random_batch(requests, seed=requests)
        view = runner.fill(batch)
        padded = next(size for size in (1, 64, 1100) if size >= requests)
        assert view.weights[requests:].tolist() == [-7.5] * (padded - requests)
        assert view.ids[requests:].tolist() == [49] * (padded - requests)
        outputs = runner.replay(view)
        some = {name: value[-3:] for name, value in batch.items()}
        assert outputs.shape[0] == requests
        answer = expected(some) + requests - len(some["ids"])
        torch.testing.assert_close(outputs[-3:], answer, rtol=1e-4, atol=1e-3)


@given(sizes=st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=2, max_size=25))
def test_graphs_and_eager_runs_take_turns(wasteful: DecodeRunner[NotedInputs], sizes: list[tuple[int, bool]]) -> None:
    """Eager runs between graphs, for whatever reason, leave no row of theirs in a later bucket's tail."""
    for number, (requests, differs) in enumerate(sizes):
        batch = random_batch(requests, seed=number)
        view = wasteful.fill({**batch, "note": "differs"} if differs else batch)
        padded = view.weights.shape[0]
        assert torch.equal(view.weights[:requests], batch["weights"])
        assert view.weights[requests:].tolist() == [-7.5] * (padded - requests)
        assert view.ids[requests:].tolist() == [49] * (padded - requests)
        assert view.pairs[requests:].tolist() == [[9, 9]] * (padded - requests)
        assert_right(wasteful.replay(view), batch)


@pytest.fixture(scope="module")
def wasteful(cpu: str) -> DecodeRunner[NotedInputs]:
    """A runner that often has a reason to run eagerly in between."""
    runner = DecodeRunner(NotedInputs, plain_step, buckets=[2, 8], backend=cpu, max_waste=0.5)
    runner.capture()
    return runner


NAMES: tuple[str, ...] = ("a_first", "b_second", "c_third", "d_fourth")


WIDTH = 2


class Rows(Inputs):
    """Four sources that tell the requests, one of them by their tokens; the first one by name is the one believed."""

    a_first: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    b_second: torch.Tensor = copied(BATCH, 3, dtype=torch.int64, pad=0)
    c_third: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0, source="nested.rows")
    d_fourth: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


def sized_runners(inputs: type[Inputs]) -> Iterator[DecodeRunner[Any]]:
    """One of each kind that sizes batches in its own way."""
    decode = DecodeRunner(inputs, first_step, buckets=[4, 16], width=WIDTH, output_rows=None, backend="cpu-capture")
    decode.capture()
    yield decode
    eager = DecodeRunner(inputs, first_step, buckets=[16], width=WIDTH, output_rows=None, graphs=False, backend="cpu")
    eager.capture()
    yield eager


def first_step(view: Any) -> torch.Tensor:
    """Reads a slot."""
    first: torch.Tensor = view.a_first
    return first * 2


BACKWARDS = {
    "d_fourth": copied(TOKENS, dtype=torch.int64, pad=0),
    "c_third": copied(BATCH, dtype=torch.float32, pad=0, source="nested.rows"),
    "b_second": copied(BATCH, 3, dtype=torch.int64, pad=0),
    "a_first": copied(BATCH, dtype=torch.int64, pad=0),
}
SIZED = [runner for inputs in (Rows, declaration_of(BACKWARDS)) for runner in sized_runners(inputs)]


def rows_batch(rows: dict[str, int], generator: torch.Generator) -> dict[str, Any]:
    """Random numbers, of so many rows by slot."""
    return {
        "a_first": torch.randint(1, 99, (rows["a_first"],), generator=generator),
        "b_second": torch.randint(1, 99, (rows["b_second"], 3), generator=generator),
        "nested": {"rows": torch.rand(rows["c_third"], generator=generator)},
        "d_fourth": torch.randint(1, 99, (rows["d_fourth"] * WIDTH,), generator=generator),
    }


@given(
    right=st.integers(1, 9),
    wrong=st.integers(0, 9),
    guilty=st.sampled_from(NAMES),
    seed=st.integers(0, 99),
    of=st.data(),
)
def test_the_slot_that_differs_is_blamed(right: int, wrong: int, guilty: str, seed: int, of: st.DataObject) -> None:
    """One source of other rows than the three others is named first, with its rows and theirs."""
    generator = torch.Generator().manual_seed(seed)
    runner = of.draw(st.sampled_from(SIZED))
    rows: dict[str, int] = dict.fromkeys(NAMES, right)
    runner(rows_batch(rows, generator))
    if wrong == right:
        return
    with pytest.raises(errors.BatchError) as caught:
        runner(rows_batch({**rows, guilty: wrong}, generator))
    assert str(caught.value).startswith(f"BATCH is {wrong} off slot {guilty!r} and {right} off slot '")
    assert "one of them is wrong; slot '" in str(caught.value)
    runner(rows_batch(rows, generator))


@given(right=st.integers(1, 9), wrong=st.integers(1, 9))
def test_two_against_two(right: int, wrong: int) -> None:
    """Where no size has a majority all four are named, by their rows."""
    if right == wrong:
        return
    rows: dict[str, int] = {name: right if place % 2 else wrong for place, name in enumerate(NAMES)}
    for runner in SIZED:
        with pytest.raises(errors.BatchError, match="one of them is wrong") as caught:
            runner(rows_batch(rows, torch.Generator().manual_seed(right)))
        said = str(caught.value).split(": one of them")[0]
        assert all(repr(name) in said for name in NAMES)
        assert f"{right} off slot" in said
        assert f"{wrong} off slot" in said


class Nested(Inputs):
    """A slot of two dims and one of three."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    pairs: torch.Tensor = copied(BATCH, 2, dtype=torch.int64, pad=0)
    halves: torch.Tensor = copied(BATCH, 2, 2, dtype=torch.float16, pad=0)


def ragged(draw: random.Random, *, of: str) -> Any:
    """Two rows of different lengths, neither of which is empty."""
    longer = draw.randint(2, 5)
    rows: Any = [draw.sample(range(1, 99), length) for length in draw.sample([longer, draw.randint(1, longer - 1)], 2)]
    makers: dict[str, Any] = {"tuple": tuple, "tensor": torch.tensor, "array": np.array}
    if of == "objects":
        made = np.empty(2, dtype=object)
        made[:] = rows
        return made
    return [makers[of](row) for row in rows] if of in makers else rows


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[7, 8], 9], "its rows are ragged, or stand beside numbers: pad them to one length"),
        (
            [torch.tensor([7, 8]), torch.tensor([9, 10])],
            r"a list of tensors: bring one tensor, such as torch\.stack makes",
        ),
    ],
)
def test_other_lists_that_are_no_box(rows: Any, said: str) -> None:
    """Numbers beside rows, and tensors in a list."""
    runner = EagerRunner(Nested, lambda view: view.ids + 0, backend="cpu")
    with pytest.raises(errors.BatchError, match=f"slot 'pairs': .*{said}"):
        runner({"ids": [1, 2], "pairs": rows, "halves": torch.rand(2, 2, 2).half()})


def test_ragged_rows_are_called_ragged() -> None:
    """By slot, with the way out; in rows within rows, too, of lists, tuples, tensors, arrays and objects."""
    decode = DecodeRunner(Nested, lambda view: view.ids + 0, buckets=[2], backend="cpu-capture")
    decode.capture()
    even: dict[str, Any] = {"ids": [3, 4], "pairs": [[1, 2], [3, 4]], "halves": [[[1.0, 2.0], [3.0, 4.0]]] * 2}
    for seed, of in itertools.product(range(8), ("list", "tuple", "tensor", "array", "objects")):
        rows = ragged(random.Random(seed), of=of)  # noqa: S311 - numbers for a test
        batches = {"pairs": {**even, "pairs": rows}}
        if of != "objects":
            batches["halves"] = {**even, "halves": [rows, [[1.5, 2.5], [3.5, 4.5]]]}
        for runner in (decode, EagerRunner(Nested, lambda view: view.ids + 0, backend="cpu")):
            for slot, batch in batches.items():
                with pytest.raises(BatchError, match=rf"slot '{slot}': .*ragged.*pad them to one length"):
                    runner(batch)
            assert runner(even).tolist() == [3, 4]
