"""Poison: whatever lies in tails, live rows come out the same, bit by bit, and every fill leaves tails as declared.

Of several ranks all poison their tails at once, and look at the live rows of all. So padding of one rank that reaches
another through a collective is found, too.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, TypeAlias

import attrs
import torch

from ...dataflow.axes import BATCH, TOKENS, Sizes, Step
from ...dataflow.capabilities import Capabilities
from ...dataflow.errors import ReplayError
from ...dataflow.sampling import is_location
from ...dataflow.slots import Output, Slot
from ...dataflow.tails import STALE, Keep, Number, Once, Pad, resolve_value
from ..bits import first_unequal
from ..comparison import copies, live_part, mismatches
from .fills import tails_of, unlike_oracle
from .report import Finding
from .trial import NOTHING, CheckedBatch, Subject, Tensors, Trial

NAME: Final = "poison"
ROWS: Final = 64
"""Rows of a guilty tail that are tried one by one."""
MOST: Final = 4096
"""Values of live rows that are looked at to choose from."""
Poison: TypeAlias = tuple[tuple[Number, ...], tuple[Number, ...]]
"""Values for a tail, to be drawn from, in one run and in another."""


def check(subject: Subject[Any], batches: Iterable[CheckedBatch]) -> Iterator[Finding]:
    """Fill and replay each batch with poison in its tails.

    A slot that was found guilty once is held to its rule from then on.
    """
    guilty = set[str | None]()
    for number, one in enumerate(batches):
        found = unlike_oracle(subject, one, number)
        guilty.update(finding.slot for finding in found)
        trial = subject.trial(one)
        poisoning = Poisoning(trial, subject.seed + number, {name for name in guilty if name})
        found += poisoning.findings()
        guilty.update(finding.slot for finding in found)
        yield from found
        subject.notes.update(dict.fromkeys(poisoning.notes()))
        if subject.together.any(trial.lost or None in guilty):
            break


def poison_of(slot: Slot, filled: torch.Tensor, step: Step, capabilities: Capabilities) -> Poison | None:
    """What a slot's tail must bear, by what it declares. None if it must hold what its rule says.

    The step executes padded rows. So whole numbers are those of live rows, and floats are whatever a float can be.
    A tail that no one reads (`keep`) bears any number. A tail that is set once bears what live rows had. An output's
    buffer may hold anything, live rows and all.
    """
    rule, said, dtype = slot.rule(), slot.poison, filled.dtype
    fixed: Sizes = {axis: size for axis, size in step.padded_sizes.items() if axis.fixed}
    unread, values = isinstance(slot, Output), tuple[Number, ...]()
    if not unread and isinstance(said, tuple):
        values = tuple(resolve_value(value, capabilities, fixed) for value in said)
        return (values, values[::-1]) if values else None
    if not unread:
        if said is None and (rule is None or is_location(slot)):  # which says where the step writes
            return None
        usual = [resolve_value(rule.value, capabilities, fixed)] if isinstance(rule, Pad | Once) else []
        values = tuple(dict.fromkeys([*live_part(slot, filled, step).reshape(-1)[:MOST].tolist(), *usual]))
    if unread or (said != STALE and not isinstance(rule, Once)):
        if dtype.is_floating_point or dtype.is_complex:
            most = torch.finfo(dtype).max
            return (math.nan,), (most, -most, math.inf)
        if dtype == torch.bool:
            return (True,), (False,)
        if unread or isinstance(rule, Keep):
            ends = torch.iinfo(dtype)
            return values or (ends.min,), (ends.max, ends.min)
    return (values, values[::-1]) if values else None


def spread(values: tuple[Number, ...], like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values drawn over a shape, as a tensor on the CPU. The first of all is the first of them."""
    order = torch.randint(0, len(values), (like.numel(),), device="cpu", generator=generator)
    order[:1] = 0
    exact = torch.complex128 if like.dtype.is_complex else torch.float64 if like.dtype.is_floating_point else like.dtype
    return torch.tensor(values, dtype=exact, device="cpu")[order].to(like.dtype).reshape(like.shape)


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
        self._trial, self._together, self._spared = trial, trial.together, spared
        self._generator, self._usual = torch.Generator().manual_seed(seed), NOTHING

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
            message = (
                f"the step gives other outputs for the same inputs ({again.told.rstrip(',')}): its kernels are not "
                "deterministic, or it has state that no operator's schema tells; pass that as state=[...]"
            )
            return [Finding(NAME, None, message)] if again.is_own else []
        for poison in self._rounds():
            effect = self._try(poison)
            if effect is not None:
                return self._blamed(poison, effect)
        return []

    def notes(self) -> Iterator[str]:
        """Slots whose tails were held to their rules, though they have a tail."""
        trial, capabilities = self._trial, self._trial.parts.stage.backend.capabilities
        for name, filled in trial.filled.items():
            slot = trial.declared[name]
            rule = slot.rule()
            held = isinstance(rule, Pad) or (isinstance(rule, Keep) and slot.poison is not None)
            has_tail = any(True for _ in tails_of(slot, filled, trial.step))
            if held and has_tail and poison_of(slot, filled, trial.step, capabilities) is None:
                why = "it says poison=()" if slot.poison == () else "it says where the step writes"
                yield f"slot {name!r} was held to its {rule}: {why}"

    def _rounds(self) -> Iterator[Tensors]:
        """What to poison at once: all slots, twice. What may stop a device for good comes last, slot by slot.

        That is poison that nobody may read, which lies outside of all tables that it could index.
        """
        first, second = (other_tails(self._trial, turn, self._generator, self._spared) for turn in (0, 1))
        yield first
        apart = []
        for name, slot in self._trial.declared.items():
            if isinstance(slot.rule(), Keep) and slot.poison is None:
                dtype = second[name].dtype if name in second else torch.bool
                if self._together.any(not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)):
                    apart.append(name)
        yield {name: tensor for name, tensor in second.items() if name not in apart}
        for name in apart:
            yield _of(second, [name])

    def _live(self, outputs: Any) -> Tensors:
        """The live rows of outputs. Their sizes tell whether they were handed out with padded ones."""
        found, step = copies(outputs, "output"), self._trial.step
        is_padded = self._trial.parts.graphs is not None and not self._trial.runner.cuts
        for name, tensor in found.items() if is_padded else ():
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
            for apart in itertools.islice(mismatches(self._usual, found), 1):
                where = f"the {apart.where}" if apart.row is None else f"live row {apart.row} of the {apart.where}"
                own = Effect(f"{where} changed, from {apart.values[0]} to {apart.values[1]},")
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
        if any(alone.values()):
            guilty = ((name, one) for name, one in alone.items() if one is not None)
            return [found for name, one in guilty for found in self._of_slot(name, poison.get(name), one)]
        for name in names:
            rest = [one for one in names if one != name]
            if rest and self._try(_of(poison, rest)) is not None:
                names = rest
        slots = ", ".join(map(repr, names))
        told = f"{effect.told} when the tails of slots {slots} held other values together"
        return [Finding(NAME, None, told)] if _of(poison, names) else []

    def _of_slot(self, name: str, now: torch.Tensor | None, effect: Effect) -> list[Finding]:
        """What changed when the tail of a slot held what. The first row of it that does so by itself is named."""
        slot, before = self._trial.declared[name], self._trial.filled.get(name)
        place, rule = f"the tail of slot {name!r}", slot.rule()
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
        elif isinstance(rule, Keep):
            rest = (
                f": its tail is kept for {rule.reason!r}, but something reads it; say pad=value, or poison='stale' if "
                "it need only bear what live rows had"
            )
        else:
            rest = ": keep padded rows out of live ones, or say what its tail bears, poison=(...), nothing being ()"
        differs = first_unequal(before, now)
        held = "other values" if differs is None else f"{now[differs].item()} instead of {before[differs].item()}"
        return [Finding(NAME, name, f"{own.told} when {place} held {held}{rest}")]

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
        if not any(alone):  # several ranks' together
            return effect if mine else None
        return alone[ranks.rank]


def other_tails(
    trial: Trial[Any], turn: int, generator: torch.Generator, spared: Collection[str]
) -> dict[str, torch.Tensor]:
    """What slots hold with poison in their tails, in all of an output, if that differs from what they hold without."""
    made: dict[str, torch.Tensor] = {}
    for name, filled in trial.filled.items():
        slot, tensor = trial.declared[name], filled.clone()
        poison = poison_of(slot, filled, trial.step, trial.parts.stage.backend.capabilities)
        if poison is None or name in spared:
            continue
        for part in [tensor] if isinstance(slot, Output) else tails_of(slot, tensor, trial.step):
            part.copy_(spread(poison[turn], part, generator))
        if first_unequal(filled, tensor) is not None:
            made[name] = tensor
    return made


def tail_rows(slot: Slot, step: Step, least: Callable[[int], int]) -> Iterator[tuple[str, int, int]]:
    """The rows of a tail: what each is called, its dim and its number. least: where to begin, from live rows."""
    for dim in slot.varying:
        live, padded = (slot.shape[dim].at(sizes) for sizes in (step.live_sizes, step.padded_sizes))
        for row in range(least(live), padded):
            yield f"row {row}" if dim == 0 else f"row {row} along dim {dim}", dim, row


def error_text(error: BaseException) -> str:
    """What a step raised, in a line."""
    if isinstance(error, ReplayError) and error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _of(poison: Tensors, names: Collection[str]) -> Tensors:
    return {name: poison[name] for name in names if name in poison}


def _only(now: torch.Tensor | None, before: torch.Tensor | None, dim: int, row: int) -> torch.Tensor | None:
    """A slot with poison in one row alone. None if that row is no other with it."""
    if now is None or before is None or first_unequal(now.select(dim, row), before.select(dim, row)) is None:
        return None
    only = before.clone()
    only.select(dim, row).copy_(now.select(dim, row))
    return only
