"""Memory that others have a part in: pools, stale views and outputs, captures, moved addresses, forks.

As a program it prints, as JSON, what forked children did that was not refused.
"""

import gc
import itertools
import json
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slotgraph.backends import Backend
from slotgraph.errors import BatchError, ReplayError, StaleOutputError
from tests.invariants.steps import (
    BEYOND,
    EITHER,
    LOWERINGS,
    Quick,
    drawn,
    each_lowering,
    everything,
    neighbours,
    on,
    runner_of,
    wrong,
)
from tests.programs import python


def by_turns(runners: list[Any], backend: Backend, seed: int) -> set[str]:
    """Fills, replays, steps and refusals of runners that share memory: what was wrong, or refused without a reason."""
    draw, found, filled = random.Random(seed), set[str](), dict[int, tuple[Any, Any]]()
    last = -1
    for number in range(120):
        which, values = draw.randrange(len(runners)), drawn(draw.choice((2, 5)), number, inputs=Quick)
        runner, batch = runners[which], on(backend, values)
        match draw.choice(("fill", "fill", "step", "step", "refused", "replay", "replay", "replay")):
            case "fill":
                filled[which], last = (runner.fill(batch), values), which
            case "step":
                found |= {*wrong(runner(batch), values)}
                filled.pop(which, None)
                last = which
            case "refused":
                with pytest.raises(BatchError):
                    runner({**batch, "weights": batch["ids"]})
            case _ if which in filled:
                try:
                    found |= {*wrong(runner.replay(filled[which][0]), filled[which][1])}
                except ReplayError:
                    found |= {"refused"} if last == which else set()
    return found


@each_lowering
def test_neighbours_take_turns(backend: Backend, lowering: str) -> None:
    """A view is replayed right, or refused where a neighbour was filled since; a refused neighbour has done nothing."""
    runners = neighbours(backend, lowering, 3)
    assert by_turns(runners, backend, 1) | by_turns(runners, backend, 2) == set()


Act = Callable[[Any, Any], Any]
LATER: dict[str, Act] = {
    "call": lambda runner, batch: runner(batch),
    "fill": lambda runner, batch: runner.fill(batch),
    "both": lambda runner, batch: runner.replay(runner.fill(batch)),
}


def believed(runner: Any, backend: Backend) -> list[str]:
    """After which later acts a view was replayed that others had overwritten."""
    found = []
    for seed, rows in enumerate((4, 1, BEYOND)):
        for name, act in LATER.items():
            for before in (4, BEYOND):
                view = runner.fill(on(backend, drawn(before, seed, inputs=Quick)))
                act(runner, on(backend, drawn(rows, seed + 50, inputs=Quick)))
                try:
                    runner.replay(view)
                except ReplayError:
                    continue
                found.append(f"{before} rows, then {name} of {rows}")
    return found


@each_lowering
def test_stale_views_are_refused(backend: Backend, lowering: str) -> None:
    """Of several views only the one that was filled last is replayed, in graphs, eagerly and across."""
    assert believed(runner_of(backend, lowering, Quick), backend) == []


def read_too_late(runner: Any, backend: Backend) -> list[str]:
    """Outputs of a graph that could be read after another replay of it; each could be before."""
    outputs = runner(on(backend, drawn(4, 1)))
    assert wrong(outputs, drawn(4, 1)) == []
    runner(on(backend, drawn(3, 2)))
    found = []
    for name, one in outputs.items():
        try:
            one.sum()
        except StaleOutputError as error:
            assert "generation" in str(error)
        else:
            found.append(name)
    return found


@each_lowering
def test_stale_outputs_are_named(backend: Backend, lowering: str) -> None:
    """Debug mode `generations` refuses each of them, and says of which generation it is."""
    assert read_too_late(runner_of(backend, lowering, debug="generations"), backend) == []


def modes() -> list[object]:
    """What torch keeps for all of the process."""
    return [torch.get_rng_state().tolist(), torch.is_grad_enabled(), torch.get_default_dtype(), gc.get_freeze_count()]


def touched(backend: Backend, write: Callable[[torch.Tensor], object], *, lazy: bool) -> list[str]:
    """What a capture has changed, up front or late, and whether the first step has moved its state on once."""
    state = torch.arange(8.0).to(backend.device)
    before, known, right = state.clone(), modes(), state.clone()
    write(right)

    def step(view: Any) -> Any:
        write(state)
        return {**everything(view), "state": state.clone(), "noise": torch.rand(2, device=state.device)}

    runner, values = runner_of(backend, lazy=lazy, step=step, warmups=2), drawn(3, 1)
    found = [] if torch.equal(state, before) else ["state"]
    found += [] if modes() == known else ["modes"]
    seen = dict(runner(on(backend, values)))
    found += [] if torch.equal(seen.pop("state"), right) and torch.equal(state, right) else ["step"]
    del seen["noise"]
    return found + wrong(seen, values)


@pytest.mark.parametrize("lazy", [False, True], ids=["up front", "late"])
def test_captures_change_nothing(backend: Backend, *, lazy: bool) -> None:
    """State, random numbers and modes are as they were, and the first step moves the state on once."""
    assert touched(backend, lambda state: state.mul_(2).add_(1), lazy=lazy) == []


MOVES: dict[str, Callable[[torch.Tensor], object]] = {
    "set": lambda one: one.set_(torch.zeros_like(one)),  # type: ignore[call-overload] # its stub lacks this
    "data": lambda one: setattr(one, "data", torch.zeros_like(one)),
}


def refuses_moved(backend: Backend, lowering: str, move: str, first: int, **options: Any) -> bool:
    """Whether a runner refuses a step after an adopted tensor was moved behind so many replays."""
    owned = on(backend, {"ids": torch.zeros(6, dtype=torch.int64)})["ids"]
    runner = runner_of(backend, lowering, bind={"ids": owned}, **options)
    for seed in range(first):
        runner(on(backend, drawn(5, seed)))
    MOVES[move](owned)
    try:
        runner(on(backend, drawn(5, 9)))
    except ReplayError as error:
        return "moved" in str(error)
    return False


@each_lowering
@pytest.mark.parametrize("move", MOVES)
def test_moved_addresses_are_refused(backend: Backend, lowering: str, move: str) -> None:
    """At the first replay, and in debug mode at each one."""
    assert refuses_moved(backend, lowering, move, 0)
    assert refuses_moved(backend, lowering, move, 3, debug="addresses")


def child_refuses(act: Any) -> bool:
    """Whether a forked child that does it is refused."""
    child = os.fork()
    if not child:
        code = 2
        try:
            act()
            code = 1
        except ReplayError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def accepted() -> list[str]:
    """What a child did that has graphs of its parent; the parent goes on, and so does a runner of the child's own."""
    found = []
    for lowering, inputs in itertools.product(LOWERINGS, EITHER):
        runner, values = runner_of("cpu-capture", lowering, inputs), drawn(3, 1, inputs=inputs)
        for _ in range(3):  # so that the quickest way is known
            runner(values)
        found += [f"{lowering} call"] if not child_refuses(lambda: runner(values)) else []  # noqa: B023 - done at once
        view = runner.fill(values)
        found += [f"{lowering} replay"] if not child_refuses(lambda: runner.replay(view)) else []  # noqa: B023 - likewise
        assert wrong(runner.replay(view), values) == []
    return found


def test_forked_children_are_refused() -> None:
    """Calls and replays of each lowering, in a child of the process that captured; the parent's next step is right."""
    done = python(__file__)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


if __name__ == "__main__":
    print(json.dumps(accepted()))  # noqa: T201 - a program
