"""Decisions: which path a batch takes and why, how often each was taken, and what some fills took."""

import bisect
import collections
import itertools
import time
from typing import Final, Literal, TypedDict

import attrs

from ..dataflow import log

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


Path = Literal["graph", "piecewise", "breakable", "eager"]
Why = Literal[
    "fits",
    "too_large",
    "waste",
    "not_captured",
    "absent",
    "field_differs",
    "disabled",
    "always_eager",
]


@attrs.frozen
class Decision:
    """The path of one batch: one with its bucket, or `eager`, with the reason in one word and in one sentence.

    rank: the one that forced it, where ranks agreed on it.
    """

    path: Path
    bucket: int | None
    why: Why
    reason: str
    rank: int | None = attrs.field(default=None, repr=False)


class BucketData(TypedDict):
    """Steps that one bucket's graph did, of how many live and padded rows; waste: the padding's share of the latter."""

    path: str
    steps: int
    live: int
    padded: int
    waste: float


class EagerData(TypedDict):
    """Steps that were run eagerly for one reason, of how many live rows."""

    steps: int
    live: int


class FillsData(TypedDict):
    """What fills took, one in `every` of them: those of each bucket, and of eager steps by reason."""

    every: int
    buckets: dict[int, FillTimesData]
    eager: dict[str, FillTimesData]


class TallyData(TypedDict):
    """What a tally counts: steps by path, by bucket, and, of those without a graph, by reason; and what fills took."""

    steps: dict[str, int]
    buckets: dict[int, BucketData]
    eager: dict[str, EagerData]
    fills: FillsData


@attrs.define(eq=False)
class Counts:
    """Steps, their live rows, and the times of some of their fills."""

    steps: int = 0
    live: int = 0
    times: FillTimes = attrs.field(factory=FillTimes)


@attrs.define(eq=False)
class Repeated:
    """Steps of one bucket with one number of live rows, which a shortcut counts here by one addition.

    times: the bucket's.
    """

    bucket: int
    rows: int
    times: FillTimes
    steps: int = 0


class Tally:
    """Counts steps once they are done. Whoever reads it, from whatever thread, holds up no one.

    path: the one that batches take which fit a bucket. buckets: steps by bucket, but for those of shortcuts, which are
    in `repeated`, by bucket and live rows. reasons: eager steps by reason. turns: for each fill that begins, whether it
    is to be timed; to ask costs less than to count.
    """

    def __init__(self, path: Path = "graph") -> None:
        self.path: Path = path
        self.buckets: dict[int, Counts] = collections.defaultdict(Counts)
        self.repeated: dict[tuple[int, int], Repeated] = {}
        self.reasons: dict[Why, Counts] = collections.defaultdict(Counts)
        self.turns = itertools.cycle([number == FIRST for number in range(1, EVERY + 1)])
        self._warned: set[tuple[Why, int | None]] = set()

    def replayed(self, bucket: int, rows: int) -> None:
        """A replay of `rows` live rows in a bucket."""
        counts = self.buckets[bucket]
        counts.steps += 1
        counts.live += rows

    def repeats(self, bucket: int, rows: int) -> Repeated:
        """Where a shortcut counts its steps."""
        known = self.repeated.get((bucket, rows))
        if known is None:
            known = self.repeated[bucket, rows] = Repeated(bucket, rows, self.buckets[bucket].times)
        return known

    def fell_back(self, decision: Decision, rows: int) -> None:
        """An eager run of `rows` live rows."""
        counts = self.reasons[decision.why]
        counts.steps += 1
        counts.live += rows

    def filled(self, route: int | Decision, start: int, runner: str) -> None:
        """A fill is done.

        The first fill without a graph for a reason, and for a rank that forces it, sends one event.

        Args:
            route: The bucket, or why there is no graph.
            start: When a fill that is timed began, by `perf_counter_ns`; 0 for another.
            runner: Its name, for the event.

        """
        if start:
            counts = self.buckets[route] if isinstance(route, int) else self.reasons[route.why]
            counts.times.add(time.perf_counter_ns() - start)
        if isinstance(route, int) or route.why == "always_eager":
            return
        if (route.why, route.rank) not in self._warned:
            self._warned.add((route.why, route.rank))
            ranks = {} if route.rank is None else {"rank": route.rank}
            log.warning("fallback", runner=runner, why=route.why, reason=route.reason, **ranks)

    def by_shortcut(self) -> int:
        """Steps that shortcuts did."""
        return sum(one.steps for one in self.repeated.copy().values())

    def as_data(self) -> TallyData:
        """Plain data: the keys of `buckets` and `eager` are those of which there were steps."""
        found, reasons = dict[int, list[int]](), sorted(self.reasons.copy().items())
        counted = [(size, one.steps, one.live) for size, one in self.buckets.copy().items()]
        counted += [(one.bucket, steps := one.steps, one.rows * steps) for one in self.repeated.copy().values()]
        for size, steps, live in sorted(counted):
            if steps:
                before = found.setdefault(size, [0, 0])
                before[:] = before[0] + steps, before[1] + live
        buckets: dict[int, BucketData] = {
            size: {
                "path": self.path,
                "steps": steps,
                "live": live,
                "padded": size * steps,
                "waste": (size * steps - live) / (size * steps),
            }
            for size, (steps, live) in found.items()
        }
        eager: dict[str, EagerData] = {why: {"steps": one.steps, "live": one.live} for why, one in reasons if one.steps}
        graphs, others = (sum(one["steps"] for one in of.values()) for of in (buckets, eager))
        return {
            "steps": {self.path: graphs, "eager": others},
            "buckets": buckets,
            "eager": eager,
            "fills": {
                "every": EVERY,
                "buckets": {size: self.buckets[size].times.as_data() for size in buckets},
                "eager": {why: one.times.as_data() for why, one in reasons if why in eager},
            },
        }
