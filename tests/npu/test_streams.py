"""Several streams on the stand-in, and uploads in flight: steps come on any stream, and sources belong to any."""

from typing import Any

import pytest
import torch

from slotgraph import BATCH, DecodeRunner, Inputs, copied
from slotgraph.backends.accelerator import AcceleratorBackend
from slotgraph.backends.npu import NpuBackend
from slotgraph.backends.ring import ENTRIES, ring_on

pytestmark = pytest.mark.modes("eager", "lazy")
KINDS = pytest.mark.parametrize("kind", [NpuBackend, AcceleratorBackend])
Kind = type[NpuBackend] | type[AcceleratorBackend]


class Numbers(Inputs):
    numbers: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-5)


def runner_on(backend: NpuBackend | AcceleratorBackend) -> DecodeRunner[Numbers]:
    """A captured runner whose outputs depend on every row, the padded ones too."""
    options: dict[str, Any] = {"buckets": [4], "backend": backend, "progress": False}
    runner = DecodeRunner(Numbers, lambda view: view.numbers * 3 + view.numbers.sum(), **options)
    runner.capture()
    return runner


def expected(numbers: list[int]) -> list[int]:
    """The same on the host."""
    return [one * 3 + sum(numbers) - 5 * (4 - len(numbers)) for one in numbers]


@KINDS
def test_a_later_stream_reads_what_an_earlier_one_wrote(kind: Kind, npu: Any) -> None:
    """Of two streams, whichever they are, the later one reads what the earlier one wrote."""
    backend, streams = kind(), [npu.default_stream(), npu.Stream(), npu.Stream()]
    key, numbers = backend.stream_key(), []
    for stream in streams:
        with npu.stream(stream):
            numbers.append(key())
    assert len(set(numbers)) == len(streams)
    written = torch.zeros(4, dtype=torch.int64, device=backend.device)
    backend.synchronize()
    for step, (first, then) in enumerate([(0, 1), (1, 0), (1, 2), (2, 0), (0, 2), (2, 1)]):
        with npu.stream(streams[first]):
            written.fill_(step + 1)
        backend.order(numbers[first], numbers[then])
        with npu.stream(streams[then]):
            read = written.clone()
            assert read.tolist() == [step + 1] * 4


@KINDS
def test_steps_on_many_streams_find_the_buffers_as_they_left_them(kind: Kind, npu: Any) -> None:
    """Steps that come on one stream after the other find the buffers as they left them, none of it awaited."""
    backend = kind()
    runner, streams = runner_on(backend), [npu.default_stream(), *(npu.Stream() for _ in range(3))]
    pool = [torch.randint(1, 1000, (1 + index % 4,)).tolist() for index in range(20)]
    on_device = [torch.tensor(one, device=backend.device) for one in pool]
    backend.synchronize()
    outputs = []
    for index, (host, there) in enumerate(zip(pool, on_device, strict=True)):
        with npu.stream(streams[index * 7 % 4]):
            outputs.append(runner({"numbers": host if index % 3 else there}).clone())
    backend.synchronize()
    assert [one.tolist() for one in outputs] == [expected(one) for one in pool]


def test_the_host_waits_for_a_stream_of_another_library(npu: Any) -> None:
    """A step may come on a stream that torch_npu does not know, which takes no events: the host waits instead."""
    backend = NpuBackend()
    runner, stream = runner_on(backend), npu.Stream()
    foreign = npu.ExternalStream(stream.npu_stream)
    batches = [torch.tensor([index, index + 1], device=backend.device) for index in range(4)]
    backend.synchronize()
    outputs = []
    for index, batch in enumerate(batches):
        with npu.stream(foreign if index % 2 else npu.default_stream()):
            outputs.append(runner({"numbers": batch}).clone())
    backend.synchronize()
    assert [one.tolist() for one in outputs] == [expected([index, index + 1]) for index in range(4)]


@KINDS
def test_a_step_that_leaves_another_stream_is_captured(kind: Kind, npu: Any) -> None:
    """A step that makes another stream the current one is captured, and leaves the caller's as it was."""
    backend, before = kind(), npu.current_stream()
    ones = torch.ones(4, device=backend.device)

    def step() -> torch.Tensor:
        doubled = ones * 2
        npu.set_stream(npu.Stream())
        return doubled

    graph = backend.capture(step)
    assert npu.current_stream() == before
    graph.replay()
    assert graph.outputs.tolist() == [2.0] * 4


def test_more_sends_than_the_ring_has_entries_arrive() -> None:
    """More sends than the ring has entries, all of them in flight, arrive as they were sent."""
    upload, copies, sent = ring_on(NpuBackend().device, 64), [], [number % 251 for number in range(3 * ENTRIES + 5)]
    for number in sent:
        upload.send(bytes([number]) * 64, None)
        copies.append(upload.packet.clone())
    assert [copy.tolist() for copy in copies] == [[number] * 64 for number in sent]
