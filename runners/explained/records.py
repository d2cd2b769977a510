"""What an explanation of a runner says, as records that become plain data and come back."""

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from ...dataflow.capabilities import Placement
from ...dataflow.explain import Explanation
from ...dataflow.plan import FillPlan
from ...dataflow.sharing import Layout
from ..decision import Decision

Kind = Literal["reset", "copy", "compute", "upload", "kernel", "graph", "step"]
Phase = Literal["fill", "kernel", "replay", "outputs"]


@attrs.frozen(kw_only=True)
class FillStep:
    """One thing that a step does, in the plan's order.

    kind: what it does; "step" runs the step without a graph. label: in a few words. slots: what it writes, or takes up.
    calls: into torch, the driver or a function; 0 where it rides in another call, such as the graph's. nbytes: that it
    moves when every row is live; None where that depends on the batch. inside: whether the graph does it. maybe:
    whether most steps leave it out.
    """

    kind: Kind
    label: str
    slots: tuple[str, ...]
    calls: int
    nbytes: int | None = None
    inside: bool = False
    maybe: bool = False


@attrs.frozen(kw_only=True)
class Fill:
    """How the slots are filled: the plan, what a step does in which order, and the sums over it.

    uploads, launches, copies, resets, computed: calls of each kind; launches are those of graphs, and of the kernel
    where it is launched by itself. copied, uploaded: bytes, when every row is live.
    """

    plan: FillPlan
    steps: tuple[FillStep, ...]
    uploads: int
    launches: int
    copies: int
    resets: int
    computed: int
    copied: int
    uploaded: int


@attrs.frozen(kw_only=True)
class GraphFacts:
    """The graph of a bucket for one pattern of absent slots.

    why: why there is none; empty where there is one. parts: graphs that it is launched as. nbytes, outputs: bytes.
    """

    absent: tuple[str, ...]
    why: str
    parts: int = 0
    nbytes: int = 0
    outputs: int = 0


@attrs.frozen(kw_only=True)
class BucketFacts:
    """One bucket: its rows on the leading axis, every padded size, bytes of all slots, its fill and its graphs."""

    rows: int
    sizes: tuple[tuple[str, int], ...]
    nbytes: int
    fill: Fill
    graphs: tuple[GraphFacts, ...]


@attrs.frozen(kw_only=True)
class EagerFacts:
    """What runs without a graph: its buffers' present capacity, their bytes, and how they are filled.

    no_copy: whether it hands the batch's tensors through. fill: None before the first batch.
    """

    capacity: tuple[tuple[str, int], ...]
    nbytes: int
    no_copy: bool
    fill: Fill | None


@attrs.frozen(kw_only=True)
class Allocation:
    """One piece of memory that slots lie in: bytes in all, and those that no slot of this runner has.

    adopted: whether it was handed in by `bind=`.
    """

    name: str
    placement: Placement
    nbytes: int
    adopted: bool
    unused: int


@attrs.frozen(kw_only=True)
class SlotPlace:
    """Where a slot lies: its allocation, the offset there, its bytes, and those behind it that alignment costs.

    shape: at full capacity. since, until: the phases of a step between which its value counts. lasting: why its bytes
    must hold between steps, too; None where they need not. shares: slots of other runners that have some of its bytes,
    as "runner.slot".
    """

    slot: str
    allocation: str
    offset: int
    nbytes: int
    gap: int
    shape: tuple[int, ...]
    since: Phase
    until: Phase
    lasting: str | None
    shares: tuple[str, ...]


@attrs.frozen(kw_only=True)
class MemoryFacts:
    """The memory layout: the phases of a step, allocations, and each slot's place."""

    phases: tuple[Phase, ...]
    allocations: tuple[Allocation, ...]
    places: tuple[SlotPlace, ...]


@attrs.frozen(kw_only=True)
class RankFacts:
    """The ranks that run each step together.

    rank, size: which one this is, of how many. on: where they exchange before a step, "host" or a device's kind; None
    where they do not. equal: whether all are known to get the same batches. shards: over how many ranks a bucket's
    tokens are spread. asked: computed slots that need the ranks. agreed: what all did in the last step.
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
    `RunnerConfig.of` reads back. sizes: fixed axes, and capacities of further varying ones, as they were given.
    declaration: explained for the largest bucket, or the present capacity. patterns: of absent slots, that graphs are
    wanted for. statistics: the runner's `stats()`, with text for keys. pool: the layout of the memory that it shares
    with other runners, and member: its name there; None where it shares none. ranks: None where there are none. asked:
    what this rank alone would do with the batch that was given, if one was.
    """

    kind: str
    backend: str
    device: str
    path: str
    lowering: str
    configuration: Mapping[str, Any]
    sizes: tuple[tuple[str, int], ...]
    declaration: Explanation
    buckets: tuple[BucketFacts, ...]
    patterns: tuple[tuple[str, ...], ...]
    eager: EagerFacts
    memory: MemoryFacts
    statistics: Mapping[str, Any]
    member: str | None
    pool: Layout | None
    ranks: RankFacts | None
    asked: Decision | None

    @property
    def fills(self) -> list[tuple[str, Fill]]:
        """Each way in which steps are filled, under the buckets that it is for; with the largest bucket's bytes.

        Buckets next to one another that do the same are one; the eager fill comes last.
        """
        groups: list[list[BucketFacts]] = []
        for bucket in self.buckets:
            if groups and _shape(groups[-1][-1].fill) == _shape(bucket.fill):
                groups[-1].append(bucket)
            else:
                groups.append([bucket])
        named = [
            (f"{len(group)} buckets, {group[0].rows} to {group[-1].rows}" if group[1:] else f"bucket {group[0].rows}")
            for group in groups
        ]
        found = [(name, group[-1].fill) for name, group in zip(named, groups, strict=True)]
        return found if self.eager.fill is None else [*found, ("eager, not padded", self.eager.fill)]


def _shape(fill: Fill) -> list[FillStep]:
    """What a fill does, whatever the bytes."""
    return [attrs.evolve(step, nbytes=None) for step in fill.steps]
