"""Keys of `steps()` that come back: whatever leaves and joins, `tokens()` has the rows that count, and no others."""

import random
from typing import Any

import pytest
import torch

from slotgraph import BATCH, DecodeRunner, Inputs, copied
from slotgraph.extend import LaunchedStep
from tests.runners.models import decoder

MOST = 4


class Tagged(Inputs):  # a number for each life, and the number of its step
    life: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-1)
    turn: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-1, then=lambda turn: turn + 1)


def tagged(backend: str, **options: Any) -> DecodeRunner[Tagged]:
    """A captured runner whose rows name their life and their step."""
    made: DecodeRunner[Tagged] = decoder(
        Tagged,
        lambda view: view.life * 1000 + view.turn,
        backend=backend,
        buckets=(2, MOST),
        output_rows=BATCH,
        **options,
    )
    return made


def begun(*lives: int) -> dict[str, list[int]]:
    """Lives in their first step."""
    return {"life": [*lives], "turn": [0] * len(lives)}


def test_tokens_of_an_earlier_step_can_be_asked_for() -> None:
    """They can be asked for as long as the step's outputs can be read."""
    steps = tagged("cpu-capture").steps({"life": [1, 2], "turn": [0, 0]}, keys=["a", "b"], ahead=1)
    first = next(steps)
    first.leave(["a"], now=False)  # after steps 0 and 1
    second = next(steps)
    third = next(steps)
    assert second.tokens() == [("a", 1001), ("b", 2001)]
    assert third.tokens() == [("b", 2002)]


class Lives:
    """What each life's rows must be, whatever key it has.

    begins: by life its first step. ends: by life the step without it. dropped: lives whose rows count no more.
    """

    def __init__(self) -> None:
        self.begins, self.ends, self.dropped = dict[int, int](), dict[int, int](), set[int]()
        self.alive, self.left_in = dict[str, int](), dict[str, int]()

    def enter(self, names: list[str], step: int) -> dict[str, list[int]]:
        """Begin a life for each name; its rows."""
        made = [*range(len(self.begins) + 1, len(self.begins) + 1 + len(names))]
        self.begins.update(dict.fromkeys(made, step))
        self.alive.update(zip(names, made, strict=True))
        return begun(*made)

    def leave(self, step: LaunchedStep, names: list[str], *, now: bool) -> None:
        """End the lives of these names."""
        step.leave(names, now=now)
        for name in names:
            life = self.alive.pop(name)
            self.ends[life] = self.left_in[name] = step.lands
            self.dropped |= {life} if now else set()

    def check(self, step: LaunchedStep) -> None:
        """Compare a step's rows with those that count."""
        found = [divmod(token, 1000) for _, token in step.tokens()]
        assert all(self.begins[life] + turn == step.number for life, turn in found)
        due = {
            life
            for life, begin in self.begins.items()
            if begin <= step.number < self.ends.get(life, step.number + 1) and life not in self.dropped
        }
        assert {life for life, _ in found} == due


@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize("lowering", ["foreach", "in_graph", "fused"])
def test_tokens_have_the_rows_that_count_in_any_order_of_lives(lowering: str, ahead: int) -> None:
    """Random ends, known ahead or not, and keys that come back as soon as they may."""
    runner = tagged("cpu-capture", lowering=lowering)
    for seed in range(12):
        draw = random.Random(seed)
        model = Lives()
        for step in runner.steps(model.enter(["a", "b"], 0), keys=["a", "b"], ahead=ahead):
            model.check(step)
            if step.number > 25:
                model.leave(step, [*model.alive], now=True)
                continue
            ending = [name for name in model.alive if draw.random() < 0.25][: len(model.alive) - 1]
            for name in ending:
                model.leave(step, [name], now=draw.random() < 0.4)
            free = [one for one in "abcde" if one not in model.alive and model.left_in.get(one, -1) < step.lands]
            names = [name for name in free if draw.random() < 0.5][: MOST - len(model.alive)]
            if names:
                step.join(model.enter(names, step.lands), names)
        assert len(model.begins) > 10
