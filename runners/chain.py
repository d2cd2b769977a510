"""Steps of one runner that follow one another: each begins with what the step before left in the slots."""

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic

import attrs
import torch

from ..dataflow.axes import Live, Step
from ..dataflow.capabilities import DEVICE, HOST, Placement
from ..dataflow.computation import Computation, PackedValue
from ..dataflow.edits import NOWHERE, Brought, Moves, Order
from ..dataflow.errors import BatchError, ConfigError, RankError, ReplayError
from ..dataflow.fill.bucket import Bucket
from ..dataflow.sources import NO_SIDE, RANKS, look_up
from .capture import FORKS
from .config import Buckets
from .graphs import GraphSet
from .hooks import Loop
from .runner import Runner
from .sampling import rebuilt
from .stage import V
from .statistics import Counts, Decision

_NOWHERES: Final = itertools.repeat(NOWHERE)


@attrs.define(eq=False)
class News:
    """What the host says before a step: which requests leave, join and change, and whether there is any."""

    leaving: list[Hashable] = attrs.field(factory=list)
    joining: list[Brought] = attrs.field(factory=list)
    changing: list[Brought] = attrs.field(factory=list)
    has_any: bool = False


@attrs.define(eq=False)
class Here:
    """A bucket with so many live requests: what the host does for it where no graph does.

    advances: calls that advance slots. rules: calls that do so before an edit, but for what its kernel advances then.
    values: slots that the host computes. packed: those that travel in an edit's packet. tails: padded rows that an edit
    resets. always: those of them that each step resets. step: the sizes.
    """

    step: Step
    advances: list[Callable[[], None]]
    rules: list[Callable[[], None]]
    values: list[Computation]
    packed: list[PackedValue]
    tails: list[tuple[torch.Tensor, Any]]
    always: list[tuple[torch.Tensor, Any]]

    @classmethod
    def of(
        cls, bucket: Bucket, live: Live, sides: Iterable[Placement], lanes: Collection[str], whole: Collection[str]
    ) -> "Here":
        """What a bucket leaves to the host.

        sides: those whose slots no graph advances. lanes: what an edit's kernel advances. whole: what its packet
        carries.
        """
        computed = [one for one in bucket.plan.computed if one.on == HOST]
        transitions, sizes = bucket.transitions, bucket.step(live).live_sizes
        advances = [transitions[side].of(sizes) for side in sides if transitions[side].sources]
        in_graph = [one for side, one in transitions.items() if side not in sides]
        rules = [one.of(sizes, lanes) for one in in_graph if one.leaves(lanes)]
        if not computed and all(tail.fused for tail in bucket.plan.tails):
            return cls(bucket.step(live), advances, rules, [], [], [], [])
        values = [bucket.computation(one.slot, bucket.views, bucket.sizes) for one in computed]
        always, others = (list(bucket.tails(live, always=each)) for each in (True, False))
        packed = [PackedValue.of(value) for value in values if value.slot in whole]
        values = [value for value in values if value.slot not in whole]
        return cls(bucket.step(live), advances, rules, values, packed, always + others, always)


class Chain(Generic[V]):
    """Steps of a runner from a first batch on.

    batch: the first one. why: the reason why each step is a whole call, such as watchers, or why the host must see each
    step before the next; nothing where steps can be launched ahead. together: whether ranks that have requests of their
    own agree on a bucket every so many steps. loop: these steps, as ranks know them. edits: takes what the host brings.
    joins: slots of which requests that join bring rows. slots: those that an edit may bring. absent: optional ones that
    none brings. order: of the live requests.
    """

    def __init__(
        self,
        runner: Runner[V],
        batch: Any,
        keys: Iterable[Hashable] | None,
        buckets: Buckets,
        rows_each: int | None,
        loop: Loop,
        why: str,
    ) -> None:
        """Check everything; nothing is run yet."""
        declaration, requests = runner.stage.declaration, runner.size(batch, NO_SIDE)[-1]
        if not declaration.rules:
            raise ConfigError(f"no slot of {declaration.name} advances, so each step would repeat the first: say then=")
        self._runner, self.batch, self._buckets, self.rows_each = runner, batch, buckets, rows_each
        self._graphs: GraphSet[V] = runner.graphs  # type: ignore[assignment] # of a runner that captures
        pooled = next((buffer.name for buffer in self._graphs.buffers if buffer.pooled), None)
        if pooled is not None:
            raise ConfigError(f"slot {pooled!r} is in a pool's memory, which other runners overwrite: leave out phase=")
        self.order = Order(range(requests) if keys is None else keys)
        if len(self.order.keys) != requests:
            raise BatchError(f"{len(self.order.keys)} keys for a batch of {requests} requests: give one for each")
        self.absent = runner.stage.absent(batch, NO_SIDE)
        filler, self._by_calls = self._graphs.filler, bool(why)
        ranks = self._ranks = runner.coordinator
        self.loop = loop
        self.together, self._every, self._number = not ranks.quiet, loop.every, 0
        self._sizes_of_ranks: Mapping[Any, Any] = {}
        self._sized = next((name for name, slot in declaration.slots.items() if RANKS in slot.needs), None)
        if self._sized and self.together and self._every > 1:
            raise ConfigError(
                f"slot {self._sized!r} has sizes of all ranks, which may change in each step: leave out agree_every="
            )
        self.check_room(requests, 0)
        self.edits, self._editing = filler.editing(runner.sizes[buckets.largest], self.absent, by_kernel=not why)
        self.edits.check()
        self.joins = tuple(name for name in declaration.sources if name in self.edits.rows)
        self.slots = frozenset(declaration.sources).difference(self.absent)
        host = next((name for name in declaration.rules if declaration.slots[name].placement == HOST), None)
        self.why = why or ("" if host is None else f"host slot {host!r} advances")
        read = {
            need for name, one in declaration.functions.items() if declaration.side(name) == HOST for need in one.needs
        }
        written = [one.name for one in self._graphs.buffers if one.slot.rewritten or one.foreign]
        self._moves_host = host is not None or not read.isdisjoint(written)
        self._fields = {name: value for name in declaration.fields if (value := look_up(batch, name)) is not None}
        self._turn, self._clock, self._hosts = self._graphs.buffers.turn, self._graphs.clock, filler.hosts
        self._stream, self._fills, self._forks = filler.stream, -1, FORKS.count
        self._known: dict[tuple[int, int], Here] = {}
        self._made: Any = None

    def check_room(self, requests: int, number: int) -> None:
        """BatchError where no graph takes so many requests in a step."""
        bucket, agreed = self._buckets.fit(requests), self._agreed
        if agreed is not None and number % self._every and requests > agreed:
            when = number + -number % self._every
            raise BatchError(
                f"steps() cannot take {requests} requests in step {number}: ranks agreed on bucket {agreed}, and agree "
                f"again in step {when}: join when `lands` is {when}, or let others leave first"
            )
        if bucket is None or not self._graphs.has(bucket, self.absent):
            largest = self._buckets.largest
            why = f"the largest bucket holds {largest}" if bucket is None else f"bucket {bucket} has no graph"
            raise BatchError(f"steps() cannot take {requests} requests: {why}; let others leave first, or wait")

    @property
    def _agreed(self) -> int | None:
        """The bucket that ranks agreed on last; None where this one need not ask."""
        agreed = self._runner.agreed if self.together and self._number else None
        return None if agreed is None else agreed.bucket

    @property
    def outputs_key(self) -> tuple[int, int] | None:
        """What tells outputs that are the same tensors each time; None where they are new."""
        if self._by_calls or not self._captured.graph.is_recorded:
            return None
        return self._captured.rows, len(self.order.keys)

    def outputs(self) -> Any:
        """The last step's, of the live requests."""
        if self._by_calls:
            return self._made
        each = self.rows_each
        return self._captured.live(None if each is None else each * len(self.order.keys))

    def start(self) -> None:
        """Fill and run the first step as any other."""
        with self._ranks.within(self.loop):
            self._made, self._number = self._runner(self.batch), 1
        self._graphs.buffers.distrust()  # a later fill knows nothing of tails
        self._arrive()

    def _arrive(self) -> None:
        """Take the graph for the live requests, and what the host does for them."""
        graphs, requests = self._graphs, len(self.order.keys)
        rows = self._agreed or self._buckets.fit(requests)
        captured = graphs.get(rows, self.absent)
        if captured is None or rows is None:
            raise ReplayError(f"no graph takes {requests} requests: its capture failed, as `report` says")
        graphs.verify(captured)
        self._captured, self._replay, self._fills = captured, captured.graph.replay, self._turn.fills
        self._counted: Counts = self._runner.tally.buckets[rows]
        self._requests = requests
        here = self._known.get((rows, requests))
        if here is None:
            sides: tuple[Placement, ...] = (DEVICE, HOST) if self._editing is None else (HOST,)
            carries = self._editing is not None and not self._moves_host
            over = captured.filling.bucket, self.edits.live_of(requests), sides, self.edits.bucket.fused
            here = self._known[rows, requests] = Here.of(*over, self.edits.whole if carries else ())
        self._here, self._prepares = here, self._editing is None or self._moves_host or bool(here.always)

    def go_on(self, news: News, live: Mapping[Hashable, int], *, idle: bool) -> bool:
        """Run the step after the last one. live: the requests that stay. ReplayError where slots hold others now.

        idle: whether this rank has no request, nor steps of any that were not handed out. False where no rank has.
        """
        turn, clock, gate = self._turn, self._clock, self._runner.gate
        if turn.fills != self._fills or self._forks != FORKS.count:
            raise self._lost()
        if self._by_calls:
            return self._call(news, live, idle=idle)
        with gate.open():
            moved = not self._ranks.alone and self._agree(len(live), idle=idle)
            if moved is None:
                return False
            stream = self._stream()
            if not stream == turn.stream == clock.stream or (turn.neighbours and not turn.follows(stream)):
                self._graphs.filler.order()
            if news.has_any or self._prepares or moved:
                self._prepare(news, live, moved=moved)
            self._replay()
            clock.replays += 1
            self._counted.steps += 1
            self._counted.live += self._requests
            if self._hosts.notes:
                self._hosts.note()
        return True

    def _agree(self, requests: int, *, idle: bool) -> bool | None:
        """Whether what other ranks do moves this one's slots; None where all are idle."""
        number, self._number = self._number, self._number + 1
        if self.together and number % self._every:
            return False
        rows, live, before = self._buckets.fit(requests), (*self.edits.live_of(requests), requests), self._agreed
        own = Decision("graph", rows, "fits", f"bucket {rows} fits")
        decision = self._ranks.agree_in_loop(own, live, self.loop, idle=idle)
        if decision is None:
            return None
        if decision.bucket is None:
            raise RankError(f"steps() needs a graph, and ranks agreed on none: {decision.reason}")
        if self._sized is None:
            return decision.bucket != before
        sizes, self._sizes_of_ranks = self._sizes_of_ranks, self._runner.stage.declaration.ranks.live_sizes
        return decision.bucket != before or sizes != self._sizes_of_ranks

    def _lost(self) -> ReplayError:
        """Why the slots hold these requests no more."""
        if self._turn.fills != self._fills:
            return ReplayError("another batch was filled in the middle of steps(): begin again with all live requests")
        return ReplayError("this process was forked in the middle of steps(): graphs belong to the process before")

    def _prepare(self, news: News, live: Mapping[Hashable, int], *, moved: bool) -> None:
        """Advance and edit by more than the step's own graph. moved: whether other ranks change what slots hold."""
        if self._hosts.possible:
            self._hosts.wait()
        last, before, is_edit = self._here, len(self.order.keys), news.has_any or moved
        resized, wrote = moved, self._moves_host
        moves: Moves = ()
        brought: Sequence[tuple[Brought, list[int]]] = ()
        _run(last.advances)
        if is_edit:
            moves, brought = self._arrange(news, live)
            resized |= before != len(self.order.keys)
            if resized:
                self._arrive()  # before a packet is sent: a graph may be captured now
            _run(last.rules)
            names = self.edits.rows if self._editing is None else self.edits.apart
            if names or [one for one, _ in brought if one.slots]:
                self.edits.write(moves, brought, names)
                wrote = True
        here = self._here
        tails = here.tails if resized else here.always
        if tails:  # before the host computes anything from these slots
            with torch.no_grad():
                for tail, number in tails:
                    tail.fill_(number)
        if is_edit and self._editing is not None:
            packed = here.packed if resized or wrote else ()
            self._send(
                news,
                before,
                moves,
                brought,
                {one.computation.slot: one.bytes_of(self._fields, here.step) for one in packed},
            )
        if here.values and (resized or wrote):
            with torch.no_grad():
                for value in here.values:
                    value.run(self._fields, here.step)

    def _arrange(self, news: News, live: Mapping[Hashable, int]) -> tuple[Moves, list[tuple[Brought, list[int]]]]:
        """The new order: which rows move, and the rows of what is brought."""
        order = self.order
        moves: Moves = ()
        if news.leaving or news.joining:
            leaving = [key for key in news.leaving if key in order.rows]  # others were still to join
            moves = order.arrange(leaving, [key for one in news.joining for key in one.keys if key in live])
        find = order.rows.get
        return moves, [(one, [*map(find, one.keys, _NOWHERES)]) for one in (*news.joining, *news.changing)]

    def _send(
        self,
        news: News,
        before: int,
        moves: Moves,
        brought: Sequence[tuple[Brought | None, Sequence[int]]],
        values: Mapping[str, bytes],
    ) -> None:
        """Have the kernel write what the host says: a packet for each set of slots, most often one."""
        after, send = len(self.order.keys), self.edits.send
        advancing: int | None = before
        if not brought or (moves and not news.joining):  # rows move and are written in any order
            brought = [(None, ()), *brought]
        for one, rows in brought:
            send(after, advancing, moves, one, rows, values)
            self._editing.replay()  # type: ignore[union-attr] # there is one
            advancing, moves, values = None, (), {}

    def _call(self, news: News, live: Mapping[Hashable, int], *, idle: bool) -> bool:
        """Advance and edit slot by slot, and run the step as a call with a batch of what slots hold then."""
        runner, graphs, edits = self._runner, self._graphs, self.edits
        declaration = runner.stage.declaration
        with runner.gate.open():
            graphs.filler.order()
            if self._hosts.possible:
                self._hosts.wait()
            bucket = self._captured.filling.bucket  # in which the last step ran
            last = bucket.step(edits.live_of(len(self.order.keys))).live_sizes
            _run([one.of(last) for one in bucket.transitions.values()])
            edits.write(*self._arrange(news, live), edits.rows)
            sizes = edits.bucket.step(edits.live_of(len(self.order.keys))).live_sizes
            names = [name for name in declaration.sources if name not in self.absent]
            slots = {name: graphs.buffers[name].view(sizes).clone() for name in names}
        one = rebuilt(declaration, slots, self._fields)
        with self._ranks.within(self.loop):
            if idle and self._ranks.idle(runner.decide(one.batch, **one.side), runner.size(one.batch, one.side)):
                return False
            self._made = runner(one.batch, **one.side)
        self._arrive()
        return True


def _run(calls: Sequence[Callable[[], None]]) -> None:
    """Call all, without gradients."""
    if calls:
        with torch.no_grad():
            for call in calls:
                call()
