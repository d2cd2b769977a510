"""Blame: the slot, its row and the rank through whose tail a difference comes, by replays with less and less poison."""

import itertools
from collections.abc import Callable, Mapping
from typing import Final, Generic, TypeAlias

import attrs
import torch

from ...dataflow.errors import ReplayError
from ...dataflow.slots import Output, Slot
from ...dataflow.tails import Keep
from ..bits import first_unequal
from ..stage import V
from .replays import Difference, Leaves, Replays, difference
from .report import Finding
from .tails import tail_rows
from .together import Together

POISON: Final = "poison"
ROWS: Final = 64
"""Rows of a guilty tail that are tried one by one."""
Poisoned: TypeAlias = Mapping[str, torch.Tensor]
"""What slots hold with poison in their tails."""


@attrs.frozen
class Elsewhere:
    """What changed on another rank, in its words."""

    rank: int
    told: str


Change: TypeAlias = Difference | Exception | Elsewhere


@attrs.frozen(eq=False)
class Trials(Generic[V]):
    """Replays with poison, held to the usual outputs. Several ranks run each at once, with poison of their own."""

    replays: Replays[V]
    usual: Leaves
    together: Together

    def run(self, poisoned: Poisoned) -> Change | None:
        """What it changes on this rank, else on another one; None, on all alike, where it changes nothing."""
        outcome = self.replays.run(self._put(poisoned))
        own = outcome if isinstance(outcome, Exception) else difference(self.usual, outcome)
        first = self.together.first("" if own is None else changed(own))
        return own if own is not None or first is None else Elsewhere(first[0], first[1])

    def _put(self, poisoned: Poisoned) -> Callable[[], None]:
        def put() -> None:
            for name, tensor in poisoned.items():
                self.replays.slots[name].copy_(tensor)

        return put


class Blame(Generic[V]):
    """Tells apart what was poisoned at once when something changed: slots, rows of one slot, ranks.

    Ranks go through it together, slot by slot and row by row, whether they have poison there or not.
    """

    def __init__(self, trials: Trials[V]) -> None:
        self._trials = trials
        self._replays = trials.replays
        self._together = trials.together

    def findings(self, poisoned: Poisoned, change: Change) -> list[Finding]:
        """The slots that make a difference alone, else the fewest together; those of this rank."""
        if self._together.any(self._replays.lost):
            return self._lost(poisoned, change)
        names = [name for name in self._replays.declared if self._together.any(name in poisoned)]
        found, is_found = list[Finding](), False
        for name in names:
            alone = self._trials.run(_of(poisoned, [name]))
            if alone is not None:
                is_found = True
                found += self._of_slot(name, poisoned.get(name), alone)
        return found if is_found else self._several(names, poisoned, change)

    def _lost(self, poisoned: Poisoned, change: Change) -> list[Finding]:
        if not poisoned:
            return []
        name = next(iter(poisoned)) if len(poisoned) == 1 else None
        tails = f"tails of slots {', '.join(map(repr, poisoned))}" if name is None else f"tail of slot {name!r}"
        lost = "nothing could be replayed after that, on which slots are told apart"
        return [Finding(POISON, name, f"{changed(change)} when the {tails} held poison; {lost}")]

    def _several(self, names: list[str], poisoned: Poisoned, change: Change) -> list[Finding]:
        kept = names
        for name in names:
            rest = [one for one in kept if one != name]
            if rest and self._trials.run(_of(poisoned, rest)) is not None:
                kept = rest
        if not _of(poisoned, kept):
            return []
        slots = ", ".join(map(repr, kept))
        return [Finding(POISON, None, f"{changed(change)} when the tails of slots {slots} held other values together")]

    def _of_slot(self, name: str, poisoned: torch.Tensor | None, change: Change) -> list[Finding]:
        """What changed when the tail of a slot held what; the first row of it that does so by itself is named."""
        slot, filled = self._replays.declared[name], self._replays.filled.get(name)
        place, now, before = f"the tail of slot {name!r}", poisoned, filled
        rows = () if isinstance(slot, Output) else tail_rows(slot, self._replays.step, self._together.least)
        for where, dim, row in itertools.islice(rows, ROWS):
            only = _only(poisoned, filled, dim, row)
            if not self._together.any(only is not None):
                continue
            alone = self._trials.run({} if only is None else {name: only})
            if alone is not None:
                place, now, before, change = f"{where}, in the tail of slot {name!r},", only, filled, alone
                break
        own = self._own({} if now is None else {name: now}, change)
        if own is None or now is None or before is None:
            return []
        if isinstance(slot, Output):
            place = f"output slot {name!r}"
            rest = " before the step: it must write every live row that it returns, and add to none"
        else:
            rest = f": {_way_out(slot)}"
        return [Finding(POISON, name, f"{changed(own)} when {place} held {_values(now, before)}{rest}")]

    def _own(self, mine: Poisoned, change: Change) -> Change | None:
        """What changes when this rank alone has the poison; None where another rank's makes the difference.

        Ranks are not tried one by one where a step raises, since the others may wait in it for one that does not come:
        those are to blame that raised with poison of their own.
        """
        together, raised = self._together, isinstance(change, Exception)
        if together.size == 1:
            return change
        if together.any(raised):
            is_own = together.any(raised and bool(mine))
            return change if mine and (raised or not is_own) else None
        alone = [self._trials.run(mine if rank == together.rank else {}) for rank in range(together.size)]
        if all(one is None for one in alone):  # several ranks' together
            return change if mine else None
        return alone[together.rank]


def changed(change: Change) -> str:
    """A change in words."""
    if isinstance(change, Elsewhere):
        return f"on rank {change.rank} {change.told}"
    if isinstance(change, Exception):
        return f"the step raised {error_text(change)}"
    return f"{change} changed, from {change.before} to {change.after},"


def error_text(error: BaseException) -> str:
    """What a step raised, in a line."""
    if isinstance(error, ReplayError) and error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _of(poisoned: Poisoned, names: list[str]) -> Poisoned:
    return {name: poisoned[name] for name in names if name in poisoned}


def _only(poisoned: torch.Tensor | None, filled: torch.Tensor | None, dim: int, row: int) -> torch.Tensor | None:
    """A slot with poison in one row alone; None where that row is no other with it."""
    if poisoned is None or filled is None:
        return None
    one, other = poisoned.select(dim, row), filled.select(dim, row)
    if first_unequal(one, other) is None:
        return None
    only = filled.clone()
    only.select(dim, row).copy_(one)
    return only


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
