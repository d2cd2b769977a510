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
    tally: Tally, graphs: GraphSet[Any] | None, own: Buffers | None, coordinator: Coordinator
) -> Statistics:
    """The books of a runner. They are read as they are, while steps may be under way in another thread.

    own: the buffers of its eager steps, which may be those of its graphs.
    """
    eager = 0 if own is None else own.nbytes
    memory, report = MemoryAccount(inputs=eager, graphs=0, outputs=0), None
    lowered, detours, captured = dict[str, int](), dict[str, int](), 0
    if graphs is None:
        eager = 0
    else:
        eager = 0 if own is graphs.buffers else eager
        memory, report, captured = graphs.memory(), graphs.report, len(graphs.captured)
        lowered, detours = dict[str, int](graphs.filler.lowered), dict[str, int](graphs.filler.detours)
        if by_shortcut := tally.by_shortcut():
            lowered[graphs.filler.lowering] = lowered.get(graphs.filler.lowering, 0) + by_shortcut
    return {
        **tally.as_data(),
        "lowerings": lowered,
        "detours": detours,
        "memory": {**attrs.asdict(memory), "eager": eager, "total": memory.total + eager},
        "capture": {
            "buckets": [] if report is None else list(report.captured),
            "failed": {} if report is None else dict(report.failed),
            "graphs": captured,
            "seconds": 0.0 if report is None else report.seconds,
            "driver": 0 if report is None else report.driver,
        },
        "ranks": coordinator.as_data(),
    }
