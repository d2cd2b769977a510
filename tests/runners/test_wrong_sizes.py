"""What is said of a batch whose sources do not have one number of rows, or are no box of numbers."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, BreakableRunner, DecodeRunner, EagerRunner, Inputs, copied, errors
from tests.runners.prefilled import Around

NAMES: tuple[str, ...] = ("a_first", "b_second", "c_third", "d_fourth")
WIDTH = 2


class Rows(Inputs):
    """Four sources that tell the requests, one of them by their tokens; the first one by name is the one believed."""

    a_first: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    b_second: torch.Tensor = copied(BATCH, 3, dtype=torch.int64, pad=0)
    c_third: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0, source="nested.rows")
    d_fourth: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


class Backwards(Inputs):
    """The same, declared the other way round."""

    d_fourth: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    c_third: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0, source="nested.rows")
    b_second: torch.Tensor = copied(BATCH, 3, dtype=torch.int64, pad=0)
    a_first: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


def runners(inputs: type[Inputs]) -> Iterator[DecodeRunner[Any] | EagerRunner[Any]]:
    """One of each kind that sizes batches in its own way."""
    decode = DecodeRunner(inputs, step, buckets=[4, 16], width=WIDTH, output_rows=None, backend="cpu-capture")
    decode.capture()
    yield decode
    eager = DecodeRunner(inputs, step, buckets=[16], width=WIDTH, output_rows=None, graphs=False, backend="cpu")
    eager.capture()
    yield eager


def step(view: Any) -> torch.Tensor:
    """Reads a slot."""
    first: torch.Tensor = view.a_first
    return first * 2


RUNNERS = [runner for inputs in (Rows, Backwards) for runner in runners(inputs)]


def batch_of(rows: dict[str, int], generator: torch.Generator) -> dict[str, Any]:
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
    """One source of other rows than the three others is named, and these are not, whichever of them is believed."""
    generator = torch.Generator().manual_seed(seed)
    runner = of.draw(st.sampled_from(RUNNERS))
    rows: dict[str, int] = dict.fromkeys(NAMES, right)
    runner(batch_of(rows, generator))
    is_other_width = guilty == "d_fourth" and wrong > 0 and wrong * WIDTH % right == 0  # which runs eagerly
    if wrong == right or is_other_width:
        return
    with pytest.raises(errors.BatchError) as caught:
        runner(batch_of({**rows, guilty: wrong}, generator))
    said = str(caught.value).split(" (sizes were read")[0]
    assert said.startswith(f"slot {guilty!r}: expected")
    assert said.count("expected") == 1
    factor = WIDTH if guilty == "d_fourth" else 1
    assert str(right * factor) in said
    assert str(wrong * factor) in said
    runner(batch_of(rows, generator))


@given(right=st.integers(1, 9), wrong=st.integers(1, 9))
def test_two_against_two(right: int, wrong: int) -> None:
    """Where no size has a majority all four are named, each with its rows."""
    if right == wrong:
        return
    rows: dict[str, int] = {name: right if place % 2 else wrong for place, name in enumerate(NAMES)}
    for runner in RUNNERS:
        with pytest.raises(errors.BatchError, match="one of them is wrong") as caught:
            runner(batch_of(rows, torch.Generator().manual_seed(right)))
        assert all(f"{rows[name]} off slot {name!r}" in str(caught.value) for name in NAMES)


class Prefilled(Inputs):
    """What a breakable runner's step reads, and one source more that tells its tokens."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    tables: torch.Tensor = copied(TOKENS, 2, dtype=torch.int64, pad=0)


def test_a_prefill_runner_blames_it_too() -> None:
    """In its graphs' buckets and beyond them."""
    model = Around(lambda hidden, _: hidden + 1)
    runner = BreakableRunner(Prefilled, model, stack="inner", buckets=[8], backend="cpu-capture")
    runner.capture()
    for short, tokens in ((3, 4), (3, 12), (12, 4)):
        ids, rows = torch.arange(1, short + 1), torch.arange(1, tokens + 1)
        with pytest.raises(
            errors.BatchError, match=f"^slot 'input_ids': expected a size of {tokens} on dim 0.*{short}$"
        ):
            runner({"input_ids": ids, "positions": rows, "tables": torch.stack([rows, rows], 1)})


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


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
@pytest.mark.parametrize("of", ["list", "tuple", "tensor", "array", "objects"])
@settings(max_examples=15)
@given(seed=st.integers(0, 999))
def test_ragged_rows_are_called_ragged(backend: str, of: str, seed: int) -> None:
    """By slot, with the way out; in rows within rows, too."""
    draw = random.Random(seed)  # noqa: S311 - numbers for a test
    rows = ragged(draw, of=of)
    even: dict[str, Any] = {"ids": [3, 4], "pairs": [[1, 2], [3, 4]], "halves": [[[1.0, 2.0], [3.0, 4.0]]] * 2}
    batches = {"pairs": {**even, "pairs": rows}}
    if of != "objects":
        batches["halves"] = {**even, "halves": [rows, [[1.5, 2.5], [3.5, 4.5]]]}
    for runner in (nested(backend), EagerRunner(Nested, lambda view: view.ids + 0, backend=backend)):
        for slot, batch in batches.items():
            with pytest.raises(errors.BatchError, match=rf"slot '{slot}': .*ragged.*pad them to one length"):
                runner(batch)
        assert runner(even).tolist() == [3, 4]


def nested(backend: str) -> DecodeRunner[Nested]:
    """A captured runner."""
    runner = DecodeRunner(Nested, lambda view: view.ids + 0, buckets=[2], backend=backend)
    runner.capture()
    return runner


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[7, 8], 9], "some of its entries along dim 0 are rows and some are not: bring rows of one length"),
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
