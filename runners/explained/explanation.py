"""Explaining a runner: its declaration, plans, graphs, memory and decisions, read off the runner itself."""

import json
from collections.abc import Iterator
from typing import Any, Final

import attrs

from ...dataflow.axes import Sizes
from ...dataflow.bucket import Absent
from ...dataflow.explain import NOT_SIZED, Explanation, explain_declaration
from ...dataflow.plan import FillPlan
from ...dataflow.planner import plan_fill, slot_bytes
from ..capture import MemoryAccount
from ..graphs import GraphSet
from ..outputs import nbytes_of
from ..parts import Parts
from ..runner import Runner
from ..statistics import Statistics
from .decisions import decisions_of, use_of
from .memory import ALONE, Layout, phases_of
from .pool_facts import PoolFacts, pool_facts, sharers_of
from .rank_facts import decision_facts, rank_facts
from .records import BucketFacts, DecisionFacts, EagerFacts, Fill, GraphFacts, MemoryFacts, RunnerExplanation
from .steps import fill_of

_WHOLE: Final = "graph"
"""The path of a runner whose graphs hold the whole step."""


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
    parts.stage.declaration.check_side(side)
    layout = parts.seat.layout if parts.seat is not None else None
    pool = pool_facts(layout, parts.seat.name) if parts.seat is not None and layout is not None else None
    asked = None if batch is None else decision_facts(parts, runner.decide(batch, **side))
    return _Explaining(runner, parts, runner.stats(), pool, asked).explanation()


@attrs.frozen(eq=False)
class _Explaining:
    """One explanation in the making."""

    runner: Runner[Any]
    parts: Parts[Any]
    stats: Statistics
    pool: PoolFacts | None
    asked: DecisionFacts | None

    def explanation(self) -> RunnerExplanation:
        parts, stage, graphs = self.parts, self.parts.stage, self.parts.graphs
        report = graphs.report if graphs is not None else None
        return RunnerExplanation(
            kind=type(self.runner).__name__,
            backend=stage.backend.name,
            device=str(stage.backend.device),
            path=parts.tally.path if graphs is not None else "eager",
            lowering=self._lowering(),
            configuration=json.loads(json.dumps(parts.config.as_data())),
            sizes=_named(stage.sizes),
            declaration=self._declaration(),
            buckets=tuple(self._buckets()),
            patterns=tuple(tuple(sorted(absent)) for absent in sorted(parts.patterns, key=sorted)),
            eager=self._eager(),
            memory=self._memory(),
            pool=self.pool,
            decisions=decisions_of(self.stats),
            seconds=report.seconds if report is not None else None,
            driver=report.driver if report is not None else None,
            ranks=rank_facts(parts),
            asked=self.asked,
        )

    def _lowering(self) -> str:
        graphs = self.parts.graphs
        return "foreach" if graphs is None else graphs.filler.lowering

    @property
    def _is_whole(self) -> bool:
        return self.parts.graphs is not None and self.parts.tally.path == _WHOLE

    def _largest(self) -> Sizes:
        """The largest bucket's sizes, or the present capacity; none before an eager runner's first batch."""
        parts = self.parts
        if parts.sizes:
            return parts.sizes[max(parts.sizes)]
        buffers = parts.eager.buffers
        return buffers.capacity if buffers is not None else {}

    def _declaration(self) -> Explanation:
        stage, sizes = self.parts.stage, self._largest()
        extents = {axis: (size, size) for axis, size in sizes.items()} or NOT_SIZED
        backend, lowering = stage.backend, self.parts.graphs.filler.lowering if self.parts.graphs else "foreach"
        return explain_declaration(stage.declaration, backend.capabilities, backend.name, extents, lowering=lowering)

    def _buckets(self) -> Iterator[BucketFacts]:
        graphs, stage = self.parts.graphs, self.parts.stage
        if graphs is None:
            return
        capabilities = stage.backend.capabilities
        for rows, sizes in sorted(self.parts.sizes.items()):
            found = tuple(_Graph(self.parts, graphs, rows).facts(absent) for absent in self._patterns())
            launched = max((one.parts for one in found if not one.why), default=1)
            plan = plan_fill(
                stage.declaration,
                sizes,
                capabilities,
                lowering=graphs.filler.lowering,
                foreign=graphs.buffers.foreign,
            )
            yield BucketFacts(
                rows=rows,
                sizes=_named(sizes),
                nbytes=sum(slot_bytes(slot, sizes, capabilities) for slot in stage.declaration.slots.values()),
                fill=self._fill(plan, launched),
                graphs=found,
                use=use_of(self.stats, rows),
            )

    def _patterns(self) -> list[Absent]:
        return sorted(self.parts.patterns, key=sorted)

    def _fill(self, plan: FillPlan, parts: int) -> Fill:
        stage = self.parts.stage
        return fill_of(plan, stage.declaration, stage.backend.capabilities, parts=parts, whole=self._is_whole)

    def _eager(self) -> EagerFacts:
        eager, graphs, stage = self.parts.eager, self.parts.graphs, self.parts.stage
        buffers = eager.buffers
        if buffers is None:
            return EagerFacts(capacity=(), nbytes=0, own=0, no_copy=eager.no_copy, fill=None)
        is_shared = graphs is not None and buffers is graphs.buffers
        plan = attrs.evolve(plan_fill(stage.declaration, buffers.capacity, stage.backend.capabilities), tails=())
        return EagerFacts(
            capacity=_named(buffers.capacity),
            nbytes=buffers.nbytes,
            own=0 if is_shared else buffers.nbytes,
            no_copy=eager.no_copy,
            fill=self._fill(plan, 0),
        )

    def _memory(self) -> MemoryFacts:
        graphs, stage = self.parts.graphs, self.parts.stage
        buffers = graphs.buffers if graphs is not None else self.parts.eager.buffers
        account = graphs.memory() if graphs is not None else MemoryAccount(self.parts.eager.nbytes, 0, 0)
        plan = self._declaration().plan
        if buffers is None:
            return MemoryFacts(phases=phases_of(plan), allocations=(), places=(), account=account)
        sharers = ALONE if self.pool is None else sharers_of(self.pool)
        phase = self.parts.seat.phase if self.parts.seat is not None and self.pool is not None else None
        kept = phase.kept if phase is not None else ()
        layout = Layout.of(buffers, stage.declaration, plan, whole=self._is_whole, sharers=sharers, kept=kept)
        return MemoryFacts(
            phases=phases_of(plan), allocations=layout.allocations, places=layout.places, account=account
        )


@attrs.frozen(eq=False)
class _Graph:
    """One bucket's graphs."""

    parts: Parts[Any]
    graphs: GraphSet[Any]
    rows: int

    def facts(self, absent: Absent) -> GraphFacts:
        """The graph for one pattern, or why there is none."""
        captured, names = self.graphs.captured.get((self.rows, absent)), tuple(sorted(absent))
        if captured is None:
            return GraphFacts(absent=names, why=self._why(), parts=0, nbytes=0, outputs=0)
        graph = captured.graph
        outputs = nbytes_of([graph.outputs], but=self.graphs.buffers.storages)
        return GraphFacts(absent=names, why="", parts=graph.parts, nbytes=graph.nbytes, outputs=outputs)

    def _why(self) -> str:
        config, report = self.parts.config, self.graphs.report
        if not config.graphs:
            return "graphs are switched off, by graphs=False"
        if report is None:
            return "nothing is captured yet: call capture()"
        failed = report.failed.get(self.rows)
        return failed or "captured when the first batch comes for it (lazy)"


def _named(sizes: Sizes) -> tuple[tuple[str, int], ...]:
    return tuple((axis.name, size) for axis, size in sorted(sizes.items()))
