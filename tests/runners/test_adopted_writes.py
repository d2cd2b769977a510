"""Adopted memory that its owner writes between steps: tails are reset all the same, and debugging finds who may not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, DecodeRunner, Exclusive, Inputs, copied, staged
from slotgraph.backends.registry import choose
from slotgraph.errors import BindError, CheckError

CAPACITY = 6
LOWERINGS = choose("cpu").capabilities.lowerings


class Adopted(Inputs):
    """Slots of several shapes and places whose memory is the owner's."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-3)
    pairs: torch.Tensor = copied(BATCH, 2, dtype=torch.float32, pad=0.5)
    sides: torch.Tensor = copied(2, BATCH, dtype=torch.int32, pad=7)
    here: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-9, placement="host")
    scratch: torch.Tensor = staged(BATCH, dtype=torch.int64, pad=4)


SHAPES = {"ids": (CAPACITY,), "pairs": (CAPACITY, 2), "sides": (2, CAPACITY), "here": (CAPACITY,)}
DTYPES = {"ids": torch.int64, "pairs": torch.float32, "sides": torch.int32, "here": torch.int64}
TAILS = {"ids": -3, "pairs": 0.5, "sides": 7, "here": -9}


def everything(view: Adopted) -> dict[str, torch.Tensor]:
    """What the step sees."""
    return {name: getattr(view, name).clone() for name in (*SHAPES, "scratch")}


def drawn(rows: int, seed: int) -> dict[str, torch.Tensor]:
    """A batch of so many rows."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in SHAPES.items():
        sizes = tuple(rows if size == CAPACITY else size for size in shape)
        found[name] = torch.randint(10, 90, sizes, generator=draw).to(DTYPES[name])
    return found


def memory() -> dict[str, torch.Tensor]:
    """What its owner hands in, at full capacity."""
    return {
        **{name: torch.empty(shape, dtype=DTYPES[name]) for name, shape in SHAPES.items()},
        "scratch": torch.empty(CAPACITY, dtype=torch.int64),
    }


def runner_of(lowering: str, backend: str, bind: Any, **options: Any) -> DecodeRunner[Adopted]:
    """A captured runner over it."""
    runner = DecodeRunner(
        Adopted,
        everything,
        buckets=[2, CAPACITY],
        bind=bind,
        backend=backend,
        lowering=lowering,
        output_rows=None,
        **options,
    )
    runner.capture()
    return runner


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
@settings(max_examples=15)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, CAPACITY), st.integers(0, 1 << 20), st.sampled_from(["whole", "some", "none"])),
        min_size=2,
        max_size=8,
    )
)
def test_whatever_the_owner_writes(backend: str, steps: list[tuple[int, int, str]]) -> None:
    """All lowerings see the batch's rows and the tails' values, whatever was written to the memory between steps."""
    owned = {lowering: memory() for lowering in LOWERINGS}
    runners = {lowering: runner_of(lowering, backend, owned[lowering]) for lowering in LOWERINGS}
    for rows, seed, how in steps:
        batch = drawn(rows, seed)
        padded = 2 if rows <= 2 else CAPACITY
        for lowering, runner in runners.items():
            if how != "none":
                draw = torch.Generator().manual_seed(seed)
                for name, tensor in owned[lowering].items():
                    if how == "whole" or name in ("ids", "here"):
                        tensor.copy_(torch.randint(100, 200, tensor.shape, generator=draw))
            seen = runner(batch)
            for name, brought in batch.items():
                right = torch.full_like(seen[name], TAILS[name])
                right[tuple(slice(0, size) for size in brought.shape)] = brought
                assert torch.equal(seen[name], right), (lowering, name)
            assert seen["scratch"][rows:].tolist() == [4] * (padded - rows), lowering


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_exclusive_memory_is_adopted_too(lowering: str) -> None:
    """Memory that nobody else writes is the slot's buffer, with the same bytes in each step."""
    owned = memory()
    runner = runner_of(lowering, "cpu-capture", {name: Exclusive(tensor) for name, tensor in owned.items()})
    for seed, rows in enumerate((6, 1, 4, 2, 5)):
        view, batch = runner.fill(drawn(rows, seed)), drawn(rows, seed)
        assert all(getattr(view, name).data_ptr() == tensor.data_ptr() for name, tensor in owned.items())
        seen = runner.replay(view)
        assert torch.equal(seen["ids"][:rows], batch["ids"])
        assert seen["ids"][rows:].tolist() == [-3] * (len(seen["ids"]) - rows)


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


def test_what_is_no_tensor_is_refused() -> None:
    """A promise is about a tensor."""
    with pytest.raises(BindError, match="slot 'ids': expected a tensor to adopt, got list"):
        runner_of("foreach", "cpu", {"ids": Exclusive([0] * CAPACITY)})  # type: ignore[arg-type] # that is the fault


def test_the_shape_of_the_owners_tensor_is_the_owners() -> None:
    """What its owner does to the shape of an adopted tensor changes no step."""
    owned = memory()
    runner = runner_of("foreach", "cpu-capture", owned)
    changes: list[Callable[[torch.Tensor], Any]] = [
        torch.Tensor.t_,
        lambda one: one.unsqueeze_(0),
        lambda one: one.resize_(1),
    ]
    for change in changes:
        change(owned["pairs"])
        batch = drawn(4, seed=5)
        assert torch.equal(runner(batch)["pairs"][:4], batch["pairs"])
