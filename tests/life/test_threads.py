"""Threads: a runner lets one step or capture in at a time and refuses others; counts can be read at any time."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import attrs
import pytest
import torch
from torch.utils import _pytree as pytree

from slotgraph import Step, computed
from slotgraph.backends import Backend
from slotgraph.errors import ReplayError
from tests.invariants.steps import Quick, drawn, everything, on, runner_of
from tests.life.worlds import BUCKETS, WORLDS, World, decoding, eager, prefilling, steps_of
from tests.runners import prefilled

PATIENCE: Final = 120.0  # seconds after which a thread that should have come is given up
BUSY: Final = "is in the middle of a step or a capture: another thread runs it, or its own step calls it"
Pause = Callable[[], int]


def paused(pause: Pause) -> int:
    """What the host computes in the middle of a fill: whatever the batch says it does."""
    return pause()


class PausedInputs(Quick):  # a batch that has a say in the middle of its own fill
    mark: torch.Tensor = computed(paused, shape=1, dtype=torch.int32)
    pause: Any


class PausedPrefill(prefilled.Prefill):  # the same for requests of several tokens
    mark: torch.Tensor = computed(paused, shape=1, dtype=torch.int32)
    pause: Any

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        return {**super().placeholder(step), "pause": lambda: 1}


def answer(outputs: Any) -> list[Any]:
    """The numbers of outputs as they are now."""
    return [one.tolist() for one in pytree.tree_leaves(outputs)]


@attrs.frozen(eq=False)
class Held:  # a step in another thread, which stands still in its fill until it is let go
    inside: threading.Event = attrs.field(factory=threading.Event)
    go: threading.Event = attrs.field(factory=threading.Event)
    outputs: list[list[Any]] = attrs.field(factory=list)

    def pause(self) -> int:
        self.inside.set()
        assert self.go.wait(PATIENCE)
        return 1

    @contextlib.contextmanager
    def within(self, act: Callable[[], object]) -> Iterator[None]:
        """Run the block while the other thread is in the middle of its act."""
        with ThreadPoolExecutor(1) as other:
            done = other.submit(lambda: answer(act()))
            try:
                assert self.inside.wait(PATIENCE)
                yield
            finally:
                self.go.set()
            self.outputs.append(done.result(PATIENCE))


MADE: Final[dict[str, Callable[[Backend], World]]] = {
    "decode": functools.partial(decoding, inputs=PausedInputs, lowering="foreach"),
    "decode, in the graph": functools.partial(decoding, inputs=PausedInputs, lowering="in_graph"),
    "decode, slot by slot": functools.partial(decoding, inputs=PausedInputs, lowering="slot_by_slot"),
    "eager": functools.partial(eager, inputs=PausedInputs),
    "prefill": functools.partial(prefilling, inputs=PausedPrefill),
}


@pytest.fixture(params=MADE)
def world(request: pytest.FixtureRequest, backend: Backend) -> World:
    """Each kind of runner, after some steps, with batches that may pause."""
    made = MADE[request.param](backend)
    return attrs.evolve(made, batch=lambda size, seed: {**made.batch(size, seed), "pause": lambda: 1}).warm()


def right(world: World, size: int, seed: int) -> list[Any]:
    """What a step gives that no other thread disturbs."""
    return answer(world.runner(world.batch(size, seed)))


@pytest.mark.parametrize("size", [7, 20], ids=["graph", "eager"])
def test_another_thread_is_refused(world: World, size: int) -> None:
    """While a step is under way no other thread gets in; the step is right, and so is what comes after it."""
    runner, alone = world.runner, right(world, size, 1)
    view = runner.fill(world.batch(3, 2))
    other, held = world.batch(3, 3), Held()
    steps = steps_of(runner)
    acts: list[Callable[[], object]] = [lambda: runner(other), lambda: runner.fill(other), lambda: runner.replay(view)]
    with held.within(lambda: runner({**world.batch(size, 1), "pause": held.pause})):
        for act in acts:
            with pytest.raises(ReplayError, match=BUSY):
                act()
        assert steps_of(runner) == steps
    assert held.outputs == [alone]
    assert steps_of(runner) == steps + 1
    with pytest.raises(ReplayError, match="was not filled last"):
        runner.replay(view)
    assert right(world, size, 1) == alone


def test_a_step_that_calls_its_own_runner_is_refused(world: World) -> None:
    """A step that calls its own runner would overwrite the slots that it is made of: refused, and nothing is stuck."""
    runner, alone, other = world.runner, right(world, 7, 1), world.batch(3, 2)
    with pytest.raises(Exception, match=BUSY):
        runner({**world.batch(7, 1), "pause": lambda: int(runner(other) is None)})
    assert right(world, 7, 1) == alone


def storm(acts: list[Callable[[int], None]], turns: int) -> None:
    """Each act so many times, all of them at once; what one raises is raised here."""
    start = threading.Barrier(len(acts))

    def run(act: Callable[[int], None]) -> None:
        start.wait(PATIENCE)
        for turn in range(turns):
            act(turn)

    with ThreadPoolExecutor(len(acts)) as threads:
        for done in [threads.submit(run, act) for act in acts]:
            done.result(PATIENCE)


@pytest.mark.parametrize("name", ["decode", "decode, in the graph", "eager", "prefill"])
def test_threads_without_a_lock_are_refused_or_served(backend: Backend, name: str) -> None:
    """Threads that do not take turns are refused or served, nothing else, and leave a runner that is right."""
    world = WORLDS[name](backend).warm()
    refused, before = [0, 0, 0, 0], steps_of(world.runner)

    def acting(index: int) -> Callable[[int], None]:
        def act(turn: int) -> None:
            try:
                world.runner(world.batch(world.sizes[turn % len(world.sizes)], 10 * turn + index))
            except ReplayError as error:
                assert BUSY in str(error)
                refused[index] += 1

        return act

    storm([acting(index) for index in range(len(refused))], 40)
    assert steps_of(world.runner) - before == 40 * len(refused) - sum(refused)
    world.assert_well()


def test_two_runners_do_not_hold_each_other_up(backend: Backend) -> None:
    """Runners of their own do not hold each other up; those whose graphs share memory take turns over their outputs."""
    turns = threading.Lock() if backend.pool() is not None else contextlib.nullcontext()

    def acting(world: World) -> Callable[[int], None]:
        def act(turn: int) -> None:
            batch = world.batch(world.sizes[turn % len(world.sizes)], turn)
            with turns:
                world.assert_right(world.runner(batch), batch)

        return act

    storm([acting(decoding(backend, lowering).warm()) for lowering in ("auto", "slot_by_slot")], 30)


def test_a_view_may_be_replayed_by_another_thread(world: World) -> None:
    """A view may be replayed by another thread than filled it, as long as it was filled last."""
    runner, alone = world.runner, right(world, 7, 1)
    with ThreadPoolExecutor(1) as other:
        first = runner.fill(world.batch(7, 1))
        assert other.submit(lambda: answer(runner.replay(first))).result(PATIENCE) == alone
        second = other.submit(lambda: runner.fill(world.batch(3, 2))).result(PATIENCE)
    with pytest.raises(ReplayError, match="was not filled last"):
        runner.replay(first)
    assert answer(runner.replay(second)) == right(world, 3, 2)


def pausing(kind: str, backend: Backend, pause: Pause, **options: Any) -> Any:
    """A runner that is not captured, whose step pauses."""
    if kind == "decode":
        step = lambda view: (pause(), everything(view))[1]
        return runner_of(backend, "auto", Quick, captured=False, buckets=BUCKETS, step=step, **options)
    model = prefilled.Model().to(backend.device)
    model.register_forward_pre_hook(lambda *_: pause() * 0 or None)
    return prefilled.runner_of(kind, model, backend, **options)


@pytest.mark.parametrize("kind", ["decode", "breakable"])
@pytest.mark.parametrize("late", [False, True])
def test_a_capture_is_not_disturbed(backend: Backend, kind: str, *, late: bool) -> None:
    """Whatever another thread asks of the runner that writes slots is refused, and what is captured is right."""
    held = Held()
    runner, twin = pausing(kind, backend, held.pause, lazy=late), pausing(kind, backend, lambda: 1)

    def batch(rows: int) -> Any:
        if kind == "decode":
            return on(backend, drawn(rows, rows, inputs=Quick))
        return prefilled.batch_of([rows], rows, backend.device)

    if late:
        runner.capture()
    with held.within(lambda: runner(batch(3)) if late else (runner.capture(), torch.zeros(()))[1]):
        for act in (runner, runner.fill, *(() if late else (lambda _: runner.capture(),))):
            with pytest.raises(ReplayError, match="in the middle of a step or a capture"):
                act(batch(9 if late else 3))
        if late and kind == "decode":
            with pytest.raises(ReplayError, match="in the middle of a step or a capture"):
                runner.inputs(16)
    twin.capture()
    for rows in (3, 9, 1):
        outputs = answer(runner(batch(rows)))  # the twin's graphs use the same pool
        assert outputs == answer(twin(batch(rows)))
    assert runner.report.captured == BUCKETS
