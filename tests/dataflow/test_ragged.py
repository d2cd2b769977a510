"""Rows of different lengths: laid out as by hand, by every lowering, in runners, steps, buffers and recordings."""

import functools
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slotgraph
from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, InputBuffers, Inputs, copied, output
from slotgraph.backends import Backend, load
from slotgraph.errors import BatchError, DeclarationErrors
from slotgraph.extend import Ragged
from slotgraph.reports import RecordedFile, replay_file
from tests.runners.models import decoder

PAGES: Final = Axis("PAGES", fixed=True)
WIDTH: Final = 5
PAD: Final = -1
MOST: Final = 8


class Paged(Inputs):
    """A page table whose rows have different lengths, behind a slot of one number a request."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=PAD, ragged=True)
    weights: torch.Tensor | None = copied(BATCH, PAGES, dtype=torch.float32, pad=0.5, ragged=True, default=None)


def both(view: Paged) -> tuple[torch.Tensor, ...]:
    """The tables, whole."""
    weights = () if view.weights is None else (view.weights.clone(),)
    return view.pages.clone(), *weights


def by_hand(rows: list[list[Any]], padded: int, pad: float, dtype: torch.dtype) -> torch.Tensor:
    """The table as engines write it."""
    made = torch.full((padded, WIDTH), pad, dtype=dtype)
    for number, row in enumerate(rows):
        for column, value in enumerate(row):
            made[number, column] = value
    return made


FORMS: Final = ("lists", "tuples", "arrays", "offsets", "offsets of a part", "counts", "a table", "lists of one length")


def formed(rows: list[list[Any]], form: str, dtype: torch.dtype) -> Any:
    """The same rows in one of many forms."""
    kind = np.dtype(str(dtype).removeprefix("torch."))
    flat, lengths = [value for row in rows for value in row], [len(row) for row in rows]
    ends = np.cumsum([0, *lengths])
    if form == "arrays":
        return [np.array(row, dtype=kind) for row in rows]
    if form == "offsets":
        return Ragged(np.array(flat, dtype=kind), offsets=ends)
    if form == "offsets of a part":
        return Ragged(torch.tensor([9, 9, *flat, 9], dtype=dtype), offsets=torch.tensor(ends + 2))
    if form == "counts":
        return Ragged(by_hand(rows, len(rows), 77, dtype), counts=lengths)
    if form == "a table":
        return by_hand(rows, len(rows), PAD if dtype == torch.int32 else 0.5, dtype)
    return tuple(map(tuple, rows)) if form == "tuples" else rows


ROW = st.lists(st.integers(0, 1 << 20), max_size=WIDTH)
TABLE = st.lists(ROW, min_size=1, max_size=MOST)


def paged(backend: Backend, *buckets: int, **options: Any) -> DecodeRunner[Any]:
    """A captured runner."""
    given: dict[str, Any] = {"sizes": {PAGES: WIDTH}, "output_rows": None, "absent": [{"weights"}], **options}
    made: DecodeRunner[Any] = decoder(Paged, both, backend=backend, buckets=buckets, **given)
    return made


@functools.cache
def runners_on(name: str) -> list[DecodeRunner[Any]]:
    """A runner for each lowering."""
    backend = load(name)()
    return [paged(backend, 2, 4, MOST, lowering=lowering) for lowering in backend.capabilities.lowerings]


@settings(max_examples=60)
@given(steps=st.lists(st.tuples(TABLE, st.sampled_from(FORMS), st.sampled_from(FORMS), st.booleans()), max_size=5))
def test_rows_are_laid_out_as_by_hand(backend_name: str, steps: Any) -> None:
    """Whatever came before: the rest of each row, and each padded row, hold the pad value."""
    runners = runners_on(backend_name)
    for drawn, form, other, has_weights in steps:
        rows = [row[:1] or [3] for row in drawn] if form == "lists of one length" else drawn
        floats = [[value / 4 for value in row] for row in rows]
        batch = {"ids": list(range(len(rows))), "pages": formed(rows, form, torch.int32)}
        if has_weights:
            batch["weights"] = formed(floats, other, torch.float32)
        for runner in runners:
            pages, *weights = runner(batch)
            assert torch.equal(pages.cpu(), by_hand(rows, len(pages), PAD, torch.int32))
            assert len(weights) == has_weights
            for one in weights:
                assert torch.equal(one.cpu(), by_hand(floats, len(one), 0.5, torch.float32))


def test_each_size_and_length_is_of_a_known_kind(backend: Backend) -> None:
    """Rows of other lengths take the way that the first took, which binds nothing."""
    runner = paged(backend, MOST)
    for form in ("lists", "offsets"):
        runner({"ids": [1], "pages": formed([[1]], form, torch.int32)})
        known = runner._table.known[0]
        tables: list[list[list[int]]] = [[[], [2, 3]], [[1] * WIDTH] * 3, [[]]]
        for rows in tables:
            runner({"ids": [*range(len(rows))], "pages": formed(rows, form, torch.int32)})
            assert runner._table.known[0] is known


class Stepping(Paged):
    """Steps that need no host, over pages."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda next_ids: next_ids)
    next_ids: torch.Tensor = output(BATCH, dtype=torch.int64)


def test_requests_join_and_are_edited_with_ragged_rows(backend: Backend) -> None:
    """The rest of a row that is written holds the pad value, not what a longer request left."""

    def step(view: Any) -> torch.Tensor:
        out: torch.Tensor = view.next_ids.copy_(
            view.ids + view.pages.clamp(min=0).sum(1) + (view.pages < 0).sum(1) * 1000
        )
        return out

    runner = decoder(
        Stepping, step, backend=backend, buckets=[4], sizes={PAGES: WIDTH}, output_rows=BATCH, absent=[{"weights"}]
    )
    tables = {"a": [1, 2, 3, 4, 5], "b": [7]}
    texts, edited = {"a": [0], "b": [0], "c": [0]}, 0
    first = {"ids": [0, 0], "pages": [*tables.values()]}
    for one in runner.steps(first, keys=["a", "b"], ahead=1):
        for key, token in one.tokens():
            table = tables[key]
            assert token == texts[key][-1] + sum(table) + 1000 * (WIDTH - len(table))
            texts[key].append(token)
        if one.number == 1:
            edited = one.lands
            one.edit(["a"], pages=[[6]])
        if one.number == 4:
            one.leave(["b"])
            one.join({"ids": [0], "pages": Ragged(np.array([8, 9], dtype=np.int32), offsets=[0, 2])}, ["c"])
            tables["c"] = [8, 9]
        if one.number + 1 == edited:
            tables["a"] = [6]
        if one.number == 9:
            break
    assert len(texts["c"]) > 3


def test_buffers_recordings_and_checks_take_ragged_rows(backend: Backend, tmp_path: Any) -> None:
    """As they take others."""
    rows = [[4], [], [1, 2, 3]]
    buffers = InputBuffers(Paged, {BATCH: 4, TOKENS: 4, PAGES: WIDTH}, backend=backend)
    view = buffers.fill({"ids": [1, 2, 3], "pages": rows})
    assert torch.equal(view.pages.cpu(), by_hand(rows, 4, PAD, torch.int32))
    runner = paged(backend, 4)
    path = tmp_path / "steps.safetensors"
    batches = [{"ids": [1, 2, 3], "pages": formed(rows, form, torch.int32)} for form in ("lists", "offsets", "counts")]
    with slotgraph.record(runner, path):
        for batch in batches:
            runner(batch)
    assert "equal" in str(replay_file(RecordedFile.read(path), runner))
    assert slotgraph.check(runner, batches, only=["poison", "parity"]).ok


FAULTS: Final[dict[str, Any]] = {
    "row 1 has 6 values, and the slot has room for 5": [[1], [1] * 6],
    "row 0 is int, expected a list of numbers": [1, 2],
    "row 1 is NoneType, expected a list of numbers": [[1], None],
    "got list: it holds int and str": [["a"], [1]],
    "its values are int64: convert them": Ragged(np.array([1, 2]), offsets=[0, 1, 2]),
    "int32 cannot hold": [[1 << 40], [1]],
}


@pytest.mark.parametrize("says", FAULTS)
def test_malformed_rows_are_refused_and_nothing_is_written(backend: Backend, says: str) -> None:
    """The error names the slot and the row."""
    runner = paged(backend, 4)
    view = runner.fill({"ids": [1, 2], "pages": [[5], [6, 7]]})
    before = view.pages.clone()
    with pytest.raises(BatchError, match=f"slot 'pages': .*{says}"):
        runner({"ids": [1, 2], "pages": FAULTS[says]})
    assert torch.equal(view.pages, before)
    assert torch.equal(runner.replay(view)[0].cpu(), by_hand([[5], [6, 7]], 4, PAD, torch.int32))


def test_rows_of_another_number_are_refused(backend: Backend) -> None:
    """As a batch whose slots differ in size."""
    runner = paged(backend, 4)
    for pages in ([[1]], Ragged(np.array([1], dtype=np.int32), offsets=[0, 1])):
        with pytest.raises(BatchError, match="say"):
            runner({"ids": [1, 2], "pages": pages})


@pytest.mark.parametrize(
    ("values", "given", "error", "says"),
    [
        ([1, 2], {}, TypeError, "takes offsets= for rows"),
        ([1, 2], {"offsets": [0, 1], "counts": [1]}, TypeError, "takes offsets= for rows"),
        ([1, 2], {"offsets": [0, 3]}, ValueError, "offsets grow from 0 to at most 2"),
        ([1, 2], {"offsets": [0, 2, 1]}, ValueError, "offsets grow from 0"),
        ([1, 2], {"offsets": []}, ValueError, "offsets grow from 0"),
        ([1, 2], {"offsets": [0.0, 1.0]}, TypeError, "offsets are whole numbers in one dim"),
        ([[1, 2]], {"offsets": [0, 1]}, TypeError, "values are in host memory and have one dim"),
        ([[1, 2]], {"counts": [3]}, ValueError, "1 counts between 0 and 2 are needed"),
        ([[1, 2]], {"counts": [-1]}, ValueError, "1 counts between 0 and 2 are needed"),
        ([[1, 2]], {"counts": [1, 1]}, ValueError, "1 counts between 0 and 2 are needed"),
        ([1, 2], {"counts": [1]}, TypeError, "values are in host memory and have two dims"),
    ],
)
def test_ragged_says_what_it_takes(values: Any, given: dict[str, Any], error: type[Exception], says: str) -> None:
    """When it is made."""
    with pytest.raises(error, match=says):
        Ragged(np.array(values), **given)


def test_declarations_say_what_ragged_needs() -> None:
    """All faults at once."""
    with pytest.raises(DeclarationErrors) as found:

        class Wrong(Inputs):
            one: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, ragged=True)
            keeps: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=slotgraph.keep("why"), ragged=True)
            limited: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0, ragged=True, limit=5)

    for text in ("it is ragged, so it has two dims", "say pad=number, not", "leave limit= out"):
        assert text in str(found.value)


def test_a_slot_that_is_not_ragged_says_how_to_make_it_one(backend: Backend) -> None:
    """The error of a dense slot names the parameter."""

    class Dense(Inputs):
        pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0)

    runner = decoder(Dense, lambda view: view.pages.clone(), backend=backend, buckets=[4], sizes={PAGES: WIDTH})
    with pytest.raises(BatchError, match="declare the slot with ragged=True"):
        runner({"pages": Ragged(np.array([1], dtype=np.int32), offsets=[0, 1])})
