"""Uploads in flight on the stand-in: host memory is not written again before the device has read it."""

import functools
from typing import Any

import pytest
import torch

from slotgraph import BATCH, DecodeRunner, Inputs, Step, computed, copied
from slotgraph.backends.npu import NpuBackend
from slotgraph.backends.ring import ENTRIES, Ring, Slices, finish_on, packet_on, pinned, ring_on
from slotgraph.dataflow.upload import Upload

pytestmark = pytest.mark.modes("eager", "lazy")
SENDS = 3 * ENTRIES + 5
NBYTES = 64


class Passed:
    """An event that says at once that all is done."""

    def query(self) -> bool:
        """Always."""
        return True

    def synchronize(self) -> None:
        """Nothing is waited for."""


def received(upload: Upload) -> list[int]:
    """What the device found in the packet after each of many sends, none of which was awaited."""
    copies = []
    for number in range(SENDS):
        upload.send(bytes([number % 251]) * NBYTES, None)
        copies.append(upload.packet.clone())
    found = [set(copy.tolist()) for copy in copies]
    return [one.pop() if len(one) == 1 else -1 for one in found]


EXPECTED = [number % 251 for number in range(SENDS)]


def test_ring() -> None:
    """More sends than the ring has entries, all of them in flight, arrive as they were sent."""
    assert received(ring_on(NpuBackend().device, NBYTES)) == EXPECTED


@pytest.mark.modes("lazy")
def test_ring_without_its_events(npu: Any) -> None:
    """Without its events the same ring overwrites what the device has not read yet: lazy streams show it each time."""
    device = NpuBackend().device
    packet = packet_on(device, NBYTES)
    ring = Ring(packet, pinned, Slices(packet).copy, Passed, functools.partial(finish_on, npu, device))
    found = received(ring)
    assert found != EXPECTED
    assert found[-1] == EXPECTED[-1]  # what was written last is there


def numbered(step: Step) -> list[int]:
    """Each padded row's number, from the live ones on."""
    return [row + step.live(BATCH) for row in range(step.padded(BATCH))]


class FromTheHost(Inputs):
    """All of it comes from the host."""

    input_ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=3)
    weights: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0.5)
    rows: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int32)
    numbers: torch.Tensor = computed(numbered, shape=BATCH, dtype=torch.int64)


def result(view: FromTheHost) -> torch.Tensor:
    """All slots in one."""
    return (view.input_ids + view.numbers + view.rows) * view.weights


@pytest.mark.parametrize("kind", ["lists", "tensors", "pinned"])
def test_runner_in_flight(kind: str) -> None:
    """Steps by the hundred, handed over without a wait, each with host memory that is overwritten at once."""
    runner = DecodeRunner(FromTheHost, result, buckets=[4, 8], backend="npu", progress=False)
    runner.capture()
    draw = torch.Generator().manual_seed(5)
    ids, weights = torch.empty(8, dtype=torch.int64), torch.empty(8)
    if kind == "pinned":
        ids, weights = ids.pin_memory(), weights.pin_memory()
    outputs, expected = [], []
    for number in range(SENDS):
        rows = 1 + number % 8
        ids.random_(1, 1000, generator=draw)
        weights.uniform_(1, 2, generator=draw)
        given = (ids[:rows], weights[:rows])
        expected.append((given[0] + torch.arange(rows) + rows + rows) * given[1])
        sources = [one.tolist() if kind == "lists" else one for one in given]
        outputs.append(runner({"input_ids": sources[0], "weights": sources[1]}).clone())
    ids.fill_(-1)
    for one, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other)
