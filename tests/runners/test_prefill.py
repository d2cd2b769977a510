"""Runners that capture a part of a step: equal to eager ones, with a path and a reason for each batch; splits."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from slotgraph import BATCH, TOKENS, Axis, EagerRunner, Inputs, PrefillRunner, copied, current_view, errors
from slotgraph.backends import Backend
from tests.runners.models import ready
from tests.runners.prefilled import (
    HIDDEN,
    KINDS,
    LAYERS,
    Model,
    Prefill,
    around,
    batch_of,
    captured,
    model_of,
    named_attention,
    poison,
    runner_of,
    scaled,
)

each_kind = pytest.mark.parametrize("kind", KINDS)
requests = st.lists(st.integers(1, 7), max_size=6)
schedules = st.lists(st.tuples(requests, st.integers(1, 5), st.booleans(), st.booleans()), min_size=1, max_size=5)


@each_kind
@settings(max_examples=25)
@given(schedule=schedules)
def test_any_schedule_gives_what_eager_steps_give(
    backend: Backend, kind: str, schedule: list[tuple[list[int], int, bool, bool]]
) -> None:
    """Any requests in any order, from none to too many, give what eager steps give, caches included."""
    runner, eager = captured(kind, backend.name)
    for one in (runner, eager):
        model_of(one).clear()
    for lengths, scale, poisoned, inference in schedule:
        batch = batch_of(lengths, sum(lengths), backend.device, scale)
        if poisoned:
            poison(runner)
        with torch.inference_mode(inference):
            assert torch.equal(runner(batch), eager(batch))
        assert torch.equal(model_of(runner).caches(), model_of(eager).caches())


@each_kind
@pytest.mark.parametrize("lazy", [False, True])
def test_a_capture_leaves_caches_in_use_as_they_are(backend: Backend, kind: str, *, lazy: bool) -> None:
    """A capture, up front or when a bucket's first batch comes, in inference mode or not, leaves caches as they are."""
    models = [Model(named=kind == "piecewise").to(backend.device) for _ in range(2)]
    for layer in models[0].inner:
        layer.get_buffer("cache").uniform_()
    models[1].load_state_dict(models[0].state_dict())
    runner, eager = runner_of(kind, models[0], backend, lazy=lazy), EagerRunner(Prefill, models[1], backend=backend)
    seen = [runner.capture().captured]
    assert torch.equal(models[0].caches(), models[1].caches())
    for lengths, inference in (([9], True), ([2, 3], False), ([1], False), ([3, 3], True)):
        batch = batch_of(lengths, 3, backend.device)
        with torch.inference_mode(inference):
            assert torch.equal(runner(batch), eager(batch))
        assert torch.equal(models[0].caches(), models[1].caches())
        seen.append(tuple(runner.stats()["capture"]["buckets"]))
    assert seen == ([(), (16,), (16,), (4, 16), (4, 16)] if lazy else [(4, 16)] * 5)


DECISIONS: list[tuple[list[int], int | None, str, str]] = [
    ([], 4, "fits", "bucket 4 fits"),
    ([4], 4, "fits", "bucket 4 fits"),
    ([1] * 5, 16, "fits", "bucket 16 fits"),
    ([10, 6], 16, "fits", "bucket 16 fits"),
    ([10, 7], None, "too_large", "17 tokens are more than the largest bucket, 16"),
    ([1] * 6, None, "too_large", "6 rows on BATCH are more than the 5 of every bucket"),
]


@each_kind
def test_a_batchs_tokens_choose_the_bucket(backend: Backend, kind: str) -> None:
    """A batch's tokens choose the bucket; too many of them, of requests, or of padding, run eagerly and say so."""
    runner, eager = captured(kind, backend.name)
    for lengths, bucket, why, reason in DECISIONS:
        batch = batch_of(lengths, 5, backend.device)
        decision = runner.decide(batch)
        assert (decision.bucket, decision.why, decision.reason) == (bucket, why, reason)
        assert decision.path == ("eager" if bucket is None else kind)
        poison(runner)
        before = runner.stats()["steps"][decision.path]
        assert torch.equal(runner(batch), eager(batch))
        assert runner.stats()["steps"][decision.path] == before + 1


PAGES = Axis("PAGES")


class TokensOnly(Inputs):  # no slot over requests
    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


class Paged(Prefill):  # a further axis that varies
    pages: torch.Tensor = copied(PAGES, dtype=torch.int64, pad=0)


@each_kind
def test_rows_of_outputs_may_be_tokens(backend: Backend, kind: str) -> None:
    """Rows of outputs may be tokens, of which the live ones are handed out, or be handed out whole, in a structure."""
    model = Model(named=kind == "piecewise").to(backend.device)

    def step(view: Prefill) -> Any:
        return {"hidden": model.hidden(view), "layers": LAYERS}

    eager, batch = EagerRunner(Prefill, step, backend=backend), batch_of([1, 2], 5, backend.device)
    for output_rows, rows in ((TOKENS, 3), (None, 4)):
        runner = ready(runner_of(kind, step, backend, output_rows=output_rows, stack=model.inner, buckets=[4]))
        outputs = runner(batch)
        assert (outputs["hidden"].shape, outputs["layers"]) == ((rows, HIDDEN), LAYERS)
        assert torch.equal(outputs["hidden"][:3], eager(batch)["hidden"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inputs": TokensOnly}, "output_rows is BATCH, which no slot of TokensOnly has: pass another, or None"),
        ({"sizes": {TOKENS: 4}}, "sizes of BATCH and TOKENS follow from max_batch= and buckets="),
        ({"inputs": Paged}, "Paged needs sizes= for PAGES: the most rows that a batch has"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    """Sizes and rows that nothing has are refused when the runner is made."""
    with pytest.raises(errors.ConfigError, match=said):
        runner_of("breakable", Model(), "cpu", **options)


def test_outputs_of_other_rows_fail_at_capture(cpu: str) -> None:
    """A step whose outputs have other rows than was said fails at capture, not in a step."""
    wrong: list[tuple[Any, Axis, str]] = [
        (lambda view, hidden, inner: inner(hidden, view)[:2], TOKENS, r"of shape \[2, 2\], expected 4 rows"),
        (lambda view, hidden, inner: inner(hidden, view), BATCH, "expected 1 rows, one for each request of the placeh"),
        (lambda view, hidden, inner: inner(hidden, view).sum(), TOKENS, r"of shape \[\], expected 4 rows"),
    ]
    for outer, output_rows, said in wrong:
        with pytest.raises(errors.CaptureError, match=said):
            around(scaled, cpu, outer, buckets=[4], output_rows=output_rows)


COLUMNS = 4
ATTENTION = functional.scaled_dot_product_attention


@torch.library.custom_op("slotgraph_tests::by_requests", mutates_args=())
def by_requests(hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """An operator that is handed a slot over requests, and reads it on the host."""
    return torch.add(hidden * len(lengths), sum(lengths.tolist()))


@by_requests.register_fake
def _(hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    del lengths
    return torch.empty_like(hidden)


PACKET: Any = torch.ops.slotgraph_tests.by_requests


@torch.library.custom_op("slotgraph_tests::into", mutates_args={"out"})
def into(hidden: torch.Tensor, out: torch.Tensor) -> None:
    """An operator that writes where it is told to, as kernels with an output argument do."""
    view = current_view(Prefill)
    out.copy_(hidden * view.extend_seq_lens.shape[0] + view.scale)


@into.register_fake
def _(hidden: torch.Tensor, out: torch.Tensor) -> None:
    del hidden, out


def embedded(view: Prefill) -> torch.Tensor:
    """[TOKENS, WIDTH] whole numbers."""
    factors = torch.arange(1, COLUMNS + 1, device=view.positions.device)
    return (view.input_ids * 3 + view.positions)[:, None].double() * factors


def by_slot(view: Prefill) -> torch.Tensor:
    """Two splits, with pieces before, between and after them."""
    hidden = by_requests(embedded(view) + 1, view.extend_seq_lens)
    return torch.sub(by_requests(hidden * 2, view.extend_seq_lens), view.positions[:, None])


def written(view: Prefill) -> torch.Tensor:
    """A split that writes an output argument."""
    hidden = embedded(view)
    out = torch.empty_like(hidden)
    into(hidden, out)
    return torch.remainder(out, 17)


def attended(view: Prefill) -> torch.Tensor:
    """A function of torch's own as the split; each token attends to itself, so that padding reaches no live row."""
    heads = torch.tanh(embedded(view))[:, None, None]
    return ATTENTION(heads, heads, heads)[:, 0, 0] * 2


def first_and_last(view: Prefill) -> torch.Tensor:
    """Nothing but splits."""
    hidden: torch.Tensor = by_requests(by_requests(embedded(view), view.extend_seq_lens), view.extend_seq_lens)
    return hidden


def piecewise(step: Callable[[Any], Any], backend: Any, *splits: Any, **options: Any) -> PrefillRunner[Prefill]:
    """A runner over a whole step, not captured yet."""
    given: dict[str, Any] = {"buckets": [4, 8], "max_batch": 5, **options}
    return PrefillRunner(Prefill, step, splits=splits, backend=backend, **given)


def refusal_of(step: Callable[[Any], Any], *splits: Any) -> str:
    """Why a step is not captured."""
    with pytest.raises(errors.CaptureError) as raised:
        piecewise(step, "cpu-capture", *splits, buckets=[4]).capture()
    return str(raised.value).removeprefix("1 of 1 buckets were not captured and run eagerly: bucket 4: ")


@pytest.mark.parametrize(
    ("step", "split"),
    [
        *((by_slot, split) for split in ("slotgraph_tests::by_requests", by_requests, PACKET, PACKET.default)),
        *((attended, split) for split in ("tanh", ATTENTION.__name__, ATTENTION)),
        *((first_and_last, by_requests), (written, into)),
    ],
    ids=["name", "operator", "packet", "overload", "tanh", "python name", "function", "only splits", "argument"],
)
def test_a_split_may_stand_anywhere(backend: Backend, step: Callable[[Any], Any], split: Any) -> None:
    """A split may be named or given, and stand anywhere; what it reads is of each step."""
    runner, eager = piecewise(step, backend, split), EagerRunner(Prefill, step, backend=backend)
    runner.capture()
    for seed, lengths in enumerate(([3], [1, 2, 1], [8], [2, 3], [], [1])):
        batch = batch_of(lengths, seed, backend.device, scale=2 + seed)
        poison(runner)
        outputs = runner(batch)
        torch.testing.assert_close(outputs, eager(batch))
        assert outputs.shape == (sum(lengths), COLUMNS)
    assert runner.stats()["steps"] == {"piecewise": 6, "eager": 0}


def test_a_split_that_the_step_does_not_call_is_told() -> None:
    """The error lists what the step calls instead."""
    said = refusal_of(attended, "mylib::attention", "nothing")
    assert said.startswith("splits names mylib::attention, nothing, and the step calls none of them, but add, arange, ")
    assert "scaled_dot_product_attention" in said
    said = refusal_of(by_slot, "mylib::attention")
    assert re.fullmatch(r"slotgraph_tests::by_requests reads slot.*\(splits names mylib::attention\) \(at .*\)", said)


def around_split(after: Callable[[torch.Tensor, Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    """A step with a split, and something after it."""
    return lambda view: after(by_requests(embedded(view), view.extend_seq_lens), view)


FORBIDDEN = "reads slot 'extend_seq_lens', whose rows are requests, outside of a break"
UNKNOWN = "'scale' is carried from the batch and has no default"
UNTRACED = "could not be traced whole: "
ASKER = "as graph_break and current_view do, belongs in an operator of splits"
ASKS = "operator slotgraph_tests::attention asks for the step's view inside of a"


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (around_split(lambda hidden, _: hidden * 2 if hidden.sum() > 0 else hidden), (UNTRACED, "control flow")),
        (around_split(lambda hidden, view: torch.add(hidden, view.extend_seq_lens.sum())), ("sum", FORBIDDEN)),
        (around_split(lambda hidden, view: torch.mul(hidden, view.extend_seq_lens.shape[0])), ("shape " + FORBIDDEN,)),
        (around_split(lambda hidden, view: torch.mul(hidden, view.scale)), (UNKNOWN,)),
        (around_split(lambda hidden, _: torch.mul(hidden, current_view(Prefill).scale)), (UNKNOWN,)),
        (around_split(lambda hidden, _: hidden * current_view(Prefill).positions[:, None]), (UNTRACED, ASKER)),
        (around_split(scaled), (UNTRACED, "test_prefill.py, line", ASKER)),
        (around_split(lambda hidden, _: named_attention(hidden, hidden, hidden)), (ASKS, "by splits=")),
        (lambda view: view.input_ids, ("calls", "no operator of torch")),
    ],
)
def test_a_step_that_cannot_be_cut_is_refused(step: Callable[[Any], Any], said: tuple[str, ...]) -> None:
    """What the tracer cannot follow, and what pieces may not read, is refused with the reason."""
    assert [part for part in said if part not in refusal_of(step, by_requests)] == []


def test_a_split_that_raises_is_named(backend: Backend) -> None:
    """A split that raises is named as a break is: at capture in the bucket's reason, in a step as a ReplayError."""
    faults: list[Exception] = []

    def falling(hidden: torch.Tensor) -> torch.Tensor:
        for fault in faults:
            raise fault
        return hidden * 2

    name = f"slotgraph_tests::falling_{backend.name.replace('-', '_')}"
    operator = torch.library.custom_op(name, falling, mutates_args=())
    operator.register_fake(torch.empty_like)
    runner, failing = (piecewise(lambda view: operator(embedded(view)) + 1, backend, name, buckets=[4]) for _ in "ab")
    runner.capture()
    batch = batch_of([3], 1, backend.device)
    before = runner(batch).clone()
    faults.append(OSError("no such device"))
    with pytest.raises(errors.ReplayError, match=f"break '{name}' raised OSError: no such device"):
        runner(batch)
    with pytest.raises(errors.CaptureError, match="bucket 4: the step raised OSError: no such device"):
        failing.capture()
    faults.clear()
    assert torch.equal(runner(batch), before)


@each_kind
def test_memory_of_an_owner_is_filled_and_kept(backend: Backend, kind: str) -> None:
    """A prefill runner adopts tensors as a decode runner does, and a capture keeps what they hold."""
    model = Model(named=kind == "piecewise").to(backend.device)
    probe = runner_of(kind, model, backend)
    mine = torch.arange(3, 3 + max(probe.sizes), device=backend.device)
    runner = runner_of(kind, model, backend, bind={"input_ids": mine}, keep_bound=True)
    runner.capture()
    assert mine.tolist() == [*range(3, 3 + len(mine))]
    eager = EagerRunner(Prefill, model, backend=backend)
    for lengths in ([2, 3], [5], [1, 1, 4]):
        batch = batch_of(lengths, 5, backend.device)
        outputs = runner(batch).clone()
        assert mine[: sum(lengths)].tolist() == batch["input_ids"].tolist()
        model.clear()
        expected = eager(batch)
        model.clear()
        assert torch.equal(outputs, expected)
