"""Inference mode: a runner made, captured, filled and replayed inside or outside of it, in every mix, is right."""

import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from slotgraph import BATCH, DecodeRunner, EagerRunner, Inputs, computed, copied, output, staged
from slotgraph.dataflow.capabilities import LADDER
from tests.runners.models import PlainInputs, assert_right, bytes_of, plain_step, random_batch

MIXES = [
    pytest.param(*mix, id="".join("io"[not inside] for inside in mix)) for mix in itertools.product((0, 1), repeat=4)
]


def mode(inside: int) -> AbstractContextManager[Any]:
    """Inference mode, or nothing."""
    return torch.inference_mode() if inside else nullcontext()


@pytest.mark.parametrize("lowering", LADDER)
@pytest.mark.parametrize(("made", "captured", "filled", "replayed"), MIXES)
def test_every_mix(cpu: str, made: int, captured: int, filled: int, replayed: int, lowering: str) -> None:
    """Whatever was inside and whatever outside, each step is right, on both paths and through growth."""
    with mode(made):
        runner = DecodeRunner(PlainInputs, plain_step, buckets=[4, 8], backend=cpu, lowering=lowering)
    with mode(captured):
        runner.capture()
    for requests in (3, 8, 1, 9, 40, 4, 200, 5):
        batch = random_batch(requests, seed=requests)
        with mode(filled):
            view = runner.fill(batch)
        with mode(replayed):
            outputs = runner.replay(view)
        assert_right(outputs, batch)
        with mode(filled):
            assert_right(runner(batch), batch)
            assert_right(runner({name: value.tolist() for name, value in batch.items()}), batch)
    for buffer in runner.graphs.buffers:
        assert not buffer.tensor.is_inference()


@pytest.mark.parametrize("lowering", LADDER)
def test_modes_that_change_from_step_to_step(cpu: str, lowering: str) -> None:
    """One runner may be filled and replayed in another mode at each step."""
    runner = DecodeRunner(PlainInputs, plain_step, buckets=[4, 8], backend=cpu, lowering=lowering)
    runner.capture()
    for number, (filled, replayed) in enumerate(itertools.product((0, 1, 0), (1, 0, 1))):
        for requests in (3, 7, 16 << number % 4):
            batch = random_batch(requests, seed=number)
            with mode(filled):
                view = runner.fill(batch)
            with mode(replayed):
                assert_right(runner.replay(view), batch)


@pytest.mark.parametrize("lowering", LADDER)
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("inside", [0, 1])
def test_sources_of_inference_mode(cpu: str, inside: int, lowering: str, *, debug: bool) -> None:
    """Sources that are inference tensors are taken, inside and outside, and are left as they were."""
    runner = DecodeRunner(PlainInputs, plain_step, buckets=[4, 8], backend=cpu, debug=debug, lowering=lowering)
    runner.capture()
    for requests in (3, 20):
        with torch.inference_mode():
            batch = {name: value.clone() for name, value in random_batch(requests, seed=1).items()}
        given = {name: bytes_of(value) for name, value in batch.items()}
        with mode(inside):
            outputs = runner(batch)
        assert all(value.is_inference() for value in batch.values())
        assert {name: bytes_of(value) for name, value in batch.items()} == given
        assert_right(outputs, batch)


@pytest.mark.parametrize("no_copy", [False, True])
@pytest.mark.parametrize("inside", [0, 1])
def test_sources_that_require_grad(cpu: str, inside: int, *, no_copy: bool) -> None:
    """Sources that require grad are taken; nothing that a runner holds or gives comes to require it."""
    runner = DecodeRunner(PlainInputs, plain_step, buckets=[4, 8], backend=cpu)
    runner.capture()
    eager = EagerRunner(PlainInputs, plain_step, backend=cpu, no_copy=no_copy)
    for requests in (3, 20):
        batch = random_batch(requests, seed=2)
        learnt = {**batch, "weights": batch["weights"].clone().requires_grad_(), "pairs": batch["pairs"].exp().log()}
        learnt["pairs"] = (learnt["weights"][:, None] * 0 + batch["pairs"]).contiguous()
        for run in (runner, eager):
            with mode(inside):
                outputs = run(learnt)
            assert not outputs.requires_grad
            assert_right(outputs, batch)
    assert not any(buffer.tensor.requires_grad for buffer in runner.graphs.buffers)


class StatefulInputs(Inputs):
    """Slots that the step itself writes."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0, rewritten=True)
    made: torch.Tensor = staged(BATCH, dtype=torch.float32, pad=5)
    twice: torch.Tensor = computed(lambda ids: ids * 2, shape=BATCH, dtype=torch.float32)
    logits: torch.Tensor = output(BATCH, dtype=torch.float32)


def stateful_step(view: StatefulInputs) -> torch.Tensor:
    """Writes into every kind of slot that may be written."""
    tail = view.made.clone()
    view.made.copy_(view.ids + 1)
    view.logits.copy_(view.twice + tail * 0 + view.made)
    view.ids.add_(100)
    return view.logits


@pytest.mark.parametrize("lowering", LADDER)
@pytest.mark.parametrize(("made", "captured", "filled", "replayed"), MIXES)
def test_steps_that_write_their_slots(
    cpu: str, made: int, captured: int, filled: int, replayed: int, lowering: str
) -> None:
    """A step that writes slots in place may do so in every mix, and tails are reset behind it."""
    with mode(made):
        runner = DecodeRunner(StatefulInputs, stateful_step, buckets=[8], backend=cpu, lowering=lowering)
    with mode(captured):
        runner.capture()
    for requests in (8, 3, 5, 3):
        ids = torch.rand(requests) + 1
        with mode(filled):
            view = runner.fill({"ids": ids})
        assert view.ids[requests:].tolist() == [0] * (8 - requests)
        assert view.made[requests:].tolist() == [5] * (8 - requests)
        with mode(replayed):
            outputs = runner.replay(view)
        torch.testing.assert_close(outputs.clone(), ids * 3 + 1)


@pytest.mark.parametrize("inside", [0, 1])
def test_growth_in_inference_mode(cpu: str, inside: int) -> None:
    """Buffers that grew in inference mode are filled outside it, and the other way round."""
    runner = EagerRunner(PlainInputs, plain_step, backend=cpu)
    for number, requests in enumerate((3, 9, 2, 33, 70, 5)):
        batch = random_batch(requests, seed=requests)
        with mode((number + inside) % 2):
            outputs = runner(batch)
        assert_right(outputs, batch)


def test_no_grad_is_left_as_it_was(cpu: str) -> None:
    """A step runs without gradients, and the caller's gradient mode is what it was."""
    modes: list[bool] = []

    def step(view: PlainInputs) -> torch.Tensor:
        modes.append(torch.is_grad_enabled())
        return plain_step(view)

    runner = DecodeRunner(PlainInputs, step, buckets=[4], backend=cpu)
    runner.capture()
    for requests in (3, 9):
        runner(random_batch(requests, seed=3))
        assert torch.is_grad_enabled()
    assert not any(modes)
