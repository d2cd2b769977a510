"""Debug modes that look at each step of a runner: they run it more often than asked, and raise where it goes wrong."""

import abc
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final

import torch

from ..dataflow import log
from ..dataflow.errors import CheckError, ConfigError
from ..dataflow.inputs import Inputs
from ..dataflow.sources import Side
from ..dataflow.tails import Pad, resolve_value
from .captured import Captured
from .holdings import Change
from .modes import ADDRESSES, PARITY, POISON, Wanted, modes_of, register
from .proofs import poison
from .proofs.addresses import readers
from .proofs.comparison import Tolerance, seen
from .proofs.eagerly import graph_of
from .proofs.parity import BITWISE, Twin, buffers_in, written_slots_kept
from .proofs.report import Case
from .proofs.state import state_on
from .proofs.together import Together
from .runner import Runner
from .state import State
from .watching import Watcher


class Prover(Watcher, abc.ABC):
    """Looks at each step that a graph takes, with what the step changes outside of its slots kept.

    runner: whose steps. state: what they change; found out on the first step of each bucket, where it is not given.
    copies: of the state that are made at once. Where there is no room for them the mode is off, and one event says so;
    a step that cannot be run under watch is passed over, with an event for each reason.
    """

    mode: ClassVar[str]
    copies: ClassVar[int]

    def __init__(self, runner: Runner[Any], state: State | None = None) -> None:
        self.runner = runner
        self._given = state
        self._found: dict[int, State] = {}
        self.off = False
        self._skipped: set[str] = set()
        self.together = Together(runner.parts)
        self.case: Case | None = None
        self._filled: tuple[Inputs, int] | None = None

    def before_fill(self, batch: Any, side: Side) -> None:
        """Keep the batch, to fill it anew where a look broke off."""
        self.case = Case(batch, side)

    def filled(self, view: Inputs) -> None:
        """Keep the view, beside which the runner refuses all others."""
        self._filled = view, self._others

    @property
    def _others(self) -> int:
        graphs = self.runner.parts.graphs
        return 0 if graphs is None else graphs.buffers.turn.others

    def before_replay(self, view: Inputs) -> None:
        """Look at a step before it runs, unless the runner is about to refuse it; all ranks do, or none."""
        refused = self._filled is not None and (view is not self._filled[0] or self._others != self._filled[1])
        graph = None if self.off or refused else graph_of(self.runner.parts, view)
        if self.together.any(graph is None):
            return
        state = self._state_for(view, graph)
        if state is not None:
            self.look(view, state)

    @abc.abstractmethod
    def look(self, view: Inputs, state: State) -> None:
        """Look at a step that is about to run, and leave its slots and state as they are."""

    def _state_for(self, view: Inputs, graph: Captured | None) -> State | None:
        """The state of a step; None where there is no room for copies, on some rank."""
        state = self._given or self._found.get(id(graph))
        is_sought = self.together.any(state is None)
        try:
            if is_sought:
                with written_slots_kept(buffers_in(self.runner.parts), every=True):
                    found = state_on(self.runner, view)
                state = self._found[id(graph)] = state or found
            if state is not None:
                state.check_room(self.copies)
        except CheckError as error:
            self.off, state = True, None
            log.warning("debug_off", runner=self.runner.parts.name, mode=self.mode, reason=str(error))
        except Exception as error:  # noqa: BLE001 - a step may not bear to be looked at, which is no fault of its graph
            state = None
            self._skip(f"{type(error).__name__}: {error}")
        return None if self.together.any(state is None) else state

    def _skip(self, reason: str) -> None:
        """Let a step pass that cannot be looked at, which may be a fault of its batch; one event for each reason."""
        if reason not in self._skipped:
            self._skipped.add(reason)
            log.warning("debug_skipped", runner=self.runner.parts.name, mode=self.mode, reason=reason)

    def judge(self, message: str) -> None:
        """CheckError, on all ranks, where a look found something on one of them: on this one, if there is a message."""
        first = self.together.first(message)
        if message:
            self._refuse(message)
        if first is not None:
            self._refuse(f"rank {first[0]} found: {first[1]}")

    def _refuse(self, message: str) -> None:
        """CheckError; nothing is believed of the buffers any more."""
        graphs = self.runner.parts.graphs
        if graphs is not None:
            graphs.buffers.distrust()
        told = f"debug mode {self.mode}: {message}"
        raise CheckError(told)


class AddressProver(Prover):
    """Looks whether what the step holds (closures, globals, attributes, weights) lies where it lay at capture."""

    mode = ADDRESSES
    copies = 1

    def __init__(self, runner: Runner[Any], state: State | None = None) -> None:
        super().__init__(runner, state)
        self._unread: set[tuple[int, str, int]] = set()
        graphs = runner.parts.graphs
        own = [] if graphs is None else [b for b in graphs.buffers if b.adopted and not (b.foreign or b.slot.rewritten)]
        self._exclusive = [buffer.name for buffer in own if isinstance(buffer.slot.rule(), Pad)]

    def before_replay(self, view: Inputs) -> None:
        """Look at the state only where something has moved, on some rank, which is rare."""
        if self._exclusive:
            self.judge(next((fault for name in self._exclusive if (fault := self._tail_fault(name, view))), ""))
        if self.together.any(bool(self._changes(view))):
            super().before_replay(view)

    def look(self, view: Inputs, state: State) -> None:
        """CheckError that names the tensor, and the operator that reads it."""
        changes = self._changes(view)
        self.judge(next(iter(readers(self.runner.parts, view, state, changes).values()), ""))
        self._unread.update(self._key(one, view) for one in changes)

    def _tail_fault(self, name: str, view: Inputs) -> str:
        """What is wrong with the tail of memory that nobody else was to write; nothing where it is as it must be."""
        tensor, info, stage = view.__dict__[name], view._slotgraph_view, self.runner.parts.stage  # noqa: SLF001 - a fill's
        slot = stage.declaration.slots[name]
        rule = slot.rule()
        if tensor is None or info is None or not isinstance(rule, Pad):
            return ""
        number = resolve_value(rule.value, stage.backend.capabilities, info.step.padded_sizes)
        for dim in slot.varying:
            live = slot.shape[dim].at(info.step.live_sizes)
            tail = tensor.narrow(dim, live, tensor.shape[dim] - live)
            if not bool(((tail == number) | ((tail != tail) & (number != number))).all()):  # noqa: PLR0124 - NaN
                return (
                    f"the tail of slot {name!r} does not hold {number}: something else writes its memory, which was "
                    f"adopted as Exclusive; adopt the tensor itself, so that its tail is reset in each step"
                )
        return ""

    def _changes(self, view: Inputs) -> list[Change]:
        """What has moved, but for what the graph of this step was found not to read."""
        graphs = self.runner.parts.graphs
        changes = [] if graphs is None else graphs.holdings.changed()
        return [one for one in changes if self._key(one, view) not in self._unread]

    def _key(self, change: Change, view: Inputs) -> tuple[int, str, int]:
        return id(graph_of(self.runner.parts, view)), change.holding.name, change.now.data_ptr()


class PoisonProver(Prover):
    """Replays each step with other values in its tails first: its live rows must not change."""

    mode = POISON
    copies = 1

    def look(self, view: Inputs, state: State) -> None:
        """CheckError that names the slot through whose tail a difference came."""
        found = poison.check_step(self.runner, view, (), state, self.case)
        self.judge(next((one.message for one in found), ""))


class ParityProver(Prover):
    """Runs each step as it is written first: its replay must give the same, bit by bit, or within tolerances."""

    mode = PARITY
    copies = Twin.COPIES

    def __init__(
        self,
        runner: Runner[Any],
        state: State | None = None,
        tolerance: Mapping[torch.dtype, Tolerance] = BITWISE,
    ) -> None:
        super().__init__(runner, state)
        self._tolerance = tolerance
        self._twin: Twin | None = None

    def look(self, view: Inputs, state: State) -> None:
        """Run the step; its replay is still to come."""
        twin, message = Twin(self.runner.parts, state, self._tolerance), ""
        try:
            twin.before(view)
        except Exception as error:  # noqa: BLE001 - whatever the step makes of its own view is a result
            message = f"the step raised {type(error).__name__}: {error} where its graph is replayed"
        self.judge(message)
        self._twin = twin

    def replayed(self, view: Inputs, outputs: Any) -> Any:
        """CheckError where the replay did otherwise."""
        twin, self._twin = self._twin, None
        if twin is not None:
            fault = twin.fault(view, seen(view, outputs))
            self.judge("" if fault is None else fault.message)
        return outputs

    def failed(self, error: BaseException) -> None:
        """The replay raised: there is nothing to compare."""
        del error
        self._twin = None


_PROVERS: Final[Mapping[str, type[Prover]]] = {
    ADDRESSES: AddressProver,
    POISON: PoisonProver,
    PARITY: ParityProver,
}
for _mode, _prover in _PROVERS.items():
    register(_mode, _prover)


@contextlib.contextmanager
def debugged(runner: Runner[Any], wanted: Wanted, state: Iterable[torch.Tensor] | None = None) -> Iterator[None]:
    """Have debug modes look at the steps of a captured runner for a while, whatever it was made with.

    wanted: `poison`, `parity` and `addresses`, as of the option `debug`; of the latter what needs no option at capture.
    state: tensors, or parts of them, that these steps change outside of their slots; found out where not given.
    Raises ConfigError for the other modes, which are part of how a runner is made.
    """
    modes = modes_of(wanted)
    others = sorted(modes - _PROVERS.keys())
    if others:
        message = f"debug mode {others[0]!r} is part of how a runner is made: give it debug={others[0]!r}"
        raise ConfigError(message)
    given = None if state is None else State.of(runner.parts.stage.backend, state)
    made = [prover(runner, given) for mode, prover in _PROVERS.items() if mode in modes]
    for watcher in made:
        runner.watch.add(watcher)
    try:
        yield
    finally:
        for watcher in made:
            runner.watch.remove(watcher)
