"""Poison: whatever lies in tails, live rows come out the same, bit by bit; and every fill leaves tails as declared."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final, Generic

import torch

from ...dataflow.slots import Output, Slot
from ...dataflow.tails import Keep, Pad
from ..bits import first_unequal
from ..runner import Runner
from ..stage import V
from ..state import State
from .blame import POISON, Blame, Elsewhere, Poisoned, Trials, changed, error_text
from .fills import FillProof
from .replays import Difference, Replays, named, unwatched
from .report import Case, Finding
from .tails import Poison, poison_of, spread, tails_of
from .together import Together

_NONE: Final[frozenset[str]] = frozenset()


def check(runner: Runner[V], cases: Iterable[Case], state: State, notes: dict[str, None], seed: int) -> list[Finding]:
    """Fill and replay each case with poison in its tails; cases that no graph takes are passed over.

    notes: what was left out is put here. A slot that was found guilty once is held to its rule from then on.
    """
    found: dict[str | None, Finding] = {}
    proof, together = FillProof(runner), Together(runner.parts)
    for index, case in enumerate(cases):
        if runner.decide(case.batch, **case.side).bucket is None:
            continue
        for finding in proof.check(case, state, torch.Generator().manual_seed(seed + index)):
            found.setdefault(finding.slot, finding)
        replays = Replays(runner, runner.fill(case.batch, **case.side), state, case)
        poisoning = Poisoning(replays, torch.Generator().manual_seed(seed + index), {name for name in found if name})
        for finding in poisoning.findings():
            found.setdefault(finding.slot, finding)
        notes.update(dict.fromkeys(poisoning.notes()))
        if together.any(replays.lost or None in found):
            break
    return list(found.values())


def check_step(
    runner: Runner[V], view: V, outputs: Any, state: State, case: Case | None = None, seed: int = 0
) -> list[Finding]:
    """The same for the step that was run last, which is replayed several times more, its outputs then put back.

    case: the batch that the view was filled from, without which a step that raises is not told apart by slot.
    """
    kept = State.of(runner.parts.stage.backend, [tensor for _, tensor in named(outputs)])
    with unwatched(runner.watch), kept.kept():
        replays = Replays(runner, view, state, case)
        return Poisoning(replays, torch.Generator().manual_seed(seed)).findings()


class Poisoning(Generic[V]):
    """Poisons the tails of one filled step, and looks for the slot through which a difference comes.

    spared: slots that are held to their rules. Of several ranks all poison their tails at once, and look at the live
    rows of all: what padding of one does to another through a collective is found, too.
    """

    def __init__(self, replays: Replays[V], generator: torch.Generator, spared: Collection[str] = _NONE) -> None:
        self._replays = replays
        self._generator = generator
        self._spared = spared
        self._together = Together(replays.runner.parts)
        self._capabilities = replays.runner.parts.stage.backend.capabilities

    def findings(self) -> list[Finding]:
        """What is wrong with the step; nothing where its live rows hang on no tail."""
        replays, together = self._replays, self._together
        usual = replays.run()
        if isinstance(usual, Exception):
            together.any(one=True)
            return [Finding(POISON, None, f"the step raised {error_text(usual)} on a batch that was filled as ever")]
        if together.any(one=False):
            return []
        trials = Trials(replays, usual, together)
        again = trials.run({})
        if again is not None:
            return [] if isinstance(again, Elsewhere) else [Finding(POISON, None, _unsteady(again))]
        for poisoned in self._rounds():
            change = trials.run(poisoned)
            if change is not None:
                return Blame(trials).findings(poisoned, change)
        return []

    def _rounds(self) -> Iterator[Poisoned]:
        """What to poison at once: all slots, twice; what may stop a device for good comes last, slot by slot."""
        yield self._poisoned(0)
        second, declared = self._poisoned(1), self._replays.declared
        unread = [name for name, slot in declared.items() if isinstance(slot.rule(), Keep) and slot.bears() is None]
        apart = [name for name in unread if self._together.any(name in second and _is_whole(second[name]))]
        yield {name: tensor for name, tensor in second.items() if name not in apart}
        for name in apart:
            yield {name: second[name]} if name in second else {}

    def notes(self) -> Iterator[str]:
        """Slots whose tails were held to their rules, though they have a tail."""
        for name, slot, tails in self._tails():
            held = not isinstance(slot.rule(), Keep) or slot.bears() is not None
            if tails and held and self._poison(name, slot) is None:
                why = "it says poison=()" if slot.bears() == () else "it says where the step writes"
                yield f"slot {name!r} was held to its {slot.rule()}: {why}"

    def _tails(self) -> Iterator[tuple[str, Slot, list[torch.Tensor]]]:
        replays = self._replays
        for name, tensor in replays.slots.items():
            slot = replays.declared[name]
            if isinstance(slot.rule(), Pad | Keep):
                yield name, slot, list(tails_of(slot, tensor, replays.step))

    def _poison(self, name: str, slot: Slot) -> Poison | None:
        return poison_of(slot, self._replays.filled[name], self._replays.step, self._capabilities)

    def _poisoned(self, turn: int) -> dict[str, torch.Tensor]:
        """What slots hold with poison in their tails, where that differs from what they hold without."""
        made = {}
        for name, filled in self._replays.filled.items():
            slot = self._replays.declared[name]
            poison = None if name in self._spared else self._poison(name, slot)
            if poison is None:
                continue
            values = (poison.first, poison.second)[turn]
            tensor = filled.clone()
            parts = [tensor] if isinstance(slot, Output) else tails_of(slot, tensor, self._replays.step)
            for part in parts:
                part.copy_(spread(values, part, self._generator))
            if first_unequal(filled, tensor) is not None:
                made[name] = tensor
        return made


def _is_whole(poisoned: torch.Tensor) -> bool:
    """Whether poison that nobody may read lies outside of all tables that it could index: that stops the device."""
    return not (poisoned.dtype.is_floating_point or poisoned.dtype.is_complex or poisoned.dtype == torch.bool)


def _unsteady(change: Difference | Exception) -> str:
    return (
        f"the step gives other outputs for the same inputs ({changed(change).rstrip(',')}): its kernels are not "
        "deterministic, or it has state that no operator's schema tells; pass that as state=[...]"
    )
