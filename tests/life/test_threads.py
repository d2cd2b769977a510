"""Threads: a runner lets one step in at a time and refuses whoever comes meanwhile; counts can be read at any time."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs
import pytest
import torch

from slotgraph import DecodeRunner, EagerRunner, Step, computed
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
        """One that does not pause."""
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
        thread = threading.Thread(target=lambda: self.outputs.append(answer(act())))
        thread.start()
        try:
            assert self.inside.wait(PATIENCE)
            yield
        finally:
            self.go.set()
            thread.join(PATIENCE)
        assert not thread.is_alive()


@attrs.frozen(eq=False)
class Pausing:
    """A runner whose batches may pause, and how they are made, by size, seed and pause."""

    runner: Runner[Any]
    batch: Callable[[int, int, Pause], Batch]

    def right(self, size: int, seed: int) -> torch.Tensor:
        """What a step gives that nobody disturbs."""
        return answer(self.runner(self.batch(size, seed, lambda: 1)))


def decoding(backend: Backend, lowering: str) -> Pausing:
    """A captured decode runner."""
    worlds.skip_without(backend, lowering)
    options: dict[str, Any] = {"buckets": worlds.BUCKETS, "lowering": lowering, "progress": False}
    runner = DecodeRunner(PausedInputs, worlds.step, backend=backend, **options)
    runner.capture()
    return Pausing(runner, lambda size, seed, pause: batch_of(size, seed, backend.device, pause=pause))


def eager(backend: Backend) -> Pausing:
    """An eager runner."""
    runner = EagerRunner(PausedInputs, worlds.step, backend=backend)
    return Pausing(runner, lambda size, seed, pause: batch_of(size, seed, backend.device, pause=pause))


def prefilling(backend: Backend) -> Pausing:
    """A captured breakable runner."""
    model = prefilled.Model().to(backend.device)
    runner = prefilled.runner_of("breakable", model, backend, inputs=PausedPrefill)
    runner.capture()

    def batch(size: int, seed: int, pause: Pause) -> Batch:
        return {**prefilled.batch_of([1, size - 1], seed, backend.device), "pause": pause}

    return Pausing(runner, batch)


MADE: Final[dict[str, Callable[[Backend], Pausing]]] = {
    "decode": lambda backend: decoding(backend, "foreach"),
    "decode, by shortcut": lambda backend: decoding(backend, "in_graph"),
    "decode, slot by slot": lambda backend: decoding(backend, "slot_by_slot"),
    "eager": eager,
    "prefill": prefilling,
}


@pytest.fixture(params=MADE)
def pausing(request: pytest.FixtureRequest, backend: Backend) -> Pausing:
    """Each kind of runner, after some steps."""
    made = MADE[request.param](backend)
    for size in (3, 7, 3, 7, 20):
        made.right(size, size)
    return made


@pytest.mark.parametrize("size", [7, 20], ids=["graph", "eager"])
def test_another_thread_is_refused(pausing: Pausing, size: int) -> None:
    """While a step is under way no other thread gets in; the step is right, and so is what comes after it."""
    runner, right = pausing.runner, pausing.right(size, 1)
    view = runner.fill(pausing.batch(3, 2, lambda: 1))
    other, held = pausing.batch(3, 3, lambda: 1), Held()
    steps = steps_of(runner)
    with held.within(lambda: runner(pausing.batch(size, 1, held.pause))):
        with pytest.raises(ReplayError, match=BUSY):
            runner(other)
        with pytest.raises(ReplayError, match=BUSY):
            runner.fill(other)
        with pytest.raises(ReplayError, match=BUSY):
            runner.replay(view)
        assert steps_of(runner) == steps
    assert torch.equal(held.outputs[0], right)
    assert steps_of(runner) == steps + 1
    with pytest.raises(ReplayError, match="was not filled last"):
        runner.replay(view)
    assert torch.equal(pausing.right(size, 1), right)


def test_refused_in_a_fill(pausing: Pausing) -> None:
    """A refused step of another thread takes nothing from a fill under way, whose view can then be replayed."""
    runner, right = pausing.runner, pausing.right(7, 1)
    held = Held()

    def act() -> torch.Tensor:
        outputs: torch.Tensor = runner.replay(runner.fill(pausing.batch(7, 1, held.pause)))
        return outputs

    with held.within(act), pytest.raises(ReplayError, match=BUSY):
        runner(pausing.batch(3, 2, lambda: 1))
    assert torch.equal(held.outputs[0], right)


def test_its_own_step_is_refused(pausing: Pausing) -> None:
    """A step that calls its own runner would overwrite the slots that it is made of: refused, and nothing is stuck."""
    runner, right = pausing.runner, pausing.right(7, 1)
    other = pausing.batch(3, 2, lambda: 1)
    with pytest.raises(Exception, match=BUSY):
        runner(pausing.batch(7, 1, lambda: int(runner(other) is None)))
    assert torch.equal(pausing.right(7, 1), right)


def test_halves_in_two_threads(pausing: Pausing) -> None:
    """A view may be replayed by another thread than filled it, as long as it was filled last."""
    runner, right = pausing.runner, pausing.right(7, 1)
    first = runner.fill(pausing.batch(7, 1, lambda: 1))
    assert torch.equal(in_thread(lambda: answer(runner.replay(first))), right)
    second = in_thread(lambda: runner.fill(pausing.batch(3, 2, lambda: 1)))
    with pytest.raises(ReplayError, match="was not filled last"):
        runner.replay(first)
    assert torch.equal(answer(runner.replay(second)), pausing.right(3, 2))


def in_thread(act: Callable[[], Any]) -> Any:
    """What a call gives in another thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join(PATIENCE)
    return found[0]


def storm(acts: list[Callable[[int], None]], turns: int) -> None:
    """Each act so many times, all of them at once; what one raises is raised here."""
    faults: list[BaseException] = []
    start = threading.Barrier(len(acts))

    def run(act: Callable[[int], None]) -> None:
        try:
            start.wait(PATIENCE)
            for turn in range(turns):
                act(turn)
        except BaseException as fault:  # noqa: BLE001 - to be raised where the test sees it
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    for fault in faults:
        raise fault


WORLDS: Final[dict[str, Callable[[Backend], World]]] = {
    name: worlds.WORLDS[name] for name in ("decode", "decode, in the graph", "eager", "prefill")
}


@pytest.mark.parametrize("name", WORLDS)
def test_many_threads_without_a_lock(backend: Backend, name: str) -> None:
    """Threads that do not take turns are refused or served, nothing else, and leave a runner that is right."""
    world = WORLDS[name](backend).warm()
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


def test_halves_without_a_lock(backend: Backend) -> None:
    """Of threads that fill and replay as they like, each gets its own batch's answer or an error, never another's."""
    world = worlds.eager(backend).warm()  # whose outputs nobody overwrites

    def acting(index: int) -> Callable[[int], None]:
        def act(turn: int) -> None:
            batch = world.batch(world.sizes[(turn + index) % len(world.sizes)], 10 * turn + index)
            with contextlib.suppress(ReplayError):
                world.assert_right(world.runner.replay(world.runner.fill(batch)), batch)

        return act

    storm([acting(index) for index in range(4)], 60)
    world.assert_well()


@pytest.mark.parametrize("name", WORLDS)
def test_taking_turns(backend: Backend, name: str) -> None:
    """Threads that take turns by a lock of their own are all served, and right."""
    world, lock = WORLDS[name](backend).warm(), threading.Lock()

    def acting(index: int) -> Callable[[int], None]:
        def act(turn: int) -> None:
            batch = world.batch(world.sizes[(turn + index) % len(world.sizes)], 10 * turn + index)
            with lock:
                world.assert_right(world.runner(batch), batch)

        return act

    storm([acting(index) for index in range(3)], 15)


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


@pytest.mark.parametrize("name", WORLDS)
def test_counts_are_read_meanwhile(backend: Backend, name: str) -> None:
    """Whoever scrapes the statistics from another thread holds up no step, and sees them grow, never torn."""
    world, seen = WORLDS[name](backend).warm(), [0]
    before = steps_of(world.runner)

    def step(turn: int) -> None:
        world.runner(world.batch(world.sizes[turn % len(world.sizes)], turn))

    def scrape(_: int) -> None:
        stats = world.runner.stats()
        assert stats["steps"].keys() >= {"eager"}
        seen.append(sum(stats["steps"].values()))

    storm([step, scrape], 80)
    assert seen[1:] == sorted(seen[1:])
    assert steps_of(world.runner) == before + 80
