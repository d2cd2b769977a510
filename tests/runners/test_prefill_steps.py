"""Steps of both prefill runners: equal to eager ones, with a defined path and a reason for each batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import TOKENS
from slotgraph.backends import Backend
from slotgraph.dataflow.errors import BatchError, CaptureError, ReplayError
from tests.runners.prefilled import KINDS, VOCAB, Model, batch_of, caches_of, captured, clear, poison, runner_of

each_kind = pytest.mark.parametrize("kind", KINDS)

requests = st.lists(st.integers(1, 7), max_size=6)
schedules = st.lists(st.tuples(requests, st.integers(1, 5), st.booleans(), st.booleans()), min_size=1, max_size=5)


@each_kind
@settings(max_examples=25)
@given(schedule=schedules)
def test_any_schedule(backend: Backend, kind: str, schedule: list[tuple[list[int], int, bool, bool]]) -> None:
    """Any requests in any order, from none to too many, give what eager steps give, caches included."""
    runner, eager = captured(kind, backend.name)
    clear(runner, eager)
    for lengths, scale, poisoned, inference in schedule:
        batch = batch_of(lengths, sum(lengths), backend.device, scale)
        if poisoned:
            poison(runner)
        with torch.inference_mode(inference):
            assert torch.equal(runner(batch), eager(batch))
        assert torch.equal(caches_of(runner), caches_of(eager))


@each_kind
@pytest.mark.parametrize(
    ("lengths", "bucket", "why", "reason"),
    [
        ([], 4, "fits", "bucket 4 fits"),
        ([4], 4, "fits", "bucket 4 fits"),
        ([1] * 5, 16, "fits", "bucket 16 fits"),
        ([10, 6], 16, "fits", "bucket 16 fits"),
        ([10, 7], None, "too_large", "17 tokens are more than the largest bucket, 16"),
        ([1] * 6, None, "too_large", "6 rows on BATCH are more than the 5 of every bucket"),
    ],
)
def test_decisions(backend: Backend, kind: str, lengths: list[int], bucket: int | None, why: str, reason: str) -> None:
    """A batch's tokens choose the bucket; too many of them, or of requests, run eagerly and say so."""
    runner, eager = captured(kind, backend.name)
    batch = batch_of(lengths, 5, backend.device)
    decision = runner.decide(batch)
    assert (decision.bucket, decision.why, decision.reason) == (bucket, why, reason)
    assert decision.path == ("eager" if bucket is None else kind)
    before = runner.stats()
    assert torch.equal(runner(batch), eager(batch))
    after = runner.stats()
    assert after["steps"][decision.path] == before["steps"].get(decision.path, 0) + 1
    if bucket is None:
        seen = before["eager"].get(why, {"steps": 0, "live": 0})
        assert after["eager"][why] == {"steps": seen["steps"] + 1, "live": seen["live"] + sum(lengths)}
    else:
        counts = after["buckets"][bucket]
        assert counts["path"] == kind
        assert counts["padded"] == bucket * counts["steps"]
        assert counts["live"] - before["buckets"].get(bucket, {"live": 0})["live"] == sum(lengths)


@each_kind
def test_idle_step(backend: Backend, kind: str) -> None:
    """A batch without requests replays the smallest bucket, as an idle rank must, and gives no rows."""
    runner, _ = captured(kind, backend.name)
    for _ in range(2):
        poison(runner)
        outputs = runner(batch_of([], 1, backend.device))
        assert outputs.shape == (0, VOCAB)
    assert (caches_of(runner)[:, :, 0] >= 0).all()


@each_kind
def test_fill_and_replay(backend: Backend, kind: str) -> None:
    """A filled view has padded tokens and live requests; it is good for replays until the next fill."""
    runner, eager = captured(kind, backend.name)
    batch = batch_of([2, 3], 6, backend.device)
    view = runner.fill(batch)
    assert view.input_ids.shape == (16,)
    assert view.extend_seq_lens.tolist() == [2, 3]
    assert view.extend_start_loc.tolist() == [0, 2]
    assert view.input_ids[5:].tolist() == [0] * 11
    assert view.scale == 3
    for _ in range(2):
        assert torch.equal(runner.replay(view), eager(batch))
    other = runner.fill(batch_of([17], 7, backend.device))
    with pytest.raises(ReplayError, match="this view was not filled last"):
        runner.replay(view)
    assert torch.equal(runner.replay(other), eager(batch_of([17], 7, backend.device)))


@each_kind
def test_bad_batches(backend: Backend, kind: str) -> None:
    """A batch that does not fit its declaration is refused before anything is written: the view filled last stands."""
    runner, eager = captured(kind, backend.name)
    batch = batch_of([2, 3], 8, backend.device)
    view = runner.fill(batch)
    for lengths in ([5], [2], [20]):
        bad = batch_of(lengths, 9, backend.device)
        with pytest.raises(BatchError, match="slot 'positions': expected int64 of shape"):
            runner(bad | {"positions": bad["positions"][:-1]})
        with pytest.raises(BatchError, match="slot 'out_cache_loc'"):
            runner.fill({name: value for name, value in bad.items() if name != "out_cache_loc"})
    assert torch.equal(runner.replay(view), eager(batch))


@each_kind
def test_capture_touches_nothing_but_the_dummy_row(backend: Backend, kind: str) -> None:
    """Capturing writes caches only where padding goes, and leaves a later step nothing of its placeholder."""
    model = Model(3, named=kind == "piecewise").to(backend.device)
    runner = runner_of(kind, model, backend, buckets=[2])
    with pytest.raises(ReplayError, match=r"nothing is captured yet: call capture\(\) first"):
        runner(batch_of([1], 1, backend.device))
    report = runner.capture()
    assert (report.captured, report.failed) == ((2,), {})
    assert not model.caches().any()
    batch = batch_of([1], 4, backend.device)
    runner(batch)
    written = model.caches().any(0).any(-1).nonzero().flatten() + 1
    assert written.tolist() == batch["out_cache_loc"].tolist()
    with pytest.raises(CaptureError, match="this runner is captured already"):
        runner.capture()


@each_kind
def test_waste(backend: Backend, kind: str) -> None:
    """A batch that a bucket would pad over the limit runs eagerly; one without tokens wastes nothing that counts."""
    runner = runner_of(kind, Model(named=kind == "piecewise").to(backend.device), backend, max_waste=0.5, lazy=True)
    runner.capture()
    reasons = {tokens: runner.decide(batch_of([tokens] if tokens else [], 1)).reason for tokens in (0, 1, 2, 7, 8)}
    assert reasons == {
        0: "bucket 4 fits",
        1: "bucket 4 would be 75% padding, over the limit of 50%",
        2: "bucket 4 fits",
        7: "bucket 16 would be 56% padding, over the limit of 50%",
        8: "bucket 16 fits",
    }


@each_kind
def test_switched_off(backend: Backend, kind: str) -> None:
    """Without graphs nothing is captured, and each batch runs eagerly for that reason."""
    model = Model(named=kind == "piecewise").to(backend.device)
    runner, (_, eager) = runner_of(kind, model, backend, graphs=False), captured(kind, backend.name)
    assert runner.capture().captured == ()
    batch = batch_of([2, 1], 2, backend.device)
    assert torch.equal(runner(batch), eager(batch))
    assert runner.decide(batch).why == "disabled"
    assert runner.stats()["steps"] == {kind: 0, "eager": 1}
    assert runner.stats()["eager"] == {"disabled": {"steps": 1, "live": 3}}


@each_kind
def test_lazy(backend: Backend, kind: str) -> None:
    """Each bucket is captured when its first batch comes, in inference mode or not, and disturbs no other bucket."""
    model = Model(named=kind == "piecewise").to(backend.device)
    runner, (_, eager) = runner_of(kind, model, backend, lazy=True), captured(kind, backend.name)
    seen = [runner.capture().captured]
    for lengths, inference in (([9], True), ([2, 3], False), ([1], False), ([3, 3], True)):
        batch = batch_of(lengths, 3, backend.device)
        with torch.inference_mode(inference):
            assert torch.equal(runner(batch), eager(batch))
        assert runner.report is not None
        seen.append(runner.report.captured)
    assert seen == [(), (16,), (16,), (4, 16), (4, 16)]


@each_kind
def test_plan(backend: Backend, kind: str) -> None:
    """The plan of a bucket can be looked at: what is reset, copied and computed before the graphs run."""
    runner, _ = captured(kind, backend.name)
    plan = runner.plan(16)
    assert dict(plan.sizes)[TOKENS.name] == 16
    assert "in_graph" not in str(plan)
    assert runner.lowering in backend.capabilities.lowerings
