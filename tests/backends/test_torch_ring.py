"""A ring by torch's own calls, over work that is done at once: places, growth, and what is waited for."""

import random
from collections.abc import Iterator

import pytest
import torch

from slotgraph.backends.ring import ENTRIES, finish_on, packet_on, ring_on
from tests.packing import Streams, host_memory
from tests.strategies import noise

HERE = torch.device("cpu")


@pytest.mark.parametrize("nbytes", [0, 1, 31, 4096])
def test_a_packet_lies_at_a_round_address(nbytes: int) -> None:
    """Whatever the allocator gives, a packet of zeros begins at a multiple of 256, and is as long as it should be."""
    packet = packet_on(HERE, nbytes)
    assert (packet.data_ptr() % 256, packet.tolist()) == (0, [0] * nbytes)


def lengths(seed: int) -> Iterator[int]:
    """Packets of two lengths in turn, then of any, then larger ones, at last the largest."""
    draw = random.Random(seed)  # noqa: S311 - data for a test
    yield from (40, 24) * ENTRIES
    yield from (draw.randint(1, 64) for _ in range(5 * ENTRIES))
    yield from (draw.randint(65, 4096) for _ in range(2 * ENTRIES))
    yield 4096


@pytest.mark.parametrize("inference", [False, True])
def test_each_packet_arrives(*, inference: bool) -> None:
    """Over many turns of the ring the packet holds what was sent last, and beyond its length what it held before."""
    ring, draw, held = ring_on(HERE, 4096, Streams, host_memory), random.Random(3), bytes(4096)  # noqa: S311 - likewise
    for length in lengths(7):
        data = draw.randbytes(length)
        with torch.inference_mode(mode=inference and length % 2 == 0):
            ring.send(data, None)
        held = data + held[length:]
        assert ring.packet.numpy().tobytes() == held
    assert ring.nbytes == 4096 + ENTRIES * 4096


def test_what_is_moved_has_memory_of_its_own() -> None:
    """A tensor that was moved stays as it was, whatever becomes of its source, and takes nothing of the ring."""
    ring = ring_on(HERE, 64, Streams, host_memory)
    for seed, dtype in enumerate((torch.int64, torch.bool, torch.bfloat16)):
        source = noise((3, seed), dtype, seed)
        right = source.clone()
        moved = ring.move(source)
        source.fill_(1)
        assert torch.equal(moved, right)
    assert ring.nbytes == 64


@pytest.mark.parametrize("capturing", [None, False, True])
def test_the_end_waits_but_for_captures(capturing: bool | None) -> None:  # noqa: FBT001 - a parameter
    """A device is waited for, unless that would break off a capture; not every one has captures to ask for."""
    waited = []

    class Module:
        @staticmethod
        def synchronize(device: torch.device) -> None:
            waited.append(device)

    if capturing is not None:
        Module.is_current_stream_capturing = staticmethod(lambda: capturing)  # type: ignore[attr-defined]
    finish_on(Module, HERE)
    assert waited == ([] if capturing else [HERE])
