"""Threads: a runner lets one step or capture in at a time and refuses others; counts can be read at any time."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import attrs
import pytest
import torch

from slotgraph import DecodeRunner, Step, computed
from slotgraph.backends import Backend
from slotgraph.dataflow.errors import ReplayError
from slotgraph.runners.runner import Runner
from tests.life import worlds
from tests.life.worlds import LifeInputs, World, batch_of, steps_of
from tests.runners import prefilled
from tests.runners.models import Batch

PATIENCE: Final = 120.0
"""Seconds after which a thread that should have come is given up."""
BUSY: Final = "is in the middle of a step or a capture: another thread runs it, or its own step calls it"
Pause = Callable[[], int]


def paused(pause: Pause) -> int:
    """What the host computes in the middle of a fill: whatever the batch says it does."""
    return pause()


class PausedInputs(LifeInputs):
    """A batch that has a say in the middle of its own fill."""

    mark: torch.Tensor = computed(paused, shape=1, dtype=torch.int32)
    pause: Any


class PausedPrefill(prefilled.Prefill):
    """The same for requests of several tokens."""

    mark: torch.Tensor = computed(paused, shape=1, dtype=torch.int32)
    pause: Any

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        return {**super().placeholder(step), "pause": lambda: 1}


def answer(outputs: torch.Tensor) -> torch.Tensor:
    """The outputs as they are now, on the host."""
    return outputs.clone().cpu()


@attrs.frozen(eq=False)
class Held:
    """A step in another thread, which stands still in its fill until it is let go."""

    inside: threading.Event = attrs.field(factory=threading.Event)
    go: threading.Event = attrs.field(factory=threading.Event)
    outputs: list[torch.Tensor] = attrs.field(factory=list)

    def pause(self) -> int:
        """Say so, and wait."""
        self.inside.set()
        assert self.go.wait(PATIENCE)
        return 1

    @contextlib.contextmanager
    def within(self, act: Callable[[], torch.Tensor]) -> Iterator[None]:
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
    "decode": lambda backend: worlds.decoding(backend, inputs=PausedInputs, lowering="foreach"),
    "decode, by shortcut": lambda backend: worlds.decoding(backend, inputs=PausedInputs, lowering="in_graph"),
    "decode, slot by slot": lambda backend: worlds.decoding(backend, inputs=PausedInputs, lowering="slot_by_slot"),
    "eager": lambda backend: worlds.eager(backend, PausedInputs),
    "prefill": lambda backend: worlds.prefilling(backend, inputs=PausedPrefill),
}


@attrs.frozen(eq=False)
class Pausing:
    """A runner whose batches may pause."""

    world: World

    @property
    def runner(self) -> Runner[Any]:
        return self.world.runner

    def batch(self, size: int, seed: int, pause: Pause = lambda: 1) -> Batch:
        """A batch that pauses so."""
        return {**self.world.batch(size, seed), "pause": pause}

    def right(self, size: int, seed: int) -> torch.Tensor:
        """What a step gives that nobody disturbs."""
        return answer(self.runner(self.batch(size, seed)))


@pytest.fixture(params=MADE)
def pausing(request: pytest.FixtureRequest, backend: Backend) -> Pausing:
    """Each kind of runner, after some steps."""
    made = Pausing(MADE[request.param](backend))
    for size in (3, 7, 3, 7, 20):
        made.right(size, size)
    return made


@pytest.mark.parametrize("size", [7, 20], ids=["graph", "eager"])
def test_another_thread_is_refused(pausing: Pausing, size: int) -> None:
    """While a step is under way no other thread gets in; the step is right, and so is what comes after it."""
    runner, right = pausing.runner, pausing.right(size, 1)
    view = runner.fill(pausing.batch(3, 2))
    other, held = pausing.batch(3, 3), Held()
    steps = steps_of(runner)
    acts: list[Callable[[], object]] = [lambda: runner(other), lambda: runner.fill(other), lambda: runner.replay(view)]
    with held.within(lambda: runner(pausing.batch(size, 1, held.pause))):
        for act in acts:
            with pytest.raises(ReplayError, match=BUSY):
                act()
        assert steps_of(runner) == steps
    assert torch.equal(held.outputs[0], right)
    assert steps_of(runner) == steps + 1
    with pytest.raises(ReplayError, match="was not filled last"):
        runner.replay(view)
    assert torch.equal(pausing.right(size, 1), right)


def test_its_own_step_is_refused(pausing: Pausing) -> None:
    """A step that calls its own runner would overwrite the slots that it is made of: refused, and nothing is stuck."""
    runner, right = pausing.runner, pausing.right(7, 1)
    other = pausing.batch(3, 2)
    with pytest.raises(Exception, match=BUSY):
        runner(pausing.batch(7, 1, lambda: int(runner(other) is None)))
    assert torch.equal(pausing.right(7, 1), right)


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
def test_many_threads_without_a_lock(backend: Backend, name: str) -> None:
    """Threads that do not take turns are refused or served, nothing else, and leave a runner that is right."""
    world = worlds.WORLDS[name](backend).warm()
    refused, before = [0, 0, 0, 0], steps_of(world.runner)

    def acting(index: int) -> Callable[[int], None]:
        def act(turn: int) -> None:
            try:
                world.runner(world.batch(world.sizes[turn % len(world.sizes)], 10 * turn + index))
            except ReplayError as error:
                assert BUSY in str(error)  # noqa: PT017 - any other is a fault
                refused[index] += 1

        return act

    storm([acting(index) for index in range(len(refused))], 40)
    assert steps_of(world.runner) - before == 40 * len(refused) - sum(refused)
    world.assert_well()


def test_two_runners_in_two_threads(backend: Backend) -> None:
    """Runners of their own do not hold each other up; those whose graphs share memory take turns over their outputs."""
    two = [worlds.decoding(backend).warm(), worlds.decoding(backend, lowering="slot_by_slot").warm()]
    turns = threading.Lock() if backend.pool() is not None else contextlib.nullcontext()

    def acting(world: World) -> Callable[[int], None]:
        def act(turn: int) -> None:
            batch = world.batch(world.sizes[turn % len(world.sizes)], turn)
            with turns:
                world.assert_right(world.runner(batch), batch)

        return act

    storm([acting(world) for world in two], 30)


def test_halves_in_two_threads(pausing: Pausing) -> None:
    """A view may be replayed by another thread than filled it, as long as it was filled last."""
    runner, right = pausing.runner, pausing.right(7, 1)
    with ThreadPoolExecutor(1) as other:
        first = runner.fill(pausing.batch(7, 1))
        assert torch.equal(other.submit(lambda: answer(runner.replay(first))).result(PATIENCE), right)
        second = other.submit(lambda: runner.fill(pausing.batch(3, 2))).result(PATIENCE)
    with pytest.raises(ReplayError, match="was not filled last"):
        runner.replay(first)
    assert torch.equal(answer(runner.replay(second)), pausing.right(3, 2))


def made(kind: str, backend: Backend, pause: Pause, **options: Any) -> tuple[Any, Callable[[int], Any]]:
    """A runner that is not captured, whose step pauses, and its batches by rows."""
    if kind == "breakable":
        model = prefilled.Model().to(backend.device)
        model.register_forward_pre_hook(lambda *_: pause() * 0 or None)
        runner: Any = prefilled.runner_of(kind, model, backend, **options)
        return runner, lambda rows: prefilled.batch_of([rows], rows, backend.device)

    def step(view: LifeInputs) -> torch.Tensor:
        pause()
        return worlds.step(view)

    runner = DecodeRunner(LifeInputs, step, buckets=[4, 16], backend=backend, progress=False, **options)
    return runner, lambda rows: batch_of(rows, rows, backend.device)


@pytest.mark.parametrize("kind", ["decode", "breakable"])
@pytest.mark.parametrize("late", [False, True])
def test_a_capture_is_not_disturbed(backend: Backend, kind: str, *, late: bool) -> None:
    """Whatever another thread asks of the runner that writes slots is refused, and what is captured is right."""
    held = Held()
    (runner, batch), (twin, _) = made(kind, backend, held.pause, lazy=late), made(kind, backend, lambda: 1)
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
        outputs = runner(batch(rows)).clone()  # the twin's graphs use the same pool
        assert torch.equal(outputs, twin(batch(rows)))
    assert runner.report.captured == (4, 16)
