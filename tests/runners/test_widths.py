"""Widths: a batch whose requests have another number of tokens than was captured runs eagerly, and is right."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from slotgraph import BATCH, TOKENS, WIDTH, DecodeRunner, EagerRunner, Inputs, copied
from slotgraph.backends.base import Backend
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import BatchError, ConfigError, ReplayError
from tests.runners.models import bytes_of, memory_of


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


def batch_of(requests: int, width: int, seed: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Random requests of `width` tokens each."""
    draw = torch.Generator().manual_seed(seed)
    found = {
        "ids": torch.randint(1, 99, (requests * width,), generator=draw),
        "marks": torch.randint(1, 99, (requests * width,), generator=draw, dtype=torch.int32),
        "lens": torch.randint(1, 9, (requests,), generator=draw, dtype=torch.int32),
    }
    return {name: value.to(device) for name, value in found.items()}


def answer(batch: dict[str, torch.Tensor], width: int) -> list[int]:
    """What the step must give, row by row."""
    ids, marks, lens = (batch[name].tolist() for name in ("ids", "marks", "lens"))
    return [ids[row] * 1000 + marks[row] * 10 + lens[row // width] for row in range(len(ids))]


def captured(backend: Backend | str, width: int, **options: Any) -> DecodeRunner[VerifyInputs]:
    """A runner for 2 and 4 requests of `width` tokens each."""
    runner = DecodeRunner(VerifyInputs, verify_step, backend=backend, buckets=[2, 4], width=width, **options)
    runner.capture()
    return runner


@pytest.mark.parametrize("lowering", LADDER)
@settings(max_examples=10)
@given(data=st.data())
def test_any_sequence_of_widths(backend: Backend, lowering: str, data: st.DataObject) -> None:
    """Batches of the captured width and of others take turns; each is right, on the path that was told before."""
    if lowering not in backend.capabilities.lowerings:
        pytest.skip(f"{backend.name} has no {lowering}")
    runner = captured(backend, width := data.draw(st.integers(1, 3)), lowering=lowering)
    turns = data.draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=2, max_size=8))
    others = [(requests, other) for requests, other in turns if other != width]
    for seed, (requests, other) in enumerate(turns):
        batch = batch_of(requests, other, seed, backend.device)
        decision = runner.decide(batch)
        assert runner(batch).tolist() == answer(batch, other)
        assert runner.replay(runner.fill(batch)).tolist() == answer(batch, other)
        assert decision.why == ("width_differs" if other != width else "fits" if requests <= 4 else "too_large")
    eager = runner.stats()["eager"].get("width_differs", {"steps": 0, "live": 0})
    assert eager == {"steps": 2 * len(others), "live": 2 * sum(requests for requests, _ in others)}


def test_decision_says_both_widths(cpu: str) -> None:
    """The sentence names the batch's width and the captured one; one event is logged for all such batches."""
    runner = captured(cpu, 1)
    with capture_logs() as events:
        for seed in range(3):
            runner(batch_of(2, 3, seed))
    decision = runner.decide(batch_of(2, 3, 1))
    assert (decision.path, decision.bucket, decision.why) == ("eager", None, "width_differs")
    assert decision.reason == "requests have 3 tokens each, and graphs were captured for 1 token"
    assert [event["why"] for event in events if event["event"] == "fallback"] == ["width_differs"]


def test_view_of_another_width_is_cut_by_its_own(cpu: str) -> None:
    """A micro-batch of requests takes as many tokens of each as the batch has, not as many as were captured."""
    runner = captured(cpu, 4)
    batch = batch_of(3, 2, seed=1)
    part = runner.fill(batch).narrow(BATCH, 1, 3)
    assert part.ids.tolist() == batch["ids"][2:].tolist()
    assert part.lens.tolist() == batch["lens"][1:].tolist()


FAULTS: dict[str, Any] = {
    "no whole width": {"lens": torch.tensor([1, 2, 3, 4], dtype=torch.int32)},
    "no requests": {"lens": torch.tensor([], dtype=torch.int32)},
    "another fault beside": {"marks": torch.arange(1, 6)},
    "of other lengths": {"marks": torch.arange(1, 6, dtype=torch.int32)},
    "missing": {"marks": None},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_width_is_refused(cpu: str, fault: str) -> None:
    """Sources that fit no width at all are refused as ever, and nothing changes: the view before still stands."""
    runner = captured(cpu, 1)
    runner(batch_of(3, 2, 1))  # so that there is nothing to grow
    good = batch_of(3, 1, seed=2)
    view = runner.fill(good)
    before, counted = memory_of(runner), runner.stats()
    with pytest.raises(BatchError):
        runner({**batch_of(3, 2, seed=3), **FAULTS[fault]})
    assert (memory_of(runner), runner.stats()) == (before, counted)
    assert runner.replay(view).tolist() == answer(good, 1)


def test_before_capture(cpu: str) -> None:
    """Before capture a batch of any width is refused."""
    runner = DecodeRunner(VerifyInputs, verify_step, backend=cpu, buckets=[2], width=2)
    for use in (runner.decide, runner.fill, runner):
        with pytest.raises(ReplayError, match="nothing is captured yet"):
            use(batch_of(1, 2, 1))


class ByWidth(VerifyInputs):
    """A slot whose tail follows from the width, and one whose shape does."""

    counts: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=WIDTH)
    drafts: torch.Tensor = copied(BATCH, WIDTH, dtype=torch.int64, pad=0)


def test_slots_that_follow_from_the_width(cpu: str) -> None:
    """Where a declaration depends on the width, a batch of another one is refused, by fill and decide alike."""
    runner = DecodeRunner(ByWidth, verify_step, backend=cpu, buckets=[2, 4], width=2)
    runner.capture()
    batch = {**batch_of(3, 2, 1), "counts": torch.arange(3), "drafts": torch.ones(3, 2, dtype=torch.int64)}
    assert runner(batch).tolist() == answer(batch, 2)
    view = runner.fill({**batch, "counts": torch.arange(1, 4)})
    assert view.counts.tolist() == [1, 2, 3, 2]
    before = bytes_of(view.ids)
    other = {**batch, **batch_of(3, 4, 2), "drafts": torch.ones(3, 4, dtype=torch.int64)}
    for use in (runner.decide, runner.fill, runner):
        with pytest.raises(
            BatchError, match=r"4 tokens each, .* for 2 tokens; slots 'counts', 'drafts' .* make a runner with width=4"
        ):
            use(other)
    assert bytes_of(view.ids) == before
    runner.replay(view)


def test_a_step_of_one_width(backend: Backend) -> None:
    """Where the step stands for one width, a batch of another is refused by fill and decide alike, and not counted."""
    runner = captured(backend, 2)
    runner._widths._only = True  # as of a draft runner
    good = batch_of(3, 2, 1, backend.device)
    view = runner.fill(good)
    counted, before = runner.stats(), bytes_of(view.ids)
    for use in (runner.decide, runner.fill, runner):
        with pytest.raises(
            BatchError, match=r"4 tokens each, .* for 2 tokens, the only width of this runner's step: bring 2 tokens a"
        ):
            use(batch_of(3, 4, 2, backend.device))
    assert (runner.stats(), bytes_of(view.ids)) == (counted, before)
    assert runner.replay(view).tolist() == answer(good, 2)
    large = batch_of(5, 2, 3, backend.device)
    assert (runner.decide(large).why, runner(large).tolist()) == ("too_large", answer(large, 2))


def test_width_is_given_once(cpu: str) -> None:
    """The size of WIDTH is that of width=; another one beside it is refused, and an eager runner needs it as well."""
    with pytest.raises(ConfigError, match=r"sizes of WIDTH is 3, and width= is 2: give width= alone"):
        DecodeRunner(ByWidth, verify_step, backend=cpu, width=2, sizes={WIDTH: 3})
    eager = EagerRunner(ByWidth, verify_step, backend=cpu, sizes={WIDTH: 2})
    batch = {**batch_of(3, 2, 1), "counts": torch.arange(3), "drafts": torch.ones(3, 2, dtype=torch.int64)}
    assert eager(batch).tolist() == answer(batch, 2)


class TokensOnly(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=3)


class OptionalRows(TokensOnly):
    lens: torch.Tensor | None = copied(BATCH, dtype=torch.int32, pad=7, default=None)


@pytest.mark.parametrize("inputs", [TokensOnly, OptionalRows])
def test_width_that_nothing_tells(cpu: str, inputs: type[TokensOnly]) -> None:
    """Without a required slot over requests, tokens that are no multiple of the width are refused as ever."""
    runner = DecodeRunner(inputs, lambda view: view.ids * 2, backend=cpu, buckets=[2, 4], width=4)
    runner.capture()
    batch = {"ids": torch.arange(1, 7), "lens": torch.tensor([1, 2, 3], dtype=torch.int32)}
    for use in (runner.decide, runner):
        with pytest.raises(BatchError, match="'ids'"):
            use(batch)
