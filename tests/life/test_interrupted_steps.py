"""Exceptions at each point of a step: the batch is as it was, and what comes next is right, and counted right."""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator

import attrs
import pytest

from slotgraph.backends import Backend, load
from slotgraph.errors import CaptureError
from tests.life import worlds
from tests.life.worlds import ACTS, WORLDS, Injection, World, interrupt_everywhere, points


@pytest.mark.parametrize("name", WORLDS)
def test_a_step_broken_off_anywhere_leaves_the_runner_right(backend: Backend, name: str) -> None:
    """Whatever is raised at whatever point of a call, a fill or a replay, the runner goes on as if it had not been."""
    world = WORLDS[name](backend).warm()
    for act in ACTS.values():
        interrupt_everywhere(world, act, world.sizes[1])
    for eager in ("call", "fill"):  # of a batch that is too large for every graph
        interrupt_everywhere(world, ACTS[eager], max(world.sizes))


@pytest.mark.parametrize("name", ["foreach", "in_graph", "eager"])
def test_a_new_size_broken_off_anywhere_leaves_the_runner_right(backend: Backend, name: str) -> None:
    """A live size that never came before, of which all views are still to be made, and buffers perhaps to be grown."""
    world = worlds.eager(backend) if name == "eager" else worlds.decoding(backend, name, buckets=(4, 2000))
    interrupt_everywhere(world.warm(), ACTS["call"], 30, step=7 if name == "eager" else 1)


def test_lists_are_as_they_were_when_a_step_breaks_off(backend: Backend) -> None:
    """Lists, which are made tensors of and taken up in one packet, are as they were too."""
    world = worlds.decoding(backend)
    lists = attrs.evolve(world, batch=lambda size, seed: {n: v.tolist() for n, v in world.batch(size, seed).items()})
    interrupt_everywhere(lists.warm(), ACTS["call"], 7)


def test_a_first_step_after_a_fill_may_break_off_anywhere() -> None:
    """At each point of the first step of a size that was only filled before, whose specialization is there already."""
    world = worlds.decoding(load("cpu")(), buckets=(4, 2000))

    def steps() -> Iterator[Callable[[], object]]:
        for size in range(5, 2000):
            batch = world.batch(size, size)
            world.runner.fill(batch)
            yield functools.partial(world.runner, batch)

    some = steps()
    with Injection() as counting:
        next(some)()
    assert counting.seen > 10
    for at, step in zip(range(1, counting.seen + 1), some, strict=False):
        with Injection(at, KeyboardInterrupt):
            step()
        step()
        step()
    world.assert_well()


@pytest.mark.parametrize("lazy", [False, True], ids=["at once", "late"])
def test_a_capture_broken_off_can_be_done_again(backend: Backend, *, lazy: bool) -> None:
    """A capture that breaks off can be done again, or has left its bucket out; steps are right either way."""

    def made() -> World:
        return worlds.decoding(backend, captured=False, lazy=lazy)

    def capture(world: World) -> None:
        world.runner.capture()
        if lazy:
            world.runner(world.batch(3, 1))

    world = made()
    with Injection() as counting:
        capture(world)
    reached, frozen = 0, gc.get_freeze_count()
    for at, error in points(counting.seen):
        world = made()
        with Injection(at, error) as injection, contextlib.suppress(CaptureError):
            capture(world)
        reached += bool(injection.where)
        assert gc.get_freeze_count() == frozen  # nothing is kept from the garbage collector for good
        graphs = world.runner.graphs
        if graphs is not None and graphs.report is None:
            world.runner.capture()
        world.assert_well()
    assert reached > 1  # a later capture may be shorter than the one that was counted
