"""Slots that a step advances, and tensors that somebody changes in place: no later step is harmed."""

import itertools
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from slotgraph import BATCH, TOKENS, DecodeRunner, EagerRunner, Inputs, computed, copied, graph_break, keep, output
from slotgraph.backends import choose
from slotgraph.backends.base import Backend
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.errors import ComputeError, DeclarationErrors
from slotgraph.extend import once
from tests.runners.models import batch_for, bytes_of, decoder, ready, runner_by, same_batch, snapshot
from tests.runners.prefilled import Prefill, around, assert_equal
from tests.strategies import declaration_of

STEPS = 3
LIMIT = 200
TABLE = torch.randn(LIMIT, 4, generator=torch.Generator().manual_seed(3))


class DraftInputs(Inputs):  # positions that a draft loop advances; every tail has a value that no live row has
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=7, restored=True)
    mrope: torch.Tensor | None = copied(3, TOKENS, dtype=torch.int64, pad=5, restored=True, strided=True, default=None)


class RewrittenInputs(Inputs):  # positions that are left as the step leaves them
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=7, rewritten=True)


@attrs.frozen(eq=False)
class Draft:  # several steps in one, over a table that ends; `fails` is asked after the first
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
    """Random rows; no position is a tail's."""
    batch = batch_for(DraftInputs, {TOKENS: rows}, seed, device)
    batch["positions"] += 10
    return batch if mrope else {name: value for name, value in batch.items() if name != "mrope"}


def answer(batch: dict[str, Any]) -> torch.Tensor:
    """What the step gives for copies of the batch's own tensors, without any slot."""
    return Draft(TABLE)(DraftInputs(**{name: one.cpu().clone() for name, one in batch.items()}))


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


@settings(max_examples=25)
@given(
    lowering=st.sampled_from(LADDER),
    turns=st.lists(st.tuples(st.integers(0, 10), st.booleans(), st.booleans()), min_size=2, max_size=10),
)
def test_restored_slots_are_as_filled_in_any_sequence(
    backend: Backend, lowering: str, turns: list[tuple[int, bool, bool]]
) -> None:
    """Captured or eager, filled once and replayed twice: outputs are the batch's, slots and tails are as filled."""
    assume(lowering in backend.capabilities.lowerings)
    runner = ready(runner_over(backend, Draft(TABLE.to(backend.device)), lowering=lowering))
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


@pytest.mark.parametrize("inputs", [DraftInputs, RewrittenInputs])
def test_no_copy_spares_the_batch(backend: Backend, inputs: type[DraftInputs] | type[RewrittenInputs]) -> None:
    """Handed through, a slot that the step writes is a copy: the caller's batch stays, also where the step raises."""
    fails = [False]
    step = Draft(TABLE.to(backend.device), lambda: fails[0])
    eager: EagerRunner[Any] = EagerRunner(inputs, step, backend=backend, no_copy=True)
    converted: dict[str, Any] = {"array": lambda one: one.numpy().copy(), "list": torch.Tensor.tolist}
    for rows, kind, fails[0] in itertools.product((3, 6), ("tensor", "array", "list"), (False, True)):
        batch = batch_of(rows, rows, backend.device, mrope=inputs is DraftInputs)
        right = answer(batch)
        if kind in converted:
            batch["positions"] = converted[kind](batch["positions"].cpu())
        given_batch = snapshot(batch)
        if fails[0]:
            with pytest.raises(RuntimeError, match="no kernel"):
                eager(batch)
        else:
            torch.testing.assert_close(eager(batch).cpu(), right)
        assert same_batch(batch, given_batch)
        assert eager.fill(batch).ids is batch["ids"]


def test_outputs_keep_what_the_step_made(backend: Backend) -> None:
    """A restored slot that is returned, or a part of it, is returned as the step left it."""
    made: list[Any] = [lambda slot: slot, lambda slot: slot[:, None][:, 0], lambda slot: {"at": [slot]}]
    for make in made:

        def step(view: DraftInputs, make: Callable[[torch.Tensor], Any] = make) -> Any:
            view.positions.add_(STEPS)
            return make(view.positions)

        runner = decoder(DraftInputs, step, backend=backend, absent=[{"mrope"}])
        for rows, run in itertools.product((3, 2, 9), (runner, EagerRunner(DraftInputs, step, backend=backend))):
            batch = batch_of(rows, rows, backend.device, mrope=False)
            [found] = pytree.tree_leaves(run(batch))
            assert torch.equal(found, batch["positions"] + STEPS)


def test_padded_rows_of_a_kept_tail_are_put_back(cpu: str) -> None:
    """The padded rows of a kept tail are put back, too: they stand still however often the step runs."""

    class Kept(Inputs):
        positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=keep("the test reads it"), restored=True)

    def step(view: Kept) -> torch.Tensor:
        return view.positions.add_(1).clone()

    runner = decoder(Kept, step, backend=cpu)
    runner({"positions": [5, 6, 7, 8]})
    for _ in range(3):
        assert runner({"positions": np.array([9])}).tolist() == [10]
        assert runner.fill({"positions": [9]}).positions.tolist() == [9, 6, 7, 8]


def test_what_cannot_be_restored_is_refused() -> None:
    """A slot is rewritten or restored, not both; and one whose tail is set once cannot lose it where a step raises."""
    both = copied(TOKENS, dtype=torch.int64, pad=0, rewritten=True, restored=True)
    with pytest.raises(DeclarationErrors) as refused:
        declaration_of({"one": both, "two": copied(TOKENS, dtype=torch.int64, pad=once(1), restored=True)})
    said = "slot 'one': it is both rewritten and restored.*slot 'two': it is restored, and its tail is set once"
    assert re.search(said, str(refused.value.exceptions))


class Wide(Inputs):  # slots of one and two dims, copied, computed on either side, and written by the step
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-1)
    pairs: torch.Tensor = copied(BATCH, 3, dtype=torch.int64, pad=0)
    here: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=2, placement="host")
    count: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int64)
    twice: torch.Tensor = computed(lambda ids: ids * 2, shape=BATCH, dtype=torch.int64)
    written: torch.Tensor = output(BATCH, dtype=torch.int64)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "unsqueeze_": lambda one: one.unsqueeze_(0),
    "squeeze_": lambda one: one.squeeze_(),
    "transpose_": lambda one: one.transpose_(0, -1),
    "resize_": lambda one: one.resize_(1),
    "set_": lambda one: one.set_(torch.full_like(one, 55).untyped_storage(), 0, one.shape, one.stride()),
    "set_ whole": lambda one: one.set_(one.untyped_storage()),
    "data of another": lambda one: setattr(one, "data", torch.full_like(one, 66)),
    "data of its own": lambda one: setattr(one, "data", one.data[:1]),
    "resize_ beyond": lambda one: one.resize_(1 << 20),
    "free": lambda one: one.untyped_storage().resize_(0),
}
"""What can be done to a tensor beside writing its elements. Torch may refuse some of it."""


def spoil(tensor: torch.Tensor, how: str) -> None:
    """Do it, unless torch itself refuses."""
    with suppress(RuntimeError):
        CHANGES[how](tensor)


WAYS = [*(f"{backend} {one}" for backend in ("cpu", "cpu-capture") for one in choose("cpu").capabilities.lowerings)]
names = st.sampled_from(["ids", "pairs", "here", "count", "twice", "written", "outputs"])
turn = st.tuples(st.integers(1, 8), st.sampled_from(["run", "fill", "inputs"]), st.sampled_from([*CHANGES]), names)


@pytest.mark.parametrize("way", [*WAYS, "eager"])
@settings(max_examples=10)
@given(turns=st.lists(turn, min_size=3, max_size=8), inside=st.sampled_from(["unsqueeze_", "transpose_"]) | st.none())
def test_changed_views_and_outputs_harm_no_later_step(
    way: str, turns: list[tuple[int, str, str, str]], inside: str | None
) -> None:
    """Whatever is done to a tensor that was handed out, by the step's own code, too: later steps are right."""
    seen: list[Any] = []

    def step(view: Wide) -> torch.Tensor:  # a number of every slot, which it also leaves in the output slot
        rows = view.ids * 1000 + view.pairs.sum(1) + view.twice + view.count
        view.written.copy_(rows)
        seen.append((tuple(view.pairs.shape), tuple(view.ids.shape)))
        for slot in (view.pairs, view.ids) if inside else ():
            spoil(slot, inside or "")
        return rows

    runner = runner_by(way, Wide, step, buckets=[2, 6], output_rows=BATCH)
    for seed, (rows, what, how, name) in enumerate(turns):
        batch = batch_for(Wide, {BATCH: rows}, seed)
        if what == "inputs" and way != "eager":
            spoil(getattr(runner.inputs(6), "ids" if name == "outputs" else name), how)
        elif what == "fill":
            view = runner.fill(batch)
            assert torch.equal(view.ids[:rows], batch["ids"])
            if name != "outputs":
                spoil(getattr(view, name), how)
        outputs = runner(batch)
        assert torch.equal(outputs, batch["ids"] * 1002 + batch["pairs"].sum(1) + rows)
        if name == "outputs" and how not in ("free", "resize_ beyond"):  # which torch would free under the graph
            spoil(outputs, how)
    assert all(pairs == (*ids, 3) for pairs, ids in seen)


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_views_changed_before_a_replay_move_no_memory(way: str, trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors that a capture saw are not handed out: changed ones are no moved memory, with either guard."""
    monkeypatch.setattr("slotgraph.dataflow.guard._IS_TRUSTED", trusted)
    runner = runner_by(way, Wide, lambda view: view.ids * 1000 + view.count, buckets=[2, 6], output_rows=BATCH)
    for rows, look in ((1, runner.fill), (5, lambda _: runner.inputs(6))):
        batch = batch_for(Wide, {BATCH: rows}, rows)
        spoil(look(batch).ids, "set_")
        assert torch.equal(runner(batch), batch["ids"] * 1000 + rows)


def test_a_break_that_changes_its_view_sees_it_unchanged_next_time(cpu: str) -> None:
    """Code that runs between graphs, in each step, sees its view unchanged each time."""
    shapes = []

    @graph_break
    def between(hidden: torch.Tensor, view: Prefill) -> torch.Tensor:
        shapes.append((view.extend_seq_lens.dim(), view.positions.dim()))
        out = torch.add(hidden * view.extend_seq_lens.shape[0], view.positions.sum())
        spoil(view.extend_seq_lens, "unsqueeze_")
        spoil(view.positions, "transpose_")
        spoil(view.out_cache_loc, "data of its own")
        return out

    runner, eager = around(lambda hidden, view: between(hidden * 2, view) + 1, cpu)
    shapes.clear()  # of captures, which run it several times on one view
    assert_equal(runner, eager, torch.device("cpu"), 1, 2)
    assert set(shapes) == {(1, 1)}


@pytest.mark.parametrize("way", [*WAYS, "eager", "no copy"])
def test_a_function_that_changes_what_it_reads_is_refused(way: str) -> None:
    """A function that writes a slot which it is given to read is refused with both names, in each step alike."""
    changes: Any = (lambda one: one.add_(100), lambda one: one.unsqueeze_(0), lambda one: one.resize_(1))
    placements: tuple[Any, ...] = ("host", "device")
    for change, placement in itertools.product(changes, placements):
        total = computed(lambda here, of=change: int(of(here).sum()), shape=1, dtype=torch.int64, placement=placement)
        here = copied(BATCH, dtype=torch.int64, pad=2, placement="host")
        inputs = declaration_of({"ids": copied(BATCH, dtype=torch.int64, pad=-1), "here": here, "total": total})
        runner = runner_by(way, inputs, lambda view: view.total * 1, output_rows=None)
        for _ in range(3):
            with pytest.raises(ComputeError, match="slot 'total': its function changes 'here'"):
                runner({"ids": torch.tensor([1, 2]), "here": torch.tensor([5, 7])})


@pytest.mark.parametrize("way", WAYS)
def test_rows_beyond_those_of_a_batch_in_place_leave_no_tail_dirty(way: str) -> None:
    """A producer that writes more rows than it brings, through the view of an earlier fill, leaves no tail dirty."""
    inputs = declaration_of({"ids": copied(BATCH, dtype=torch.int64, pad=-1)})
    runner = runner_by(way, inputs, lambda view: view.ids * 1, output_rows=None)
    view = runner.fill({"ids": torch.tensor([1, 2])})
    for number in range(3):
        view.ids[:] = number
        assert runner({"ids": view.ids[:2]})[2:].tolist() == [-1, -1]
