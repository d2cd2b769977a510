"""The piecewise runner's splits: how operators are named, what is traced between them, and what cannot be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from slotgraph import TOKENS, EagerRunner, PrefillRunner, current_view, errors, graph_break
from slotgraph.backends import Backend
from tests.runners.prefilled import SPLIT, Model, Prefill, batch_of, named_attention, poison, runner_of

WIDTH = 4


@torch.library.custom_op("slotgraph_tests::by_requests", mutates_args=())
def by_requests(hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """An operator that is handed a slot over requests, and reads it on the host."""
    return torch.add(hidden * len(lengths), sum(lengths.tolist()))


@by_requests.register_fake
def _(hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    del lengths
    return torch.empty_like(hidden)


@torch.library.custom_op("slotgraph_tests::into", mutates_args={"out"})
def into(hidden: torch.Tensor, out: torch.Tensor) -> None:
    """An operator that writes where it is told to, as kernels with an output argument do."""
    view = current_view(Prefill)
    out.copy_(hidden * view.extend_seq_lens.shape[0] + view.scale)


@into.register_fake
def _(hidden: torch.Tensor, out: torch.Tensor) -> None:
    del hidden, out


@graph_break
def marked(hidden: torch.Tensor) -> torch.Tensor:
    """A break of the other runner's kind."""
    return hidden + 1


def embedded(view: Prefill) -> torch.Tensor:
    """[TOKENS, WIDTH] whole numbers."""
    factors = torch.arange(1, WIDTH + 1, device=view.positions.device)
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
    return functional.scaled_dot_product_attention(heads, heads, heads)[:, 0, 0] * 2


def first_and_last(view: Prefill) -> torch.Tensor:
    """Nothing but splits."""
    hidden: torch.Tensor = by_requests(by_requests(embedded(view), view.extend_seq_lens), view.extend_seq_lens)
    return hidden


def structured(view: Prefill) -> Any:
    """Outputs in a structure: two that are one, one that is a slot, and what is no tensor."""
    hidden = by_requests(embedded(view), view.extend_seq_lens)
    return {"hidden": (hidden * 2, [hidden]), "same": hidden, "ids": view.input_ids, "layers": 3}


def piecewise(step: Callable[[Any], Any], backend: Any, *splits: Any, **options: Any) -> PrefillRunner[Prefill]:
    """A runner over a whole step, not captured yet."""
    given: dict[str, Any] = {"buckets": [4, 8], "max_batch": 5, **options}
    return PrefillRunner(Prefill, step, splits=splits, backend=backend, progress=False, **given)


def refusal_of(step: Callable[[Any], Any], *splits: Any) -> str:
    """Why a step is not captured."""
    with pytest.raises(errors.CaptureError) as raised:
        piecewise(step, "cpu-capture", *splits, buckets=[4]).capture()
    return str(raised.value).removeprefix("1 of 1 buckets were not captured and run eagerly: bucket 4: ")


@pytest.mark.parametrize(
    ("step", "split"),
    [
        pytest.param(by_slot, "slotgraph_tests::by_requests", id="name"),
        pytest.param(by_slot, by_requests, id="custom-operator"),
        pytest.param(by_slot, torch.ops.slotgraph_tests.by_requests, id="packet"),
        pytest.param(by_slot, torch.ops.slotgraph_tests.by_requests.default, id="overload"),
        pytest.param(first_and_last, by_requests, id="only-splits"),
        pytest.param(written, into, id="output-argument"),
        pytest.param(attended, "scaled_dot_product_attention", id="python-name"),
        pytest.param(attended, functional.scaled_dot_product_attention, id="function"),
        pytest.param(attended, "tanh", id="another-function"),
    ],
)
def test_splits(backend: Backend, step: Callable[[Any], Any], split: Any) -> None:
    """A split may be named or given, and stand anywhere; what it reads is of each step."""
    runner, eager = piecewise(step, backend, split), EagerRunner(Prefill, step, backend=backend)
    runner.capture()
    for seed, lengths in enumerate(([3], [1, 2, 1], [8], [2, 3], [], [1])):
        batch = batch_of(lengths, seed, backend.device, scale=2 + seed)
        poison(runner)
        outputs = runner(batch)
        torch.testing.assert_close(outputs, eager(batch))
        assert outputs.shape == (sum(lengths), WIDTH)
    assert runner.stats()["steps"] == {"piecewise": 6, "eager": 0}


def test_structure_of_outputs(backend: Backend) -> None:
    """What a step returns comes back in its own structure, every tensor cut to the live tokens."""
    runner, eager = piecewise(structured, backend, by_requests), EagerRunner(Prefill, structured, backend=backend)
    runner.capture()
    batch = batch_of([2, 1], 1, backend.device)
    ours, theirs = runner(batch), eager(batch)
    assert ours["layers"] == 3
    for one, other in (
        (ours["hidden"][0], theirs["hidden"][0]),
        (ours["hidden"][1][0], theirs["hidden"][1][0]),
        (ours["same"], theirs["same"]),
        (ours["ids"], theirs["ids"]),
    ):
        assert torch.equal(one, other)


def test_many_buckets_take_one_trace() -> None:
    """All sizes of tokens are served by few traces: the tracer is not asked anew for each bucket."""
    runner = piecewise(by_slot, "cpu-capture", by_requests, buckets=list(range(1, 24)))
    report = runner.capture()
    assert len(report.captured) == 23
    eager = EagerRunner(Prefill, by_slot, backend="cpu")
    for tokens in (1, 2, 4, 5, 16, 23):
        batch = batch_of([tokens], tokens)
        assert torch.equal(runner(batch), eager(batch))


def test_model_of_many_layers(backend: Backend) -> None:
    """Weights and caches of modules are those of the model, not copies: later changes reach the graphs."""
    model = Model(named=True).to(backend.device)
    runner = piecewise(model, backend, SPLIT, stack="inner", output_rows=None, buckets=[8])
    runner.capture()
    batch = batch_of([2, 3], 1, backend.device)
    before = runner(batch).clone()
    with torch.no_grad():
        for parameter in model.inner.parameters():
            parameter.add_(1)
    after = runner(batch).clone()
    assert not torch.equal(before, after)
    assert torch.equal(after, EagerRunner(Prefill, model, backend=backend)(batch))


def test_splits_must_be_said() -> None:
    """No splits, or a text that is taken for letters, are refused when the runner is made."""
    given: list[Any] = [[], "slotgraph_tests::attention"]
    for splits in given:
        with pytest.raises(
            errors.ConfigError, match="splits: expected names of the operators to cut at, at least one, in a list"
        ):
            PrefillRunner(Prefill, by_slot, splits=splits, backend="cpu")


def test_split_that_the_step_does_not_call() -> None:
    """The error lists what the step calls instead."""
    said = refusal_of(attended, "mylib::attention", "nothing")
    assert said.startswith("splits names mylib::attention, nothing, and the step calls none of them, but add, arange, ")
    assert "scaled_dot_product_attention" in said
    said = refusal_of(by_slot, "mylib::attention")
    assert said.startswith("slotgraph_tests::by_requests reads slot")
    assert said.endswith("(splits names mylib::attention)")


def reads_the_host(view: Prefill) -> torch.Tensor:
    """Python's way hangs on a number of the device."""
    hidden: torch.Tensor = by_requests(embedded(view), view.extend_seq_lens)
    return hidden * 2 if hidden.sum() > 0 else hidden


def reads_a_slot(view: Prefill) -> torch.Tensor:
    """A piece depends on requests."""
    return torch.add(by_requests(embedded(view), view.extend_seq_lens), view.extend_seq_lens.sum())


def counts_requests(view: Prefill) -> torch.Tensor:
    """A piece depends on how many they are, which the tracer would take for a constant."""
    return torch.mul(by_requests(embedded(view), view.extend_seq_lens), view.extend_seq_lens.shape[0])


def reads_a_field(view: Prefill) -> torch.Tensor:
    """A piece depends on what each step brings."""
    return torch.mul(by_requests(embedded(view), view.extend_seq_lens), view.scale)


def asks_for_the_view(view: Prefill) -> torch.Tensor:
    """Code that is traced asks for what runs."""
    return torch.mul(by_requests(embedded(view), view.extend_seq_lens), current_view(Prefill).scale)


def marks_a_break(view: Prefill) -> torch.Tensor:
    """A break of the other runner's kind."""
    return marked(by_requests(embedded(view), view.extend_seq_lens))


def unlisted(view: Prefill) -> torch.Tensor:
    """An operator that asks for the view, and is no split."""
    hidden = by_requests(embedded(view), view.extend_seq_lens)
    attention: torch.Tensor = named_attention(hidden, hidden, hidden)
    return attention


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (reads_the_host, ("could not be traced whole: ", "data-dependent")),
        (reads_a_slot, ("sum", "reads slot 'extend_seq_lens', whose rows are requests, outside of a break")),
        (counts_requests, ("shape reads slot 'extend_seq_lens', whose rows are requests, outside of a break",)),
        (reads_a_field, ("'scale' is carried from the batch and has no default",)),
        (asks_for_the_view, ("'scale' is carried from the batch and has no default",)),
        (
            marks_a_break,
            ("could not be traced whole: ", "test_prefill_runner.py, line", "belongs in an operator of splits"),
        ),
        (unlisted, ("operator slotgraph_tests::attention asks for the step's view inside of a", "by splits=")),
        (lambda view: view.input_ids, ("and the step calls none of them, but no operator of torch",)),
    ],
)
def test_steps_that_cannot_be_cut(step: Callable[[Any], Any], said: tuple[str, ...]) -> None:
    """What the tracer cannot follow, and what pieces may not read, is refused with the reason."""
    refusal = refusal_of(step, by_requests)
    assert [part for part in said if part not in refusal] == [], refusal


def test_split_that_raises(backend: Backend) -> None:
    """A split that raises is named as a break is: at capture in the bucket's reason, in a step as a ReplayError."""
    faults: list[Exception] = []

    def falling(hidden: torch.Tensor) -> torch.Tensor:
        for fault in faults:
            raise fault
        return hidden * 2

    name = f"slotgraph_tests::falling_{backend.name.replace('-', '_')}"
    operator = torch.library.custom_op(name, falling, mutates_args=())
    operator.register_fake(torch.empty_like)
    runner = piecewise(lambda view: operator(embedded(view)) + 1, backend, name, buckets=[4])
    runner.capture()
    batch = batch_of([3], 1, backend.device)
    before = runner(batch).clone()
    faults.append(OSError("no such device"))
    with pytest.raises(errors.ReplayError, match=f"break '{name}' raised OSError: no such device"):
        runner(batch)
    failing = piecewise(lambda view: operator(embedded(view)) + 1, backend, name, buckets=[4])
    with pytest.raises(errors.CaptureError, match="bucket 4: the step raised OSError: no such device"):
        failing.capture()
    faults.clear()
    assert torch.equal(runner(batch), before)
    assert torch.equal(failing(batch), before)
    assert failing.decide(batch).why == "not_captured"


def test_stack_or_whole_step(backend: Backend) -> None:
    """Without a stack the whole step is captured; with one, what is around it runs eagerly, and may read the host."""
    model = Model(named=True).to(backend.device)

    def whole(view: Prefill) -> torch.Tensor:
        return model.hidden(view)

    batch = batch_of([3, 2], 2, backend.device)
    all_of_it = piecewise(whole, backend, SPLIT, buckets=[8], output_rows=TOKENS)
    inner = runner_of("piecewise", model, backend)
    all_of_it.capture()
    inner.capture()
    last = batch["extend_seq_lens"].cumsum(0) - 1
    assert torch.equal(all_of_it(batch)[last] @ model.head, inner(batch))
