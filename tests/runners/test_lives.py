"""Keys of `steps()` that come back: whatever leaves and joins, `tokens()` has the rows that count, and no others."""

import random
from collections import defaultdict
from typing import Any

import pytest
import torch

from slotgraph import BATCH, DecodeRunner, Inputs, copied

MOST = 4


class Tagged(Inputs):  # a number for each life, and the number of its step
    life: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-1)
    turn: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-1, then=lambda turn: turn + 1)


def tagged(backend: str, **options: Any) -> DecodeRunner[Tagged]:
    """A captured runner whose rows name their life and their step."""
    runner = DecodeRunner(
        Tagged,
        lambda view: view.life * 1000 + view.turn,
        backend=backend,
        buckets=(2, MOST),
        output_rows=BATCH,
        **options,
    )
    runner.capture()
    return runner


def begun(*lives: int) -> dict[str, list[int]]:
    """Lives in their first step."""
    return {"life": [*lives], "turn": [0] * len(lives)}


def test_a_key_that_leaves_twice_before_its_first_rows_are_read() -> None:
    """Rows of both lives count where both ends were known ahead."""
    seen = list[int]()
    for step in tagged("cpu-capture").steps({"life": [1, 2], "turn": [0, 0]}, keys=["a", "b"], ahead=3):
        seen += [token for key, token in step.tokens() if key == "a"]
        if step.number == 0:
            step.leave(["a"], now=False)  # after steps 0 to 3
        if step.number == 1:
            step.join(begun(3), ["a"])  # from step 5 on
        if step.number == 2:
            step.leave(["a"], now=False)  # after that one
        if step.number == 8:
            step.leave(["b"])
    assert seen == [1000, 1001, 1002, 1003, 3000]


def test_tokens_of_an_earlier_step() -> None:
    """They can be asked for as long as the step's outputs can be read."""
    steps = tagged("cpu-capture").steps({"life": [1, 2], "turn": [0, 0]}, keys=["a", "b"], ahead=1)
    first = next(steps)
    first.leave(["a"], now=False)  # after steps 0 and 1
    second = next(steps)
    third = next(steps)
    assert second.tokens() == [("a", 1001), ("b", 2001)]
    assert third.tokens() == [("b", 2002)]


@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize("lowering", ["foreach", "in_graph", "fused"])
def test_any_order_of_lives(lowering: str, ahead: int) -> None:
    """Random ends, known ahead or not, and keys that come back as soon as they may."""
    runner = tagged("cpu-capture", lowering=lowering)
    for seed in range(12):
        draw = random.Random(seed)  # noqa: S311 - a test
        begins = dict[int, int]()  # by life its first step
        ends = dict[int, int]()  # by life the step without it
        dropped = set[int]()  # lives that left at once, and their rows with them
        alive, left_in, lives = dict[str, int](), dict[str, int](), 0
        keys = ["a", "b", "c", "d", "e"]

        def enter(names: list[str], step: int) -> list[int]:
            nonlocal lives
            made = [*range(lives + 1, lives + 1 + len(names))]
            lives += len(names)
            begins.update(dict.fromkeys(made, step))
            alive.update(zip(names, made, strict=True))
            return made

        loop = runner.steps(begun(*enter(["a", "b"], 0)), keys=["a", "b"], ahead=ahead)
        read = defaultdict[int, list[int]](list)
        for step in loop:
            shown = dict(step.tokens())
            for name, token in shown.items():
                life, turn = divmod(token, 1000)
                assert begins[life] + turn == step.number, name
                read[life].append(step.number)
            due = {
                life
                for life in begins
                if begins[life] <= step.number < ends.get(life, step.number + 1) and life not in dropped
            }
            assert {token // 1000 for token in shown.values()} == due
            if step.number > 25:
                step.leave([*alive])
                dropped |= {*alive.values()}
                alive.clear()
                continue
            for name in [*alive]:
                if draw.random() < 0.25 and len(alive) > 1:
                    now = draw.random() < 0.4
                    step.leave([name], now=now)
                    life = alive.pop(name)
                    ends[life], left_in[name] = step.lands, step.lands
                    dropped |= {life} if now else set()
            room = MOST - len(alive)
            names = [name for name in keys if name not in alive and left_in.get(name, -1) < step.lands][:room]
            names = [name for name in names if draw.random() < 0.5]
            if names:
                step.join(begun(*enter(names, step.lands)), names)
        assert lives > 10
