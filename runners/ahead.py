"""Steps that need no host: slots advance on the device, and steps are launched ahead of what the host reads.

A step without news is one replay. What the host has to say goes before the next launch, as one edit: requests that
leave, join or change. Outputs are copied to a ring of host memory, and each step waits for its own copy alone.
"""

import collections
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Final, Generic

import attrs
import torch

from ..backends.base import Backend, Event
from ..dataflow.capabilities import HOST
from ..dataflow.edits import keys_in
from ..dataflow.errors import BatchError, ConfigError, StaleOutputError, did_you_mean
from ..dataflow.guard import outside_inference
from ..dataflow.sources import NO_SIDE, linear
from .chain import Chain, News
from .config import GENERATIONS, refuse
from .hooks import Coordinator
from .outputs import Stamped, chosen_parts, constant_of, map_tensors, own_copy
from .runner import Runner
from .sampling import rebuilt
from .stage import V

Keys = Iterable[Hashable]
Read = Callable[[Any], Any]
Copies = tuple[Any, tuple[list[torch.Tensor], list[torch.Tensor]], bool]
"""What is handed out of a step's outputs, the memory behind it, what is copied there, and whether a kernel does it."""
_FOREACH_COPY: Final = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - no public name
_GONE: Final = 1 << 62
"""No step has this number."""


class LaunchedStep:
    """One step of `steps()`, which the device may still be running.

    Attributes:
        number: Its number, from 0.
        keys: The key of each live request, in the order of the rows.
    """

    def __init__(self, loop: "Ahead[Any]", number: int, keys: tuple[Any, ...], entry: "Entry") -> None:
        self.number, self.keys = number, keys
        self._loop, self._entry, self._turn = loop, entry, entry.turn

    def __repr__(self) -> str:
        """One line, which waits for nothing."""
        return f"<step {self.number} of {len(self.keys)} requests>"

    @property
    def outputs(self) -> Any:
        """What the step returned, of live rows, in host memory. Waits for this step's copy alone.

        The step `ahead` + 2 later overwrites it. Keep a clone, or make the runner with `outputs="copy"`.

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

    def tokens(self) -> list[tuple[Any, Any]]:
        """The key and the row of each request that has not left, of a step that returns one tensor.

        Returns:
            Pairs of a key and a number, or a list of numbers where a row has several.

        Raises:
            ConfigError: The step returns more than one tensor: use `outputs`, or `read=` of `steps`. Or outputs are
                whole, by `output_rows=None`.
        """
        outputs, number, since, last = self.outputs, self.number, self._loop.since, self._loop.last
        if not isinstance(outputs, torch.Tensor):
            raise ConfigError(
                f"tokens() needs a step that returns one tensor, got {type(outputs).__name__}: use outputs"
            )
        if not self._loop.has_rows:
            raise ConfigError("tokens() needs rows of requests, and outputs are whole: say output_rows=")
        rows = outputs.view(len(self.keys), -1).squeeze(1).tolist() if self.keys else []
        pairs = zip(self.keys, rows, strict=True)
        return [
            pair
            for pair in pairs
            if since.get(pair[0], _GONE) <= number or any(number in life for life in last.get(pair[0], ()))
        ]

    def needs(self, slot: str) -> dict[Any, int]:
        """What a slot holds for each request in step `lands`, which is launched next and must find room for it.

        Args:
            slot: One that `needs=` of `steps` names.

        Raises:
            ConfigError: `needs=` does not name it.
        """
        return self._loop.needs(slot)

    def leave(self, keys: Keys, *, now: bool = True) -> None:
        """End requests: in step `lands` their rows are closed up on the device.

        Args:
            keys: Those of the requests.
            now: Whether `tokens` drops their rows from now on. Else the steps before `lands` still count: their end,
                such as a length, was known ahead.

        Raises:
            BatchError: There is no such request. Nothing is changed.
        """
        self._loop.leave(keys, now=now)

    def join(self, batch: Any, keys: Keys) -> None:
        """Add requests, whose rows are live from step `lands` on. Let others leave first if there is no room.

        Args:
            batch: Their rows of every copied slot, as a call takes them.
            keys: The key of each.

        Raises:
            BatchError: The batch does not fit, no bucket holds so many requests, or the loop has ended. Nothing is
                changed.
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

        Raises:
            ConfigError: The reason is no text, or an empty one.
        """
        if not isinstance(why, str) or not why:
            refuse("hold", "a reason, such as 'grammar'", why)
        self._loop.held = why


@attrs.define(eq=False)
class Entry:
    """One place of the ring: host memory for the outputs of one step.

    turn: how often it was used. owned: whether outputs are handed out as copies. stamped: whether a later use is an
    error.
    """

    backend: Backend
    ranks: Coordinator
    owned: bool
    stamped: bool
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
        self._made, (targets, sources), by_kernel = found
        with torch.no_grad():
            if by_kernel:
                _FOREACH_COPY(targets, sources)
            else:
                for host, device in zip(targets, sources, strict=True):
                    host.copy_(device, non_blocking=True)
        self._event = self.backend.event()

    @property
    def is_open(self) -> bool:
        """Whether the device has not yet written all of it."""
        return self._event is not None and not self._event.query()

    def wait(self) -> Any:
        """The outputs, once they are there."""
        if self._event is not None:
            self.ranks.wait(self._event, self.backend.device, read=True)
            self._event = None
        if self.owned:
            return own_copy(self._made)
        if self.stamped:
            return map_tensors(self._made, lambda tensor: Stamped.stamp(tensor, lambda: self.turn))
        return self._made

    def _copies(self, outputs: Any) -> Copies:
        targets, sources = list[torch.Tensor](), list[torch.Tensor]()

        def host(tensor: torch.Tensor) -> torch.Tensor:
            with outside_inference():
                made: torch.Tensor = self.backend.empty(tuple(tensor.shape), tensor.dtype, HOST)
                if made.numel():  # a rank without requests has no rows
                    targets.append(self.backend.mapped(made))
                    sources.append(tensor.detach())
            return made

        all_made = map_tensors(outputs, host, lambda leaf: constant_of(leaf, "which steps() cannot copy to the host"))
        by_kernel = bool(targets) and all(
            one.device == other.device for one, other in zip(targets, sources, strict=True)
        )
        return all_made, (targets, sources), by_kernel


_IN_FLIGHT: Final[list[Entry]] = []
"""Memory of loops that ended, which the device may still write: to torch it would be free."""


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


class Ahead(Generic[V]):
    """The loop of `steps`: what is launched, and what the host has said since.

    launched: how many steps so far. since: by key of each request that is not to leave, the first step of its row.
    last: by key, the steps of each of its lives that ended with rows that still count: a key may come back. held: why
    no step is launched ahead now.
    """

    def __init__(self, runner: Runner[V], chain: Chain[V], ahead: int, read: Read | None, needs: Iterable[str]) -> None:
        self._runner, self._chain, self._news = runner, chain, News()
        self._read, self._has_ended, self.has_rows = read, False, chain.rows_each is not None
        self._ahead = 0 if chain.why else ahead
        config = runner.config
        owned = config.outputs == "copy"
        stamped = GENERATIONS in config.modes
        self._ring = [Entry(runner.stage.backend, runner.coordinator, owned, stamped) for _ in range(ahead + 2)]
        self.launched, self.held = 0, ""
        self.since: dict[Hashable, int] = dict.fromkeys(chain.order.keys, 0)
        self.last: dict[Hashable, list[range]] = {}
        self._limited = frozenset(limit.name for limit in runner.limits)
        self._foretold = {name: self._foretells(name) for name in needs}
        self._foretell(chain.batch, chain.order.keys)

    def __iter__(self) -> Iterator[LaunchedStep]:
        """Begin to hand out the steps: from now on the loop is left if it is dropped, also before its first step."""
        steps = self._steps()
        next(steps)
        return steps  # type: ignore[return-value] # the rest are steps

    def _steps(self) -> Iterator[LaunchedStep | None]:
        """Yield None, and then the steps in turn; others are launched meanwhile."""
        steps, counts, together = collections.deque[LaunchedStep](), self._runner.tally.ahead, self._chain.together
        try:
            with self._runner.coordinator.looping(self._chain.loop):
                yield None
                while self.since or steps or together:
                    held = self.held or self._chain.why
                    self.held = ""
                    while (self.since or together) and len(steps) <= (0 if held else self._ahead):
                        launched = self._launch(idle=not self.since and not any(step.keys for step in steps))
                        if launched is None:
                            return
                        steps.append(launched)
                        counts[f"held: {held}" if held else "ahead"] += 1
                    step = steps.popleft()
                    if self.last:
                        self._forget_lives()
                    yield step
        finally:  # a kernel may still write there
            self._has_ended = True
            _IN_FLIGHT[:] = [entry for entry in (*_IN_FLIGHT, *self._ring) if entry.is_open]

    def _launch(self, *, idle: bool) -> LaunchedStep | None:
        """Launch the next step, with all that the host has said; None where no rank has a request."""
        chain, number, entry = self._chain, self.launched, self._ring[self.launched % len(self._ring)]
        if number:
            news, self._news = self._news, News() if self._news.has_any else self._news
            if not chain.go_on(news, self.since, idle=idle):
                return None
        else:
            chain.start()
        entry.start(self._outputs, chain.outputs_key)
        self.launched += 1
        return LaunchedStep(self, number, chain.order.keys, entry)

    def _outputs(self) -> Any:
        """What is copied of the last step's outputs. ConfigError where `read` returns anything else."""
        outputs = self._chain.outputs()
        return outputs if self._read is None else chosen_parts(outputs, self._read)

    def _forget_lives(self) -> None:
        """Forget the lives of which no step can be read any more: the ring has their last one no longer."""
        oldest = self.launched - len(self._ring)
        lives = dict[Hashable, list[range]]()
        for key, ended in self.last.items():
            readable = [life for life in ended if life.stop > oldest]
            if readable:
                lives[key] = readable
        self.last = lives

    def leave(self, keys: Keys, *, now: bool) -> None:
        """See `LaunchedStep.leave`."""
        keys, news = self._known(keys, "leave({})"), self._news
        found = [*map(self.since.pop, keys)]
        if not now:
            for key, since in zip(keys, found, strict=True):
                self.last.setdefault(key, []).append(range(since, self.launched))
        news.leaving += keys
        news.has_any |= bool(keys)

    def join(self, batch: Any, keys: Keys) -> None:
        """See `LaunchedStep.join`."""
        keys, runner, chain, news = keys_in(keys, "join(batch, {})"), self._runner, self._chain, self._news
        sources = chain.edits.gather(batch)
        brought = chain.edits.known(keys, sources, chain.joins)
        requests = runner.size(batch, NO_SIDE)[-1] if brought is None else len(keys)
        if brought is None:
            runner.size.compare(batch, NO_SIDE)
        different = {*keys}
        if self._has_ended:
            raise BatchError("these steps() have ended: begin again with all live requests")
        if len(different) != requests or len(keys) != requests:
            raise BatchError(f"{len(keys)} keys for {requests} requests that join: give one for each, all different")
        if not (self.since.keys().isdisjoint(keys) and different.isdisjoint(news.leaving)):
            key = next(key for key in keys if key in self.since or key in news.leaving)
            raise BatchError(f"request {key!r} is live, or leaves in this same step: give another key")
        absent = runner.stage.absent(batch, NO_SIDE)
        if absent != chain.absent:
            names = ", ".join(map(repr, sorted(absent ^ chain.absent)))
            raise BatchError(f"all requests of steps() bring the same optional slots, and these differ in {names}")
        chain.check_room(len(self.since) + requests, self.launched)
        runner.check_limits(batch)
        if brought is None:
            brought = chain.edits.bring(keys, sources, chain.joins)
        news.joining.append(brought)
        news.has_any = True
        self.since.update(dict.fromkeys(keys, self.launched))
        self._foretell(batch, keys)

    def edit(self, keys: Keys, slots: Mapping[str, Any]) -> None:
        """See `LaunchedStep.edit`."""
        keys, chain, sources = self._known(keys, "edit({}, ...)"), self._chain, self._runner.stage.declaration.sources
        if not chain.slots.issuperset(slots):
            name = next(name for name in slots if name not in chain.slots)
            near = did_you_mean(name, chain.slots)
            raise BatchError(f"edit names {name!r}, which is not a slot that these requests bring{near}")
        if not self._limited.isdisjoint(slots):
            one = rebuilt(self._runner.stage.declaration, slots, {})
            self._runner.check_limits(one.batch, one.side, slots)
        brings = keys, tuple(map(slots.get, sources)), tuple(slots)
        self._news.changing.append(chain.edits.known(*brings) or chain.edits.bring(*brings))
        self._news.has_any = True
        for name, told in self._foretold.items():
            if name in slots:
                told.bring(keys, slots[name], self.launched)

    def needs(self, slot: str) -> dict[Hashable, int]:
        """See `LaunchedStep.needs`."""
        if slot not in [*self._foretold]:
            raise ConfigError(f"slot {slot!r} is not foretold: name it when steps() begins, needs=[{slot!r}]")
        return self._foretold[slot].at(self.launched, self.since)

    def _known(self, keys: Keys, call: str) -> tuple[Hashable, ...]:
        """Keys of live requests. BatchError where one is none, or comes twice. call: as of `keys_in`."""
        keys = keys_in(keys, call)
        different = {*keys}
        if len(different) != len(keys):
            raise BatchError("one request is named twice: name each once")
        if not different <= self.since.keys():
            key = next(key for key in keys if key not in self.since)
            instead = (
                f"a key is one object: {call.format([keys])}" if keys in self.since else "it has left, or never joined"
            )
            raise BatchError(f"there is no request {key!r}: {instead}")
        return keys

    def _foretells(self, name: str) -> Foretold:
        """A slot that the host can foretell. ConfigError for any other."""
        rule = self._runner.stage.declaration.rules.get(name)
        found = None if rule is None else linear(rule)
        if found is None or found[0] != name or not self._chain.edits.has_one_each(name):
            raise ConfigError(
                f"needs names {name!r}: name slots of one number a request that advance by a number, as "
                "then=lambda seq_lens: seq_lens + 1 does"
            )
        return Foretold(found[1])

    def _foretell(self, batch: Any, keys: Iterable[Hashable]) -> None:
        """Note what the host can foretell of requests that come."""
        sources = self._runner.stage.declaration.sources
        for name, told in self._foretold.items():
            told.bring(keys, sources[name].read(batch, NO_SIDE), self.launched)
