"""Sources that need care by every lowering: adopted memory, inference tensors and gradients, the same ones changed."""

import numpy as np
import pytest
import torch

from slotgraph import BATCH, HOST, DecodeRunner, Inputs, copied
from slotgraph.backends import Backend, load
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import BatchError
from tests.runners.lowered import Pair, Quick, assert_same_outputs

each_lowering = pytest.mark.parametrize("lowering", LADDER)
BUCKET = 4


class Adopting(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-3, rewritten=True)  # by whoever owns the memory
    others: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-5)


def adopting_step(view: Adopting) -> torch.Tensor:
    """A row for each request that hangs on all of both slots."""
    return view.ids * 3 + view.others + view.ids.sum() * 5 + view.others.sum() * 7


def answer(ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """What it must give in a bucket."""
    tail = BUCKET - len(ids)
    return ids * 3 + others + (ids.sum() - 3 * tail) * 5 + (others.sum() - 5 * tail) * 7


@each_lowering
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_sources_in_the_memory_around_an_adopted_slot(cpu: str, lowering: str, rows: int) -> None:
    """A source before, behind, across the edges of or inside memory that a slot adopted is read as it was."""
    memory = torch.arange(100, 124)
    runner = DecodeRunner(
        Adopting, adopting_step, buckets=[BUCKET], backend=cpu, lowering=lowering, bind={"ids": memory[8:12]}
    )
    runner.capture()
    for start in range(24 - rows):
        memory.copy_(torch.randint(1, 999, (24,)))
        source, own = memory[start : start + rows], torch.randint(1, 999, (rows,))
        for name in ("ids", "others"):
            batch = {"ids": own, "others": own + 1, name: source}
            right = answer(batch["ids"].clone(), batch["others"].clone())
            assert torch.equal(runner(batch), right), (start, name)


@each_lowering
def test_one_tensor_for_two_slots(backend: Backend, lowering: str) -> None:
    """It is copied to both as two would be, by the lowering that was asked for."""
    if lowering not in backend.capabilities.lowerings:
        pytest.skip(f"{backend.name} has no lowering {lowering!r}")
    runner = DecodeRunner(Adopting, adopting_step, buckets=[BUCKET], backend=backend, lowering=lowering)
    runner.capture()
    for seed in range(24):
        draw = torch.Generator().manual_seed(seed)
        rows = 1 + seed % BUCKET
        first, second = (torch.randint(1, 999, (rows,), generator=draw).to(backend.device) for _ in range(2))
        ids, others = ((first, first), (first, second), (second, second))[seed // 3 % 3]
        assert torch.equal(runner({"ids": ids, "others": others}).cpu(), answer(ids.cpu(), others.cpu())), seed
    assert set(runner.stats()["lowerings"]) == {runner.lowering}


@each_lowering
def test_modes(cpu: str, lowering: str) -> None:
    """Steps inside inference mode and outside, with gradients on and off, of sources of any make, are the same."""
    pair = Pair.of(Quick, cpu, lowering)
    modes = [torch.inference_mode(), torch.no_grad(), torch.enable_grad()]
    for seed in range(36):
        mode, made, kinds = modes[seed % 3], modes[seed // 3 % 3], (("plain",), ("parameter",), ("inference",))
        with made:
            batch, plain = pair.batches((3, 8)[seed % 2], seed // 4, kinds[seed // 9 % 3])
        right = pair.right(plain)
        with mode:
            outputs = pair.mine(batch) if seed % 4 else pair.mine.replay(pair.mine.fill(batch))
        assert_same_outputs(outputs, right)
        assert not any(one.requires_grad for one in outputs.values())
    assert not any(buffer.tensor.is_inference() for buffer in pair.mine.graphs.buffers)


@each_lowering
def test_a_fill_and_then_the_same_sources_changed(cpu: str, lowering: str) -> None:
    """Whatever a fill has left in the packet, a whole step after it reads its sources anew, and the other way round."""
    pair = Pair.of(Quick, cpu, lowering)
    batch, plain = pair.batches(3, 1, ("plain",))
    for seed in range(6):
        for name in ("ids", "places"):
            batch[name].add_(seed)
            plain[name].add_(seed)
        outputs = pair.mine(batch) if seed % 2 else pair.mine.replay(pair.mine.fill(batch))
        assert_same_outputs(outputs, pair.right(plain))
        pair.mine.fill(batch)


@each_lowering
def test_outputs_as_sources(cpu: str, lowering: str) -> None:
    """A step's outputs are the next one's sources, as tokens are in a decode loop, with and without a copy."""
    runner = DecodeRunner(Adopting, adopting_step, buckets=[BUCKET], backend=load(cpu)(), lowering=lowering)
    runner.capture()
    others = torch.randint(1, 99, (3,))
    outputs, right = torch.randint(1, 99, (3,)), torch.zeros(3)
    for turn in range(12):
        right = answer(outputs.clone() % 1000, others)
        outputs = runner({"ids": outputs % 1000 if turn % 2 else outputs.remainder_(1000), "others": others})
        assert torch.equal(outputs, right)


class OnBoth(Inputs):
    """A slot on the device, and one in host memory."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=5)
    lengths: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=-3, placement=HOST)


@pytest.mark.parametrize("lowering", ["in_graph", "fused"])
def test_lists_for_host_memory_keep_the_kernel(backend: Backend, lowering: str) -> None:
    """Lists and arrays for a slot in host memory are no reason to leave the kernel; what does not fit is refused."""
    if lowering not in backend.capabilities.lowerings:
        pytest.skip(f"{backend.name} has no lowering {lowering!r}")
    runner = DecodeRunner(OnBoth, lambda view: view.ids * 2, buckets=[4], backend=backend, lowering=lowering)
    runner.capture()
    draw = torch.Generator().manual_seed(7)
    found: list[int] = []
    for array in (True, False, False, True, False):
        ids, lengths = torch.randint(1, 99, (2, 3), generator=draw).tolist()
        source = np.array(lengths, np.int32) if array else lengths
        view = runner.fill({"ids": torch.tensor(ids, device=backend.device), "lengths": source})
        assert view.ids.tolist() == [*ids, 5]
        found = [*lengths, -3]
        assert view.lengths.tolist() == found
    assert runner.stats()["lowerings"] == {"fused": 5}
    assert runner.stats()["detours"] == {}
    with pytest.raises(BatchError, match="slot 'lengths': expected int32"):
        runner.fill({"ids": torch.ones(3, dtype=torch.int64, device=backend.device), "lengths": [1.5, 2.0, 3.0]})
    assert runner.inputs(4).lengths.tolist() == found
