"""Views: one for each fill, exact where steps run eagerly; narrowed to some requests, they are the sliced batch's."""

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from slotgraph import (
    BATCH,
    CACHE_LOC,
    TOKENS,
    Axis,
    DecodeRunner,
    EagerRunner,
    Inputs,
    computed,
    constant,
    copied,
    output,
    staged,
)
from slotgraph.dataflow import environment
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import BatchError, CaptureError, DeclarationError, ReplayError
from tests.runners.models import PlainInputs, assert_right, batch_for, decoder, plain_runner, plain_step, random_batch

PAGES = Axis("PAGES")


def test_a_view_of_another_runner_is_refused(cpu: str, runner: DecodeRunner[PlainInputs]) -> None:
    """A view of another runner, one that was narrowed, and a batch are not what was filled last."""
    batch = random_batch(4, seed=7)
    view = runner.fill(batch)
    strangers: list[tuple[Any, str]] = [
        (plain_runner(cpu).fill(batch), "not filled last: another runner filled it"),
        (view.narrow(BATCH, 0, 4), "not filled last: .* a part or a copy of a view"),
        (PlainInputs(**batch), r"what fill\(\) returned, got a batch, PlainInputs"),
    ]
    for stranger, says in strangers:
        with pytest.raises(ReplayError, match=says):
            runner.replay(stranger)
    assert_right(runner.replay(view), batch)


def test_a_batch_may_be_of_any_kind(runner: DecodeRunner[PlainInputs]) -> None:
    """A batch is a mapping, an instance of the declaration, or any object with the names."""
    for requests in (5, 20):
        batch = random_batch(requests, seed=8)
        for made in (batch, PlainInputs(**batch), SimpleNamespace(**batch, more=1)):
            assert_right(runner(made), batch)


class FieldInputs(PlainInputs):
    scale: int
    mode: str = "decode"
    notes: Any = None


def test_views_have_the_batchs_fields(cpu: str) -> None:
    """A view carries the batch's fields, and the defaults of those that it lacks; a name that is none says so."""
    runner = decoder(FieldInputs, plain_step, backend=cpu)
    for requests in (3, 20):
        batch = random_batch(requests, seed=9)
        view = runner.fill({**batch, "scale": requests, "notes": ["note"]})
        assert (view.scale, view.mode, view.notes) == (requests, "decode", ["note"])
        assert_right(runner.replay(view), batch)
        without = runner.fill(batch)
        assert (without.mode, without.notes) == ("decode", None)
        with pytest.raises(AttributeError, match="'FieldInputs' has no slot or field 'scales'"):
            getattr(without, "scales")  # noqa: B009 - type checkers would refuse the name


def test_a_default_at_capture_is_what_the_graph_holds(cpu: str) -> None:
    """A captured step may read a field with a default; another value runs eagerly; without a default it is refused."""
    runner = decoder(FieldInputs, lambda view: view.ids * len(view.mode), backend=cpu)
    for mode in ("decode", "check", "decode"):
        batch = random_batch(3, seed=10)
        assert torch.equal(runner({**batch, "mode": mode}), batch["ids"] * len(mode))
    with pytest.raises(CaptureError, match=r"'scale' is carried from the batch and has no default.*Make it a slot"):
        decoder(FieldInputs, lambda view: view.ids * view.scale, backend=cpu)


PATCHES = Axis("PATCHES")


class Switched(Inputs):
    """Slots that settings switch off or batches lack, those that alone tell an axis, and what is computed of them."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    swa: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host", when="model.sliding", default=None)
    extra: torch.Tensor | None = copied(PATCHES, dtype=torch.int64, pad=0, placement="host", default=None)
    rare: torch.Tensor = staged(BATCH, dtype=torch.int64, pad=0, when=lambda settings: settings["rare"] > 1)
    twice: torch.Tensor = computed(lambda ids: ids * 2, shape=BATCH, dtype=torch.int64, when="model.sliding")
    length: torch.Tensor = computed(
        lambda swa, extra: (0 if swa is None else 10 + int(swa.sum())) + (0 if extra is None else 1000),
        shape=1,
        dtype=torch.int64,
    )


def test_slots_that_are_off_or_absent_are_none(cpu: str) -> None:
    """A slot exists where the settings say so; a function, a step and a view get None for what is not there."""
    two = torch.tensor([3, 4])
    for sliding, lowering in itertools.product((True, False), ("eager", *LADDER)):
        settings: Any = {"model": {"sliding": sliding}, "rare": 1 + sliding}
        options: dict[str, Any] = {"settings": settings, "backend": cpu}
        runner: Any = EagerRunner(Switched, lambda view: view.length * 1, **options)
        if lowering != "eager":
            absent = [{"extra"}, {"swa"}, {"extra", "swa"}] if sliding else [{"extra"}]
            options |= {"absent": absent, "lowering": lowering, "output_rows": None, "sizes": {PATCHES: 5}}
            runner = decoder(Switched, lambda view: view.length * 1, **options)
            names = {buffer.name for buffer in runner.graphs.buffers}
            assert ("swa" in names, "twice" in names, "rare" in names) == (sliding,) * 3
        for brought in ({}, {"extra": two}, {"swa": two}, {"swa": two, "extra": two}):
            batch = {"ids": torch.tensor([1, 2]), **brought}
            right = (17 if sliding and "swa" in brought else 0) + (1000 if "extra" in brought else 0)
            assert runner(batch).tolist() == [right]
            view = runner.fill(batch)
            there = {"extra", *(["swa"] if sliding else [])}
            assert {name for name in ("swa", "extra") if getattr(view, name) is not None} == there & brought.keys()
            assert (view.rare is None, view.twice is None) == (not sliding, not sliding)
    lacks: tuple[Any, ...] = (None, {}, {"model": None}, {"model": {}})
    for lacking in lacks:
        with pytest.raises(DeclarationError, match=r"slot '\w+' exists when 'model\.sliding' is set: give settings"):
            DecodeRunner(Switched, lambda view: view.ids, buckets=[4], backend=cpu, settings=lacking)


WIDTH = 2


class MicroInputs(Inputs):  # every kind of slot whose rows belong to a request or to a token
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1)
    mrope: torch.Tensor = copied(3, TOKENS, dtype=torch.int64, pad=-2, strided=True)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-3)
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=-4)
    bias: torch.Tensor | None = copied(BATCH, dtype=torch.float32, pad=-5, default=None)
    sizes: torch.Tensor = computed(
        lambda step: [size(axis) for axis in (BATCH, TOKENS) for size in (step.live, step.padded)],
        shape=4,
        dtype=torch.int64,
    )
    starts: torch.Tensor = computed(  # of all rows before it, so that a slice of the whole would be wrong
        lambda lens: lens.cumsum(0) - lens, shape=BATCH, dtype=torch.int64
    )
    later: torch.Tensor = computed(lambda starts, ranks: starts + ranks, shape=BATCH, dtype=torch.int64)
    ranks: torch.Tensor = constant(lambda step: list(range(step.padded(BATCH))), shape=BATCH, dtype=torch.int64)
    made: torch.Tensor = staged(BATCH, dtype=torch.float32, pad=0)
    logits: torch.Tensor = output(TOKENS, dtype=torch.float32)
    mode: str = "decode"


SEEN = ("ids", "mrope", "lens", "pages", "bias", "sizes", "starts", "later", "ranks")


def micro_batch(requests: int, pages: int, seed: int, *, bias: bool) -> dict[str, Any]:
    """Random requests of two tokens each."""
    batch = batch_for(MicroInputs, {BATCH: requests, TOKENS: requests * WIDTH, PAGES: pages}, seed)
    return batch if bias else {**batch, "bias": None}


def sliced(batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The raw batch of some of its requests."""
    rows, tokens = slice(start, stop), slice(start * WIDTH, stop * WIDTH)
    cut = {"ids": batch["ids"][tokens], "mrope": batch["mrope"][:, tokens]}
    return cut | {name: None if batch[name] is None else batch[name][rows] for name in ("lens", "pages", "bias")}


@functools.cache
def decode(rows: int) -> Any:
    """A captured runner for two tokens a request, with the optional slot and without it."""
    options: dict[str, Any] = {"width": WIDTH, "sizes": {PAGES: 4}, "absent": [{"bias"}], "output_rows": BATCH}
    return decoder(MicroInputs, lambda view: view.lens, buckets=[rows], **options)


WHOLE = decode(8)


def assert_same_views(one: MicroInputs, other: MicroInputs) -> None:
    """All that a step reads of two views is the same."""
    for name in SEEN:
        left, right = getattr(one, name), getattr(other, name)
        assert (left is None) == (right is None), name
        assert left is None or (left.dtype == right.dtype and torch.equal(left, right)), name
    assert one.mode == other.mode


cuts = st.tuples(st.integers(0, 7), st.integers(1, 8)).filter(lambda cut: cut[0] < cut[1])


@given(live=st.integers(0, 8), cut=cuts, bias=st.booleans(), seed=st.integers(0, 10**6))
def test_a_padded_view_equals_the_sliced_batch(*, live: int, cut: tuple[int, int], bias: bool, seed: int) -> None:
    """Rows of a padded view, be they live, padding or both, are what the sliced batch gives padded to that size."""
    batch = micro_batch(live, 4, seed, bias=bias)
    start, stop = cut
    view = WHOLE.fill(batch)
    assert_same_views(view.narrow(BATCH, 2, 8).narrow(BATCH, 1, 4), view.narrow(BATCH, 3, 6))
    micro = view.narrow(BATCH, start, stop)
    part = decode(stop - start)
    alone = part.fill(sliced(batch, min(start, live), min(stop, live)))
    part.replay(alone)  # what the device computes, it computes in the graph
    assert_same_views(micro, alone)


@given(live=st.integers(9, 12), pages=st.integers(0, 5), bias=st.booleans(), data=st.data())
def test_an_exact_view_equals_the_sliced_batch(*, live: int, pages: int, bias: bool, data: st.DataObject) -> None:
    """Rows of an eager view, of more requests than a bucket has, are what the sliced batch gives by itself."""
    start = data.draw(st.integers(0, live))
    stop = data.draw(st.integers(start, live))
    batch = micro_batch(live, pages, seed=live * 31 + pages, bias=bias)
    micro = WHOLE.fill(batch).narrow(BATCH, start, stop)
    if stop - start > 1:
        assert_same_views(micro, decode(1).fill(sliced(batch, start, stop)))


class RaggedInputs(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    counts: torch.Tensor = computed(lambda step: [step.live(BATCH), step.live(TOKENS)], shape=2, dtype=torch.int64)
    flags: torch.Tensor = computed(lambda lens: lens * 2, shape=BATCH, dtype=torch.int64, when="flags")
    note: torch.Tensor = computed(lambda remark: 1 if remark is None else 2, shape=1, dtype=torch.int64)
    remark: Any


def test_requests_of_different_lengths_are_cut_by_both_ranges() -> None:
    """Where tokens do not follow from requests, a cut needs both ranges, and says so."""
    batch: dict[str, Any] = {"ids": torch.arange(10, 17), "lens": torch.tensor([3, 1, 3])}
    for flags, remark in itertools.product((False, True), ({}, {"remark": "here"})):  # None, and what the whole saw
        runner = EagerRunner(RaggedInputs, lambda view: view, backend="cpu", settings={"flags": flags})
        view = runner.fill({**batch, **remark})
        part = view.narrow(BATCH, 1, 3, tokens=(3, 7))
        assert (part.ids.tolist(), part.lens.tolist(), part.counts.tolist()) == ([13, 14, 15, 16], [1, 3], [2, 4])
        assert (part.flags.tolist() if flags else part.flags) == ([2, 6] if flags else None)
        assert part.note.tolist() == [2 if remark else 1]
        with pytest.raises(
            BatchError, match=r"pass the range of their tokens, too, narrow\(BATCH, a, b, tokens=\(c, d\)"
        ):
            view.narrow(BATCH, 1, 3)


class Halved(Inputs):  # what each half of a captured step may have of its own, and what it may not
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    counts: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int64)
    tag_now: torch.Tensor = computed(lambda tag: tag, shape=1, dtype=torch.int64)
    doubled: torch.Tensor = computed(lambda ids: ids * 2, shape=BATCH, dtype=torch.int64)
    shifted: torch.Tensor = computed(lambda ids, counts: ids + counts, shape=BATCH, dtype=torch.int64)
    tag: int


def test_micro_batches_in_a_graph_see_each_replays_rows(cpu: str) -> None:
    """Halves in a captured step see each replay's own rows and what follows from them; what the host does is told."""

    def runner_of(row: Callable[[Halved], torch.Tensor]) -> Any:
        step: Any = lambda view: torch.cat([row(view.narrow(BATCH, start, start + 2)) for start in (0, 2)])
        return decoder(Halved, step, buckets=[4], backend=cpu, output_rows=BATCH)

    runner = runner_of(lambda half: half.ids + half.doubled * 1000 + half.tag_now * 10)
    for rows in (3, 1, 4):
        ids = torch.arange(1, rows + 1)
        assert runner({"ids": ids, "tag": rows}).tolist() == (ids * 2001 + rows * 10).tolist()
    for name, twice in itertools.product(("counts", "shifted"), (False, True)):
        said = f"slot '{name}' follows from what the host computes, and a captured step"
        with pytest.raises(CaptureError, match=said):
            runner_of(lambda half: getattr(half.narrow(BATCH, 0, 1) if twice else half, name))  # noqa: B023 - at once


def test_what_cannot_be_narrowed_is_refused() -> None:
    """Rows beyond the view's, tokens that follow from requests, and what the caller made are refused, not clipped."""
    view = WHOLE.fill(micro_batch(3, 4, seed=4, bias=True))
    for start, stop in ((-1, 2), (3, 2), (0, 9), (9, 9)):
        with pytest.raises(BatchError, match=f"rows {start} to {stop} do not lie within the 8 rows of BATCH"):
            view.narrow(BATCH, start, stop)
    with pytest.raises(BatchError, match="TOKENS"):
        view.narrow(TOKENS, 0, 4)
    batch = RaggedInputs(ids=torch.arange(3), lens=torch.arange(3), remark=None)
    with pytest.raises(BatchError, match="only a view, which a fill handed out, can be narrowed"):
        batch.narrow(BATCH, 0, 1)


def test_ranges_that_say_no_rows_are_refused() -> None:
    """narrow() refuses tokens that belong to other requests. If a value is no range, its error names the axis."""
    view = WHOLE.fill(micro_batch(3, 4, seed=4, bias=True))
    assert_same_views(view.narrow(BATCH, 1, 3), view.narrow(BATCH, 1, 3, tokens=(2, 6)))
    wrong: list[tuple[tuple[Any, ...], Any, str]] = [
        ((BATCH, 1, 3), (2, 5), r"rows 1 to 3 of BATCH have rows \(2, 6\) of TOKENS, .* leave that range out"),
        ((BATCH, 1, 3), 2, "rows of TOKENS: expected two whole numbers"),
        ((BATCH, 1, 3), (2,), "rows of TOKENS: expected two whole numbers"),
        ((BATCH, 1.0, 3), None, "rows of BATCH: expected two whole numbers"),
        ((BATCH, True, 3), None, "rows of BATCH: expected two whole numbers"),
        ((TOKENS, 2, 6), (2, 6), "leave tokens= out"),
        (("BATCH", 1, 3), None, "an axis, such as BATCH, got 'BATCH'"),
    ]
    for rows, tokens, says in wrong:
        with pytest.raises(BatchError, match=says):
            view.narrow(*rows, tokens=tokens)


COLUMNS = Axis("COLUMNS", fixed=True)


class PrefillInputs(Inputs):  # requests of several tokens each: both axes vary by themselves
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=-1)
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=-1)
    tokens: torch.Tensor = computed(lambda step: [step.live(TOKENS), step.padded(TOKENS)], shape=2, dtype=torch.int32)
    squares: torch.Tensor = computed(lambda ids: ids * ids, shape=TOKENS, dtype=torch.int64)
    sevens: torch.Tensor = constant(7, shape=(BATCH, COLUMNS), dtype=torch.int32)


@pytest.mark.parametrize("no_copy", [False, True])
def test_an_eager_step_sees_the_live_rows_alone(cpu: str, *, no_copy: bool) -> None:
    """A step sees the live rows alone; each axis grows by itself to the next power of two, and says so once."""
    names = PrefillInputs.slotgraph.slots
    copies: Any = lambda view: {name: getattr(view, name).clone() for name in names}
    runner = EagerRunner(PrefillInputs, copies, backend=cpu, sizes={COLUMNS: 3}, no_copy=no_copy)
    sizes_of_steps = (5, 2, 3), (8, 2, 4), (9, 1, 1), (0, 0, 0), (2, 1, 0), (3, 3, 33), (17, 4, 64), (17, 4, 64)
    growth = {(5, 2, 3): [(8, 2, 4)], (9, 1, 1): [(16, 2, 4)], (3, 3, 33): [(16, 4, 64)], (17, 4, 64): [(32, 4, 64)]}
    for sizes in sizes_of_steps:
        batch = batch_for(PrefillInputs, dict(zip((TOKENS, BATCH, PAGES), sizes, strict=True)), 1)
        with capture_logs() as events:
            seen = runner(batch)
        found = [event["sizes"] for event in events if event["event"] == "grown"]
        assert no_copy or [(one["TOKENS"], one["BATCH"], one["PAGES"]) for one in found] == growth.pop(sizes, [])
        assert {name: torch.equal(seen[name], batch[name]) for name in batch} == dict.fromkeys(batch, True)
        assert seen["tokens"].tolist() == [sizes[0]] * 2
        assert torch.equal(seen["squares"], batch["ids"] ** 2)
        assert seen["sevens"].tolist() == [[7] * 3] * sizes[1]


def test_without_copies_a_step_sees_the_batchs_tensors(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step sees the batch's own tensors, by argument, which wins, or environment; else copies; both are checked."""
    cases = (None, True, True), (None, None, False), ("1", None, True), ("1", False, False), ("0", None, False)
    for variable, argument, hands_through in cases:
        if variable is not None:
            monkeypatch.setenv(environment.NO_COPY, variable)
        runner: Any = EagerRunner(PlainInputs, lambda view: (view, plain_step(view)), backend=cpu, no_copy=argument)
        for requests in (5, 2, 17):
            batch = random_batch(requests, seed=requests)
            view, outputs = runner(batch)
            assert {getattr(view, name) is batch[name] for name in batch} == {hands_through}
            assert_right(outputs, batch)
        for slot, bad in (("weights", torch.rand(4)), ("places", torch.rand(5)), ("pairs", None)):
            with pytest.raises(BatchError, match=f"'{slot}'"):
                runner({**random_batch(5, seed=6), slot: bad})


class ConvertedInputs(Inputs):
    small: torch.Tensor = copied(BATCH, dtype=torch.uint8, pad=0, converts=(torch.int64,))
    places: torch.Tensor = copied(BATCH, dtype=CACHE_LOC, pad=0)
    after: torch.Tensor = computed(lambda small: small + 1, shape=BATCH, dtype=torch.uint8)


@pytest.mark.parametrize("no_copy", [False, True])
def test_a_view_has_the_slots_dtypes(cpu: str, *, no_copy: bool) -> None:
    """A source of another dtype that the slot takes is converted, also where other tensors are handed through."""
    runner: Any = EagerRunner(ConvertedInputs, lambda view: view, backend=cpu, no_copy=no_copy)
    for dtype in (torch.uint8, torch.int64):
        view = runner({"small": torch.tensor([7, 255], dtype=dtype), "places": torch.tensor([3, 4], dtype=torch.int32)})
        assert (view.small.dtype, view.places.dtype) == (torch.uint8, torch.int64)
        assert (view.small.tolist(), view.places.tolist(), view.after.tolist()) == ([7, 255], [3, 4], [8, 0])
