"""Measuring: every case and every lowering by turns, so that a machine's noise meets all of them alike.

Each step is timed by itself: where another process takes the core for some milliseconds, one step is an outlier, and
not a whole round.
"""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import attrs
import torch

from ...backends.base import Backend
from .lowerings import Lowering
from .workload import Batch

_BUSY_SIZE: Final = 4096
_BUSY_TIMES: Final = 4
"""Work that keeps a device busy while the host queues fills behind it, so that their device time has no gaps."""


@attrs.frozen
class Spread:
    """Microseconds for one fill and view: median, and the tenth and ninetieth percentile over steps."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """The spread of samples, at least one."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        tenths = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(statistics.median(samples), tenths[0], tenths[-1])


@attrs.define
class Run:
    """One lowering on one sequence of batches, and what its steps took on the host, in microseconds."""

    lowering: Lowering
    batches: Sequence[Batch]
    samples: list[float] = attrs.field(factory=list)

    def once(self) -> None:
        """One round. The step before it, untimed, leaves tails as the round's last step does."""
        fill, batches, note, clock = self.lowering, self.batches, self.samples.append, time.perf_counter_ns
        fill(batches[-1])
        for batch in batches:
            start = clock()
            fill(batch)
            note((clock() - start) / 1e3)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """As engines fill: without gradients; and without the garbage collector, whose pauses belong to no one."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            yield
    finally:
        if was_on:
            gc.enable()


def measure(runs: Sequence[Run], rounds: int, backend: Backend, tick: Callable[[], None]) -> list[Spread]:
    """Each run's host time over `rounds` rounds, the runs taking turns; `tick` is called after each round."""
    with quiet():
        for run in runs:
            run.once()
            run.samples.clear()
        for _ in range(rounds):
            for run in runs:
                run.once()
                backend.synchronize()
            tick()
    return [Spread.of(run.samples) for run in runs]


def device_times(runs: Sequence[Run], rounds: int, backend: Backend) -> list[float | None]:
    """Each run's time on the device, in microseconds a step; None where the host is the device."""
    if backend.device.type == "cpu":
        return [None for _ in runs]
    busy = torch.ones(_BUSY_SIZE, _BUSY_SIZE, device=backend.device)
    with quiet():
        return [statistics.median([_device_time(run, busy, backend) for _ in range(rounds)]) for run in runs]


def _device_time(run: Run, busy: torch.Tensor, backend: Backend) -> float:
    backend.synchronize()
    for _ in range(_BUSY_TIMES):
        torch.mm(busy, busy)
    start = backend.event()
    for batch in run.batches:
        run.lowering(batch)
    stop = backend.event()
    backend.synchronize()
    return stop.microseconds_since(start) / len(run.batches)
