"""Steps in flight, on several streams and from several threads; the same on the CPU, where nothing is in flight."""

import gc
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, DecodeRunner, Inputs, computed, copied
from slotgraph.backends import Backend, load
from slotgraph.backends.ring import ENTRIES
from slotgraph.pool import InputPool
from tests.strategies import draw

BUCKETS: Final = (2, 8, 32)
PAD, WEIGHT = -3, 2.0
LONG: Final = 40_000_000
"""Cycles that take some twenty milliseconds."""
MOST_GROWTH = 32 << 20
DEVICES = [pytest.param("cuda", marks=pytest.mark.cuda)] if load("cuda").is_available() else []


class Flow(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=PAD)
    weights: torch.Tensor = copied(BATCH, 2, dtype=torch.float32, pad=WEIGHT, strided=True)
    live: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int32)


class Wide(Flow):  # with rows of too many bytes to go along in a command
    table: torch.Tensor = copied(BATCH, 2048, dtype=torch.int32, pad=1)


def flow_step(view: Flow) -> torch.Tensor:
    """Whole numbers that depend on every slot and on every tail; exact in any order of addition."""
    rows = view.ids * 3 + view.live + view.ids.sum() + view.weights.sum().long()
    return rows + view.table.sum() if isinstance(view, Wide) else rows


@attrs.frozen
class Drawn:
    """One batch: its values on the host, which no step sees, and on the device, from which sources are made."""

    host: dict[str, torch.Tensor]
    device: dict[str, torch.Tensor]

    @classmethod
    def of(cls, backend: Backend, kind: type[Flow], rows: int, seed: int) -> "Drawn":
        """Random whole numbers, none of which is a tail's."""
        host = {"ids": draw(1, 999, (rows,), seed), "weights": draw(3, 98, (rows, 2), seed + 1, torch.float32)}
        if kind is Wide:
            host["table"] = draw(2, 98, (rows, 2048), seed + 2, torch.int32)
        return cls(host, {name: one.to(backend.device) for name, one in host.items()})

    def fresh(self) -> dict[str, torch.Tensor]:
        """New tensors of the current stream, made by the device without any wait."""
        return {name: one.clone() for name, one in self.device.items()}

    def answer(self, *, padded: bool = True) -> torch.Tensor:
        """What the step must give, worked out on the host."""
        ids, rows = self.host["ids"], len(self.host["ids"])
        tail = next(size for size in BUCKETS if size >= rows) - rows if padded else 0
        whole = int(ids.sum()) + PAD * tail + int(self.host["weights"].sum()) + int(WEIGHT) * 2 * tail
        if "table" in self.host:
            whole += int(self.host["table"].sum()) + 2048 * tail
        return ids * 3 + rows + whole


@attrs.frozen
class Place:
    backend: Backend

    @property
    def has_streams(self) -> bool:
        return self.backend.name == "cuda"

    def stream(self) -> Any:
        """A new stream that waits for all that was done so far; None where there is none."""
        if not self.has_streams:
            return None
        stream = torch.cuda.Stream(self.backend.device)
        stream.wait_stream(torch.cuda.current_stream(self.backend.device))
        return stream

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def wait_for(self, stream: Any) -> None:
        if stream is not None:
            torch.cuda.current_stream(self.backend.device).wait_stream(stream)

    def busy(self, cycles: int = LONG) -> None:
        if self.has_streams:
            torch.cuda._sleep(cycles)

    def runner(self, kind: type[Flow], lowering: str, **options: Any) -> DecodeRunner[Any]:
        return DecodeRunner(kind, flow_step, buckets=BUCKETS, backend=self.backend, lowering=lowering, **options)

    def captured(self, kind: type[Flow], lowering: str) -> DecodeRunner[Any]:
        runner = self.runner(kind, lowering)
        runner.capture()
        return runner

    def pool(self, kind: type[Flow], count: int, seed: int) -> list[Drawn]:
        sizes = draw(0, BUCKETS[-1], (count,), seed).tolist()
        pool = [Drawn.of(self.backend, kind, rows, seed + index) for index, rows in enumerate(sizes)]
        self.backend.synchronize()
        return pool

    def assert_answers(self, got: list[torch.Tensor], drawn: list[Drawn], *, padded: bool = True) -> None:
        self.backend.synchronize()
        assert len(got) == len(drawn)
        for index, (outputs, one) in enumerate(zip(got, drawn, strict=True)):
            answer = one.answer(padded=padded)
            assert torch.equal(outputs.cpu(), answer), f"step {index}: {outputs} is not {answer}"


@pytest.fixture(scope="module", params=["cpu-capture", *DEVICES])
def place(request: pytest.FixtureRequest) -> Place:
    """Where the steps run."""
    return Place(load(request.param)())


@pytest.fixture(params=["in_graph", "fused", "foreach"])
def lowering(place: Place, request: pytest.FixtureRequest) -> str:
    """Each lowering that there is here."""
    if request.param not in place.backend.capabilities.lowerings:
        pytest.skip(f"{place.backend.name} has no lowering {request.param!r} here")
    return str(request.param)


WAYS = ("device", "list", "arrays", "host", "strided")


def brought(way: str, held: dict[str, torch.Tensor], drawn: Drawn) -> dict[str, Any]:
    """A batch on the device, one slot as a list or with gaps; or all of it in memory that is held and overwritten."""
    if way in ("arrays", "host"):
        held |= {name: one.clone() for name, one in drawn.host.items()}
        return {name: one.numpy() if way == "arrays" else one for name, one in held.items()}
    batch: dict[str, Any] = drawn.fresh()
    if way == "list":
        batch["ids"] = drawn.host["ids"].tolist()
    elif way == "strided":
        batch["weights"] = torch.stack([batch["weights"]] * 2, -1)[..., 0]
    return batch


def garbage(batch: dict[str, torch.Tensor]) -> None:
    """Allocate as much again and again, and write over all of it."""
    kept = [torch.full_like(one, 77) for _ in range(3) for one in batch.values()]
    del kept


def in_a_thread(work: Callable[..., Any], *args: Any) -> Any:
    """Do something in a new thread, and hand on what it returns or raises."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(work, *args).result()


def step(run: Callable[[Any], torch.Tensor], batch: Any) -> torch.Tensor:
    """A copy of a step's outputs."""
    return run(batch).clone()


@attrs.frozen
class Turn:
    """One step: which runner; streams of fill and replay; part of `LONG` to sleep first; where sources are, and go."""

    runner: int
    here: int
    there: int
    busy: int
    way: int
    after: str

    def play(
        self, place: Place, runner: DecodeRunner[Any], drawn: Drawn, streams: list[Any], *, whole: bool
    ) -> torch.Tensor:
        held, whole = dict[str, torch.Tensor](), whole or self.here == self.there
        with place.on(streams[self.here]):
            if self.busy:
                place.busy(LONG // self.busy)
            batch = brought(WAYS[self.way], held, drawn)
            filled = batch if whole else runner.fill(batch)
        with place.on(streams[self.here if whole else self.there]):
            outputs = step(runner if whole else runner.replay, filled)
        for one in held.values():
            one.fill_(44)  # host data was read when the call returned
        with place.on(streams[self.here]):
            if self.after == "overwritten" and whole:
                for one in batch.values():
                    if isinstance(one, torch.Tensor):
                        one.fill_(55)
            elif self.after == "freed":
                batch.clear()
                garbage(drawn.device)
        return outputs


turns = st.builds(
    Turn,
    runner=st.integers(0, 1),
    here=st.integers(0, 3),
    there=st.integers(0, 3),
    busy=st.sampled_from([0, 0, 8, 16]),
    way=st.integers(0, len(WAYS) - 1),
    after=st.sampled_from(["kept", "freed", "overwritten"]),
)


@pytest.mark.parametrize("pooled", [False, True], ids=["apart", "pooled"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@settings(max_examples=15)
@given(data=st.data())
def test_steps_on_many_streams_are_right(place: Place, data: st.DataObject, *, graphs: bool, pooled: bool) -> None:
    """Two runners over one graph memory take turns on busy streams, whatever becomes of the sources.

    With a pool the runners share their input memory too, so that each fills and replays in one call.
    """
    kind, lowerings = Wide if data.draw(st.booleans()) else Flow, {*place.backend.capabilities.lowerings}
    lowering = data.draw(st.sampled_from(sorted(lowerings - {"slot_by_slot"})))
    schedule = data.draw(st.lists(turns, min_size=4, max_size=40))
    shared = InputPool("first", "then")
    phases: list[dict[str, Any]] = [{"phase": shared[one]} if pooled else {} for one in ("first", "then")]
    runners = [place.runner(kind, lowering, graphs=graphs, **phase) for phase in phases]
    for runner in runners:
        runner.capture()
    assert not pooled or (shared.layout is not None and shared.layout.saved > 0)
    pool, streams = place.pool(kind, len(schedule), 1), [None, *(place.stream() for _ in range(3))]
    got = [
        turn.play(place, runners[turn.runner], drawn, streams, whole=pooled or not graphs)
        for turn, drawn in zip(schedule, pool, strict=True)
    ]
    place.assert_answers(got, pool, padded=graphs)


@pytest.mark.parametrize("kind", [Flow, Wide])
def test_sources_of_another_stream_may_be_freed_at_once(place: Place, lowering: str, kind: type[Flow]) -> None:
    """Memory of another stream stays with a step until the device has read it, though its owner lets go of it."""
    if lowering == "foreach":
        pytest.skip("as with any copy of torch's, the owner must see to that: record_stream")
    runner, pool, got = place.captured(kind, lowering), place.pool(kind, 60, 4), list[torch.Tensor]()
    other = place.stream()
    for drawn in pool:
        with place.on(other):
            batch = drawn.fresh()
        place.wait_for(other)
        place.busy(LONG // 16)
        got.append(step(runner, batch))
        batch.clear()
        with place.on(other):
            garbage(drawn.device)
    place.assert_answers(got, pool)


def test_static_sources_are_read_in_each_step(place: Place, lowering: str) -> None:
    """Static sources that are written before each step, as an engine has them, are read in each."""
    runner, got = place.captured(Wide, lowering), list[torch.Tensor]()
    pool = [Drawn.of(place.backend, Wide, 7, seed) for seed in range(50)]
    batch = pool[0].fresh()
    place.busy()
    for drawn in pool:
        for name, one in batch.items():
            one.copy_(drawn.device[name])
        got.append(step(runner, batch))
    place.assert_answers(got, pool)


@pytest.mark.parametrize("kind", [Flow, Wide])
def test_many_steps_wait_for_a_slow_kernel(place: Place, lowering: str, kind: type[Flow]) -> None:
    """Far more steps than the ring has entries, some of new threads, wait for a slow kernel; their sources are gone."""
    runner, pool, got = place.captured(kind, lowering), place.pool(kind, 300, 8), list[torch.Tensor]()
    place.busy(10 * LONG)
    for index, drawn in enumerate(pool):
        held = dict[str, torch.Tensor]()
        batch = brought(WAYS[index % len(WAYS)], held, drawn)
        if index % 9 == 1:
            got.append(in_a_thread(step, runner, batch))
        elif index % 9 == 2:
            got.append(in_a_thread(step, runner.replay, in_a_thread(runner.fill, batch)))
        else:
            got.append(step(runner, batch))
        for one in held.values():
            one.fill_(44)  # host data was read when the call returned
    place.assert_answers(got, pool)


def resident() -> int:
    """Bytes that the process holds in memory now; the most so far where the system does not tell."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_nothing_grows(place: Place, lowering: str) -> None:
    """Thousands of steps with fresh sources of all sizes and kinds take no more memory, of the device or the host."""
    runner, pool = place.captured(Wide, lowering), place.pool(Wide, 64, 9)
    ways = ("device", "device", "device", "list", "strided", "arrays")
    many, small = 20_000 if place.has_streams else 600, Drawn.of(place.backend, Wide, 1, 3)

    def steps(count: int) -> tuple[int, int]:
        for index in range(count):
            runner(brought(ways[index % len(ways)], {}, pool[index * 7 % len(pool)]))
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
