"""A rank that breaks off is heard of at once, by name; and the call after that finds all ranks at its start."""

import gc
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from slotgraph import BATCH, EagerRunner
from tests.ranks import stepping
from tests.ranks.processes import Processes, raised
from tests.ranks.stepping import OVER, SOON, Counted, runner_on, soon
from tests.runners.steps.counting import batch, count, counting

AT_ONCE: Final = 5.0
"""Seconds within which a rank is told: far less than those after which it gives up."""
NAME: Final = "runner 1 (DecodeRunner of Counting)"
LEFT: Final = f"left its loop of steps() of {NAME}"


class Failing:
    """A step that raises once, when it is asked to."""

    def __init__(self, step: Callable[[Any], Any]) -> None:
        self.step, self.error = step, list[BaseException]()

    def __call__(self, view: Any) -> Any:
        """Run it, or raise."""
        if self.error:
            raise self.error.pop()
        return self.step(view)


def fails(rank: int, kind: str, over: str, equal: bool, error: BaseException) -> tuple[list[str], list[str], float]:
    """Calls, of which the second one's step raises on rank 1; the errors of each, until both have seen one; seconds."""
    step, made = Failing(lambda view: view.ids * 2), soon(over, equal=equal)
    if kind == "eager":
        runner: Any = EagerRunner(Counted, step, ranks=made, backend="cpu")
    else:
        runner = runner_on(made, step)
    one = stepping.batch_of(3, 1)
    found = [raised(runner, one)]
    step.error += [error] if rank else []
    try:
        found.append(raised(runner, one))
    except KeyboardInterrupt:
        found.append("KeyboardInterrupt: ")
    start = time.monotonic()
    while not (told := raised(runner, one)) and time.monotonic() < start + SOON:
        assert equal  # ranks that get the same batches look now and then
        time.sleep(0.05)
    seconds, after = time.monotonic() - start, [raised(runner, one) for _ in range(2)]
    assert torch.equal(runner(one), one["ids"] * 2)
    return [*found, told], after, seconds


@pytest.mark.parametrize(
    ("kind", "over", "equal", "error"),
    [
        ("decode", OVER[0], False, ValueError("lost a page")),
        ("decode", OVER[1], False, ValueError("lost a page")),
        ("eager", OVER[0], False, ValueError("lost a page")),
        ("decode", OVER[0], False, KeyboardInterrupt()),
        ("decode", OVER[0], True, ValueError("lost a page")),
        ("decode", OVER[1], True, ValueError("lost a page")),
        ("eager", OVER[1], True, ValueError("lost a page")),
    ],
)
def test_a_step_that_raises_is_told(two: Processes, kind: str, over: str, equal: bool, error: BaseException) -> None:
    """All are told which rank failed in what, by their next call, that rank too; the one after it is right."""
    name = "EagerRunner" if kind == "eager" else "DecodeRunner"
    told = f"RankError: rank 1 failed in a step of runner 1 ({name} of Counted): "
    for rank, (errors, after, seconds) in enumerate(two.run(fails, kind, over, equal, error)):
        assert [bool(one) for one in errors] == [False, rank == 1, True]
        assert errors[2].startswith(told)
        assert f"{type(error).__name__}: {error}" in errors[2]
        assert after == ["", ""]
        assert seconds < AT_ONCE


def refused(rank: int, over: str) -> tuple[list[str], float]:
    """Rank 1 refuses a batch: errors of that call, of the one in which equal ranks hear of it, and of two more."""
    runner, good = runner_on(soon(over, equal=True), lambda view: view.ids * 2), stepping.batch_of(3, 1)
    runner(good)
    start, found = time.monotonic(), [raised(runner, {"ids": None} if rank else good)]
    while len(found) < 2 and time.monotonic() < start + SOON:
        time.sleep(0.05)
        found += filter(None, [raised(runner, good)])
    seconds = time.monotonic() - start
    return [*found, raised(runner, good), raised(runner, good)], seconds


@pytest.mark.parametrize("over", OVER)
def test_a_batch_refused_by_an_equal_rank_is_a_failed_step(two: Processes, over: str) -> None:
    """Is a failed step: the others, who ran it, hear of it soon."""
    (first, seconds), (second, _) = two.run(refused, over)
    assert (first[0], first[2:], second[2:]) == ("", ["", ""], ["", ""])
    assert (
        first[1]
        == second[1]
        == f"RankError: rank 1 failed in a step of runner 1 (DecodeRunner of Counted): {second[0]}"
    )
    assert seconds < AT_ONCE


def take_two(loop: Iterator[Any]) -> None:
    """Take the first two steps."""
    for _ in range(2):
        next(loop)


def held(loop: Iterator[Any]) -> list[Any]:
    """What an error keeps whose traceback holds a loop."""
    found = list[Any]()
    try:
        take_two(loop)
        raise KeyError("held")  # noqa: TRY301 - its traceback is what is wanted
    except KeyError as error:
        found.append(error)
    return found


def in_cycle(loop: Iterator[Any]) -> list[Any]:
    """Garbage that holds a loop, until it is collected."""
    next(loop)
    found: list[Any] = [loop]
    found.append(found)
    return []


def closed(loop: Any) -> list[Any]:
    """Close it."""
    take_two(loop)
    loop.close()
    return []


def drive(loop: Iterator[Any], how: str, step: Failing) -> None:
    """Take steps, and leave in the fifth by a break, by what its body raises, or by what its step raises."""
    for one in loop:
        assert one.tokens()
        if one.number == 4:
            if how == "body":
                raise KeyError("not mine")
            if how == "break":
                break
            step.error += [ValueError("lost a page")] if how == "step" else []
            if how == "join":
                one.join(batch(4), ["c", "d"])


KEEPING: Final[dict[str, Callable[[Any], list[Any]]]] = {
    "held": held,
    "cycle": in_cycle,
    "closed": closed,
    "dropped": lambda _: [],
}
"""How a loop is left other than in its body; what holds it then."""


def ends(loop: Iterator[Any], pause: float) -> str:
    """What ends a loop on a rank that goes on with it; nothing if nothing does, soon."""
    start, told = time.monotonic(), ""
    while not told and time.monotonic() < start + SOON:
        told = raised(next, loop)
        time.sleep(pause)
    return told


def paired(runner: Any, rank: int, equal: bool) -> list[Any]:
    """Four calls of sizes by rank and number, and whether each is run with the other rank's of this number."""
    found = list[Any]()
    for number in range(4):
        sizes = [1 + (2 * one + 3 * number) % 5 for one in range(2)]
        error = raised(runner, batch(*range(sizes[rank])))
        found.append(error or (equal or runner.stage.declaration.ranks.live(BATCH) == tuple(sizes)))
    return found


def leaves(rank: int, how: str, over: str, options: dict[str, Any]) -> tuple[str, list[Any], float]:
    """Rank 1 leaves a loop in one of many ways; what ends rank 0's loop, and what both say in the calls after."""
    step, equal = Failing(count), options.get("equal", False)
    runner: Any = counting("cpu", step, ranks=soon(over, equal=equal), lowering=options.get("lowering", "foreach"))
    loop, told, kept = runner.steps(batch(1, 2), keys=["a", "b"], ahead=options.get("ahead", 0)), "", list[Any]()
    start = time.monotonic()
    if rank == 0:
        told = ends(loop, 0.02 if equal else 0.0)
    elif how in KEEPING:
        kept = KEEPING[how](loop)
    else:
        told = raised(drive, loop, how, step)
    del loop
    after = paired(runner, rank, equal)
    gc.collect()
    steps = itertools.islice(runner.steps(batch(5), keys=["z"]), 3)
    after.append([[key for key, _ in one.tokens()] for one in steps] == [["z"]] * 3)
    del kept
    return told, after, time.monotonic() - start


WAYS: Final = {
    "body": "",
    "break": "",
    "step": ": ReplayError: the step raised ValueError: lost a page",
    "join": "",
    "closed": "",
    "dropped": "",
    "cycle": ": a call of the runner ended it",
    "held": ": a call of the runner ended it",
}
"""How a rank leaves its loop, and what the others are told of it."""


def judge(found: list[Any], how: str, said: str) -> None:
    """Rank 0 was told at once, and the calls after that belong together."""
    (told, after, seconds), (own, others, _) = found
    assert told.startswith(f"RankError: rank 1 {said}"), told
    assert "did not come" not in told
    assert (own == "") == (how not in ("body", "step", "join"))
    assert after == others == [True] * 5
    assert seconds < AT_ONCE


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("over", "ahead"), [(OVER[0], 0), (OVER[0], 2), (OVER[1], 1)])
def test_a_loop_that_one_rank_leaves_ends_the_others(two: Processes, how: str, over: str, ahead: int) -> None:
    """The others' loops raise at once and name it; all are at their start in the next call."""
    judge(two.run(leaves, how, over, {"ahead": ahead}), how, LEFT + WAYS[how])


@pytest.mark.parametrize("how", ["body", "break", "step", "held"])
@pytest.mark.parametrize("options", [{"lowering": "fused"}, {"equal": True}], ids=str)
def test_each_kind_of_loop_ends_when_one_rank_leaves(two: Processes, how: str, options: dict[str, Any]) -> None:
    """Also where steps are calls, and where nothing is exchanged."""
    is_called = how == "step" and "lowering" in options
    said = f"failed in a step of steps() of {NAME}" if is_called else LEFT
    judge(two.run(leaves, how, OVER[0], options), how, said + WAYS[how])


def both_leave(rank: int, equal: bool) -> list[str]:
    """All ranks leave their loops at one step, each in its own way, and call."""
    runner = counting("cpu", count, ranks=soon(equal=equal))
    found = list[str]()
    for seed in range(6):
        loop = runner.steps(batch(1, 2))
        for one in loop:
            if one.number == seed:
                break
        if (seed + rank) % 2:
            del loop
        found.append(raised(runner, batch(3)))
    return found


@pytest.mark.parametrize("equal", [False, True])
def test_a_loop_that_all_leave_is_no_error(two: Processes, equal: bool) -> None:
    """Is no error of anybody."""
    assert two.run(both_leave, equal) == [[""] * 6] * 2


def inside(rank: int, inner: Any, outer: int, where: str) -> None:
    """An inner loop, which all leave in its third step; or rank 1 does alone, or leaves the outer one with it."""
    for one in inner.steps(batch(2, 3)):
        if one.number == 2 and where == "both" and rank and outer == 1:
            raise KeyError("both")
        if one.number == 2 and (where != "inner" or rank):
            return
        if one.number == 9:
            return


def nested(rank: int, where: str) -> list[Any]:
    """A loop of one runner within a loop of another; rank 1 leaves the inner one, or both."""
    ranks, inner_ends, steps = soon(), list[str](), list[int]()
    outer, inner = (counting("cpu", count, ranks=ranks) for _ in range(2))

    def run() -> None:
        for one in outer.steps(batch(1)):
            steps.append(one.number)
            if where == "inner":
                inner_ends.append(raised(inside, rank, inner, one.number, where))
            else:
                inside(rank, inner, one.number, where)
            if one.number == 3:
                return

    return [raised(run), inner_ends, steps, paired(outer, rank, equal=False), paired(inner, rank, equal=False)]


@pytest.mark.parametrize("where", ["none", "inner", "both"])
def test_a_rank_that_leaves_nested_loops_ends_those_it_left(two: Processes, where: str) -> None:
    """A rank that leaves the inner loop ends that one; one that leaves both ends both."""
    first, second = two.run(nested, where)
    assert first[3:] == second[3:] == [[True] * 4] * 2
    left = "left its loop of steps() of runner"
    if where == "both":
        assert first[2] == second[2] == [0, 1]
        assert f"rank 1 {left} 2 (DecodeRunner of Counting), and {left} 1 (DecodeRunner of Counting)" in first[0]
        assert second[0] == "KeyError: 'both'"
    else:
        assert first[0] == second[0] == ""
        assert first[2] == second[2] == [0, 1, 2, 3]
    if where == "inner":
        assert second[1] == [""] * 4
        assert len(first[1]) == 4
        assert all(one.startswith(f"RankError: rank 1 {left} 2 (DecodeRunner of Counting)") for one in first[1])


def interrupted(rank: int, over: str) -> list[str]:
    """A key is pressed on rank 1 while it waits for rank 0; then both go on."""
    runner, good = runner_on(soon(over), lambda view: view.ids * 2), stepping.batch_of(3, 1)
    found = list[str]()
    if rank == 0:
        time.sleep(1.0)
    else:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.4)
    try:
        found.append(raised(runner, good))
    except KeyboardInterrupt:
        found.append("KeyboardInterrupt: ")
    return [*found, *(raised(runner, good) for _ in range(3))]


@pytest.mark.parametrize("over", OVER)
def test_a_rank_interrupted_while_it_waits_is_told_in_the_next_step(two: Processes, over: str) -> None:
    """The others ran that step: they are told in the next one, and all go on."""
    first, second = two.run(interrupted, over)
    assert (first[0], second[0]) == ("", "KeyboardInterrupt: ")
    assert first[1] == second[1]
    assert first[1].startswith("RankError: rank 1 failed in a step of runner 1 (DecodeRunner of Counted): Keyboard")
    assert first[2:] == second[2:] == ["", ""]


def stands_still(rank: int, over: str, equal: bool, read: bool) -> tuple[str, float]:
    """Rank 1's step raises, and rank 0 waits for its device, which waits for rank 1."""
    step = Failing(lambda view: view.ids * 2)
    runner, good = runner_on(soon(over, equal=equal), step), stepping.batch_of(3, 1)
    step.error += [ValueError("lost a page")] if rank else []
    told, start = raised(runner, good), time.monotonic()
    if rank == 0:
        event: Any = SimpleNamespace(query=lambda: False)
        told = raised(runner.coordinator.wait, event, torch.device("cpu"), read=read)
    return told, time.monotonic() - start


@pytest.mark.parametrize(
    ("over", "equal", "read"), [(OVER[0], False, False), (OVER[1], True, False), (OVER[0], True, True)]
)
def test_a_device_of_a_failed_rank_is_not_waited_for(two: Processes, over: str, equal: bool, read: bool) -> None:
    """Is not waited for until the time-out; a CPU never stands still, so that the event is made here."""
    (told, seconds), (own, _) = two.run(stands_still, over, equal, read)
    assert own.startswith("ReplayError: the step raised ValueError: lost a page")
    how = f"it failed in a step of runner 1 (DecodeRunner of Counted): {own}"
    assert told == f"RankError: the end of a step on the device: rank 1 did not come: {how}"
    assert seconds < 2 * AT_ONCE


PROGRAM: Final = """
import sys, time, unittest.mock
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from tests.ranks.stepping import batch_of, runner_on, soon
rank, over, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=FileStore(store, 2), rank=rank, world_size=2)
def step(view):
    if rank and len(calls) == 2:
        raise ValueError("lost a page")
    return view.ids * 2
calls = []
runner = runner_on(soon(over), step)
for _ in range(3):
    calls.append(1)
    runner(batch_of(3, 1))
"""


@pytest.mark.parametrize("over", OVER)
def test_a_process_that_ends_by_an_error_is_told_to_the_others(tmp_path: pathlib.Path, over: str) -> None:
    """It does not wait for the others, and they are told what it was."""
    begin = [sys.executable, "-c", PROGRAM]
    both = [
        subprocess.Popen(
            [*begin, str(rank), over, str(tmp_path / "store")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        for rank in range(2)
    ]
    (_, first), (_, second) = (one.communicate(timeout=120) for one in both)
    assert second.splitlines()[-1].endswith("ReplayError: the step raised ValueError: lost a page")
    assert "rank 1" in first
    assert "failed in a step of runner 1 (DecodeRunner of Counted): ReplayError: the step raised" in first
    assert "within 20 s" not in first
