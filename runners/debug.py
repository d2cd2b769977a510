"""Debug modes that look at each step of a runner: they run it more often than asked, and raise if it goes wrong."""

import abc
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch

from ..dataflow import log
from ..dataflow.errors import CheckError, ConfigError
from ..dataflow.inputs import Inputs
from ..dataflow.sampling import Sample
from ..dataflow.sources import Side
from ..dataflow.tails import Pad, resolve_value
from .capture import Captured
from .check.memory import readers
from .check.replays import COPIES, Poisoning, parity_fault
from .check.trial import Together, Trial, unwatched
from .comparison import graph_of, info_of, state_on, tails_of
from .config import ADDRESSES, PARITY, POISON, Wanted, modes_of
from .hooks import WATCHERS, Watcher, watchers_of
from .runner import Runner
from .state import Change, State


class Prover(Watcher, abc.ABC):
    """Looks at each step that a graph takes, and keeps what the step changes outside of its slots.

    If there is no room for copies of the state, the mode is off, and one event says so. A step that cannot be run under
    watch is passed over, with an event for each reason.

    Args:
        runner: The runner.
        state: What its steps change. By default it is found on the first step of each bucket.
    """

    mode: ClassVar[str]
    copies: ClassVar[int] = 1  # of the state, at once

    def __init__(self, runner: Runner[Any], state: State | None = None) -> None:
        self.runner = runner
        self.off = False
        self.together = Together(runner.coordinator)
        self._given = state
        self._found: dict[int, State] = {}
        self._skipped: set[str] = set()
        self._batch: Sample | None = None
        self._filled: tuple[Inputs, int] | None = None

    @abc.abstractmethod
    def look(self, trial: Trial[Any]) -> str:
        """What is wrong with a step that is about to run."""

    def before_fill(self, batch: Any, side: Side) -> None:
        """Keep the batch, to fill it anew after a look that broke off."""
        self._batch = Sample(batch, dict(side))

    def filled(self, view: Inputs) -> None:
        """Keep the view. The runner refuses all others."""
        self._filled = view, self._others

    @property
    def _others(self) -> int:
        graphs = self.runner.graphs
        return 0 if graphs is None else graphs.buffers.turn.others

    def before_replay(self, view: Inputs) -> None:
        """Look at a step before it runs, unless the runner is about to refuse it. All ranks do, or none."""
        refused = self._filled is not None and (view is not self._filled[0] or self._others != self._filled[1])
        graph = None if self.off or refused else graph_of(self.runner, view)
        if self.together.any(graph is None):
            return
        state = self._state_for(view, graph)
        if state is not None:
            with unwatched(self.runner.watch):
                message = self.look(Trial(self.runner, view, state, self._batch))
            self.judge(message)

    def _state_for(self, view: Inputs, graph: Captured | None) -> State | None:
        """The state of a step. None if there is no room for copies, on some rank."""
        state = self._given or self._found.get(id(graph))
        is_sought = self.together.any(state is None)
        try:
            if is_sought:
                found = state_on(self.runner, view)
                state = self._found[id(graph)] = state or found
            if state is not None:
                state.check_room(self.copies)
        except CheckError as error:
            self.off, state = True, None
            log.warning("debug_off", runner=self.runner.name, mode=self.mode, reason=str(error))
        except Exception as error:  # noqa: BLE001 - a step may not bear to be looked at, which is no fault of its graph
            state, reason = None, f"{type(error).__name__}: {error}"
            if reason not in self._skipped:
                self._skipped.add(reason)
                log.warning("debug_skipped", runner=self.runner.name, mode=self.mode, reason=reason)
        return None if self.together.any(state is None) else state

    def judge(self, message: str) -> None:
        """Raise CheckError on all ranks if a look found something on one of them: this one, if there is a message."""
        first = self.together.first(message)
        if first is None:
            return
        if self.runner.graphs is not None:
            self.runner.graphs.buffers.distrust()
        raise CheckError(f"debug mode {self.mode}: {message or f'rank {first[0]} found: {first[1]}'}")


class AddressProver(Prover):
    """Looks whether what the step holds (closures, globals, attributes, weights) lies where it lay at capture."""

    mode = ADDRESSES

    def __init__(self, runner: Runner[Any], state: State | None = None) -> None:
        super().__init__(runner, state)
        self._unread: set[tuple[int, str, int]] = set()
        graphs = runner.graphs
        own = [] if graphs is None else [b for b in graphs.buffers if b.adopted and not (b.foreign or b.slot.rewritten)]
        self._exclusive = [buffer.name for buffer in own if isinstance(buffer.slot.rule(), Pad)]

    def before_replay(self, view: Inputs) -> None:
        """Look at the state only if something has moved, on some rank, which is rare."""
        if self._exclusive:
            self.judge(next((fault for name in self._exclusive if (fault := self._tail_fault(name, view))), ""))
        if self.together.any(bool(self._changes(view))):
            super().before_replay(view)

    def look(self, trial: Trial[Any]) -> str:
        """Name the tensor, and the operator that reads it."""
        changes = self._changes(trial.view)
        told = readers(trial, changes)
        self._unread.update(self._key(one, trial.view) for one in changes if one.holding.name not in told)
        return next(iter(told.values()), "")

    def _tail_fault(self, name: str, view: Inputs) -> str:
        """What is wrong with the tail of memory that nobody else was to write. Empty if it is as it must be."""
        tensor, stage, step = vars(view)[name], self.runner.stage, info_of(view).step
        slot = stage.declaration.slots[name]
        rule = slot.rule()
        if tensor is None or not isinstance(rule, Pad):
            return ""
        number = resolve_value(rule.value, stage.backend.capabilities, step.padded_sizes)
        for tail in tails_of(slot, tensor, step):
            if not bool(((tail == number) | ((tail != tail) & (number != number))).all()):  # noqa: PLR0124 - NaN
                return (
                    f"the tail of slot {name!r} does not hold {number}: something else writes its memory, which was "
                    f"adopted as Exclusive; adopt the tensor itself, so that its tail is reset in each step"
                )
        return ""

    def _changes(self, view: Inputs) -> list[Change]:
        """What has moved, but for what the graph of this step was found not to read."""
        graphs = self.runner.graphs
        changes = [] if graphs is None else graphs.holdings.changed()
        return [one for one in changes if self._key(one, view) not in self._unread]

    def _key(self, change: Change, view: Inputs) -> tuple[int, str, int]:
        return id(graph_of(self.runner, view)), change.holding.name, change.now.data_ptr()


class PoisonProver(Prover):
    """Replays each step with other values in its tails first: its live rows must not change."""

    mode = POISON

    def look(self, trial: Trial[Any]) -> str:
        """Name the slot through whose tail a difference came."""
        return next((one.message for one in Poisoning(trial).findings()), "")


class ParityProver(Prover):
    """Runs each step as it is written first, and replays it beside that: both must do the same, bit by bit."""

    mode = PARITY
    copies = COPIES

    def look(self, trial: Trial[Any]) -> str:
        """Tell what the replay did otherwise."""
        return next((one.message for one in [parity_fault(trial)] if one is not None), "")


WATCHERS.update({one.mode: one for one in (AddressProver, PoisonProver, ParityProver)})


@contextlib.contextmanager
def debugged(runner: Runner[Any], wanted: Wanted, state: Iterable[torch.Tensor] | None = None) -> Iterator[None]:
    """Have debug modes look at the steps of a captured runner for a while, whatever it was made with.

    wanted: `poison`, `parity` and `addresses`, as of the option `debug`; of the latter what needs no option at capture.
    state: tensors, or parts of them, that these steps change outside of their slots; found out where not given.
    Raises ConfigError for the other modes, which are part of how a runner is made.
    """
    modes = modes_of(wanted)
    others = sorted(modes - WATCHERS.keys())
    if others:
        raise ConfigError(f"debug mode {others[0]!r} is part of how a runner is made: give it debug={others[0]!r}")
    given = None if state is None else State.of(runner.stage.backend, state)
    made = watchers_of(runner, modes, given)
    for watcher in made:
        runner.watch.add(watcher)
    try:
        yield
    finally:
        for watcher in made:
            runner.watch.remove(watcher)
