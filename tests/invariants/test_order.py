"""Order: steps wait for one another across streams, and host memory is not written while the device may read it."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.invariants.device import Device
from tests.invariants.steps import (
    BEYOND,
    Afar,
    Quick,
    Seen,
    Slots,
    Values,
    drawn,
    each_lowering,
    neighbours,
    runner_of,
    taken,
    wrong,
)

Kept = list[tuple[Values, Seen]]


def faults_of(kept: Kept) -> set[str]:
    """The slots that any of these steps saw wrong."""
    return {name for values, seen in kept for name in wrong(seen, values)}


def on_streams(device: Device, runners: list[Any], seed: int, inputs: type[Quick] = Quick) -> set[str]:
    """Steps on streams at random: sources are written just before a step, and spoilt right after it."""
    draw, kept = random.Random(seed), Kept()
    turns = [drawn(draw.randint(0, BEYOND), turn, absent=draw.random() < 0.3, inputs=inputs) for turn in range(30)]
    with device.later(draw):
        for values in turns:
            runner, device.current = draw.choice(runners), draw.randrange(3)
            batch = {name: torch.empty_like(value).copy_(value) for name, value in values.items()}
            is_split = draw.random() < 0.5
            shown = runner.fill(batch) if is_split else taken(runner(batch))
            for source in batch.values():
                source.fill_(77)
            if is_split:
                device.current = draw.randrange(3)
                shown = taken(runner.replay(shown))
            kept.append((values, shown))
    return faults_of(kept)


@each_lowering
@pytest.mark.parametrize("pooled", [False, True], ids=["alone", "pooled"])
def test_a_step_waits_for_the_last_one(lowering: str, *, pooled: bool) -> None:
    """On whatever stream a step comes: buffers are the last step's until it is done, sources are read in their turn."""
    device = Device()
    runners = neighbours(device, lowering, 2) if pooled else [runner_of(device, lowering, Quick)]
    assert on_streams(device, runners, 1) | on_streams(device, runners, 2) == set()
    device = Device()
    assert on_streams(device, [runner_of(device, lowering, Afar)], 3, Afar) == set()


def ahead(device: Device, runner: Any, inputs: type[Quick]) -> set[str]:
    """Far more steps in flight than uploads have host memory for; what the host brought is spoilt at once."""
    kept = Kept()
    turns = [drawn(1 + turn % 6, turn, inputs=inputs) for turn in range(80)]
    brought: list[dict[str, Any]] = [
        {name: value.tolist() if name in ("ids", "table") else value.numpy().copy() for name, value in values.items()}
        for values in turns
    ]
    with device.later():
        for values, batch in zip(turns, brought, strict=True):
            kept.append((values, taken(runner(batch))))
            for one in batch.values():
                one[:] = 77 if isinstance(one, np.ndarray) else []
    return faults_of(kept)


@each_lowering
@pytest.mark.parametrize("inputs", [Quick, Afar, Slots])
def test_host_memory_in_flight(lowering: str, inputs: type[Quick]) -> None:
    """Neither what an upload reads nor a slot in host memory is overwritten before the device has read it."""
    device = Device()
    assert ahead(device, runner_of(device, lowering, inputs), inputs) == set()
