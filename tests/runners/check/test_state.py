"""States are found, whatever writes them, and put back; what is too large is refused with all put back."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, Inputs, copied
from slotgraph.backends import choose
from slotgraph.dataflow.errors import CheckError
from slotgraph.runners.check.trial import Trial
from slotgraph.runners.engine import state as states
from slotgraph.runners.engine.sampling import Sample
from slotgraph.runners.engine.state import State
from tests.runners.models import bytes_of, decoder, plain_runner, random_batch
from tests.strategies import noise

if TYPE_CHECKING:
    from slotgraph.backends import Backend

CPU = choose("cpu")


@torch.library.custom_op("slotgraph_tests::bump", mutates_args=["kept"])
def _bump(kept: torch.Tensor, rows: torch.Tensor) -> None:  # an operator that writes what it is given
    kept[rows] += 1


WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda kept: kept.add_(1),
    "a part": lambda kept: kept[2:4, 1].mul_(3),
    "index_put_": lambda kept: kept.__setitem__(torch.tensor([1, 5], device=kept.device), 7.0),
    "index_copy_": lambda kept: kept.index_copy_(0, torch.tensor([3], device=kept.device), kept[:1] + 1),
    "out=": lambda kept: torch.add(kept, 2, out=kept),
    "foreach": lambda kept: torch.ops.aten._foreach_add_.Scalar([kept[:2], kept[4:]], 1.5),
    "custom operator": lambda kept: _bump(kept, torch.tensor([0, 2], device=kept.device)),
    "data": lambda kept: kept.data.add_(1),
    "bytes": lambda kept: kept.view(torch.uint8).bitwise_xor_(255),
    "columns": lambda kept: kept.__setitem__((slice(None), torch.tensor([1, 3], device=kept.device)), 7.0),
    "pairs": lambda kept: kept.__setitem__((torch.tensor([1, 5]), torch.tensor([0, 2])), 7.0),
    "mask": lambda kept: kept.masked_fill_(kept > 0, -1).__setitem__(kept < -0.5, 3.0),
    "one row": lambda kept: kept.__setitem__(torch.tensor(2, device=kept.device), 7.0),
    "index_add_ to a column": lambda kept: kept.index_add_(
        -1, torch.tensor([2, 2], device=kept.device), kept[:, :2] + 9
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["plain", "no_grad", "inference"])
def test_every_way_to_write(backend: "Backend", way: str, mode: str) -> None:
    """It is found whole, or exactly, under any mode, and is again what it was after a run within `kept`."""
    if way == "mask" and backend.device.type == "npu":
        pytest.skip("the stand-in for its runtime has no NonZero")
    modes = {"plain": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    for exact in (False, True):
        with modes[mode]():
            kept = torch.randn(6, 4, device=backend.device)
            before = kept.clone()
            found = State.found(backend, [], functools.partial(WAYS[way], kept), exact=exact)
            assert torch.equal(kept, before)
            with found.kept():
                WAYS[way](kept)
                assert not torch.equal(kept, before)
                if not exact:
                    kept.zero_()
            assert torch.equal(kept, before)
        assert exact or [piece.nbytes for piece in found.pieces] == [kept.untyped_storage().nbytes()]
        assert "[" in found.pieces[0].label.partition("that ")[0]


def test_what_is_made_within_the_run_is_no_state() -> None:
    """Tensors of the run, views of them, numbers made tensors, and reads of others."""
    weights, numbers = torch.randn(4, 4), [1.0, 2.0, 3.0, 4.0]

    def run() -> torch.Tensor:
        hidden = torch.zeros(4, 4)
        hidden[1:3].copy_(weights[1:3])
        made = torch.tensor(numbers)
        made.add_(1)
        return hidden.addmm_(weights, weights) + made

    assert State.found(CPU, [], run).pieces == ()


def test_slots_are_no_state(backend: "Backend") -> None:
    """What lies in a slot's range of addresses is not kept, though a neighbour in the same storage is."""
    whole = torch.randn(96, device=backend.device)
    slot, left, right = whole[32:64], whole[:32], whole[64:]
    low = slot.data_ptr()
    found = State.found(backend, [(low, low + slot.nbytes)], lambda: [slot.add_(1), right.add_(1)])
    assert [piece.memory.data_ptr() for piece in found.pieces] == [left.data_ptr(), right.data_ptr()]
    assert [piece.nbytes for piece in found.pieces] == [left.nbytes, right.nbytes]
    with found.kept():
        whole.fill_(3)
    assert torch.equal(slot, torch.full_like(slot, 3))
    assert not torch.equal(left, torch.full_like(left, 3))


def test_too_large_is_refused_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written before is put back, the large one is never written, and the message says what to do."""
    monkeypatch.setattr(states, "_free_on", lambda *_: 4000)
    small, large = torch.randn(10), torch.randn(1000)
    kept = small.clone(), large.clone()

    def run() -> None:
        small.add_(1)
        with pytest.raises(CheckError):  # as a step may
            large.add_(1)

    said = r"changes 3\.9 KiB on cpu besides its slots \(.*float32 tensor of shape \[1000\].*\), .*50%.*give state="
    with pytest.raises(CheckError, match=said):
        State.found(CPU, [], run)
    assert torch.equal(small, kept[0])
    assert torch.equal(large, kept[1])
    fits = State.of(CPU, [large[:100]])
    with fits.kept():
        large.zero_()
    assert torch.equal(large[:100], kept[1][:100])
    fits.check_room(5)
    with pytest.raises(CheckError, match=r"changes 400 B .* 6 copies"):
        fits.check_room(6)


def test_what_was_made_smaller_is_told() -> None:
    """Memory that somebody shrank cannot be put back, and is not written past its end."""
    kept = torch.randn(100)
    found = State.found(CPU, [], lambda: kept.add_(1))
    kept.untyped_storage().resize_(40)
    with pytest.raises(CheckError, match="has become smaller"), found.kept():
        pytest.fail("it was not kept")


def test_state_of_a_runner(cpu: str) -> None:
    """A cache that the step closes over is found, with the operator that writes it; the fill and the slots are none."""

    def found_on(runner: Any, batch: Any) -> State:
        trial = Trial(runner, runner.graphs)
        trial.fill(Sample(batch, {}))
        return trial.find_state()

    assert found_on(plain_runner(cpu), random_batch(3, 3)).pieces == ()
    cache = torch.randn(64, 2)

    class Cached(Inputs):
        places: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, rewritten=True)

    def step(view: Any) -> torch.Tensor:
        cache[view.places] += 1
        view.places.add_(1)
        return cache[view.places]

    runner = decoder(Cached, step, backend=cpu)
    before = cache.clone()
    found = found_on(runner, {"places": torch.tensor([5, 9, 33])})
    assert torch.equal(cache, before)
    (piece,) = found.pieces
    assert piece.label == "the float32 tensor of shape [64, 2] that aten::index_put_ writes"


_name = st.sampled_from(["add", "part", "copy", "zero", "read", "swap"])
programs = st.lists(st.tuples(_name, st.integers(0, 3), st.integers(0, 3), st.integers(0, 4)), max_size=8)


def play(program: list[tuple[str, int, int, int]], held: list[torch.Tensor]) -> None:
    """Run operators in any order on tensors in any order, and on parts of them."""
    made = torch.ones(5)
    for name, first, second, at in program:
        one, other = held[first], held[second]
        if name == "add":
            one.add_(other)
        elif name == "part":
            one[at:].mul_(2)
        elif name == "copy":
            made.copy_(one)
            other[:at].copy_(made[:at])
        elif name == "zero":
            one.view(5, 1)[at].zero_()
        elif name == "read":
            made = made + one * other
        else:
            made[at:].sub_(one[at:])


@settings(max_examples=min(200, settings().max_examples))
@given(program=programs, seed=st.integers(0, 1 << 20))
def test_any_program(program: list[tuple[str, int, int, int]], seed: int) -> None:
    """After it was looked at, all is as before; what a run then changes is in the state, and comes back."""
    held = [noise((5,), torch.float32, seed + at) for at in range(4)]
    before = [bytes_of(one) for one in held]
    found = State.found(CPU, [], lambda: play(program, held))
    assert [bytes_of(one) for one in held] == before
    with found.kept():
        play(program, held)
        changed = {one.data_ptr() for one, kept in zip(held, before, strict=True) if bytes_of(one) != kept}
    assert changed <= {piece.memory.data_ptr() for piece in found.pieces}
    assert [bytes_of(one) for one in held] == before
