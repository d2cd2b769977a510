"""Adopted buffers: memory that is handed in serves as a slot, or is refused by name with all that is wrong with it."""

from typing import Any

import pytest
import torch

from slotgraph import BATCH, CACHE_LOC, DecodeRunner, Inputs, constant, copied, once, output
from slotgraph.dataflow.errors import BatchError, BindError
from tests.runners.models import PlainInputs, assert_right, plain_runner, plain_step, random_batch


def test_adopted_buffer(cpu: str) -> None:
    """The view of an adopted slot is the memory that was handed in, and results are right with tails and all."""
    ids, pairs = torch.full((8,), 33), torch.full((8, 2), 33.0)
    runner = plain_runner(cpu, bind={"ids": ids, "pairs": pairs})
    for requests in (8, 3, 5, 2, 7):
        batch = random_batch(requests, seed=requests)
        view = runner.fill(batch)
        assert view.ids.data_ptr() == ids.data_ptr()
        assert torch.equal(ids[:requests], batch["ids"])
        assert ids[requests : view.ids.shape[0]].tolist() == [49] * (view.ids.shape[0] - requests)
        assert pairs[requests : view.ids.shape[0]].tolist() == [[9, 9]] * (view.ids.shape[0] - requests)
        assert_right(runner.replay(view), batch)


def test_batch_larger_than_adopted_memory(cpu: str) -> None:
    """A batch that adopted memory cannot hold is refused by the slot's name, and the next one is right."""
    runner = plain_runner(cpu, bind={"ids": torch.full((8,), 33)})
    first, before = random_batch(3, seed=1), runner.fill(random_batch(3, seed=1))
    with pytest.raises(BatchError, match=r"slot 'ids' is bound to memory that cannot grow, .*BATCH 8"):
        runner(random_batch(9, seed=2))
    assert_right(runner.replay(before), first)
    batch = random_batch(8, seed=3)
    assert_right(runner(batch), batch)


def test_part_of_something_larger(cpu: str) -> None:
    """A slice of a larger tensor may be adopted, and what lies beside it stays as it was."""
    memory = torch.randint(1, 40, (40,))
    before = memory.clone()
    runner = plain_runner(cpu, bind={"ids": memory[8:16], "places": memory[24:32]})
    for requests in (8, 3):
        batch = random_batch(requests, seed=requests)
        assert_right(runner(batch), batch)
    beside = [*range(8), *range(16, 24), *range(32, 40)]
    assert torch.equal(memory[beside], before[beside])


def test_garbage_in_an_adopted_buffer(cpu: str) -> None:
    """What an adopted buffer holds before capture is not used: garbage there would be an index out of range."""
    runner = plain_runner(cpu, bind={"ids": torch.full((8,), 1 << 40)})
    batch = random_batch(3, seed=1)
    assert_right(runner(batch), batch)


def test_adopted_memory_is_not_counted(cpu: str) -> None:
    """The memory account has what was allocated here, without what was handed in."""
    large = DecodeRunner(PlainInputs, plain_step, buckets=[4096], backend=cpu)
    adopting = DecodeRunner(
        PlainInputs, plain_step, buckets=[4096], backend=cpu, bind={"ids": torch.zeros(4096, dtype=torch.int64)}
    )
    assert large.graphs.memory().inputs - adopting.graphs.memory().inputs == 4096 * 8


class ConstantInputs(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=once(5))
    fives: torch.Tensor = constant(5, shape=BATCH, dtype=torch.int32)
    logits: torch.Tensor = output(BATCH, dtype=torch.int64)


def test_adopted_constant(cpu: str) -> None:
    """A constant and a tail that is written once are established in adopted memory too."""
    tensors = {"fives": torch.full((4,), 77, dtype=torch.int32), "ids": torch.full((4,), 77)}
    runner = DecodeRunner(ConstantInputs, lambda view: view.ids * view.fives, buckets=[4], backend=cpu, bind=tensors)
    runner.capture()
    assert tensors["fives"].tolist() == [5] * 4
    assert tensors["ids"].tolist() == [5] * 4
    assert runner({"ids": torch.tensor([2, 3])}).tolist() == [10, 15]


def test_adopted_output(cpu: str) -> None:
    """A step's result lies in the tensor that was handed in for its output slot."""
    logits = torch.full((4,), 77)
    runner = DecodeRunner(
        ConstantInputs,
        lambda view: view.logits.copy_(view.ids * view.fives),
        buckets=[4],
        backend=cpu,
        bind={"logits": logits},
    )
    runner.capture()
    outputs = runner({"ids": torch.tensor([2, 3])})
    assert outputs.data_ptr() == logits.data_ptr()
    assert logits.tolist() == [10, 15, 25, 25]


def tensor_made_in_inference_mode() -> torch.Tensor:
    """A tensor that cannot be written outside inference mode."""
    with torch.inference_mode():
        return torch.zeros(8, dtype=torch.float32)


REFUSED: dict[str, tuple[str, Any, str]] = {
    "no slot": ("idz", torch.zeros(8), "bind names 'idz', which is no slot of PlainInputs"),
    "list": ("weights", [0.0] * 8, "slot 'weights': expected a tensor to adopt, got list"),
    "too short": ("weights", torch.zeros(7), r"slot 'weights': expected shape \[8\] .*full capacity.*got \[7\]"),
    "too long": ("weights", torch.zeros(9), r"slot 'weights': expected shape \[8\] .*got \[9\]"),
    "rank": ("weights", torch.zeros(8, 1), r"slot 'weights': expected shape \[8\] .*got \[8, 1\]"),
    "dtype": ("weights", torch.zeros(8).double(), "slot 'weights': expected float32, got float64"),
    "role": ("places", torch.zeros(8, dtype=torch.int32), "slot 'places': expected int64, got int32"),
    "device": ("weights", torch.zeros(8, device="meta"), "slot 'weights': expected memory on cpu, got meta"),
    "strided": ("weights", torch.zeros(16)[::2], r"slot 'weights': expected a contiguous.* got strides \[2\]; adopt"),
    "transposed": ("pairs", torch.zeros(2, 8).t(), r"slot 'pairs': expected a contiguous.* strides \[1, 8\]"),
    "expanded": ("weights", torch.zeros(1).expand(8), r"slot 'weights': expected a contiguous.* strides \[0\]"),
    "inference": ("weights", tensor_made_in_inference_mode(), "slot 'weights': made under inference_mode"),
    "grad": ("weights", torch.zeros(8, requires_grad=True), r"slot 'weights': requires grad; adopt `\.detach\(\)`"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(cpu: str, why: str) -> None:
    """Memory that cannot serve as a slot is refused with the slot and what was expected; it is not written."""
    name, tensor, says = REFUSED[why]
    before = tensor.clone() if isinstance(tensor, torch.Tensor) else list(tensor)
    sound = torch.full((8,), 12)
    with pytest.raises(BindError, match=says):
        DecodeRunner(PlainInputs, plain_step, buckets=[4, 8], backend=cpu, bind={"ids": sound, name: tensor})
    assert sound.tolist() == [12] * 8
    if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
        assert isinstance(before, torch.Tensor)
        assert torch.equal(tensor, before)


def test_every_fault_at_once(cpu: str) -> None:
    """All that is wrong with all that is handed in arrives in one message."""
    wrong: dict[str, Any] = {"weights": torch.zeros(18).double()[::2], "ids": [1], "idz": torch.zeros(8)}
    with pytest.raises(BindError) as refused:
        DecodeRunner(PlainInputs, plain_step, buckets=[8], backend=cpu, bind=wrong)
    for says in ("'weights': expected shape [8]", "got float64", "strides [2]", "'ids': expected a tensor", "'idz'"):
        assert says in str(refused.value)


@pytest.mark.parametrize("start", [0, 4, 7])
def test_overlapping_memory(cpu: str, start: int) -> None:
    """Two slots in one memory would overwrite each other."""
    memory = torch.zeros(24, dtype=torch.int64)
    bind = {"ids": memory[:8], "places": memory[start : start + 8]}
    with pytest.raises(BindError, match=r"slots '\w+' and '\w+' are bound to overlapping memory: each needs its own"):
        DecodeRunner(PlainInputs, plain_step, buckets=[8], backend=cpu, bind=bind)


def test_wide_slot_over_two_others(cpu: str) -> None:
    """Overlap is found between slots that do not follow each other, too."""

    class Wide(Inputs):
        one: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        two: torch.Tensor = copied(BATCH, 4, dtype=torch.int64, pad=0)
        places: torch.Tensor = copied(BATCH, dtype=CACHE_LOC, pad=0)

    memory = torch.zeros(64, dtype=torch.int64)
    bind = {"two": memory[:32], "one": memory[8:16], "places": memory[24:32]}
    with pytest.raises(BindError, match="'two'"):
        DecodeRunner(Wide, lambda view: view.one, buckets=[8], backend=cpu, bind=bind)
