"""Explains a runner: its declaration, fills, graphs, memory and decisions as data, read from the runner itself."""

import collections
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import attrs

from ...dataflow.buffers import Buffer
from ...dataflow.capabilities import DEVICE, HOST, LoweringName, dtype_text
from ...dataflow.lowering import LOWERINGS
from ...dataflow.plan import FillPlan, plan_fill, slot_bytes
from ...dataflow.slots import BY_STEP
from ..decode import GraphRunner
from ..engine.outputs import nbytes_of
from ..engine.runner import Runner
from ..engine.sharing import Layout, lasting
from ..engine.stage import Stage
from ..engine.statistics import Decision, human_bytes
from ..recording.records import RanksRecord
from .declared import NOT_SIZED, Explanation, explain_declaration
from .pages import Shown, Table, TableRow, cell, pairs, safe, table_rows

CallKind = Literal["reset", "copy", "compute", "upload", "kernel", "graph", "step"]
StepPart = Literal["fill", "kernel", "replay", "outputs"]


@attrs.frozen(kw_only=True)
class FillStep:
    """One thing that a step does.

    Attributes:
        kind: What it does. "step" runs the step without a graph.
        calls: Calls into torch, the driver or a function, or 0 if it is part of another call, such as the graph's.
        nbytes: Bytes of the slots that it moves if every row is live, or None if that depends on the batch.
        inside: Whether the graph does it.
        maybe: Whether most steps leave it out.
        slots: What it writes, or uploads.
    """

    kind: CallKind
    label: str
    calls: int
    nbytes: int | None
    inside: bool = False
    maybe: bool = False
    slots: tuple[str, ...] = ()


@attrs.frozen
class Fill:
    """How the slots are filled: the plan, and what a step does in order."""

    plan: FillPlan
    steps: tuple[FillStep, ...]

    @property
    def calls(self) -> Mapping[str, int]:
        """The number of calls by kind."""
        found = collections.Counter[str]()
        for step in self.steps:
            found[step.kind] += step.calls
        return dict(found)


@attrs.frozen(kw_only=True)
class GraphFacts:
    """The graph of a bucket for one pattern of absent slots.

    Attributes:
        why: Why there is no graph, or empty if there is one.
        parts: How many graphs are launched for it.
        nbytes: Bytes of the graph.
        outputs: Bytes of its outputs.
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
    """One allocation that has slots, and its bytes.

    Attributes:
        adopted: Whether it was handed in by `bind=`.
    """

    name: str
    nbytes: int
    adopted: bool


@attrs.frozen(kw_only=True)
class SlotPlace:
    """The place of a slot: its allocation, the offset in it, and its bytes.

    Attributes:
        shape: Its shape at full capacity.
        since: The first phase of a step in which its value matters.
        until: The last one.
        lasting: Why its bytes must last between steps, too, or None if they need not.
        shares: Slots of other runners that have some of its bytes, as "runner.slot".
    """

    slot: str
    allocation: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    since: StepPart
    until: StepPart
    lasting: str | None
    shares: tuple[str, ...]


@attrs.frozen
class MemoryFacts:
    """The memory layout: the phases of a step, allocations, and each slot's place."""

    phases: tuple[StepPart, ...]
    allocations: tuple[Allocation, ...]
    places: tuple[SlotPlace, ...]


@attrs.frozen(kw_only=True)
class RankFacts(RanksRecord):
    """The ranks that run each step together.

    Attributes:
        over: What carries exchanges before a step, "shared memory" or "gloo", or None if there are none.
        agreed: What all did in the last step.
    """

    over: str | None
    agreed: Decision | None


@attrs.frozen(kw_only=True, repr=False)
class RunnerExplanation(Shown):
    """A runner as data.

    Attributes:
        kind: Its class.
        path: The path of batches that fit.
        lowering: How its fills are run.
        configuration: Options that `RunnerConfig.of` reads back.
        declaration: The declaration for the largest bucket, or the present capacity.
        eager: How steps without a graph are filled, or None before the first.
        statistics: The runner's `stats()`, with text for keys.
        member: Its name among the runners that share memory with it, if any do.
        pool: The layout of that memory.
        ranks: Its ranks, or None.
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
    def fills(self) -> Iterator[tuple[str, Fill]]:
        """Each way in which steps are filled, one for adjacent buckets that do the same. The eager one comes last."""
        for _, alike in itertools.groupby(
            self.buckets, lambda one: [attrs.evolve(s, nbytes=None) for s in one.fill.steps]
        ):
            one, *more = alike
            last = (one, *more)[-1]
            yield f"{len(more) + 1} buckets, {one.rows} to {last.rows}" if more else f"bucket {one.rows}", last.fill
        if self.eager:
            yield "eager, not padded", self.eager

    def tables(self) -> Iterator[Table]:
        """Yield figures, slots, steps, buckets, graphs, memory and counts."""
        on = f"{self.kind} of {self.declaration.declaration} on {self.backend} ({self.device})"
        text = f"path {self.path}, lowering {self.lowering}\n{cell(self.configuration)}"
        yield Table(on, pairs(_on_top(self.statistics)), text)
        yield self.declaration.slot_table()
        for name, fill in self.fills:
            steps = [{"step": number, **row} for number, row in enumerate(table_rows(fill.steps), 1)]
            text = f"{fill.plan}\nNo bytes stand beside what moves no slot, and resets, of which the batch decides."
            yield Table(f"steps of a fill, {name}", steps, text)
        buckets: list[TableRow] = [
            {"bucket": one.rows, "sizes": dict(one.fill.plan.sizes), "copied": one.fill.plan.nbytes, **one.fill.calls}
            for one in self.buckets
        ]
        none, early = "none: this runner captures nothing", "none: the first batch makes the buffers"
        graphs = [row for one in self.buckets for row in table_rows(one.graphs, bucket=one.rows)]
        yield Table("buckets, and calls of a step", buckets, why=none)
        yield Table("graphs", graphs, why=none)
        yield Table("memory layout", table_rows(self.memory.places), why=early)
        yield Table("allocations", table_rows(self.memory.allocations), why=early)
        yield Table("shared memory", text=self.pool or "none: in no pool, or later than its layout")
        counts = {**self.statistics}
        fills = counts.pop("fills")
        for kind, title in (("buckets", "steps by bucket"), ("eager", "steps without a graph")):
            found = counts.pop(kind).items()
            steps = [{kind: name, **one, "fill us": fills[kind][name]["mean"]} for name, one in found]
            timed = (
                f"fill us: mean microseconds on the host, of one fill in {fills['every']}; - where none of these was"
                if steps
                else "none so far"
            )
            yield Table(title, steps, timed)
        yield Table("statistics", pairs(counts))
        yield Table("ranks", table_rows([self.ranks] if self.ranks else []), why="none: it runs alone")

    def pictures(self) -> str:
        """Return pictures of what a step does, and of slots' places over its phases."""
        early = "<p>Nothing is drawn before the first batch.</p>"
        return f"""<h2>What a step does</h2>
<p>A box for each step, in the plan's order, as wide as it has calls. A pale one has none of its own in most steps. \
A dashed line is around the graph and what it does. It is not measured time.</p>{drawn_fills(self) or early}
<h2>Memory over a step</h2>
<p>Offsets run downwards, phases of one step to the right. A slot is coloured while its value counts, and pale where \
its bytes are only held.</p>{drawn_memory(self) or early}
<h2>Tables</h2>"""


def _on_top(counts: Mapping[str, Any]) -> Mapping[str, str]:
    """Summarize the steps so far, the memory and the capture, each with what it counts, or why it is not known."""
    memory, capture, paths = counts["memory"], counts["capture"], counts["steps"]
    live, padded = (sum(one[rows] for one in counts["buckets"].values()) for rows in ("live", "padded"))
    steps, reasons = sum(paths.values()), {why: one["steps"] for why, one in counts["eager"].items()}
    made = f"of buckets {cell(capture['buckets'])}; {len(capture['failed']) or 'none'} failed"
    held = "buffers, graphs, outputs and uploads" if memory["total"] else "the first batch makes the buffers"
    return {
        "padding waste": f"{1 - live / padded:.1%}: of {padded:,} padded rows"
        if padded
        else "not known: no graph has done a step",
        "eager share": f"{paths['eager'] / steps:.1%}: of {steps:,} steps{f'; {cell(reasons)}' if reasons else ''}"
        if steps
        else "not known: no step is done",
        "memory": f"{human_bytes(memory['total'])}: {held}",
        "graphs": f"{capture['graphs']}: {made if capture['graphs'] else 'nothing is captured'}",
    }


def drawn_fills(one: RunnerExplanation) -> str:
    """Draw a row for all buckets that do the same, with a box for each step, as wide as its number of calls."""
    shown = list[str]()
    for name, fill in one.fills:
        calls = ", ".join(f"{kind} {calls}" for kind, calls in fill.calls.items() if calls)
        boxes = (
            f'<span class="drawn {step.kind}{" pale" * (step.maybe or not step.calls)}'
            f'{" inside" * (step.inside or step.kind == "graph")}" style="min-width:min({6 * step.calls}ch,100%)">'
            f"<b>{number} {step.kind}</b> {'' if step.nbytes is None else human_bytes(step.nbytes)}<br/>"
            f"{safe(step.label)}</span>"
            for number, step in enumerate(fill.steps, 1)
        )
        shown.append(f'<h3>{name}: calls of {calls}</h3><div class="boxes">{"".join(boxes)}</div>')
    return "".join(shown)


def drawn_memory(one: RunnerExplanation) -> str:
    """Draw offsets downwards and phases to the right.

    A slot is coloured while its value matters, and pale otherwise.
    """
    phases, shown = one.memory.phases, list[str]()
    kinds = {slot.name: safe(slot.kind) for slot in one.declaration.slots}
    number, held = '<td class="number">', '<td class="held"></td>'
    head = f"<tr>{number}offset</td>{''.join(f'<td>{phase}</td>' for phase in phases)}{number}bytes</td></tr>"
    for part in one.memory.allocations:
        rows = (
            f"<tr>{number}{place.offset:,}</td>{held * phases.index(place.since)}"
            f'<td class="drawn {kinds[place.slot]}" '
            f'colspan="{1 + phases.index(place.until) - phases.index(place.since)}">'
            f"{safe(place.slot)}, {kinds[place.slot]}</td>{held * phases[::-1].index(place.until)}"
            f"{number}{place.nbytes:,}</td></tr>"
            for place in one.memory.places
            if place.allocation == part.name
        )
        shown.append(
            f"<h3>{part.name}{', handed in' * part.adopted}: {part.nbytes:,} bytes</h3>"
            f'<div class="scroll"><table class="memory">{head}{"".join(rows)}</table></div>'
        )
    return "".join(shown)


def explain(runner: Runner[Any]) -> RunnerExplanation:
    """Explain what a runner declares, plans, captured, keeps in memory and has decided, as data, tables and pictures.

    Nothing is run or captured. The memory of a pool is laid out now, if it is not yet. `runner.decide(batch)` says what
    the runner would do with a batch.

    Args:
        runner: Any runner, captured or not.
    """
    stage, phase, buffers = runner.stage, runner.phase, runner.eager.buffers
    declared, capabilities = stage.declaration, stage.backend.capabilities
    lowering: LoweringName = "foreach"
    path, buckets = "eager", tuple[BucketFacts, ...]()
    if isinstance(runner, GraphRunner):
        path, lowering = runner.tally.path, runner.lowering
        buckets = tuple(_bucket(runner, rows) for rows in sorted(runner.sizes))
    sizes = runner.sizes[max(runner.sizes)] if runner.sizes else {} if buffers is None else buffers.capacity
    extents = {axis: (size, size) for axis, size in sizes.items()} or NOT_SIZED
    declaration = explain_declaration(declared, capabilities, stage.backend.name, extents, lowering=lowering)
    eager = None
    if buffers is not None:
        plan = attrs.evolve(plan_fill(declared, buffers.capacity, capabilities), tails=())
        eager = _fill(plan, stage, parts=0, whole=False)
    configuration, statistics = json.loads(json.dumps([runner.config.as_data(), runner.stats()]))  # text for keys
    pool, ranks = None if phase is None else phase.layout, declared.ranks
    over = None if ranks is None or ranks.quiet else ranks.over
    return RunnerExplanation(
        kind=type(runner).__name__,
        backend=stage.backend.name,
        device=str(stage.backend.device),
        path=path,
        lowering=lowering,
        configuration=configuration,
        declaration=declaration,
        buckets=buckets,
        eager=eager,
        memory=_memory(runner, declaration.plan),
        statistics=statistics,
        member=None if phase is None else phase.member or None,
        pool=pool,
        ranks=None if ranks is None else RankFacts.of(ranks, over=over, agreed=runner.agreed),
    )


def _bucket(runner: GraphRunner[Any], rows: int) -> BucketFacts:
    """Describe a bucket's fill, and its graph for each pattern, or why there is none."""
    if not runner.config.graphs:
        why = "graphs are switched off, by graphs=False"
    elif runner.report is None:
        why = "nothing is captured yet: call capture()"
    else:
        why = runner.report.failed.get(rows) or "captured when the first batch comes for it (lazy)"
    found = list[GraphFacts]()
    for absent in sorted(runner.patterns, key=sorted):
        facts: dict[str, Any] = {"why": why}
        captured = runner.graphs.captured.get((rows, absent))
        if captured is not None:
            graph = captured.graph
            outputs = nbytes_of([graph.outputs], but=runner.graphs.buffers.storages)
            facts = {"parts": graph.parts, "nbytes": graph.nbytes, "outputs": outputs}
        found.append(GraphFacts(absent=tuple(sorted(absent)), **facts))
    parts, whole = max(one.parts for one in found) or 1, runner.tally.path == "graph"
    return BucketFacts(rows, _fill(runner.plan(rows), runner.stage, parts=parts, whole=whole), tuple(found))


def _fill(plan: FillPlan, stage: Stage[Any], *, parts: int, whole: bool) -> Fill:  # noqa: C901 - one kind of step after the other
    """List a plan's steps in order.

    parts: How many graphs the step has. whole: Whether they run the functions of slots on the device.
    """
    named, steps, declaration = dict(plan.sizes), list[FillStep](), stage.declaration
    sizes = {axis: named[axis.name] for axis in declaration.axes}
    lowering = LOWERINGS[plan.lowering]
    is_first = lowering.is_in_graph  # the kernel is the graph's first node

    def add(
        kind: CallKind, label: str, slots: Iterable[str], calls: int, moved: Iterable[str] | None = None, **more: bool
    ) -> None:
        names, nbytes = tuple(slots), None
        if kind not in ("reset", "graph", "step"):
            known = [declaration.slots[name] for name in (names if moved is None else moved)]
            nbytes = sum(slot_bytes(slot, sizes, stage.backend.capabilities) for slot in known)
        steps.append(FillStep(kind=kind, label=label, calls=calls, nbytes=nbytes, slots=names, **more))

    def compute(place: str, *, inside: bool) -> None:
        for one in plan.computed:
            if one.on == place:
                rides = inside or one.packed
                add("compute", f"{one.function} on the {place}", [one.slot], int(not rides), inside=inside)

    def copy(*, late: bool) -> None:  # those after an upload, or the others; one call takes all mixed dtypes
        together = list[str]()
        for group in plan.copies:
            calls = {"direct": 0, "foreach": 1, "single": len(group.slots)}.get(group.how)  # calls into torch
            if calls is None or late != (group.placement != HOST and bool(plan.packed)):
                continue
            if group.how == "foreach" and plan.mixed:
                together += group.slots
            else:
                label = ", ".join(filter(None, (dtype_text(group.dst_dtype), group.placement, group.how, group.why)))
                add("copy", label, group.slots, calls)
        if together:
            add("copy", "foreach of all dtypes", together, 1)

    for label, always in (("reset tails", True), ("reset dirty tails", False)):
        tails = [tail for tail in plan.tails if tail.always == always and not tail.fused]
        is_plain, is_direct = lowering.is_reference, lowering.copies == "direct"  # "direct": by address, without torch
        sliced = [one for one in tails if is_plain or not (is_direct or declaration.slots[one.slot].placement == HOST)]
        zeros = sum(tail.value == 0 and math.copysign(1.0, tail.value) > 0 for tail in sliced if not is_plain)
        if tails:  # zeros are set in one call
            add("reset", label, (tail.slot for tail in tails), len(sliced) - max(zeros - 1, 0), maybe=not always)
    copy(late=False)
    compute(HOST, inside=False)
    if slots := plan.fused or plan.packed:
        add("upload", "one packet", slots, 1, plan.packed or [one.slot for one in plan.computed if one.packed])
    if plan.fused:
        label = "fused kernel, the graph's first node" if is_first else "fused kernel"
        add("kernel", label, slots, int(not is_first), inside=is_first)
    copy(late=True)
    compute(DEVICE, inside=whole and not lowering.is_reference)
    if parts:
        add("graph", "graph" if parts == 1 else f"{parts} graphs, breaks between", (), parts)
    else:
        add("step", "the step, without a graph", (), 1)
    return Fill(plan, tuple(steps))


def _memory(runner: Runner[Any], plan: FillPlan | None) -> MemoryFacts:
    """Return the places of slots. plan: The plan of a bucket, which decides when they are written."""
    phase, buffers = runner.phase, runner.eager.buffers if runner.graphs is None else runner.graphs.buffers
    kept, shares = frozenset[str](), dict[str, tuple[str, ...]]()
    if phase is not None and phase.layout is not None:
        kept = phase.kept
        for slot in phase.layout.places:
            if slot.member == phase.member:
                shares[slot.slot] = tuple(map(str, phase.layout.shared_with(slot.member, slot.slot)))
    phases: tuple[StepPart, ...] = ("fill", "kernel", "replay", "outputs")
    if plan is None or not plan.fused:
        phases = ("fill", "replay", "outputs")
    found: dict[tuple[int, str], list[Buffer]] = {}
    for buffer in sorted(buffers or (), key=lambda one: (one.adopted, one.slot.placement != DEVICE)):
        storage = buffer.tensor.untyped_storage()  # each storage without bytes counts by itself
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
                shares=shares.get(buffer.name, ()),
            )
            inside.append(place)
        places += sorted(inside, key=lambda place: (place.offset, place.nbytes, place.slot))
    return MemoryFacts(phases, tuple(allocations), tuple(places))


def _span(buffer: Buffer, runner: Runner[Any], plan: FillPlan | None) -> tuple[StepPart, StepPart]:
    """Return the first and the last phase in which a slot's value matters. It need not last between steps."""
    slot, name = buffer.slot, buffer.name
    if slot.writers == BY_STEP:
        return "replay", "outputs"
    if runner.stage.declaration.side(name) == DEVICE:
        return ("replay" if runner.tally.path == "graph" else "fill"), "replay"
    by_kernel = plan is not None and name in plan.fused and not slot.rewritten
    return ("kernel" if by_kernel else "fill"), "replay"
