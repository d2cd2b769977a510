"""Measuring: every case and every contestant by turns, so that a machine's noise meets all of them alike.

On the host each step is timed by itself: where another process takes the core for some milliseconds, one step is an
outlier, and not a whole round. On the device several steps are timed at once, queued behind other work.
"""

import contextlib
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import attrs
import torch

from ...backends.base import Backend

QUEUED: Final = 20
"""Steps that the host may be ahead by. An upload's ring has 32 entries, of which one event guards 8: at 25 steps the
host would wait for the device."""
THREADS: Final = 1
"""Threads that copies in host memory are spread over."""
_FEWEST: Final = 4
_ATTEMPTS: Final = 5
_MARGIN_US: Final = 300.0
_BUSY_SIZE: Final = 2048
_BUSY_TRIES: Final = 8


@attrs.frozen
class Spread:
    """Microseconds a step: median, and the tenth and ninetieth percentile."""

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


class Sized(Protocol):
    """One of several batches that take turns."""

    @property
    def rows(self) -> int:
        """Its size, by which those that differ in it are told."""
        raise NotImplementedError


Times = tuple[Spread, Spread | None]
"""On the host, and on the device; None where that was not measured."""


@attrs.define(eq=False)
class Run:
    """One way to run batches that take turns, and what its steps took, in microseconds on host and device.

    attempt: the first at which the host got ahead of the device. prepare: called before each round, untimed.
    """

    way: Callable[[Any], Any]
    batches: Sequence[Sized]
    host: list[float] = attrs.field(factory=list)
    device: list[float] = attrs.field(factory=list)
    attempt: int = 0
    prepare: Callable[[], object] | None = attrs.field(default=None, kw_only=True)
    _turns: Iterator[Sized] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Batches go on from round to round, rather than begin anew."""
        self._turns = itertools.cycle(self.batches)

    def once(self, steps: int, wait: Callable[[], None]) -> None:
        """One round. The step before it, untimed, leaves tails as the round's last step does."""
        way, turns, note, clock = self.way, self._turns, self.host.append, time.perf_counter_ns
        if self.prepare is not None:
            self.prepare()
        for number in range(steps):
            if number % QUEUED == 0:
                wait()
                way(next(turns))
            batch = next(turns)
            start = clock()
            way(batch)
            note((clock() - start) / 1e3)
        wait()

    def queue(self, steps: int) -> None:
        """So many steps, one behind another."""
        way, turns = self.way, self._turns
        for _ in range(steps):
            way(next(turns))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """As engines fill: without gradients; and without pauses that belong to no one.

    These are the garbage collector's, and waits for another thread, of milliseconds where other programs want its core.
    """
    was_on, threads = gc.isenabled(), torch.get_num_threads()
    gc.collect()
    gc.disable()
    torch.set_num_threads(THREADS)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)
        if was_on:
            gc.enable()


def measure(runs: Sequence[Run], rounds: int, steps: int, backend: Backend, tick: Callable[[], None]) -> list[Spread]:
    """Each run's host time over `rounds` rounds, the runs taking turns; `tick` is called after each round.

    A round is as many steps as asked for, or as there are batches, if these differ in size.
    """
    with quiet():
        for run in runs:
            run.once(_steps_of(run, steps), backend.synchronize)
            run.host.clear()
        for _ in range(rounds):
            for run in runs:
                run.once(_steps_of(run, steps), backend.synchronize)
            tick()
    return [Spread.of(run.host) for run in runs]


def _steps_of(run: Run, steps: int) -> int:
    return len(run.batches) if len({batch.rows for batch in run.batches}) > 1 else steps


def device_times(runs: Sequence[Run], rounds: int, backend: Backend, tick: Callable[[], None]) -> list[Spread | None]:
    """Each run's time on the device, in microseconds a step, once its host time was measured.

    None where the host is the device, and where the host cannot get ahead of it: some ways wait for it in each step.
    """
    if backend.device.type == "cpu":
        return [None for _ in runs]
    with quiet():
        busy = Busy.of(backend)
        for number in range(rounds):
            for run in runs:
                found = device_time(run, busy, backend) if number == 0 or run.device else None
                if found is not None:
                    run.device.append(found)
            tick()
    return [Spread.of(run.device) if run.device else None for run in runs]


@attrs.frozen
class Busy:
    """Work that keeps a device busy while the host queues steps behind it; one product takes `product_us`."""

    matrix: torch.Tensor
    result: torch.Tensor
    product_us: float

    @classmethod
    def of(cls, backend: Backend) -> "Busy":
        """The work, its time measured."""
        matrix, result = (torch.ones(_BUSY_SIZE, _BUSY_SIZE, device=backend.device) for _ in range(2))
        torch.mm(matrix, matrix, out=result)
        backend.synchronize()
        start = backend.event()
        for _ in range(_BUSY_TRIES):
            torch.mm(matrix, matrix, out=result)
        stop = backend.event()
        backend.synchronize()
        return cls(matrix, result, max(1.0, stop.microseconds_since(start) / _BUSY_TRIES))

    def work(self, microseconds: float) -> None:
        """Queue at least so much work."""
        for _ in range(math.ceil(microseconds / self.product_us)):
            torch.mm(self.matrix, self.matrix, out=self.result)


def device_time(run: Run, busy: Busy, backend: Backend) -> float | None:
    """Microseconds a step, between two events around steps that stood ready when the device got to them.

    Where it got to the first before the host had queued the last, that says nothing: again with more work before, and
    with fewer steps, since a device also takes no more than some number of launches in advance.
    """
    host = statistics.median(run.host)
    for attempt in range(run.attempt, _ATTEMPTS):
        steps = max(_FEWEST, QUEUED >> attempt)
        run.queue(1)
        backend.synchronize()
        busy.work(_MARGIN_US + (2 << attempt) * steps * host)
        start = backend.event()
        run.queue(steps)
        stop = backend.event()
        was_ahead = not start.query()
        backend.synchronize()
        if was_ahead:
            run.attempt = attempt
            return stop.microseconds_since(start) / steps
    return None
