"""Debug modes that examine each step of a runner: they run it more often than asked, and raise if it goes wrong."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..dataflow import log
from ..dataflow.errors import CheckError, ConfigError, did_you_mean
from ..dataflow.inputs import Inputs
from ..dataflow.sources import Path, Side, keys_of
from ..dataflow.tails import Pad, resolve_value
from .check.memory import readers
from .check.replays import COPIES, parity_fault, poison_faults
from .check.trial import Finding, Trial, error_text, info_of, tails_of, unwatched
from .engine.bits import first_unequal
from .engine.config import ADDRESSES, GENERATIONS, KEYS, PARITY, POISON, Wanted, checked, checked_state, modes_of
from .engine.graphs import Captured
from .engine.hooks import WATCHERS, Watcher, watchers_of
from .engine.runner import ONE_RUNNER, Runner
from .engine.sampling import Sample
from .engine.state import Change, State


class Prover(Watcher):
    """Examines each step that a graph runs, and restores the state that the examination changes.

    If there is no memory for copies of the state, the mode turns itself off and logs one event. A step that cannot be
    watched is skipped, with one event for each reason.

    Attributes:
        trial: Runs the step again.
        off: Whether the mode is off.
    """

    def __init__(
        self,
        mode: str,
        look: Callable[[Any], Iterable[Finding]],
        copies: int,
        runner: Runner[Any],
        given: State | None = None,
    ) -> None:
        """Examine the steps of a runner.

        Args:
            mode: The debug mode.
            look: Returns the fault of the step of `trial`, which is about to run.
            copies: The number of copies of the state that `look` needs at once.
            runner: The runner.
            given: The state. By default it is found for each bucket.

        Raises:
            ConfigError: The runner has no graphs.
        """
        if runner.graphs is None:
            raise ConfigError(f"debug mode {mode} checks graphs, and this {runner.name} has none")
        self.trial = Trial(runner, runner.graphs)
        self.off = False
        self._mode = mode
        self._look = look
        self._copies = copies
        self._given = given
        self._found = dict[int, State]()
        self._skipped = set[str]()
        self._batch: Sample | None = None
        self._unread = set[tuple[int, str, int]]()

    def before_fill(self, batch: Any, side: Side) -> None:
        """Keep the batch, to fill it again if an examination ends early."""
        self._batch = Sample(batch, dict(side))

    def before_replay(self, view: Inputs) -> None:
        """Examine a step before it runs, on all ranks or on none. Skip a step that the runner will refuse."""
        trial = self.trial
        graph = None if self.off else trial.runner.graph_of(view)
        if trial.any(graph is None):
            return
        with unwatched(trial.runner.watch):
            trial.take(view, self._batch)
            state = self._state_of(graph)
            if state is not None:
                trial.state = state
                found = [*self._look(self)]
                self.judge(found[0].message if found else "")

    def _state_of(self, graph: Captured | None) -> State | None:
        """Return the state of the trial's step, or None if some rank has no room for copies."""
        state = self._given or self._found.get(id(graph))
        is_sought = self.trial.any(state is None)
        try:
            if state is None or is_sought:
                found = self.trial.find_state()
                state = self._found[id(graph)] = state or found
            state.check_room(self._copies)
        except CheckError as error:
            self.off = True
            state = None
            log.warning("debug_off", runner=self.trial.runner.name, mode=self._mode, reason=str(error))
        except Exception as error:  # noqa: BLE001 - a step may fail under watch although its graph is right
            state = None
            reason = error_text(error)
            if reason not in self._skipped:
                self._skipped.add(reason)
                log.warning("debug_skipped", runner=self.trial.runner.name, mode=self._mode, reason=reason)
        return None if self.trial.any(state is None) else state

    def judge(self, message: str) -> None:
        """Raise CheckError on all ranks if one of them found a fault. message: This rank's fault, or ""."""
        first = self.trial.first(message)
        if first is None:
            return
        self.trial.buffers.distrust()
        raise CheckError(f"debug mode {self._mode}: {message or f'rank {first[0]} found: {first[1]}'}")


class AddressProver(Prover):
    """Checks whether what the step uses (closures, globals, attributes, weights) has the addresses of the capture."""

    def before_replay(self, view: Inputs) -> None:
        """Examine the step only if memory has moved on some rank, which is rare."""
        fault = next(self._tail_faults(view), "")
        if self.trial.any(fault or self._changes(view)):
            self.judge(fault)
            super().before_replay(view)

    def read(self) -> Iterable[Finding]:
        """Return a finding for each tensor that has moved, with the operators that read it."""
        view = self.trial.view
        changes = self._changes(view)
        findings = readers(self.trial, changes)
        self._unread.update(self._key(one, view) for one in changes if one[0].name not in findings)
        return findings.values()

    def _tail_faults(self, view: Inputs) -> Iterator[str]:
        """Yield faults of tails in memory that only the runner may write."""
        capabilities = self.trial.backend.capabilities
        step = info_of(view).step
        for buffer in self.trial.buffers:
            slot = buffer.slot
            tensor = vars(view)[buffer.name]
            rule = buffer.slot.rule()
            is_own = buffer.adopted and not (buffer.foreign or slot.rewritten) and self.trial.is_filled(buffer.name)
            if tensor is None or not is_own or not isinstance(rule, Pad):
                continue
            number = resolve_value(rule.value, capabilities, step.padded_sizes)
            for tail in tails_of(slot, tensor, step):
                if first_unequal(tail, torch.full_like(tail, number)) is not None:
                    yield (
                        f"the tail of slot {buffer.name!r} does not hold {number}: something else writes its memory, "
                        "which was adopted as Exclusive; adopt the tensor itself, so that each step resets the tail"
                    )

    def _changes(self, view: Inputs) -> list[Change]:
        """Return the memory that has moved, except memory that the graph of this step is known not to read."""
        return [one for one in self.trial.graphs.holdings.changed() if self._key(one, view) not in self._unread]

    def _key(self, change: Change, view: Inputs) -> tuple[int, str, int]:
        return id(self.trial.runner.graph_of(view)), change[0].name, change[1].data_ptr()


class KeyWatcher(Watcher):
    """Logs each key of batches that no slot or field reads, once: as a warning if it resembles a name, else as info.

    Such a key is not refused, because a batch may have values for other code. If some source is a function, which may
    read any key, nothing is logged.
    """

    def __init__(self, runner: Runner[Any], *_: object) -> None:
        self.name, self.whole = runner.name, runner.stage.inputs.slotgraph
        firsts = (one.parts[0] if isinstance(one, Path) else "" for one in self.whole.sources.values())
        self.seen = {*self.whole.slots, *self.whole.fields, *firsts}

    def before_fill(self, batch: Any, side: Side) -> None:
        """Log new keys of this batch. Unread side arguments are refused elsewhere, in every mode."""
        del side
        for key in sorted(keys_of(batch) - self.seen) if "" not in self.seen else ():
            self.seen.add(key)
            if key.startswith("_") or callable(inspect.getattr_static(batch, key, None)):
                continue
            reason = f"the batch has {key!r}, which no slot reads"
            if near := did_you_mean(key, self.whole.slots):
                log.warning("misspelt_key", runner=self.name, reason=reason + near)
            else:
                log.info("unread_key", runner=self.name, reason=reason)


WATCHERS[KEYS] = KeyWatcher
WATCHERS[ADDRESSES] = functools.partial(AddressProver, ADDRESSES, AddressProver.read, 1)
WATCHERS[POISON] = functools.partial(Prover, POISON, lambda prover: poison_faults(prover.trial), 1)
WATCHERS[PARITY] = functools.partial(Prover, PARITY, lambda prover: filter(None, [parity_fault(prover.trial)]), COPIES)


@contextlib.contextmanager
def debugged(runner: Runner[Any], wanted: Wanted, state: Iterable[torch.Tensor] | None = None) -> Iterator[None]:
    """Turn on debug modes for the steps of a captured runner in a block, in addition to its own modes.

    Args:
        runner: The runner.
        wanted: As the option `debug`, without `generations`. `addresses` checks only what needs no option at capture.
        state: Tensors, or parts of them, that these steps change besides their slots. By default they are found.

    Raises:
        ConfigError: `generations` is named, which is part of how a runner is made.
    """
    checked("runner", ONE_RUNNER, runner, Runner)
    state = checked_state(state)
    modes = modes_of(wanted)
    if GENERATIONS in modes:
        raise ConfigError(f"debug mode {GENERATIONS!r} is part of how a runner is made: give it debug={GENERATIONS!r}")
    given = None if state is None else State.of(runner.stage.backend, state)
    made = watchers_of(runner, modes, given)
    for watcher in made:
        runner.watch.add(watcher)
    try:
        yield
    finally:
        for watcher in made:
            runner.watch.remove(watcher)
