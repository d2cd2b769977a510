"""Explaining a runner: its declaration, plans, graphs, memory and decisions, read off the runner itself."""

import json
from collections.abc import Iterator
from typing import Any

import attrs

from ...dataflow.axes import Sizes
from ...dataflow.bucket import Absent
from ...dataflow.explain import NOT_SIZED, Explanation, explain_declaration
from ...dataflow.planner import plan_fill, slot_bytes
from ...dataflow.sharing import Layout
from ...dataflow.sources import RANKS
from ..graphs import GraphSet
from ..outputs import nbytes_of
from ..parts import Parts
from ..ranks.group import Ranks
from ..runner import Runner
from .memory import NONE, memory_of
from .records import BucketFacts, EagerFacts, GraphFacts, MemoryFacts, RankFacts, RunnerExplanation
from .steps import fill_of


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
    stage, graphs, seat = parts.stage, parts.graphs, parts.seat
    stage.declaration.check_side(side)
    pool = seat.layout if seat is not None else None
    declaration = _declaration(parts)
    return RunnerExplanation(
        kind=type(runner).__name__,
        backend=stage.backend.name,
        device=str(stage.backend.device),
        path="eager" if graphs is None else parts.tally.path,
        lowering="foreach" if graphs is None else graphs.filler.lowering,
        configuration=_as_json(parts.config.as_data()),
        sizes=_named(stage.sizes),
        declaration=declaration,
        buckets=() if graphs is None else tuple(_buckets(parts, graphs)),
        patterns=tuple(tuple(sorted(absent)) for absent in sorted(parts.patterns, key=sorted)),
        eager=_eager(parts),
        memory=_memory(parts, declaration, pool),
        statistics=_as_json(runner.stats()),
        member=seat.name if seat is not None and pool is not None else None,
        pool=pool,
        ranks=_ranks(parts),
        asked=None if batch is None else runner.decide(batch, **side),
    )


def _as_json(data: Any) -> Any:
    """Plain data as it comes back from JSON, with text for keys."""
    return json.loads(json.dumps(data))


def _named(sizes: Sizes) -> tuple[tuple[str, int], ...]:
    return tuple((axis.name, size) for axis, size in sorted(sizes.items()))


def _is_whole(parts: Parts[Any]) -> bool:
    """Whether graphs hold the whole step."""
    return parts.graphs is not None and parts.tally.path == "graph"


def _declaration(parts: Parts[Any]) -> Explanation:
    """The declaration at the largest bucket's sizes, or the present capacity; without sizes before the first batch."""
    stage, graphs, buffers = parts.stage, parts.graphs, parts.eager.buffers
    sizes = parts.sizes[max(parts.sizes)] if parts.sizes else buffers.capacity if buffers is not None else {}
    extents = {axis: (size, size) for axis, size in sizes.items()} or NOT_SIZED
    lowering = graphs.filler.lowering if graphs is not None else "foreach"
    return explain_declaration(
        stage.declaration, stage.backend.capabilities, stage.backend.name, extents, lowering=lowering
    )


def _buckets(parts: Parts[Any], graphs: GraphSet[Any]) -> Iterator[BucketFacts]:
    declaration, capabilities = parts.stage.declaration, parts.stage.backend.capabilities
    for rows, sizes in sorted(parts.sizes.items()):
        found = tuple(_graph(parts, graphs, rows, absent) for absent in sorted(parts.patterns, key=sorted))
        launched = max((one.parts for one in found if not one.why), default=1)
        lowering, foreign = graphs.filler.lowering, graphs.buffers.foreign
        plan = plan_fill(declaration, sizes, capabilities, lowering=lowering, foreign=foreign)
        yield BucketFacts(
            rows=rows,
            sizes=_named(sizes),
            nbytes=sum(slot_bytes(slot, sizes, capabilities) for slot in declaration.slots.values()),
            fill=fill_of(plan, declaration, capabilities, parts=launched, whole=_is_whole(parts)),
            graphs=found,
        )


def _graph(parts: Parts[Any], graphs: GraphSet[Any], rows: int, absent: Absent) -> GraphFacts:
    """A bucket's graph for one pattern, or why there is none."""
    names, captured, report = tuple(sorted(absent)), graphs.captured.get((rows, absent)), graphs.report
    if captured is None:
        why = "graphs are switched off, by graphs=False"
        if parts.config.graphs and report is None:
            why = "nothing is captured yet: call capture()"
        elif parts.config.graphs and report is not None:
            why = report.failed.get(rows) or "captured when the first batch comes for it (lazy)"
        return GraphFacts(absent=names, why=why)
    graph = captured.graph
    outputs = nbytes_of([graph.outputs], but=graphs.buffers.storages)
    return GraphFacts(absent=names, why="", parts=graph.parts, nbytes=graph.nbytes, outputs=outputs)


def _eager(parts: Parts[Any]) -> EagerFacts:
    eager, declaration, capabilities = parts.eager, parts.stage.declaration, parts.stage.backend.capabilities
    if eager.buffers is None:
        return EagerFacts(capacity=(), nbytes=0, no_copy=eager.no_copy, fill=None)
    plan = attrs.evolve(plan_fill(declaration, eager.buffers.capacity, capabilities), tails=())
    return EagerFacts(
        capacity=_named(eager.buffers.capacity),
        nbytes=eager.buffers.nbytes,
        no_copy=eager.no_copy,
        fill=fill_of(plan, declaration, capabilities, parts=0),
    )


def _memory(parts: Parts[Any], declaration: Explanation, pool: Layout | None) -> MemoryFacts:
    graphs, seat, shares, kept = parts.graphs, parts.seat, NONE, frozenset[str]()
    if seat is not None and seat.phase is not None and pool is not None:
        kept = seat.phase.kept
        shares = {
            place.slot: tuple(map(str, pool.shared_with(place.member, place.slot)))
            for place in pool.places
            if place.member == seat.name
        }
    return memory_of(
        graphs.buffers if graphs is not None else parts.eager.buffers,
        parts.stage.declaration,
        declaration.plan,
        whole=_is_whole(parts),
        shares=shares,
        kept=kept,
    )


def _ranks(parts: Parts[Any]) -> RankFacts | None:
    declaration = parts.stage.declaration
    ranks: Ranks | None = declaration.ranks
    if ranks is None:
        return None
    computed = {name: compute for name, slot in declaration.slots.items() if (compute := slot.computes()) is not None}
    return RankFacts(
        rank=ranks.rank,
        size=ranks.size,
        on=None if ranks.quiet else ranks.on,
        equal=ranks.equal,
        shards=ranks.shards,
        asked=tuple(name for name, compute in computed.items() if RANKS in compute.needs),
        agreed=parts.coordinator.agreed,
    )
