"""What a runner makes of every backend's record: dtypes by role, memory apart or in one piece, the same answers."""

from typing import Any

import pytest
import torch

from slotgraph import BATCH, CACHE_LOC, SEQ_LEN_FILL, TOKENS, DecodeRunner, Inputs, Step, computed, copied
from slotgraph.backends import Backend

pytestmark = pytest.mark.slotgraph_backends("every")

ROWS = 64


def live_tokens(step: Step) -> int:
    """Computed on the host."""
    return step.live(TOKENS)


class ContractInputs(Inputs):
    """Five slots of one dtype, so that chunks matter, and those that a record speaks of."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=ROWS - 1)
    first: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1)
    second: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-2)
    third: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-3)
    places: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    other_places: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL)
    here: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=4, placement="host")
    live: torch.Tensor = computed(live_tokens, shape=1, dtype=torch.int32)
    sums: torch.Tensor = computed(lambda first, second: first * second, shape=TOKENS, dtype=torch.int64)


def batch_on(backend: Backend, requests: int, seed: int, places: torch.dtype) -> dict[str, torch.Tensor]:
    """A random batch where the backend wants it."""
    draw = torch.Generator().manual_seed(seed)
    numbers = {name: torch.randint(1, 9, (requests,), generator=draw) for name in ("first", "second", "third")}
    batch = {
        **numbers,
        "ids": torch.randint(0, ROWS - 1, (requests,), generator=draw),
        "places": torch.randint(1, 99, (requests,), generator=draw, dtype=places),
        "other_places": torch.randint(1, 99, (requests,), generator=draw, dtype=torch.int64),
        "lens": torch.randint(1, 99, (requests,), generator=draw, dtype=torch.int32),
    }
    return {name: value.to(backend.device) for name, value in batch.items()} | {"here": numbers["third"] + 1}


def contract_step(table: torch.Tensor) -> Any:
    """A step that reads every slot on the device."""

    def step(view: ContractInputs) -> torch.Tensor:
        rows = table[view.ids] + (view.sums + view.third)[:, None]
        return rows + (view.places * 2 + view.other_places * view.lens + view.live)[:, None]

    return step


def answer(table: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the step must give, from the batch alone, on the host."""
    on_host = {name: value.cpu().long() for name, value in batch.items()}
    rows = on_host["first"] * on_host["second"] + on_host["third"] + on_host["places"] * 2 + len(on_host["ids"])
    return table.cpu()[on_host["ids"]] + (rows + on_host["other_places"] * on_host["lens"])[:, None]


def device_table(backend: Backend) -> torch.Tensor:
    """[ROWS, 2] random whole numbers as floats, exact in any order of addition."""
    draw = torch.Generator().manual_seed(1)
    return torch.randint(1, 1000, (ROWS, 2), generator=draw).float().to(backend.device)


@pytest.mark.parametrize("places", [torch.int32, torch.int64])
def test_same_answers_everywhere(backend: Backend, places: torch.dtype) -> None:
    """Batches of any size, through buckets and eagerly, give the same numbers on every backend by every lowering."""
    table = device_table(backend)
    for lowering in backend.capabilities.lowerings:
        runner = DecodeRunner(
            ContractInputs, contract_step(table), buckets=[1, 2, 4, 8], backend=backend, lowering=lowering
        )
        runner.capture()
        for seed, requests in enumerate((8, 3, 1, 5, 8, 2, 20, 4, 3, 7)):
            batch = batch_on(backend, requests, seed, places)
            outputs = runner(batch)
            backend.synchronize()
            assert torch.equal(outputs.cpu(), answer(table, batch))
        assert runner.stats()["steps"] == {"graph": 9, "eager": 1}
        assert runner.stats()["lowerings"] == {lowering: 9}


def test_record_decides(backend: Backend) -> None:
    """Roles take the record's dtypes and values, and slots lie in one allocation or each in its own, as it says."""
    record, table = backend.capabilities, device_table(backend)
    runner = DecodeRunner(ContractInputs, contract_step(table), buckets=[4], backend=backend)
    runner.capture()
    view = runner.fill(batch_on(backend, 2, 1, torch.int64))
    runner.replay(view)
    backend.synchronize()
    assert view.places.dtype == view.other_places.dtype == CACHE_LOC.on(record)
    assert view.lens[2:].tolist() == [SEQ_LEN_FILL.on(record)] * 2
    assert view.here.device.type == "cpu"
    assert view.here[2:].tolist() == [4, 4]
    on_device = [buffer.tensor for buffer in runner.graphs.buffers if buffer.slot.placement == "device"]
    assert all(tensor.device == backend.device for tensor in on_device)
    storages = {tensor.untyped_storage().data_ptr() for tensor in on_device}
    assert len(storages) == (1 if record.arenas else len(on_device))
    assert record.arenas or all(tensor.storage_offset() == 0 for tensor in on_device)
