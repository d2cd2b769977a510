"""Adopted memory: it serves as a slot whatever its owner writes, or is refused by name with all that is wrong."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, DecodeRunner, Inputs, constant, copied, output, staged
from slotgraph.backends import choose
from slotgraph.dataflow.errors import BatchError
from slotgraph.errors import BindError, CheckError
from slotgraph.extend import Exclusive, once
from tests.runners.models import PlainInputs, assert_right, decoder, plain_runner, plain_step, random_batch


def test_batch_larger_than_adopted_memory(cpu: str) -> None:
    """A batch that adopted memory cannot hold is refused by the slot's name, and the next one is right."""
    runner = plain_runner(cpu, bind={"ids": torch.full((8,), 33)})
    first, before = random_batch(3, seed=1), runner.fill(random_batch(3, seed=1))
    with pytest.raises(BatchError, match=r"slot 'ids' is bound to memory that cannot grow, .*BATCH 8"):
        runner(random_batch(9, seed=2))
    assert_right(runner.replay(before), first)
    batch = random_batch(8, seed=3)
    assert_right(runner(batch), batch)


def test_adopted_memory_is_not_counted(cpu: str) -> None:
    """The memory account has what was allocated here, without what was handed in."""
    large = DecodeRunner(PlainInputs, plain_step, buckets=[4096], backend=cpu)
    adopting = DecodeRunner(
        PlainInputs, plain_step, buckets=[4096], backend=cpu, bind={"ids": torch.zeros(4096, dtype=torch.int64)}
    )
    assert large.graphs.memory().inputs - adopting.graphs.memory().inputs == 4096 * 8


def test_adopted_constant_and_output(cpu: str) -> None:
    """A constant and a tail that is written once are established there too; a step's result lies in what was given."""

    class Fixed(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=once(5))
        fives: torch.Tensor = constant(5, shape=BATCH, dtype=torch.int64)
        logits: torch.Tensor = output(BATCH, dtype=torch.int64)

    tensors = {name: torch.full((4,), 77) for name in ("ids", "fives", "logits")}
    runner = decoder(Fixed, lambda view: view.logits.copy_(view.ids * view.fives), backend=cpu, bind=tensors)
    assert tensors["fives"].tolist() == tensors["ids"].tolist() == [5] * 4
    assert runner({"ids": torch.tensor([2, 3])}).data_ptr() == tensors["logits"].data_ptr()
    assert tensors["logits"].tolist() == [10, 15, 25, 25]


REFUSED: dict[str, tuple[str, Any, str]] = {
    "no slot": ("idz", torch.zeros(8), "bind names 'idz', which is no slot of PlainInputs"),
    "list": ("weights", [0.0] * 8, "slot 'weights': expected a tensor to adopt, got list"),
    "promise": ("weights", Exclusive([0.0]), "slot 'weights': expected a tensor to adopt, got list"),  # type: ignore[arg-type]
    "too short": ("weights", torch.zeros(7), r"slot 'weights': expected shape \[8\] .*full capacity.*got \[7\]"),
    "too long": ("weights", torch.zeros(9), r"slot 'weights': expected shape \[8\] .*got \[9\]"),
    "rank": ("weights", torch.zeros(8, 1), r"slot 'weights': expected shape \[8\] .*got \[8, 1\]"),
    "dtype": ("weights", torch.zeros(8).double(), "slot 'weights': expected float32, got float64"),
    "role": ("places", torch.zeros(8, dtype=torch.int32), "slot 'places': expected int64, got int32"),
    "device": ("weights", torch.zeros(8, device="meta"), "slot 'weights': expected memory on cpu, got meta"),
    "strided": ("weights", torch.zeros(16)[::2], r"slot 'weights': expected a contiguous.* got strides \[2\]; adopt"),
    "transposed": ("pairs", torch.zeros(2, 8).t(), r"slot 'pairs': expected a contiguous.* strides \[1, 8\]"),
    "expanded": ("weights", torch.zeros(1).expand(8), r"slot 'weights': expected a contiguous.* strides \[0\]"),
    "inference": ("weights", torch.inference_mode()(torch.zeros)(8), "slot 'weights': made under inference_mode"),
    "grad": ("weights", torch.zeros(8, requires_grad=True), r"slot 'weights': requires grad; adopt `\.detach\(\)`"),
}


def test_refused(cpu: str) -> None:
    """Memory that cannot serve as a slot is refused with the slot and what was expected; it is not written."""
    for name, tensor, says in REFUSED.values():
        before = tensor.clone() if isinstance(tensor, torch.Tensor) else tensor
        sound = torch.full((8,), 12)
        with pytest.raises(BindError, match=says):
            DecodeRunner(PlainInputs, plain_step, buckets=[4, 8], backend=cpu, bind={"ids": sound, name: tensor})
        assert sound.tolist() == [12] * 8
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
            assert torch.equal(tensor, before)
    wrong: dict[str, Any] = {"weights": torch.zeros(18).double()[::2], "ids": [1], "idz": torch.zeros(8)}
    with pytest.raises(BindError) as refused:
        DecodeRunner(PlainInputs, plain_step, buckets=[8], backend=cpu, bind=wrong)
    for said in ("'weights': expected shape [8]", "got float64", "strides [2]", "'ids': expected a tensor", "'idz'"):
        assert said in str(refused.value)  # all at once
    memory = torch.zeros(24)
    for start in (0, 4, 15):
        bind = {"pairs": memory[:16].view(8, 2), "weights": memory[start : start + 8]}
        with pytest.raises(BindError, match=r"slots '\w+' and '\w+' are bound to overlapping memory: each needs"):
            DecodeRunner(PlainInputs, plain_step, buckets=[8], backend=cpu, bind=bind)


CAPACITY = 6

LOWERINGS = choose("cpu").capabilities.lowerings


class Adopted(Inputs):
    """Slots of several shapes and places whose memory is the owner's."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-3)
    pairs: torch.Tensor = copied(BATCH, 2, dtype=torch.float32, pad=0.5)
    sides: torch.Tensor = copied(2, BATCH, dtype=torch.int32, pad=7)
    here: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-9, placement="host")
    scratch: torch.Tensor = staged(BATCH, dtype=torch.int64, pad=4)


HELD: dict[str, tuple[tuple[int, ...], torch.dtype, float]] = {
    "ids": ((CAPACITY,), torch.int64, -3),
    "pairs": ((CAPACITY, 2), torch.float32, 0.5),
    "sides": ((2, CAPACITY), torch.int32, 7),
    "here": ((CAPACITY,), torch.int64, -9),
}
"""By slot, the shape and dtype of what its owner hands in, and what its tail holds."""


def everything(view: Adopted) -> dict[str, torch.Tensor]:
    """What the step sees."""
    return {name: getattr(view, name).clone() for name in (*HELD, "scratch")}


def drawn(rows: int, seed: int) -> dict[str, torch.Tensor]:
    """A batch of so many rows."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for name, (shape, dtype, _) in HELD.items():
        sizes = tuple(rows if size == CAPACITY else size for size in shape)
        found[name] = torch.randint(10, 90, sizes, generator=draw).to(dtype)
    return found


def memory() -> dict[str, torch.Tensor]:
    """What its owner hands in, at full capacity."""
    return {
        **{name: torch.empty(shape, dtype=dtype) for name, (shape, dtype, _) in HELD.items()},
        "scratch": torch.empty(CAPACITY, dtype=torch.int64),
    }


def runner_of(lowering: str, backend: str, bind: Any, **options: Any) -> Any:
    """A captured runner over it."""
    options |= {"bind": bind, "backend": backend, "lowering": lowering, "output_rows": None}
    return decoder(Adopted, everything, buckets=[2, CAPACITY], **options)


written = st.tuples(
    st.integers(0, CAPACITY), st.integers(0, 1 << 20), st.sampled_from(["whole", "some", "none", "shape"])
)


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
@settings(max_examples=15)
@given(steps=st.lists(written, min_size=2, max_size=8), exclusive=st.booleans())
def test_whatever_the_owner_writes(backend: str, steps: list[tuple[int, int, str]], *, exclusive: bool) -> None:
    """All lowerings see the batch's rows and the tails' values, whatever was written to the memory between steps."""
    owned = {lowering: memory() for lowering in LOWERINGS}
    promise: Any = Exclusive if exclusive else lambda tensor: tensor
    runners = {
        lowering: runner_of(lowering, backend, {name: promise(tensor) for name, tensor in owned[lowering].items()})
        for lowering in LOWERINGS
    }
    for rows, seed, how in steps:
        batch = drawn(rows, seed)
        padded = 2 if rows <= 2 else CAPACITY
        for lowering, runner in runners.items():
            if how == "shape":  # which is the owner's
                owned[lowering]["pairs"].t_()
            elif how != "none" and not exclusive:
                draw = torch.Generator().manual_seed(seed)
                for name, tensor in owned[lowering].items():
                    if how == "whole" or name in ("ids", "here"):
                        tensor.copy_(torch.randint(100, 200, tensor.shape, generator=draw))
            seen = runner(batch)
            for name, brought in batch.items():
                right = torch.full_like(seen[name], HELD[name][2])
                right[tuple(slice(0, size) for size in brought.shape)] = brought
                assert torch.equal(seen[name], right), (lowering, name)
            assert seen["scratch"][rows:].tolist() == [4] * (padded - rows), lowering


def test_debugging_finds_who_writes_exclusive_memory() -> None:
    """A tail that somebody else wrote is told by its slot; without the promise the same step is right."""
    owned = memory()
    promised = {**owned, "ids": Exclusive(owned["ids"])}
    runner = runner_of("foreach", "cpu-capture", promised, debug=True)
    runner(drawn(3, seed=1))
    owned["pairs"].fill_(77)  # not promised
    runner(drawn(3, seed=2))
    owned["ids"].fill_(99)
    with pytest.raises(CheckError, match=r"tail of slot 'ids' does not hold -3: .* adopted as Exclusive"):
        runner(drawn(3, seed=3))
    assert runner(drawn(3, seed=4))["ids"][3:].tolist() == [-3] * 3, "nothing is believed of tails afterwards"
