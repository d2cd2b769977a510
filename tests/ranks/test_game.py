"""A game of ranks that fail at random, in calls and in loops: none waits in vain, and no two steps are mixed up."""

import contextlib
import gc
import os
import pathlib
import random
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import attrs
import pytest
import torch
import torch.distributed as dist

from slotgraph import BATCH, TOKENS, DecodeRunner, EagerRunner, Inputs, copied
from slotgraph.runners.ranks import group
from tests.ranks.processes import Processes, ranks
from tests.ranks.stepping import OVER, Unreadable, soon

CALLS: Final = ("", "", "refused", "raises", "interrupted", "key", "vouched")
LOOPS: Final = ("", "", "body", "raises", "closed", "dropped", "cycle", "held", "begin")
LATE: Final = ("key", "held", "cycle")
"""What equal ranks hear of when they have run more steps, which in earnest would wait for the other's collectives."""
NEVER: Final = ("did not come", "wrong", "are lost", "do not run the same steps")
LAST: Final = 5
"""The step of a loop in which all requests leave."""
THOROUGH: Final = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


class Grown(Inputs):
    """Requests that count."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1, then=lambda ids: ids + 1)
    weights: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0.5)


class Faulty:
    """A step that raises in one of its runs, if it is asked to."""

    def __init__(self) -> None:
        self.left = -1
        self.error: BaseException = ValueError("lost a page")

    def __call__(self, view: Any) -> torch.Tensor:
        """What each request has."""
        self.left -= 1
        if self.left == 0:
            raise self.error
        out: torch.Tensor = view.ids * 3 + 1
        return out


@attrs.frozen
class Turn:
    """One round of all ranks. kind: a call or a loop. which: the runner. faults: by rank."""

    number: int
    kind: str
    which: int
    faults: tuple[str, ...]
    at: int  # the step of the loop in which it happens
    ahead: int
    is_ahead: bool

    def is_idle(self, rank: int) -> bool:
        """Whether a rank has no request."""
        return self.kind == "idle" and rank > 0 and not self.faults[rank]


def drawn(seed: int, size: int, rounds: int, *, alike: bool = False, equal: bool = False) -> list[Turn]:
    """Rounds at random, the same for all who draw them: a third without a fault, and three of those at the end."""
    draw, found = random.Random(seed), list[Turn]()
    for number in range(1, rounds + 1):
        kind, calm = draw.choice(["call", "call", "eager", "idle", "loop", "loop"]), draw.random() < 0.35
        known = [one for one in (LOOPS if kind == "loop" else CALLS) if alike or not equal or one not in LATE]
        faults = [draw.choice(known) for _ in range(size)]
        if alike:
            faults = faults[:1] * size
        if calm or number > rounds - 3:
            faults = [""] * size
        which, at, ahead = (draw.randrange(2) for _ in range(3))
        if found and {"held", "cycle"}.intersection(found[-1].faults):  # a call of the runner ends a loop that is kept
            kind, which = draw.choice(["call", "loop"]), found[-1].which
            faults = [""] * size
        found.append(Turn(number, kind, which, tuple(faults), 1 + 2 * at, 2 * ahead, draw.random() < 0.3))
    return found


class Player:
    """One rank of the game."""

    def __init__(self, rank: int, over: str, lowering: str, *, equal: bool) -> None:
        self.rank, self.equal, self.steps = rank, equal, [Faulty() for _ in range(3)]
        self.ranks = soon(over, equal=equal)
        options: dict[str, Any] = {"ranks": self.ranks, "backend": "cpu"}
        self.runners: list[Any] = [
            DecodeRunner(Grown, step, buckets=(16, 64), lowering=lowering, progress=False, **options)
            for step in self.steps[:2]
        ]
        for runner in self.runners:
            runner.capture()
        self.runners.append(EagerRunner(Grown, self.steps[2], **options))
        self.kept = list[Any]()

    def sizes(self, turn: Turn) -> tuple[int, ...]:
        """How many requests each rank brings to a round: other rounds have other sizes."""
        others = range(self.ranks.size)
        found = [1 + (turn.number * 7 + 11 * rank * (not self.equal)) % 60 for rank in others]
        return tuple(0 if rank and turn.is_idle(rank) and not self.equal else found[rank] for rank in others)

    def batch(self, turn: Turn, fault: str = "") -> Any:
        """The batch of a round."""
        rows = self.sizes(turn)[self.rank]
        given = {"ids": torch.arange(rows), "weights": torch.ones(rows)}
        if fault == "refused":
            given["weights"] = torch.ones(rows, 3)
        return Unreadable(given) if fault == "key" else given

    def is_paired(self, turn: Turn) -> bool:
        """Whether the ranks brought this very round to the step that was run last."""
        return self.equal or self.ranks.live(BATCH) == self.sizes(turn)

    def call(self, turn: Turn, fault: str) -> str:
        """One call; nothing where it is right."""
        place = 2 if turn.kind == "eager" else turn.which
        runner, step = self.runners[place], self.steps[place]
        step.left = 1 if fault in ("raises", "interrupted") else -1
        step.error = KeyboardInterrupt("in a step") if fault == "interrupted" else ValueError("lost a page")
        batch = self.batch(turn, fault)
        if turn.is_ahead and not self.equal and fault != "refused":
            runner.agree_ahead(batch if turn.at == 1 else self.batch(turn))  # a key may be pressed over either
            if fault == "vouched":
                batch["ids"] = batch["ids"].to(torch.complex64)
        out = runner(batch)
        right = torch.equal(out, torch.arange(len(out)) * 3 + 1) and self.is_paired(turn)
        return "" if right else f"wrong: {out}, {self.ranks.live_sizes}"

    def loop(self, turn: Turn, fault: str) -> str:
        """One loop of steps, which this rank may leave."""
        runner, step = self.runners[turn.which], self.steps[turn.which]
        step.left = -1
        loop = runner.steps(self.batch(turn, "refused" if fault == "begin" else ""), ahead=turn.ahead)
        if fault == "dropped":
            return "left"
        for one in loop:
            rows = [row for _, row in one.tokens()]
            right = rows == [3 * (key + one.number) + 1 for key, _ in one.tokens()]
            if not right or (one.number <= LAST and not self.is_paired(turn)):
                return f"wrong: {one.number}, {rows}, {self.ranks.live_sizes}"
            if one.number == turn.at and fault:
                step.left = 1 if fault == "raises" else -1
                step.error = ValueError("lost a page")
                self.leave(fault, loop)
            if one.number == LAST:
                one.leave(one.keys)
        return ""

    def leave(self, fault: str, loop: Any) -> None:
        """Do in the middle of a loop what ends it, or what keeps it beyond its end."""
        if fault == "held":
            try:
                raise KeyError("held")  # noqa: TRY301 - its traceback is what is wanted
            except KeyError as error:
                self.kept.append([error, loop])
        if fault == "cycle":
            ring: list[Any] = [loop]
            ring.append(ring)
        if fault == "closed":
            loop.close()
        if fault != "raises":
            raise KeyError(fault)

    def play(self, turn: Turn) -> str:
        """One round; what it raises."""
        fault = turn.faults[self.rank]
        for step in self.steps:
            step.left = -1
        try:
            if turn.kind == "loop":
                return self.loop(turn, fault)
            if turn.is_idle(self.rank) and not self.equal:
                out = self.runners[turn.which].idle()
                return "" if out is not None and self.is_paired(turn) else f"wrong: idle, {out}"
            return self.call(turn, fault)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the game looks at it
            return f"{type(error).__name__}: {error}"


def played(rank: int, turns: list[Turn], over: str, lowering: str, equal: bool) -> list[str]:
    """What each round says."""
    player, found = Player(rank, over, lowering, equal=equal), list[str]()
    draw = random.Random(rank)
    with _looking_always() if equal else contextlib.nullcontext():
        for turn in turns:
            found.append(player.play(turn))
            if draw.random() < 0.2:
                player.kept.clear()
                gc.collect()
            if equal:
                dist.barrier()  # as the collectives of such steps do
    return found


@contextlib.contextmanager
def _looking_always() -> Iterator[None]:
    with mock.patch.object(group, "CHECK_INTERVAL", 0.0):
        yield


def judge(turns: list[Turn], found: list[list[str]], *, equal: bool, alike: bool) -> None:
    """All ranks ran each round that is free of faults, as those before it are, and no rank waited in vain.

    Args:
        turns: The rounds.
        found: What each rank raised in each round.
        equal: Whether ranks exchange nothing. A rank may then hear of a fault one round late and fail for it in a round
            that the others have run already, as no collective keeps them together: they hear of that in the next one.
        alike: Whether all ranks fail in the same way, so that none hears of the others.
    """
    faulty = [any(turn.faults) for turn in turns]
    for number, (turn, *said) in enumerate(zip(turns, *found, strict=True)):
        where = (turns[max(number - 2, 0) : number + 1], said)
        assert not any(bad in one for one in said for bad in NEVER), where
        if not any(faulty[max(number - 1 - equal, 0) : number + 1]):
            assert not any(said), where
        if alike:
            assert not any("RankError" in one for one in said), where
        if not any(turn.faults):
            assert all(one == "" or one.startswith("RankError: ") for one in said), where


SEEDS: Final = 6 if THOROUGH else 2
ROUNDS: Final = 60 if THOROUGH else 40


def game(group: Processes, over: str, first: int, *, equal: bool = False, alike: bool = False) -> None:
    """Some games, each by another lowering."""
    for seed in range(first, first + SEEDS):
        lowering = ("foreach", "in_graph", "fused")[seed % 3]
        turns = drawn(seed, len(group.processes), ROUNDS, equal=equal, alike=alike)
        judge(turns, group.run(played, turns, over, lowering, equal), equal=equal, alike=alike)


@pytest.mark.parametrize("over", OVER)
def test_two_ranks_never_wait_in_vain(two: Processes, over: str) -> None:
    """Calls, idle calls, calls told ahead, loops by graphs and by calls."""
    game(two, over, 0)


@pytest.mark.parametrize("over", OVER)
def test_three_ranks_never_wait_in_vain(tmp_path: pathlib.Path, over: str) -> None:
    """The same, where some fail in one step and others in the next."""
    with ranks(3, tmp_path) as three:
        game(three, over, 100)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("alike", [False, True])
def test_equal_ranks_never_wait_in_vain(two: Processes, over: str, alike: bool) -> None:
    """Ranks that exchange nothing as long as none fails."""
    game(two, over, 200, equal=True, alike=alike)
