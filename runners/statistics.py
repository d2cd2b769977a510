"""The books of a runner as plain data, the same for every kind of runner."""

from typing import Any, TypedDict

import attrs

from ..dataflow.buffers import Buffers
from .capture import MemoryAccount
from .coordination import Coordinator, RanksData
from .decision import Tally, TallyData
from .graphs import GraphSet


class CaptureData(TypedDict):
    """What captures came to so far: buckets, graphs, seconds, and bytes that the driver took beside torch's allocator.

    failed: the reason, by bucket.
    """

    buckets: list[int]
    failed: dict[int, str]
    graphs: int
    seconds: float
    driver: int


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


def statistics_of(
    graphs: GraphSet[Any] | None, tally: Tally, coordinator: Coordinator, own: Buffers | None
) -> Statistics:
    """The books of a runner. They are read as they are, while steps may be under way in another thread.

    own: buffers that steps without a graph fill.
    """
    lowerings, detours = (graphs.filler.lowered, graphs.filler.detours) if graphs is not None else ({}, {})
    lowered = dict(lowerings)
    if graphs is not None and tally.by_shortcut():
        lowering = graphs.filler.lowering
        lowered[lowering] = lowered.get(lowering, 0) + tally.by_shortcut()
    return {
        **tally.as_data(),
        "lowerings": lowered,
        "detours": dict(detours),
        "memory": _memory(graphs, own),
        "capture": _capture(graphs),
        "ranks": coordinator.as_data(),
    }


def _memory(graphs: GraphSet[Any] | None, own: Buffers | None) -> dict[str, int]:
    eager = own.nbytes if own is not None else 0
    if graphs is None:
        account, eager = MemoryAccount(inputs=eager, graphs=0, outputs=0), 0
    else:
        account, eager = graphs.memory(), 0 if own is graphs.buffers else eager
    return {**attrs.asdict(account), "eager": eager, "total": account.total + eager}


def _capture(graphs: GraphSet[Any] | None) -> CaptureData:
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
