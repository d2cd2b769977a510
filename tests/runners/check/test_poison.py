"""Poison: what a tail bears, which parts are poisoned, how the guilty slot is told, and fills unlike the oracle."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from slotgraph import BATCH, CACHE_LOC, TOKENS, Axis, Inputs, Step, constant, copied, keep, output, staged
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import DeclarationErrors
from slotgraph.extend import once
from slotgraph.runners.check.replays import PoisonPair, poison_pair
from tests.runners.check.test_planted import OURS, found_by, runner_of, sound
from tests.runners.models import PlainInputs, plain_runner, random_batch
from tests.runners.standard.batches import CLASSES
from tests.strategies import draw, noise

if TYPE_CHECKING:
    from slotgraph.backends import Backend

STEPS = Axis("STEPS", fixed=True)
PAGES = Axis("PAGES")
SIZES = Step({BATCH: 2, TOKENS: 4, PAGES: 1, STEPS: 6}, {BATCH: 4, TOKENS: 8, PAGES: 3, STEPS: 6})


class Rules(Inputs):  # a slot for each way to say what a tail bears
    floats: torch.Tensor = copied(BATCH, dtype=torch.float16, pad=1)
    whole: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=-1)
    steps: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=STEPS, poison=(STEPS, 0))
    flags: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=False)
    places: torch.Tensor = copied(BATCH, dtype=CACHE_LOC, pad=0)
    asked: torch.Tensor = copied(BATCH, dtype=CACHE_LOC, pad=0, poison="stale")
    kept_places: torch.Tensor = copied(BATCH, dtype=CACHE_LOC, pad=keep("no one writes there"))
    first_places: torch.Tensor = copied(BATCH, dtype=CACHE_LOC, pad=once(0))
    held: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, poison=())
    unread: torch.Tensor = copied(BATCH, dtype=torch.uint8, pad=keep("no one"))
    dropped: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=keep("dropped"), poison="stale")
    unread_floats: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=keep("no one"))
    set_once: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=once(7.0))
    written: torch.Tensor = staged(BATCH, dtype=torch.float64, pad=0)
    fixed: torch.Tensor = constant(1, shape=BATCH, dtype=torch.int32)
    made: torch.Tensor = output(BATCH, dtype=torch.int16)


BEARS: dict[str, PoisonPair | None] = {
    "floats": ((math.nan,), (65504.0, -65504.0, math.inf)),
    "whole": ((5, 6, -1), (-1, 6, 5)),
    "steps": ((6, 0), (0, 6)),
    "flags": ((True,), (False,)),
    "places": None,
    "asked": ((5, 6, 0), (0, 6, 5)),
    "kept_places": ((5, 6), ((1 << 63) - 1, -(1 << 63))),  # what an earlier step left, which another request may have
    "first_places": ((5, 6, 0), (0, 6, 5)),
    "held": None,
    "unread": ((5, 6), (255, 0)),
    "dropped": ((5, 6), (6, 5)),
    "unread_floats": ((math.nan,), (torch.finfo(torch.float32).max, torch.finfo(torch.float32).min, math.inf)),
    "set_once": ((5.0, 6.0, 7.0), (7.0, 6.0, 5.0)),
    "written": ((math.nan,), (torch.finfo(torch.float64).max, torch.finfo(torch.float64).min, math.inf)),
    "fixed": None,
    "made": ((-(1 << 15),), ((1 << 15) - 1, -(1 << 15))),
}


@pytest.mark.parametrize("name", BEARS)
def test_what_a_tail_bears(name: str) -> None:
    """By rule and dtype, unless the slot says otherwise. Live rows are 5 and 6."""
    slot, expected = Rules.slotgraph.slots[name], BEARS[name]
    dtype = slot.dtype if isinstance(slot.dtype, torch.dtype) else torch.int64
    found = poison_pair(slot, torch.tensor([5, 6, 1, 1]).to(dtype), SIZES, Capabilities())
    assert repr(found) == repr(expected)  # by text, since NaN is not itself


@pytest.mark.parametrize("name", ["req_pool_indices", "out_cache_loc", "out_cache_loc_swa", "mamba_track_indices"])
def test_standard_slots_that_say_where_to_write(name: str) -> None:
    """In every standard declaration they are held to their pad, which a reserved row is kept for."""
    classes = [inputs for inputs in CLASSES.values() if name in inputs.slotgraph.slots]
    assert classes
    for inputs in classes:
        assert poison_pair(inputs.slotgraph.slots[name], torch.tensor([5, 6, 0, 0]), SIZES, Capabilities()) is None


def test_poison_that_no_slot_can_hold() -> None:
    """A value that does not fit, and a word that is none, are faults of the declaration."""
    with pytest.raises(DeclarationErrors) as caught:

        class Faulty(Inputs):
            one: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, poison=(0, 0.5))
            two: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, poison="old")  # type: ignore[arg-type]

    said = sorted(str(error) for error in caught.value.exceptions)
    assert "slot 'one': 0.5 does not fit int32" in said[0]
    assert "slot 'two': poison='old': say a tuple of the values that its tail may hold, or 'stale'" in said[1]


def _batch(rows: int) -> dict[str, torch.Tensor]:
    whole = {name: draw(1, 3, (rows,), 7 + at) for at, name in enumerate(("ids", "positions", "seen", "lens"))}
    floats = {name: noise((rows,), torch.float32, 7).abs() + 1 for name in ("weights", "temperatures")}
    flags, places = torch.zeros(rows, dtype=torch.bool), torch.arange(rows) + 1
    return {**whole, **floats, "lens": whole["lens"].int(), "flags": flags, "places": places}


BLAMED: list[tuple[Callable[[Any], Any], list[str | None], str]] = [
    (
        lambda view: sound(view) + (view.flags[-1] & (view.ids[-1] != 0)),
        [None],
        "when the tails of slots 'ids', 'flags' held other values together",
    ),
    (
        lambda view: sound(view) * view.weights.amax() + view.temperatures.amin() * view.flags.any(),
        ["weights", "flags"],
        "held True instead of False",
    ),
]


@pytest.mark.parametrize(("step", "slots", "said"), BLAMED, ids=["together", "each alone"])
def test_several_slots(cpu: str, step: Callable[[Any], Any], slots: list[str | None], said: str) -> None:
    """Each slot that makes a difference in one replay is named; if none does by itself, the fewest that do together."""
    found = found_by("poison", runner_of(step, cpu), [_batch(3)])
    assert [finding.slot for finding in found] == slots
    assert said in found[-1].message


def test_spared_slots(backend: "Backend") -> None:
    """A slot that was found guilty is held to its rule afterwards, so that others are still looked for."""
    runner = runner_of(lambda view: sound(view) * view.weights.amax() + view.lens.sum(), backend)
    assert {finding.slot for finding in found_by("poison", runner)} == {"weights", "lens"}


def test_device_that_stops(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing can be filled after a step that raised, the slot that was poisoned last is blamed, and no other."""
    bug = next(one for one in OURS if one.fatal)
    runner = runner_of(bug.step, cpu)
    fill, replay, raised = type(runner).fill, type(runner).replay, list[Exception]()

    def stopping(self: Any, view: Any) -> Any:
        try:
            return replay(self, view)
        except Exception as error:
            raised.append(error)
            raise

    def stopped(self: Any, batch: Any, **side: Any) -> Any:
        if raised:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return fill(self, batch, **side)

    monkeypatch.setattr(type(runner), "replay", stopping)
    monkeypatch.setattr(type(runner), "fill", stopped)
    (found,) = found_by("poison", runner, [_batch(3)] * 2)
    assert found.slot == "lens"
    assert "when the tail of slot 'lens' held poison; nothing could be replayed after that" in found.message


@pytest.mark.parametrize(("row", "said"), [(3, "row 3 (its tail)"), (1, "row 1 (a live row)")], ids=["tail", "live"])
def test_fill_that_is_not_the_oracles(cpu: str, monkeypatch: pytest.MonkeyPatch, row: int, said: str) -> None:
    """A lowering that forgets a tail, or writes a wrong live row, is told from one that leaves the right bytes."""
    runner = plain_runner(cpu)
    fill = type(runner).fill
    assert found_by("poison", runner, [random_batch(3, 5)]) == []

    def wrong(self: Any, batch: Any, **side: Any) -> PlainInputs:
        view: PlainInputs = fill(self, batch, **side)
        view.ids[row] = 33
        return view

    monkeypatch.setattr(type(runner), "fill", wrong)
    found = found_by("poison", runner, [random_batch(3, 5)])[0]
    assert found.slot == "ids"
    assert f"slot 'ids', {said}: it holds 33, and the oracle's " in found.message
