"""Checks of poison and parity: live rows do not depend on tails, and graphs do what their steps do."""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final

import attrs
import torch

from ...backends.operators import OperatorWatch
from ...dataflow.axes import BATCH, TOKENS, Step
from ...dataflow.buffers import Buffers, SharedMemory
from ...dataflow.capabilities import Capabilities
from ...dataflow.errors import place_now
from ...dataflow.guard import outside_inference
from ...dataflow.oracle import fill_slot_by_slot
from ...dataflow.slots import BY_STEP, Slot
from ...dataflow.tails import Keep, Number, Once, Pad, resolve_value
from ..comparison import (
    BITWISE,
    USUAL,
    Leaves,
    Seen,
    Tolerances,
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
from ..engine.bits import first_unequal, unequal_rows
from ..engine.config import PARITY, POISON
from ..engine.sampling import Sample, is_location
from ..engine.traffic import run_seen
from ..testing.ground import fill_faults, spoil
from .trial import NOTHING, Finding, Subject, Tensors, Trial, error_text

MOST_VALUES: Final = 4096  # the most values of live rows to choose poison from
DRAWS: Final = 8  # runs with other random numbers for one batch
COPIES: Final = 2  # copies of the state for parity: as it was, and as the step left it
OTHER_SHAPES: Final[Tolerances] = {
    **USUAL,
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (5e-2, 5e-2),
    torch.float32: (1e-3, 1e-3),
}
"""How far a model's outputs for a padded batch may be from those for the batch alone.

Kernels for other shapes add in another order, layer after layer. The poison check, which asks for equal bits, finds
what padded rows do to live ones.
"""
PoisonPair = tuple[tuple[Number, ...], tuple[Number, ...]]
"""Values that a tail is drawn from, in one run and in another."""


def check_poison(subject: Subject, batches: Iterable[Sample]) -> Iterator[Finding]:
    """Fill and replay each batch with poison in its tails, except tails of slots that were found guilty before."""
    guilty, drawn = set[str | None](), list[Finding]()
    for number, one in enumerate(batches):
        found = _unlike_oracle(subject, one, number)
        guilty.update(finding.slot for finding in found)
        trial = subject.trial(one)
        poisoning = Poisoning(trial, subject.seed + number, {name for name in guilty if name})
        found += poisoning.findings()
        guilty.update(finding.slot for finding in found)
        yield from found
        if not (drawn or subject.random or subject.together.any(trial.lost or None in guilty)):
            drawn = poisoning.drawn()
            yield from drawn
        for name, filled in trial.filled.items():
            slot = trial.declared[name]
            if slot.rule() is not None and _poison_in(trial, name) is None and [*tails_of(slot, filled, trial.step)]:
                why = "it says poison=()" if slot.poison == () else "it says where the step writes"
                subject.notes[f"slot {name!r} was checked against its {slot.rule()}: {why}"] = None
        if subject.together.any(trial.lost or None in guilty):
            break


def _unlike_oracle(subject: Subject, one: Sample, number: int) -> list[Finding]:
    """Find slots that a fill leaves wrong, after a step on the same batch (it may write tails) or over garbage."""
    buffers, seed = subject.buffers, subject.seed + number
    with subject.state.kept():
        subject.runner(one.batch, **one.side)
    found = [*_compared(subject, one, None)]
    if subject.together.any(found):
        return found
    with slots_kept(subject.runner):
        with torch.no_grad():
            tensors = (source for source in subject.sources(one).values() if isinstance(source, torch.Tensor))
            own = [(source, source.clone()) for source in tensors if source.numel() and buffers.holds(source)]
            spoil(buffers, subject.step_of(one).padded_sizes, seed)
            for source, held in own:
                source.copy_(held)
        buffers.distrust()
        return [*_compared(subject, one, seed)]


def cloned(buffers: Buffers) -> Buffers:
    """Return the same bytes in memory of their own."""
    with outside_inference(), torch.no_grad():
        copied = {b.name: attrs.evolve(b, tensor=b.tensor.clone(), owner=None) for b in buffers}
    return Buffers(copied, buffers.capacity, SharedMemory())


def _compared(subject: Subject, one: Sample, seed: int | None) -> Iterator[Finding]:
    """Fill, and compare with the oracle over the same bytes.

    seed: Of garbage. The oracle then also fills over its inverse.
    """
    declaration, buffers, step = subject.declaration, subject.buffers, subject.step_of(one)
    oracles = [cloned(buffers)]
    if seed is not None:
        oracles.append(cloned(buffers))
        spoil(oracles[1], step.padded_sizes, seed, flipped=True)
    for filled in oracles:
        fill_slot_by_slot(declaration, filled, subject.backend.capabilities, step, one.batch, one.side)
    view = subject.fill(one)
    sizes = info_of(view).step
    for name in subject.slots:
        held = vars(view)[name]
        if held is None or not subject.is_filled(name):
            continue
        expected, other = (filled[name].view(sizes.padded_sizes) for filled in (oracles[0], oracles[-1]))
        is_written = name in declaration.functions or name in declaration.sources
        if is_written and (rows := unequal_rows(expected, other)):
            message = (
                f"slot {name!r} is not written by a fill: {rows} still hold what lay there before; a kind of slot that "
                "a fill copies or resets must say so, by reads() and rule()"
            )
            yield Finding(POISON, name, message)
            continue
        for fault in fill_faults({name: held}, {name: expected}, subject.slots, sizes.live_sizes):
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
    return poison_pair(trial.declared[name], trial.filled[name], trial.step, trial.backend.capabilities)


def other_tails(trial: Trial, turn: int, generator: torch.Generator, spared: Collection[str]) -> Tensors:
    """Make slots with poison in their tails, or in all of an output, if that differs from their contents without."""
    made: dict[str, torch.Tensor] = {}
    for name, filled in trial.filled.items():
        slot, tensor = trial.declared[name], filled.clone()
        poison = None if name in spared else _poison_in(trial, name)
        if poison is None:
            continue
        for part in [tensor] if slot.writers == BY_STEP else tails_of(slot, tensor, trial.step):
            order = torch.randint(0, len(poison[turn]), (part.numel(),), device="cpu", generator=generator)
            order[:1] = 0
            wide = torch.complex128 if part.is_complex() else torch.float64 if part.is_floating_point() else part.dtype
            drawn = torch.tensor(poison[turn], dtype=wide, device="cpu")[order]
            part.copy_(drawn.to(part.dtype).reshape(part.shape))
        if first_unequal(filled, tensor) is not None:
            made[name] = tensor
    return made


@attrs.define(eq=False, slots=False)
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
        if isinstance(usual, Exception):
            return [Finding(POISON, None, f"the step raised {error_text(usual)} on a batch that was filled as ever")]
        if self.trial.raised:
            return []
        self.usual = usual
        for poison in (NOTHING, *self._rounds()):
            effect = self._try(poison)
            if effect is not None:
                return self._blamed(poison, *effect)
        return []

    def _rounds(self) -> Iterator[Tensors]:
        """Yield what to poison at once: all slots, twice, and last, one by one, indices, which may stop a device."""
        generator = torch.Generator().manual_seed(self.seed)
        first, second = (other_tails(self.trial, turn, generator, self.spared) for turn in (0, 1))
        yield first
        apart = list[str]()
        for name, slot in self.trial.declared.items():
            is_unread = isinstance(slot.rule(), Keep) and slot.poison is None
            if is_unread and self.trial.together.any(name in second and _is_index(second[name])):
                apart.append(name)
        yield {name: tensor for name, tensor in second.items() if name not in apart}
        yield from (_of(second, [name]) for name in apart)

    def _live(self, outputs: Any) -> Tensors:
        """Return the live rows of outputs. Their sizes show whether the step returned padded rows, too."""
        found, step, runner = copies(outputs, "output"), self.trial.step, self.trial.runner
        for name, tensor in found.items() if runner.graphs is not None and not runner.cuts else ():
            for axis in (BATCH, TOKENS):  # the last axis that fits counts
                if tensor.dim() and tensor.shape[0] == step.padded_sizes.get(axis):
                    found[name] = tensor[: step.live_sizes[axis]]
        return found

    def drawn(self) -> list[Finding]:
        """Find random numbers that the step draws, if other ones change a live row."""
        trial, effect = self.trial, self._try(NOTHING, self.trial.redrawn)
        operators = operators_of(trial, torch.Tag.nondeterministic_seeded, drawing=True)
        for times in range(2, DRAWS if trial.together.any(operators) else 0):  # a mask of few rows may be drawn twice
            effect = effect or self._try(NOTHING, functools.partial(trial.redrawn, times=times))
        if effect is None or not effect[1]:
            return []
        by = next(iter(operators), "Python's or NumPy's random")
        message = (
            f"two replays of one batch differ: {effect[0].rstrip(',')}, with other random numbers, which {by} draws: "
            "call eval() on a model whose dropout is still on; if the step draws on purpose, as a sampler, say "
            "random=True"
        )
        return [Finding(POISON, None, message)]

    def _try(self, poison: Tensors, by: Callable[[], Any] | None = None) -> tuple[str, bool] | None:
        """Return what poison changes on this rank, or else on another, and whether on this one.

        Return None on all ranks if nothing changes.
        """
        found, change = self.trial.run(self._live, poison, by), ""
        if isinstance(found, Exception):
            change = f"the step raised {error_text(found)}"
        elif apart := next(mismatches(self.usual, found), None):
            where = f"the {apart.where}" if apart.row is None else f"live row {apart.row} of the {apart.where}"
            change = f"{where} changed, from {apart.values[0]} to {apart.values[1]},"
        first = self.trial.together.first(change)
        if change or first is None:
            return (change, True) if change else None
        return f"on rank {first[0]} {first[1]}", False

    def _blamed(self, poison: Tensors, change: str, is_own: bool) -> list[Finding]:  # noqa: FBT001 - as found
        """Return findings of this rank: the slots that make a difference alone, or else the fewest that do together."""
        found, together = list[Finding](), self.trial.together
        names = [name for name in self.trial.declared if together.any(name in poison)]
        if not names:
            message = (
                f"the step gives other outputs for the same inputs ({change.rstrip(',')}): its kernels are not "
                "deterministic, or it has state that no operator's schema tells; pass that as state=[...]"
            )
            return [Finding(POISON, None, message)] if is_own else []
        if together.any(self.trial.lost):
            only = next(iter(poison)) if len(poison) == 1 else None
            tails = f"tails of slots {', '.join(map(repr, poison))}" if only is None else f"tail of slot {only!r}"
            lost = "nothing could be replayed after that, on which slots are told apart"
            return [Finding(POISON, only, f"{change} when the {tails} held poison; {lost}")] if poison else []
        alone = {name: self._try(_of(poison, [name])) for name in names}
        for name, effect in alone.items():
            # ranks report changes of their own; if none has one, all with poison report
            if effect is not None:
                is_seen = together.any(effect[1] and name in poison)
                if name in poison and (effect[1] or not is_seen):
                    found.append(Finding(POISON, name, f"{effect[0]} when {self._place(name, poison[name])}"))
        if any(alone.values()):
            return found
        for name in names:
            rest = [other for other in names if other != name]
            if rest and self._try(_of(poison, rest)) is not None:
                names = rest
        message = f"{change} when the tails of slots {', '.join(map(repr, names))} held other values together"
        return [Finding(POISON, None, message)] if _of(poison, names) else []

    def _place(self, name: str, now: torch.Tensor) -> str:
        """Return what the tail of a slot had, and what to do, as text."""
        slot, before = self.trial.declared[name], self.trial.filled[name]
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


def operators_of(trial: Trial, tag: torch.Tag, *, drawing: bool = False) -> list[str]:
    """Return the operators of a step that have one of torch's tags, each with the line that calls it.

    drawing: Whether to return only those that draw random numbers, as attention with a dropout of 0 does not.
    """
    found: list[str] = []
    device = trial.backend.device

    def drawn() -> list[bytes]:
        states = [torch.get_rng_state()]
        if drawing and device.type != "cpu":
            states.append(torch.get_device_module(device).get_rng_state(device))
        return [state.numpy().tobytes() for state in states]

    class Tagged(OperatorWatch):
        """Notes the operators."""

        def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if tag not in getattr(operator, "tags", ()):
                return operator(*args, **kwargs)
            before = drawn()
            result = operator(*args, **kwargs)
            if not drawing or drawn() != before:
                found.append(f"{operator.name().partition('.')[0]}{place_now()}")
            return result

    trial.run(id, by=lambda: run_seen(Tagged(), trial.eagerly))
    return found


def _is_index(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _of(poison: Tensors, names: Collection[str]) -> Tensors:
    return {name: poison[name] for name in names if name in poison}


def check_parity(subject: Subject, batches: Iterable[Sample]) -> Iterator[Finding]:
    """Compare graphs with their step: on the padded view, and then with the batch alone."""
    subject.state.check_room(COPIES)
    yield from filter(None, (apart_from_step(subject, one) for one in batches))


def apart_from_step(subject: Subject, one: Sample) -> Finding | None:
    """Return what the graph of a batch does differently from the step, padded or not, or None."""
    runner = subject.runner
    if runner.stage.declaration.ranks is not None:
        subject.fill(one)  # computed slots may need the sizes of all ranks, which a fill exchanges
    with subject.state.kept(), slots_kept(runner):
        live = runner.size(one.batch, one.side)
        route, view = runner.eager.fill(one.batch, live, one.side)
        subject.produce(view)
        try:
            exact: Seen | str = seen(view, route.run(view, live))
        except Exception as error:  # noqa: BLE001 - an error of a step at other sizes is a result
            exact = f"the step raised on the batch without padding: {error_text(error)}"
    trial = subject.trial(one)
    finding = parity_fault(trial)
    if subject.together.any(finding is not None):
        return finding
    if isinstance(exact, str):
        return Finding(PARITY, None, exact) if live[-1] else None  # a batch without rows is always padded
    graph = trial.run(lambda outputs: seen(trial.view, outputs))
    if isinstance(graph, Exception):
        return None
    found = next(differences(graph, exact, OTHER_SHAPES), None)
    is_drawn = subject.together.any(found) and redraws(trial, graph.outputs)
    if found is not None and found.where in graph.copied:
        return Finding(PARITY, found.slot, f"{found}: the fill of the padded bucket is not that of the batch")
    if found is None or is_drawn:  # a step draws other numbers for another shape
        return None
    apart = list(mismatches(graph.computed, exact.computed, step=graph.step))
    slots = "; ".join(map(str, apart)) or "all slots agree in their live rows"
    message = (
        f"{found}; {slots}; on the padded view the step gives what the graph gives: padded rows, or what is computed "
        "for the bucket, reach live ones"
    )
    return Finding(PARITY, apart[0].slot if apart else None, message)


def redraws(trial: Trial, outputs: Leaves, by: Callable[[], Any] | None = None) -> bool:
    """Return whether a replay, or another run, gives other outputs with other random numbers."""
    other = trial.run(lambda made: seen(trial.view, made).outputs, by=lambda: trial.redrawn(by))
    return not isinstance(other, Exception) and any(mismatches(outputs, other, USUAL, step=trial.step))


def parity_fault(trial: Trial) -> Finding | None:
    """Return what a graph does differently from its step, or None.

    The usual tolerances apply if two runs of the step differ.
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
    is_left = bool(state.labels(graph[1]))
    if not together.any(found is not None or is_left):
        return None
    again = trial.run(look, by=trial.eagerly)
    if trial.raised or isinstance(again, Exception):
        return _raised(again)
    besides = [again[1]]
    for turn in (0, 1) if together.any(is_left) else ():
        other = trial.run(look, _bearable_tails(trial, turn), by=trial.eagerly)
        besides += [] if isinstance(other, Exception) else [other[1]]
    differs = any(mismatches(expected, again[0], step=trial.step))  # a graph need not be more exact than its step
    every = mismatches(graph[0], expected, USUAL if differs else BITWISE, step=trial.step)
    found = min(every, key=lambda one: one.slot is None, default=None)  # a slot says more than an output
    is_drawn = together.any(found is not None and not differs) and redraws(trial, expected, trial.eagerly)
    if found is not None:
        captured = graph_of(trial.runner, trial.view)
        where = "" if captured is None else f" (bucket {captured.rows})"
        why = "the step reads something that is not a slot, such as a host value or an address at capture"
        if is_drawn:
            why = "the step draws random numbers on the host, and the graph keeps those of its capture: draw by torch"
        return Finding(PARITY, found.slot, f"{found}{where}; all slots agree: {why}")
    changed = next(iter(state.labels(graph[1], besides)), None)
    message = (
        f"a replay leaves other bytes than the step in {changed}, though all slots and outputs agree: the step reads "
        "something that is not a slot, such as a host value at capture, to tell what it writes there or where"
    )
    return None if changed is None else Finding(PARITY, None, message)


def _bearable_tails(trial: Trial, turn: int) -> Tensors:
    """Make slots with other values that tails may have.

    Padded rows may all write one reserved row, and any of them may be the last.
    """
    spared = set[str]()
    for name, filled in trial.filled.items():
        slot = trial.declared[name]
        is_index = isinstance(slot.rule(), Keep) and not filled.dtype.is_floating_point  # eager steps check indices
        if is_index or slot.rewritten or slot.writers == BY_STEP:
            spared.add(name)
    return other_tails(trial, turn, torch.Generator().manual_seed(turn), spared)


def _raised(found: object) -> Finding | None:
    """Return a finding if the step raised on this rank, or None."""
    if not isinstance(found, Exception):
        return None
    return Finding(PARITY, None, f"the step raised {error_text(found)} where its graph is replayed")
