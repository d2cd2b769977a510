"""What prefill runners are told: optional slots, fields, rows of outputs, lending, debugging, other runners beside."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from slotgraph import (
    BATCH,
    CACHE_LOC,
    TOKENS,
    Axis,
    DecodeRunner,
    EagerRunner,
    Inputs,
    Step,
    computed,
    copied,
    errors,
    graph_break,
    side,
)
from slotgraph.backends import Backend
from tests.runners.prefilled import (
    HIDDEN,
    KINDS,
    LAYERS,
    Model,
    Prefill,
    around,
    assert_equal,
    batch_of,
    caches_of,
    poison,
    runner_of,
    whole,
)

each_kind = pytest.mark.parametrize("kind", KINDS)
PAGES = Axis("PAGES")


class Staged(Prefill):
    """Inputs of a stage that is not the first, with a mode that graphs hold for."""

    hidden_states: torch.Tensor | None = copied(
        TOKENS, HIDDEN, dtype=torch.float64, pad=0, default=None, source=side("proxy.hidden_states")
    )
    residual: torch.Tensor | None = copied(
        TOKENS, HIDDEN, dtype=torch.float64, pad=0, default=None, source=side("proxy.residual")
    )
    mode: str = "last"


class StageModel(Model):
    """A stage of a pipeline: hidden states of the stage before, or embeddings where it is the first."""

    def hidden(self, view: Any) -> torch.Tensor:
        """What the inner layers make of each token; the residual is added after them."""
        first = view.hidden_states is None
        hidden = self.embed[view.input_ids] + self.rope[view.positions] if first else view.hidden_states
        out: torch.Tensor = self.inner(hidden, view)
        return out if view.residual is None else out + view.residual


class TokensOnly(Inputs):
    """No slot over requests."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


class Paged(Prefill):
    """A further axis that varies."""

    pages: torch.Tensor = copied(PAGES, dtype=torch.int64, pad=0)


@graph_break
def scaled(hidden: torch.Tensor, view: Prefill) -> torch.Tensor:
    """One break, with the number of requests and a field."""
    return torch.add(hidden * view.extend_seq_lens.shape[0], view.scale)


def staged_batch(lengths: list[int], seed: int, device: torch.device, *keys: str) -> dict[str, Any]:
    """Requests, and the named tensors of the stage before."""
    draw, total = torch.Generator().manual_seed(seed), sum(lengths)
    proxy = {key: torch.randint(0, 9, (total, HIDDEN), generator=draw).double().to(device) for key in keys}
    return {"batch": batch_of(lengths, seed, device), "proxy": proxy}


@each_kind
def test_absent_slots_and_fields(backend: Backend, kind: str) -> None:
    """Each declared pattern of absent slots has graphs; another one, or another field, runs eagerly and says so."""
    models = [StageModel(named=kind == "piecewise").to(backend.device) for _ in range(2)]
    runner = runner_of(kind, models[0], backend, inputs=Staged, buckets=[8], absent=[{"hidden_states", "residual"}])
    eager = EagerRunner(Staged, models[1], backend=backend)
    assert runner.capture().captured == (8,)
    for number, keys in enumerate([(), ("hidden_states", "residual"), ("hidden_states",), ("residual",), ()]):
        given = staged_batch([2, 1, 3], number, backend.device, *keys)
        poison(runner)
        assert torch.equal(runner(given["batch"], proxy=given["proxy"]), eager(given["batch"], proxy=given["proxy"]))
    assert runner.stats()["steps"] == {kind: 3, "eager": 2}
    lone = staged_batch([2], 1, backend.device, "residual")
    reason = "no graph was captured without 'hidden_states'; pass absent=[{'hidden_states'}] to capture one"
    assert runner.decide(lone["batch"], proxy=lone["proxy"]).reason == reason
    batch = {**batch_of([2, 3], 4, backend.device), "mode": "all"}
    assert runner.decide(batch).reason == "field 'mode' is 'all', not 'last', with which graphs were captured"
    assert torch.equal(runner(batch), eager(batch))
    assert {why: counts["steps"] for why, counts in runner.stats()["eager"].items()} == {
        "absent": 2,
        "field_differs": 1,
    }


@each_kind
def test_outputs_by_tokens(backend: Backend, kind: str) -> None:
    """Rows of outputs may be tokens, of which the live ones are handed out, or be handed out whole."""
    model = Model(named=kind == "piecewise").to(backend.device)

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, view: Prefill) -> Any:
            """Hidden states in a structure, with what is no tensor."""
            return {"hidden": self.model.hidden(view), "layers": LAYERS}

    step = Hidden()
    eager = EagerRunner(Prefill, step, backend=backend)
    for output_rows, rows in ((TOKENS, 3), (None, 4)):
        options: dict[str, Any] = {"output_rows": output_rows, "stack": "model.inner", "buckets": [4]}
        runner = runner_of(kind, step, backend, **options)
        runner.capture()
        batch = batch_of([1, 2], 5, backend.device)
        outputs = runner(batch)
        assert (outputs["hidden"].shape, outputs["layers"]) == ((rows, HIDDEN), LAYERS)
        assert torch.equal(outputs["hidden"][:3], eager(batch)["hidden"])


class Holder:
    """An object that holds a tensor where no one looks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize(
    ("outer", "output_rows", "said"),
    [
        (lambda view, hidden, inner: inner(hidden, view)[:2], TOKENS, r"of shape \[2, 2\], expected 4 rows"),
        (lambda view, hidden, inner: inner(hidden, view), BATCH, "expected 1 rows, one for each request of the placeh"),
        (lambda view, hidden, inner: inner(hidden, view).sum(), TOKENS, r"of shape \[\], expected 4 rows"),
        (
            lambda view, hidden, inner: Holder(inner(hidden, view)),
            TOKENS,
            "returned Holder, of which rows cannot be cut",
        ),
    ],
)
def test_outputs_of_other_rows(backend: Backend, outer: Any, output_rows: Axis, said: str) -> None:
    """A step whose outputs have other rows than was said fails at capture, not in a step."""
    with pytest.raises(errors.CaptureError, match=said):
        around(scaled, backend, outer, buckets=[4], output_rows=output_rows)


def test_options_that_do_not_fit() -> None:
    """Sizes and rows that nothing has are refused when the runner is made."""

    def refused(said: str, **options: Any) -> None:
        with pytest.raises(errors.ConfigError, match=said):
            runner_of("breakable", Model(), "cpu", **options)

    refused("output_rows is BATCH, which no slot of TokensOnly has: pass another, or None", inputs=TokensOnly)
    refused("output_rows is TOKENS, BATCH or None, got 'tokens'", output_rows="tokens")
    refused("sizes of BATCH and TOKENS follow from max_batch= and buckets=", sizes={TOKENS: 4})
    refused("Paged needs sizes= for PAGES: the most rows that a batch brings", inputs=Paged)
    refused("lend names 'nothing', which is no slot", lend={"nothing": print})


@each_kind
def test_lend(backend: Backend, kind: str) -> None:
    """What is lent is the view's slot while the step's code runs, eager parts of a replay included, and None after."""
    model, seen = Model(named=kind == "piecewise").to(backend.device), list[Any]()

    class Seeing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, view: Prefill) -> Any:
            """Note what is lent before and after the stack."""
            before = lent[-1]
            outputs = self.model(view)
            seen.append(before is view.extend_seq_lens and lent[-1] is view.extend_seq_lens)
            return outputs

    lent: list[torch.Tensor | None] = [None]
    options: dict[str, Any] = {"stack": "model.inner", "lend": {"extend_seq_lens": lent.append}, "buckets": [8]}
    runner = runner_of(kind, Seeing(), backend, **options)
    runner.capture()
    for lengths in ([2, 3], [1], [9]):
        runner(batch_of(lengths, 6, backend.device))
    assert seen
    assert all(seen)
    assert lent[-1] is None


def test_debug(backend: Backend) -> None:
    """In debug mode an output of the stack knows when a later step has overwritten it; a head's output is its own."""
    runner, eager = around(scaled, backend, debug=True)
    batches = [batch_of(lengths, 7, backend.device) for lengths in ([2], [2, 1])]
    first, kept = runner(batches[0]), runner(batches[0]).clone()
    second = runner(batches[1])
    with pytest.raises(errors.StaleOutputError, match="use it before the next step"):
        _ = first + 1
    assert torch.equal(kept, eager(batches[0]))
    assert torch.equal(second, eager(batches[1]))
    model = Model().to(backend.device)
    headed = runner_of("breakable", model, backend, debug=True, buckets=[4])
    headed.capture()
    logits = headed(batches[0])
    expected = logits.clone()
    headed(batches[1])
    assert torch.equal(logits, expected)


@each_kind
def test_gradients_are_off(backend: Backend, kind: str) -> None:
    """Neither graphs nor what runs around them keep gradients, though weights ask for them."""
    model = Model(named=kind == "piecewise").to(backend.device).requires_grad_()
    runner = runner_of(kind, model, backend, buckets=[4])
    with torch.enable_grad():
        runner.capture()
        outputs = runner(batch_of([1, 2], 8, backend.device))
    assert outputs.grad_fn is None
    assert not outputs.requires_grad


def one_each(step: Step) -> int:
    """Requests of a decode step."""
    return step.live(BATCH)


class Decode(Inputs):
    """What a decode step of the same model reads."""

    input_ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    out_cache_loc: torch.Tensor = copied(BATCH, dtype=CACHE_LOC, pad=0)
    live: torch.Tensor = computed(one_each, shape=1, dtype=torch.int32)


@each_kind
def test_beside_a_decode_runner(backend: Backend, kind: str) -> None:
    """Prefill and decode graphs over one model take turns, and find each other's work in its caches."""
    weights = whole(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(9)).to(backend.device)
    pairs: list[Mapping[str, Any]] = []
    for make in (runner_of, lambda _, model, backend: EagerRunner(Prefill, model, backend=backend)):
        model = Model(named=kind == "piecewise").to(backend.device)

        def decode(view: Decode, model: Model = model) -> torch.Tensor:
            cache: Any = model.inner.layers[0].cache
            rows = cache[view.out_cache_loc] @ weights + model.embed[view.input_ids]
            cache[view.out_cache_loc] = torch.remainder(rows, 13)
            return torch.add(rows, view.live)

        pairs.append({"prefill": make(kind, model, backend), "decode": decode})
    ours = DecodeRunner(Decode, pairs[0]["decode"], buckets=[2, 4], backend=backend, progress=False)
    theirs = EagerRunner(Decode, pairs[1]["decode"], backend=backend)
    pairs[0]["prefill"].capture()
    ours.capture()
    for seed, lengths in enumerate(([3, 2], [1], [4, 4, 4], [20], [2, 2])):
        batch = batch_of(lengths, seed, backend.device)
        last = batch["extend_seq_lens"].cumsum(0) - 1
        step = {"input_ids": batch["input_ids"][last], "out_cache_loc": batch["out_cache_loc"][last]}
        assert torch.equal(pairs[0]["prefill"](batch), pairs[1]["prefill"](batch))
        for _ in range(2):
            assert torch.equal(ours(step), theirs(step))
        assert torch.equal(caches_of(pairs[0]["prefill"]), caches_of(pairs[1]["prefill"]))


@pytest.mark.parametrize("lowering", ["fused", "in_graph", "slot_by_slot"])
def test_lowerings(backend: Backend, lowering: str) -> None:
    """However a fill is run, it is done before the step's eager parts read the slots; never inside of a graph."""
    if lowering not in backend.capabilities.lowerings:
        pytest.skip(f"{backend.name} has no lowering {lowering!r} here")
    runner, eager = around(scaled, backend, lowering=lowering)
    assert runner.lowering == ("fused" if lowering == "in_graph" else lowering)
    assert_equal(runner, eager, backend.device, 1, 2)
