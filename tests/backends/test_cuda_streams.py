"""Steps in flight, on several streams and from several threads; the same on the CPU, where nothing is in flight."""

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slotgraph import DecodeRunner, InputPool
from slotgraph.backends.ring import ENTRIES
from tests.backends.flow import BUCKETS, LONG, Drawn, Flow, Place, Wide, assert_answers, flow_step, place_of
from tests.memory import resident

KINDS = pytest.mark.parametrize("kind", [Flow, Wide])
MOST_GROWTH = 32 << 20


@pytest.fixture(scope="module", params=["cpu-capture", pytest.param("cuda", marks=pytest.mark.cuda)])
def place(request: pytest.FixtureRequest) -> Place:
    """Where the steps run."""
    return place_of(request.param)


@pytest.fixture(scope="module", params=["in_graph", "fused", "foreach"])
def lowering(place: Place, request: pytest.FixtureRequest) -> str:
    """Each lowering that there is here."""
    if request.param not in place.backend.capabilities.lowerings:
        pytest.skip(f"{place.backend.name} has no lowering {request.param!r} here")
    return str(request.param)


@KINDS
def test_steps_on_many_streams(place: Place, lowering: str, kind: type[Flow]) -> None:
    """Steps that come on one stream after the other, each of them busy, find the buffers as they left them."""
    runner, pool, got = place.runner(kind, lowering), place.pool(kind, 60, 1), list[torch.Tensor]()
    streams = [None, place.stream(), place.stream(), place.stream()]
    for index, drawn in enumerate(pool):
        with place.on(streams[index * 7 % 4]):
            if index % 5 == 0:
                place.busy(LONG // 8)
            got.append(runner(drawn.fresh()).clone())
    place.backend.synchronize()
    assert_answers(got, pool)


@KINDS
def test_two_runners_on_two_streams(place: Place, lowering: str, kind: type[Flow]) -> None:
    """Runners whose graphs use the same memory take turns, though each is on a busy stream of its own."""
    runners, pool, got = [place.runner(kind, lowering) for _ in range(2)], place.pool(kind, 40, 6), list[torch.Tensor]()
    streams = [place.stream(), place.stream()]
    for index, drawn in enumerate(pool):
        with place.on(streams[index % 2]):
            place.busy(LONG // 8 if index % 3 else 1)
            got.append(runners[index % 2](drawn.fresh()).clone())
    place.backend.synchronize()
    assert_answers(got, pool)


@KINDS
@pytest.mark.parametrize("graphs", [True, False])
def test_two_phases_on_two_streams(place: Place, lowering: str, kind: type[Flow], graphs: bool) -> None:  # noqa: FBT001
    """Runners that share input memory take turns from their fills on, though each is on a busy stream of its own."""
    shared, pool, got = InputPool("first", "then"), place.pool(kind, 40, 8), list[torch.Tensor]()
    options: dict[str, Any] = {"backend": place.backend, "lowering": lowering, "graphs": graphs}
    runners = [
        DecodeRunner(kind, flow_step, buckets=BUCKETS, phase=shared[one], **options) for one in ("first", "then")
    ]
    for runner in runners:
        runner.capture()
    assert shared.layout is not None
    assert shared.layout.saved > 0
    streams = [place.stream(), place.stream()]
    for index, drawn in enumerate(pool):
        with place.on(streams[index % 2]):
            place.busy(LONG // 8 if index % 3 else 1)
            got.append(runners[index % 2](drawn.fresh()).clone())
    place.backend.synchronize()
    assert_answers(got, pool, padded=graphs)


@KINDS
def test_fill_here_and_replay_there(place: Place, lowering: str, kind: type[Flow]) -> None:
    """A view that was filled on a busy stream is replayed on another, and the next fill waits for that replay."""
    runner, pool, got = place.runner(kind, lowering), place.pool(kind, 40, 2), list[torch.Tensor]()
    one, other = place.stream(), place.stream()
    for index, drawn in enumerate(pool):
        with place.on(one):
            place.busy(LONG // 8)
            view = runner.fill(drawn.fresh())
        with place.on(other):
            place.busy(LONG // 8 if index % 2 else 1)
            got.append(runner.replay(view).clone())
    place.backend.synchronize()
    assert_answers(got, pool)


@KINDS
def test_sources_are_freed_at_once(place: Place, lowering: str, kind: type[Flow]) -> None:
    """A batch that is gone when the call returns, its memory written by others on the same stream, was read before."""
    runner, pool, got = place.runner(kind, lowering), place.pool(kind, 60, 3), list[torch.Tensor]()
    place.busy()
    for drawn in pool:
        batch = drawn.fresh()
        got.append(runner(batch).clone())
        batch.clear()
        place.garbage(drawn.device)
    place.backend.synchronize()
    assert_answers(got, pool)


@KINDS
def test_sources_of_another_stream_are_freed_at_once(place: Place, lowering: str, kind: type[Flow]) -> None:
    """Memory of another stream stays with a step until the device has read it, though its owner lets go of it."""
    if lowering == "foreach":
        pytest.skip("as with any copy of torch's, the owner must see to that: record_stream")
    runner, pool, got = place.runner(kind, lowering), place.pool(kind, 60, 4), list[torch.Tensor]()
    other = place.stream()
    for drawn in pool:
        with place.on(other):
            batch = drawn.fresh()
        if other is not None:
            torch.cuda.current_stream(place.backend.device).wait_stream(other)
        place.busy(LONG // 16)
        got.append(runner(batch).clone())
        batch.clear()
        with place.on(other):
            place.garbage(drawn.device)
    place.backend.synchronize()
    assert_answers(got, pool)


@KINDS
def test_sources_are_overwritten_at_once(place: Place, lowering: str, kind: type[Flow]) -> None:
    """What the issuing stream writes to a source after the call, no step before it sees."""
    runner, pool, got = place.runner(kind, lowering), place.pool(kind, 60, 5), list[torch.Tensor]()
    place.busy()
    for drawn in pool:
        batch = drawn.fresh()
        got.append(runner(batch).clone())
        for one in batch.values():
            one.fill_(55)
    place.backend.synchronize()
    assert_answers(got, pool)


@KINDS
def test_the_same_sources_again_and_again(place: Place, lowering: str, kind: type[Flow]) -> None:
    """Static sources that are written before each step, as an engine has them, are read in each."""
    runner, got = place.runner(kind, lowering), list[torch.Tensor]()
    pool = [Drawn.of(place.backend, kind, 7, seed) for seed in range(50)]
    batch = pool[0].fresh()
    place.busy()
    for drawn in pool:
        for name, one in batch.items():
            one.copy_(drawn.device[name])
        got.append(runner(batch).clone())
    place.backend.synchronize()
    assert_answers(got, pool)


def test_debugging_orders_foreign_streams(place: Place, lowering: str) -> None:
    """With debug, a source that its own stream still writes, and overwrites after the call, is right, and counted."""
    for how in (lowering, "slot_by_slot"):
        runner, pool, got = place.runner(Flow, how, debug=True), place.pool(Flow, 12, 6), list[torch.Tensor]()
        other = place.stream()
        for drawn in pool:
            with place.on(other):
                batch = {name: torch.zeros_like(one) for name, one in drawn.device.items()}
                place.busy(LONG // 4)
                for name, one in batch.items():
                    one.copy_(drawn.device[name])
            outputs = runner(batch)
            with place.on(other):
                for one in batch.values():
                    one.fill_(66)
            got.append(torch.as_tensor(outputs).clone())
        place.backend.synchronize()
        assert_answers(got, pool)
        has_memory = sum(drawn.rows > 0 for drawn in pool)
        assert runner.stats()["detours"].get("foreign_stream", 0) == (has_memory if place.has_streams else 0)


def test_debugging_leaves_its_own_stream_alone(place: Place, lowering: str) -> None:
    """With debug, sources of the issuing stream go the runner's own way, and are counted as nothing else."""
    runner, pool = place.runner(Flow, lowering, debug="streams"), place.pool(Flow, 12, 7)
    with place.elsewhere():
        got = [torch.as_tensor(runner(drawn.fresh())).clone() for drawn in pool]
    place.backend.synchronize()
    assert_answers(got, pool)
    assert runner.stats()["detours"] == {}
    assert runner.stats()["lowerings"] == {lowering: len(pool)}


def in_order(_: dict[str, torch.Tensor], drawn: Drawn) -> dict[str, Any]:
    """The batch as it is; its order is another."""
    return drawn.fresh()


def as_lists(_: dict[str, torch.Tensor], drawn: Drawn) -> dict[str, Any]:
    """One slot as a list, the others where they are."""
    return {**drawn.fresh(), "ids": drawn.host["ids"].tolist()}


def as_arrays(held: dict[str, torch.Tensor], drawn: Drawn) -> dict[str, Any]:
    """All slots as arrays, over memory that is overwritten after the call."""
    held |= {name: one.clone() for name, one in drawn.host.items()}
    return {name: one.numpy() for name, one in held.items()}


def on_the_host(held: dict[str, torch.Tensor], drawn: Drawn) -> dict[str, Any]:
    """All slots as host tensors, likewise."""
    held |= {name: one.clone() for name, one in drawn.host.items()}
    return dict(held)


def strided(_: dict[str, torch.Tensor], drawn: Drawn) -> dict[str, Any]:
    """One slot with room between its numbers."""
    batch = drawn.fresh()
    return {**batch, "weights": torch.stack([batch["weights"]] * 2, -1)[..., 0]}


WAYS: dict[str, Callable[[dict[str, torch.Tensor], Drawn], dict[str, Any]]] = {
    one.__name__: one for one in (in_order, as_lists, as_arrays, on_the_host, strided)
}


@KINDS
@pytest.mark.parametrize("way", [*WAYS, "all"])
def test_many_steps_behind_a_slow_kernel(place: Place, lowering: str, kind: type[Flow], way: str) -> None:
    """Far more steps than the ring has entries, each with fresh sources that go at once, wait for one slow kernel."""
    runner, pool, got = place.runner(kind, lowering), place.pool(kind, 300, 8), list[torch.Tensor]()
    makers = list(WAYS.values()) if way == "all" else [WAYS[way]]
    place.busy(10 * LONG)
    for index, drawn in enumerate(pool):
        held = dict[str, torch.Tensor]()
        got.append(runner(makers[index % len(makers)](held, drawn)).clone())
        for one in held.values():
            one.fill_(44)  # host data was read when the call returned
    place.backend.synchronize()
    assert_answers(got, pool)


def test_nothing_grows(place: Place, lowering: str) -> None:
    """Thousands of steps with fresh sources of all sizes and kinds take no more memory, of the device or the host."""
    runner, pool = place.runner(Wide, lowering), place.pool(Wide, 64, 9)
    makers = [in_order, in_order, in_order, as_lists, strided, as_arrays]
    many, small = 20_000 if place.has_streams else 600, Drawn.of(place.backend, Wide, 1, 3)

    def steps(count: int) -> tuple[int, int]:
        for index in range(count):
            runner(makers[index % len(makers)]({}, pool[index * 7 % len(pool)]))
        for _ in range(2 * ENTRIES):
            runner(small.fresh())  # the last sources that are kept are small
        place.backend.synchronize()
        gc.collect()
        held = torch.cuda.memory_allocated(place.backend.device) if place.has_streams else 0
        return held, resident()

    before = steps(many // 5)
    after = steps(many)
    assert after[0] - before[0] <= (1 << 20), "the device's"
    assert after[1] - before[1] <= MOST_GROWTH, "the host's"


def step(run: Callable[[Any], torch.Tensor], batch: Any) -> torch.Tensor:
    """A copy of a step's outputs."""
    return run(batch).clone()


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Do something in a new thread, and hand on what it returns or raises."""
    found: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001 - it is raised again below
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found[0]


@KINDS
def test_threads_that_are_new_to_the_device(place: Place, lowering: str, kind: type[Flow]) -> None:
    """Steps and fills come from a new thread each, in turn with the main one, with device and host data."""
    runner: DecodeRunner[Any] = place.runner(kind, lowering)
    pool, got, makers = place.pool(kind, 40, 10), list[torch.Tensor](), list(WAYS.values())
    place.busy()
    for index, drawn in enumerate(pool):
        batch = makers[index % len(makers)]({}, drawn)
        if index % 3 == 0:
            got.append(runner(batch).clone())
        elif index % 3 == 1:
            got.append(in_a_thread(functools.partial(step, runner, batch)))
        else:
            view = in_a_thread(functools.partial(runner.fill, batch))
            got.append(in_a_thread(functools.partial(step, runner.replay, view)))
    place.backend.synchronize()
    assert_answers(got, pool)
