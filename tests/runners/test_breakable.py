"""The breakable runner's stack: how it is named, what it may be called with, and what its graphs may not depend on."""

from typing import Any

import pytest
import torch

from slotgraph import TOKENS, BreakableRunner, current_view, errors, graph_break
from slotgraph.backends import Backend
from tests.runners.prefilled import Model, Prefill, around, assert_equal, batch_of, runner_of


@graph_break
def scaled(hidden: torch.Tensor, view: Prefill) -> torch.Tensor:
    """One break, with the number of requests and a field."""
    return torch.add(hidden * view.extend_seq_lens.shape[0], view.scale)


def test_ways_to_name_the_stack(backend: Backend) -> None:
    """A module and a dotted path mean the same stack; without one the whole step is captured."""
    outputs, batch = [], batch_of([1, 2], 1, backend.device)
    for step, stack in ((model := Model(), "inner"), (model, model.inner), (model.hidden, None)):
        model.to(backend.device)
        rows: Any = {} if stack else {"output_rows": TOKENS}
        runner = BreakableRunner(Prefill, step, stack=stack, buckets=[4], backend=backend, progress=False, **rows)
        runner.capture()
        assert runner.decide(batch).path == "breakable"
        outputs.append(runner(batch))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[2][[0, 2]] @ model.head, outputs[0])


def test_forward_is_put_back(backend: Backend) -> None:
    """A step leaves the stack's forward as it was, also one that raises; a stack's own one is respected."""
    model, faults = Model().to(backend.device), list[Exception]()
    before = model.inner.forward

    def own(*args: Any, **kwargs: Any) -> torch.Tensor:
        return before(*args, **kwargs) * 2

    model.inner.forward = own  # type: ignore[method-assign] # as some libraries do
    runner = runner_of("breakable", model, backend, buckets=[4])
    runner.capture()
    plain = Model().to(backend.device)
    batch = batch_of([2, 1], 2, backend.device)
    with torch.no_grad():
        view = runner.fill(batch)
        assert torch.equal(runner.replay(view), plain(view) * 2)
    assert model.inner.forward is own
    hook = model.inner.register_forward_hook(lambda *_: [(_ for _ in ()).throw(fault) for fault in faults] and None)
    faults.append(OSError("in a hook"))
    with pytest.raises(OSError, match="in a hook"):
        runner(batch)
    hook.remove()
    assert model.inner.forward is own
    with torch.no_grad():
        view = runner.fill(batch)
        assert torch.equal(runner.replay(view), plain(view) * 2)


def test_stack_called_other_than_once_in_a_step(backend: Backend) -> None:
    """A step that does not call its stack once, as at capture, is an error of that step alone."""
    times = [1]

    def outer(view: Prefill, hidden: torch.Tensor, inner: Any) -> torch.Tensor:
        for _ in range(times[0]):
            hidden = inner(hidden, view)
        return hidden

    runner, eager = around(scaled, backend, outer)
    batch = batch_of([2, 1], 3, backend.device)
    for times[0] in (0, 2):
        with pytest.raises(errors.ReplayError, match=f"called the stack, inner, {times[0]} times, and once at capture"):
            runner(batch)
    times[0] = 1
    assert_equal(runner, eager, backend.device)


def asked_field(hidden: torch.Tensor, _: Prefill) -> torch.Tensor:
    """A field of each step's own, read in a graph."""
    return torch.mul(hidden, current_view(Prefill).scale)


def test_slots_over_requests_may_be_looked_at(backend: Backend) -> None:
    """What is the same of such a slot in each step may be asked: device, dtype, number of dims, presence."""

    def stack(hidden: torch.Tensor, view: Prefill) -> torch.Tensor:
        lengths = view.extend_seq_lens
        known = lengths is not None and lengths.device == hidden.device and lengths.dtype == torch.int32
        return scaled(hidden, view) + lengths.ndim if known else hidden

    runner, eager = around(stack, backend)
    assert_equal(runner, eager, backend.device)


def test_one_capture_for_any_number_of_requests(backend: Backend) -> None:
    """One graph a bucket takes every number of requests up to max_batch, and any split of its tokens."""
    model, twin = Model().to(backend.device), Model().to(backend.device)
    runner = runner_of("breakable", model, backend, buckets=[12], max_batch=12)
    runner.capture()
    for count in range(1, 13):
        batch = batch_of([1] * (count - 1) + [13 - count], count, backend.device)
        view = runner.fill(batch)
        with torch.no_grad():
            logits = runner.replay(view).clone()
            assert logits.shape[0] == count
            assert torch.equal(logits, twin(view)), count
    assert runner.stats()["buckets"] == {
        12: {"path": "breakable", "steps": 12, "live": 144, "padded": 144, "waste": 0.0}
    }


MISSING: list[tuple[Any, Any, str]] = [
    (Model(), "inner.rows", r"stack='inner.rows' leads nowhere: .* no attribute 'rows'; modules there: 'layers'"),
    (Model(), "model", r"leads nowhere: 'Model' object has no attribute 'model'; modules there: 'inner'"),
    (Model(), "head", r"stack is a module, or a dotted path to one under the step; head is Parameter"),
    (Model(), 3, r"stack is a module, or a dotted path to one under the step; int is int"),
    (lambda view: view, "inner", r"leads nowhere: .* no attribute 'inner'; modules there: none"),
]


def test_stack_that_is_not_there() -> None:
    """Where no stack is found the error lists what was looked for, and nothing is guessed by name."""
    for step, stack, said in MISSING:
        with pytest.raises(errors.ConfigError, match=said):
            BreakableRunner(Prefill, step, stack=stack, buckets=[4], backend="cpu")


REFUSED: list[tuple[Any, Any, str]] = [
    (scaled, lambda view, hidden, inner: inner(inner(hidden, view), view), "called the stack, inner, 2 times: it is"),
    (scaled, lambda _, hidden, __: hidden + 1, "called the stack, inner, 0 times"),
    (
        lambda hidden, view: hidden * view.extend_seq_lens.sum(),
        None,
        "sum reads slot 'extend_seq_lens', whose rows are req",
    ),
    (lambda hidden, view: hidden * view.extend_start_loc.shape[0], None, "shape reads slot 'extend_start_loc'"),
    (
        lambda hidden, lengths: hidden + lengths,
        lambda view, hidden, inner: inner(hidden, view.extend_seq_lens[:]),
        "aten::add reads slot 'extend_seq_lens'",
    ),
    (lambda hidden, view: hidden * len(view.extend_seq_lens), None, "reads slot 'extend_seq_lens'"),
    (lambda hidden, view: hidden + view.extend_seq_lens, None, "add reads slot 'extend_seq_lens'"),
    (lambda hidden, view: hidden[view.extend_seq_lens.long() - 1], None, "long reads slot 'extend_seq_lens'"),
    (lambda hidden, view: hidden * view.scale, None, "'scale' is carried from the batch and has no default"),
    (asked_field, None, "'scale' is carried from the batch and has no default"),
]


def test_graphs_that_depend_on_requests(backend: Backend) -> None:
    """What changes by step is not to be seen in a graph: slots over requests, their sizes, fields; nor two calls."""
    for stack, outer, said in REFUSED:
        with pytest.raises(errors.CaptureError, match=said):
            around(stack, backend, outer)
