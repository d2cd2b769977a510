"""Explaining a runner: its declaration, fills, graphs, memory and decisions as data, read off the runner itself."""

import collections
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs

from ...dataflow.bucket import Absent
from ...dataflow.buffers import Buffer
from ...dataflow.capabilities import DEVICE, HOST, Capabilities, dtype_text
from ...dataflow.declaration import Declaration
from ...dataflow.plan import FillPlan, plan_fill, slot_bytes
from ...dataflow.slots import Output
from ..graphs import GraphSet
from ..outputs import nbytes_of
from ..recording.records import RanksRecord
from ..runner import Runner
from ..sharing import Layout, lasting
from ..statistics import Decision
from .declared import NOT_SIZED, Explanation, explain_declaration

Kind = Literal["reset", "copy", "compute", "upload", "kernel", "graph", "step"]
Phase = Literal["fill", "kernel", "replay", "outputs"]


@attrs.frozen(kw_only=True)
class FillStep:
    """One thing that a step does.

    kind: what it does. "step" runs the step without a graph. calls: into torch, the driver or a function. 0 if it rides
    in another call, such as the graph's. nbytes: of the slots that it moves if every row is live. None if that depends
    on the batch. inside: whether the graph does it. maybe: whether most steps leave it out. slots: what it writes, or
    takes up.
    """

    kind: Kind
    label: str
    calls: int
    nbytes: int | None
    inside: bool = False
    maybe: bool = False
    slots: tuple[str, ...] = ()


@attrs.frozen
class Fill:
    """How the slots are filled: the plan, and what a step does in which order."""

    plan: FillPlan
    steps: tuple[FillStep, ...]

    @property
    def calls(self) -> Mapping[str, int]:
        """The calls of each kind of step."""
        found = collections.Counter[str]()
        for step in self.steps:
            found[step.kind] += step.calls
        return dict(found)


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


@attrs.frozen
class Allocation:
    """One piece of memory that slots lie in, and its bytes. adopted: whether it was handed in by `bind=`."""

    name: str
    nbytes: int
    adopted: bool


@attrs.frozen(kw_only=True)
class SlotPlace:
    """Where a slot lies: its allocation, the offset there, and its bytes.

    shape: at full capacity. since, until: the phases of a step between which its value counts. lasting: why its bytes
    must hold between steps, too. None if they need not. shares: slots of other runners that have some of its bytes,
    as "runner.slot".
    """

    slot: str
    allocation: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    since: Phase
    until: Phase
    lasting: str | None
    shares: tuple[str, ...]


@attrs.frozen
class MemoryFacts:
    """The memory layout: the phases of a step, allocations, and each slot's place."""

    phases: tuple[Phase, ...]
    allocations: tuple[Allocation, ...]
    places: tuple[SlotPlace, ...]


@attrs.frozen(kw_only=True)
class RankFacts(RanksRecord):
    """The ranks that run each step together.

    on: where they exchange before a step, "host" or a device's kind. None if they do not. agreed: what all did in the
    last step.
    """

    on: str | None
    agreed: Decision | None


@attrs.frozen(kw_only=True)
class RunnerExplanation:
    """A runner as data.

    kind: its class. path: what batches that fit take. lowering: how its fills are run. configuration: what
    `RunnerConfig.of` reads back. declaration: explained for the largest bucket, or the present capacity. eager: how
    steps without a graph are filled. None before the first. statistics: the runner's `stats()`, with text for keys.
    pool: the layout of the memory that it shares with other runners, and member: its name there, if it shares any.
    ranks: None if there are none.
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

    @property
    def fills(self) -> list[tuple[str, Fill]]:
        """Each way in which steps are filled, for buckets next to one another that do the same; the eager one last."""
        found = list[tuple[str, Fill]]()
        for _, group in itertools.groupby(
            self.buckets, lambda one: [attrs.evolve(s, nbytes=None) for s in one.fill.steps]
        ):
            rows = list(group)
            name = f"{len(rows)} buckets, {rows[0].rows} to {rows[-1].rows}" if rows[1:] else f"bucket {rows[0].rows}"
            found.append((name, rows[-1].fill))
        return found if self.eager is None else [*found, ("eager, not padded", self.eager)]


def explain(runner: Runner[Any]) -> RunnerExplanation:
    """What a runner declares, plans, captured, holds in memory and has decided, as data; for tables and pictures, too.

    Nothing is run or captured. The memory of a pool that is not laid out yet is laid out now.
    `runner.decide(batch)` tells what it would do with a batch.

    Args:
        runner: Any runner, captured or not.
    """
    stage, graphs, seat, buffers = runner.stage, runner.graphs, runner.seat, runner.eager.buffers
    declared, capabilities = stage.declaration, stage.backend.capabilities
    lowering = "foreach" if graphs is None else graphs.filler.lowering
    sizes = runner.sizes[max(runner.sizes)] if runner.sizes else {} if buffers is None else buffers.capacity
    extents = {axis: (size, size) for axis, size in sizes.items()} or NOT_SIZED
    declaration = explain_declaration(declared, capabilities, stage.backend.name, extents, lowering=lowering)
    eager = None
    if buffers is not None:
        plan = attrs.evolve(plan_fill(declared, buffers.capacity, capabilities), tails=())
        eager = _fill(plan, declared, capabilities, parts=0, whole=False)
    pool, ranks = None if seat is None else seat.layout, declared.ranks
    where = None if ranks is None or ranks.quiet else ranks.on
    return RunnerExplanation(
        kind=type(runner).__name__,
        backend=stage.backend.name,
        device=str(stage.backend.device),
        path="eager" if graphs is None else runner.tally.path,
        lowering=lowering,
        configuration=_as_json(runner.config.as_data()),
        declaration=declaration,
        buckets=() if graphs is None else tuple(_bucket(runner, graphs, rows) for rows in sorted(runner.sizes)),
        eager=eager,
        memory=_memory(runner, declaration.plan, pool),
        statistics=_as_json(runner.stats()),
        member=seat.name if seat is not None and pool is not None else None,
        pool=pool,
        ranks=None if ranks is None else RankFacts.of(ranks, on=where, agreed=runner.agreed),
    )


def _as_json(data: Any) -> Any:
    """Plain data as it comes back from JSON, with text for keys."""
    return json.loads(json.dumps(data))


def _bucket(runner: Runner[Any], graphs: GraphSet[Any], rows: int) -> BucketFacts:
    declaration, capabilities = runner.stage.declaration, runner.stage.backend.capabilities
    found = tuple(_graph(runner, graphs, rows, absent) for absent in sorted(runner.patterns, key=sorted))
    how: Any = {"lowering": graphs.filler.lowering, "foreign": graphs.buffers.foreign}
    plan = plan_fill(declaration, runner.sizes[rows], capabilities, **how)
    parts, whole = max(one.parts for one in found) or 1, runner.tally.path == "graph"
    return BucketFacts(rows, _fill(plan, declaration, capabilities, parts=parts, whole=whole), found)


def _graph(runner: Runner[Any], graphs: GraphSet[Any], rows: int, absent: Absent) -> GraphFacts:
    """A bucket's graph for one pattern, or why there is none."""
    names, captured = tuple(sorted(absent)), graphs.captured.get((rows, absent))
    if captured is not None:
        graph = captured.graph
        outputs = nbytes_of([graph.outputs], but=graphs.buffers.storages)
        return GraphFacts(absent=names, parts=graph.parts, nbytes=graph.nbytes, outputs=outputs)
    if not runner.config.graphs:
        why = "graphs are switched off, by graphs=False"
    elif graphs.report is None:
        why = "nothing is captured yet: call capture()"
    else:
        why = graphs.report.failed.get(rows) or "captured when the first batch comes for it (lazy)"
    return GraphFacts(absent=names, why=why)


def _fill(  # noqa: C901 - one kind of step after the other
    plan: FillPlan, declaration: Declaration, capabilities: Capabilities, *, parts: int, whole: bool
) -> Fill:
    """A plan's steps in order. parts: graphs of the step. whole: whether they compute what the device does."""
    named, steps = dict(plan.sizes), list[FillStep]()
    sizes = {axis: named[axis.name] for axis in declaration.axes}
    is_first = plan.lowering == "in_graph"  # of the graph's nodes the kernel

    def add(
        kind: Kind, label: str, slots: Iterable[str], calls: int, moved: Iterable[str] | None = None, **more: bool
    ) -> None:
        names = tuple(slots)
        counted = names if moved is None else moved
        nbytes = None
        if kind not in ("reset", "graph", "step"):
            nbytes = sum(slot_bytes(declaration.slots[name], sizes, capabilities) for name in counted)
        steps.append(FillStep(kind=kind, label=label, calls=calls, nbytes=nbytes, slots=names, **more))

    def compute(place: str, *, inside: bool) -> None:
        for one in plan.computed:
            if one.on == place:
                rides = inside or one.packed
                add("compute", f"{one.function} on the {place}", [one.slot], int(not rides), inside=inside)

    def copy(*, late: bool) -> None:  # behind an upload, or the others; one call takes all that are mixed
        together = list[str]()
        for group in plan.copies:
            if (group.placement != HOST and bool(plan.packed)) == late and group.how in ("foreach", "single"):
                if group.how == "foreach" and plan.mixed:
                    together += group.slots
                    continue
                label = ", ".join(filter(None, (dtype_text(group.dst_dtype), group.placement, group.how, group.why)))
                add("copy", label, group.slots, 1 if group.how == "foreach" else len(group.slots))
        if together:
            add("copy", "foreach of all dtypes", together, 1)

    for label, always in (("reset tails", True), ("reset dirty tails", False)):
        tails = [tail for tail in plan.tails if tail.always == always and not tail.fused]
        zeros = sum(tail.value == 0 and math.copysign(1.0, tail.value) > 0 for tail in tails if not always)
        if tails:  # those that are found dirty are set to zero in one call
            add("reset", label, (tail.slot for tail in tails), len(tails) - max(zeros - 1, 0), maybe=not always)
    copy(late=False)
    compute(HOST, inside=False)
    if slots := plan.fused or plan.packed:
        add("upload", "one packet", slots, 1, plan.packed or [one.slot for one in plan.computed if one.packed])
    if plan.fused:
        label = "fused kernel, the graph's first node" if is_first else "fused kernel"
        add("kernel", label, slots, int(not is_first), inside=is_first)
    copy(late=True)
    compute(DEVICE, inside=whole and plan.lowering != "slot_by_slot")
    if parts:
        add("graph", "graph" if parts == 1 else f"{parts} graphs, breaks between", (), parts)
    else:
        add("step", "the step, without a graph", (), 1)
    return Fill(plan, tuple(steps))


def _memory(runner: Runner[Any], plan: FillPlan | None, pool: Layout | None) -> MemoryFacts:
    """Where slots lie. plan: of a bucket, which tells when they are written. pool: of memory that is shared."""
    seat, buffers = runner.seat, runner.eager.buffers if runner.graphs is None else runner.graphs.buffers
    member, kept, shared = "", frozenset[str](), frozenset[str]()
    if seat is not None and seat.phase is not None and pool is not None:
        member, kept = seat.name, seat.phase.kept
        shared = frozenset(place.slot for place in pool.places if place.member == member)
    phases: tuple[Phase, ...] = ("fill", "kernel", "replay", "outputs")
    if plan is None or not plan.fused:
        phases = ("fill", "replay", "outputs")
    found: dict[tuple[int, str], list[Buffer]] = {}
    for buffer in sorted(buffers or (), key=lambda one: (one.adopted, one.slot.placement != DEVICE)):
        storage = buffer.tensor.untyped_storage()  # storages without bytes are each by itself
        found.setdefault((storage.data_ptr(), "" if storage.nbytes() else buffer.name), []).append(buffer)
    names, allocations, places = collections.Counter[str](), list[Allocation](), list[SlotPlace]()
    for first, *others in found.values():
        kind = f"{'pooled ' if first.pooled else ''}{first.slot.placement} memory"
        names[kind] += 1
        name = kind if names[kind] == 1 else f"{kind} {names[kind]}"
        allocations.append(Allocation(name, first.tensor.untyped_storage().nbytes(), first.adopted))
        inside = list[SlotPlace]()
        for buffer in (first, *others):
            lasts = lasting(buffer.slot, buffer.name, kept)
            since, until = _span(buffer, runner, plan) if lasts is None else (phases[0], phases[-1])
            place = SlotPlace(
                slot=buffer.name,
                allocation=name,
                offset=int(buffer.tensor.storage_offset()) * buffer.tensor.itemsize,
                nbytes=buffer.nbytes,
                shape=tuple(buffer.tensor.shape),
                since=since,
                until=until,
                lasting=lasts,
                shares=tuple(map(str, pool.shared_with(member, buffer.name))) if pool and buffer.name in shared else (),
            )
            inside.append(place)
        places += sorted(inside, key=lambda place: (place.offset, place.nbytes, place.slot))
    return MemoryFacts(phases, tuple(allocations), tuple(places))


def _span(buffer: Buffer, runner: Runner[Any], plan: FillPlan | None) -> tuple[Phase, Phase]:
    """The first and the last phase in which the value of a slot counts that need not last between steps."""
    slot, name = buffer.slot, buffer.name
    if isinstance(slot, Output):
        return "replay", "outputs"
    if runner.stage.declaration.side(name) == DEVICE:
        return ("replay" if runner.tally.path == "graph" else "fill"), "replay"
    by_kernel = plan is not None and name in plan.fused and not slot.rewritten
    return ("kernel" if by_kernel else "fill"), "replay"
