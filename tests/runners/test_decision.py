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
    memory_of,
    plain_step,
    random_batch,
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
]


def test_reasons(varied_runner: DecodeRunner[VariedInputs]) -> None:
    """Each way for a batch to go has its path, its bucket and its reason in a word and a sentence, and is right."""
    first = varied(4, 3, seed=5)
    view, before = varied_runner.fill(first), varied_runner.stats()
    for batch, wanted, reason in REASONS:
        decision = varied_runner.decide(batch)
        assert (decision.path, decision.bucket, decision.why) == wanted
        assert re.search(reason, decision.reason)
    assert varied_runner.stats() == before  # a decision is no step
    assert torch.equal(varied_runner.replay(view), varied_step(VariedInputs(**first)))
    for batch, (_, _, why), _ in REASONS:
        if why != "not_captured":  # its step cannot run eagerly either
            assert torch.equal(varied_runner(batch), varied_step(VariedInputs(**batch)))


def test_field_that_compares_by_element(varied_runner: DecodeRunner[VariedInputs]) -> None:
    """A field whose value in the batch is an array differs from the captured one, and says so."""
    values: list[Any] = [torch.arange(3), np.arange(3), [np.arange(3)], {"rows": torch.arange(3)}]
    decisions = [varied_runner.decide(varied(3, 3, mode=value)) for value in values]
    assert {decision.why for decision in decisions} == {"field_differs"}
    assert decisions[0].reason == "field 'mode' is Tensor, not 'decode', with which graphs were captured"


def test_before_capture(cpu: str) -> None:
    """Before capture a runner decides, fills and runs nothing, not even what would run eagerly, lazy or not."""
    for lazy in (False, True):
        runner = DecodeRunner(PlainInputs, plain_step, buckets=[4], backend=cpu, lazy=lazy)
        assert runner.report is None
        for requests in (3, 30):
            batch = random_batch(requests, seed=1)
            for use in (runner.decide, runner.fill, runner):
                with pytest.raises(ReplayError, match=r"nothing is captured yet: call capture\(\) first"):
                    use(batch)
        with pytest.raises(ConfigError, match=r"there is no graph of bucket 4: .*after capture\(\)"):
            runner.inputs(4)
        runner.capture()
        with pytest.raises(ConfigError, match="there is no graph of bucket 3"):
            runner.inputs(3)
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


def test_bad_buckets() -> None:
    """They are checked as the option is: there is at least one, and a ladder goes up to a row at least."""
    wrong: list[tuple[Any, Any]] = [(Buckets, ()), (Buckets, (4, 2, 4)), (Buckets.ladder, 0)]
    for make, sizes in wrong:
        with pytest.raises(ConfigError, match="option 'buckets': expected a list or tuple of at least one int"):
            make(sizes)
    with pytest.raises(ConfigError, match="option 'max_waste': expected float between 0 and 1"):
        Buckets((4,), float("nan"))


class VerifyInputs(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=3)
    marks: torch.Tensor = copied(TOKENS, dtype=torch.int32, pad=-5)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=7)


FAULTS: list[dict[str, Any]] = [
    {},
    {"lens": torch.tensor([1, 2, 3, 4], dtype=torch.int32)},
    {"lens": torch.tensor([], dtype=torch.int32)},
    {"marks": torch.arange(1, 6)},
    {"marks": torch.arange(1, 6, dtype=torch.int32)},
    {"marks": None},
]


def test_another_width_is_refused(cpu: str) -> None:
    """Batches of another width than the runner's are refused, and nothing changes: the view before still stands."""
    runner = decoder(
        VerifyInputs, lambda view: view.ids * 1000 + view.marks * 10 + view.lens, backend=cpu, buckets=[2, 4], width=1
    )
    runner(batch_for(VerifyInputs, {BATCH: 6, TOKENS: 6}, 1))  # so that there is nothing to grow
    good = batch_for(VerifyInputs, {BATCH: 3, TOKENS: 3}, 1)
    view = runner.fill(good)
    before, counted = memory_of(runner), runner.stats()
    for fault in FAULTS:
        for use in (runner.fill, runner):
            with pytest.raises(BatchError):
                use({**batch_for(VerifyInputs, {BATCH: 3, TOKENS: 6}, 1), **fault})
    assert (memory_of(runner), runner.stats()) == (before, counted)
    assert torch.equal(runner.replay(view), good["ids"] * 1000 + good["marks"] * 10 + good["lens"])


BUCKETS = [2, 5]
Sizes = dict[Axis, int]


def sizes_of(requests: int, width: int) -> Sizes:
    """What a batch of so many requests has on each axis."""
    return {BATCH: requests, TOKENS: requests * width}


def asking(inputs: type[Inputs]) -> dict[str, Any]:
    """The slots that say what functions were told."""
    return {name: slot for name, slot in inputs.slotgraph.slots.items() if name.startswith("asked")}


def seen(view: Inputs) -> dict[str, list[int]]:
    """What they say."""
    return {name: getattr(view, name).flatten().tolist() for name in asking(type(view))}


def told(inputs: type[Inputs], live: Sizes, padded: Sizes) -> dict[str, list[int]]:
    """What they must be told, worked out from the batch alone."""
    return {name: asked(name, live, padded, slot.shape[0].at(padded)) for name, slot in asking(inputs).items()}


@settings(max_examples=settings().max_examples // 2)
@given(data=st.data(), width=st.integers(1, 3), packs=st.booleans())
def test_live_sizes_are_the_batchs(backend: Backend, data: st.DataObject, width: int, *, packs: bool) -> None:
    """Slots over one of BATCH and TOKENS tell both, in each lowering, in graphs, on the eager path and in parts."""
    inputs = data.draw(one_sided())
    backend = backend_of(NAME) if packs and backend.name == "cpu-capture" else backend
    on_device = [name for name, slot in asking(inputs).items() if slot.placement == DEVICE]
    step: Any = lambda view: torch.cat([getattr(view, name).flatten() for name in on_device]) + 0  # noqa: E731
    lowering = data.draw(st.sampled_from(backend.capabilities.lowerings))
    options: dict[str, Any] = {"backend": backend, "width": width, "lowering": lowering, "buckets": BUCKETS}
    runner = decoder(inputs, step, output_rows=None, **options)
    for requests in data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=6)):
        rows = next((bucket for bucket in BUCKETS if requests <= bucket), requests)  # their own where they run eagerly
        live, padded = sizes_of(requests, width), sizes_of(rows, width)
        batch = batch_for(inputs, live, requests, backend.device)
        right = told(inputs, live, padded)
        assert seen(runner.fill(batch)) == right
        assert runner(batch).tolist() == [number for name in on_device for number in right[name]]
        assert_parts(runner.fill(batch), live, padded, width, data)


def assert_parts(view: Any, live: Sizes, padded: Sizes, width: int, data: st.DataObject) -> None:
    """A micro-batch's functions are told its own sizes; one beyond the view's rows is refused."""
    start = data.draw(st.integers(0, padded[BATCH]))
    stop = data.draw(st.integers(start, padded[BATCH]))
    part = view.narrow(BATCH, start, stop)
    rows = min(max(live[BATCH] - start, 0), stop - start)
    assert seen(part) == told(type(view), sizes_of(rows, width), sizes_of(stop - start, width))
    with pytest.raises(errors.BatchError, match=f"do not lie within the {padded[BATCH]} rows of BATCH"):
        view.narrow(BATCH, 0, padded[BATCH] + 1)


def of_issue(axis: Axis, other: Axis, *, live: bool, placement: Any = "device") -> Any:
    """A declaration over one axis whose function asks for another."""

    def ask(step: Step) -> int:
        return step.live(other) if live else step.padded(other * 2)

    ids = copied(axis, dtype=torch.int64, pad=0)
    return declaration_of({"ids": ids, "requests": computed(ask, shape=1, dtype=torch.int64, placement=placement)})


SAID = r"slot 'requests', in its function \S+: this step does not know the size of {} \(it knows {}\): declare a"


def test_an_axis_of_nothing_is_refused_at_capture(cpu: str) -> None:
    """Of an axis that no slot and no relation has, each lowering says so at capture, before anything is written."""
    placements: tuple[Any, ...] = ("device", HOST)
    for placement, lowering, live in itertools.product(placements, LADDER, (True, False)):
        inputs = of_issue(BATCH, PAGES, live=live, placement=placement)
        said = SAID.format("PAGES", "BATCH, TOKENS")
        options: dict[str, Any] = {"buckets": [2], "backend": cpu, "lowering": lowering}
        runner: Any = DecodeRunner(inputs, lambda view: view.ids + 0, **options)
        with pytest.raises((errors.CaptureError, errors.DeclarationError), match=said):
            runner.capture()
        eager = decoder(inputs, lambda view: view.ids + 0, graphs=False, **options)
        before = {buffer.name: buffer.tensor.clone() for buffer in eager.graphs.buffers}
        with pytest.raises(errors.DeclarationError, match=said):
            eager({"ids": torch.tensor([5, 6])})
        assert all(torch.equal(before[buffer.name], buffer.tensor) for buffer in eager.graphs.buffers)


@settings(max_examples=settings().max_examples // 16)
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
    runner = BreakableRunner(declaration_of(fields), step, output_rows=TOKENS, lowering=lowering, **options)
    runner.capture()
    for tokens in data.draw(st.lists(st.integers(1, 10), min_size=1, max_size=4)):
        bucket, requests = (4 if tokens <= 4 else max(8, tokens)), min(tokens, 1 + tokens % 3)
        batch = {"ids": torch.arange(1, tokens + 1), "lens": torch.arange(1, requests + 1)}
        view: Any = runner.fill(batch)
        assert view.tokens.tolist() == [tokens, bucket]
        if requested:
            assert view.requests.tolist() == [requests, 3 if tokens <= 8 else requests]
        else:
            with pytest.raises(errors.BatchError, match="no rows on BATCH, which no slot of Drawn tells"):
                view.narrow(BATCH, 0, 1, tokens=(0, 1))
        assert torch.equal(runner(batch)[:, 0], batch["ids"].double() * 3)
    refused = BreakableRunner(of_issue(TOKENS, BATCH, live=True), step, output_rows=TOKENS, **options)
    with pytest.raises(errors.CaptureError, match=SAID.format("BATCH", "TOKENS")):
        refused.capture()
