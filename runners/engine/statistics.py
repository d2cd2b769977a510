"""Statistics: which path each batch took and why, the results of captures, and how long fills took."""

import collections
import itertools
import math
import re
import time
from collections.abc import Iterator
from typing import Any, Final, Literal, TypedDict

import attrs

from ...dataflow import log
from ...dataflow.shown import Shown, Table
from .selection import BucketKey, sizes_of

EVERY: Final = 61
"""One fill of so many is timed. It is a prime, so that buckets which alternate are all timed sooner or later."""
FIRST: Final = 2
"""Which fill of those is timed. It is not a runner's first, which sets up memory for the next ones."""


MOST_SIZES: Final = 1024
"""The most sizes on several axes whose steps are counted one by one. If there are more, similar ones are merged."""
_NUMBER: Final = re.compile(r"\d+")


class FillTimesData(TypedDict):
    """How many fills were timed, and their microseconds on the host: in total, and the mean, or None without any."""

    count: int
    total: float
    mean: float | None


PathName = Literal["graph", "piecewise", "breakable", "eager"]
Why = Literal["fits", "too_large", "waste", "not_captured", "absent", "field_differs", "disabled", "always_eager"]


@attrs.frozen
class Decision:
    """The path of one batch.

    Attributes:
        path: A path with a bucket, or `eager`.
        bucket: The bucket, or None.
        why: The reason in one word.
        reason: The reason in one sentence.
        variant: The values of fields that its graph has frozen, in text, such as "max_seqlen=512".
        rank: The rank that forced it, if ranks agreed on it.
        mode: The mode of a `ModeRunner`, or None.
    """

    path: PathName
    bucket: BucketKey | None
    why: Why
    reason: str
    variant: str = attrs.field(default="", kw_only=True, repr=False)
    rank: int | None = attrs.field(default=None, repr=False)
    mode: str | None = attrs.field(default=None, repr=False)


class BucketData(TypedDict):
    """Steps that one bucket's graph ran, and their live and padded rows: on several axes, the product of the sizes.

    waste: The padding's share of the padded rows.
    """

    path: str
    steps: int
    live: int
    padded: int
    waste: float


class EagerData(TypedDict):
    """Steps that ran eagerly for one reason, and their live rows."""

    steps: int
    live: int


class FillsData(TypedDict):
    """The times of one fill in `every`: of each bucket, and of eager steps by reason."""

    every: int
    buckets: dict[BucketKey, FillTimesData]
    eager: dict[str, FillTimesData]


class TallyData(TypedDict):
    """The counts of a tally: steps by path, by bucket, and by reason if they had no graph, and the times of fills.

    Attributes:
        ahead: Steps of `steps()` that were launched ahead of the host, and those that waited for it, by reason.
        rows: How many steps of graphs had so many live rows, or such live sizes on several axes: see `plan_buckets`.
    """

    steps: dict[str, int]
    ahead: dict[str, int]
    buckets: dict[BucketKey, BucketData]
    rows: dict[BucketKey, int]
    eager: dict[str, EagerData]
    fills: FillsData


@attrs.define(eq=False)
class Counts:
    """Steps and their live rows, how many of their fills were timed, and the nanoseconds that these took.

    Attributes:
        rows: With a graph, how many steps had so many live rows.
    """

    steps: int = 0
    live: int = 0
    rows: dict[BucketKey, int] = attrs.field(factory=dict)
    timed: int = 0
    took: int = 0

    def replayed(self, rows: BucketKey, steps: int = 1) -> None:
        """Count steps of a graph."""
        self.steps += steps
        self.live += steps * (rows if type(rows) is int else math.prod(rows))
        self.rows[rows] = self.rows.get(rows, 0) + steps
        if len(self.rows) > MOST_SIZES and type(rows) is tuple:
            self.rows = _merged(self.rows)

    def times(self) -> FillTimesData:
        """Return the times of fills as plain data."""
        count = self.timed
        total = self.took / 1000
        return {"count": count, "total": total, "mean": total / count if count else None}


def _merged(rows: dict[BucketKey, int]) -> dict[BucketKey, int]:
    """Return at most half as many sizes as are counted one by one, with all steps.

    Sizes whose leading bits agree on each axis become the largest of them, so that what holds it holds them all.
    """
    alike = dict[BucketKey, list[BucketKey]]()
    for bits in (5, 3, 1):
        alike = collections.defaultdict(list)
        for sizes in rows:
            alike[tuple([size & -1 << max(size.bit_length() - bits, 0) for size in sizes])].append(sizes)
        if len(alike) <= MOST_SIZES // 2:
            break
    return {tuple(map(max, zip(*many, strict=True))): sum(rows[one] for one in many) for many in alike.values()}


class Tally:
    """Counts steps when they are done. Any thread may read it, and no step waits for that.

    Attributes:
        buckets: Steps by bucket.
        reasons: Eager steps by reason.
        ahead: Steps of `steps()`: those ahead of the host, and the others by the reason why not.
        sampled: An iterator that says of each fill whether to time it.
    """

    def __init__(self, path: PathName) -> None:
        self.path: PathName = path
        self.buckets: dict[BucketKey, Counts] = collections.defaultdict(Counts)
        self.reasons: dict[Why, Counts] = collections.defaultdict(Counts)
        self.ahead = collections.Counter[str]()
        self.sampled = itertools.cycle([number == FIRST for number in range(1, EVERY + 1)])
        self._warned: set[tuple[Why, int | None]] = set()

    def filled(self, counts: Counts, decision: Decision | None, start: int, runner: str) -> None:
        """Count a fill.

        The first one without a graph for a reason, and for a rank that forces it, logs one event.

        Args:
            counts: The route's counts.
            decision: Why there is no graph, or None if there is one.
            start: The start of a timed fill, by `perf_counter_ns`, or 0 for others.
            runner: The runner's name.
        """
        if start:
            counts.timed += 1
            counts.took += time.perf_counter_ns() - start
        if decision is None or decision.why == "always_eager":
            return
        if (decision.why, decision.rank) not in self._warned:
            self._warned.add((decision.why, decision.rank))
            ranks = {} if decision.rank is None else {"rank": decision.rank}
            log.warning("fallback", runner=runner, why=decision.why, reason=decision.reason, **ranks)

    def as_data(self) -> TallyData:
        """Return plain data. `buckets` and `eager` have only the keys that had steps."""
        reasons = sorted(self.reasons.copy().items())
        found = {size: (one.steps, one.live) for size, one in self.buckets.copy().items()}
        buckets: dict[BucketKey, BucketData] = {
            bucket: {
                "path": self.path,
                "steps": steps,
                "live": live,
                "padded": (padded := math.prod(sizes_of(bucket)) * steps),
                "waste": (padded - live) / padded,
            }
            for bucket, (steps, live) in sorted(found.items())
            if steps
        }
        rows = collections.Counter[BucketKey]()
        for counts in self.buckets.copy().values():
            rows.update(counts.rows.copy())
        eager: dict[str, EagerData] = {why: {"steps": one.steps, "live": one.live} for why, one in reasons if one.steps}
        graphs, others = (sum(one["steps"] for one in of.values()) for of in (buckets, eager))
        return {
            "steps": {self.path: graphs, "eager": others},
            "ahead": dict(self.ahead),
            "buckets": buckets,
            "rows": {size: rows[size] for size in sorted(rows)},
            "eager": eager,
            "fills": {
                "every": EVERY,
                "buckets": {size: self.buckets[size].times() for size in buckets},
                "eager": {why: one.times() for why, one in reasons if why in eager},
            },
        }


@attrs.frozen
class MemoryAccount:
    """The bytes of a runner's memory.

    Attributes:
        inputs: Bytes of buffers.
        graphs: Bytes of graphs, without the buffers.
        outputs: Bytes of other outputs.
        uploads: Bytes of the packet, its host memory, and the fused kernel's tables.
        shared: Bytes of its slots in a pool's memory, which is not the runner's own.
    """

    inputs: int = 0
    graphs: int = 0
    outputs: int = 0
    uploads: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        """The bytes of all memory that is the runner's own."""
        return self.inputs + self.graphs + self.outputs + self.uploads


@attrs.frozen(repr=False)
class CaptureReport(Shown):
    """The result of a capture.

    Attributes:
        captured: The captured buckets.
        graphs: How many graphs there are: each bucket has one for each pattern of absent slots, and each variant.
        failed: The reason for each bucket that failed.
        seconds: How long it took.
        memory: The runner's bytes.
        driver: Bytes that the device lost during the capture outside torch's allocator, such as the driver's for
            graphs.
        functions: By computed slot, that its function was compiled, or why it runs as written in graphs. Empty if
            nothing is compiled.
    """

    captured: tuple[BucketKey, ...] = ()
    failed: dict[BucketKey, str] = attrs.field(factory=dict)
    seconds: float = 0.0
    memory: MemoryAccount = MemoryAccount()
    driver: int = 0
    functions: dict[str, str] = attrs.field(factory=dict)
    graphs: int = 0

    @property
    def reasons(self) -> tuple[str, ...]:
        """Each reason for a failure once, with the buckets that failed for it.

        If reasons differ in numbers alone, it is that of the largest bucket.
        """
        alike = dict[str, dict[str, list[str]]]()
        for bucket in sorted(self.failed):
            reason = self.failed[bucket]
            alike.setdefault(_NUMBER.sub("", reason), {}).setdefault(reason, []).append(str(bucket))
        found = list[str]()
        for reasons in alike.values():
            *others, (reason, buckets) = reasons.items()
            likewise = f" (and likewise {', '.join(one for _, more in others for one in more)})" if others else ""
            found.append(f"bucket {', '.join(buckets)}{likewise}: {reason}")
        return tuple(found)

    def tables(self) -> Iterator[Table]:
        """Yield bytes of memory, and why buckets failed."""
        memory = {**attrs.asdict(self.memory), "driver": self.driver}
        each = f" in {self.graphs} graphs" if self.graphs != len(self.captured) else ""
        yield Table(
            f"{len(self.captured)} buckets captured{each}, {len(self.failed)} failed, in {self.seconds:.2g} s",
            [memory],
            "\n".join(self.reasons),
        )

    def log(self, runner: str) -> None:
        """Log one event for the whole capture, and one for each reason for which buckets failed."""
        for reason in self.reasons:
            log.warning("capture_failed", runner=runner, reason=reason)
        done = list(self.captured)
        seconds = round(self.seconds, 3)
        memory = attrs.asdict(self.memory)
        log.info("captured", runner=runner, buckets=done, seconds=seconds, **memory, driver=self.driver)


def human_bytes(count: float) -> str:
    """Return a byte count with a binary unit: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:  # noqa: PLR2004 - the step from one binary unit to the next
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def with_text_keys(data: Any) -> Any:
    """Return plain data with text in place of keys that JSON lacks: those of buckets on several axes."""
    if not isinstance(data, dict):
        return data
    return {str(key) if isinstance(key, tuple) else key: with_text_keys(value) for key, value in data.items()}


class RanksData(TypedDict):
    """The statistics of ranks.

    Attributes:
        rank: Which rank this is.
        size: How many ranks there are.
        quiet: Whether nothing is exchanged before a step.
        over: How messages are exchanged, such as over gloo, or None for one rank.
        exchanges: The number of exchanges.
        forced: Steps by the rank that forced them and the reason.
    """

    rank: int
    size: int
    quiet: bool
    over: str | None
    exchanges: int
    forced: dict[int, dict[str, int]]


class CaptureData(TypedDict):
    """The results of captures so far.

    Attributes:
        buckets: The captured buckets.
        failed: Reasons by bucket.
        graphs: How many graphs there are.
        seconds: How long captures took.
        driver: Bytes of the device that captures took outside torch's allocator.
        functions: By computed slot, whether its function was compiled; see `CaptureReport`.
    """

    buckets: list[BucketKey]
    failed: dict[BucketKey, str]
    graphs: int
    seconds: float
    driver: int
    functions: dict[str, str]


class Statistics(TallyData):
    """All statistics. Every runner has every key, and the counts never fall.

    Attributes:
        steps: Steps by path.
        ahead: Steps of `steps()` that were launched ahead of the host, and those that waited for it, by reason.
        buckets: By bucket its path, steps, live and padded rows, and the share of padding.
        rows: How many steps of graphs had so many live rows, or such live sizes on several axes.
        eager: Steps and their live rows without a graph, by reason.
        fills: How long fills took, in each bucket, and eagerly by reason. One fill in `every` is timed.
        lowerings: Fills of buckets by lowering.
        again: By slot that is computed with `again=`, how often its function has run and how often it kept its value.
        memory: Bytes as in `MemoryAccount`; `eager`, of inputs for batches larger than every bucket; and the `total` of
            all memory that is the runner's own.
        capture: The results of captures.
        ranks: The statistics of ranks.
    """

    lowerings: dict[str, int]
    again: dict[str, dict[str, int]]
    memory: dict[str, int]
    capture: CaptureData
    ranks: RanksData
