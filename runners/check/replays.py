"""Poison and parity: a filled step replayed with other tails, and beside the step as it is written.

Poison: whatever lies in tails, live rows come out the same, bit by bit, and every fill leaves the bytes of the oracle.
Of several ranks all poison their tails at once, and look at the live rows of all. So padding of one rank that reaches
another through a collective is found, too. Parity: a graph does what its step does.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final, TypeAlias

import attrs
import torch

from ...dataflow.axes import BATCH, TOKENS, Sizes, Step
from ...dataflow.buffers import Buffers
from ...dataflow.capabilities import Capabilities
from ...dataflow.errors import ReplayError
from ...dataflow.oracle import fill_slot_by_slot
from ...dataflow.sampling import Sample, is_location
from ...dataflow.slots import Constant, Output, Slot
from ...dataflow.tails import STALE, Keep, Number, Once, Pad, resolve_value
from ..bits import first_unequal, garbage, unequal_rows
from ..comparison import (
    BITWISE,
    USUAL,
    Seen,
    Tolerances,
    computed_apart,
    copies,
    differences,
    graph_of,
    info_of,
    live_part,
    mismatches,
    seen,
    slots_kept,
    tails_of,
)
from .trial import NOTHING, Finding, Subject, Tensors, Trial

POISON: Final = "poison"
PARITY: Final = "parity"
MOST: Final = 4096
"""Values of live rows that are looked at to choose from."""
COPIES: Final = 2
"""Copies of the state at once that parity takes: as it was, and as the step left it."""
OTHER_SHAPES: Final[Tolerances] = {
    **USUAL,
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (5e-2, 5e-2),
    torch.float32: (1e-3, 1e-3),
}
"""How far a model's outputs for a padded batch may be from those for the batch alone: kernels for other shapes add in
another order, layer after layer. What padded rows do to live ones is for poison to find, which asks for equal bits."""
Poison: TypeAlias = tuple[tuple[Number, ...], tuple[Number, ...]]
"""Values for a tail, to be drawn from, in one run and in another."""


def check_poison(subject: Subject[Any], batches: Iterable[Sample]) -> Iterator[Finding]:
    """Fill and replay each batch with poison in its tails.

    A slot that was found guilty once is held to its rule from then on.
    """
    guilty = set[str | None]()
    for number, one in enumerate(batches):
        found = _unlike_oracle(subject, one, number)
        guilty.update(finding.slot for finding in found)
        trial = subject.trial(one)
        found += Poisoning(trial, subject.seed + number, {name for name in guilty if name}).findings()
        guilty.update(finding.slot for finding in found)
        yield from found
        subject.notes.update(dict.fromkeys(_held_to_rules(trial)))
        if subject.together.any(trial.lost or None in guilty):
            break


def _unlike_oracle(subject: Subject[Any], one: Sample, number: int) -> list[Finding]:
    """Slots that a fill leaves otherwise, after a step on the same batch (it may write into tails) or over garbage."""
    buffers = subject.graphs.buffers
    with subject.state.kept():
        subject.run(one)
    found = _compared(subject, one, None)
    if subject.together.any(bool(found)):
        return found
    seed = subject.seed + number
    in_place = [source for source in subject.sources(one) if isinstance(source, torch.Tensor) and source.numel()]
    with slots_kept(subject.runner):
        with torch.no_grad():
            own = [(source, source.clone()) for source in in_place if buffers.holds(source)]
            _spoil(buffers, subject.step_of(one), seed)
            for source, held in own:
                source.copy_(held)
        buffers.distrust()
        return _compared(subject, one, seed)


def _spoil(buffers: Buffers, step: Step, seed: int, *, flipped: bool = False) -> None:
    """Write random bytes wherever every fill, or the step, must write. flipped: each bit the other way round."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers:
        slot, view = buffer.slot, buffer.view(step.padded_sizes)
        rule, is_read = slot.rule(), slot.reads(buffer.name) is not None
        if isinstance(slot, Constant | Output):
            continue
        if slot.computes() is not None or (is_read and not isinstance(rule, Keep | Once)):
            parts: Iterable[torch.Tensor] = [view]
        elif is_read:
            parts = [live_part(slot, view, step)]
        else:
            parts = tails_of(slot, view, step) if isinstance(rule, Pad) else []
        for part in parts:
            part.copy_(garbage(part, generator, flipped=flipped))


def _compared(subject: Subject[Any], one: Sample, seed: int | None) -> list[Finding]:
    """Fill, and compare with the oracle, which fills other memory that holds the same before.

    seed: of the garbage there. The oracle then fills over its opposite, too, which shows what is not written at all.
    """
    step, found = subject.step_of(one), list[Finding]()
    rights = [_oracle(subject, one, step, flipped) for flipped in ((None,) if seed is None else (None, seed))]
    view = subject.fill(one)
    step = info_of(view).step
    for name, slot in subject.slots.items():
        tensor, told = vars(view)[name], ""
        if tensor is None or not subject.is_filled(name):
            continue
        right, other = (buffers[name].view(step.padded_sizes) for buffers in (rights[0], rights[-1]))
        if rows := unequal_rows(right, other):
            told = (
                f"is not written by a fill: {rows} still hold what lay there before; a kind of slot that a fill copies "
                "or resets must say so, by reads() and rule()"
            )
        elif (place := first_unequal(right, tensor)) is not None:
            told = _unlike(slot, place, tensor[place].item(), right[place].item(), step)
        if told:
            found.append(Finding(POISON, name, f"slot {name!r} {told}"))
    return found


def _oracle(subject: Subject[Any], one: Sample, step: Step, flipped: int | None) -> Buffers:
    """What the oracle leaves in a copy of the buffers, over flipped garbage if there is a seed for it."""
    stage, buffers = subject.runner.stage, subject.graphs.buffers
    with torch.inference_mode(mode=False), torch.no_grad():
        copied = {b.name: attrs.evolve(b, tensor=b.tensor.clone(), owner=None) for b in buffers}
        oracle = Buffers(copied, buffers.capacity)
        if flipped is not None:
            _spoil(oracle, step, flipped, flipped=True)
    fill_slot_by_slot(stage.declaration, oracle, stage.backend.capabilities, step, one.batch, one.side)
    return oracle


def _unlike(slot: Slot, place: tuple[int, ...], held: Any, right: Any, step: Step) -> str:
    """What a fill left where."""
    where = f"row {place[0]}" if place else "its number"
    in_tail = any(place[dim] >= slot.shape[dim].at(step.live_sizes) for dim in slot.varying)
    if in_tail and slot.computes() is None:
        return (
            f"kept what lay in its tail: {where} holds {held} after a fill that must leave {right}: who writes there "
            "beside the fill, as the step itself may, must be declared by rewritten=True or restored=True"
        )
    return f"is not what its declaration says: {where} holds {held} after a fill, expected {right}"


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


def other_tails(trial: Trial[Any], turn: int, generator: torch.Generator, spared: Collection[str]) -> Tensors:
    """What slots hold with poison in their tails, in all of an output, if that differs from what they hold without."""
    made: dict[str, torch.Tensor] = {}
    for name, filled in trial.filled.items():
        slot, tensor = trial.declared[name], filled.clone()
        poison = poison_of(slot, filled, trial.step, trial.runner.stage.backend.capabilities)
        if poison is None or name in spared:
            continue
        for part in [tensor] if isinstance(slot, Output) else tails_of(slot, tensor, trial.step):
            order = torch.randint(0, len(poison[turn]), (part.numel(),), device="cpu", generator=generator)
            order[:1] = 0
            wide = torch.complex128 if part.is_complex() else torch.float64 if part.is_floating_point() else part.dtype
            drawn = torch.tensor(poison[turn], dtype=wide, device="cpu")[order]
            part.copy_(drawn.to(part.dtype).reshape(part.shape))
        if first_unequal(filled, tensor) is not None:
            made[name] = tensor
    return made


def _held_to_rules(trial: Trial[Any]) -> Iterator[str]:
    """Notes on slots whose tails were held to their rules, though they have a tail."""
    for name, filled in trial.filled.items():
        slot = trial.declared[name]
        rule = slot.rule()
        held = isinstance(rule, Pad) or (isinstance(rule, Keep) and slot.poison is not None)
        has_tail = any(True for _ in tails_of(slot, filled, trial.step))
        if held and has_tail and poison_of(slot, filled, trial.step, trial.runner.stage.backend.capabilities) is None:
            why = "it says poison=()" if slot.poison == () else "it says where the step writes"
            yield f"slot {name!r} was held to its {rule}: {why}"


@attrs.frozen
class Effect:
    """What poison changed."""

    told: str
    is_own: bool = True  # on this rank


class Poisoning:
    """Poisons the tails of one filled step, and looks for the slot through which a difference comes.

    Ranks go through it together, slot by slot, whether they have poison there or not.

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
            return [Finding(POISON, None, f"the step raised {_error_text(usual)} on a batch that was filled as ever")]
        if self._trial.raised:
            return []
        self._usual = usual
        again = self._try(NOTHING)
        if again is not None:
            message = (
                f"the step gives other outputs for the same inputs ({again.told.rstrip(',')}): its kernels are not "
                "deterministic, or it has state that no operator's schema tells; pass that as state=[...]"
            )
            return [Finding(POISON, None, message)] if again.is_own else []
        for poison in self._rounds():
            effect = self._try(poison)
            if effect is not None:
                return self._blamed(poison, effect)
        return []

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
        is_padded = self._trial.runner.graphs is not None and not self._trial.runner.cuts
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
            own = Effect(f"the step raised {_error_text(found)}")
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
            return [Finding(POISON, one, f"{effect.told} when the {tails} held poison; {lost}")] if poison else []
        names = [name for name in self._trial.declared if self._together.any(name in poison)]
        alone = {name: self._try(_of(poison, [name])) for name in names}
        if any(alone.values()):
            guilty = ((name, one) for name, one in alone.items() if one is not None)
            return [found for name, one in guilty for found in self._of_slot(name, poison, one)]
        for name in names:
            rest = [one for one in names if one != name]
            if rest and self._try(_of(poison, rest)) is not None:
                names = rest
        slots = ", ".join(map(repr, names))
        told = f"{effect.told} when the tails of slots {slots} held other values together"
        return [Finding(POISON, None, told)] if _of(poison, names) else []

    def _of_slot(self, name: str, poison: Tensors, effect: Effect) -> list[Finding]:
        """What changed when the tail of a slot held what.

        Ranks tell of it that have poison there and see a change of their own. If none does, all that have poison do.
        """
        is_seen = self._together.any(effect.is_own and name in poison)
        if name not in poison or (is_seen and not effect.is_own):
            return []
        slot, now, before = self._trial.declared[name], poison[name], self._trial.filled[name]
        rule, place = slot.rule(), f"the tail of slot {name!r}"
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
        at = first_unequal(before, now) or ()
        held = f"{now[at].item()} instead of {before[at].item()}"
        return [Finding(POISON, name, f"{effect.told} when {place} held {held}{rest}")]


def _error_text(error: BaseException) -> str:
    """What a step raised, in a line."""
    if isinstance(error, ReplayError) and error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _of(poison: Tensors, names: Collection[str]) -> Tensors:
    return {name: poison[name] for name in names if name in poison}


def check_parity(subject: Subject[Any], batches: Iterable[Sample]) -> Iterator[Finding]:
    """Hold graphs to their step: on the padded view, or else beside the batch alone, since that follows from it."""
    runner = subject.runner
    subject.state.check_room(COPIES)
    for one in batches:
        if runner.stage.declaration.ranks is not None:
            subject.fill(one)  # by which ranks know what all bring, as computed slots may ask
        with subject.state.kept(), slots_kept(runner):
            exact = _without_padding(subject, one)
        trial = subject.trial(one)
        finding = parity_fault(trial)
        if not subject.together.any(finding is not None):
            if isinstance(exact, Seen):
                finding = _unpadded_fault(trial, exact)
            elif runner.size(one.batch, one.side)[-1]:  # an empty batch is padded in each step
                finding = Finding(PARITY, None, exact)
        if finding is not None:
            yield finding


def _without_padding(subject: Subject[Any], one: Sample) -> Seen | str:
    """What the step does with a batch if nothing is padded. A sentence if it raises there."""
    eager = subject.runner.eager
    view = eager.fill(one.batch, **one.side)
    try:
        return seen(view, eager.run(view))
    except Exception as error:  # noqa: BLE001 - whatever a step makes of other sizes is a result
        return f"the step raised on the batch without padding: {type(error).__name__}: {error}"


def _unpadded_fault(trial: Trial[Any], eager: Seen) -> Finding | None:
    graph = trial.run(lambda outputs: seen(trial.view, outputs))
    if isinstance(graph, Exception):
        return None
    found = next(differences(graph, eager, OTHER_SHAPES), None)
    if found is None:
        return None
    if found.where in graph.copied:
        return Finding(PARITY, found.slot, f"{found}: the fill of the padded bucket is not that of the batch")
    apart = computed_apart(graph, eager)
    told = "; ".join(map(str, apart)) or "all slots agree in their live rows"
    message = (
        f"{found}; {told}; on the padded view the step gives what the graph gives: padded rows, or what is computed "
        "for the bucket, reach live ones"
    )
    return Finding(PARITY, apart[0].slot if apart else None, message)


def parity_fault(trial: Trial[Any]) -> Finding | None:
    """What a graph does otherwise than its step, from the same slots and state. None if it does the same.

    A step that does not do the same twice is held to the usual tolerances.
    """
    state, together = trial.state, trial.together
    eager = trial.run(lambda outputs: (seen(trial.view, outputs).outputs, state.copy()), by=trial.eagerly)
    if trial.raised or isinstance(eager, Exception):
        return _raised(eager)
    expected, left = eager

    def look(outputs: Any) -> tuple[Any, Any]:
        return seen(trial.view, outputs).outputs, state.apart(left)

    graph = trial.run(look)
    if trial.raised or isinstance(graph, Exception):
        return _raised(graph)
    found = next(mismatches(graph[0], expected, step=trial.step), None)
    is_left = bool(state.told(graph[1]))
    if not together.any(found is not None or is_left):
        return None
    again = trial.run(look, by=trial.eagerly)
    if trial.raised or isinstance(again, Exception):
        return _raised(again)
    besides = [again[1]]
    for turn in (0, 1) if together.any(is_left) else ():
        other = trial.run(look, _bearable_tails(trial, turn), by=trial.eagerly)
        besides += [] if isinstance(other, Exception) else [other[1]]
    tolerance = (
        USUAL if any(mismatches(expected, again[0], step=trial.step)) else BITWISE
    )  # no more can be asked than of the step
    found = next(mismatches(graph[0], expected, tolerance, step=trial.step), None)
    if found is not None:
        captured = graph_of(trial.runner, trial.view)
        where = "" if captured is None else f" (bucket {captured.rows})"
        why = "the step reads something that is no slot, such as a host value or an address at capture"
        return Finding(PARITY, found.slot, f"{found}{where}; all slots agree: {why}")
    told = next(iter(state.told(graph[1], besides)), None)
    message = (
        f"a replay leaves other bytes than the step in {told}, though all slots and outputs agree: the step reads "
        "something that is no slot, such as a host value at capture, to tell what it writes there or where"
    )
    return None if told is None else Finding(PARITY, None, message)


def _bearable_tails(trial: Trial[Any], turn: int) -> Tensors:
    """Slots with other values that their tails bear. What a step then leaves otherwise belongs to padded rows.

    Padded rows write where their cache locations say, all of them to one reserved row. Which of them comes last is no
    one's business on a device that runs them at once, and differs from run to run.
    """
    spared = set[str]()
    for name, filled in trial.filled.items():
        slot = trial.declared[name]
        is_index = isinstance(slot.rule(), Keep) and not filled.dtype.is_floating_point  # which eager steps check
        if is_index or slot.rewritten or isinstance(slot, Output):
            spared.add(name)
    return other_tails(trial, turn, torch.Generator().manual_seed(turn), spared)


def _raised(found: object) -> Finding | None:
    """A finding on a rank on which the step raised."""
    if not isinstance(found, Exception):
        return None
    return Finding(PARITY, None, f"the step raised {type(found).__name__}: {found} where its graph is replayed")
