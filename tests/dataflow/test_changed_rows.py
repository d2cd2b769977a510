"""Ragged rows of which the caller says which changed: the bytes are those of whole batches, and packets are smaller."""

import functools
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slotgraph
from slotgraph import BATCH, TOKENS, DecodeRunner, InputBuffers
from slotgraph.backends import Backend, load
from slotgraph.dataflow.lowering import LOWERINGS
from slotgraph.errors import BatchError
from slotgraph.extend import Changed, Ragged
from slotgraph.pool import InputPool
from slotgraph.reports import RecordedFile, replay_file
from tests.dataflow.test_ragged import (
    FORMS,
    MOST,
    PAD,
    PAGES,
    ROW,
    WIDTH,
    Paged,
    Stepping,
    both,
    by_hand,
    formed,
    paged,
    poison,
)
from tests.runners.models import decoder

LISTS: Final = tuple(form for form in FORMS if formed([[1]], form, torch.int32).__class__ in {list, tuple})


def changed(before: list[list[int]], rows: list[list[int]], form: str) -> Changed:
    """The rows in some form, with those that differ from the batch before named."""
    known = [*before, *[None] * len(rows)]
    differ = [number for number, row in enumerate(rows) if row != known[number]]
    return Changed(formed(rows, form, torch.int32), rows=differ)


@functools.cache
def buffers_on(name: str) -> list[tuple[Any, bool]]:
    """A runner and buffers for each lowering, and whether it has graphs: some by a graph of the caller's."""
    backend = load(name)()
    made = list[tuple[Any, bool]]()
    for lowering in backend.capabilities.lowerings:
        runner = paged(backend, 2, 4, MOST, lowering=lowering)
        buffers = InputBuffers(Paged, {BATCH: MOST, TOKENS: MOST, PAGES: WIDTH}, backend=backend, lowering=lowering)
        made += [(runner, True), (buffers, False)]
    return made


STEP = st.tuples(
    st.lists(ROW, min_size=1, max_size=MOST),
    st.sampled_from(LISTS),
    st.sampled_from(("whole", "few", "same", "eager", "poison", "view", "refused")),
)


@settings(max_examples=60)
@given(steps=st.lists(STEP, min_size=2, max_size=8))
def test_rows_that_changed_are_enough(backend_name: str, steps: Any) -> None:
    """Whatever came between: other sizes and buckets, whole batches, eager steps, other writers, and errors."""
    for runner, is_runner in buffers_on(backend_name):
        before: list[list[int]] = []
        for drawn, form, how in steps:
            rows = [row[:1] or [3] for row in drawn] if form == "lists of one length" else drawn
            if how in {"few", "same"} and before and form != "lists of one length":
                rows = [*before[:-1], *rows[: how == "few"]] or before
            pages = formed(rows, form, torch.int32) if how == "whole" else changed(before, rows, form)
            batch = {"ids": [*range(len(rows))], "pages": pages}
            if how == "poison":
                poison(runner.graphs.buffers if is_runner else runner._layer.buffers)
            if how == "refused":
                with pytest.raises(BatchError):
                    runner.fill({"ids": [1, 2], "pages": Changed([[1], [None]], rows=[1])})
            if is_runner and how == "view":
                runner.fill({"ids": [1], "pages": [[9, 9]]})  # a fill that is not replayed
                batch["pages"] = changed([[9, 9]], rows, form)
            elif not is_runner and how == "eager":
                runner.fill_unpadded({"ids": [1], "pages": [[9, 9]]})
                batch["pages"] = changed([[9, 9]], rows, form)
            made = runner(batch)[0] if is_runner else runner.fill(batch).pages
            assert torch.equal(made.cpu(), by_hand([*rows], len(made), PAD, torch.int32))
            before = rows


def sent(runner: DecodeRunner[Any], pages: Any) -> int:
    """The bytes of the packet of a call, whose result is that of whole rows."""
    made, *_ = runner({"ids": [1] * len(pages), "pages": pages})
    rows = pages.value if isinstance(pages, Changed) else pages
    assert torch.equal(made.cpu(), by_hand([*rows], len(made), PAD, torch.int32))
    return len(runner.graphs.filler.feed._data)


@pytest.mark.parametrize("form", ["lists", "tuples", "arrays"])
def test_a_packet_has_only_rows_that_changed(backend: Backend, form: str) -> None:
    """And all of them once another bucket, a bound tensor's owner or a pool's other runner may have written them."""
    for lowering in backend.capabilities.lowerings:
        if not LOWERINGS[lowering].has_kernel:
            continue
        runner = paged(backend, 4, MOST, lowering=lowering)
        table = [[7] * WIDTH] * MOST
        whole, one = sent(runner, table), Changed(formed(table, form, torch.int32), rows=[3])
        few = sent(runner, one)
        assert whole - few >= (MOST - 2) * WIDTH * 4
        assert sent(runner, Changed(formed(table, form, torch.int32), rows=[])) < few
        sent(runner, table[:2])
        assert sent(runner, one) >= whole - UNEQUAL  # after another bucket
        assert sent(runner, one) == few
        sent(runner, table[:5])
        assert few < sent(runner, one) < whole  # the rows from 5 on are new
        poison(runner.graphs.buffers)
        assert sent(runner, one) >= whole - UNEQUAL


UNEQUAL: Final = 64
"""Packets differ by less than this between forms of the same rows."""


def test_rows_in_memory_of_others_are_sent_whole(backend: Backend) -> None:
    """In a pool, and in a tensor that the caller may write."""
    table = [[1], [2, 3], []]
    for lowering in backend.capabilities.lowerings:
        pool = InputPool("draft", "verify")
        given: dict[str, Any] = {"sizes": {PAGES: WIDTH}, "output_rows": None, "absent": [{"weights"}], "buckets": [4]}
        given |= {"backend": backend, "lowering": lowering, "progress": False, "sharing": True}
        pooled = [DecodeRunner(Paged, both, phase=pool[phase], **given) for phase in ("draft", "verify")]
        for one in pooled:
            one.capture()
        own = torch.zeros((4, WIDTH), dtype=torch.int32, device=backend.device)
        sizes = {BATCH: 4, TOKENS: 4, PAGES: WIDTH}
        buffers = InputBuffers(Paged, sizes, backend=backend, lowering=lowering, bind={"pages": own})
        assert any(buffer.pooled for buffer in pooled[0].graphs.buffers)
        for rows in (table, table[::-1]):
            for runner in pooled:
                made, *_ = runner({"ids": [1, 2, 3], "pages": Changed(rows, rows=[0, 2])})
                assert torch.equal(made.cpu(), by_hand([*rows], len(made), PAD, torch.int32))
        buffers.fill({"ids": [1, 2, 3], "pages": table})
        own.fill_(5)
        buffers.fill({"ids": [1, 2, 3], "pages": Changed(table, rows=[])})
        assert torch.equal(own.cpu(), by_hand(table, 4, PAD, torch.int32))


def test_a_packet_that_no_graph_has_read_does_not_count(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that ends between its fill and its replay leaves the rows of the batch before."""
    for lowering in backend.capabilities.lowerings:
        runner = paged(backend, 4, lowering=lowering)
        runner({"ids": [1, 2], "pages": [[1], [2]]})
        with monkeypatch.context() as patch:
            patch.setattr(runner.graphs, "replay", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                runner({"ids": [1, 2], "pages": [[3], [4]]})
        made, *_ = runner({"ids": [1, 2], "pages": Changed([[3], [5]], rows=[1])})
        assert torch.equal(made.cpu(), by_hand([[3], [5]], len(made), PAD, torch.int32))


def test_steps_and_edits_take_changed_rows_whole(backend: Backend) -> None:
    """What a loop of steps has edited or appended is not the last batch, and an edit has no batch before it."""

    def step(view: Any) -> torch.Tensor:
        out: torch.Tensor = view.next_ids.copy_(view.ids + view.pages.sum(1))
        return out

    given: dict[str, Any] = {"sizes": {PAGES: WIDTH}, "output_rows": BATCH, "absent": [{"weights"}]}
    for lowering in backend.capabilities.lowerings:
        if not LOWERINGS[lowering].runs_ahead:
            continue
        runner = decoder(Stepping, step, backend=backend, buckets=[4], lowering=lowering, **given)
        batch = {"ids": [0, 0], "pages": Changed([[1], [2, 3]], rows=[])}
        loop = runner.steps(batch, keys=["a", "b"], ahead=1)
        one = next(loop)
        one.edit(["b"], pages=Changed([[4, 5]], rows=[]))
        one.append(["a"], pages=[[6]])
        for _ in range(3):
            one = next(loop)
        loop.close()
        pages = runner.graphs.buffers["pages"].tensor
        assert torch.equal(pages[:2].cpu(), by_hand([[1, 6], [4, 5]], 2, PAD, torch.int32))
        runner(batch)
        assert torch.equal(pages.cpu(), by_hand([[1], [2, 3]], 4, PAD, torch.int32))


def test_recordings_and_checks_take_changed_rows_whole(backend: Backend, tmp_path: Any) -> None:
    """As they take others."""
    runner = paged(backend, 4)
    rows = [[4], [], [1, 2, 3]]
    path = tmp_path / "steps.safetensors"
    batches = [{"ids": [1, 2, 3], "pages": Changed(rows, rows=[0])} for _ in range(2)]
    with slotgraph.record(runner, path):
        for batch in batches:
            runner(batch)
    assert "equal" in str(replay_file(RecordedFile.read(path), runner))
    assert slotgraph.check(runner, batches, only=["poison", "parity"]).ok


FAULTS: Final[dict[str, tuple[Any, Any, type[Exception], str]]] = {
    "a row behind the last": ([[1], [2]], [2], ValueError, "row 2 is named twice, or is not one of 2 rows"),
    "a row before the first": ([[1], [2]], [-1], ValueError, "row -1 is named twice, or is not"),
    "a row twice": ([[1], [2]], [0, 1, 0], ValueError, "row 0 is named twice"),
    "a row of an empty table": ([], [0], ValueError, "is not one of 0 rows"),
    "a row of a tuple": (([1], [2]), [5], ValueError, "row 5 is named twice, or is not"),
    "ragged values": (Ragged(np.array([[1]]), counts=[1]), [0], TypeError, "takes a list of rows, got Ragged"),
    "a bool": ([[1]], [True], TypeError, "rows are whole numbers in one dim, got bool"),
    "a fraction": ([[1]], [0.5], TypeError, "rows are whole numbers in one dim, got float64"),
    "a text": ([[1]], "0", TypeError, "rows are whole numbers in one dim"),
    "a number": ([[1]], 0, TypeError, "rows are whole numbers in one dim"),
    "nothing": ([[1]], None, TypeError, "rows are whole numbers in one dim"),
    "rows of rows": ([[1]], [[0]], TypeError, "rows are whole numbers in one dim"),
    "a set": ([[1]], {0}, TypeError, "rows are whole numbers in one dim"),
    "a tensor": (torch.tensor([[1]]), [0], TypeError, "takes a list of rows, got Tensor"),
    "an array": (np.array([[1]]), [0], TypeError, "takes a list of rows, got ndarray"),
    "itself": (Changed([[1]], rows=[]), [0], TypeError, "takes a list of rows, got Changed"),
    "no value": (None, [], TypeError, "takes a list of rows, got NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_changed_says_what_it_takes(fault: str) -> None:
    """When it is made."""
    value, rows, error, says = FAULTS[fault]
    with pytest.raises(error, match=says):
        Changed(value, rows=rows)


@pytest.mark.parametrize("row", [[1, None], [1 << 40], [*range(WIDTH + 1)], 3, "ab"])
def test_a_malformed_row_that_changed_is_refused(backend: Backend, row: Any) -> None:
    """By its number in the batch, and nothing is written."""
    for lowering in backend.capabilities.lowerings:
        runner = paged(backend, 4, lowering=lowering)
        runner({"ids": [1, 2, 3], "pages": [[1], [2], [3]]})
        with pytest.raises(BatchError, match=r"slot 'pages': .*row 2"):
            runner({"ids": [1, 2, 3], "pages": Changed([[1], [2], row], rows=[2])})
        made, *_ = runner({"ids": [1, 2, 3], "pages": Changed([[1], [2], [4]], rows=[2])})
        assert torch.equal(made.cpu(), by_hand([[1], [2], [4]], len(made), PAD, torch.int32))


def test_a_dense_slot_takes_no_changed_rows(backend: Backend) -> None:
    """The error says how to declare one that does."""

    class Dense(slotgraph.Inputs):
        pages: torch.Tensor = slotgraph.copied(BATCH, PAGES, dtype=torch.int32, pad=0)

    runner = decoder(Dense, lambda view: view.pages.clone(), backend=backend, buckets=[4], sizes={PAGES: WIDTH})
    with pytest.raises(BatchError, match="declare the slot with ragged=True"):
        runner({"pages": Changed([[1] * WIDTH], rows=[0])})
