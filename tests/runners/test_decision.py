"""Decisions: buckets, the path of each batch with its reason, what is counted, and one warning for each reason."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, Inputs, copied
from slotgraph.backends.base import Backend
from slotgraph.config import Buckets
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import BatchError, CaptureError, ConfigError, ReplayError
from tests.runners.models import PlainInputs, assert_right, memory_of, plain_runner, plain_step, random_batch

PAGES = Axis("PAGES")


class VariedInputs(Inputs):
    """An optional slot, an axis of its own, and a field that graphs were captured with."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=3)
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0)
    extra: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=5, default=None)
    mode: Any = "decode"


def varied_step(view: VariedInputs) -> torch.Tensor:
    """[BATCH] int64."""
    total = view.ids * 100 + view.pages.sum(1)
    return total if view.extra is None else total + 1000 * view.extra


def varied(requests: int, pages: int, seed: int = 1, **more: Any) -> dict[str, Any]:
    """A batch that brings the optional slot."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(1, 50, (requests,), generator=draw),
        "pages": torch.randint(1, 9, (requests, pages), generator=draw, dtype=torch.int32),
        "extra": torch.randint(1, 9, (requests,), generator=draw),
        **more,
    }


def varied_answer(batch: dict[str, Any]) -> torch.Tensor:
    """What the step must give, from the batch alone."""
    extra = batch.get("extra")
    total = [int(i) * 100 + int(row.sum()) for i, row in zip(batch["ids"], batch["pages"], strict=True)]
    return torch.tensor([t + (0 if extra is None else 1000 * int(extra[i])) for i, t in enumerate(total)])


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
]


def test_reasons(varied_runner: DecodeRunner[VariedInputs]) -> None:
    """Each way for a batch to go has its path, its bucket and its reason in a word and a sentence, and is right."""
    for batch, wanted, reason in REASONS:
        decision = varied_runner.decide(batch)
        assert (decision.path, decision.bucket, decision.why) == wanted
        assert re.search(reason, decision.reason)
        if decision.why != "not_captured":  # its step cannot run eagerly either
            assert torch.equal(varied_runner(batch), varied_answer(batch))


def test_deciding_changes_nothing(varied_runner: DecodeRunner[VariedInputs]) -> None:
    """A decision is no step: it counts nothing, fills nothing and leaves the view that was filled to be replayed."""
    batch = varied(4, 3, seed=5)
    view = varied_runner.fill(batch)
    before = varied_runner.stats()
    for other, _, _ in REASONS:
        varied_runner.decide(other)
    assert varied_runner.stats() == before
    assert torch.equal(varied_runner.replay(view), varied_answer(batch))


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


def test_patterns_of_absent_slots(cpu: str) -> None:
    """With the pattern captured, a batch without the optional slot goes through its own graph."""
    seen: set[bool] = set()

    def step(view: VariedInputs) -> torch.Tensor:
        seen.add(view.extra is None)
        return varied_step(view)

    runner = DecodeRunner(
        VariedInputs, step, buckets=[4, 8], sizes={PAGES: 3}, backend=cpu, absent=[{"extra"}], output_rows=BATCH
    )
    runner.capture()
    assert seen == {True, False}
    for number, present in enumerate([True, False, False, True, False, True, True]):
        batch = varied(1 + number, 1 + number % 3, seed=number)
        if not present:
            del batch["extra"]
        assert runner.decide(batch).path == "graph"
        assert (runner.fill(batch).extra is None) == (not present)
        assert torch.equal(runner(batch), varied_answer(batch))
    assert runner.stats()["steps"] == {"graph": 7, "eager": 0}


@pytest.mark.parametrize("lowering", LADDER)
def test_stats(cpu: str, lowering: str) -> None:
    """Steps, rows and waste are counted for each bucket, eager runs for each reason, and graphs' fills by lowering."""
    runner = plain_runner(cpu, max_waste=0.7, lowering=lowering)
    assert runner.lowering == lowering
    for requests in (3, 4, 2, 8, 5, 1, 9, 30):
        runner(random_batch(requests, seed=requests))
    stats = dict(runner.stats())
    assert {key: stats[key] for key in ("steps", "buckets", "eager", "lowerings")} == {
        "steps": {"graph": 5, "eager": 3},
        "buckets": {
            4: {"path": "graph", "steps": 3, "live": 9, "padded": 12, "waste": 0.25},
            8: {"path": "graph", "steps": 2, "live": 13, "padded": 16, "waste": 3 / 16},
        },
        "eager": {"too_large": {"steps": 2, "live": 39}, "waste": {"steps": 1, "live": 1}},
        "lowerings": {lowering: 5},
    }


def test_one_warning_for_each_reason(cpu: str) -> None:
    """The first fallback for a reason is one warning that names it; later ones are only counted."""
    runner = plain_runner(cpu, max_waste=0.7)
    with capture_logs() as events:
        for requests in (3, 30, 40, 1, 1, 9, 30, 8):
            runner(random_batch(requests, seed=requests))
    warned = [event for event in events if event["event"] == "fallback"]
    assert [(event["why"], event["log_level"]) for event in warned] == [("too_large", "warning"), ("waste", "warning")]
    assert warned[0]["reason"] == "30 rows are more than the largest bucket, 8"
    assert warned[0]["runner"] == "DecodeRunner"


def test_graphs_switched_off(cpu: str) -> None:
    """With graphs off nothing is captured, every batch runs eagerly and is right, and the reason says why."""
    runner = DecodeRunner(PlainInputs, plain_step, buckets=[4, 8], backend=cpu, graphs=False, lazy=True)
    with pytest.raises(ReplayError, match="nothing is captured yet"):
        runner(random_batch(3, seed=1))
    report = runner.capture()
    assert (report.captured, report.failed, report.memory.graphs) == ((), {}, 0)
    for requests in (3, 8, 9):
        batch = random_batch(requests, seed=requests)
        decision = runner.decide(batch)
        assert (decision.path, decision.bucket, decision.why) == ("eager", None, "disabled")
        assert decision.reason == "graphs are switched off, by graphs=False"
        assert_right(runner(batch), batch)
    assert runner.stats()["steps"] == {"graph": 0, "eager": 3}
    assert runner.stats()["eager"] == {"disabled": {"steps": 3, "live": 20}}
    with pytest.raises(ConfigError, match="there is no graph of bucket 4"):
        runner.inputs(4)


class HookedInputs(Inputs):
    """A field whose default is made anew each time."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    hooks: list[int] = attrs.field(factory=list)


def test_a_field_with_a_factory(cpu: str) -> None:
    """It is seen in capture with what the factory makes; a batch with another value runs eagerly, and says so."""
    runner = DecodeRunner(HookedInputs, lambda view: view.ids + sum(view.hooks), buckets=[4], backend=cpu)
    runner.capture()
    ids = torch.tensor([3, 1, 2])
    assert runner.decide({"ids": ids, "hooks": []}).why == "fits"
    assert runner.decide({"ids": ids}).why == "fits"
    other = {"ids": ids, "hooks": [5]}
    assert runner.decide(other).why == "field_differs"
    assert runner(other).tolist() == [8, 6, 7]


row_counts = st.lists(st.integers(1, 600), min_size=1, max_size=12, unique=True)
largest = st.integers(1, 2000)


@given(largest, st.data())
def test_ladder_wastes_little(top: int, data: st.DataObject) -> None:
    """It ascends from 1 to the largest size; rows are padded to twice as many below 8, by 8, 16 and 32 rows beyond."""
    rows, ladder = data.draw(st.integers(1, top)), Buckets.ladder(top)
    assert (ladder.sizes[0], ladder.sizes[-1], ladder.largest) == (1, top, top)
    assert all(a < b for a, b in itertools.pairwise(ladder.sizes))
    bucket = ladder.fit(rows)
    assert bucket is not None
    step = next(step for stop, step in ((256, 8), (512, 16), (3000, 32)) if rows <= stop)
    assert 0 <= bucket - rows < (rows if rows <= 8 else step)


@given(row_counts)
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
    made: list[tuple[Callable[[Any], Buckets], Any]] = [(Buckets, ()), (Buckets, (4, 2, 4)), (Buckets.ladder, 0)]
    for make, wrong in made:
        with pytest.raises(ConfigError, match="option 'buckets': expected a list or tuple of at least one int"):
            make(wrong)
    with pytest.raises(ConfigError, match="option 'max_waste': expected float between 0 and 1"):
        Buckets((4,), float("nan"))


class VerifyInputs(Inputs):
    """Two slots over tokens, and one over requests."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=3)
    marks: torch.Tensor = copied(TOKENS, dtype=torch.int32, pad=-5)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=7)


def verify_step(view: VerifyInputs) -> torch.Tensor:
    """[TOKENS] int64; each token hangs on its request's length."""
    width = view.ids.shape[0] // max(view.lens.shape[0], 1)
    spread = view.lens[:, None].expand(-1, width).reshape(-1)
    return view.ids * 1000 + view.marks * 10 + spread


def wide_batch(requests: int, width: int, seed: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Random requests of `width` tokens each."""
    draw = torch.Generator().manual_seed(seed)
    found = {
        "ids": torch.randint(1, 99, (requests * width,), generator=draw),
        "marks": torch.randint(1, 99, (requests * width,), generator=draw, dtype=torch.int32),
        "lens": torch.randint(1, 9, (requests,), generator=draw, dtype=torch.int32),
    }
    return {name: value.to(device) for name, value in found.items()}


def wide_answer(batch: dict[str, torch.Tensor], width: int) -> list[int]:
    """What the step must give, row by row."""
    ids, marks, lens = (batch[name].tolist() for name in ("ids", "marks", "lens"))
    return [ids[row] * 1000 + marks[row] * 10 + lens[row // width] for row in range(len(ids))]


def of_width(backend: Backend | str, width: int, **options: Any) -> DecodeRunner[VerifyInputs]:
    """A runner for 2 and 4 requests of `width` tokens each."""
    runner = DecodeRunner(VerifyInputs, verify_step, backend=backend, buckets=[2, 4], width=width, **options)
    runner.capture()
    return runner


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
    runner = of_width(cpu, 1)
    runner(wide_batch(6, 1, 1))  # so that there is nothing to grow
    good = wide_batch(3, 1, seed=2)
    view = runner.fill(good)
    before, counted = memory_of(runner), runner.stats()
    for fault in FAULTS:
        for use in (runner.fill, runner):
            with pytest.raises(BatchError):
                use({**wide_batch(3, 2, seed=3), **fault})
    assert (memory_of(runner), runner.stats()) == (before, counted)
    assert runner.replay(view).tolist() == wide_answer(good, 1)


class TokensOnly(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=3)


class OptionalRows(TokensOnly):
    lens: torch.Tensor | None = copied(BATCH, dtype=torch.int32, pad=7, default=None)


def test_width_that_nothing_tells(cpu: str) -> None:
    """Without a required slot over requests, tokens that are no multiple of the width are refused as ever."""
    for inputs in (TokensOnly, OptionalRows):
        runner = DecodeRunner(inputs, lambda view: view.ids * 2, backend=cpu, buckets=[2, 4], width=4)
        runner.capture()
        batch = {"ids": torch.arange(1, 7), "lens": torch.tensor([1, 2, 3], dtype=torch.int32)}
        for use in (runner.decide, runner):
            with pytest.raises(BatchError, match="'ids'"):
                use(batch)
