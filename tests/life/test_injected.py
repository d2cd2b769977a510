"""Exceptions at each point of a step: the batch is as it was, and what comes next is right, and counted right."""

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import pytest
import torch

from slotgraph.backends import Backend, load
from slotgraph.dataflow.errors import CaptureError, ReplayError
from slotgraph.runners.runner import Runner
from tests.life import worlds
from tests.life.injection import InjectedError, Injection
from tests.life.worlds import WORLDS, World, steps_of
from tests.runners import prefilled, test_draft
from tests.runners.models import Batch, same_batch, snapshot

FEW: Final = 40 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 5
"""How many points of each act are tried."""
MORE: Final = tuple(str(module.__file__) for module in (worlds, prefilled, test_draft))
Act = Callable[[Runner[Any], Batch, Any], object]
ACTS: Final[dict[str, Act]] = {
    "call": lambda runner, batch, _: runner(batch),
    "fill": lambda runner, batch, _: runner.fill(batch),
    "replay": lambda runner, _, view: runner.replay(view),
}


def points(total: int) -> Iterator[tuple[int, type[BaseException]]]:
    """Points out of so many, and what is raised there."""
    stride = max(1, total // FEW) | 1  # odd, so that both kinds of errors come
    for at in range(1, total + 1, stride):
        yield at, KeyboardInterrupt if at % 2 else InjectedError


def total_of(world: World, act: Act, size: int) -> int:
    """How many points an act has, once it was done before."""
    seen = 0
    for seed in (1, 2):
        view = world.runner.fill(world.batch(3, seed))
        with Injection(more=MORE) as counting:
            act(world.runner, world.batch(size, seed), view)
        seen = counting.seen
    return seen


def interrupt(world: World, act: Act, size: int, at: int, error: type[BaseException]) -> str:
    """Break an act off at one point, and hold all that is left to what it was; where it was, or nothing."""
    runner, prior = world.runner, world.batch(3, 3)
    view = runner.fill(prior)
    batch = world.batch(size, at)
    given, steps = snapshot(batch), steps_of(runner)
    with Injection(at, error, MORE) as injection:
        act(runner, batch, view)
    assert torch.is_grad_enabled()
    assert same_batch(batch, given)
    counted = steps_of(runner) - steps
    assert counted in ({0, 1} if injection.where and act is not ACTS["fill"] else {int(act is not ACTS["fill"])})
    try:
        outputs = runner.replay(view)
    except ReplayError as refused:
        assert "was not filled last" in str(refused)  # noqa: PT017 - it may as well be right
    else:
        world.assert_right(outputs, prior)
    world.assert_well()
    return injection.where


def interrupt_everywhere(world: World, act: Act, size: int, step: int = 0) -> None:
    """The same at all points, or at some; each step makes the batch larger by so many rows."""
    seen = set()
    for number, (at, error) in enumerate(points(total_of(world, act, size))):
        seen.add(interrupt(world, act, size + number * step, at, error))
    assert len(seen) > 1  # a later step may be shorter than the one that was counted


@pytest.mark.parametrize("name", WORLDS)
def test_broken_off(backend: Backend, name: str) -> None:
    """Whatever is raised at whatever point of a call, a fill or a replay, the runner goes on as if it had not been."""
    world = WORLDS[name](backend).warm()
    for act in ACTS.values():
        interrupt_everywhere(world, act, world.sizes[1])
    for eager in ("call", "fill"):  # of a batch that is too large for every graph
        interrupt_everywhere(world, ACTS[eager], max(world.sizes))


@pytest.mark.parametrize("name", ["decode", "decode, in the graph", "eager"])
def test_broken_off_at_a_new_size(backend: Backend, name: str) -> None:
    """A live size that never came before, of which all views are still to be made, and buffers perhaps to be grown."""
    make: dict[str, Callable[[], World]] = {
        "decode": lambda: worlds.decoding(backend, lowering="foreach", buckets=(4, 2000)),
        "decode, in the graph": lambda: worlds.decoding(backend, lowering="in_graph", buckets=(4, 2000)),
        "eager": lambda: worlds.eager(backend),
    }
    interrupt_everywhere(make[name]().warm(), ACTS["call"], 30, step=1 if name != "eager" else 7)


def test_broken_off_with_host_data(backend: Backend) -> None:
    """Lists and arrays, which are made tensors of and taken up in one packet, are as they were too."""
    world = worlds.decoding(backend)
    lists = attrs.evolve(world, batch=lambda size, seed: {n: v.tolist() for n, v in world.batch(size, seed).items()})
    interrupt_everywhere(lists.warm(), ACTS["call"], 7)


def test_broken_off_after_a_fill() -> None:
    """At each point of the first step of a size that was only filled before, whose specialization is there already."""
    world = worlds.decoding(load("cpu")(), buckets=(4, 2000))

    def steps() -> Iterator[Callable[[], object]]:
        for size in range(5, 2000):
            batch = world.batch(size, size)
            world.runner.fill(batch)
            yield functools.partial(world.runner, batch)

    some = steps()
    with Injection(more=MORE) as counting:
        next(some)()
    assert counting.seen > 10
    for at, step in zip(range(1, counting.seen + 1), some, strict=False):
        with Injection(at, KeyboardInterrupt, MORE):
            step()
        step()
        step()
    world.assert_well()


@pytest.mark.parametrize("lazy", [False, True], ids=["at once", "late"])
def test_capture_broken_off(backend: Backend, *, lazy: bool) -> None:
    """A capture that breaks off can be done again, or has left its bucket out; steps are right either way."""

    def made() -> World:
        return worlds.decoding(backend, captured=False, lazy=lazy)

    def capture(world: World) -> None:
        world.runner.capture()  # type: ignore[attr-defined] # a decode runner has it
        if lazy:
            world.runner(world.batch(3, 1))

    world = made()
    with Injection(more=MORE) as counting:
        capture(world)
    reached, frozen = 0, gc.get_freeze_count()
    for at, error in points(counting.seen):
        world = made()
        with Injection(at, error, MORE) as injection, contextlib.suppress(CaptureError):
            capture(world)
        reached += bool(injection.where)
        assert gc.get_freeze_count() == frozen  # nothing is kept from the garbage collector for good
        graphs = world.runner.graphs
        if graphs is not None and graphs.report is None:
            world.runner.capture()  # type: ignore[attr-defined] # as above
        world.assert_well()
    assert reached > 1  # a later capture may be shorter than the one that was counted
