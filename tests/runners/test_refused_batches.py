"""Batches that do not fit: each is an error that names the slot and the way out, and nothing has changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slotgraph import BATCH, DecodeRunner, Inputs, SlotGraphError, computed, copied
from slotgraph.dataflow.errors import BatchError, ComputeError, MissingSourceError
from tests.runners.models import (
    PlainInputs,
    assert_right,
    eager_of,
    nothing_changes,
    plain_runner,
    plain_step,
    random_batch,
    snapshot,
)

Spoil = Callable[[torch.Tensor], Any]


def other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """A dtype that no slot here converts from."""
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int16)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with room between the rows."""
    return torch.stack([tensor, tensor + 1], 1)[:, 0]


KINDS: dict[str, tuple[Spoil, str]] = {
    "dtype": (other_dtype, "convert it, or declare converts="),
    "bool": (lambda tensor: tensor > 1, "convert it, or declare converts="),
    "device": (lambda tensor: tensor.to("meta"), "move it there first"),
    "rank": (lambda tensor: tensor[..., None], "expected"),
    "scalar": (lambda tensor: tensor.flatten()[0], "expected"),
    "short": (lambda tensor: tensor[:-1], "expected"),
    "long": (lambda tensor: torch.cat([tensor, tensor[:1]]), "expected"),
    "length one": (lambda tensor: tensor[:1], "expected"),
    "list": (lambda tensor: tensor.tolist(), "tensor"),
    "array": (lambda tensor: tensor.numpy(), "make a tensor of it"),
    "strided": (strided, "pass `.contiguous()`, or declare strided=True"),
}


@pytest.mark.parametrize("requests", [6, 20], ids=["graph", "eager"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slot", ["ids", "places", "weights", "pairs"])
def test_source_that_does_not_fit(runner: DecodeRunner[PlainInputs], slot: str, kind: str, requests: int) -> None:
    """A source of the wrong dtype, device, rank, length, layout or type is refused, on a graph's path and eagerly."""
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
    batch["weights"], batch["places"] = batch["weights"].double(), batch["places"].tolist()
    with nothing_changes(runner, batch), pytest.raises(BatchError) as refused:
        runner(batch)
    assert "slot 'places': expected int64 of shape [6] on cpu, got list" in str(refused.value)
    assert "slot 'weights': expected float32 of shape [6] on cpu, got float64" in str(refused.value)


def test_float_into_an_index_slot(runner: DecodeRunner[PlainInputs]) -> None:
    """Floats are not truncated into an index slot, even where each is a whole number."""
    for slot in ("ids", "places"):
        batch = random_batch(6, seed=4)
        batch[slot] = batch[slot].float()
        with nothing_changes(runner, batch), pytest.raises(BatchError, match=rf"'{slot}': expected int64.*got float32"):
            runner(batch)


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


@pytest.mark.parametrize("requests", [6, 20], ids=["graph", "eager"])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("owner", ["ids", "places"])
def test_source_in_a_buffer(runner: DecodeRunner[PlainInputs], owner: str, offset: int, requests: int) -> None:
    """A source that lies in its own slot's buffer or another's would be overwritten while it is read: refused."""
    runner(random_batch(30, seed=7))
    buffers = runner.graphs.buffers if requests == 6 else eager_of(runner).buffers
    assert buffers is not None
    batch = random_batch(requests, seed=8)
    batch["ids"] = buffers[owner].tensor[offset : offset + requests]
    with nothing_changes(runner, batch), pytest.raises(BatchError, match=r"'ids': the source lies in .*; pass a copy"):
        runner(batch)


@pytest.mark.parametrize("owner", ["ids", "places"])
@pytest.mark.parametrize("slot", ["ids", "places"])
def test_wide_source_that_begins_before_a_buffer(cpu: str, owner: str, slot: str) -> None:
    """A source that begins before an adopted buffer and reaches into it is refused too, whichever slot it is for."""
    memory = torch.randint(1, 40, (64,))
    runner = plain_runner(cpu, bind={owner: memory[16:24]})
    batch = random_batch(6, seed=9)
    batch[slot] = memory[12:18]
    with nothing_changes(runner, batch, largest=8), pytest.raises(BatchError, match=rf"'{slot}': the source lies in"):
        runner(batch)


def test_source_beside_a_buffer(cpu: str) -> None:
    """A source that ends where an adopted buffer begins, or begins where it ends, is taken."""
    memory = torch.randint(1, 40, (64,))
    runner = plain_runner(cpu, bind={"ids": memory[16:24]})
    for start in (10, 24):
        batch = random_batch(6, seed=start)
        batch["places"] = memory[start : start + 6]
        assert_right(runner(batch), snapshot(batch))


def test_view_as_batch(runner: DecodeRunner[PlainInputs]) -> None:
    """A view handed back as the next batch lies in the very buffers that it would fill: refused."""
    batch = random_batch(8, seed=10)
    view = runner.fill(batch)
    with pytest.raises(BatchError, match="the source lies in a slot's own buffer"):
        runner(view)
    assert_right(runner.replay(view), batch)


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


def test_error_says_what_came(cpu: str) -> None:
    """A batch that is no tensor at all, a string or a number, is told what it is."""
    runner = DecodeRunner(IndexInputs, lambda view: view.ids, backend=cpu, buckets=[4])
    runner.capture()
    for value in ("text", 3, [1, 2]):
        with pytest.raises(BatchError, match=rf"slot 'ids': expected a tensor.*got {type(value).__name__}"):
            runner({"ids": value})
