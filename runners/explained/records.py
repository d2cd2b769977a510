"""What an explanation of a runner says, as records that become plain data and come back."""

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from ...dataflow.capabilities import Placement
from ...dataflow.explain import Explanation
from ...dataflow.plan import FillPlan
from ..capture import MemoryAccount
from .pool_facts import PoolFacts

Kind = Literal["reset", "copy", "compute", "upload", "kernel", "graph", "step"]
Phase = Literal["fill", "kernel", "replay", "outputs"]


@attrs.frozen(kw_only=True)
class FillStep:
    """One thing that a step does, in the plan's order.

    kind: which of them; a step is one that no graph holds. label: in a few words. slots: what it writes, or takes up.
    calls: into torch, the driver or a function; 0 where it rides in another call, such as the graph's. nbytes: that it
    moves when every row is live; None where that hangs on the batch. inside: whether the graph does it. maybe: whether
    it is left out in most steps.
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
    parts: int
    nbytes: int
    outputs: int


@attrs.frozen(kw_only=True)
class FillTime:
    """What fills took, in microseconds of the host; count: how many of them were timed."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


@attrs.frozen(kw_only=True)
class Use:
    """How a bucket was used: steps, their live and padded rows, the share of padding, and fills that were timed."""

    steps: int
    live: int
    padded: int
    waste: float
    time: FillTime | None


@attrs.frozen(kw_only=True)
class BucketFacts:
    """One bucket: its rows on the leading axis, every padded size, bytes of all slots, its fill, graphs and use."""

    rows: int
    sizes: tuple[tuple[str, int], ...]
    nbytes: int
    fill: Fill
    graphs: tuple[GraphFacts, ...]
    use: Use | None


@attrs.frozen(kw_only=True)
class EagerFacts:
    """What runs without a graph: its buffers' present capacity, their bytes, and how they are filled.

    own: bytes that are not the runner's own buffers too. no_copy: whether it hands the batch's tensors through.
    fill: None before the first batch.
    """

    capacity: tuple[tuple[str, int], ...]
    nbytes: int
    own: int
    no_copy: bool
    fill: Fill | None


@attrs.frozen(kw_only=True)
class Allocation:
    """One piece of memory that slots lie in: bytes in all, and those that no slot of this runner has."""

    name: str
    placement: Placement
    nbytes: int
    adopted: bool
    unused: int


@attrs.frozen(kw_only=True)
class Place:
    """Where a slot lies: its allocation, the offset there, its bytes, and those behind it that alignment costs.

    shape: at full capacity. adopted: whether the memory was handed in by `bind=`. since, until: the phases of a step
    between which its value counts. lasting: why its bytes must hold between steps, too, in words; None where they need
    not. shares: who else has some of its bytes, "runner.slot" of other runners.
    """

    slot: str
    kind: str
    dtype: str
    allocation: str
    placement: Placement
    offset: int
    nbytes: int
    gap: int
    shape: tuple[int, ...]
    adopted: bool
    since: Phase
    until: Phase
    lasting: str | None
    shares: tuple[str, ...]


@attrs.frozen(kw_only=True)
class MemoryFacts:
    """The memory layout: the phases of a step, allocations, each slot's place, and bytes of everything held."""

    phases: tuple[Phase, ...]
    allocations: tuple[Allocation, ...]
    places: tuple[Place, ...]
    account: MemoryAccount


@attrs.frozen(kw_only=True)
class Reason:
    """Steps that ran eagerly for one reason, told in a word and in a sentence, their live rows, and their fills."""

    why: str
    meaning: str
    steps: int
    live: int
    time: FillTime | None


@attrs.frozen(kw_only=True)
class Decisions:
    """What was decided, with counts.

    paths: steps by path. lowerings: fills by the lowering that did them. detours: why fills took a later one. every:
    one fill in so many is timed.
    """

    paths: Mapping[str, int]
    reasons: tuple[Reason, ...]
    lowerings: Mapping[str, int]
    detours: Mapping[str, int]
    every: int


@attrs.frozen(kw_only=True)
class DecisionFacts:
    """A decision. rank: the one that forced it on all; None of one that this runner made by itself.

    alone: whether others, who were not asked, may have it be another.
    """

    path: str
    bucket: int | None
    why: str
    reason: str
    rank: int | None = None
    alone: bool = False


@attrs.frozen(kw_only=True)
class Forced:
    """Steps that one rank forced on all, for one reason."""

    rank: int
    why: str
    steps: int


@attrs.frozen(kw_only=True)
class RankFacts:
    """The ranks that run each step together.

    rank, size: which one this is, of how many. on: where they exchange before a step, "host" or a device's kind; None
    where they do not. equal: whether all are known to get the same batches. shards: over how many a bucket's tokens are
    spread. asked: computed slots that ask for them. exchanges: so far. agreed: on what, in the last step. forced: steps
    by the rank that forced them.
    """

    rank: int
    size: int
    on: str | None
    equal: bool
    shards: int
    asked: tuple[str, ...]
    exchanges: int
    agreed: DecisionFacts | None
    forced: tuple[Forced, ...]


@attrs.frozen(kw_only=True)
class RunnerExplanation:
    """A runner as data.

    kind: its class. path: what batches that fit take. lowering: how its fills are run. configuration: what
    `RunnerConfig.of` reads back. sizes: fixed axes, and capacities of further varying ones, as they were given.
    declaration: explained for the largest bucket, or the present capacity. patterns: of absent slots, that graphs are
    wanted for. pool: the memory that it shares with other runners; None where it has its own. seconds, driver: what
    the capture took, and the device's bytes that it took beside the account; None before it. ranks: those that run each
    step together; None where there are none. asked: what it would do with the batch that was given, if one was.
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
    pool: PoolFacts | None
    decisions: Decisions
    seconds: float | None
    driver: int | None
    ranks: RankFacts | None = None
    asked: DecisionFacts | None = None
