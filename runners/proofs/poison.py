"""Poison: whatever lies in tails, live rows come out the same, bit by bit; and every fill leaves tails as declared."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, Generic

import torch

from ...dataflow.errors import ReplayError
from ...dataflow.slots import Output, Slot
from ...dataflow.tails import Keep, Pad
from ..bits import first_unequal
from ..runner import Runner
from ..stage import V
from .fills import FillProof
from .replays import Difference, Leaves, Replays, difference, named, unwatched
from .report import Case, Finding
from .state import State
from .tails import Poison, poison_of, spread, tail_rows, tails_of

POISON: Final = "poison"
ROWS: Final = 64
"""Rows of a guilty tail that are tried one by one."""
_NONE: Final[frozenset[str]] = frozenset()


def check(runner: Runner[V], cases: Iterable[Case], state: State, notes: dict[str, None], seed: int) -> list[Finding]:
    """Fill and replay each case with poison in its tails; cases that no graph takes are passed over.

    notes: what was left out is put here. A slot that was found guilty once is held to its rule from then on.
    """
    found: dict[str | None, Finding] = {}
    proof = FillProof(runner)
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
        if replays.lost or None in found:
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

    spared: slots that are held to their rules.
    """

    def __init__(self, replays: Replays[V], generator: torch.Generator, spared: Collection[str] = _NONE) -> None:
        self._replays = replays
        self._generator = generator
        self._spared = spared
        self._capabilities = replays.runner.parts.stage.backend.capabilities

    def findings(self) -> list[Finding]:
        """What is wrong with the step; nothing where its live rows hang on no tail."""
        replays = self._replays
        usual = replays.run()
        if isinstance(usual, Exception):
            return [Finding(POISON, None, f"the step raised {_error(usual)} on a batch that was filled as ever")]
        again = self._change(usual, replays.run())
        if again is not None:
            return [Finding(POISON, None, f"{_unsteady(again)}")]
        for poisoned in self._rounds():
            change = self._try(usual, poisoned)
            if change is not None:
                return self._guilty(usual, poisoned, change)
        return []

    def _rounds(self) -> Iterator[dict[str, torch.Tensor]]:
        """What to poison at once: all slots, twice; what may stop a device for good comes last, slot by slot."""
        yield self._poisoned(0)
        second = self._poisoned(1)
        apart = [name for name in second if _is_dangerous(self._replays.declared[name], second[name])]
        yield {name: tensor for name, tensor in second.items() if name not in apart}
        for name in apart:
            yield {name: second[name]}

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

    def _put(self, poisoned: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        def put() -> None:
            for name, tensor in poisoned.items():
                self._replays.slots[name].copy_(tensor)

        return put

    @staticmethod
    def _change(usual: Leaves, outcome: Leaves | Exception) -> "Difference | Exception | None":
        return outcome if isinstance(outcome, Exception) else difference(usual, outcome)

    def _guilty(
        self, usual: Leaves, poisoned: dict[str, torch.Tensor], change: Difference | Exception
    ) -> list[Finding]:
        """The slots through which the difference came: those that make one alone, else the fewest together."""
        if self._replays.lost:
            name = next(iter(poisoned)) if len(poisoned) == 1 else None
            tails = f"tails of slots {', '.join(map(repr, poisoned))}" if name is None else f"tail of slot {name!r}"
            lost = "nothing could be replayed after that, on which slots are told apart"
            return [Finding(POISON, name, f"{_changed(change)} when the {tails} held poison; {lost}")]
        found = []
        for name, tensor in poisoned.items():
            alone = self._try(usual, {name: tensor})
            if alone is not None:
                found.append(Finding(POISON, name, self._told(name, usual, tensor, alone)))
        if found:
            return found
        names = list(poisoned)
        for name in poisoned:
            rest = [one for one in names if one != name]
            if rest and self._try(usual, {one: poisoned[one] for one in rest}) is not None:
                names = rest
        slots = ", ".join(map(repr, names))
        return [Finding(POISON, None, f"{_changed(change)} when the tails of slots {slots} held other values together")]

    def _try(self, usual: Leaves, poisoned: Mapping[str, torch.Tensor]) -> Difference | Exception | None:
        return self._change(usual, self._replays.run(self._put(poisoned)))

    def _told(self, name: str, usual: Leaves, poisoned: torch.Tensor, change: Difference | Exception) -> str:
        """What changed when the tail of a slot held what; the first row of it that does so by itself is named."""
        replays = self._replays
        slot, filled = replays.declared[name], replays.filled[name]
        if isinstance(slot, Output):
            return (
                f"{_changed(change)} when output slot {name!r} held {_values(poisoned, filled)} before the step: it "
                "must write every live row that it returns, and add to none"
            )
        place, now, before = f"the tail of slot {name!r}", poisoned, filled
        rows = zip(tail_rows(slot, poisoned, replays.step), tail_rows(slot, filled, replays.step), strict=True)
        for (row, one), (_, other) in itertools.islice(rows, ROWS):
            only = filled.clone()
            next(part for label, part in tail_rows(slot, only, replays.step) if label == row).copy_(one)
            alone = self._try(usual, {name: only}) if first_unequal(one, other) is not None else None
            if alone is not None:
                place, now, before, change = f"{row}, in the tail of slot {name!r},", one, other, alone
                break
        return f"{_changed(change)} when {place} held {_values(now, before)}: {_way_out(slot)}"


def _is_dangerous(slot: Slot, poisoned: torch.Tensor) -> bool:
    """Whether poison lies outside of all tables that a slot may index: what reads it stops the device."""
    whole = not (poisoned.dtype.is_floating_point or poisoned.dtype.is_complex or poisoned.dtype == torch.bool)
    return whole and isinstance(slot.rule(), Keep) and slot.bears() is None


def _changed(change: Difference | Exception) -> str:
    if isinstance(change, Exception):
        return f"the step raised {_error(change)}"
    return f"{change} changed, from {change.before} to {change.after},"


def _error(error: BaseException) -> str:
    if isinstance(error, ReplayError) and error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _values(now: torch.Tensor, before: torch.Tensor) -> str:
    """The first value that differs, and what it stands in place of."""
    place = first_unequal(before, now)
    return "other values" if place is None else f"{now[place].item()} instead of {before[place].item()}"


def _way_out(slot: Slot) -> str:
    rule = slot.rule()
    if isinstance(rule, Keep):
        return (
            f"its tail is kept for {rule.reason!r}, but something reads it; say pad=value, or poison='stale' if it "
            "need only bear what live rows had"
        )
    return "keep padded rows out of live ones, or say what its tail bears, poison=(...), nothing being ()"


def _unsteady(change: Difference | Exception) -> str:
    return (
        f"the step gives other outputs for the same inputs ({_changed(change).rstrip(',')}): its kernels are not "
        "deterministic, or it has state that no operator's schema tells; pass that as state=[...]"
    )
