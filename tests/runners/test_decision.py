"""Decisions: sizes that batches and relations tell, buckets, the path of each batch with its reason, and counts."""

import itertools
import re
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, Axis, BreakableRunner, DecodeRunner, Inputs, Step, computed, copied, errors
from slotgraph.backends import Backend
from slotgraph.config import Buckets
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import BatchError, CaptureError, ConfigError, ReplayError
from slotgraph.extend import DEVICE, HOST
from tests.packing import NAME, backend_of
from tests.runners.models import (
    PlainInputs,
    assert_right,
    batch_for,
    decoder,
    nothing_changes,
    plain_step,
    random_batch,
    ready,
)
from tests.runners.prefilled import Inner
from tests.strategies import asked, declaration_of, one_sided

PAGES = Axis("PAGES")


class VariedInputs(Inputs):  # an optional slot, an axis of its own, and fields that graphs were captured with
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=3)
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0)
    extra: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=5, default=None)
    mode: Any = "decode"
    hooks: list[int] = attrs.field(factory=list)


def varied_step(view: VariedInputs) -> torch.Tensor:
    """[BATCH] int64."""
    total = view.ids * 100 + view.pages.sum(1)
    return total if view.extra is None else total + 1000 * view.extra


def varied(requests: int, pages: int, seed: int = 1, **more: Any) -> dict[str, Any]:
    """A batch that brings the optional slot."""
    return {**batch_for(VariedInputs, {BATCH: requests, PAGES: pages}, seed), **more}


@pytest.fixture(scope="module")
def varied_runner(cpu: str) -> DecodeRunner[VariedInputs]:
    """Captured for 4 and 8 requests of at most 3 pages, at most half padding; bucket 8 cannot be captured."""

    def step(view: VariedInputs) -> torch.Tensor:
        if view.ids.shape[0] == 16:
            raise ValueError("no room for 16")
        return varied_step(view)

    runner = DecodeRunner(VariedInputs, step, buckets=[4, 8, 16], sizes={PAGES: 3}, backend=cpu, max_waste=0.5)
    with pytest.raises(CaptureError, match=r"bucket 16: .*no room for 16"):
        runner.capture()
    return runner


REASONS: list[tuple[dict[str, Any], tuple[str, int | None, str], str]] = [
    (varied(3, 3), ("graph", 4, "fits"), "bucket 4 fits"),
    (varied(5, 1), ("graph", 8, "fits"), "bucket 8 fits"),
    (varied(17, 3), ("eager", None, "too_large"), r"17 rows .* the largest bucket, 16"),
    (varied(3, 4), ("eager", None, "too_large"), r"4 rows on PAGES .* more than the 3"),
    (varied(1, 2), ("eager", None, "waste"), r"bucket 4 would be 75% padding, .*50%"),
    (varied(12, 2), ("eager", None, "not_captured"), r"no room for 16"),
    (varied(4, 2, extra=None), ("eager", None, "absent"), "without 'extra'"),
    (varied(4, 2, mode="verify"), ("eager", None, "field_differs"), "is 'verify', not 'decode'"),
    (varied(4, 2, hooks=[5]), ("eager", None, "field_differs"), "field 'hooks'"),
    (varied(4, 2, hooks=[]), ("graph", 4, "fits"), "bucket 4 fits"),
    (varied(3, 3, mode=torch.ones(3)), ("eager", None, "field_differs"), "'mode' is Tensor, not 'decode', with which"),
    (varied(3, 3, mode=np.arange(3)), ("eager", None, "field_differs"), "field 'mode' is ndarray, not 'decode'"),
]


def test_each_way_has_its_path_bucket_and_reason(varied_runner: DecodeRunner[VariedInputs]) -> None:
    """Each way for a batch to go has its path, its bucket and its reason in a word and a sentence, and is right."""
    first = varied(4, 3, seed=5)
    view, before = varied_runner.fill(first), varied_runner.stats()
    for batch, wanted, reason in REASONS:
        decision = varied_runner.decide(batch)
        assert (decision.path, decision.bucket, decision.why) == wanted
        assert re.search(reason, decision.reason)
    assert varied_runner.stats() == before  # a decision is not a step
    assert torch.equal(varied_runner.replay(view), varied_step(VariedInputs(**first)))
    for batch, (_, _, why), _ in REASONS:
        if why != "not_captured":  # its step cannot run eagerly either
            assert torch.equal(varied_runner(batch), varied_step(VariedInputs(**batch)))


@pytest.mark.parametrize("lazy", [False, True])
def test_nothing_runs_before_capture(cpu: str, *, lazy: bool) -> None:
    """Before capture a runner decides, fills and runs nothing, not even what would run eagerly, lazy or not."""
    runner = DecodeRunner(PlainInputs, plain_step, buckets=[4], backend=cpu, lazy=lazy)
    for use in (runner.decide, runner.fill, runner):
        for requests in (3, 30):
            with pytest.raises(ReplayError, match=r"nothing is captured yet: call capture\(\) first"):
                use(random_batch(requests, seed=1))
    with pytest.raises(ConfigError, match=r"there is no graph of bucket 4: .*after capture\(\)"):
        runner.inputs(4)
    runner.capture()
    good = random_batch(3, seed=2)
    assert_right(runner(good), good)


@given(st.integers(1, 2000), st.data())
def test_ladder_wastes_little(top: int, data: st.DataObject) -> None:
    """It ascends to the largest size; rows are padded to twice as many below 8, by 8, 16 and 32 rows beyond."""
    rows, ladder = data.draw(st.integers(1, top)), Buckets.ladder(top)
    assert (ladder.sizes[0], ladder.sizes[-1], ladder.largest) == (1, top, top)
    assert all(a < b for a, b in itertools.pairwise(ladder.sizes))
    bucket = ladder.fit(rows)
    assert bucket is not None
    step = next(step for stop, step in ((256, 8), (512, 16), (3000, 32)) if rows <= stop)
    assert 0 <= bucket - rows < (rows if rows <= 8 else step)


@given(st.lists(st.integers(1, 600), min_size=1, max_size=12, unique=True))
def test_rows_go_to_the_smallest_that_holds_them(given_sizes: list[int]) -> None:
    """No rows go to the smallest, and waste nothing; more than the largest go to none."""
    buckets = Buckets(tuple(given_sizes))
    assert list(buckets.sizes) == sorted(given_sizes)
    assert buckets.fit(buckets.largest + 1) is None
    assert buckets.waste(0, buckets.largest) == 0
    for rows in range(buckets.largest + 1):
        assert buckets.fit(rows) == min(size for size in given_sizes if size >= rows)


@pytest.mark.parametrize("requests", [0, 3, 4])
def test_another_width_is_refused(runner: DecodeRunner[PlainInputs], requests: int) -> None:
    """Batches of another width than the runner's are refused, and nothing changes: the view before still stands."""
    batch = batch_for(PlainInputs, {BATCH: requests, TOKENS: 6}, 1)
    for use in (runner.fill, runner):
        with nothing_changes(runner, batch), pytest.raises(BatchError):
            use(batch)


BUCKETS = [2, 5]
Sizes = dict[Axis, int]


def sizes_of(requests: int, width: int) -> Sizes:
    """What a batch of so many requests has on each axis."""
    return {BATCH: requests, TOKENS: requests * width}


def assert_told(view: Inputs, live: Sizes, padded: Sizes) -> dict[str, list[int]]:
    """The slots that say what functions were told say what follows from the batch alone; what they say."""
    slots = {name: slot for name, slot in type(view).slotgraph.slots.items() if name.startswith("asked")}
    right = {name: asked(name, live, padded, slot.shape[0].at(padded)) for name, slot in slots.items()}
    assert {name: getattr(view, name).flatten().tolist() for name in slots} == right
    return right


@settings(max_examples=settings().max_examples // 2)
@given(data=st.data(), width=st.integers(1, 3), packs=st.booleans())
def test_live_sizes_are_the_batchs(backend: Backend, data: st.DataObject, width: int, *, packs: bool) -> None:
    """Slots over one of BATCH and TOKENS tell both, in each lowering, in graphs, on the eager path and in parts."""
    inputs = data.draw(one_sided())
    backend = backend_of(NAME) if packs and backend.name == "cpu-capture" else backend
    slots = inputs.slotgraph.slots.items()
    on_device = [name for name, slot in slots if name.startswith("asked") and slot.placement == DEVICE]
    step: Any = lambda view: torch.cat([getattr(view, name).flatten() for name in on_device]) + 0
    lowering = data.draw(st.sampled_from(backend.capabilities.lowerings))
    options: dict[str, Any] = {"backend": backend, "width": width, "lowering": lowering, "buckets": BUCKETS}
    runner = decoder(inputs, step, output_rows=None, **options)
    for requests in data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=6)):
        rows = next((bucket for bucket in BUCKETS if requests <= bucket), requests)  # their own where they run eagerly
        live, padded = sizes_of(requests, width), sizes_of(rows, width)
        batch = batch_for(inputs, live, requests, backend.device)
        right = assert_told(runner.fill(batch), live, padded)
        assert runner(batch).tolist() == [number for name in on_device for number in right[name]]
        view = runner.fill(batch)
        start = data.draw(st.integers(0, rows))
        stop = data.draw(st.integers(start, rows))
        part, in_part = view.narrow(BATCH, start, stop), min(max(requests - start, 0), stop - start)
        assert_told(part, sizes_of(in_part, width), sizes_of(stop - start, width))
        with pytest.raises(errors.BatchError, match=f"do not lie within the {rows} rows of BATCH"):
            view.narrow(BATCH, 0, rows + 1)


def of_issue(axis: Axis, other: Axis, *, live: bool, placement: Any = "device") -> Any:
    """A declaration over one axis whose function asks for another."""

    def ask(step: Step) -> int:
        return step.live(other) if live else step.padded(other * 2)

    ids = copied(axis, dtype=torch.int64, pad=0)
    return declaration_of({"ids": ids, "requests": computed(ask, shape=1, dtype=torch.int64, placement=placement)})


SAID = r"slot 'requests', in its function \S+: this step does not know the size of {} \(it knows {}\): declare a"


def test_an_axis_of_nothing_is_refused_at_capture(cpu: str) -> None:
    """Of an axis that no slot and no relation has, each lowering says so at capture, before anything is written."""
    for placement, lowering, live in itertools.product((DEVICE, HOST), LADDER, (True, False)):
        inputs = of_issue(BATCH, PAGES, live=live, placement=placement)
        said = SAID.format("PAGES", "BATCH, TOKENS")
        options: dict[str, Any] = {"backend": cpu, "lowering": lowering}
        with pytest.raises((errors.CaptureError, errors.DeclarationError), match=said):
            decoder(inputs, lambda view: view.ids + 0, **options)
        eager = decoder(inputs, lambda view: view.ids + 0, graphs=False, **options)
        before = {buffer.name: buffer.tensor.clone() for buffer in eager.graphs.buffers}
        with pytest.raises(errors.DeclarationError, match=said):
            eager({"ids": torch.tensor([5, 6])})
        assert all(torch.equal(before[buffer.name], buffer.tensor) for buffer in eager.graphs.buffers)


@settings(max_examples=max(1, settings().max_examples // 16))
@given(data=st.data())
def test_prefill_tells_what_slots_tell(data: st.DataObject) -> None:
    """Tokens are the batch's; so are requests where a slot is over them; else nobody may cut a view along them."""
    requested = data.draw(st.booleans())
    fields: dict[str, Any] = {
        "ids": copied(TOKENS, dtype=torch.int64, pad=0),
        "tokens": computed(lambda step: [step.live(TOKENS), step.padded(TOKENS)], shape=2, dtype=torch.int64),
    }
    if requested:
        fields["lens"] = copied(BATCH, dtype=torch.int64, pad=0)
        fields["requests"] = computed(lambda step: [step.live(BATCH), step.padded(BATCH)], shape=2, dtype=torch.int64)
    lowering = data.draw(st.sampled_from(LADDER))
    options: dict[str, Any] = {"buckets": [4, 8], "max_batch": 3, "backend": "cpu-capture", "stack": "inner"}
    step: Any = Inner(lambda view: step.inner(view.ids.double()[:, None]))
    step.inner = Inner(lambda hidden: hidden * 3)
    runner = ready(BreakableRunner(declaration_of(fields), step, output_rows=TOKENS, lowering=lowering, **options))
    for tokens in data.draw(st.lists(st.integers(1, 10), min_size=1, max_size=4)):
        bucket, requests = (4 if tokens <= 4 else max(8, tokens)), min(tokens, 1 + tokens % 3)
        batch = {"ids": torch.arange(1, tokens + 1), "lens": torch.arange(1, requests + 1)}
        view: Any = runner.fill(batch)
        assert view.tokens.tolist() == [tokens, bucket]
        if requested:
            assert view.requests.tolist() == [requests, 3 if tokens <= 8 else requests]
        else:
            with pytest.raises(errors.BatchError, match="no slot of Drawn has rows on BATCH: narrow"):
                view.narrow(BATCH, 0, 1, tokens=(0, 1))
        assert torch.equal(runner(batch)[:, 0], batch["ids"].double() * 3)
    refused = BreakableRunner(of_issue(TOKENS, BATCH, live=True), step, output_rows=TOKENS, **options)
    with pytest.raises(errors.CaptureError, match=SAID.format("BATCH", "TOKENS")):
        refused.capture()
