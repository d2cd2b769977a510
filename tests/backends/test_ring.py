"""The ring against a device that does its work later, at random moments: nothing is overwritten or freed in flight."""

import ctypes
import gc
import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Final

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph.backends.ring import ENTRIES, SEGMENT, Ring, packet_on, ring_on
from slotgraph.dataflow.packet import WORD, Feed
from tests.packing import Streams, host_memory
from tests.strategies import noise

PACKET: Final = 4096
SMALL, LARGE = 64, 3000
HERE = torch.device("cpu")


def chance(seed: int) -> random.Random:
    """What random steps are drawn from."""
    return random.Random(seed)


class Source:
    """What a packet points to."""


class LazyDevice:
    """A device of several streams, each a queue that is worked off when the test says so.

    Copies and launches read the host's memory and the packet in their turn. faults: what was wrong then. sent: copies
    asked for. sources: of all launches.
    """

    def __init__(self) -> None:
        self.packet = torch.zeros(PACKET, dtype=torch.uint8)
        self.queues: dict[int, list[Callable[[], None]]] = {0: [], 1: []}
        self.stream = 0
        self.faults: list[str] = []
        self.hosts: list[tuple[int, int, weakref.ref[torch.Tensor]]] = []
        self.sources: list[weakref.ref[object]] = []
        self.ran = self.sent = 0

    def pinned(self, nbytes: int) -> torch.Tensor:
        memory = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        self.hosts.append((memory.data_ptr(), nbytes, weakref.ref(memory)))
        return memory

    def start(self, memory: torch.Tensor, at: int, nbytes: int) -> None:
        self.sent += 1
        address = memory.data_ptr() + at
        self.queues[self.stream].append(lambda: self._copy(address, nbytes))

    def inline(self, data: bytes, nbytes: int) -> None:
        self.sent += 1
        held = bytes(data[:nbytes])
        self.queues[self.stream].append(lambda: self._write(held))

    def launch(self, data: bytes, kept: object) -> None:
        """Queue a step, which reads its packet and all that this points to."""
        self.sources.append(alive := weakref.ref(kept))
        self.queues[self.stream].append(lambda: self._check(data, alive))

    def mark(self, again: "LazyMark | None") -> "LazyMark":
        """Record a point, anew in a mark that has passed."""
        if again is not None and not again.passed:
            self.faults.append("a point was recorded anew that the device had not passed")
        made = again or LazyMark(self, self.stream)
        made.stream, made.passed = self.stream, False
        self.queues[self.stream].append(made.reach)
        return made

    def advance(self, steps: int, stream: int = 0) -> None:
        for _ in range(min(steps, len(self.queues[stream]))):
            self.queues[stream].pop(0)()
            self.ran += 1

    def drain(self) -> None:
        for stream, queue in self.queues.items():
            self.advance(len(queue), stream)

    def ring(self, most_inline: int = 0) -> Ring:
        return Ring(self.packet, self.pinned, self.start, self.mark, self.drain, self.inline, most_inline)

    def _write(self, data: bytes) -> None:
        ctypes.memmove(self.packet.data_ptr(), data, len(data))

    def _copy(self, address: int, nbytes: int) -> None:
        for begin, size, alive in self.hosts:
            if begin <= address < begin + size and alive() is not None:
                self._write(ctypes.string_at(address, nbytes))
                return
        self.faults.append("the host's memory is gone")

    def _check(self, data: bytes, alive: "weakref.ref[object]") -> None:
        if ctypes.string_at(self.packet.data_ptr(), len(data)) != data:
            self.faults.append("the packet is another step's")
        if alive() is None:
            self.faults.append("a source is gone")


@attrs.define(eq=False)
class LazyMark:
    device: LazyDevice
    stream: int
    passed: bool = False

    def reach(self) -> None:
        self.passed = True

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        while not self.passed:
            self.device.advance(1, self.stream)


def play(device: LazyDevice, ring: Ring, draw: random.Random, sizes: tuple[int, int], lag: int, steps: int) -> None:
    """So many steps with fresh sources, each dropped at once, while the device now and then does some of its work."""
    for _ in range(steps):
        data, kept = draw.randbytes(draw.randint(*sizes)), Source()
        ring.send(data, kept)
        device.launch(data, kept)
        del kept
        device.advance(draw.randint(0, lag))


bounds = st.sampled_from([(1, SMALL), (SMALL + 1, LARGE), (1, LARGE)])


@given(seed=st.integers(0, 1 << 32), sizes=bounds, lag=st.integers(0, 6), steps=st.integers(1, 5 * ENTRIES))
def test_nothing_is_overwritten_in_flight(seed: int, sizes: tuple[int, int], lag: int, steps: int) -> None:
    """However far the host runs ahead, each step finds its packet and its sources; only larger packets take memory."""
    device, draw = LazyDevice(), chance(seed)
    ring = device.ring(SMALL)
    play(device, ring, draw, sizes, lag, steps)
    alive = [memory for _, _, one in device.hosts if (memory := one()) is not None]
    assert ring.nbytes == PACKET + sum(memory.nbytes for memory in alive)
    assert sizes[1] > SMALL or not device.hosts
    device.drain()
    assert device.faults == []
    assert device.ran >= 2 * steps


@given(seed=st.integers(0, 1 << 32), sizes=bounds)
def test_sources_are_freed_once_the_device_is_past_them(seed: int, sizes: tuple[int, int]) -> None:
    """Once the device is past them sources go, but for those of the last two segments."""
    device, draw = LazyDevice(), chance(seed)
    ring = device.ring(SMALL)
    for _ in range(3 * ENTRIES):
        play(device, ring, draw, sizes, 0, 1)
        device.drain()
        assert sum(one() is not None for one in device.sources) <= 2 * SEGMENT
    assert device.faults == []


def test_packets_that_point_to_nothing_never_wait() -> None:
    """Small ones, with host data alone: the host runs as far ahead as it likes, and each step finds its own packet."""
    device, draw = LazyDevice(), chance(9)
    ring = device.ring(SMALL)
    held = Source()
    for _ in range(5 * ENTRIES):
        data = draw.randbytes(SMALL)
        ring.send(data, None)
        device.launch(data, held)
    assert device.ran == 0
    device.drain()
    assert device.faults == []


@pytest.mark.parametrize(("size", "stream"), [(SMALL, 0), (LARGE, 0), (LARGE, 1)])
def test_a_ring_that_goes_waits_for_what_is_in_flight(size: int, stream: int) -> None:
    """When a ring goes, it waits for what is in flight, whichever stream is current: nothing of it goes before."""
    device = LazyDevice()
    ring = device.ring(SMALL)
    play(device, ring, chance(6), (size, size), 0, ENTRIES // 2)
    before, device.stream = device.ran, stream
    del ring
    gc.collect()
    assert device.ran > before
    device.drain()
    assert device.faults == []


@given(seed=st.integers(0, 1 << 32), lag=st.integers(0, 4))
def test_a_feed_sends_what_changed(seed: int, lag: int) -> None:
    """Over a ring, a feed sends nothing where the packet holds a step's bytes already, and each step is right."""
    device, draw, sent = LazyDevice(), chance(seed), 0
    ring = device.ring(SMALL)
    feed = Feed(lambda _: ring, SMALL)
    sources = [(draw.randbytes(draw.randint(WORD + 1, LARGE)), Source()) for _ in range(3)]
    before: bytes | None = None
    for _ in range(2 * ENTRIES):
        data, kept = draw.choice(sources)
        if draw.random() < 0.2:
            feed.disarm()
            device.launch(bytes(WORD), kept)
            sent += before is not None
            before = None
        feed.send(data, kept)
        device.launch(data, kept)
        sent += before is not data
        before = data
        device.advance(draw.randint(0, lag))
    device.drain()
    assert device.faults == []
    assert device.sent == sent


def test_a_packet_lies_at_a_round_address() -> None:
    """Whatever the allocator gives, a packet of zeros begins at a multiple of 256, and is as long as it should be."""
    for nbytes in (0, 1, 31, 4096):
        packet = packet_on(HERE, nbytes)
        assert (packet.data_ptr() % 256, packet.tolist()) == (0, [0] * nbytes)


@pytest.mark.parametrize("inference", [False, True])
def test_each_packet_arrives_whole(*, inference: bool) -> None:
    """Over many turns of the ring the packet holds what was sent last, and beyond its length what it held before."""
    ring, draw, held = ring_on(HERE, 4096, Streams, host_memory), chance(3), bytes(4096)
    lengths = [draw.randint(1, most) for most in (40, 64, 4096) for _ in range(3 * ENTRIES)]
    for length in [*lengths, 4096]:
        data = draw.randbytes(length)
        with torch.inference_mode(mode=inference and length % 2 == 0):
            ring.send(data, None)
        held = data + held[length:]
        assert ring.packet.numpy().tobytes() == held
    for seed, dtype in enumerate((torch.int64, torch.bool, torch.bfloat16)):
        source = noise((3, seed), dtype, seed)
        right, moved = source.clone(), ring.move(source)
        source.fill_(1)
        assert torch.equal(moved, right)  # in memory of its own
    assert ring.nbytes == 4096 + ENTRIES * 4096


@pytest.mark.parametrize("capturing", [None, False, True])
def test_the_end_of_a_ring_waits_unless_that_breaks_a_capture(capturing: bool | None) -> None:
    """A device is waited for, unless that would break off a capture; not every one has captures to ask for."""
    waited = list[torch.device]()
    module = SimpleNamespace(synchronize=waited.append)
    if capturing is not None:
        module.is_current_stream_capturing = lambda: capturing
    ring = ring_on(HERE, 64, module, host_memory)
    del ring
    gc.collect()
    assert waited == ([] if capturing else [HERE])
