"""Decisions and statistics: which path a batch takes and why, what captures came to, and what fills took."""

import collections
import itertools
import re
import time
from typing import Final, Literal, TypedDict

import attrs

from ...dataflow import log

EVERY: Final = 61
"""One fill in so many is timed. A prime, so that buckets which take turns are all timed sooner or later."""
FIRST: Final = 2
"""Which of them: not a runner's first, which makes what the next ones find."""


_NUMBER: Final = re.compile(r"\d+")


class FillTimesData(TypedDict):
    """How many fills were timed, and what they took in microseconds of the host: together, and in the mean, if any."""

    count: int
    total: float
    mean: float | None


Path = Literal["graph", "piecewise", "breakable", "eager"]
Why = Literal["fits", "too_large", "waste", "not_captured", "absent", "field_differs", "disabled", "always_eager"]


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
    """What a tally counts: steps by path, by bucket, and, of those without a graph, by reason; and what fills took.

    ahead: steps of `steps()` that were launched ahead of the host, and those that were held, by reason.
    """

    steps: dict[str, int]
    ahead: dict[str, int]
    buckets: dict[int, BucketData]
    eager: dict[str, EagerData]
    fills: FillsData


@attrs.define(eq=False)
class Counts:
    """Steps and their live rows; how many of their fills were timed, and what these took, in nanoseconds."""

    steps: int = 0
    live: int = 0
    timed: int = 0
    took: int = 0

    def time(self, nanoseconds: int) -> None:
        """One fill more that was timed."""
        self.timed += 1
        self.took += nanoseconds

    def times(self) -> FillTimesData:
        """What fills took, as plain data."""
        count, total = self.timed, self.took / 1000
        return {"count": count, "total": total, "mean": total / count if count else None}


class Tally:
    """Counts steps once they are done. Any thread may read it, and no step waits for that.

    Attributes:
        buckets: Steps by bucket.
        reasons: Eager steps by reason.
        ahead: Steps of `steps()`, ahead of the host or by why not.
        turns: For each fill that begins, whether it is to be timed.
    """

    def __init__(self, path: Path = "graph") -> None:
        self.path: Path = path
        self.buckets: dict[int, Counts] = collections.defaultdict(Counts)
        self.reasons: dict[Why, Counts] = collections.defaultdict(Counts)
        self.ahead = collections.Counter[str]()
        self.turns = itertools.cycle([number == FIRST for number in range(1, EVERY + 1)])
        self._warned: set[tuple[Why, int | None]] = set()

    def filled(self, counts: Counts, decision: Decision | None, start: int, runner: str) -> None:
        """A fill is done. The first without a graph for a reason, and for a rank that forces it, sends one event.

        Args:
            counts: Of the route.
            decision: Why there is no graph; None where there is one.
            start: Of a fill that is timed, by `perf_counter_ns`; 0 for others.
            runner: The runner's name.
        """
        if start:
            counts.time(time.perf_counter_ns() - start)
        if decision is None or decision.why == "always_eager":
            return
        if (decision.why, decision.rank) not in self._warned:
            self._warned.add((decision.why, decision.rank))
            ranks = {} if decision.rank is None else {"rank": decision.rank}
            log.warning("fallback", runner=runner, why=decision.why, reason=decision.reason, **ranks)

    def as_data(self) -> TallyData:
        """Plain data: the keys of `buckets` and `eager` are those of which there were steps."""
        reasons = sorted(self.reasons.copy().items())
        found = {size: (one.steps, one.live) for size, one in self.buckets.copy().items()}
        buckets: dict[int, BucketData] = {
            size: {
                "path": self.path,
                "steps": steps,
                "live": live,
                "padded": size * steps,
                "waste": (size * steps - live) / (size * steps),
            }
            for size, (steps, live) in sorted(found.items())
            if steps
        }
        eager: dict[str, EagerData] = {why: {"steps": one.steps, "live": one.live} for why, one in reasons if one.steps}
        graphs, others = (sum(one["steps"] for one in of.values()) for of in (buckets, eager))
        return {
            "steps": {self.path: graphs, "eager": others},
            "ahead": dict(self.ahead),
            "buckets": buckets,
            "eager": eager,
            "fills": {
                "every": EVERY,
                "buckets": {size: self.buckets[size].times() for size in buckets},
                "eager": {why: one.times() for why, one in reasons if why in eager},
            },
        }


@attrs.frozen
class MemoryAccount:
    """Bytes that a runner holds: buffers, graphs beside them, other outputs, and uploads, which feed the fused kernel.

    shared: of its slots in a pool's memory, which is not a runner's own.
    """

    inputs: int
    graphs: int
    outputs: int
    uploads: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        """All that is its own."""
        return self.inputs + self.graphs + self.outputs + self.uploads


@attrs.frozen
class CaptureReport:
    """What a capture came to: buckets captured, those that failed with the reason, seconds, and bytes.

    driver: bytes of the device that torch's allocator did not take: the driver's own for graphs, and of all else there.
    """

    captured: tuple[int, ...]
    failed: dict[int, str]
    seconds: float
    memory: MemoryAccount
    driver: int = 0

    @property
    def reasons(self) -> tuple[str, ...]:
        """Each reason for a failure once, with the buckets that failed for it.

        Of reasons that differ in numbers alone it is that of the largest bucket.
        """
        alike = dict[str, dict[str, list[str]]]()
        for rows, reason in sorted(self.failed.items()):
            alike.setdefault(_NUMBER.sub("", reason), {}).setdefault(reason, []).append(str(rows))
        found = list[str]()
        for reasons in alike.values():
            *others, (reason, buckets) = reasons.items()
            likewise = f" (and likewise {', '.join(one for _, more in others for one in more)})" if others else ""
            found.append(f"bucket {', '.join(buckets)}{likewise}: {reason}")
        return tuple(found)

    def log(self, runner: str) -> None:
        """One event for the whole capture, and one for each reason for which buckets failed."""
        for reason in self.reasons:
            log.warning("capture_failed", runner=runner, reason=reason)
        done, seconds, memory = list(self.captured), round(self.seconds, 3), attrs.asdict(self.memory)
        log.info("captured", runner=runner, buckets=done, seconds=seconds, **memory, driver=self.driver)


def human_bytes(count: float) -> str:
    """A byte count with a binary unit: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:  # noqa: PLR2004 - the step from one binary unit to the next
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


class RanksData(TypedDict):
    """Which rank this is, of how many; quiet: whether nothing is exchanged before a step.

    over: what carries exchanges, None for one rank. exchanges: how many there were. forced: steps by the rank that
    forced them and the reason.
    """

    rank: int
    size: int
    quiet: bool
    over: str | None
    exchanges: int
    forced: dict[int, dict[str, int]]


class CaptureData(TypedDict):
    """What captures came to so far; failed: reasons by bucket; driver: bytes that it took beside torch's allocator."""

    buckets: list[int]
    failed: dict[int, str]
    graphs: int
    seconds: float
    driver: int


class Statistics(TallyData):
    """All of it. Every runner has every key; the counts never fall.

    lowerings: fills of buckets by how they were done. memory: bytes as in `MemoryAccount`; `eager`, of inputs that
    batches larger than every bucket made; and their `total`, all that is the runner's own.
    """

    lowerings: dict[str, int]
    memory: dict[str, int]
    capture: CaptureData
    ranks: RanksData
