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
from slotgraph.dataflow.lowering import LOWERINGS
from slotgraph.dataflow.packet import UNIT
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
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=PAD, ragged=True, converts=(torch.int64,))
    weights: torch.Tensor | None = copied(
        BATCH, PAGES, dtype=torch.float32, pad=0.5, ragged=True, default=None, converts=(torch.float64,)
    )


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


FORMS: Final = (
    "lists", "tuples", "arrays", "lists and arrays", "offsets", "offsets of a part", "offsets to convert", "counts",
    "counts of a wide table", "jagged", "jagged with gaps", "a table", "lists of one length",
)  # fmt: skip


def formed(rows: list[list[Any]], form: str, dtype: torch.dtype) -> Any:  # noqa: PLR0911 - a form a line
    """The same rows in one of many forms."""
    kind = np.dtype(str(dtype).removeprefix("torch."))
    flat, lengths = [value for row in rows for value in row], [len(row) for row in rows]
    ends = np.cumsum([0, *lengths])
    if "arrays" in form:
        return [np.array(row, dtype=kind) if form == "arrays" or number % 2 else row for number, row in enumerate(rows)]
    if form == "offsets":
        return Ragged(np.array(flat, dtype=kind), offsets=ends)
    if form == "offsets of a part":
        return Ragged(torch.tensor([9, 9, *flat, 9], dtype=dtype), offsets=torch.tensor(ends + 2))
    if form == "offsets to convert":
        return Ragged(np.array(flat, dtype=WIDER[dtype]), offsets=ends.astype(np.int32))
    if "counts" in form:
        table = by_hand(rows, len(rows), 77, dtype)
        table = torch.nn.functional.pad(table, (0, 3), value=88) if "wide" in form else table
        return Ragged(table, counts=lengths)
    if form == "jagged":
        return torch.nested.nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)
    if form == "jagged with gaps":
        starts, wide = torch.arange(len(rows)) % 2, torch.nn.functional.pad(by_hand(rows, len(rows), 77, dtype), (1, 1))
        wide = torch.stack([row.roll(int(start) - 1) for row, start in zip(wide, starts, strict=True)])
        return torch.nested.narrow(wide, 1, starts, torch.tensor(lengths), layout=torch.jagged)
    if form == "a table":
        return by_hand(rows, len(rows), PAD if dtype == torch.int32 else 0.5, dtype)
    return tuple(map(tuple, rows)) if form == "tuples" else rows


WIDER: Final = {torch.int32: np.int64, torch.float32: np.float64}
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


def poison(buffers: Any) -> None:
    """Overwrite the tables, as somebody else might who has their memory."""
    for name in ("pages", "weights"):
        buffers[name].tensor.view(torch.uint8).fill_(0x5A)
    buffers.distrust()


@settings(max_examples=60)
@given(
    steps=st.lists(
        st.tuples(TABLE, st.sampled_from(FORMS), st.sampled_from(FORMS), st.booleans(), st.booleans()), max_size=5
    )
)
def test_rows_are_laid_out_as_by_hand(backend_name: str, steps: Any) -> None:
    """Whatever came before, in each lowering: the rest of each row, and each padded row, hold the pad value."""
    runners = runners_on(backend_name)
    for drawn, form, other, has_weights, is_poisoned in steps:
        rows = [row[:1] or [3] for row in drawn] if form == "lists of one length" else drawn
        floats = [[value / 4 for value in row] for row in rows]
        batch = {"ids": list(range(len(rows))), "pages": formed(rows, form, torch.int32)}
        if has_weights:
            batch["weights"] = formed(floats, other, torch.float32)
        for runner in runners:
            if is_poisoned:
                poison(runner.graphs.buffers)
            pages, *weights = runner(batch)
            assert torch.equal(pages.cpu(), by_hand(rows, len(pages), PAD, torch.int32))
            assert len(weights) == has_weights
            for one in weights:
                assert torch.equal(one.cpu(), by_hand(floats, len(one), 0.5, torch.float32))


@settings(max_examples=20)
@given(tables=st.lists(st.tuples(TABLE, st.sampled_from(("offsets", "counts"))), min_size=1, max_size=4))
def test_rows_on_the_device_are_laid_out_there(backend_name: str, tables: Any) -> None:
    """`Ragged` over tensors of the device, and jagged nested tensors there; where it is the host, it is host data."""
    for runner in runners_on(backend_name):
        device = runner.stage.backend.device
        for rows, form in tables:
            host = formed(rows, form, torch.int32)
            of = torch.tensor(host.counts if host.offsets is None else host.offsets, device=device)
            ragged = Ragged(host.values.to(device), **{form: of})
            for pages in (ragged, formed(rows, "jagged", torch.int32).to(device)):
                made, *_ = runner({"ids": torch.arange(len(rows), device=device), "pages": pages})
                assert torch.equal(made.cpu(), by_hand(rows, len(made), PAD, torch.int32))


@pytest.mark.parametrize("pad", [0, PAD])
def test_a_table_on_the_device_is_the_same_as_by_hand(pad: int) -> None:
    """The operators that a device runs, here on the host: a row that does not fit is an index out of range."""
    rows = [[1, 2], [], [3], [4] * WIDTH, []]
    for form in ("offsets", "counts"):
        one = formed(rows, form, torch.int32)
        one.counts, one.offsets = torch.tensor(one.counts), None if one.offsets is None else torch.tensor(one.offsets)
        assert torch.equal(one.on_device(WIDTH, pad), by_hand(rows, 5, pad, torch.int32))
        with pytest.raises(IndexError, match="out of bounds"):
            one.on_device(WIDTH - 1, pad)


def test_each_size_and_length_is_of_a_known_kind(backend: Backend) -> None:
    """Rows of other lengths take the way that the first took, in each lowering, which binds nothing."""
    tables: list[list[list[int]]] = [[[], [2, 3]], [[1] * WIDTH] * 3, [[]]]
    for lowering in backend.capabilities.lowerings:
        runner = paged(backend, MOST, lowering=lowering)
        for form in ("lists", "arrays", "offsets", "counts", "jagged"):
            runner({"ids": [1], "pages": formed([[1]], form, torch.int32)})
            if LOWERINGS[lowering].is_reference:  # which binds nothing at all
                continue
            known = runner._table.known[0]
            bound = {bucket: [*plans] for bucket, plans in known.plans.items()}
            for rows in tables:
                runner({"ids": [*range(len(rows))], "pages": formed(rows, form, torch.int32)})
                assert runner._table.known[0] is known
                assert known.plans == bound


def test_a_packet_has_only_the_values(backend: Backend) -> None:
    """Two rows of one value take less of it than two full ones, in each form but that of whole rows."""
    for lowering in backend.capabilities.lowerings:
        if not LOWERINGS[lowering].has_kernel:
            continue
        runner = paged(backend, MOST, lowering=lowering)
        for form in ("lists", "arrays", "offsets", "jagged"):
            sent = list[int]()
            for rows in ([[1], [2]], [[1] * WIDTH] * 2):
                runner({"ids": [1, 2], "pages": formed(rows, form, torch.int32)})
                sent.append(len(runner.graphs.filler.feed._data))
            assert sent[1] - sent[0] == UNIT


class Stepping(Paged):
    """Steps that need no host, over pages."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda next_ids: next_ids)
    next_ids: torch.Tensor = output(BATCH, dtype=torch.int64)


def play(backend: Backend, **options: Any) -> None:
    """Steps whose requests join and are edited with ragged rows, held to what their tables add up to."""

    def step(view: Any) -> torch.Tensor:
        out: torch.Tensor = view.next_ids.copy_(
            view.ids + view.pages.clamp(min=0).sum(1) + (view.pages < 0).sum(1) * 1000
        )
        return out

    given: dict[str, Any] = {"sizes": {PAGES: WIDTH}, "output_rows": BATCH, "absent": [{"weights"}], **options}
    runner = decoder(Stepping, step, backend=backend, buckets=[4], **given)
    tables = {"a": [1, 2, 3, 4, 5], "b": [7]}
    texts, edited = {"a": [0], "b": [0], "c": [0]}, 0
    edits = torch.nested.nested_tensor([torch.tensor(one, dtype=torch.int32) for one in ([], [6])], layout=torch.jagged)
    first = {"ids": [0, 0], "pages": [*tables.values()]}
    for one in runner.steps(first, keys=["a", "b"], ahead=1):
        for key, token in one.tokens():
            table = tables[key]
            assert token == texts[key][-1] + sum(table) + 1000 * (WIDTH - len(table))
            texts[key].append(token)
        if one.number == 1:
            edited = one.lands
            one.edit(["b", "a"], pages=edits)
        if one.number == 4:
            one.leave(["b"])
            one.join({"ids": [0], "pages": Ragged(np.array([8, 9], dtype=np.int32), offsets=[0, 2])}, ["c"])
            tables["c"] = [8, 9]
        if one.number + 1 == edited:
            tables["b"], tables["a"] = [], [6]
        if one.number == 9:
            break
    assert len(texts["c"]) > 3


def test_requests_join_and_are_edited_with_ragged_rows(backend: Backend) -> None:
    """The rest of a row that is written holds the pad value, not what a longer request left."""
    for lowering in backend.capabilities.lowerings:
        if LOWERINGS[lowering].runs_ahead:
            play(backend, lowering=lowering)


def test_buffers_recordings_and_checks_take_ragged_rows(backend: Backend, tmp_path: Any) -> None:
    """As they take others."""
    rows = [[4], [], [1, 2, 3]]
    buffers = InputBuffers(Paged, {BATCH: 4, TOKENS: 4, PAGES: WIDTH}, backend=backend)
    view = buffers.fill({"ids": [1, 2, 3], "pages": rows})
    assert torch.equal(view.pages.cpu(), by_hand(rows, 4, PAD, torch.int32))
    runner = paged(backend, 4)
    path = tmp_path / "steps.safetensors"
    forms = ("lists", "offsets", "counts", "jagged")
    batches = [{"ids": [1, 2, 3], "pages": formed(rows, form, torch.int32)} for form in forms]
    with slotgraph.record(runner, path):
        for batch in batches:
            runner(batch)
    assert "equal" in str(replay_file(RecordedFile.read(path), runner))
    assert slotgraph.check(runner, batches, only=["poison", "parity"]).ok


def array(values: Any, dtype: Any = np.int32) -> Any:
    """An array of the slot's dtype, or of another."""
    return np.array(values, dtype=dtype)


def jagged(*rows: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A jagged nested tensor."""
    return torch.nested.nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


FLAT: Final = "(row 0 is int, expected a list of numbers|expected 2 dimensions, got 1)"
TOO_LONG: Final = [*range(WIDTH + 1)]
LOOP: Final[list[Any]] = [[1]]
LOOP.append(LOOP)
FAULTS: Final[dict[str, tuple[Any, str]]] = {
    "a long list": ([[1], TOO_LONG], "row 1 has 6 values, and the slot has room for 5"),
    "a long tuple": (([1], tuple(TOO_LONG)), "row 1 has 6 values"),
    "a long array": ([array(TOO_LONG), array([1])], "row 0 has 6 values"),
    "a long row by offsets": (Ragged(array([1, *TOO_LONG]), offsets=[0, 1, 7]), "row 1 has 6 values"),
    "a long row by counts": (Ragged(array([TOO_LONG] * 2), counts=[5, 6]), "row 1 has 6 values"),
    "a long jagged row": (jagged(TOO_LONG, [1]), "row 0 has 6 values"),
    "a bool": ([[1], [True]], "row 1 is bool"),
    "a bool among numbers": ([[1], [2, False]], "row 1: bools and numbers"),
    "NumPy's bool": ([[np.True_, 3], [2]], "row 0: bools and numbers"),
    "a fraction": ([[1.5], [2]], "row 0 is float32"),
    "a float": ([[1], [3, 2.0]], "row 1 is float32"),
    "NaN": ([[1], [float("nan")]], "row 1 is float32"),
    "a complex number": ([[1], [1j]], "row 1 is complex"),
    "a large number": ([[1 << 40], [1]], "row 0: int32 cannot hold 1099511627776"),
    "a small number": ([[1], [-(1 << 31) - 1]], "row 1: int32 cannot hold -2147483649"),
    "a number of more than 64 bits": ([[1], [1 << 70]], "row 1: it holds int; give numbers of at most 64 bits"),
    "no row": ([[1], None], "row 1 is NoneType, expected a list of numbers"),
    "no number": ([[1], [2, None]], "row 1: it holds NoneType and int"),
    "a number as a row": ([1, [2]], FLAT),
    "numbers": ([1, 2], FLAT),
    "a text as a row": ([[1], "ab"], "row 1 is str"),
    "a text": ([["a"], [1]], "row 0: it holds str"),
    "bytes as a row": ([[1], b"ab"], "row 1 is bytes"),
    "a set as a row": ([[1], {2}], "row 1 is set"),
    "a mapping as a row": ([[1], {1: 2}], "row 1 is dict"),
    "a range as a row": ([[1], range(2)], "row 1 is range"),
    "a tensor as a row": ([torch.tensor([1]), [1]], "row 0 is Tensor"),
    "nested too deep": ([[1], [[2]]], r"row 1 is int32 of shape \[1, 1\]"),
    "a list in itself": (LOOP, "row 1: "),
    "a row of rows of two lengths": ([[1], [[2], [3, 4]]], "row 1: its rows are ragged"),
    "an array of floats": ([array([1]), array([2.0], float)], "row 1 is float64"),
    "an array of other integers": ([array([1], np.int16), array([2])], "int32 in one dim: convert it"),
    "an array of bools": ([[1], array([True], bool)], "row 1 is bool"),
    "a table as a row": ([array([1]), array([[2]])], "row 1 is ndarray"),
    "an array of no dims": ([array(1), [2]], "row 0 is ndarray"),
    "a masked array": ([[1], np.ma.array([2], mask=[True])], "row 1: a masked array"),
    "an array of objects": ([array([1]), array([2, None], object)], "row 1: an array of objects"),
    "values of other integers": (Ragged(array([1, 2], np.int16), offsets=[0, 1, 2]), "its values are int16: convert"),
    "values that are floats": (Ragged(torch.tensor([[1.0], [2.0]]), counts=[1, 1]), "its values are float32: convert"),
    "values that are bools": (Ragged(torch.tensor([True, False]), offsets=[0, 1, 2]), "its values are bool: convert"),
    "jagged floats": (jagged([1], [2], dtype=torch.float32), "its values are float32: convert"),
    "a jagged tensor of three dims": (jagged([[1, 2]], [[3, 4]]), "(a nested tensor|got 3)"),
    "a narrow table": (torch.zeros(2, WIDTH - 1, dtype=torch.int32), "got shape"),
    "an array of a table": (np.zeros((2, WIDTH + 1), np.int32), "got shape"),
    "a table of three dims": (torch.zeros(2, WIDTH, 1, dtype=torch.int32), "got 3"),
}  # fmt: skip


@functools.cache
def refusing(name: str, lowering: str) -> tuple[Any, Any]:
    """A runner of steps and buffers, both filled."""
    backend = load(name)()
    given: dict[str, Any] = {"sizes": {PAGES: WIDTH}, "output_rows": BATCH, "absent": [{"weights"}]}
    step = lambda view: view.next_ids.copy_(view.ids + view.pages.sum(1))
    runner = decoder(Stepping, step, backend=backend, buckets=[4], lowering=lowering, **given)
    buffers = InputBuffers(Paged, {BATCH: 4, TOKENS: 4, PAGES: WIDTH}, backend=backend, lowering=lowering)
    return runner, buffers


@pytest.mark.parametrize("fault", FAULTS)
def test_malformed_rows_are_refused_and_nothing_is_written(backend: Backend, fault: str) -> None:
    """By calls, steps that join or edit, and buffers, in each lowering: the error names the slot and the row."""
    pages, says = FAULTS[fault]
    rows = [[5], [6, 7]]
    good, bad = {"ids": [1, 2], "pages": rows}, {"ids": [1, 2], "pages": pages}
    for lowering in backend.capabilities.lowerings:
        runner, buffers = refusing(backend.name, lowering)
        tables = [buffers.fill(good).pages, runner.fill(good).pages]
        before = [table.clone() for table in tables]
        calls: list[Any] = [lambda buffers=buffers: buffers.fill(bad), lambda runner=runner: runner(bad)]
        steps = runner.steps(good, keys=[*"ab"], ahead=1) if LOWERINGS[lowering].runs_ahead else iter(())
        for step in steps:
            calls += [lambda step=step: step.join(bad, [*"cd"]), lambda step=step: step.edit([*"ab"], pages=pages)]
            break
        for call in calls:
            with pytest.raises(BatchError, match=f"slot 'pages': .*{says}"):
                call()
        for table, wanted in zip(tables, before, strict=True):
            assert torch.equal(table, wanted)
        assert torch.equal(buffers.fill(good).pages.cpu(), by_hand(rows, 4, PAD, torch.int32))


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
        ([1, 2], {"offsets": [0, 2, 1]}, ValueError, "offsets grow from 0 .* row 1 has -1"),
        ([1, 2], {"offsets": [-1, 2]}, ValueError, "offsets grow from 0"),
        ([1, 2], {"offsets": [[0, 2]]}, TypeError, "offsets are whole numbers in one dim"),
        ([1, 2], {"offsets": [False, True]}, TypeError, "offsets are whole numbers in one dim"),
        ([1, 2], {"offsets": "01"}, TypeError, "offsets are whole numbers in one dim"),
        ([1, 2], {"offsets": []}, ValueError, "offsets grow from 0"),
        ([1, 2], {"offsets": [0.0, 1.0]}, TypeError, "offsets are whole numbers in one dim"),
        ([[1, 2]], {"offsets": [0, 1]}, TypeError, "values have one dim"),
        ([[1, 2]], {"counts": [3]}, ValueError, "1 counts between 0 and 2 are needed, .* row 0 has 3"),
        ([[1, 2]], {"counts": [-1]}, ValueError, "1 counts between 0 and 2 are needed"),
        ([[1, 2]], {"counts": [1, 1]}, ValueError, "1 counts between 0 and 2 are needed"),
        ([1, 2], {"counts": [1]}, TypeError, "values have two dims"),
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
