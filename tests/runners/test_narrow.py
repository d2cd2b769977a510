"""Micro-batches: a view narrowed to some requests equals the view that the sliced batch would have filled."""

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, EagerRunner, Inputs, Step, computed, constant, copied, output
from slotgraph import staged as staged_slot
from slotgraph.dataflow.errors import BatchError, CaptureError

PAGES = Axis("PAGES")

WIDTH = 2


def sizes_of(step: Step) -> list[int]:
    """All that a function on the host can know of its step."""
    return [step.live(BATCH), step.padded(BATCH), step.live(TOKENS), step.padded(TOKENS)]


def starts(lens: torch.Tensor) -> torch.Tensor:
    """Exclusive sums: what a row holds hangs on all rows before it, so that a slice of the whole would be wrong."""
    return lens.cumsum(0) - lens


class MicroInputs(Inputs):
    """Every kind of slot whose rows belong to a request or to a token."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1)
    mrope: torch.Tensor = copied(3, TOKENS, dtype=torch.int64, pad=-2, strided=True)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-3)
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=-4)
    bias: torch.Tensor | None = copied(BATCH, dtype=torch.float32, pad=-5, default=None)
    sizes: torch.Tensor = computed(sizes_of, shape=4, dtype=torch.int64)
    starts: torch.Tensor = computed(starts, shape=BATCH, dtype=torch.int64)
    later: torch.Tensor = computed(lambda starts, lens: starts + lens, shape=BATCH, dtype=torch.int64)
    ranks: torch.Tensor = constant(lambda step: list(range(step.padded(BATCH))), shape=BATCH, dtype=torch.int64)
    made: torch.Tensor = staged_slot(BATCH, dtype=torch.float32, pad=0)
    logits: torch.Tensor = output(TOKENS, dtype=torch.float32)
    mode: str = "decode"


SEEN = ("ids", "mrope", "lens", "pages", "bias", "sizes", "starts", "later", "ranks")


def micro_batch(requests: int, pages: int, seed: int, *, bias: bool) -> dict[str, Any]:
    """Random requests of two tokens each."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(1, 99, (requests * WIDTH,), generator=draw),
        "mrope": torch.randint(1, 99, (3, requests * WIDTH), generator=draw),
        "lens": torch.randint(1, 99, (requests,), generator=draw),
        "pages": torch.randint(1, 99, (requests, pages), generator=draw, dtype=torch.int32),
        "bias": torch.rand(requests, generator=draw) if bias else None,
    }


def sliced(batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The raw batch of some of its requests."""
    rows, tokens = slice(start, stop), slice(start * WIDTH, stop * WIDTH)
    return {
        "ids": batch["ids"][tokens],
        "mrope": batch["mrope"][:, tokens],
        "lens": batch["lens"][rows],
        "pages": batch["pages"][rows],
        "bias": None if batch["bias"] is None else batch["bias"][rows],
    }


def decode(buckets: list[int]) -> DecodeRunner[MicroInputs]:
    """A captured runner for two tokens a request, with the optional slot and without it."""
    runner = DecodeRunner(
        MicroInputs,
        lambda view: view.lens,
        buckets=buckets,
        width=WIDTH,
        sizes={PAGES: 4},
        backend="cpu",
        absent=[{"bias"}],
        output_rows=BATCH,
    )
    runner.capture()
    return runner


parts = functools.cache(lambda rows: decode([rows]))  # a runner for each size of a micro-batch

WHOLE = decode([8])


def assert_same_views(one: MicroInputs, other: MicroInputs) -> None:
    """All that a step reads of two views is the same."""
    for name in SEEN:
        left, right = getattr(one, name), getattr(other, name)
        assert (left is None) == (right is None), name
        assert left is None or (left.dtype == right.dtype and torch.equal(left, right)), name
    assert one.mode == other.mode


cuts = st.tuples(st.integers(0, 7), st.integers(1, 8)).filter(lambda cut: cut[0] < cut[1])


@given(live=st.integers(0, 8), cut=cuts, bias=st.booleans(), seed=st.integers(0, 10**6))
def test_padded_view_equals_the_sliced_batch(*, live: int, cut: tuple[int, int], bias: bool, seed: int) -> None:
    """Rows of a padded view, be they live, padding or both, are what the sliced batch gives padded to that size."""
    batch = micro_batch(live, 4, seed, bias=bias)
    start, stop = cut
    micro = WHOLE.fill(batch).narrow(BATCH, start, stop)
    part = parts(stop - start)
    alone = part.fill(sliced(batch, min(start, live), min(stop, live)))
    part.replay(alone)  # what the device computes, it computes in the graph
    assert_same_views(micro, alone)


@given(live=st.integers(9, 12), pages=st.integers(0, 5), bias=st.booleans(), data=st.data())
def test_exact_view_equals_the_sliced_batch(*, live: int, pages: int, bias: bool, data: st.DataObject) -> None:
    """Rows of an eager view, of more requests than a bucket has, are what the sliced batch gives by itself."""
    start = data.draw(st.integers(0, live))
    stop = data.draw(st.integers(start, live))
    batch = micro_batch(live, pages, seed=live * 31 + pages, bias=bias)
    micro = WHOLE.fill(batch).narrow(BATCH, start, stop)
    kept = {name: getattr(micro, name).clone() for name in SEEN if getattr(micro, name) is not None}
    alone = parts(1).fill(sliced(batch, start, stop)) if stop - start > 1 else None
    for name in SEEN if alone is not None else ():
        value = getattr(alone, name)
        assert (name in kept) == (value is not None)
        assert value is None or torch.equal(kept[name], value), name


def test_narrow_twice() -> None:
    """A micro-batch can be narrowed again, counted from its own first row."""
    batch = micro_batch(7, 4, seed=1, bias=True)
    view = WHOLE.fill(batch)
    assert_same_views(view.narrow(BATCH, 2, 8).narrow(BATCH, 1, 4), view.narrow(BATCH, 3, 6))


class RaggedInputs(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    counts: torch.Tensor = computed(lambda step: [step.live(BATCH), step.live(TOKENS)], shape=2, dtype=torch.int64)


def test_requests_of_different_lengths() -> None:
    """Where tokens do not follow from requests, a cut needs both ranges, and says so."""
    runner = EagerRunner(RaggedInputs, lambda view: view, backend="cpu")
    view = runner.fill({"ids": torch.arange(10, 17), "lens": torch.tensor([3, 1, 3])})
    micro = view.narrow(BATCH, 1, 3, tokens=(3, 7))
    assert (micro.ids.tolist(), micro.lens.tolist(), micro.counts.tolist()) == ([13, 14, 15, 16], [1, 3], [2, 4])
    with pytest.raises(BatchError, match=r"say which tokens these rows have, narrow\(BATCH, a, b, tokens=\(c, d\)\)"):
        view.narrow(BATCH, 1, 3)


class SwitchedInputs(RaggedInputs):
    flags: torch.Tensor = computed(lambda lens: lens * 2, shape=BATCH, dtype=torch.int64, when="flags")
    note: torch.Tensor = computed(lambda remark: 1 if remark is None else 2, shape=1, dtype=torch.int64)
    remark: Any


@pytest.mark.parametrize("flags", [False, True])
@pytest.mark.parametrize("remark", [None, "here"])
def test_narrow_what_is_switched_off(*, flags: bool, remark: str | None) -> None:
    """A slot that is switched off stays None, and one computed from a field sees what the whole saw."""
    runner = EagerRunner(SwitchedInputs, lambda view: view, backend="cpu", settings={"flags": flags})
    batch = {"ids": torch.arange(4), "lens": torch.tensor([1, 3]), **({"remark": remark} if remark else {})}
    micro = runner.fill(batch).narrow(BATCH, 1, 2, tokens=(1, 4))
    assert (micro.flags.tolist() if flags else micro.flags) == ([6] if flags else None)
    assert micro.note.tolist() == [1 if remark is None else 2]


class CountedInputs(Inputs):
    """A count and a row of numbers that a batch may have right already."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    count: torch.Tensor = computed(lambda step: step.live(TOKENS), shape=1, dtype=torch.int32)
    doubled: torch.Tensor = computed(lambda ids: ids * 2, shape=TOKENS, dtype=torch.int64)


def test_computed_slots_of_an_eager_view() -> None:
    """They are cut with the slots that they are computed of."""
    ids = torch.tensor([5, 6, 7])
    view = EagerRunner(CountedInputs, lambda view: view.ids, backend="cpu").fill({"ids": ids})
    assert view.narrow(TOKENS, 1, 3).doubled.tolist() == [12, 14]


class Halved(Inputs):
    """What each half of a captured step may have of its own, and what it may not."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    counts: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int64)
    tag_now: torch.Tensor = computed(lambda tag: tag, shape=1, dtype=torch.int64)
    doubled: torch.Tensor = computed(lambda ids: ids * 2, shape=BATCH, dtype=torch.int64)
    shifted: torch.Tensor = computed(lambda ids, counts: ids + counts, shape=BATCH, dtype=torch.int64)
    tag: int


def halves(view: Halved) -> list[Halved]:
    """Two micro-batches of two rows."""
    return [view.narrow(BATCH, 0, 2), view.narrow(BATCH, 2, 4)]


def halved(step: Any, backend: str) -> DecodeRunner[Halved]:
    """A runner whose captured step cuts its view."""
    return DecodeRunner(Halved, step, buckets=[4], backend=backend, output_rows=BATCH, progress=False)


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_captured_micro_batches(backend: str) -> None:
    """Halves in a captured step see each replay's own rows, what follows from them, and what no cut changes."""

    def step(view: Halved) -> torch.Tensor:
        return torch.cat([half.ids + half.doubled * 1000 + half.tag_now * 10 for half in halves(view)])

    runner = halved(step, backend)
    runner.capture()
    for rows in (3, 1, 4):
        ids = torch.arange(1, rows + 1)
        assert runner({"ids": ids, "tag": rows}).tolist() == (ids * 2001 + rows * 10).tolist()


def test_what_cannot_be_narrowed() -> None:
    """Rows beyond the view's, tokens that follow from requests, and what the caller made are refused, not clipped."""
    view = WHOLE.fill(micro_batch(3, 4, seed=4, bias=True))
    for start, stop in ((-1, 2), (3, 2), (0, 9), (9, 9)):
        with pytest.raises(BatchError, match=f"rows {start} to {stop} do not lie within the 8 rows of BATCH"):
            view.narrow(BATCH, start, stop)
    with pytest.raises(BatchError, match="TOKENS"):
        view.narrow(TOKENS, 0, 4)
    batch = RaggedInputs(ids=torch.arange(3), lens=torch.arange(3))
    with pytest.raises(BatchError, match="only a view, which a fill handed out, can be narrowed"):
        batch.narrow(BATCH, 0, 1)


def test_what_a_captured_micro_batch_has_not(cpu: str) -> None:
    """What the host would compute for a half, and what follows from it, would stay as it was at capture: it is told."""
    for name, twice in itertools.product(("counts", "shifted"), (False, True)):

        def step(view: Halved, name: str = name, twice: bool = twice) -> torch.Tensor:  # noqa: FBT001 - of the loop
            parts = [half.narrow(BATCH, 0, 1) if twice else half for half in halves(view)]
            return torch.cat([getattr(part, name) + part.ids for part in parts])

        with pytest.raises(
            CaptureError, match=f"slot '{name}' follows from what the host computes, and a captured step"
        ):
            halved(step, cpu).capture()
