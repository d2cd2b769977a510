"""Check of poison: fills leave the declared bytes, and live rows depend neither on tails nor on random numbers."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final

import attrs
import torch

from ...backends.operators import OperatorWatch
from ...dataflow.axes import BATCH, TOKENS, Step
from ...dataflow.capabilities import Capabilities
from ...dataflow.errors import place_now
from ...dataflow.oracle import fill_slot_by_slot
from ...dataflow.slots import BY_STEP, Slot
from ...dataflow.tails import Keep, Number, Once, Pad, resolve_value
from ..engine.bits import first_unequal, unequal_rows
from ..engine.config import POISON
from ..engine.sampling import Sample, is_location
from ..testing.ground import fill_faults, spoil
from .compare import copies, live_part, mismatches, tails_of
from .trial import NOTHING, Finding, Tensors, Trial, cloned, error_text

MOST_VALUES: Final = 4096  # the most values of live rows to choose poison from
DRAWS: Final = 8  # runs with other random numbers for one batch
PoisonPair = tuple[tuple[Number, ...], tuple[Number, ...]]
"""Values that a tail is drawn from, in one run and in another."""


def check_poison(trial: Trial, batches: Iterable[Sample]) -> Iterator[Finding]:
    """Fill and replay each batch with poison in its tails, except tails of slots that were found guilty before."""
    guilty, drawn = set[str | None](), list[Finding]()
    for number, one in enumerate(batches):
        found = _unlike_oracle(trial, one, number)
        guilty.update(finding.slot for finding in found)
        trial.fill(one)
        poisoning = Poisoning(trial, trial.seed + number, {name for name in guilty if name})
        found += poisoning.findings()
        guilty.update(finding.slot for finding in found)
        yield from found
        is_over = trial.any(trial.lost or None in guilty)
        if not (is_over or drawn or trial.random):
            drawn = poisoning.drawn()
            yield from drawn
        for name, filled in trial.filled.items():
            slot = trial.slots[name]
            if slot.rule() is not None and _poison_in(trial, name) is None and [*tails_of(slot, filled, trial.step)]:
                why = "it says poison=()" if slot.poison == () else "it says where the step writes"
                trial.notes[f"slot {name!r} was checked against its {slot.rule()}: {why}"] = None
        if is_over:
            return


def _unlike_oracle(trial: Trial, one: Sample, number: int) -> list[Finding]:
    """Find slots that a fill leaves wrong, after a step on the same batch (it may write tails) or over garbage."""
    buffers, seed = trial.buffers, trial.seed + number
    with trial.state.kept():
        trial.runner(one.batch, **one.side)
    found = [*_compared(trial, one, None)]
    if trial.any(found):
        return found
    with trial.slots_kept():
        with torch.no_grad():
            tensors = (source for source in trial.sources(one).values() if isinstance(source, torch.Tensor))
            own = [(source, source.clone()) for source in tensors if source.numel() and buffers.holds(source)]
            spoil(buffers, buffers.capacity, seed)
            for source, held in own:
                source.copy_(held)
        buffers.distrust()
        return [*_compared(trial, one, seed)]


def _compared(trial: Trial, one: Sample, seed: int | None) -> Iterator[Finding]:
    """Fill, and compare with the oracle over the same bytes.

    seed: Of garbage. The oracle then also fills over its inverse.
    """
    declaration, oracles = trial.declaration, [cloned(trial.buffers)]
    if seed is not None:
        oracles.append(cloned(trial.buffers))
        spoil(oracles[1], trial.buffers.capacity, seed, flipped=True)
    trial.fill(one)
    for oracle in oracles:
        fill_slot_by_slot(declaration, oracle, trial.backend.capabilities, trial.step, one.batch, one.side)
    for name in trial.slots:
        held = vars(trial.view)[name]
        if held is None or not trial.is_filled(name):
            continue
        expected, other = (oracle[name].view(trial.step.padded_sizes) for oracle in (oracles[0], oracles[-1]))
        is_written = name in declaration.functions or name in declaration.sources
        if is_written and (rows := unequal_rows(expected, other)):
            message = (
                f"slot {name!r} is not written by a fill: {rows} still hold what lay there before; a kind of slot that "
                "a fill copies or resets must say so, by reads() and rule()"
            )
            yield Finding(POISON, name, message)
            continue
        for fault in fill_faults({name: held}, {name: expected}, trial.slots, trial.step.live_sizes):
            declared = "what the step or someone else writes there must be declared, by rewritten=True or restored=True"
            yield Finding(POISON, name, f"{fault}; {declared}")


def poison_pair(slot: Slot, filled: torch.Tensor, step: Step, capabilities: Capabilities) -> PoisonPair | None:
    """Return what a slot's tail must tolerate: whole numbers of live rows, and any floats.

    Return None if the tail may have only its rule's value.
    """
    rule, poison, dtype, sizes = slot.rule(), slot.poison, filled.dtype, step.padded_sizes
    unread, values = slot.writers == BY_STEP, tuple[Number, ...]()
    if isinstance(poison, tuple) and not unread:
        values = tuple(resolve_value(value, capabilities, sizes) for value in poison)
    elif not unread:
        if poison is None and (rule is None or is_location(slot)):  # a location says where the step writes
            return None
        usual = [resolve_value(rule.value, capabilities, sizes)] if isinstance(rule, Pad | Once) else []
        values = tuple(dict.fromkeys([*live_part(slot, filled, step).reshape(-1)[:MOST_VALUES].tolist(), *usual]))
    if unread or (poison is None and not isinstance(rule, Once)):
        if dtype.is_floating_point or dtype.is_complex:
            most = torch.finfo(dtype).max
            return (math.nan,), (most, -most, math.inf)
        if dtype == torch.bool:
            return (True,), (False,)
        if unread or isinstance(rule, Keep):
            ends = torch.iinfo(dtype)
            return values or (ends.min,), (ends.max, ends.min)
    return (values, values[::-1]) if values else None


def _poison_in(trial: Trial, name: str) -> PoisonPair | None:
    """Return what the tail of a filled slot may have."""
    return poison_pair(trial.slots[name], trial.filled[name], trial.step, trial.backend.capabilities)


def other_tails(trial: Trial, turn: int, generator: torch.Generator, spared: Collection[str]) -> Tensors:
    """Make slots with poison in their tails, or in all of an output, if that differs from their contents without."""
    made: dict[str, torch.Tensor] = {}
    for name, filled in trial.filled.items():
        slot, tensor = trial.slots[name], filled.clone()
        poison = None if name in spared else _poison_in(trial, name)
        if poison is None:
            continue
        wide = torch.complex128 if tensor.is_complex() else torch.float64 if tensor.is_floating_point() else tensor.dtype
        values = torch.tensor(poison[turn], dtype=wide, device="cpu").to(tensor.dtype)
        for part in [tensor] if slot.writers == BY_STEP else tails_of(slot, tensor, trial.step):
            order = torch.randint(0, len(values), (part.numel(),), device="cpu", generator=generator)
            order[:1] = 0
            part.copy_(values[order].reshape(part.shape))
        if first_unequal(filled, tensor) is not None:
            made[name] = tensor
    return made


@attrs.define(eq=False)
class Poisoning:
    """Poisons tails of one filled step on all ranks, and finds the slot at fault.

    Attributes:
        trial: The step.
        seed: The seed of the poison that is drawn.
        spared: Slots that are not poisoned.
        usual: The live rows of its outputs without poison.
    """

    trial: Trial
    seed: int = 0
    spared: Collection[str] = ()
    usual: Tensors = NOTHING

    def findings(self) -> list[Finding]:
        """Return what is wrong with the step: an empty list if no live row depends on a tail."""
        usual = self.trial.run(self._live)
        error = self.trial.error
        if error is not None:
            return [Finding(POISON, None, f"the step raised {error_text(error)} on a batch that was filled as ever")]
        self.usual = usual or NOTHING
        for poison in (NOTHING, *self._rounds()) if usual is not None else ():
            effect = self._effect(poison)
            if effect is not None:
                return self._blamed(poison, *effect)
        return []

    def _rounds(self) -> Iterator[Tensors]:
        """Yield what to poison at once: all slots, twice, and last, one by one, indices, which may stop a device."""
        generator = torch.Generator().manual_seed(self.seed)
        first, second = (other_tails(self.trial, turn, generator, self.spared) for turn in (0, 1))
        yield first
        apart = list[str]()
        for name, slot in self.trial.slots.items():
            is_unread = isinstance(slot.rule(), Keep) and slot.poison is None
            if is_unread and self.trial.any(name in second and _is_index(second[name])):
                apart.append(name)
        yield {name: tensor for name, tensor in second.items() if name not in apart}
        yield from (_of(second, [name]) for name in apart)

    def _live(self, outputs: Any) -> Tensors:
        """Return the live rows of outputs. Their sizes show whether the step returned padded rows, too."""
        found, step = copies(outputs, "output"), self.trial.step
        for name, tensor in found.items() if not self.trial.runner.cuts else ():
            for axis in (BATCH, TOKENS):  # the last axis that fits counts
                if tensor.dim() and tensor.shape[0] == step.padded_sizes.get(axis):
                    found[name] = tensor[: step.live_sizes[axis]]
        return found

    def drawn(self) -> list[Finding]:
        """Find random numbers that the step draws, if other ones change a live row."""
        effect, operators = self._effect(draws=1), Operators(self.trial.backend.device)
        self.trial.watch(operators)
        for draws in range(2, DRAWS if self.trial.any(operators.drawing) else 0):  # few rows may draw one mask twice
            effect = effect or self._effect(draws=draws)
        if effect is None or not effect[1]:
            return []
        by = next(iter(operators.drawing), "Python's or NumPy's random")
        message = (
            f"two replays of one batch differ: {effect[0].rstrip(',')}, with other random numbers, which {by} draws: "
            "call eval() on a model whose dropout is still on; if the step draws on purpose, as a sampler, say "
            "random=True"
        )
        return [Finding(POISON, None, message)]

    def _effect(self, poison: Tensors = NOTHING, draws: int = 0) -> tuple[str, bool] | None:
        """Return what poison changes on this rank, or else on another, and whether on this one.

        Return None on all ranks if nothing changes.
        """
        found, change = self.trial.run(self._live, poison, draws=draws), ""
        if self.trial.error is not None:
            change = f"the step raised {error_text(self.trial.error)}"
        elif found is not None and (apart := next(mismatches(self.usual, found), None)):
            where = f"the {apart.where}" if apart.row is None else f"live row {apart.row} of the {apart.where}"
            change = f"{where} changed, from {apart.values[0]} to {apart.values[1]},"
        first = self.trial.first(change)
        if change or first is None:
            return (change, True) if change else None
        return f"on rank {first[0]} {first[1]}", False

    def _blamed(self, poison: Tensors, change: str, is_own: bool) -> list[Finding]:  # noqa: FBT001 - as found
        """Return findings of this rank: the slots that make a difference alone, or else the fewest that do together."""
        trial, found, is_alone = self.trial, list[Finding](), False
        names = [name for name in trial.slots if trial.any(name in poison)]
        if not names:
            message = (
                f"the step gives other outputs for the same inputs ({change.rstrip(',')}): its kernels are not "
                "deterministic, or it has state that no operator's schema tells; pass that as state=[...]"
            )
            return [Finding(POISON, None, message)] if is_own else []
        if trial.any(trial.lost):
            only = next(iter(poison)) if len(poison) == 1 else None
            tails = f"tails of slots {', '.join(map(repr, poison))}" if only is None else f"tail of slot {only!r}"
            lost = "nothing could be replayed after that, on which slots are told apart"
            return [Finding(POISON, only, f"{change} when the {tails} held poison; {lost}")] if poison else []
        for name in names:
            effect = self._effect(_of(poison, [name]))
            if effect is None:
                continue
            is_alone, (alone, is_own) = True, effect
            # ranks report changes of their own; if none has one, all with poison report
            is_elsewhere = trial.any(is_own and name in poison) and not is_own
            if name in poison and not is_elsewhere:
                found.append(Finding(POISON, name, f"{alone} when {self._place(name, poison[name])}"))
        if is_alone:
            return found
        for name in names:
            rest = [other for other in names if other != name]
            if rest and self._effect(_of(poison, rest)) is not None:
                names = rest
        message = f"{change} when the tails of slots {', '.join(map(repr, names))} held other values together"
        return [Finding(POISON, None, message)] if _of(poison, names) else []

    def _place(self, name: str, now: torch.Tensor) -> str:
        """Return what the tail of a slot had, and what to do, as text."""
        slot, before = self.trial.slots[name], self.trial.filled[name]
        rule, place = slot.rule(), f"the tail of slot {name!r}"
        if slot.writers == BY_STEP:
            place = f"output slot {name!r}"
            rest = " before the step: it must write every live row that it returns, and add to none"
        elif isinstance(rule, Keep):
            rest = (
                f": its tail is kept for {rule.reason!r}, but something reads it; say pad=value, or poison='stale' if "
                "it need only accept what live rows had"
            )
        else:
            rest = ": keep padded rows out of live ones, or say what its tail may hold, poison=(...), nothing being ()"
        at = first_unequal(before, now) or ()
        return f"{place} held {now[at].item()} instead of {before[at].item()}{rest}"


class Operators(OperatorWatch):
    """Notes which operators of a step draw random numbers, and which give numbers to the host, each with its line.

    Attributes:
        drawing: Those that draw. Attention with a dropout of 0 does not, though torch marks it as one that may.
        to_host: Those whose results the host may read.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.drawing: list[str] = []
        self.to_host: list[str] = []
        self._generators: list[Callable[[], torch.Tensor]] = [torch.get_rng_state]
        if device.type != "cpu":
            self._generators.append(lambda: torch.get_device_module(device).get_rng_state(device))

    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note an operator, and run it."""
        tags = getattr(operator, "tags", ())
        may_draw = torch.Tag.nondeterministic_seeded in tags
        before = [read() for read in self._generators if may_draw]
        result = operator(*args, **kwargs)
        is_drawing = any(not torch.equal(was, read()) for was, read in zip(before, self._generators, strict=False))
        for found, holds in (self.drawing, is_drawing), (self.to_host, torch.Tag.data_dependent_output in tags):
            if holds:
                found.append(f"{operator.name().partition('.')[0]}{place_now()}")
        return result


def _is_index(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _of(poison: Tensors, names: Collection[str]) -> Tensors:
    return {name: poison[name] for name in names if name in poison}
