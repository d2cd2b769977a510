"""The books of a runner as plain data, the same for every kind of runner."""

from typing import TYPE_CHECKING, Any, TypedDict

import attrs

from .capture import MemoryAccount
from .filltimes import FillTimesData

if TYPE_CHECKING:
    from .parts import Parts


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


class CaptureData(TypedDict):
    """What captures came to so far: buckets, graphs, seconds, and bytes that the driver took beside torch's allocator.

    failed: the reason, by bucket.
    """

    buckets: list[int]
    failed: dict[int, str]
    graphs: int
    seconds: float
    driver: int


class RanksData(TypedDict):
    """Which rank this is, of how many; the exchanges of its `Ranks`; steps by the rank that forced them, and why.

    quiet: whether nothing is exchanged before a step, so that no rank forces any.
    """

    rank: int
    size: int
    quiet: bool
    exchanges: int
    forced: dict[int, dict[str, int]]


class Statistics(TallyData):
    """All of it. Every runner has every key; the counts never fall.

    lowerings: fills of buckets by how they were done. detours: how often each reason led to a later lowering than the
    runner's. memory: bytes as in `MemoryAccount`; `eager`, of inputs that batches larger than every bucket made; and
    their `total`, all that is the runner's own.
    """

    lowerings: dict[str, int]
    detours: dict[str, int]
    memory: dict[str, int]
    capture: CaptureData
    ranks: RanksData


def statistics_of(parts: "Parts[Any]") -> Statistics:
    """The books of a runner. They are read as they are, while steps may be under way in another thread."""
    graphs, tally, agreement = parts.graphs, parts.tally, parts.agreement
    lowerings, detours = (graphs.filler.lowered, graphs.filler.detours) if graphs is not None else ({}, {})
    lowered = dict(lowerings)
    if tally.by_shortcut():
        lowered["in_graph"] = lowered.get("in_graph", 0) + tally.by_shortcut()
    return {
        **tally.as_data(),
        "lowerings": lowered,
        "detours": dict(detours),
        "memory": _memory(parts),
        "capture": _capture(parts),
        "ranks": _alone() if agreement is None else agreement.as_data(),
    }


def _alone() -> RanksData:
    return {"rank": 0, "size": 1, "quiet": True, "exchanges": 0, "forced": {}}


def _memory(parts: "Parts[Any]") -> dict[str, int]:
    graphs, own = parts.graphs, parts.eager.buffers
    eager = own.nbytes if own is not None else 0
    if graphs is None:
        account, eager = MemoryAccount(inputs=eager, graphs=0, outputs=0), 0
    else:
        account, eager = graphs.memory(), 0 if own is graphs.buffers else eager
    return {**attrs.asdict(account), "eager": eager, "total": account.total + eager}


def _capture(parts: "Parts[Any]") -> CaptureData:
    graphs = parts.graphs
    report = graphs.report if graphs is not None else None
    if graphs is None or report is None:
        return {"buckets": [], "failed": {}, "graphs": 0, "seconds": 0.0, "driver": 0}
    return {
        "buckets": list(report.captured),
        "failed": dict(report.failed),
        "graphs": len(graphs.captured),
        "seconds": report.seconds,
        "driver": report.driver,
    }
