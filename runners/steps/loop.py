"""Steps without the host: slots advance on the device, and steps are launched ahead of what the host reads.

A step without an edit is one replay. Requests that leave, join or change are one edit before the next launch. Outputs
are copied to a ring of host memory, and each step waits only for its own copy.
"""

import collections
import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic

import attrs
import numpy as np
import torch
from torch.autograd import profiler

from ...backends.base import Event
from ...dataflow.capabilities import HOST
from ...dataflow.edits import Keys, keys_in
from ...dataflow.errors import BatchError, ConfigError, StaleOutputError
from ...dataflow.guard import outside_inference
from ...dataflow.inputs import V
from ...dataflow.sources import NO_SIDE, SETTINGS, Compute
from ..engine.config import GENERATIONS, check_step, checked, checked_names, refuse
from ..engine.outputs import Out, Stamped, chosen_parts, constant_leaf, map_tensors, own_copy
from ..engine.runner import Runner
from .chain import Chain
from .ragged_rows import RaggedRows

SomeKeys = Iterable[Hashable]
MOST_AT_ONCE: Final = 1 << 16
"""The most bytes of outputs of all steps of a launch that one copy takes to the host, with those of padded rows."""
_FOREACH_COPY: Final = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - no public name
_IN_FLIGHT: Final[list["Launch"]] = []
"""Launches of ended loops whose host memory the device may still write. This list keeps torch from reusing it."""


@attrs.define(eq=False)
class OutputCopies:
    """Host memory for the outputs of a launch. Later launches use it again.

    Attributes:
        outputs: Each step's outputs in host memory, and who was done before it or None.
        start: Starts the copies, on the current stream.
        rows: Of each step, a call that returns the rows of its requests, and one that returns who was done before it, a
            byte for each, or None. None before `tokens` was called.
    """

    outputs: Sequence[tuple[Any, torch.Tensor | None]]
    start: Callable[[], object]
    rows: list[Any]


@attrs.define(eq=False)
class Launch:
    """A launch of one step or several.

    Attributes:
        number: Its number, from 0.
        copies: The copies of its outputs.
        event: The end of these copies.
        is_ready: Whether its outputs are in host memory. The host has waited for them, and no later launch has begun to
            overwrite them.
    """

    number: int
    copies: OutputCopies
    event: Event
    is_ready: bool = False


def _starter(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Callable[[], object]:
    """Return a call that copies tensors without waiting for it."""
    if len(targets) == 1:  # for which the grouped call takes longer
        return functools.partial(targets[0].copy_, sources[0], True)  # noqa: FBT003 - the name takes time
    if targets and all(target.device == source.device for target, source in zip(targets, sources, strict=True)):
        return functools.partial(_FOREACH_COPY, targets, sources)

    def start() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    return start


class LaunchedStep(Generic[Out]):
    """One step of `steps()`, which the device may still be running.

    Attributes:
        number: Its number, from 0.
        keys: The key of each live request, in the order of the rows.
    """

    __slots__ = ("_launch", "_loop", "_place", "keys", "number")

    def __init__(self, loop: "StepLoop[Any, Out]", launch: Launch, place: int, number: int, keys: Keys) -> None:
        self._loop = loop
        self._launch = launch
        self._place = place  # among the steps of the launch
        self.number = number
        self.keys: tuple[Any, ...] = keys

    def __repr__(self) -> str:
        """Return its number and its number of requests. Waits for nothing."""
        return f"<step {self.number} of {len(self.keys)} requests>"

    @property
    def launch(self) -> int:
        """The number of its launch, from 0."""
        return self._launch.number

    @property
    def outputs(self) -> Out:
        """The outputs of the step for live rows, in host memory. Waits only for this step's copy.

        The launch `ahead` + 2 later overwrites it. Keep a clone, or make the runner with `outputs="copy"`.

        Raises:
            StaleOutputError: The launch `ahead` + 2 later, which uses the same host memory, has been.
        """
        launch = self._launch
        if not launch.is_ready:
            self._loop.wait(launch, self.number)
        return self._loop.handed_out(launch.number, launch.copies.outputs[self._place][0])

    @property
    def lands(self) -> int:
        """The number of the first step that an edit made now applies to."""
        return self._loop.launched

    def tokens(self) -> list[tuple[Any, Any]]:
        """Return the key and the row of each request that has not left, of a step that returns one tensor.

        Requests that were done before this step, by the slot that `done=` of the runner names, are left out.

        Returns:
            Pairs of a key and a number, or a list of numbers if a row has several.

        Raises:
            ConfigError: The step returns more than one tensor: use `outputs`, or `read=` of `steps`. Or outputs are
                whole, by `output_rows=None`.
        """
        loop = self._loop
        launch = self._launch
        place = self._place
        if not launch.is_ready:
            loop.wait(launch, self.number)
        known = launch.copies.rows
        if known[place] is None:
            known[place] = loop.rows(*launch.copies.outputs[place], len(self.keys))
        rows, done = known[place]
        pairs = list(zip(self.keys, rows()))  # noqa: B905 - there are as many rows, and strict= takes 0.2 us
        if done is not None:
            flags = done()
            if True in flags:
                pairs = [pair for pair, is_done in zip(pairs, flags, strict=True) if not is_done]
        return pairs if self.number >= loop.changed else loop.counted(self.number, pairs)

    def needs(self, slot: str, *, steps: int | None = None) -> dict[Any, int]:
        """Return what each request needs in a step that is launched later, to reserve memory for it before.

        Args:
            slot: One that `needs=` of `steps` names.
            steps: In which step: 1 for step `lands`, the next to be launched, 2 for the one after it, and so on. With
                `chunk=`, in which launch, and the answer is for the last step of that launch. None: in the last one
                that may be launched before you get another step.

        Returns:
            For each live request, the slot's number in that step. For a ragged slot, how many values must be appended
            to the request's row until then; 0 if its row is long enough.

        Raises:
            ConfigError: `needs=` does not name the slot, or its `ragged=` gives no whole number for each request.
            BatchError: A row of the ragged slot came as a tensor on the device.
        """
        return self._loop.needs(slot, steps)

    def leave(self, keys: SomeKeys, *, now: bool = True) -> None:
        """End requests: in step `lands` the device closes the gaps of their rows.

        Args:
            keys: The requests' keys.
            now: Whether `tokens` drops their rows from now on. If not, the steps before `lands` still count: use that
                if the end, such as a length, was known ahead.

        Raises:
            BatchError: There is no such request. Nothing is changed.
        """
        self._loop.leave(keys, now=now)

    def join(self, batch: Any, keys: SomeKeys) -> None:
        """Add requests, whose rows are live from step `lands` on. Let others leave first if there is no room.

        Args:
            batch: Their rows of every copied slot, as a call takes them.
            keys: The key of each.

        Raises:
            BatchError: The batch does not fit, no bucket holds so many requests, or the loop has ended. Nothing is
                changed.
        """
        self._loop.join(batch, keys)

    def edit(self, keys: SomeKeys = (), **slots: Any) -> None:
        """Change slots of requests that stay, in step `lands`.

        Args:
            keys: The requests' keys.
            slots: By name, a row for each of the keys. A slot without rows of requests is written whole.

        Raises:
            BatchError: There is no such request or slot, or a value does not fit. Nothing is changed.
        """
        self._loop.edit(keys, slots)

    def append(self, keys: SomeKeys, **slots: Any) -> None:
        """Append values to the requests' rows of ragged slots, in step `lands`. Rows without new values are not sent.

        Args:
            keys: The requests' keys.
            slots: By name, a list of new values for each of the keys: `pages=[[7], [], [12, 13]]`.

        Raises:
            BatchError: There is no such request or slot, a row has no room, a value does not fit, or a row came as a
                tensor on the device. Nothing is changed.
        """
        self._loop.append(keys, slots)

    def hold(self, why: str) -> None:
        """Launch no further step until all launched ones were handed out, and then one, since a request needs results.

        Args:
            why: The reason, which statistics count, such as "grammar".

        Raises:
            ConfigError: The reason is not a text, or is empty.
        """
        self._loop.hold(why)


class StepLoop(Generic[V, Out]):
    """The loop of `steps`: launches steps, copies their outputs to the host, and checks what edits name.

    Attributes:
        launched: How many steps were launched so far.
        launches: How many launches these were.
        changed: The first step with exactly the present requests, all of whose rows count.
    """

    def __init__(
        self,
        runner: Runner[V, Any],
        chain: Chain[V],
        batch: Any,
        keys: SomeKeys | None,
        ahead: int,
        read: Callable[[Any], Any] | None,
        needs: Collection[str],
    ) -> None:
        """Check the arguments, which are those of `DecodeRunner.steps`. Nothing is run yet."""
        checked("ahead", "a number of steps, 0 or more", ahead, int, 0)
        needs = checked_names("needs", needs)
        if read is not None:
            check_step("read", read, "a step's outputs, which chooses parts of them")
        requests = runner.size(batch, NO_SIDE)[-1]
        first = keys_in(range(requests) if keys is None else keys, "steps(batch, keys={})")
        different = len({*first})
        if different != len(first):
            raise BatchError(f"two requests have one key: {len(first)} keys, {different} different ones")
        if requests != len(first):
            raise BatchError(f"{len(first)} keys for a batch of {requests} requests: give one for each")
        self.launched = self.launches = 0
        self._runner = runner
        self._backend = runner.stage.backend
        self._device = runner.stage.backend.device
        self._sources = runner.stage.declaration.sources
        self._chain = chain
        self._batch = batch
        self._read = read
        self._ahead = 0 if chain.hold_reason else ahead
        self._following = 1  # how many launches may come before another step is handed out
        self._size = 0  # which of the chain's `chunk_sizes` the next launch has
        self._hold_reason = ""
        self._has_ended = False
        self._since = dict.fromkeys(first, 0)  # by key, the first step of each request that has not left
        # requests that have left, their steps that still count, and the launch of the last one
        self._ended: list[tuple[Hashable, range, int]] = []
        self._stamps = GENERATIONS in runner.config.modes
        self.changed = 0
        self._depth = ahead + 2  # places of the ring: the host memory that launches use in turn
        self._memory: list[dict[Hashable, OutputCopies]] = [{} for _ in range(self._depth)]
        self._ring: list[Launch | None] = [None] * self._depth  # the last launch that used each place
        slots = runner.stage.declaration.slots
        ragged = [name for name in self._sources if slots[name].ragged]
        kept = [name for name in ragged if not (slots[name].rewritten or slots[name].advances())]
        self._ragged = {name: RaggedRows(chain.buffers[name]) for name in kept}
        self._growths = dict[str, int]()
        # for each slot of `needs`, the slot whose number is predicted, and for ragged rows their length as its function
        self._needs = dict[str, tuple[str, Compute | bool | None]]()
        for name in needs:
            number = name
            length = slots[name].ragged if name in kept else None
            if isinstance(length, Compute):
                number = next(need for need in length.needs if need != SETTINGS)
            self._needs[name] = number, length
            self._growths[number] = chain.growth_of(number)
        # each request's number, counted back to step 0; until it is read, the step, the values and the row to read
        self._values: dict[str, dict[Hashable, Any]] = {name: {} for name in self._growths}

    def _note(self, keys: Keys, batch: Any) -> None:
        """Store what slots hold in the next step for requests of a batch."""
        for name in (*self._ragged, *self._values):
            self._note_rows(name, keys, self._sources[name].read(batch, NO_SIDE))

    def _note_rows(self, slot: str, keys: Keys, source: Any) -> None:
        """Store a slot's rows in the next step for some requests.

        A tensor may be on the device, so it is read only later.
        """
        if source is None:  # an optional slot that requests do not have
            return
        if slot in self._ragged:
            self._ragged[slot].note(keys, source)
        if slot in self._values:
            is_tensor = isinstance(source, torch.Tensor)
            values = functools.cache(source.detach().clone().tolist if is_tensor else [*source].copy)
            self._values[slot].update({key: (self.launched, values, row) for row, key in enumerate(keys)})

    def __iter__(self) -> Iterator[LaunchedStep[Out]]:
        """Begin to hand out the steps. From now on a dropped loop counts as left, even before its first step."""
        steps = self._steps()
        next(steps)
        return steps  # type: ignore[return-value] # all others are steps

    def _steps(self) -> Iterator[LaunchedStep[Out] | None]:
        """Yield None, and then the steps in order. Others are launched meanwhile."""
        waiting = collections.deque[list[LaunchedStep[Out]]]()  # of each launch
        counts = self._runner.tally.ahead
        others = not self._runner.coordinator.quiet  # other ranks may have requests when this rank has none
        try:
            with self._chain.looping():
                yield None
                while self._since or waiting or others:
                    held = self._hold_reason or self._chain.hold_reason
                    if not waiting:
                        self._hold_reason = ""
                    last = waiting[0][0].launch if waiting else self.launches
                    if not held:
                        last += self._ahead
                    while (self._since or others) and self.launches <= last:
                        launch = self._launch
                        if profiler._is_profiler_enabled:  # noqa: SLF001 - torch has no public name
                            launch = profiler.record_function("slotgraph:step")(launch)
                        steps = launch(
                            1 if held else self._next_count(),
                            idle=not self._since and not any(one.keys for launched in waiting for one in launched),
                        )
                        if not steps:
                            return
                        waiting.append(steps)
                        counts[f"held: {held}" if held else "ahead"] += len(steps)
                    steps = waiting.popleft()
                    next_launch = waiting[0][0].launch if waiting else self.launches
                    self._following = max(1, next_launch + self._ahead - self.launches + 1)
                    for step in steps:
                        if self._ended:
                            self._forget_ended()
                        yield step
        finally:  # keep memory that a kernel may still write
            self._has_ended = True
            unread = [launch for launch in self._ring if launch is not None and not launch.is_ready]
            _IN_FLIGHT[:] = [launch for launch in (*_IN_FLIGHT, *unread) if not launch.event.query()]

    def _next_count(self) -> int:
        """Return how many steps the next launch runs: more from now on if the device has nothing left to do."""
        sizes = self._chain.chunk_sizes
        if len(sizes) == 1:
            return sizes[0]
        last = self._ring[(self.launches - 1) % self._depth]
        if self._size < len(sizes) - 1 and last is not None and last.event.query():
            self._size += 1
        return 1 if self._chain.is_joined else sizes[self._size]

    def _launch(self, count: int, *, idle: bool) -> list[LaunchedStep[Out]]:
        """Launch the next steps, with the edit before them. Return none if no rank has a request."""
        chain = self._chain
        number = self.launched
        if number:
            keys = chain.go_on(count, idle=idle)
        else:
            keys = chain.start(self._batch, tuple(self._since))
            self._note(tuple(self._since), self._batch)
        if keys is None:
            return []
        place = self.launches % self._depth
        memory = self._memory[place]
        outputs_key = chain.outputs_key()
        copies = memory.get(outputs_key)
        if copies is None:
            copies = self._copies()
            if outputs_key is not None:
                memory[outputs_key] = copies
        last = self._ring[place]
        if last is not None:
            last.is_ready = False
        copies.start()
        event = self._backend.event(None if last is None else last.event)
        launch = self._ring[place] = Launch(self.launches, copies, event)
        made = len(copies.outputs)  # a loop's first launch is of one step, whatever its chunk
        self.launches += 1
        self.launched += made
        steps: list[LaunchedStep[Out]] = []
        for step in range(made):  # a comprehension takes longer, also for what comes before it
            steps.append(LaunchedStep(self, launch, step, number + step, keys))  # noqa: PERF401
        return steps

    def _copies(self) -> OutputCopies:
        """Allocate host memory for the outputs of the last launch, and return how they are copied there."""
        outputs, stacked = self._chain.outputs()
        targets = list[torch.Tensor]()
        sources = list[torch.Tensor]()
        if self._read is not None:
            outputs = [(chosen_parts(made, self._read), done) for made, done in outputs]

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            with outside_inference():
                made: torch.Tensor = self._backend.empty(tuple(tensor.shape), tensor.dtype, HOST)
                if made.numel():  # a rank without requests has no rows
                    targets.append(self._backend.mapped(made))
                    sources.append(tensor.detach())
            return made

        stacks = {
            one.untyped_storage().data_ptr(): functools.cache(functools.partial(copied, one))
            for one in stacked
            if 0 < one.nbytes <= MOST_AT_ONCE
        }

        def on_host(tensor: torch.Tensor) -> torch.Tensor:
            whole = stacks.get(tensor.untyped_storage().data_ptr())
            if whole is None:
                return copied(tensor)
            made = whole()
            with outside_inference():
                return made.as_strided(tensor.shape, tensor.stride(), made.storage_offset() + tensor.storage_offset())

        made = map_tensors(outputs, on_host, lambda leaf: constant_leaf(leaf, "which steps() cannot copy to the host"))
        return OutputCopies(made, _starter(targets, sources), [None] * len(made))

    def wait(self, launch: Launch, number: int) -> None:
        """Wait for the copies of a launch's outputs. Raise StaleOutputError if they are overwritten. number: A step."""
        if self._is_overwritten(launch.number):
            raise StaleOutputError(f"the outputs of step {number} were overwritten by a later step: read them earlier")
        self._runner.coordinator.wait(launch.event, self._device, read=True)
        launch.is_ready = True

    def _is_overwritten(self, launch: int) -> bool:
        """Return whether a later launch uses the host memory of this one."""
        return launch + self._depth < self.launches

    def handed_out(self, launch: int, outputs: Out) -> Out:
        """Return outputs of a launch as the runner's options ask for them: as clones, stamped, or as they are."""
        if self._runner.config.outputs == "copy":
            return own_copy(outputs)
        if self._stamps:
            return map_tensors(  # type: ignore[no-any-return] # the same structure
                outputs, lambda tensor: Stamped.stamp(tensor, lambda: self._is_overwritten(launch))
            )
        return outputs

    def counted(self, number: int, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Return the rows of a step that still count: of live requests, and of others until their known end."""
        launched = self.launched
        ended = {key for key, steps, _ in self._ended if number in steps}
        return [pair for pair in pairs if pair[0] in ended or self._since.get(pair[0], launched) <= number]

    def rows(self, outputs: Any, done: torch.Tensor | None, requests: int) -> tuple[Any, Any]:
        """Return calls that read a step's rows of requests, and who was done before it: see `OutputCopies.rows`."""
        if not isinstance(outputs, torch.Tensor):
            raise ConfigError(
                f"tokens() needs a step that returns one tensor, got {type(outputs).__name__}: use outputs"
            )
        if not self._runner.cuts:
            raise ConfigError("tokens() needs rows of requests, and outputs are whole: set output_rows=")
        if requests and outputs.shape != (requests,):  # several rows or numbers for each request
            outputs = outputs.reshape(requests, -1).squeeze(1)
        rows = outputs.tolist
        if outputs.dim() == 1 and outputs.dtype in {torch.int64, torch.int32}:  # for ids, `tolist` takes twice as long
            rows = functools.partial(iter, outputs.numpy().data)
        return rows, None if done is None else done.numpy().tobytes

    def _forget_ended(self) -> None:
        """Forget requests that left before any step that can still be read."""
        self._ended = [one for one in self._ended if not self._is_overwritten(one[-1])]

    def leave(self, keys: SomeKeys, *, now: bool) -> None:
        """See `LaunchedStep.leave`."""
        gone = self._live_keys(keys, "leave({})")
        for key in gone:
            since = self._since.pop(key)
            for values in self._values.values():
                del values[key]
            if not now:
                self._ended.append((key, range(since, self.launched), self.launches - 1))
        for ragged in self._ragged.values():
            ragged.forget(gone)
        self.changed = self.launched
        self._chain.leave(gone)

    def join(self, batch: Any, keys: SomeKeys) -> None:
        """See `LaunchedStep.join`."""
        new = keys_in(keys, "join(batch, {})")
        self._check_goes_on()
        self._chain.join(batch, new)
        self._since.update(dict.fromkeys(new, self.launched))
        self.changed = self.launched
        self._note(new, batch)

    def edit(self, keys: SomeKeys, slots: Mapping[str, Any]) -> None:
        """See `LaunchedStep.edit`."""
        some = self._live_keys(keys, "edit({}, ...)")
        slots = self._runner.stage.declaration.by_slot(slots)
        self._chain.edit(some, slots)
        for name, rows in slots.items():
            self._note_rows(name, some, rows)

    def append(self, keys: SomeKeys, slots: Mapping[str, Any]) -> None:
        """See `LaunchedStep.append`."""
        some = self._live_keys(keys, "append({}, ...)")
        ragged = self._ragged
        slots = self._runner.stage.declaration.by_slot(slots)
        for name in slots:
            if name not in ragged:
                raise BatchError(f"append names {name!r}: name ragged slots that only the host writes, {[*ragged]}")
        appended = {name: ragged[name].appended(some, added) for name, added in slots.items()}
        for name, rows in appended.items():
            if rows:
                self._chain.edit(tuple(rows), {name: ragged[name].table(rows)})
                ragged[name].rows.update(rows)

    def needs(self, slot: str, steps: int | None) -> dict[Hashable, int]:
        """See `LaunchedStep.needs`."""
        if steps is None:
            steps = self._following
        checked("steps", "a number of steps, at least 1", steps, int, 1)
        if slot not in [*self._needs]:  # a list: `slot` may be unhashable
            raise ConfigError(f"slot {slot!r} is not predicted: name it when steps() begins, needs=[{slot!r}]")
        read, length = self._needs[slot]
        known = self._values[read]
        growth = self._growths[read]
        for key, value in known.items():
            if isinstance(value, tuple):
                step, values, row = value
                known[key] = int(values()[row]) - growth * step
        grown = growth * (self.launched + steps * self._chain.chunk_sizes[-1] - 1)
        found = {key: number + grown for key, number in known.items()}
        if not isinstance(length, Compute):
            return found
        numbers = np.array([*found.values()], np.int64)
        given = {SETTINGS: self._runner.stage.declaration.settings, read: numbers}
        lengths = np.asarray(length.function(**{need: given[need] for need in length.needs}))
        if lengths.shape != numbers.shape or lengths.dtype.kind not in "iu":
            raise ConfigError(f"slot {slot!r}: ragged= gives {lengths!r:.80}, not a whole number for each request")
        missing = np.maximum(lengths - [len(row) for row in map(self._ragged[slot].row, found)], 0)
        return dict(zip(found, missing.tolist(), strict=True))

    def hold(self, why: str) -> None:
        """See `LaunchedStep.hold`."""
        if not isinstance(why, str) or not why:
            refuse("hold", "a reason, such as 'grammar'", why)
        self._check_goes_on()
        self._hold_reason = why

    def _check_goes_on(self) -> None:
        """Raise BatchError if the loop has ended, so that no step would see what is said."""
        if self._has_ended:
            raise BatchError("these steps() have ended: begin again with all live requests")

    def _live_keys(self, keys: SomeKeys, call: str) -> Keys:
        """Return keys of live requests.

        Raise BatchError for a key of none, or one given twice, or if the loop has ended. call: As for `keys_in`.
        """
        self._check_goes_on()
        found = keys_in(keys, call)
        different = {*found}
        if len(different) != len(found):
            raise BatchError("one request is named twice: name each once")
        if not self._since.keys() >= different:
            key = next(key for key in found if key not in self._since)
            one = found in self._since
            instead = f"a key is one object: {call.format([found])}" if one else "it has left, or never joined"
            raise BatchError(f"there is no request {key!r}: {instead}")
        return found
