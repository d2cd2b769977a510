"""Class E: host memory that is written while a copy from it has not been done."""

from collections import deque
from typing import Any, Final

import attrs
import numpy as np
import pytest
import torch

from slotgraph import BATCH, Inputs, copied
from slotgraph.backends.ring import ENTRIES, Ring
from tests.regressions.engines import captured, draw

WORDS: Final = 3000


@attrs.define(eq=False)
class Behind:
    """A device that does what it is given later: copies read the host's memory when their turn comes, in order."""

    place: torch.Tensor = attrs.field(factory=lambda: torch.zeros(WORDS, dtype=torch.uint8))
    work: deque[tuple[torch.Tensor, int]] = attrs.field(factory=deque)
    arrived: list[bytes] = attrs.field(factory=list)
    done: int = 0
    given: int = 0
    waited: int = 0

    def copy(self, memory: torch.Tensor, at: int, nbytes: int) -> None:
        """Give it a copy."""
        self.work.append((memory[at : at + nbytes], nbytes))
        self.given += 1

    def catch_up(self, until: int) -> None:
        """Do what was given up to some point."""
        while self.done < until:
            source, nbytes = self.work.popleft()
            self.place[:nbytes].copy_(source)
            self.arrived.append(self.place[:nbytes].numpy().tobytes())
            self.done += 1

    def mark(self) -> "Point":
        """A point behind all that it was given."""
        return Point(self, self.given)


@attrs.frozen(eq=False)
class Point:
    """A point in its work."""

    device: Behind
    at: int

    def query(self) -> bool:
        """Whether it has come there."""
        return self.device.done >= self.at

    def synchronize(self) -> None:
        """Wait for it."""
        self.device.waited += self.device.done < self.at
        self.device.catch_up(self.at)


def packet(number: int) -> bytes:
    """Bytes that no other packet has."""
    return draw(0, 255, (WORDS,), number, torch.uint8).numpy().tobytes()


def ring_of(device: Behind) -> Ring:
    """A ring that feeds such a device."""
    memory = torch.uint8
    return Ring(
        torch.zeros(WORDS, dtype=memory),
        lambda nbytes: torch.empty(nbytes, dtype=memory),
        device.copy,
        device.mark,
        lambda: device.catch_up(device.given),
    )


def test_vllm_53057_one_staging_buffer() -> None:
    """The next step's numbers are written into the staging buffer that the last step's copy has not read yet."""
    late, staging = Behind(), torch.empty(WORDS, dtype=torch.uint8)
    for number in (1, 2):
        staging.copy_(torch.frombuffer(bytearray(packet(number)), dtype=torch.uint8))
        late.copy(staging, 0, WORDS)
    late.catch_up(2)
    assert late.arrived[0] == packet(2) != packet(1)

    device = Behind()
    ring = ring_of(device)
    for number in (1, 2):
        ring.send(packet(number), [])
    device.catch_up(2)
    assert device.arrived == [packet(1), packet(2)]


class QueryInputs(Inputs):
    query_start_loc: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0)
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


@pytest.mark.parametrize("lowering", ["foreach", "in_graph", "fused"])
def test_vllm_ascend_12191_an_array_that_its_owner_goes_on_to_use(lowering: str) -> None:
    """A scheduler's array is handed to a copy that comes later, and updated for the next step meanwhile."""
    late = Behind()
    array = np.array([10, 20], dtype=np.uint8)
    late.copy(torch.from_numpy(array), 0, 2)
    array += 5
    late.catch_up(1)
    assert late.arrived[0] != bytes([10, 20])

    runner = captured(QueryInputs, lambda view: view.query_start_loc + view.ids, lowering=lowering)
    starts, ids = np.array([10, 20], dtype=np.int32), [1, 2]
    view = runner.fill({"query_start_loc": starts, "ids": ids})
    starts += 5  # the call has returned: its owner may do with it what it likes
    ids[:] = [77, 77]
    assert runner.replay(view).tolist() == [11, 22]


def test_megatron_lm_5715_steps_back_to_back() -> None:
    """In a warm-up nothing keeps the host busy between steps, so that it is always ahead of the copies."""
    late, buffers = Behind(), [torch.empty(WORDS, dtype=torch.uint8) for _ in range(2)]
    for number in range(8):
        buffers[number % 2].copy_(torch.frombuffer(bytearray(packet(number)), dtype=torch.uint8))
        late.copy(buffers[number % 2], 0, WORDS)
    late.catch_up(8)
    assert late.arrived != [packet(number) for number in range(8)]

    device = Behind()
    ring = ring_of(device)
    steps = 3 * ENTRIES + 5
    for number in range(steps):
        ring.send(packet(number), [])
    assert device.waited > 0  # it came round to what was still to be read, and waited
    device.catch_up(steps)
    assert device.arrived == [packet(number) for number in range(steps)]


def test_megatron_lm_5715_a_runner_far_ahead() -> None:
    """The same through a runner: more steps than the ring has room for, each with data of its own."""

    def step(view: Any) -> torch.Tensor:
        result: torch.Tensor = view.ids * 10 + view.query_start_loc
        return result

    runner = captured(QueryInputs, step, lowering="in_graph")
    for number in range(2 * ENTRIES):
        batch = {"query_start_loc": [number % 7, 1], "ids": [number, number + 1]}
        assert runner(batch).tolist() == [10 * number + number % 7, 10 * number + 11]
