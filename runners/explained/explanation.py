"""Explaining a runner: its declaration, plans, graphs, memory and decisions as data, read off the runner itself."""

import itertools
import json
from collections.abc import Mapping
from typing import Any

import attrs

from ...dataflow.bucket import Absent
from ...dataflow.explain import NOT_SIZED, Explanation, explain_declaration
from ...dataflow.plan import plan_fill
from ...dataflow.sharing import Layout
from ...dataflow.sources import RANKS
from ..decision import Decision
from ..graphs import GraphSet
from ..outputs import nbytes_of
from ..parts import Parts
from ..ranks.group import Ranks
from ..runner import Runner
from .memory import MemoryFacts, memory_of
from .steps import Fill, FillStep, fill_of


@attrs.frozen(kw_only=True)
class GraphFacts:
    """The graph of a bucket for one pattern of absent slots.

    why: why there is none. Empty if there is one. parts: graphs that it is launched as. nbytes, outputs: bytes.
    """

    absent: tuple[str, ...]
    parts: int = 0
    nbytes: int = 0
    outputs: int = 0
    why: str = ""


@attrs.frozen
class BucketFacts:
    """One bucket: its rows on the leading axis, its fill, and its graphs."""

    rows: int
    fill: Fill
    graphs: tuple[GraphFacts, ...]


@attrs.frozen(kw_only=True)
class RankFacts:
    """The ranks that run each step together.

    rank, size: which one this is, of how many. on: where they exchange before a step, "host" or a device's kind. None
    if they do not. equal: whether all are known to get the same batches. shards: over how many ranks a bucket's tokens
    are spread. asked: computed slots that need the ranks. agreed: what all did in the last step.
    """

    rank: int
    size: int
    on: str | None
    equal: bool
    shards: int
    asked: tuple[str, ...]
    agreed: Decision | None


@attrs.frozen(kw_only=True)
class RunnerExplanation:
    """A runner as data.

    kind: its class. path: what batches that fit take. lowering: how its fills are run. configuration: what
    `RunnerConfig.of` reads back. declaration: explained for the largest bucket, or the present capacity. eager: how
    steps without a graph are filled. None before the first. statistics: the runner's `stats()`, with text for keys.
    pool: the layout of the memory that it shares with other runners, and member: its name there, if it shares any.
    ranks: None if there are none. asked: what this rank alone would do with the batch that was given, if one was.
    """

    kind: str
    backend: str
    device: str
    path: str
    lowering: str
    configuration: Mapping[str, Any]
    declaration: Explanation
    buckets: tuple[BucketFacts, ...]
    eager: Fill | None
    memory: MemoryFacts
    statistics: Mapping[str, Any]
    member: str | None
    pool: Layout | None
    ranks: RankFacts | None
    asked: Decision | None

    @property
    def fills(self) -> list[tuple[str, Fill]]:
        """Each way in which steps are filled, under the buckets that it is for, with the largest bucket's bytes.

        Buckets next to one another that do the same are one. The eager fill comes last.
        """
        found = list[tuple[str, Fill]]()
        for _, group in itertools.groupby(self.buckets, _without_bytes):
            rows = list(group)
            name = f"{len(rows)} buckets, {rows[0].rows} to {rows[-1].rows}" if rows[1:] else f"bucket {rows[0].rows}"
            found.append((name, rows[-1].fill))
        return found if self.eager is None else [*found, ("eager, not padded", self.eager)]


def _without_bytes(bucket: BucketFacts) -> list[FillStep]:
    """What a fill does, whatever the bytes."""
    return [attrs.evolve(step, nbytes=None) for step in bucket.fill.steps]


def explain(runner: Runner[Any], batch: Any = None, **side: Any) -> RunnerExplanation:
    """What a runner declares, plans, captured, holds in memory and has decided, as data; for tables and pictures, too.

    Nothing is run or captured. The memory of a pool that is not laid out yet is laid out now.

    Args:
        runner: Any runner, captured or not.
        batch: A batch whose path is explained, too; with several ranks, the path that this rank alone would take.
        side: The batch's side arguments.

    Raises:
        BatchError: The batch does not fit the declaration.
    """
    parts = runner.parts
    stage, graphs, seat, buffers = parts.stage, parts.graphs, parts.seat, parts.eager.buffers
    declared, capabilities = stage.declaration, stage.backend.capabilities
    declared.check_side(side)
    lowering = "foreach" if graphs is None else graphs.filler.lowering
    sizes = parts.sizes[max(parts.sizes)] if parts.sizes else {} if buffers is None else buffers.capacity
    extents = {axis: (size, size) for axis, size in sizes.items()} or NOT_SIZED
    declaration = explain_declaration(declared, capabilities, stage.backend.name, extents, lowering=lowering)
    eager = None
    if buffers is not None:
        plan = attrs.evolve(plan_fill(declared, buffers.capacity, capabilities), tails=())
        eager = fill_of(plan, declared, capabilities, parts=0)
    pool = None if seat is None else seat.layout
    return RunnerExplanation(
        kind=type(runner).__name__,
        backend=stage.backend.name,
        device=str(stage.backend.device),
        path="eager" if graphs is None else parts.tally.path,
        lowering=lowering,
        configuration=_as_json(parts.config.as_data()),
        declaration=declaration,
        buckets=() if graphs is None else tuple(_bucket(parts, graphs, rows) for rows in sorted(parts.sizes)),
        eager=eager,
        memory=memory_of(parts, declaration.plan, pool),
        statistics=_as_json(runner.stats()),
        member=seat.name if seat is not None and pool is not None else None,
        pool=pool,
        ranks=_ranks(parts),
        asked=None if batch is None else runner.decide(batch, **side),
    )


def _as_json(data: Any) -> Any:
    """Plain data as it comes back from JSON, with text for keys."""
    return json.loads(json.dumps(data))


def _bucket(parts: Parts[Any], graphs: GraphSet[Any], rows: int) -> BucketFacts:
    declaration, capabilities = parts.stage.declaration, parts.stage.backend.capabilities
    found = tuple(_graph(parts, graphs, rows, absent) for absent in sorted(parts.patterns, key=sorted))
    foreign, lowering = graphs.buffers.foreign, graphs.filler.lowering
    plan = plan_fill(declaration, parts.sizes[rows], capabilities, lowering=lowering, foreign=foreign)
    launched = max((one.parts for one in found if not one.why), default=1)
    whole = parts.tally.path == "graph"
    return BucketFacts(rows, fill_of(plan, declaration, capabilities, parts=launched, whole=whole), found)


def _graph(parts: Parts[Any], graphs: GraphSet[Any], rows: int, absent: Absent) -> GraphFacts:
    """A bucket's graph for one pattern, or why there is none."""
    names, captured, report = tuple(sorted(absent)), graphs.captured.get((rows, absent)), graphs.report
    if captured is not None:
        graph = captured.graph
        outputs = nbytes_of([graph.outputs], but=graphs.buffers.storages)
        return GraphFacts(absent=names, parts=graph.parts, nbytes=graph.nbytes, outputs=outputs)
    why = "graphs are switched off, by graphs=False"
    if parts.config.graphs and report is None:
        why = "nothing is captured yet: call capture()"
    elif parts.config.graphs and report is not None:
        why = report.failed.get(rows) or "captured when the first batch comes for it (lazy)"
    return GraphFacts(absent=names, why=why)


def _ranks(parts: Parts[Any]) -> RankFacts | None:
    declaration = parts.stage.declaration
    ranks: Ranks | None = declaration.ranks
    if ranks is None:
        return None
    computed = ((name, slot.computes()) for name, slot in declaration.slots.items())
    return RankFacts(
        rank=ranks.rank,
        size=ranks.size,
        on=None if ranks.quiet else ranks.on,
        equal=ranks.equal,
        shards=ranks.shards,
        asked=tuple(name for name, compute in computed if compute is not None and RANKS in compute.needs),
        agreed=parts.coordinator.agreed,
    )
