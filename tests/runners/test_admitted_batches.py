"""Batches that are made ready before they are copied: host data, sources that lie in buffers, slots in place.

Each gives the bytes that the same numbers give as tensors of the caller's own, by every lowering, on a graph's path
and eagerly.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from slotgraph import BATCH, DecodeRunner, Inputs, copied
from slotgraph.dataflow.buffers import Buffers
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import BatchError
from tests.packing import NAME, backend_of
from tests.runners.models import (
    WORDS,
    Batch,
    PlainInputs,
    assert_right,
    eager_of,
    memory_of,
    plain_runner,
    random_batch,
    same_batch,
    snapshot,
)

SLOTS = ("ids", "places", "weights", "pairs")
PADS: dict[str, Any] = {"ids": WORDS - 1, "places": 0, "weights": -7.5, "pairs": [9, 9]}

each_path = pytest.mark.parametrize("requests", [6, 20], ids=["graph", "eager"])


ON_THE_CPU = [(backend, lowering) for backend in ("cpu", "cpu-capture") for lowering in LADDER]
PACKING = [(NAME, "foreach"), (NAME, "in_graph")]


@pytest.fixture(params=[*ON_THE_CPU, *PACKING], ids="-".join, scope="module")
def lowered(request: pytest.FixtureRequest) -> DecodeRunner[PlainInputs]:
    """A captured runner for each lowering."""
    backend, lowering = request.param
    return plain_runner(backend_of(backend), lowering=lowering)


def ran(runner: DecodeRunner[PlainInputs], batch: Batch) -> dict[str, bytes]:
    """Run a batch after others that dirtied every row; outputs and batch are held to be right, memory is returned."""
    for requests in (30, 8):
        runner(random_batch(requests, seed=97))
    given = snapshot(batch)
    outputs = runner(batch)
    assert same_batch(batch, given)
    assert_right(outputs, {name: torch.as_tensor(value) for name, value in given.items()})
    return memory_of(runner)


def assert_shows(view: PlainInputs, batch: Batch) -> None:
    """Live rows of a view are the batch's, and all others what the declaration says."""
    for name, pad in PADS.items():
        rows, shown = len(batch[name]), getattr(view, name)
        assert torch.equal(shown[:rows], batch[name]), name
        assert shown[rows:].tolist() == [pad] * (len(shown) - rows), name


def read_only(tensor: torch.Tensor) -> Any:
    """An array that may not be written."""
    array = tensor.numpy().copy()
    array.setflags(write=False)
    return array


def tuples(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Nested tuples."""
    return tuple(tuples(row) if row.dim() else row.item() for row in tensor)


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda tensor: tensor.tolist(),
    "tuple": tuples,
    "list of tuples": lambda tensor: list(tuples(tensor)),
    "array": lambda tensor: tensor.numpy(),
    "array that may not be written": read_only,
    "array with gaps": lambda tensor: np.repeat(tensor.numpy(), 2, axis=0)[::2],
    "array the other way round": lambda tensor: np.ascontiguousarray(tensor.numpy()[::-1])[::-1],
}


@each_path
@pytest.mark.parametrize("form", FORMS)
def test_host_data_is_as_good_as_its_tensor(lowered: DecodeRunner[PlainInputs], form: str, requests: int) -> None:
    """Lists, tuples and arrays of a slot's numbers, for one slot or for all, leave the bytes that its tensor leaves."""
    batch = random_batch(requests, seed=requests)
    expected = ran(lowered, batch)
    host = {name: FORMS[form](value) for name, value in batch.items()}
    for some in (*([slot] for slot in SLOTS), SLOTS):
        mixed = {name: host[name] if name in some else value for name, value in batch.items()}
        assert ran(lowered, mixed) == expected


@each_path
def test_numbers_in_a_list_take_the_slots_dtype(lowered: DecodeRunner[PlainInputs], requests: int) -> None:
    """Whole numbers in a list are floats where the slot's are, beside floats or alone; those of a tensor are not."""
    batch = random_batch(requests, seed=40)
    batch["weights"], batch["pairs"][:, 0] = torch.arange(requests).float(), 3.0
    expected = ran(lowered, batch)
    pairs = [[3, second] for second in batch["pairs"][:, 1].tolist()]
    assert ran(lowered, {**batch, "weights": list(range(requests)), "pairs": pairs}) == expected


def test_empty_host_data(lowered: DecodeRunner[PlainInputs]) -> None:
    """A batch of no rows may be empty lists, and an array of no rows."""
    assert lowered({"ids": [], "places": (), "weights": np.empty(0, np.float32), "pairs": torch.empty(0, 2)}).shape == (
        0,
        4,
    )
    good = random_batch(3, seed=41)
    assert_right(lowered(good), good)


def test_host_data_that_changes_from_step_to_step(lowered: DecodeRunner[PlainInputs]) -> None:
    """One live size, now from tensors, now from lists, arrays or both, is right each time."""
    for number, form in enumerate([None, "list", None, "array", "tuple", "array", None, "array with gaps", "list"]):
        batch = random_batch(6, seed=50 + number)
        host = {name: FORMS[form](value) if form else value for name, value in batch.items()}
        assert_right(lowered({**host, "weights": batch["weights"]} if number % 2 else host), batch)


def test_host_data_is_read_during_the_fill(lowered: DecodeRunner[PlainInputs]) -> None:
    """What becomes of a list or an array after the fill does not show."""
    batch = random_batch(3, seed=42)
    host = {name: value.numpy().copy() for name, value in batch.items()}
    host["ids"] = batch["ids"].tolist()
    view = lowered.fill(host)
    host["ids"][:] = [0, 0, 0]
    for name in ("places", "weights", "pairs"):
        host[name].fill(1)
    assert_right(lowered.replay(view), batch)


def buffers_of(runner: DecodeRunner[PlainInputs], requests: int) -> Buffers:
    """The buffers that a batch of so many requests is copied to, full of rows that are good for any slot of indices."""
    rows = random_batch(30, seed=7)
    runner({**rows, "places": rows["ids"].flip(0)})
    runner({name: value[:8] for name, value in {**rows, "places": rows["ids"].flip(0)}.items()})
    found = runner.graphs.buffers if requests <= 8 else eager_of(runner).buffers
    assert found is not None
    return found


@each_path
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("owner", ["ids", "places"])
def test_source_in_a_buffer(lowered: DecodeRunner[PlainInputs], owner: str, offset: int, requests: int) -> None:
    """A source that lies in its own slot's buffer, or in another's, gives what a clone of it gives."""
    buffers = buffers_of(lowered, requests)
    batch = random_batch(requests, seed=8)
    batch["ids"] = buffers[owner].tensor[offset : offset + requests]
    given = snapshot(batch)
    view = lowered.fill(batch)
    assert_shows(view, given)
    assert_right(lowered.replay(view), given)
    clean = random_batch(5, seed=9)  # and nothing of it stays behind
    assert_shows(lowered.fill(clean), clean)


def test_sources_that_change_places(lowered: DecodeRunner[PlainInputs]) -> None:
    """Two slots whose sources are each other's buffers are swapped: neither is overwritten before it is read."""
    buffers = buffers_of(lowered, 6)
    batch = random_batch(6, seed=10)
    batch["ids"], batch["places"] = (buffers[name].tensor[:6] for name in ("places", "ids"))
    given = snapshot(batch)
    view = lowered.fill(batch)
    assert_shows(view, given)
    assert_right(lowered.replay(view), given)


@pytest.mark.parametrize("owner", ["ids", "places"])
@pytest.mark.parametrize("slot", ["ids", "places"])
@pytest.mark.parametrize("lowering", LADDER)
def test_wide_source_that_begins_before_a_buffer(cpu: str, owner: str, slot: str, lowering: str) -> None:
    """A source that begins before an adopted buffer and reaches into it gives what a clone of it gives."""
    memory = torch.randint(1, 40, (64,))
    runner = plain_runner(cpu, bind={owner: memory[16:24]}, lowering=lowering)
    runner(random_batch(8, seed=11) | {owner: torch.randint(1, 40, (8,))})
    batch = random_batch(6, seed=9)
    batch[slot] = memory[12:18]
    given = snapshot(batch)
    view = runner.fill(batch)
    assert_shows(view, given)
    assert_right(runner.replay(view), given)


@pytest.mark.parametrize("lowering", LADDER)
def test_source_beside_a_buffer(cpu: str, lowering: str) -> None:
    """A source that ends where an adopted buffer begins, or begins where it ends, is taken as it is."""
    memory = torch.randint(1, 40, (64,))
    runner = plain_runner(cpu, bind={"ids": memory[16:24]}, lowering=lowering)
    for start in (10, 24):
        batch = random_batch(6, seed=start)
        batch["places"] = memory[start : start + 6]
        assert_right(runner(batch), snapshot(batch))
    assert runner.stats()["detours"] == {}


def test_view_as_batch(lowered: DecodeRunner[PlainInputs]) -> None:
    """A view handed back as the next batch is in place: the step sees what it saw, and then nothing is left of it."""
    for requests in (8, 3, 20):
        batch = random_batch(requests, seed=10)
        view = lowered.fill(batch)
        given = snapshot({name: getattr(view, name) for name in SLOTS})  # padded rows are live in it
        assert_right(lowered(view), given)
        small = random_batch(2, seed=12)
        assert_shows(lowered.fill(small), small)
        assert_right(lowered(small), small)


@pytest.mark.parametrize("slots", [("ids",), ("weights", "pairs"), SLOTS], ids=", ".join)
def test_slots_that_a_producer_writes(lowered: DecodeRunner[PlainInputs], slots: tuple[str, ...]) -> None:
    """Rows written where a bucket reads them need no copy; tails are reset, whatever the producer wrote there."""
    view = lowered.inputs(8)
    for number, requests in enumerate((8, 5, 7, 5, 5)):
        batch = random_batch(requests, seed=60 + number)
        given = snapshot(batch)
        for name in slots:
            place = getattr(view, name)
            place.fill_(3)  # beyond the live rows, too
            place[:requests] = batch[name]
            batch[name] = place[:requests]
        filled = lowered.fill(batch)
        assert_shows(filled, given)
        assert all(getattr(filled, name).data_ptr() == getattr(view, name).data_ptr() for name in slots)
        assert_right(lowered.replay(filled), given)
        other = random_batch(requests, seed=80 + number)  # in turn with batches of tensors
        assert_shows(lowered.fill(other), other)
        assert_right(lowered(other), other)


def test_producers_view_of_a_bucket_that_is_not_there(cpu: str) -> None:
    """Only buckets that were captured have a view for producers, and none has before capture."""
    runner = DecodeRunner(HalfInputs, lambda view: view.ids, buckets=[2, 4], backend=cpu)
    with pytest.raises(ValueError, match=r"there is no graph of bucket 4: .*after capture\(\)"):
        runner.inputs(4)
    runner.capture()
    assert runner.inputs(4).ids.shape == (4,)
    with pytest.raises(ValueError, match="there is no graph of bucket 3"):
        runner.inputs(3)


class HalfInputs(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


class TurnedInputs(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    places: torch.Tensor = copied(3, BATCH, dtype=torch.int64, pad=-1)


@pytest.mark.parametrize("lowering", LADDER)
def test_producer_of_a_slot_whose_rows_come_second(cpu: str, lowering: str) -> None:
    """Live columns that a producer wrote are in place, strided as they are, and no detour; padded ones are reset."""
    runner = DecodeRunner(
        TurnedInputs, lambda view: view.places.t() + view.ids[:, None], buckets=[4, 8], backend=cpu, lowering=lowering
    )
    runner.capture()
    places = runner.inputs(4).places
    for rows in (3, 2, 4, 1):
        values = torch.randint(1, 99, (3, rows))
        places[:, :rows] = values
        ids = torch.randint(1, 99, (rows,))
        assert runner({"ids": ids, "places": places[:, :rows]}).tolist() == (values.t() + ids[:, None]).tolist()
        assert runner.fill({"ids": ids, "places": places[:, :rows]}).places[:, rows:].eq(-1).all()
        places[:, rows:] = 77
    assert runner.stats()["detours"] == {}


@pytest.mark.parametrize("lowering", LADDER)
def test_strides_of_a_slot_elsewhere(cpu: str, lowering: str) -> None:
    """A source that only looks like the slot's own columns is refused as strided, also after one that was in place."""
    runner = DecodeRunner(TurnedInputs, lambda view: view.places.t() * 1, buckets=[4], backend=cpu, lowering=lowering)
    runner.capture()
    places, ids = runner.inputs(4).places, torch.arange(3)
    for _ in range(3):
        places[:, :3] = torch.randint(1, 99, (3, 3))
        kept = places[:, :3].clone()
        assert runner({"ids": ids, "places": places[:, :3]}).tolist() == kept.t().tolist()
        elsewhere = torch.randint(1, 99, (3, 4))[:, :3]
        with pytest.raises(BatchError, match=r"slot 'places': expected .* contiguous"):
            runner({"ids": ids, "places": elsewhere})
        assert runner({"ids": ids, "places": elsewhere.contiguous()}).tolist() == elsewhere.t().tolist()
