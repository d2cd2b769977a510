"""Steps that need no host: slots advance on the device, and steps are launched ahead of what the host reads.

A step without news is one replay. What the host has to say goes before the next launch, as one edit: requests that
leave, join or change. Outputs are copied to a ring of host memory, and each step waits for its own copy alone.
"""

import collections
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic

import attrs
import torch

from ..backends.base import Event
from ..dataflow.axes import Live
from ..dataflow.capabilities import DEVICE, HOST, Placement
from ..dataflow.computation import Computation
from ..dataflow.edits import NOWHERE, Brought, Moves, Order
from ..dataflow.errors import BatchError, ConfigError, ReplayError, StaleOutputError, did_you_mean
from ..dataflow.guard import outside_inference
from ..dataflow.ready import Planned
from ..dataflow.sources import NO_SIDE, look_up
from ..dataflow.transition import linear
from .capture import FORKS, Captured
from .outputs import map_tensors
from .sampling import rebuilt
from .stage import V
from .statistics import Counts

if TYPE_CHECKING:
    from .decode import RequestRunner

Keys = Iterable[Hashable]
Read = Callable[[Any], Any]
Copies = tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]
"""What is handed out of a step's outputs, and the pairs of host memory and device memory behind it."""
_GONE: Final = 1 << 62
"""No step has this number."""


class LaunchedStep:
    """One step of `steps()`, which the device may still be running.

    Attributes:
        number: Its number, from 0.
        keys: The key of each live request, in the order of the rows.
    """

    def __init__(self, loop: "Ahead[Any]", number: int, keys: tuple[Hashable, ...], entry: "Entry") -> None:
        self.number, self.keys = number, keys
        self._loop, self._entry, self._turn = loop, entry, entry.turn

    def __repr__(self) -> str:
        """One line, which waits for nothing."""
        return f"<step {self.number} of {len(self.keys)} requests>"

    @property
    def outputs(self) -> Any:
        """What the step returned, of live rows, in host memory. Waits for this step's copy alone.

        Raises:
            StaleOutputError: A step `ahead` + 2 later was launched, which uses the same host memory.
        """
        if self._entry.turn != self._turn:
            raise StaleOutputError(
                f"the outputs of step {self.number} were overwritten by a later step: read them earlier"
            )
        return self._entry.wait()

    @property
    def lands(self) -> int:
        """The number of the step that an edit made now reaches."""
        return self._loop.launched

    def tokens(self) -> list[tuple[Hashable, Any]]:
        """The key and the row of each request that has not left, of a step that returns one tensor.

        Returns:
            Pairs of a key and a number, or a list of numbers where a row has several.

        Raises:
            ConfigError: The step returns more than one tensor: use `outputs`, or `read=` of `steps`.
        """
        outputs, since = self.outputs, self._loop.since
        if not isinstance(outputs, torch.Tensor):
            raise ConfigError(
                f"tokens() needs a step that returns one tensor, got {type(outputs).__name__}: use outputs"
            )
        rows = outputs.view(len(self.keys), -1).squeeze(1).tolist() if self.keys else []
        return [pair for pair in zip(self.keys, rows, strict=True) if since.get(pair[0], _GONE) <= self.number]

    def needs(self, slot: str) -> dict[Hashable, int]:
        """What a slot holds for each request in step `lands`, which is launched next and must find room for it.

        Args:
            slot: One that `needs=` of `steps` names.

        Raises:
            ConfigError: `needs=` does not name it.
        """
        return self._loop.needs(slot)

    def leave(self, keys: Keys) -> None:
        """End requests: in step `lands` their rows are closed up on the device, and `tokens` drops them at once.

        Args:
            keys: Those of the requests.

        Raises:
            BatchError: There is no such request. Nothing is changed.
        """
        self._loop.leave(keys)

    def join(self, batch: Any, keys: Keys) -> None:
        """Add requests, whose rows are live from step `lands` on. Let others leave first if there is no room.

        Args:
            batch: Their rows of every copied slot, as a call takes them.
            keys: The key of each.

        Raises:
            BatchError: The batch does not fit, or no bucket holds so many requests. Nothing is changed.
        """
        self._loop.join(batch, keys)

    def edit(self, keys: Keys = (), **slots: Any) -> None:
        """Change slots of requests that stay, in step `lands`.

        Args:
            keys: Those of the requests.
            slots: By name, a row for each of the keys; a slot without rows of requests is written whole.

        Raises:
            BatchError: There is no such request or slot, or a value does not fit. Nothing is changed.
        """
        self._loop.edit(keys, slots)

    def hold(self, why: str) -> None:
        """Launch no further step until all launched ones were handed out: a request needs what the last one made.

        Args:
            why: The reason, which statistics count, such as "grammar".
        """
        self._loop.held = why


@attrs.define(eq=False)
class Entry:
    """One place of the ring: host memory for the outputs of one step. turn: how often it was used."""

    backend: Any
    turn: int = 0
    _event: Event | None = None
    _made: Any = None
    _known: dict[tuple[int, int], Copies] = attrs.field(factory=dict)

    def start(self, outputs: Callable[[], Any], key: tuple[int, int] | None) -> None:
        """Start the copies of a step's outputs on the current stream. key: of outputs that are the same each time."""
        self.turn += 1
        found = None if key is None else self._known.get(key)
        if found is None:
            found = self._copies(outputs())
            if key is not None:
                self._known[key] = found
        self._made, pairs = found
        with torch.no_grad():
            for host, device in pairs:
                host.copy_(device, non_blocking=True)
        self._event = self.backend.event()

    def wait(self) -> Any:
        """The outputs, once they are there."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._made

    def _copies(self, outputs: Any) -> Copies:
        pairs = list[tuple[torch.Tensor, torch.Tensor]]()

        def host(tensor: torch.Tensor) -> torch.Tensor:
            with outside_inference():
                pairs.append((self.backend.empty(tuple(tensor.shape), tensor.dtype, HOST), tensor.detach()))
            return pairs[-1][0]

        return map_tensors(outputs, host), pairs


@attrs.define(eq=False)
class Foretold:
    """A slot that advances by a number: by request the step of its last value, and that, or where it stands."""

    add: int
    _known: dict[Hashable, tuple[int, Any, int]] = attrs.field(factory=dict)

    def bring(self, keys: Iterable[Hashable], source: Any, step: int) -> None:
        """Note what the host brings for some requests in a step."""
        kept = source.detach().clone() if isinstance(source, torch.Tensor) else [*source]
        self._known.update({key: (step, kept, row) for row, key in enumerate(keys)})

    def at(self, step: int, keys: Mapping[Hashable, int]) -> dict[Hashable, int]:
        """The value of each request in a step; all others are forgotten."""
        lists = dict[int, list[Any]]()
        for key, (since, kept, row) in [*self._known.items()]:
            if key not in keys:
                del self._known[key]
            elif row >= 0:
                values = lists.setdefault(id(kept), kept.tolist()) if isinstance(kept, torch.Tensor) else kept
                self._known[key] = since, int(values[row]), -1
        return {key: self._known[key][1] + self.add * (step - self._known[key][0]) for key in keys}


@attrs.define(eq=False)
class News:
    """What the host has said since the last launch."""

    leaving: list[Hashable] = attrs.field(factory=list)
    joining: list[Brought] = attrs.field(factory=list)
    changing: list[Brought] = attrs.field(factory=list)


@attrs.define(eq=False)
class Here:
    """A bucket with so many live requests: what the host does for it where no graph does.

    advances: calls that advance slots. values: slots that the host computes. tails: padded rows that an edit resets.
    always: those of them that each step resets.
    """

    advances: list[Callable[[], None]]
    values: list[Computation]
    tails: list[tuple[torch.Tensor, Any]]
    always: list[tuple[torch.Tensor, Any]]

    @classmethod
    def of(cls, planned: Planned, live: Live, requests: int, sides: Iterable[Placement]) -> "Here":
        """What a plan leaves to the host. sides: those whose slots no graph advances."""
        computed = [one for one in planned.plan.computed if one.on == HOST]
        advances = [planned.transitions[side].of(requests) for side in sides if planned.transitions[side].sources]
        if not computed and all(tail.fused for tail in planned.plan.tails):
            return cls(advances, [], [], [])
        ready = planned.ready(live)
        values = [planned.computation(one, ready.step, ready.views) for one in computed]
        always, others = (list(planned.tails(ready.step.live_sizes, always=each)) for each in (True, False))
        return cls(advances, values, always + others, always)


class Ahead(Generic[V]):
    """The loop of `steps`: what is launched, what the host has said since, and the order of requests.

    launched: how many steps so far. since: by key of each request that is not to leave, the first step of its row.
    held: why no step is launched ahead now.
    """

    def __init__(
        self,
        runner: "RequestRunner[V]",
        batch: Any,
        keys: Keys | None,
        ahead: int,
        read: Read | None,
        needs: Iterable[str],
        why: str,
    ) -> None:
        """Check everything. why: the reason for steps by whole calls, such as watchers; nothing where graphs do."""
        self._runner, self._batch, self._by_calls = runner, batch, bool(why)
        self._read: Read = (lambda outputs: outputs) if read is None else read
        declaration, self._graphs = runner.stage.declaration, runner.graphs
        if not declaration.rules:
            raise ConfigError(f"no slot of {declaration.name} advances, so each step would repeat the first: say then=")
        pooled = next((buffer.name for buffer in self._graphs.buffers if buffer.pooled), None)
        if pooled is not None:
            raise ConfigError(f"slot {pooled!r} is in a pool's memory, which other runners overwrite: leave out phase=")
        requests = runner.size(batch, NO_SIDE)[-1]
        self._order = Order(range(requests) if keys is None else keys)
        if len(self._order.keys) != requests:
            raise BatchError(f"{len(self._order.keys)} keys for a batch of {requests} requests: give one for each")
        self._absent = runner.stage.absent(batch, NO_SIDE)
        self._check_room(requests)
        filler = self._graphs.filler
        editing = filler.editing(runner.sizes[runner.buckets.largest], self._absent, by_kernel=not why)
        self._edits: Any = editing.bucket
        self._edits.check()
        hosts = [name for name in declaration.rules if declaration.slots[name].placement == HOST]
        self._moves_host = bool(hosts)
        self._why = why or (f"host slot {hosts[0]!r} advances" if hosts else "")
        self._ahead = 0 if self._why else ahead
        self._editing = editing.alone
        self._joins = tuple(name for name in declaration.sources if name in self._edits.rows)
        self._limited = frozenset(name for name, slot in declaration.slots.items() if slot.limit is not None)
        self._fields = {name: look_up(batch, name) for name in declaration.fields}
        self.launched, self.held = 0, ""
        self._foretold = {name: self._foretells(name) for name in needs}
        self._foretell(batch, self._order.keys)
        self._known_here: dict[tuple[int, int], Here] = {}
        self._here: Here
        self._ring = [Entry(runner.stage.backend) for _ in range(ahead + 2)]
        self._news, self._has_news, self._always = News(), False, self._editing is None or self._moves_host
        self._fills, self._forks, self._turn, self._clock = (
            -1,
            FORKS.count,
            self._graphs.buffers.turn,
            self._graphs.clock,
        )
        self._hosts, self._stream = filler.hosts, filler.stream
        self._captured: Captured | None = None
        self._replay: Callable[[], None]
        self._counted: Counts
        self.since: dict[Hashable, int] = dict.fromkeys(self._order.keys, 0)

    def __iter__(self) -> Iterator[LaunchedStep]:
        """Hand out the steps in turn; others are launched meanwhile."""
        steps, counts = collections.deque[LaunchedStep](), self._runner.tally.ahead
        while self.since:
            held = self.held or self._why
            self.held = ""
            while len(steps) <= (0 if held else self._ahead):
                steps.append(self._launch())
                counts[f"held: {held}" if held else "ahead"] += 1
            yield steps.popleft()

    def leave(self, keys: Keys) -> None:
        """See `LaunchedStep.leave`."""
        keys = self._known(keys)
        for key in keys:
            del self.since[key]
        self._news.leaving += [key for key in keys if key in self._order.rows]
        self._has_news = True

    def join(self, batch: Any, keys: Keys) -> None:
        """See `LaunchedStep.join`."""
        keys, runner = tuple(keys), self._runner
        requests = runner.size(batch, NO_SIDE)[-1]
        if len({*keys}) != requests or len(keys) != requests:
            raise BatchError(f"{len(keys)} keys for {requests} requests that join: give one for each, all different")
        taken = [key for key in keys if key in self.since or key in self._news.leaving]
        if taken:
            raise BatchError(f"request {taken[0]!r} is live, or leaves in this same step: give another key")
        absent = runner.stage.absent(batch, NO_SIDE)
        if absent != self._absent:
            names = ", ".join(map(repr, sorted(absent ^ self._absent)))
            raise BatchError(f"all requests of steps() bring the same optional slots, and these differ in {names}")
        self._check_room(len(self.since) + requests)
        runner.check_limits(batch)
        edits = self._edits
        self._news.joining.append(edits.bring(keys, edits.gather(batch, NO_SIDE), self._joins, joins=True))
        self._has_news = True
        self.since.update(dict.fromkeys(keys, self.launched))
        self._foretell(batch, keys)

    def edit(self, keys: Keys, slots: Mapping[str, Any]) -> None:
        """See `LaunchedStep.edit`."""
        keys, declaration = self._known(keys), self._runner.stage.declaration
        for name in slots:
            if name not in declaration.sources or name in self._absent:
                known = declaration.sources.keys() - self._absent
                raise BatchError(
                    f"edit names {name!r}, which is not a slot that these requests bring{did_you_mean(name, known)}"
                )
        if not self._limited.isdisjoint(slots):
            one = rebuilt(declaration, slots, {})
            self._runner.check_limits(one.batch, one.side, slots)
        sources = tuple([slots.get(name) for name in declaration.sources])
        self._news.changing.append(self._edits.bring(keys, sources, tuple(slots)))
        self._has_news = True
        for name in slots.keys() & self._foretold.keys():
            self._foretold[name].bring(keys, slots[name], self.launched)

    def needs(self, slot: str) -> dict[Hashable, int]:
        """See `LaunchedStep.needs`."""
        if slot not in self._foretold:
            raise ConfigError(f"slot {slot!r} is not foretold: name it when steps() begins, needs=[{slot!r}]")
        return self._foretold[slot].at(self.launched, self.since)

    def _known(self, keys: Keys) -> tuple[Hashable, ...]:
        """Keys of live requests. BatchError where one is none, or comes twice."""
        keys = tuple(keys)
        for key in keys:
            if key not in self.since:
                raise BatchError(f"there is no request {key!r}: it has left, or never joined")
        if len({*keys}) != len(keys):
            raise BatchError("one request is named twice: name each once")
        return keys

    def _check_room(self, requests: int) -> None:
        """BatchError where no graph takes so many requests."""
        bucket = self._runner.buckets.fit(requests)
        if bucket is None or not self._graphs.has(bucket, self._absent):
            largest = self._runner.buckets.largest
            why = f"the largest bucket holds {largest}" if bucket is None else f"bucket {bucket} has no graph"
            raise BatchError(f"steps() cannot take {requests} requests: {why}; let others leave first, or wait")

    def _foretells(self, name: str) -> Foretold:
        """A slot that the host can foretell. ConfigError for any other."""
        declaration = self._runner.stage.declaration
        rule, slot = declaration.rules.get(name), declaration.slots.get(name)
        found = None if rule is None else linear(rule)
        if (
            slot is None
            or found is None
            or found[0] != name
            or self._edits.rows.get(name) != (0, 1)
            or len(slot.shape) > 1
        ):
            raise ConfigError(
                f"needs names {name!r}: name slots of one number a request that advance by a number, "
                f"then=lambda {name}: {name} + 1"
            )
        return Foretold(found[1])

    def _foretell(self, batch: Any, keys: Iterable[Hashable]) -> None:
        """Note what the host can foretell of requests that come."""
        sources = self._runner.stage.declaration.sources
        for name, told in self._foretold.items():
            told.bring(keys, sources[name].read(batch, NO_SIDE), self.launched)

    def _launch(self) -> LaunchedStep:
        """Launch the next step, with all that the host has said."""
        number, rows_out = self.launched, self._runner.rows_out
        outputs = self._call() if self._by_calls and number else self._again() if number else self._start()
        keys, select, captured = self._order.keys, self._read, self._captured
        entry = self._ring[number % len(self._ring)]
        if self._by_calls:
            entry.start(lambda: select(outputs), None)
        else:
            key = (captured.rows, len(keys)) if captured.graph.is_recorded else None
            entry.start(lambda: select(captured.live(rows_out(len(keys)))), key)
        self.launched += 1
        return LaunchedStep(self, number, keys, entry)

    def _start(self) -> Any:
        """Fill and run the first step as any other."""
        outputs = self._runner(self._batch)
        self._graphs.buffers.distrust()  # a later fill knows nothing of tails
        self._fills = self._graphs.buffers.turn.fills
        self._arrive(len(self._order.keys))
        return outputs

    def _arrive(self, requests: int) -> None:
        """Take the graph for so many requests, and what the host does for them."""
        runner, graphs = self._runner, self._graphs
        bucket = runner.buckets.fit(requests)
        if self._captured is None or bucket != self._captured.rows:
            captured = graphs.get(bucket, self._absent)
            if captured is None:
                raise ReplayError(f"no graph takes {requests} requests: its capture failed, as `report` says")
            graphs.verify(captured)
            self._captured, self._replay = captured, captured.graph.replay
        self._counted = runner.tally.repeated[bucket, requests]
        here = self._known_here.get((bucket, requests))
        if here is None:
            sides: tuple[Placement, ...] = (DEVICE, HOST) if self._editing is None else (HOST,)
            planned = self._captured.filling.bucket.planned(self._absent)
            here = Here.of(planned, self._edits.live_of(requests), requests, sides)
            self._known_here[bucket, requests] = here
        self._here = here

    def _again(self) -> None:
        """Run the step after the last one."""
        graphs, turn, clock, lock = self._graphs, self._turn, self._clock, self._runner.gate.lock
        if lock.locked():
            raise self._runner.gate.refusal()
        with lock:
            if turn.fills != self._fills or self._forks != FORKS.count:
                raise self._lost()
            here = self._stream()
            if not here == turn.stream == clock.stream or (turn.neighbours and not turn.follows(here)):
                graphs.order()
            try:
                if self._has_news or self._always:
                    self._prepare()
                self._replay()
            except BaseException:
                self._fills = -1
                raise
            clock.replays += 1
            self._counted.steps += 1
            if self._hosts.possible:
                self._hosts.note()

    def _lost(self) -> ReplayError:
        """Why the slots hold these requests no more."""
        if self._fills < 0:
            return ReplayError("an earlier step broke off: begin again with all live requests")
        if self._turn.fills != self._fills:
            return ReplayError("another batch was filled in the middle of steps(): begin again with all live requests")
        return ReplayError("this process was forked in the middle of steps(): graphs belong to the process before")

    def _prepare(self) -> None:
        """Advance and edit by more than the step's own graph."""
        edits, edited = self._edits, self._has_news
        if self._hosts.possible:
            self._hosts.wait()
        if self._here.advances:
            with torch.no_grad():
                for advance in self._here.advances:
                    advance()
        if edited:
            keys, (moves, brought) = self._order.keys, self._arrange()
            names = edits.rows if self._editing is None else edits.apart
            if names:
                edits.write(moves, brought, names)
            if self._editing is not None:
                self._send(len(self._order.keys), len(keys), moves, brought)
            if keys is not self._order.keys:
                self._arrive(len(self._order.keys))
        here = self._here
        if here.tails or here.values:
            with torch.no_grad():
                for tail, number in here.tails if edited else here.always:
                    tail.fill_(number)
                for value in here.values if edited or self._moves_host else ():
                    value.run(self._fields)

    def _send(self, after: int, before: int, moves: Moves, brought: Sequence[tuple[Brought, Sequence[int]]]) -> None:
        """Send what the host has said, and have it written: a packet for each slot's rows, most often one."""
        send, packet, replay = self._graphs.filler.send, self._edits.packet, self._editing.replay
        groups: list[tuple[Brought | None, Sequence[int]]] = [*brought]
        if not groups or (moves and not groups[0][0].joins):  # a kernel moves and writes rows at once
            groups.insert(0, (None, ()))
        for one, rows in groups:
            send(*packet(after, before, moves, one, rows))
            replay()
            before, moves = 0, ()

    def _arrange(self) -> tuple[Moves, list[tuple[Brought, list[int]]]]:
        """Take all news: which rows move, and the rows of what is brought."""
        news, since, rows = self._news, self.since, self._order.rows
        moves: Moves = ()
        if news.leaving or news.joining:
            moves = self._order.arrange(news.leaving, [key for one in news.joining for key in one.keys if key in since])
        brought = [(one, [rows.get(key, NOWHERE) for key in one.keys]) for one in (*news.joining, *news.changing)]
        self._news, self._has_news = News(), False
        return moves, brought

    def _call(self) -> Any:
        """Advance and edit slot by slot, and run the step as a call with a batch of what slots hold."""
        edits, runner, graphs = self._edits, self._runner, self._graphs
        if self._turn.fills != self._fills:
            raise self._lost()
        declaration, hosts = runner.stage.declaration, graphs.filler.hosts
        with runner.gate.open(), torch.no_grad():
            graphs.order()
            if hosts.possible:
                hosts.wait()
            for transition in edits.planned().transitions.values():
                transition.of(len(self._order.keys))()
            moves, brought = self._arrange()
            edits.write(moves, brought, edits.rows)
            sizes = edits.planned().ready(edits.live_of(len(self._order.keys))).step.live_sizes
            slots = {
                name: graphs.buffers[name].view(sizes).clone()
                for name in declaration.sources
                if name not in self._absent
            }
        one = rebuilt(declaration, slots, {name: value for name, value in self._fields.items() if value is not None})
        outputs = runner(one.batch, **one.side)
        self._fills = self._turn.fills
        self._arrive(len(self._order.keys))
        return outputs
