"""Timing: contestants take turns, each with many steps between two looks at the clock."""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import attrs

Wait = Callable[[], object]


@attrs.frozen(kw_only=True)
class Spread:
    """Over several rounds the median, and the tenth and the ninetieth percentile."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """The spread of samples, at least one."""
        tenths = statistics.quantiles(samples, n=10, method="inclusive") if len(samples) > 1 else samples
        return cls(median=statistics.median(samples), p10=tenths[0], p90=tenths[-1])


@attrs.frozen
class Contestant:
    """One way to run a decode step. step: takes the step's number. around: what holds while its steps run."""

    step: Callable[[int], object]
    around: Callable[[], AbstractContextManager[object]]


@attrs.frozen
class Race:
    """How the contestants are timed.

    rounds: turns for each. steps: steps in a turn. wait: returns when the device has done all its work. each: whether
    the host waits after each step, as an engine does that must read the tokens; else only at the end of the turn.
    """

    rounds: int
    steps: int
    wait: Wait
    each: bool = False

    def run(self, contestants: Sequence[Contestant]) -> list[list[float]]:
        """Microseconds a step for each contestant and round; the contestants take turns in each round."""
        with _uncollected():
            rounds = [[self._turn(contestant) for contestant in contestants] for _ in range(self.rounds)]
        return [list(one) for one in zip(*rounds, strict=True)]

    def _turn(self, contestant: Contestant) -> float:
        step, wait, each = contestant.step, self.wait, self.each
        with contestant.around():
            step(0)  # untimed: it brings back what the others put out of the way
            wait()
            begin = time.perf_counter()
            for number in range(1, self.steps + 1):
                step(number)
                if each:
                    wait()
            wait()
            return 1e6 * (time.perf_counter() - begin) / self.steps


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """The garbage collector's pauses belong to no contestant."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
