"""Fill times: what the host spent on some of a runner's fills, in a histogram."""

import bisect
import itertools
from typing import Final, TypedDict

EVERY: Final = 61
"""One fill in so many is timed. A prime, so that buckets which take turns are all timed sooner or later."""
FIRST: Final = 2
"""Which of them: not a runner's first, which makes what the next ones find."""
_STEPS: Final = (100, 112, 125, 140, 160, 180, 200, 224, 250, 280, 315, 355, 400, 450, 500, 560, 630, 710, 800, 900)
"""Twenty steps a decade, the preferred numbers R20 of ISO 3: 1, 2 and 5 are among them."""
BOUNDS: Final[tuple[int, ...]] = (*(step * 10**power for power in range(1, 7) for step in _STEPS), 10**9)
"""Upper bounds of the histogram's bins in nanoseconds, themselves in: from 1 us to 1 s; what is longer has one more."""
_US: Final = 1000


class FillTimesData(TypedDict):
    """Fills that were timed, in microseconds of the host.

    count: how many were. total: of all of them together. mean, p50, p90, p99: None where none was; percentiles are
    right to a seventh. histogram: upper bound and count of each bin that has any; no bound for what took over 1 s.
    """

    count: int
    total: float
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    histogram: list[tuple[float | None, int]]


class FillTimes:
    """The times of some fills."""

    def __init__(self) -> None:
        self._total = 0
        self._bins: dict[int, int] = {}

    def add(self, nanoseconds: int) -> None:
        """One more fill."""
        place = bisect.bisect_left(BOUNDS, nanoseconds)
        self._bins[place] = self._bins.get(place, 0) + 1
        self._total += nanoseconds

    def as_data(self) -> FillTimesData:
        """Plain data."""
        total, bins = self._total, sorted(self._bins.copy().items())
        count = sum(number for _, number in bins)
        return {
            "count": count,
            "total": total / _US,
            "mean": total / _US / count if count else None,
            "p50": _quantile(bins, count * 0.5),
            "p90": _quantile(bins, count * 0.9),
            "p99": _quantile(bins, count * 0.99),
            "histogram": [(BOUNDS[place] / _US if place < len(BOUNDS) else None, number) for place, number in bins],
        }


def _quantile(bins: list[tuple[int, int]], rank: float) -> float | None:
    """The time, in microseconds, that so many fills stayed below, if those of a bin are spread over it evenly."""
    edges = (0, *BOUNDS, BOUNDS[-1])
    reached = itertools.accumulate((number for _, number in bins), initial=0)
    for (place, number), before in zip(bins, reached, strict=False):
        if before + number >= rank:
            low, high = edges[place], edges[place + 1]
            return (low + (high - low) * (rank - before) / number) / _US
    return None
