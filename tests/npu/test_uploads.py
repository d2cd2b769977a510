"""Uploads in flight on the stand-in: host memory is not written again before the device has read it."""

import functools
from typing import Any

import pytest

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
