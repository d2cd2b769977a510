"""Several steps in one launch, beside single steps and beside a loop by hand. Run with -s to see the tables."""

import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from unittest import mock

import pytest
import torch
from rich.console import Console

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, copied, output
from slotgraph.backends import Backend
from slotgraph.dataflow.capabilities import HOST
from slotgraph.dataflow.shown import Table, TableRow
from tests.benchmarks.shown import show

CHUNKS: Final = (1, 2, 4, 8)
ON_DEVICE: Final = {"about 20 us": 1, "about 100 us": 8, "about 600 us": 50}
"""Multiplications in a step, each some 12 us of an H200. Machines without a device run the first."""
ROUNDS: Final = 15
STEPS: Final = 160
Timed = tuple[float, float]
"""Microseconds a step, and those of the host without its waits."""


class Counting(Inputs):
    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda next_ids: next_ids)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda positions: positions + 1)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, then=lambda seq_lens: seq_lens + 1)
    next_ids: torch.Tensor = output(BATCH, dtype=torch.int64)


class Model:
    """A step that takes the device a while."""

    def __init__(self, device: torch.device, layers: int) -> None:
        self.width = 16 if device.type == "cpu" else 2048
        self.weight = torch.randn(self.width, self.width, device=device) / self.width**0.5
        self.layers = layers

    def next_ids(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One number a request, of its last one."""
        hidden = ids[:, None].float().expand(-1, self.width)
        for _ in range(self.layers):
            hidden = hidden @ self.weight
        return (ids * 3 + positions + hidden[:, 0].isnan()) % 997

    def step(self, view: Counting) -> torch.Tensor:
        """The same of a view."""
        return view.next_ids.copy_(self.next_ids(view.input_ids, view.positions))


class ByHand:
    """Two graphs of some steps in turn, over the same inputs; tokens are copied to the host behind each."""

    def __init__(self, backend: Backend, model: Model, rows: int, chunk: int) -> None:
        device, self.backend = backend.device, backend
        self.ids, self.positions = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        self.lens = torch.ones(rows, dtype=torch.int32, device=device)
        places = [torch.zeros(chunk, rows, dtype=torch.int64, device=device) for _ in range(2)]
        self.hosts = [backend.empty((chunk, rows), torch.int64, HOST) for _ in range(2)]
        self.mapped = [backend.mapped(host) for host in self.hosts]
        self.sources, self.waited = places, 0.0
        pool = backend.pool()

        def steps(place: torch.Tensor) -> None:
            for number in range(chunk):
                made = model.next_ids(self.ids, self.positions)
                place[number].copy_(made)
                self.ids.copy_(made)
                self.positions.add_(1)
                self.lens.add_(1)

        with torch.no_grad(), backend.stream():
            steps(places[0])
            backend.synchronize()
            self.graphs = [backend.capture(functools.partial(steps, place), pool=pool) for place in places]

    def launches(self) -> Iterator[Sequence[Sequence[int]]]:
        """Hand out tokens of each launch, one launch ahead."""
        self.ids.fill_(7)
        self.positions.zero_()
        events: list[Any] = [None, None]
        number = 0
        while True:
            turn = number % 2
            self.graphs[turn].replay()
            self.mapped[turn].copy_(self.sources[turn], non_blocking=True)
            events[turn] = self.backend.event(events[turn])
            if number:
                start = time.perf_counter()
                events[1 - turn].synchronize()
                self.waited += time.perf_counter() - start
                yield self.hosts[1 - turn].tolist()
            number += 1

    def device_time(self, chunk: int) -> float:
        """Return microseconds of a step if one replay follows the other, and nobody reads."""
        self.backend.synchronize()
        start = time.perf_counter()
        for number in range(STEPS // chunk):
            self.graphs[number % 2].replay()
        self.backend.synchronize()
        return 1e6 * (time.perf_counter() - start) / STEPS

    def tokens(self) -> Iterator[list[tuple[int, int]]]:
        """Hand out keys and tokens step by step."""
        for launch in self.launches():
            for row in launch:
                yield [*enumerate(row)]


def timed(begin: Callable[[], Iterator[Any]], take: Callable[[Any], object], waited: Callable[[], float]) -> Timed:
    """Time steps of a loop that has begun."""
    loop = begin()
    for _ in range(2 * max(CHUNKS) + 1):
        take(next(loop))
    before, start = waited(), time.perf_counter()
    for _ in range(STEPS):
        take(next(loop))
    seconds, waits = time.perf_counter() - start, waited() - before
    loop.close()  # type: ignore[attr-defined] # a generator
    return 1e6 * seconds / STEPS, 1e6 * (seconds - waits) / STEPS


@pytest.mark.slow
@pytest.mark.slotgraph_backends("cpu-capture", "cuda")
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("device_time", ON_DEVICE)
def test_several_steps_in_one_launch(backend: Backend, device_time: str, rows: int) -> None:
    """A step by single launches and by chunks, each beside the same number of steps unrolled by hand."""
    is_host, layers = backend.device.type == "cpu", ON_DEVICE[device_time]
    if is_host and layers > 1:
        pytest.skip("a step of that length is for a device")
    model = Model(backend.device, layers)
    runner: DecodeRunner[Counting, torch.Tensor] = DecodeRunner(
        Counting, model.step, buckets=[rows], output_rows=BATCH, backend=backend, chunks=CHUNKS, progress=False
    )
    runner.capture()
    batch = {"input_ids": [7] * rows, "positions": [0] * rows, "seq_lens": [1] * rows}
    hands = {chunk: ByHand(backend, model, rows, chunk) for chunk in CHUNKS}
    waits, wait = [0.0], runner.coordinator.wait

    def timed_wait(*given: Any, **named: Any) -> None:
        start = time.perf_counter()
        wait(*given, **named)
        waits[0] += time.perf_counter() - start

    whole, host, device = dict[str, list[float]](), dict[str, list[float]](), dict[str, list[float]]()
    with mock.patch.object(runner.coordinator, "wait", timed_wait):
        for _ in range(2 if is_host else ROUNDS):
            for chunk, hand in hands.items():
                begin = functools.partial(runner.steps, batch, ahead=1, chunk=chunk)
                own = timed(begin, lambda step: step.tokens(), lambda: waits[0])
                other = timed(hand.tokens, lambda _: None, functools.partial(getattr, hand, "waited"))
                for name, (us, of_host) in ((f"steps, chunk={chunk}", own), (f"by hand, {chunk} steps", other)):
                    whole.setdefault(name, []).append(us)
                    host.setdefault(name, []).append(of_host)
                    device.setdefault(name, []).append(hand.device_time(chunk))
    first = [next(step_of).tokens() for step_of in [runner.steps(batch, chunk=8)] for _ in range(9)]
    tokens = hands[8].tokens()
    assert first == [next(tokens) for _ in range(9)]
    title = f"{device_time}, {rows} requests"
    show(f"{title}: a step", whole)
    show(f"{title}: a step, on the host", host)
    if is_host:
        return
    idle = []
    for name, times in whole.items():
        share = 1 - statistics.median(device[name]) / statistics.median(times)
        idle.append({"way": name, "the device is idle": f"{max(0, share):.1%}"})
    Console(width=110).print(f"\n{Table(title, idle).lines(110)}", highlight=False, markup=False)


@pytest.mark.slow
@pytest.mark.slotgraph_backends("cpu-capture", "cuda")
@pytest.mark.parametrize("rows", [1, 64])
def test_host_time_of_a_step(backend: Backend, rows: int) -> None:
    """What the loop itself takes: no graph runs. "not read" is without tokens(), and the rest of a step is tokens().

    By hand, only the ids are read, and numbered. Times are those of this thread.
    """
    model = Model(backend.device, 1)
    runner: DecodeRunner[Counting, torch.Tensor] = DecodeRunner(
        Counting, model.step, buckets=[rows], output_rows=BATCH, backend=backend, chunks=CHUNKS, lowering="in_graph"
    )
    runner.capture()
    batch = {"input_ids": [7] * rows, "positions": [0] * rows, "seq_lens": [1] * rows}
    hands = {chunk: ByHand(backend, model, rows, chunk) for chunk in CHUNKS}
    times, kinds = dict[str, list[float]](), set[type]()
    for captured in runner.graphs.captured.values():
        kinds.update(map(type, captured.graphs))

    def measure(name: str, loop: Iterator[Any], take: Callable[[Any], object]) -> None:
        for _ in range(2 * max(CHUNKS) + 1):
            take(next(loop))
        start = time.thread_time()
        for _ in range(STEPS):
            take(next(loop))
        times.setdefault(name, []).append(1e6 * (time.thread_time() - start) / STEPS)
        loop.close()  # type: ignore[attr-defined] # a generator

    with contextlib.ExitStack() as patches:
        for kind in kinds:
            patches.enter_context(mock.patch.object(kind, "replay", return_value=None))
        for _ in range(ROUNDS):
            for chunk, hand in hands.items():
                begin = functools.partial(runner.steps, batch, ahead=1, chunk=chunk)
                measure(f"steps, chunk={chunk}", begin(), lambda step: step.tokens())
                measure(f"not read, chunk={chunk}", begin(), lambda _: None)
                measure(f"by hand, {chunk} steps", hand.tokens(), lambda _: None)
    assert next(runner.steps(batch)).tokens() == [(row, 21) for row in range(rows)]
    show(f"{rows} requests: the host's time of a step, without graphs", times)


@pytest.mark.slow
@pytest.mark.slotgraph_backends("cpu-capture", "cuda")
@pytest.mark.parametrize("returns", ["a slot", "logits"])
def test_memory_of_several_steps(backend: Backend, returns: str) -> None:
    """Bytes of graphs and outputs as reports say, and what torch and the device lost by the capture.

    `cpu-capture` keeps all that a step allocates, so its graphs grow with the number of steps.
    """
    is_host, rows = backend.device.type == "cpu", list[TableRow]()
    wide = 64 if is_host else 2048
    weight = torch.randn(wide, wide, device=backend.device) / wide**0.5

    def step(view: Counting) -> Any:
        hidden = view.input_ids[:, None].float().expand(-1, wide)
        for _ in range(6):
            hidden = (hidden @ weight).tanh()
        view.next_ids.copy_((view.input_ids * 3 + view.positions + hidden[:, 0].isnan()) % 997)
        return view.next_ids if returns == "a slot" else {"logits": hidden * 2, "ids": view.next_ids}

    def used() -> list[float]:
        gc.collect()
        if is_host:
            return []
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free]

    for chunk in (1, 4, 8):
        before = used()
        runner: DecodeRunner[Counting, Any] = DecodeRunner(
            Counting, step, buckets=[256], output_rows=BATCH, backend=backend, chunks=[chunk], progress=False
        )
        memory = runner.capture().memory
        graphs = [graph.nbytes for captured in runner.graphs.captured.values() for graph in captured.graphs]
        growth = [after - was for after, was in zip(used(), before, strict=True)]
        numbers = [memory.graphs, memory.outputs, *growth]
        names = ["graphs", "outputs", "torch allocated", "torch reserved", "device"]
        found = {name: f"{number / 2**20:.2f}" for name, number in zip(names, numbers, strict=False)}
        each = ", ".join(f"{number / 2**20:.2f}" for number in graphs)
        rows.append({"steps": chunk, **found, "each graph": each})
        del runner
    title = f"{backend.name}, a step that returns {returns}: MiB"
    Console(width=140).print(f"\n{Table(title, rows).lines(140)}", highlight=False, markup=False)
