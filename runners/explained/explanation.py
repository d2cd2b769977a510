"""Explains a runner: its declaration, plans, graphs, memory and decisions as data, read from the runner itself."""

import collections
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, overload

import attrs

from ...dataflow.buffers import Buffer
from ...dataflow.capabilities import LoweringName
from ...dataflow.plan import FillPlan
from ...dataflow.shown import Table, cell
from ..decode import CapturingRunner
from ..engine.config import checked
from ..engine.runner import Runner
from ..engine.selection import BucketKey, frozen_text
from ..engine.sharing import Layout, lasting
from ..engine.statistics import Decision, human_bytes, with_text_keys
from ..modes import ModeRunner
from ..recording.records import RanksRecord
from .declared import NOT_SIZED, Explanation, explain_declaration
from .pages import Explained, Page


@attrs.frozen
class BucketFacts:
    """One bucket: its rows on the leading axis or its sizes on several, its plan, and its graphs.

    Attributes:
        launches: How many graphs a step launches, by the absent slots of each captured pattern, and its variant.
        why: Why there are no graphs, or not for each pattern, or "".
    """

    rows: BucketKey
    plan: FillPlan
    launches: Mapping[str, int]
    why: str


@attrs.frozen
class SlotPlace:
    """The place of a slot in its allocation.

    Attributes:
        lasting: Why it must keep its bytes between steps, or None.
        shares: Slots of other runners that have some of its bytes, as "runner.slot".
    """

    slot: str
    offset: int
    nbytes: int
    lasting: str | None
    shares: tuple[str, ...]


@attrs.frozen
class Allocation:
    """One allocation with its slots in order, by placement; `pooled`, or `adopted` if it was handed in by `bind=`."""

    name: str
    nbytes: int
    slots: tuple[SlotPlace, ...]


@attrs.frozen(kw_only=True, repr=False)
class RunnerExplanation(Explained):
    """A runner as data.

    Attributes:
        kind: Its class.
        backend: The backend's name.
        device: The device of its slots.
        path: The path of batches that fit.
        lowering: How its fills are run.
        configuration: Options that `RunnerConfig.of` reads back.
        declaration: The declaration for the largest bucket, or the present capacity. Eager steps reset none of
            its plan's tails.
        variants: The fields that its graphs freeze, each with its values.
        memory: The allocations that have its slots.
        statistics: The runner's `stats()`, with text for keys.
        member: Its name among the runners that share memory with it, if any do.
        pool: The layout of that memory.
        ranks: Its ranks, or None.
        agreed: The decision of all ranks in the last step, or None.
    """

    kind: str
    backend: str
    device: str
    path: str
    lowering: str
    configuration: Mapping[str, Any]
    declaration: Explanation
    buckets: tuple[BucketFacts, ...]
    variants: tuple[str, ...]
    memory: tuple[Allocation, ...]
    statistics: Mapping[str, Any]
    member: str | None
    pool: Layout | None
    ranks: RanksRecord | None
    agreed: Decision | None

    def tables(self) -> Iterator[Table]:
        """Yield a summary, the slots, and the largest bucket's plan without tails, which the slots show."""
        name = self.declaration.declaration
        plan = self.declaration.plan
        notes = "\n".join(f"{label:9} {text}" for label, text in self.notes())
        yield Table(f"{self.kind} of {name} on {self.backend} ({self.device})", text=notes)
        yield self.declaration.slot_table(f"slots of {name}")
        if plan is not None:
            title, *steps = (line for line in plan.lines() if not line.startswith("reset"))
            yield Table(title, text="\n".join(steps))

    def notes(self) -> Iterator[tuple[str, str]]:
        """Yield notes on what costs time or memory, each with a label."""
        yield from self._step_notes()
        counts = self.statistics
        plan = self.declaration.plan
        for why in dict.fromkeys(one.why for one in self.buckets if one.why):
            yield "no graph", f"buckets {cell([str(one.rows) for one in self.buckets if one.why == why])}: {why}"
        for group in plan.copies if plan else ():
            if group.why:
                yield "alone", f"{', '.join(group.slots)}: copied one by one ({group.why})"
        functions = counts["capture"]["functions"]
        for how in dict.fromkeys(functions.values()):
            yield "functions", f"{cell([slot for slot, one in functions.items() if one == how])}: {how}"
        memory = counts["memory"]
        left_out = ("total", "shared")
        if memory["total"]:
            kinds = {kind: human_bytes(size) for kind, size in memory.items() if size and kind not in left_out}
            yield "memory", f"{human_bytes(memory['total'])}: {cell(kinds)}"
        if self.pool is not None:
            yield "pool", f"{human_bytes(self.pool.nbytes)}: sharing saves {human_bytes(self.pool.saved)}"
        if self.buckets:
            how = f"{counts['capture']['graphs']} graphs, {self.path} by {self.lowering}; larger batches are eager"
            yield "buckets", f"{cell([str(one.rows) for one in self.buckets])}: {how}"
        if self.variants:
            yield "variants", f"{'; '.join(self.variants)}: each bucket has a graph for each combination"
        if self.ranks is not None:
            yield "ranks", f"{self.ranks}; last step: {self.agreed.reason if self.agreed else 'none'}"

    def _step_notes(self) -> Iterator[tuple[str, str]]:
        counts = self.statistics
        buckets = self.statistics["buckets"]
        if buckets:
            live, padded = (sum(one[rows] for one in buckets.values()) for rows in ("live", "padded"))
            worst = sorted(buckets.items(), key=lambda item: item[1]["live"] - item[1]["padded"])[:3]
            waste = ", ".join(f"{one['waste']:.1%} in bucket {rows}" for rows, one in worst)
            yield "padding", f"{1 - live / padded:.1%} of {padded:,} rows: {waste}"
        reasons = {why: one["steps"] for why, one in counts["eager"].items()}
        if reasons:
            steps = sum(counts["steps"].values())
            yield "eager", f"{sum(reasons.values()) / steps:.1%} of {steps:,} steps: {cell(reasons)}"
        if counts["ahead"]:
            yield "steps()", cell(counts["ahead"])


@overload
def explain(runner: Runner[Any]) -> RunnerExplanation: ...


@overload
def explain(runner: ModeRunner[Any, Any]) -> Page: ...


def explain(runner: Runner[Any] | ModeRunner[Any, Any]) -> RunnerExplanation | Page:
    """Explain what a runner declares, plans, captured, keeps in memory and has decided, as data, tables and a page.

    Nothing is run or captured. The memory of a pool is laid out now, if it is not yet. `runner.decide(batch)` says what
    the runner would do with a batch.

    Args:
        runner: Any runner, captured or not.
    """
    if isinstance(runner, ModeRunner):
        pages = [(mode, explain(one)) for mode, one in runner.modes.items()]
        return Page([attrs.evolve(one, title=f"{mode}: {one.title}") for mode, page in pages for one in page.tables()])
    checked("runner", "a runner", runner, Runner)
    stage = runner.stage
    phase = runner.phase
    buffers = runner.eager.buffers
    declared = stage.declaration
    capabilities = stage.backend.capabilities
    lowering: LoweringName = "foreach"
    path = "eager"
    buckets = tuple[BucketFacts, ...]()
    if isinstance(runner, CapturingRunner):
        path = runner.tally.path
        lowering = runner.lowering
        buckets = tuple(_bucket(runner, bucket) for bucket in runner.sizes)
        buffers = runner.graphs.buffers
    sizes = {} if buffers is None else buffers.capacity
    extents = {axis: (size, size) for axis, size in sizes.items()} or NOT_SIZED
    memory = tuple(_allocations(runner))
    configuration, statistics = json.loads(
        json.dumps([runner.config.as_data(), with_text_keys(runner.stats())])
    )  # keys as text
    return RunnerExplanation(
        kind=type(runner).__name__,
        backend=stage.backend.name,
        device=str(stage.backend.device),
        path=path,
        lowering=lowering,
        configuration=configuration,
        declaration=explain_declaration(declared, capabilities, stage.backend.name, extents, lowering=lowering),
        buckets=buckets,
        variants=tuple(map(str, runner.variants)),
        memory=memory,
        statistics=statistics,
        member=None if phase is None else phase.member or None,
        pool=None if phase is None else phase.layout,
        ranks=RanksRecord.of(declared.ranks) if declared.ranks else None,
        agreed=runner.agreed,
    )


def _bucket(runner: CapturingRunner[Any], rows: BucketKey) -> BucketFacts:
    """Describe a bucket's graphs, or why there are none."""
    launches = dict[str, int]()
    every = [*itertools.product(sorted(runner.patterns, key=sorted), runner.graphs.variants.items())]
    for absent, (key, frozen) in every:
        captured = runner.graphs.captured.get((rows, absent, key))
        if captured is not None:
            launches[", ".join(filter(None, [*sorted(absent), frozen_text(frozen)]))] = captured.graph.parts
    if len(launches) == len(every):
        why = ""
    elif not runner.config.graphs:
        why = "graphs are switched off, by graphs=False"
    elif runner.report is None:
        why = "nothing is captured yet: call capture()"
    else:
        why = runner.report.failed.get(rows) or "captured when the first batch comes for it (lazy)"
    return BucketFacts(rows, runner.plan(rows), launches, why)


def _allocations(runner: Runner[Any]) -> Iterator[Allocation]:
    """Yield each allocation: first the device's, last the adopted ones."""
    buffers = runner.eager.buffers if runner.graphs is None else runner.graphs.buffers
    phase = runner.phase
    layout = None if phase is None else phase.layout
    kept = phase.kept if phase and layout else ()
    found = collections.defaultdict[tuple[Any, ...], list[Buffer]](list)
    for buffer in sorted(buffers or (), key=lambda one: (one.adopted, one.slot.placement)):
        found[buffer.slot.placement, buffer.tensor.untyped_storage().data_ptr()].append(buffer)
    for first, *others in found.values():
        places = list[SlotPlace]()
        for one in (first, *others):
            shares = layout.shared_with(phase.member, one.name) if phase and layout and one.pooled else ()
            offset = int(one.tensor.storage_offset()) * one.tensor.itemsize
            why = lasting(one.slot, one.name, kept)
            places.append(SlotPlace(one.name, offset, one.nbytes, why, tuple(map(str, shares))))
        name = f"{'adopted ' * first.adopted}{'pooled ' * first.pooled}{first.slot.placement} memory"
        nbytes = first.tensor.untyped_storage().nbytes()
        yield Allocation(name, nbytes, tuple(sorted(places, key=lambda place: place.offset)))
