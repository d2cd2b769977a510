"""Slots that a step advances and everyone finds as filled."""

import itertools
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import TOKENS, DecodeRunner, EagerRunner, Inputs, copied, keep
from slotgraph.backends.base import Backend
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import CaptureError, DeclarationErrors, ReplayError
from slotgraph.extend import once
from tests.runners.models import bytes_of, same_batch, snapshot

STEPS = 3
LIMIT = 200
TABLE = torch.randn(LIMIT, 4, generator=torch.Generator().manual_seed(3))


class DraftInputs(Inputs):
    """Positions that a draft loop advances; every tail has a value that no live row has."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=7, restored=True)
    mrope: torch.Tensor | None = copied(3, TOKENS, dtype=torch.int64, pad=5, restored=True, strided=True, default=None)


class RewrittenInputs(Inputs):
    """Positions that are left as the step leaves them."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=7, rewritten=True)


@attrs.frozen(eq=False)
class Draft:
    """Several steps in one, over a table that ends; `fails` is asked after the first."""

    table: torch.Tensor
    fails: Callable[[], bool] = lambda: False

    def __call__(self, view: Any) -> torch.Tensor:
        """[TOKENS, 4] floats."""
        total: torch.Tensor = self.table[view.positions] * view.ids[:, None]
        for _ in range(STEPS):
            view.positions.add_(1)
            if isinstance(view, DraftInputs) and view.mrope is not None:
                view.mrope.mul_(2)
                total = total + view.mrope.sum(0)[:, None]
            if self.fails():
                raise RuntimeError("no kernel")
            total = total + self.table[view.positions]
        return total


def batch_of(rows: int, seed: int, device: torch.device | str = "cpu", *, mrope: bool = True) -> dict[str, Any]:
    """Random rows."""
    draw = torch.Generator().manual_seed(seed)
    found = {
        "ids": torch.randint(1, 9, (rows,), generator=draw),
        "positions": torch.randint(10, LIMIT - STEPS, (rows,), generator=draw),
    }
    if mrope:
        found["mrope"] = torch.randint(10, 99, (3, rows), generator=draw)
    return {name: value.to(device) for name, value in found.items()}


def answer(batch: dict[str, Any]) -> torch.Tensor:
    """What the step must give, from the batch alone."""
    positions, ids = batch["positions"].cpu(), batch["ids"].cpu()
    total: torch.Tensor = TABLE[positions] * ids[:, None]
    for step in range(1, STEPS + 1):
        if batch.get("mrope") is not None:
            total = total + (batch["mrope"].cpu() * 2**step).sum(0)[:, None]
        total = total + TABLE[positions + step]
    return total


def runner_over(backend: Backend | str, step: Draft, **options: Any) -> DecodeRunner[DraftInputs]:
    """A runner for 2, 4 and 8 rows, with and without the optional slot."""
    return DecodeRunner(DraftInputs, step, backend=backend, buckets=[2, 4, 8], absent=[{"mrope"}], **options)


def assert_clean(runner: DecodeRunner[Any], batch: dict[str, Any]) -> None:
    """A fill leaves the batch's rows and each tail's value, in every padded row."""
    view, rows = runner.fill(batch), len(batch["ids"])
    tails = {"ids": 0, "positions": 7, "mrope": 5}
    for name, value in batch.items():
        slot = getattr(view, name)
        assert torch.equal(slot[..., :rows], value)
        assert (slot[..., rows:] == tails[name]).all()


@pytest.mark.parametrize("lowering", LADDER)
@settings(max_examples=15)
@given(turns=st.lists(st.tuples(st.integers(0, 10), st.booleans(), st.booleans()), min_size=2, max_size=10))
def test_any_sequence(backend: Backend, lowering: str, turns: list[tuple[int, bool, bool]]) -> None:
    """Captured or eager, filled once and replayed twice: outputs are the batch's, slots and tails are as filled."""
    if lowering not in backend.capabilities.lowerings:
        pytest.skip(f"{backend.name} has no {lowering}")
    runner = runner_over(backend, Draft(TABLE.to(backend.device)), lowering=lowering)
    runner.capture()
    for seed, (rows, mrope, whole) in enumerate(turns):
        batch = batch_of(rows, seed, backend.device, mrope=mrope)
        given_batch = snapshot(batch)
        if whole:
            torch.testing.assert_close(runner(batch).cpu(), answer(batch))
        else:
            view = runner.fill(batch)
            before = {name: bytes_of(getattr(view, name)) for name in batch}
            for _ in range(2):
                torch.testing.assert_close(runner.replay(view).cpu(), answer(batch))
                assert {name: bytes_of(getattr(view, name)) for name in batch} == before
        assert_clean(runner, batch)
        assert same_batch(batch, given_batch)


class Flag:
    """Raises once, when it is set."""

    def __init__(self) -> None:
        self.up = False

    def __call__(self) -> bool:
        """Whether it was up."""
        self.up, was = False, self.up
        return was


@pytest.mark.parametrize("lowering", LADDER)
def test_eager_step_that_raises(cpu: str, lowering: str) -> None:
    """A step that raises midway spoils nothing: not the batch, and no tail of the graphs' next fills."""
    flag = Flag()
    runner = DecodeRunner(DraftInputs, Draft(TABLE, flag), backend=cpu, buckets=[8], max_waste=0.5, lowering=lowering)
    runner.capture()
    for seed, (rows, requests) in enumerate([(3, 4), (1, 7), (12, 5), (2, 8), (3, 6)]):
        bad, good = batch_of(rows, seed), batch_of(requests, seed)
        given_batch = snapshot(bad)
        flag.up = True
        with pytest.raises(RuntimeError, match="no kernel"):
            runner(bad)
        assert same_batch(bad, given_batch)
        torch.testing.assert_close(runner(bad), answer(bad))
        assert_clean(runner, good)
        torch.testing.assert_close(runner(good), answer(good))


@pytest.mark.parametrize("lowering", LADDER)
def test_replay_that_raises(cpu: str, lowering: str) -> None:
    """A replay that breaks off midway leaves no stale row: the batch is the caller's, and the next fills are clean."""
    runner = runner_over(cpu, Draft(TABLE), lowering=lowering)
    runner.capture()
    for rows in (3, 7, 1):
        bad = batch_of(rows, rows)
        bad["positions"][0] = LIMIT - 2  # the second step's look-up is past the table
        given_batch = snapshot(bad)
        with pytest.raises((IndexError, ReplayError)):
            runner(bad)
        assert same_batch(bad, given_batch)
        for smaller in (rows, 1, 5):
            good = batch_of(smaller, smaller)
            assert_clean(runner, good)
            torch.testing.assert_close(runner(good), answer(good))


def converted(value: torch.Tensor) -> dict[str, Any]:
    """The same numbers as each kind of source."""
    return {"tensor": value, "array": value.numpy().copy(), "list": value.tolist()}


@pytest.mark.parametrize("inputs", [DraftInputs, RewrittenInputs])
def test_no_copy_spares_the_batch(backend: Backend, inputs: type[DraftInputs] | type[RewrittenInputs]) -> None:
    """Handed through, a slot that the step writes is a copy: the caller's batch stays, also where the step raises."""
    flag = Flag()
    step = Draft(TABLE.to(backend.device), flag)
    eager: EagerRunner[Any] = EagerRunner(inputs, step, backend=backend, no_copy=True)
    for rows, kind, fails in itertools.product((3, 6), ("tensor", "array", "list"), (False, True)):
        batch = batch_of(rows, rows, backend.device, mrope=inputs is DraftInputs)
        right = answer(batch)
        if kind != "tensor":
            batch["positions"] = converted(batch["positions"].cpu())[kind]
        given_batch = snapshot(batch)
        flag.up = fails
        if fails:
            with pytest.raises(RuntimeError, match="no kernel"):
                eager(batch)
        else:
            torch.testing.assert_close(eager(batch).cpu(), right)
        assert same_batch(batch, given_batch)
        assert eager.fill(batch).ids is batch["ids"]


def test_outputs_keep_what_the_step_made(backend: Backend) -> None:
    """A restored slot that is returned, or a part of it, is returned as the step left it."""
    made: list[tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = [
        (lambda slot: slot, lambda found: found),
        (lambda slot: slot[:, None][:, 0], lambda found: found),
        (lambda slot: {"at": [slot]}, lambda found: found["at"][0]),
    ]
    for make, found_in in made:

        def step(view: DraftInputs, make: Callable[[torch.Tensor], Any] = make) -> Any:
            view.positions.add_(STEPS)
            return make(view.positions)

        runner: Any = DecodeRunner(DraftInputs, step, backend=backend, buckets=[4], absent=[{"mrope"}])
        runner.capture()
        eager: Any = EagerRunner(DraftInputs, step, backend=backend)
        for rows in (3, 2, 9):
            batch = batch_of(rows, rows, backend.device, mrope=False)
            for run in (runner, eager):
                assert torch.equal(found_in(run(batch)), batch["positions"] + STEPS)


def test_writes_elsewhere_are_still_refused(cpu: str) -> None:
    """That one slot is restored frees no other: a step that writes a slot declared as read only is not captured."""

    def step(view: DraftInputs) -> torch.Tensor:
        view.positions.add_(1)
        return view.ids.add_(1)

    runner = DecodeRunner(DraftInputs, step, backend=cpu, buckets=[4])
    with pytest.raises(CaptureError, match="the step writes 'ids'"):
        runner.capture()


def test_tails_that_are_kept(cpu: str) -> None:
    """The padded rows of a kept tail are put back, too: they stand still however often the step runs."""

    class Kept(Inputs):
        positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=keep("the test reads it"), restored=True)

    def step(view: Kept) -> torch.Tensor:
        return view.positions.add_(1).clone()

    runner = DecodeRunner(Kept, step, backend=cpu, buckets=[4])
    runner.capture()
    runner({"positions": [5, 6, 7, 8]})
    for _ in range(3):
        assert runner({"positions": np.array([9])}).tolist() == [10]
        assert runner.fill({"positions": [9]}).positions.tolist() == [9, 6, 7, 8]


def test_what_cannot_be_restored() -> None:
    """A slot is rewritten or restored, not both; and one whose tail is set once cannot lose it where a step raises."""
    with pytest.raises(DeclarationErrors) as refused:

        class Both(Inputs):
            one: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, rewritten=True, restored=True)
            two: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=once(1), restored=True)

    said = [str(fault) for fault in refused.value.exceptions]
    assert said[0].startswith("Both.one: slot 'one': it is both rewritten and restored")
    assert said[1].startswith("Both.two: slot 'two': it is restored, and its tail is set once")
