"""The steps of one runner's loop: each starts from the slots that the step before left."""

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, Generic

import torch

from ...dataflow.capabilities import DEVICE, HOST, Placement
from ...dataflow.edits import NOWHERE, Keys, Moves, RowWrite, rearrange
from ...dataflow.errors import BatchError, ConfigError, RankError, ReplayError, did_you_mean
from ...dataflow.fill.writers import keep_newest
from ...dataflow.inputs import V
from ...dataflow.sources import NO_SIDE, RANKS, Path, linear, look_up
from ..engine.capture import FORKS
from ..engine.chunks import handed_out
from ..engine.config import Buckets
from ..engine.graphs import GraphSet
from ..engine.hooks import Loop
from ..engine.outputs import cut_live
from ..engine.runner import Runner
from ..engine.sampling import rebuilt
from ..engine.selection import BucketKey, VariantKey
from ..engine.statistics import Decision
from .chunks import check_host
from .host_work import HostWork

MOST_WORKS: Final = 64
"""The most pairs of a bucket and a number of requests whose host work a loop keeps. The oldest is dropped first."""
Writes = list[tuple[RowWrite, Sequence[int]]]
"""Rows to write, and the row of each of their requests."""


def _checked_graphs(runner: Runner[V], batch: Any) -> GraphSet[V]:
    """Return the graphs of a runner. Raise ConfigError or BatchError if they cannot run steps from this batch on."""
    declaration = runner.stage.declaration
    for name, source in declaration.sources.items():
        if isinstance(source, Path) and source.from_side and not declaration.slots[name].optional:
            raise ConfigError(f"slot {name!r} is read from {source}, which steps() does not take: put it in the batch")
    decision = runner.decide(batch)
    if decision.bucket is None:
        raise BatchError(f"steps() needs a graph, and this batch has none: {decision.reason}")
    if not declaration.rules:
        raise ConfigError(f"no slot of {declaration.name} advances, so steps would repeat the first: declare then=")
    graphs: GraphSet[V] = runner.graphs  # type: ignore[assignment] # this runner captures
    pooled = next((buffer.name for buffer in graphs.buffers if buffer.pooled), None)
    if pooled is not None:
        raise ConfigError(f"slot {pooled!r} is in a pool's memory, which other runners overwrite: leave out phase=")
    return graphs


def _why_calls(runner: Runner[V], graphs: GraphSet[V]) -> str:
    """Return why each step is a call of the runner, or "" if steps are replays."""
    lowering = graphs.filler.lowering
    if not lowering.runs_ahead:
        return f"the lowering is {lowering.name}"
    return "each step is watched" if runner.watch.watchers or runner.config.modes else ""


class Chain(Generic[V]):
    """Runs steps from a first batch on, with an edit before a step if requests leave, join or change.

    Attributes:
        buffers: The memory of the slots.
        hold_reason: Why each step must be read before the next is launched, or "" if steps can be launched ahead.
        chunk_sizes: The numbers of steps that a launch may run, in ascending order. The first launch runs one step.
    """

    def __init__(
        self,
        runner: Runner[V],
        batch: Any,
        buckets: Buckets,
        variant: VariantKey,
        loop: Loop,
        chunk_sizes: Sequence[int],
    ) -> None:
        """Check the runner and the batch. Nothing is run yet.

        Args:
            runner: The runner, which captures graphs.
            batch: The first step's batch.
            buckets: The runner's buckets.
            variant: The values of fields that the graphs have frozen.
            loop: The loop that ranks agreed on.
            chunk_sizes: The numbers of steps that launches may run, in ascending order.
        """
        declaration = runner.stage.declaration
        graphs = _checked_graphs(runner, batch)
        slots = declaration.slots
        self._runner = runner
        self._buckets = buckets
        self._variant = variant
        self._graphs = graphs
        self.buffers = graphs.buffers
        self._use = graphs.buffers.use
        self._lock = runner.step_lock
        self._hosts = graphs.filler.hosts
        self._ranks = runner.coordinator
        self._loop = loop
        self._by_calls = by_calls = _why_calls(runner, graphs)
        self._absent = runner.stage.absent(batch, NO_SIDE)
        self._fields = {name: value for name in declaration.fields if (value := look_up(batch, name)) is not None}
        self._number = 0  # the number of the next step
        self._forks = FORKS.count
        self._sizes_of_ranks: Mapping[Any, Any] = {}
        self._slot_of_ranks = next((name for name, slot in slots.items() if RANKS in slot.needs), None)
        self._keys: Keys = ()
        self._rows: dict[Hashable, int] = {}
        self._leaving: dict[Hashable, None] = {}  # these three are the next edit
        self._joining: dict[Hashable, None] = {}
        self._writes: list[RowWrite] = []
        requests = runner.size(batch, NO_SIDE)[-1]
        self._check_room(requests)
        self.chunk_sizes = (1,) if by_calls else chunk_sizes
        if self.chunk_sizes[-1] > 1:
            check_host(graphs)
        sizes = runner.sizes[buckets.largest]
        self._edits, self._edit_graph = graphs.filler.editing(sizes, self._absent, by_kernel=not by_calls)
        self._edits.check()
        self._joined = frozenset(declaration.sources).intersection(self._edits.rows)  # slots of a join
        written = [buffer.name for buffer in graphs.buffers if buffer.slot.rewritten or buffer.foreign]
        advancing = next((name for name in declaration.rules if slots[name].placement == HOST), None)
        self._moves_host = advancing is not None or not declaration.read_on_host.isdisjoint(written)
        self.hold_reason = by_calls or (f"host slot {advancing!r} advances" if advancing else "")
        self._works: dict[tuple[BucketKey, int], HostWork] = {}
        self._outputs_of_call: Any = None
        self._count = 1  # steps of the last launch

    def looping(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that hands out the steps. If it ends early, ranks still in the loop are notified."""
        return self._ranks.looping(self._loop)

    def growth_of(self, slot: str) -> int:
        """Return how much a slot of one number a request grows in each step. Raise ConfigError for any other slot."""
        if slot in self._absent:
            raise ConfigError(f"needs names {slot!r}, an optional slot that this batch lacks: give it, or leave it out")
        declaration = self._runner.stage.declaration
        rule = declaration.rules.get(slot)
        source, growth = (rule and linear(rule)) or ("", 0)
        if source != slot or self._edits.rows.get(slot) != (0, 1) or len(declaration.slots[slot].shape) > 1:
            raise ConfigError(
                f"needs names {slot!r}: name slots of one number a request that advance by a number, as "
                "then=lambda seq_lens: seq_lens + 1 does, or ragged slots whose ragged= is a function of such a slot"
            )
        return growth

    def leave(self, keys: Keys) -> None:
        """Let requests leave before the next step."""
        self._leaving.update(dict.fromkeys(keys))

    def join(self, batch: Any, keys: Keys) -> None:
        """Let requests join before the next step. If it raises BatchError, nothing is changed."""
        runner = self._runner
        edits = self._edits
        sources = edits.gather(batch)
        write = edits.take_known(keys, sources, self._joined)
        requests = len(keys)
        if write is None:
            requests = runner.size(batch, NO_SIDE)[-1]
            runner.size.compare(batch, NO_SIDE)
        if not len({*keys}) == len(keys) == requests:
            raise BatchError(f"{len(keys)} keys for {requests} requests that join: give one for each, all different")
        for key in keys:
            if key in self._rows or key in self._joining:
                raise BatchError(f"request {key!r} is live, or leaves in this same step: give another key")
        absent = runner.stage.absent(batch, NO_SIDE)
        if absent != self._absent:
            names = ", ".join(map(repr, sorted(absent ^ self._absent)))
            raise BatchError(f"all requests of steps() have the same optional slots, and these differ in {names}")
        self._check_room(self._requests + requests)
        runner.check_limits(batch)
        self._writes.insert(0, write or edits.admit(keys, sources, self._joined))  # edits come after it
        self._joining.update(dict.fromkeys(keys))

    def edit(self, keys: Keys, slots: Mapping[str, Any]) -> None:
        """Change slots of requests before the next step. If it raises BatchError, nothing is changed."""
        runner = self._runner
        declaration = self._runner.stage.declaration
        for name in slots:
            if name not in declaration.sources or name in self._absent:
                near = did_you_mean(name, declaration.sources.keys() - self._absent)
                raise BatchError(f"edit names {name!r}, which is not a slot that these requests have{near}")
        if runner.limits and any(limit.name in slots for limit in runner.limits):
            sample = rebuilt(declaration, slots, {})
            runner.check_limits(sample.batch, sample.side, slots)
        given = keys, self._edits.bucket.table.plain(tuple(map(slots.get, declaration.sources))), slots
        try:
            self._writes.append(self._edits.take_known(*given) or self._edits.admit(*given))
        except BatchError as error:
            if keys or self._edits.rows.keys().isdisjoint(slots):
                raise
            raise BatchError(f"{error}; say whose rows these are: edit(keys, ...)") from error

    @property
    def is_joined(self) -> bool:
        """Whether requests join before the next step."""
        return bool(self._joining)

    @property
    def _requests(self) -> int:
        """The number of live requests in the next step."""
        return len(self._rows) + len(self._joining) - len(self._leaving)

    def _check_room(self, requests: int) -> None:
        """Raise BatchError if no graph takes so many requests in the next step."""
        bucket = self._buckets.fit(requests)
        if bucket is None or not self._graphs.has(bucket, self._absent, self._variant):
            largest = self._buckets.largest
            why = f"the largest bucket holds {largest}" if bucket is None else f"bucket {bucket} has no graph"
            raise BatchError(f"steps() cannot take {requests} requests: {why}; let others leave first, or wait")

    @property
    def _agreed(self) -> BucketKey | None:
        """The bucket that ranks agreed on last, or None if this rank may choose alone."""
        agreed = None if self._ranks.quiet or not self._number else self._runner.agreed
        return None if agreed is None else agreed.bucket

    def start(self, batch: Any, keys: Keys) -> Keys:
        """Fill and run the first step like any call, with a batch of these requests. Return the requests."""
        self._keys = keys
        self._rows = {key: row for row, key in enumerate(keys)}
        with self._ranks.within(self._loop):
            self._outputs_of_call = self._runner(batch)
        self._number = 1
        self._graphs.buffers.distrust()  # later fills cannot rely on clean tails
        self._take_graph()
        return keys

    def go_on(self, count: int, *, idle: bool) -> Keys | None:
        """Run the next steps by one launch. Raise ReplayError if another batch was filled since.

        Args:
            count: How many steps.
            idle: Whether this rank has no request, and none in a step that the user has not got yet.

        Returns:
            The steps' requests in the order of their rows, or None if no rank has any, so that no step is run.
        """
        use = self._use
        if use.fills != self._fills:
            raise ReplayError("another batch was filled in the middle of steps(): begin again with all live requests")
        if self._forks != FORKS.count:
            raise ReplayError(
                "this process was forked in the middle of steps(): graphs belong to the process before it"
            )
        if self._by_calls:
            return self._call(idle=idle)
        clock = self._graphs.clock
        filler = self._graphs.filler
        lock = self._lock.lock
        if lock.locked():
            raise self._lock.refusal()
        with lock:
            moved = not self._ranks.alone and self._agree(idle=idle)
            if moved is None:
                return None
            self._number += 1
            stream = filler.stream()
            if not stream == use.stream == clock.stream or (use.neighbours and not use.follows(stream)):
                filler.order()
            if self._leaving or self._writes or moved or self._prepares:
                self._prepare(moved=moved)
            if count == 1:
                self._replay()
            else:
                self._captured.chunks[count].replay()
            clock.replays += 1
            self._count = count
            self._counts.replayed(len(self._keys), count)
            if self._hosts.notes:
                self._hosts.note()
        return self._keys

    def _agree(self, *, idle: bool) -> bool | None:
        """Return whether other ranks' sizes change slots of this rank, or None if all ranks are idle."""
        requests = self._requests
        before = self._sizes_of_ranks
        rows = self._buckets.fit(requests)
        own = Decision("graph", rows, "fits", f"bucket {rows} fits")
        decision = self._ranks.agree_in_loop(own, (*self._edits.live_of(requests), requests), self._loop, idle=idle)
        if decision is None:
            return None
        if decision.bucket is None:
            raise RankError(f"steps() needs a graph, and ranks agreed on none: {decision.reason}")
        if self._slot_of_ranks is not None:
            self._sizes_of_ranks = self._runner.stage.declaration.ranks.live_sizes
        return decision.bucket != self._captured.bucket or before != self._sizes_of_ranks

    def _prepare(self, *, moved: bool) -> None:
        """Do the host's work for the next step. moved: Whether other ranks' sizes change slots of this rank."""
        edits = self._edits
        last = self._work
        requests = len(self._keys)
        wrote = self._moves_host
        is_edit = moved or bool(self._leaving or self._writes)
        if self._hosts.possible:
            self._hosts.wait()
        last.advance(before_edit=is_edit)
        moves, writes = self._rearrange() if is_edit else ((), [])
        moving = edits.rows if self._edit_graph is None else edits.apart
        if is_edit and (moving or any(write.slots for write, _ in writes)):
            edits.write(moves, writes, moving)
            wrote = True
        resized = moved or requests != len(self._keys)
        if resized:
            self._take_graph()  # before a packet is sent, because this may capture a graph
        work = self._work
        work.reset_tails(resized=resized)
        if resized or wrote:
            work.compute(self._fields)
        if self._edit_graph is not None:
            values = work.packed_values(self._fields) if writes and (resized or wrote) else {}
            before = last.counts
            for write, rows in writes:  # usually a single write
                edits.send(work.counts, before, moves, write, rows, values)
                self._edit_graph.replay()
                before = [0] * len(before)
                moves = ()
                values = {}

    def _rearrange(self) -> tuple[Moves, Writes]:
        """Let requests leave and join. Return the rows that move, and the rows to write."""
        leaving = self._leaving
        joining = self._joining
        writes = self._writes
        self._leaving = {}
        self._joining = {}
        self._writes = []
        moves: Moves = ()
        if leaving or joining:  # a request may leave before it has joined
            gone = [key for key in leaving if key not in joining]
            new = [key for key in joining if key not in leaving]
            self._keys, moves = rearrange(self._keys, self._rows, gone, new)
        if not writes or (moves and not joining):  # the kernel moves and writes rows in any order
            writes.insert(0, RowWrite())
        return moves, [(write, [self._rows.get(key, NOWHERE) for key in write.keys]) for write in writes]

    def _take_graph(self) -> None:
        """Choose the graph for the live requests, and the host's work for them.

        Raise ReplayError if there is no graph.
        """
        requests = len(self._keys)
        edits = self._edits
        rows = self._agreed or self._buckets.fit(requests)
        captured = self._graphs.get(rows, self._absent, self._variant)
        if captured is None or rows is None:
            raise ReplayError(f"no graph takes {requests} requests: its capture failed, as `report` says")
        self._graphs.verify(captured)
        self._captured = captured
        self._replay = captured.graph.replay
        self._fills = self._use.fills
        self._counts = self._runner.tally.buckets[rows]
        work = self._works.get((rows, requests))
        if work is None:
            sides: tuple[Placement, ...] = (DEVICE, HOST) if self._edit_graph is None else (HOST,)
            whole = () if self._edit_graph is None or self._moves_host else edits.whole
            live = edits.live_of(requests)
            work = HostWork.of(captured.filling.bucket, live, sides, edits.bucket.fused, whole)
            keep_newest(self._works, MOST_WORKS)[rows, requests] = work
        self._work = work
        chunks = self._graphs.chunks
        if self.chunk_sizes[-1] > 1 and chunks is not None and not captured.filling.bucket.lowering.is_in_graph:
            if work.live_counts is None:
                work.live_counts = chunks.live.new_tensor(work.counts)
            chunks.live.copy_(work.live_counts)
        self._prepares = self._edit_graph is None or self._moves_host or bool(work.tails)

    def outputs(self) -> tuple[list[Any], list[torch.Tensor]]:
        """Return the outputs of the last launch.

        Returns:
            Of each step, the outputs for live requests and who was done before it or None. And the tensors that have a
            row for each step, of which these are a part.
        """
        requests = len(self._keys)
        axis = self._graphs.output_rows
        captured = self._captured
        done = handed_out(captured.filling.bucket, None)[1]
        if self._by_calls:
            return [(self._outputs_of_call, cut_live(done, requests))], []
        found = [(captured.graph.outputs, done)]
        stacks: list[torch.Tensor] = []
        if self._count > 1:
            found, stacks = captured.chunks[self._count].outputs
        rows = None if axis is None else self._work.step.live_sizes[axis]
        return [(cut_live(outputs, rows), cut_live(mask, requests)) for outputs, mask in found], stacks

    def outputs_key(self) -> tuple[BucketKey, int, int] | None:
        """Return a key for outputs that are the same tensors in each launch, or None if they are new tensors."""
        if self._by_calls or not self._captured.graph.is_recorded:
            return None
        return self._captured.bucket, len(self._keys), self._count

    def _call(self, *, idle: bool) -> Keys | None:
        """Advance and edit slot by slot, and run the step as a call with a batch of the slots' contents."""
        runner = self._runner
        graphs = self._graphs
        edits = self._edits
        declaration = runner.stage.declaration
        with runner.step_lock.open():
            graphs.filler.order()
            self._hosts.wait()
            self._work.advance(before_edit=False)
            edits.write(*self._rearrange(), edits.rows)
            sizes = edits.bucket.step(edits.live_of(len(self._keys))).live_sizes
            names = [name for name in declaration.sources if name not in self._absent]
            slots = {name: graphs.buffers[name].view(sizes).clone() for name in names}
        sample = rebuilt(declaration, slots, self._fields)
        batch = sample.batch
        side = sample.side
        with self._ranks.within(self._loop):
            if idle and self._ranks.idle(runner.decide(batch, **side), runner.size(batch, side)):
                return None
            self._outputs_of_call = runner(batch, **side)
        self._number += 1
        self._take_graph()
        return self._keys
