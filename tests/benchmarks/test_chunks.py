"""Several steps in one launch, beside single steps and beside a loop by hand. Run with -s to see the tables."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from unittest import mock

import pytest
import torch

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, copied, output
from slotgraph.backends import Backend
from slotgraph.dataflow.capabilities import HOST
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

    whole, host = dict[str, list[float]](), dict[str, list[float]]()
    with mock.patch.object(runner.coordinator, "wait", timed_wait):
        for _ in range(2 if is_host else ROUNDS):
            for chunk, hand in hands.items():
                begin = functools.partial(runner.steps, batch, ahead=1, chunk=chunk)
                own = timed(begin, lambda step: step.tokens(), lambda: waits[0])
                other = timed(hand.tokens, lambda _: None, functools.partial(getattr, hand, "waited"))
                for name, (us, of_host) in ((f"steps, chunk={chunk}", own), (f"by hand, {chunk} steps", other)):
                    whole.setdefault(name, []).append(us)
                    host.setdefault(name, []).append(of_host)
    first = [next(step_of).tokens() for step_of in [runner.steps(batch, chunk=8)] for _ in range(9)]
    tokens = hands[8].tokens()
    assert first == [next(tokens) for _ in range(9)]
    title = f"{device_time}, {rows} requests"
    show(f"{title}: a step", whole)
    show(f"{title}: a step, on the host", host)
