"""Timing: several implementations alternate in one run, so that a machine's noise is the same for all of them.

On the host each step is timed by itself: if another process takes the core for some milliseconds, one step is an
outlier, and not a whole round. On the device several steps are timed at once, queued behind other work.
"""

import contextlib
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import attrs
import numpy as np
import torch

from ...backends.base import Backend

QUEUED: Final = 20
"""The most steps that the host may be ahead.

An upload's ring has 32 entries, and one event guards 8 of them: at 25 steps the host would wait for the device.
"""
THREADS: Final = 1  # threads that copies in host memory use
_ATTEMPTS: Final = 5
_MARGIN_US: Final = 300.0
_BUSY_SIZE: Final = 2048
_BUSY_TRIES: Final = 8

Occupy = Callable[[float], None]
"""Queues at least so many microseconds of work on a device."""


@attrs.frozen
class Spread:
    """The spread of times in microseconds a step: the median, and the tenth and ninetieth percentile."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """Return the spread of at least one sample."""
        return cls(*map(float, np.percentile(samples, (50, 10, 90))))


@attrs.frozen
class Figures:
    """The times of each way, in microseconds a step, and its ratio to the base way.

    Ratios are medians over the rounds of one run, so that a slow machine is slow for both.
    """

    microseconds: Mapping[str, Spread]
    ratios: Mapping[str, float]

    @classmethod
    def of(cls, samples: Mapping[str, Sequence[float]], rounds: int, base: str) -> "Figures":
        """Summarize the times of all steps, equally many a round. Ratios are to the way named `base`."""
        medians = {name: np.median(np.reshape(times, (rounds, -1)), axis=1) for name, times in samples.items()}
        ratios = {name: float(np.median(one / medians[base])) for name, one in medians.items() if name != base}
        return cls({name: Spread.of(times) for name, times in samples.items()}, ratios)


@attrs.define(eq=False)
class Run:
    """One of the implementations to time, and the times of its steps, in microseconds on host and device.

    Args:
        way: Takes a batch.
        batches: The batches, used one after another, from round to round.
        around: Makes the context of a whole round.
        before: Called before each step, untimed, with the number of steps that are left.
    """

    way: Callable[[Any], Any]
    batches: Sequence[Any]
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    before: Callable[[int], object] | None = None
    host: list[float] = attrs.field(factory=list)
    device: list[float] = attrs.field(factory=list)
    attempt: int = 0
    _turns: Iterator[Any] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Make an endless iterator over the batches, so that a round does not start at the first again."""
        self._turns = itertools.cycle(self.batches)

    def once(self, steps: int, wait: Callable[[], None]) -> None:
        """Run one round. An untimed step before it leaves tails as the round's last step would."""
        way = self.way
        turns = self._turns
        before = self.before
        note = self.host.append
        clock = time.perf_counter_ns
        with self.around():
            for number in range(steps):
                if number % QUEUED == 0:
                    wait()
                    way(next(turns))
                batch = next(turns)
                if before is not None:
                    before(steps - 1 - number)
                start = clock()
                way(batch)
                note((clock() - start) / 1e3)
            wait()

    def queue(self, steps: int) -> None:
        """Queue so many steps, one after another."""
        with self.around():
            for left in reversed(range(steps)):
                if self.before is not None:
                    self.before(left)
                self.way(next(self._turns))

    def as_data(self) -> dict[str, float | None]:
        """Return microseconds a step on host and device, as plain data. The device has None if it was not measured."""
        found: dict[str, float | None] = {}
        for where, times in (("host", self.host), ("gpu", self.device)):
            spread = attrs.astuple(Spread.of(times)) if times else (None, None, None)
            for part, value in zip(("", "_p10", "_p90"), spread, strict=True):
                found[f"{where}{part}_us"] = None if value is None else round(value, 3)
        return found


@torch.no_grad()
def measure(runs: Sequence[Run], backend: Backend, rounds: int, steps: int, device_rounds: int = 0) -> None:
    """Time all runs on the host, then on the device, if the backend has one. The runs alternate in each round.

    A run has no device time if the host cannot get ahead of the device: some ways wait for it in each step. It runs
    without gradients, as engines do, on one thread, and without the garbage collector's pauses.

    Args:
        runs: What is timed. The times are added to each.
        backend: Where they run.
        rounds: Rounds on the host, after one that is left out.
        steps: Steps in a round.
        device_rounds: Rounds on the device.
    """
    was_on = gc.isenabled()
    threads = torch.get_num_threads()
    gc.collect()
    gc.disable()
    torch.set_num_threads(THREADS)
    try:
        for number in range(rounds + 1):
            for run in runs:
                run.once(steps, backend.synchronize)
                if number == 0:
                    run.host.clear()
        if backend.device.type == "cpu" or not device_rounds:
            return
        occupy = occupier(backend)
        for number in range(device_rounds):
            for run in runs:
                found = device_time(run, occupy, backend) if number == 0 or run.device else None
                if found is not None:
                    run.device.append(found)
    finally:
        torch.set_num_threads(threads)
        if was_on:
            gc.enable()


def occupier(backend: Backend) -> Occupy:
    """Make a function that keeps a device busy while the host queues steps.

    It runs matrix products, which are timed first.
    """
    matrix, result = (torch.ones(_BUSY_SIZE, _BUSY_SIZE, device=backend.device) for _ in range(2))

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix, out=result)

    multiply(1)
    backend.synchronize()
    start = backend.event()
    multiply(_BUSY_TRIES)
    stop = backend.event()
    backend.synchronize()
    each = max(1.0, start.elapsed_time(stop) * 1e3 / _BUSY_TRIES)
    return lambda microseconds: multiply(math.ceil(microseconds / each))


def device_time(run: Run, occupy: Occupy, backend: Backend) -> float | None:
    """Return the microseconds of a step on the device, timed behind other work.

    Return None if the device always catches up. Each attempt queues more work and fewer steps.
    """
    host = statistics.median(run.host)
    for attempt in range(run.attempt, _ATTEMPTS):
        steps = max(4, QUEUED >> attempt)
        run.queue(1)
        backend.synchronize()
        occupy(_MARGIN_US + (2 << attempt) * steps * host)
        start = backend.event()
        run.queue(steps)
        stop = backend.event()
        was_ahead = not start.query()
        backend.synchronize()
        if was_ahead:
            run.attempt = attempt
            return start.elapsed_time(stop) * 1e3 / steps
    return None
