"""Batches that do not fit: each is an error that names the slot and the way out, and nothing has changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slotgraph import BATCH, DecodeRunner, Inputs, SlotGraphError, computed, copied
from slotgraph.dataflow.errors import BatchError, ComputeError, MissingSourceError
from tests.runners.models import PlainInputs, assert_right, nothing_changes, plain_runner, plain_step, random_batch

Spoil = Callable[[torch.Tensor], Any]


def other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """A dtype that no slot here converts from."""
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int16)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with room between the rows."""
    return torch.stack([tensor, tensor + 1], 1)[:, 0]


def texts(tensor: torch.Tensor) -> list[Any]:
    """Nested lists of words."""
    return [texts(row) if row.dim() else str(row.item()) for row in tensor]


KINDS: dict[str, tuple[Spoil, str]] = {
    "dtype": (other_dtype, "convert it, or declare converts="),
    "bool": (lambda tensor: tensor > 1, "convert it, or declare converts="),
    "device": (lambda tensor: tensor.to("meta"), "move it there first"),
    "rank": (lambda tensor: tensor[..., None], "expected"),
    "scalar": (lambda tensor: tensor.flatten()[0], "expected"),
    "short": (lambda tensor: tensor[:-1], "expected"),
    "long": (lambda tensor: torch.cat([tensor, tensor[:1]]), "expected"),
    "length one": (lambda tensor: tensor[:1], "expected"),
    "strided": (strided, "pass `.contiguous()`, or declare strided=True"),
    "list of bools": (lambda tensor: (tensor > 1).tolist(), "convert it, or declare converts="),
    "list of words": (texts, "got list: "),
    "ragged list": (lambda tensor: [*tensor[:-1].tolist(), [[1], [2, 3]]], "got list: "),
    "short list": (lambda tensor: tensor[:-1].tolist(), "expected"),
    "deep list": (lambda tensor: tensor[..., None].tolist(), "expected"),
    "array of another dtype": (lambda tensor: other_dtype(tensor).numpy(), "convert it, or declare converts="),
    "array of objects": (lambda tensor: tensor.numpy().astype(object), "got ndarray: "),
    "long array": (lambda tensor: torch.cat([tensor, tensor[:1]]).numpy(), "expected"),
}


@pytest.mark.parametrize("requests", [6, 20], ids=["graph", "eager"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slot", ["ids", "places", "weights", "pairs"])
def test_source_that_does_not_fit(runner: DecodeRunner[PlainInputs], slot: str, kind: str, requests: int) -> None:
    """A source of the wrong dtype, device, rank, length, layout or type is refused, on a graph's path and eagerly.

    Host data is held to the same: an array keeps its dtype, a list is of numbers, of the slot's shape.
    """
    spoil, way_out = KINDS[kind]
    batch = random_batch(requests, seed=1)
    batch[slot] = spoil(batch[slot])
    with nothing_changes(runner, batch), pytest.raises(BatchError) as refused:
        runner(batch)
    assert repr(slot) in str(refused.value)
    assert way_out in str(refused.value)


@pytest.mark.parametrize("requests", [6, 20], ids=["graph", "eager"])
@pytest.mark.parametrize("slot", ["ids", "places", "weights", "pairs"])
@pytest.mark.parametrize("how", ["left out", "none"])
def test_missing_source(runner: DecodeRunner[PlainInputs], slot: str, how: str, requests: int) -> None:
    """A required source that the batch lacks, or has as None, is refused: last step's rows are never used for it."""
    batch = random_batch(requests, seed=2)
    if how == "none":
        batch[slot] = None
    else:
        del batch[slot]
    with nothing_changes(runner, batch), pytest.raises(MissingSourceError, match=rf"slot '{slot}'.* is missing; "):
        runner(batch)


def test_every_fault_at_once(runner: DecodeRunner[PlainInputs]) -> None:
    """Two faults of one batch arrive in one message."""
    batch = random_batch(6, seed=3)
    batch["weights"], batch["places"] = batch["weights"].double(), ["here"] * 6
    with nothing_changes(runner, batch), pytest.raises(BatchError) as refused:
        runner(batch)
    assert "slot 'places': expected int64 of shape [6] on cpu, got list: " in str(refused.value)
    assert "slot 'weights': expected float32 of shape [6] on cpu, got float64" in str(refused.value)


def test_float_into_an_index_slot(runner: DecodeRunner[PlainInputs]) -> None:
    """Floats are not truncated into an index slot, even where each is a whole number, nor where they come in a list."""
    for slot in ("ids", "places"):
        batch = random_batch(6, seed=4)
        for floats in (batch[slot].float(), batch[slot].float().tolist(), batch[slot].float().numpy()):
            bad = {**batch, slot: floats}
            says = rf"'{slot}': expected int64.*got float32; round it yourself"
            with nothing_changes(runner, bad), pytest.raises(BatchError, match=says):
                runner(bad)


def test_source_longer_than_the_bucket(cpu: str) -> None:
    """One source longer than the largest bucket, the others within it, is refused and runs nowhere."""
    runner = plain_runner(cpu)
    batch = random_batch(6, seed=5)
    batch["weights"] = torch.rand(50)
    with nothing_changes(runner, batch), pytest.raises(BatchError, match=r"'weights': expected float32 of shape \[6\]"):
        runner(batch)
    assert runner.stats()["steps"]["eager"] == 2  # the two good batches that are too large


def test_sparse_source(runner: DecodeRunner[PlainInputs]) -> None:
    """A sparse source is refused like any other that does not fit."""
    batch = random_batch(6, seed=6)
    batch["weights"] = batch["weights"].to_sparse()
    with nothing_changes(runner, batch), pytest.raises(BatchError, match="'weights'"):
        runner(batch)


class MarkedInputs(PlainInputs):
    """A slot computed on the host from a value that the batch carries."""

    mark: torch.Tensor = computed(lambda flag: flag, shape=1, dtype=torch.int32)
    flag: Any


def marked_runner(backend: str) -> DecodeRunner[MarkedInputs]:
    """A captured runner over slots of which one is computed from the batch's `flag`."""
    runner = DecodeRunner(MarkedInputs, plain_step, backend=backend, buckets=[4, 8])
    runner.capture()
    return runner


def test_host_function_that_returns_nonsense(cpu: str) -> None:
    """What a function returns and its slot cannot hold is an error with the slot's name; the next batch is right."""
    runner = marked_runner(cpu)
    for nonsense in ("text", 2.5, True, [1, 2], 1 << 40, None):
        with pytest.raises(ComputeError, match="slot 'mark'"):
            runner({**random_batch(5, seed=11), "flag": nonsense})
        good = {**random_batch(3, seed=12), "flag": 4}
        assert_right(runner(good), good)


def test_replay_after_a_fill_that_broke_off(cpu: str) -> None:
    """A fill that broke off half-way has overwritten the view before it, so that view must not be replayed."""
    runner = marked_runner(cpu)
    first = {**random_batch(3, seed=13), "flag": 4}
    view = runner.fill(first)
    with pytest.raises(ComputeError):
        runner.fill({**random_batch(3, seed=14), "flag": "text"})
    try:
        outputs = runner.replay(view)
    except SlotGraphError:
        return
    assert_right(outputs, first)


class IndexInputs(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    marks: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


@pytest.mark.parametrize("value", ["text", 3, {1, 2}, range(2), object()], ids=lambda value: type(value).__name__)
def test_error_says_what_came(cpu: str, value: Any) -> None:
    """A source that is no box of numbers at all is told what it is, whether or not the size is read off it."""
    runner = DecodeRunner(IndexInputs, lambda view: view.ids, backend=cpu, buckets=[4])
    runner.capture()
    rows, kind = torch.tensor([1, 2]), type(value).__name__
    with pytest.raises(BatchError, match=rf"slot 'ids': expected a size of 1 \* BATCH on dim 0.*got {kind}"):
        runner({"ids": value, "marks": rows})
    with pytest.raises(BatchError, match=rf"slot 'marks': expected int64 of shape \[2\] on cpu, got {kind}"):
        runner({"ids": rows, "marks": value})
    assert runner({"ids": rows, "marks": [3, 4]}).tolist() == [1, 2]
