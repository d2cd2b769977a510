"""Poison: whatever lies in tails, live rows come out the same, bit by bit, and every fill leaves tails as declared.

Of several ranks all poison their tails at once, and look at the live rows of all. So padding of one rank that reaches
another through a collective is found, too.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final

import attrs
import torch

from ...dataflow.axes import BATCH, TOKENS
from ...dataflow.errors import ReplayError
from ...dataflow.slots import Output, Slot
from ...dataflow.tails import Keep, Pad
from ..bits import first_unequal
from ..stacked.runner import StackRunner
from .batches import CheckedBatch
from .comparison import Mismatch, copies, mismatches
from .fills import unlike_oracle
from .report import Finding
from .tails import poison_of, poisoned, tail_rows, tails_of
from .trial import NOTHING, Subject, Tensors, Trial

NAME: Final = "poison"
ROWS: Final = 64
"""Rows of a guilty tail that are tried one by one."""


def check(subject: Subject[Any], batches: Iterable[CheckedBatch]) -> list[Finding]:
    """Fill and replay each batch with poison in its tails.

    A slot that was found guilty once is held to its rule from then on.
    """
    found: dict[str | None, Finding] = {}
    for number, one in enumerate(batches):
        for finding in unlike_oracle(subject, one, torch.Generator().manual_seed(subject.seed + number)):
            found.setdefault(finding.slot, finding)
        trial = subject.trial(one)
        poisoning = Poisoning(trial, subject.seed + number, {name for name in found if name})
        for finding in poisoning.findings():
            found.setdefault(finding.slot, finding)
        subject.notes.update(dict.fromkeys(poisoning.notes()))
        if subject.together.any(trial.lost or None in found):
            break
    return list(found.values())


@attrs.frozen
class Effect:
    """What poison changed."""

    told: str
    raised: bool = False  # the step raised
    is_own: bool = True  # on this rank


class Poisoning:
    """Poisons the tails of one filled step, and looks for the slot, row and rank through which a difference comes.

    Ranks go through it together, slot by slot and row by row, whether they have poison there or not.

    Args:
        trial: The step.
        seed: Where the choice of values begins.
        spared: Slots that are held to their rules.
    """

    def __init__(self, trial: Trial[Any], seed: int = 0, spared: Collection[str] = ()) -> None:
        self._trial, self._together = trial, trial.together
        self._generator = torch.Generator().manual_seed(seed)
        self._spared = spared
        capabilities = trial.parts.stage.backend.capabilities
        self._poisons = {
            name: poison_of(trial.declared[name], filled, trial.step, capabilities)
            for name, filled in trial.filled.items()
        }
        self._usual: Tensors = NOTHING

    def findings(self) -> list[Finding]:
        """What is wrong with the step. Nothing if its live rows depend on no tail."""
        usual = self._trial.run(self._live)
        if isinstance(usual, Exception):
            return [Finding(NAME, None, f"the step raised {error_text(usual)} on a batch that was filled as ever")]
        if self._trial.raised:
            return []
        self._usual = usual
        again = self._try(NOTHING)
        if again is not None:
            return [Finding(NAME, None, _unsteady(again))] if again.is_own else []
        for poison in self._rounds():
            effect = self._try(poison)
            if effect is not None:
                return self._blamed(poison, effect)
        return []

    def notes(self) -> Iterator[str]:
        """Slots whose tails were held to their rules, though they have a tail."""
        for name, tensor in self._trial.slots.items():
            slot = self._trial.declared[name]
            held = isinstance(slot.rule(), Pad) or (isinstance(slot.rule(), Keep) and slot.poison is not None)
            if held and self._poisons[name] is None and any(True for _ in tails_of(slot, tensor, self._trial.step)):
                why = "it says poison=()" if slot.poison == () else "it says where the step writes"
                yield f"slot {name!r} was held to its {slot.rule()}: {why}"

    def _rounds(self) -> Iterator[Tensors]:
        """What to poison at once: all slots, twice. What may stop a device for good comes last, slot by slot."""
        first, second = (self._poisoned(turn) for turn in (0, 1))
        yield first
        declared = self._trial.declared
        unread = [name for name, slot in declared.items() if isinstance(slot.rule(), Keep) and slot.poison is None]
        apart = [name for name in unread if self._together.any(name in second and _is_whole(second[name]))]
        yield {name: tensor for name, tensor in second.items() if name not in apart}
        for name in apart:
            yield _of(second, [name])

    def _poisoned(self, turn: int) -> dict[str, torch.Tensor]:
        """What slots hold with poison in their tails, if that differs from what they hold without."""
        trial, made = self._trial, dict[str, torch.Tensor]()
        for name, filled in trial.filled.items():
            poison = None if name in self._spared else self._poisons[name]
            tensor = poisoned(trial.declared[name], filled, poison, turn, trial.step, self._generator)
            if tensor is not None:
                made[name] = tensor
        return made

    def _live(self, outputs: Any) -> Tensors:
        """The live rows of outputs. Their sizes tell whether they were handed out with padded ones."""
        found, step = copies(outputs, "output"), self._trial.step
        for name, tensor in found.items() if _hands_out_padding(self._trial) else ():
            for axis in (TOKENS, BATCH):
                if tensor.dim() and tensor.shape[0] == step.padded_sizes.get(axis):
                    found[name] = tensor[: step.live_sizes[axis]]
                    break
        return found

    def _try(self, poison: Tensors) -> Effect | None:
        """What poison changes on this rank, else on another one. None, on all alike, if it changes nothing."""
        found, own = self._trial.run(self._live, poison), None
        if isinstance(found, Exception):
            own = Effect(f"the step raised {error_text(found)}", raised=True)
        else:
            apart = next(mismatches(self._usual, found), None)
            own = None if apart is None else Effect(_changed(apart))
        first = self._together.first("" if own is None else own.told)
        return own if own is not None or first is None else Effect(f"on rank {first[0]} {first[1]}", is_own=False)

    def _blamed(self, poison: Tensors, effect: Effect) -> list[Finding]:
        """The slots that make a difference alone, else the fewest together; those of this rank."""
        if self._together.any(self._trial.lost):
            one = next(iter(poison)) if len(poison) == 1 else None
            tails = f"tails of slots {', '.join(map(repr, poison))}" if one is None else f"tail of slot {one!r}"
            lost = "nothing could be replayed after that, on which slots are told apart"
            return [Finding(NAME, one, f"{effect.told} when the {tails} held poison; {lost}")] if poison else []
        names = [name for name in self._trial.declared if self._together.any(name in poison)]
        alone = {name: self._try(_of(poison, [name])) for name in names}
        guilty = {name: one for name, one in alone.items() if one is not None}
        if guilty:
            return [found for name, one in guilty.items() for found in self._of_slot(name, poison.get(name), one)]
        for name in names:
            rest = [one for one in names if one != name]
            if rest and self._try(_of(poison, rest)) is not None:
                names = rest
        if not _of(poison, names):
            return []
        slots = ", ".join(map(repr, names))
        return [Finding(NAME, None, f"{effect.told} when the tails of slots {slots} held other values together")]

    def _of_slot(self, name: str, now: torch.Tensor | None, effect: Effect) -> list[Finding]:
        """What changed when the tail of a slot held what. The first row of it that does so by itself is named."""
        slot, before = self._trial.declared[name], self._trial.filled.get(name)
        place = f"the tail of slot {name!r}"
        rows = () if isinstance(slot, Output) else tail_rows(slot, self._trial.step, self._together.least)
        for where, dim, row in itertools.islice(rows, ROWS):
            only = _only(now, before, dim, row)
            if not self._together.any(only is not None):
                continue
            alone = self._try(NOTHING if only is None else {name: only})
            if alone is not None:
                place, now, effect = f"{where}, in the tail of slot {name!r},", only, alone
                break
        own = self._own(NOTHING if now is None else {name: now}, effect)
        if own is None or now is None or before is None:
            return []
        if isinstance(slot, Output):
            place = f"output slot {name!r}"
            rest = " before the step: it must write every live row that it returns, and add to none"
        else:
            rest = f": {_way_out(slot)}"
        return [Finding(NAME, name, f"{own.told} when {place} held {_values(now, before)}{rest}")]

    def _own(self, mine: Tensors, effect: Effect) -> Effect | None:
        """What changes when this rank alone has the poison. None if another rank's makes the difference.

        If a step raises, ranks are not tried one by one, since the others may wait in it for one that does not come.
        Those are to blame that raised with poison of their own.
        """
        together, ranks = self._together, self._together.ranks
        if ranks.size == 1:
            return effect
        if together.any(effect.raised):
            is_own = together.any(effect.raised and bool(mine))
            return effect if mine and (effect.raised or not is_own) else None
        alone = [self._try(mine if rank == ranks.rank else NOTHING) for rank in range(ranks.size)]
        if all(one is None for one in alone):  # several ranks' together
            return effect if mine else None
        return alone[ranks.rank]


def error_text(error: BaseException) -> str:
    """What a step raised, in a line."""
    if isinstance(error, ReplayError) and error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _changed(apart: Mismatch) -> str:
    where = f"the {apart.where}" if apart.row is None else f"live row {apart.row} of the {apart.where}"
    return f"{where} changed, from {apart.values[0]} to {apart.values[1]},"


def _hands_out_padding(trial: Trial[Any]) -> bool:
    runner, graphs = trial.runner, trial.parts.graphs
    if isinstance(runner, StackRunner):
        return runner.output_rows is None
    return graphs is not None and graphs.rows_each is None


def _is_whole(poison: torch.Tensor) -> bool:
    """Whether poison that nobody may read lies outside of all tables that it could index: that stops the device."""
    return not (poison.dtype.is_floating_point or poison.dtype.is_complex or poison.dtype == torch.bool)


def _unsteady(effect: Effect) -> str:
    return (
        f"the step gives other outputs for the same inputs ({effect.told.rstrip(',')}): its kernels are not "
        "deterministic, or it has state that no operator's schema tells; pass that as state=[...]"
    )


def _of(poison: Tensors, names: Sequence[str]) -> Tensors:
    return {name: poison[name] for name in names if name in poison}


def _only(now: torch.Tensor | None, before: torch.Tensor | None, dim: int, row: int) -> torch.Tensor | None:
    """A slot with poison in one row alone. None if that row is no other with it."""
    if now is None or before is None or first_unequal(now.select(dim, row), before.select(dim, row)) is None:
        return None
    only = before.clone()
    only.select(dim, row).copy_(now.select(dim, row))
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
