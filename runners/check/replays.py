"""Checks of poison and parity: live rows do not depend on tails, and graphs do what their steps do."""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final

import torch

from ...dataflow.axes import BATCH, TOKENS, Step
from ...dataflow.buffers import Buffers
from ...dataflow.capabilities import Capabilities
from ...dataflow.errors import ComputeError, place_now
from ...dataflow.fill.bucket import Bucket
from ...dataflow.oracle import fill_slot_by_slot
from ...dataflow.slots import BY_STEP, Slot
from ...dataflow.tails import Keep, Number, Once, Pad, resolve_value
from ..engine.bits import first_unequal, unequal_rows
from ..engine.config import PARITY, POISON
from ..engine.sampling import Sample, is_location
from ..engine.selection import frozen_text
from ..engine.traffic import Traffic
from ..testing.ground import fill_faults, spoil
from .trial import (
    BITWISE,
    NOTHING,
    OTHER_SHAPES,
    USUAL,
    Finding,
    Leaves,
    Tensors,
    Trial,
    cloned,
    copies,
    error_text,
    live_part,
    mismatches,
    seen,
    tails_of,
)

MOST_VALUES: Final = 4096  # the most values of live rows to choose poison from
DRAWS: Final = 8  # for one batch, the number of runs with other random numbers
DECLARED: Final = (
    "what the step or someone else writes there must be declared, by rewritten=True or restored=True, and all that its "
    "function depends on, by again="
)
COPIES: Final = 2  # two copies of the state: before and after the step
PoisonPair = tuple[tuple[Number, ...], tuple[Number, ...]]
"""Values that a tail is drawn from, in one run and in another."""


def check_poison(trial: Trial, batches: Iterable[Sample]) -> Iterator[Finding]:
    """Fill and replay each batch with poison in its tails, except in slots that were already reported."""
    guilty = set[str | None]()
    drawn = list[Finding]()
    for number, one in enumerate(batches):
        found = _fill_faults(trial, one, number)
        guilty.update(finding.slot for finding in found)
        trial.fill(one)
        if trial.graph and trial.signed is not None:
            found += _kept_faults(trial, trial.graph.filling.bucket, one.batch)
        found += poison_faults(trial, trial.seed + number, guilty)
        guilty.update(finding.slot for finding in found)
        yield from found
        is_over = trial.any(trial.lost or None in guilty)
        if not (is_over or drawn or trial.random):
            drawn = _drawn_numbers(trial)
            yield from drawn
        for name, filled in trial.filled.items():
            slot = trial.slots[name]
            if slot.rule() is not None and _poison_in(trial, name) is None and [*tails_of(slot, filled, trial.step)]:
                why = "it says poison=()" if slot.poison == () else "it decides where the step writes"
                trial.notes[f"slot {name!r} was checked against its {slot.rule()}: {why}"] = None
        if is_over:
            return


def _fill_faults(trial: Trial, one: Sample, number: int) -> list[Finding]:
    """Find slots that are wrong after a fill, over the memory that a step left (it may write tails) or over garbage."""
    buffers = trial.buffers
    seed = trial.seed + number
    with trial.state.kept():
        trial.runner(one.batch, **one.side)
    found = [*_compared(trial, one, [cloned(buffers)])]
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
        inverse = cloned(buffers)
        spoil(inverse, buffers.capacity, seed, flipped=True)
        return [*_compared(trial, one, [cloned(buffers), inverse])]


def _kept_faults(trial: Trial, bucket: Bucket, batch: Any) -> Iterator[Finding]:
    """Find slots that keep their value if sources change that `again=` does not name."""
    for one in bucket.functions(bucket.padded).on_host:
        if one.again is None:
            continue
        with trial.slots_kept(), contextlib.suppress(ComputeError):  # it may take no such values
            for name in trial.declaration.sources.keys() - one.again.compute.needs:
                held = vars(trial.view)[name]
                if held is not None and held.dim():
                    held.copy_(held[-1:].clone())
            one.run(batch, trial.step)
            kept = one.target.clone()
            trial.buffers.distrust()
            one.run(batch, trial.step)
            if first_unequal(kept, one.target) is not None:
                yield Finding(POISON, one.slot, f"slot {one.slot!r} holds the value of another batch; {DECLARED}")


def _compared(trial: Trial, one: Sample, oracles: Sequence[Buffers]) -> Iterator[Finding]:
    """Fill, and compare with the oracle over the same bytes, and with a fill over other bytes."""
    declaration = trial.declaration
    trial.fill(one)
    for oracle in oracles:
        given = declaration, oracle, trial.backend.capabilities, trial.step, one.batch, one.side
        fill_slot_by_slot(*given, frozen=trial.frozen)
    for name in trial.slots:
        held = vars(trial.view)[name]
        if held is None or not trial.is_filled(name):
            continue
        expected, *others = (oracle[name].view(trial.step.padded_sizes) for oracle in oracles)
        unwritten = [rows for other in others if (rows := unequal_rows(expected, other))]
        if unwritten and (name in declaration.functions or name in declaration.sources):
            message = (
                f"slot {name!r} is not written by a fill: {unwritten[0]} still hold what lay there before; a kind of "
                "slot that a fill copies or resets must say so, by reads() and rule()"
            )
            yield Finding(POISON, name, message)
            continue
        for fault in fill_faults({name: held}, {name: expected}, trial.slots, trial.step.live_sizes):
            yield Finding(POISON, name, f"{fault}; {DECLARED}")


def poison_pair(slot: Slot, filled: torch.Tensor, step: Step, capabilities: Capabilities) -> PoisonPair | None:
    """Return two values to put into a slot's tail: integers from live rows, or extreme floats.

    Return None if the tail may have only its rule's value.
    """
    rule = slot.rule()
    poison = slot.poison
    sizes = step.padded_sizes
    values = tuple[Number, ...]()
    first, second = _extremes(filled.dtype)
    if slot.writers == BY_STEP:  # nothing reads this memory
        return first, second
    if isinstance(poison, tuple):
        values = tuple(resolve_value(value, capabilities, sizes) for value in poison)
    elif poison is None and (rule is None or (isinstance(rule, Pad) and is_location(slot))):  # padded rows write there
        return None
    else:
        usual = [resolve_value(rule.value, capabilities, sizes)] if isinstance(rule, Pad | Once) else []
        values = tuple(dict.fromkeys([*live_part(slot, filled, step).reshape(-1)[:MOST_VALUES].tolist(), *usual]))
    if poison is None and not isinstance(rule, Once):
        if not _is_whole(filled.dtype):
            return first, second
        if isinstance(rule, Keep):
            return values or first, second
    return (values, values[::-1]) if values else None


def _extremes(dtype: torch.dtype) -> PoisonPair:
    """Return the numbers of a dtype that are most likely to expose a fault."""
    if dtype == torch.bool:
        return (True,), (False,)
    if _is_whole(dtype):
        ends = torch.iinfo(dtype)
        return (ends.min,), (ends.max, ends.min)
    most = torch.finfo(dtype).max
    return (math.nan,), (most, -most, math.inf)


def _is_whole(dtype: torch.dtype) -> bool:
    """Return whether a dtype is one of whole numbers."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _poison_in(trial: Trial, name: str) -> PoisonPair | None:
    """Return the poison for the tail of a filled slot."""
    return poison_pair(trial.slots[name], trial.filled[name], trial.step, trial.backend.capabilities)


def other_tails(trial: Trial, choice: int, generator: torch.Generator, spared: Collection[str | None]) -> Tensors:
    """Make copies of slots with poison in their tails, or in all of an output, where that changes anything."""
    made: dict[str, torch.Tensor] = {}
    for name, filled in trial.filled.items():
        slot = trial.slots[name]
        tensor = filled.clone()
        poison = None if name in spared else _poison_in(trial, name)
        if poison is None:
            continue
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        values = torch.tensor(poison[choice], dtype=None if _is_whole(tensor.dtype) else wide, device="cpu").to(
            tensor.dtype
        )
        for part in [tensor] if slot.writers == BY_STEP else tails_of(slot, tensor, trial.step):
            order = torch.randint(0, len(values), (part.numel(),), device="cpu", generator=generator)
            order[:1] = 0
            part.copy_(values[order].reshape(part.shape))
        if first_unequal(filled, tensor) is not None:
            made[name] = tensor
    return made


def poison_faults(trial: Trial, seed: int = 0, spared: Collection[str | None] = ()) -> list[Finding]:
    """Put poison into tails of the filled step, and return a finding for each tail that a live row depends on.

    Args:
        trial: The step.
        seed: The seed of random poison.
        spared: Slots that are not poisoned.
    """
    written = list[Finding]()

    def look(outputs: Any) -> Tensors:
        written.extend(_written_slots(trial, spared))
        return _live(trial, outputs)

    usual = trial.run(look)
    if trial.error is not None:
        message = f"the step raised {error_text(trial.error)} on a batch that was filled as ever"
        return [Finding(POISON, None, message)]
    if usual is None:
        return []
    trial.usual = usual
    if trial.any(written):
        return written
    for poison in _rounds(trial, seed, spared):
        effect = _effect(trial, poison)
        if effect is not None:
            return _blamed(trial, poison, *effect)
    return []


def _written_slots(trial: Trial, spared: Collection[str | None]) -> Iterator[Finding]:
    """Find copied slots that the step has changed, although their declaration does not say that it writes them."""
    for name, held in trial.filled.items():
        if name in spared or name not in trial.declaration.sources or trial.slots[name].rewritten:
            continue
        left = vars(trial.view)[name]
        at = first_unequal(held, left)
        if at is not None:
            row = f"row {at[0]}" if at else "it"
            message = (
                f"the step writes slot {name!r}: {row} held {held[at].item()}, and holds {left[at].item()} after the "
                "step; write to a tensor of its own, or declare it, by rewritten=True or restored=True"
            )
            yield Finding(POISON, name, message)


def _rounds(trial: Trial, seed: int, spared: Collection[str | None]) -> list[Tensors]:
    """Return the slots to poison in each round: none, all, all again, and indices alone, which may stop a device."""
    generator = torch.Generator().manual_seed(seed)
    first, second = (other_tails(trial, choice, generator, spared) for choice in (0, 1))
    apart = [name for name in trial.slots if trial.any(name in second and _may_index(trial, name))]
    together = {name: tensor for name, tensor in second.items() if name not in apart}
    return [NOTHING, first, together, *(_of(second, [name]) for name in apart)]


def _may_index(trial: Trial, name: str) -> bool:
    """Return whether the padded rows of a slot may be used as indices."""
    slot = trial.slots[name]
    return isinstance(slot.rule(), Keep) and slot.poison is None and _is_whole(trial.filled[name].dtype)


def _live(trial: Trial, outputs: Any) -> Tensors:
    """Return the live rows of outputs. Their sizes show whether the step returned padded rows, too."""
    found = copies(outputs, "output")
    step = trial.step
    for name, tensor in found.items() if not trial.runner.cuts else ():
        for axis in (BATCH, TOKENS):  # if several axes fit, the last one counts
            if tensor.dim() and tensor.shape[0] == step.padded_sizes.get(axis):
                found[name] = tensor[: step.live_sizes[axis]]
    return found


def _effect(trial: Trial, poison: Tensors = NOTHING, draws: int = 0) -> tuple[str, bool] | None:
    """Return the change that poison causes on this rank, else on another rank, and whether it is on this one.

    Return None on all ranks if nothing changes.
    """
    found = trial.run(lambda outputs: _live(trial, outputs), poison, draws=draws)
    change = ""
    if trial.error is not None:
        change = f"the step raised {error_text(trial.error)}"
    elif found is not None and (apart := next(mismatches(trial.usual, found), None)):
        where = f"the {apart.where}" if apart.row is None else f"live row {apart.row} of the {apart.where}"
        change = f"{where} changed, from {apart.values[0]} to {apart.values[1]},"
    first = trial.first(change)
    if change or first is None:
        return (change, True) if change else None
    return f"on rank {first[0]} {first[1]}", False


def _blamed(trial: Trial, poison: Tensors, change: str, is_own: bool) -> list[Finding]:  # noqa: FBT001 - as found
    """Return this rank's findings: the slots that cause the change alone, else the smallest set that does together."""
    found = list[Finding]()
    is_alone = False
    names = [name for name in trial.slots if trial.any(name in poison)]
    if not names:
        message = (
            f"the step gives other outputs for the same inputs ({change.rstrip(',')}): its kernels are not "
            "deterministic, or it has state that no operator's schema shows; pass that as state=[...]"
        )
        return [Finding(POISON, None, message)] if is_own else []
    if trial.any(trial.lost):
        only = next(iter(poison)) if len(poison) == 1 else None
        tails = f"tails of slots {', '.join(map(repr, poison))}" if only is None else f"tail of slot {only!r}"
        lost = "nothing could be replayed after that to find which slot it is"
        return [Finding(POISON, only, f"{change} when the {tails} held poison; {lost}")] if poison else []
    for name in names:
        effect = _effect(trial, _of(poison, [name]))
        if effect is None:
            continue
        is_alone = True
        alone, is_own = effect
        # ranks report their own changes; if no rank has one, all ranks with poison report
        is_seen = trial.any(is_own and name in poison)
        if name in poison and (is_own or not is_seen):
            found.append(Finding(POISON, name, f"{alone} when {_place(trial, name, poison[name])}"))
    if is_alone:
        return found
    for name in names:
        rest = [other for other in names if other != name]
        if rest and _effect(trial, _of(poison, rest)) is not None:
            names = rest
    message = f"{change} when the tails of slots {', '.join(map(repr, names))} held other values together"
    return [Finding(POISON, None, message)] if _of(poison, names) else []


def _of(poison: Tensors, names: Collection[str]) -> Tensors:
    return {name: poison[name] for name in names if name in poison}


def _place(trial: Trial, name: str, now: torch.Tensor) -> str:
    """Describe the poison in a slot's tail, and what to do."""
    slot = trial.slots[name]
    before = trial.filled[name]
    rule = slot.rule()
    place = f"the tail of slot {name!r}"
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


def _drawn_numbers(trial: Trial) -> list[Finding]:
    """Find random numbers of the step, if live rows depend on them."""
    effect = _effect(trial, draws=1)
    operators = _drawing(trial)
    for draws in range(2, DRAWS if trial.any(operators) else 0):  # with few rows, two draws may give the same mask
        effect = effect or _effect(trial, draws=draws)
    if effect is None or not effect[1]:
        return []
    by = next(iter(operators), "Python's or NumPy's random")
    message = (
        f"two replays of one batch differ: {effect[0].rstrip(',')}, with other random numbers, which {by} draws: call "
        "eval() on a model whose dropout is still on; if the step draws on purpose, as a sampler, say random=True"
    )
    return [Finding(POISON, None, message)]


def _drawing(trial: Trial) -> list[str]:
    """Return the operators of the step that draw random numbers, each with its line."""
    device = trial.backend.device
    found = list[str]()

    def generators() -> list[bytes]:
        states = [torch.get_rng_state()]
        if device.type != "cpu":
            states.append(torch.get_device_module(device).get_rng_state(device))
        return [state.numpy().tobytes() for state in states]

    last = generators()

    def note(operator: str, *_: object) -> None:
        nonlocal last
        if generators() != last:
            found.append(f"{operator}{place_now()}")
            last = generators()

    trial.watch(Traffic(done=note))
    return found


def check_parity(trial: Trial, batches: Iterable[Sample]) -> Iterator[Finding]:
    """Compare graphs with their step: on the padded view, and then with the batch alone."""
    trial.state.check_room(COPIES)
    yield from filter(None, (apart_from_step(trial, one) for one in batches))


def apart_from_step(trial: Trial, one: Sample) -> Finding | None:
    """Return how the graph's results differ from the step's, on the padded view or on the batch alone, or None."""
    alone = _seen_alone(trial, one)
    trial.fill(one)
    finding = parity_fault(trial)
    if trial.any(finding):
        return finding
    if isinstance(alone, Exception):
        has_rows = trial.runner.size(one.batch, one.side)[-1]  # a batch without rows is always padded
        message = f"the step raised on the batch without padding: {error_text(alone)}"
        return Finding(PARITY, None, message) if has_rows else None
    graph = trial.run(trial.seen)
    if graph is None:
        return None
    apart = [*mismatches(graph, alone, OTHER_SHAPES, step=trial.step)]
    computed = [one for one in apart if one.slot in trial.declaration.functions]
    found = next((one for one in apart if one.slot not in trial.declaration.functions), None)
    is_drawn = trial.any(found) and _redraws(trial, graph)
    if found is not None and found.slot in trial.declaration.sources:
        return Finding(PARITY, found.slot, f"{found}: the fill of the padded bucket is not that of the batch")
    if found is None or is_drawn:  # for another shape a step draws other random numbers
        return None if is_drawn else _left_apart(trial, one)
    slots = "; ".join(map(str, computed)) or "all slots agree in their live rows"
    frozen = frozen_text(trial.frozen)
    message = (
        f"{found}; {slots}; on the padded view the step gives what the graph gives: padded rows, or what is computed "
        f"for the bucket{f' or frozen in the graph ({frozen})' * bool(frozen)}, reach live ones"
    )
    return Finding(PARITY, computed[0].slot if computed else None, message)


def _seen_alone(trial: Trial, one: Sample, times: int = 1) -> Leaves | Exception:
    """Run the step without its graph, on a batch without padding. Return its results the last time, or its error."""
    runner = trial.runner
    if trial.declaration.ranks is not None:
        trial.fill(one)  # computed slots may need the sizes of all ranks, which a fill exchanges
    found: Leaves = {}
    with trial.state.kept(), trial.slots_kept():
        live = runner.size(one.batch, one.side)
        try:
            for _ in range(times):
                route, view = runner.eager.fill(one.batch, live, one.side)
                trial.produce(view)
                found = seen(view, route.run(view, live))
        except Exception as error:  # noqa: BLE001 - an error of a step or function at other sizes is a result
            return error
    return found


def _left_apart(trial: Trial, one: Sample) -> Finding | None:
    """Return how the step after a graph's differs from the step after the batch alone, or None.

    Both run the same batch again, without padding. Drawn batches do not know rows that padded rows may write.
    """
    if trial.signed is not None or trial.random or trial.ranks.size > 1 or not trial.state.pieces:
        return None
    alone = _seen_alone(trial, one, times=2)
    trial.fill(one)
    graph = trial.run(lambda _: _seen_alone(trial, one))
    if graph is None or isinstance(graph, Exception) or isinstance(alone, Exception):
        return None
    names = "after the graph", "after the batch alone"
    found = next(mismatches(graph, alone, OTHER_SHAPES, names), None)
    if found is None or _drawing(trial):  # for another shape a step draws other random numbers
        return None
    message = (
        f"in the next step {found}: padded rows, or what is computed for the bucket, change what live rows leave for "
        "later steps, such as a cache"
    )
    return Finding(PARITY, None, message)


def _redraws(trial: Trial, usual: Leaves, by: Callable[[], Any] | None = None) -> bool:
    """Return whether runs with other random numbers give other results."""
    runs = range(1, DRAWS)  # few rows may draw one mask twice
    others = [trial.run(trial.seen, by=by, draws=draws) for draws in runs]
    return any(other is not None and any(mismatches(usual, other, USUAL)) for other in others)


def parity_fault(trial: Trial) -> Finding | None:
    """Return how a graph's results differ from its step's, or None.

    The usual tolerances apply if two runs of the step differ.
    """
    state = trial.state
    eager = trial.run(lambda outputs: (trial.seen(outputs), state.copy()), by=trial.eagerly)
    if eager is None:
        return _raised(trial)
    expected, left = eager

    def look(outputs: Any) -> tuple[Any, Any]:
        return trial.seen(outputs), state.apart(left)

    graph = trial.run(look)
    if graph is None:
        return _raised(trial)
    is_left = bool(state.labels(graph[1]))
    if not trial.any(is_left or any(mismatches(graph[0], expected, step=trial.step))):
        return None
    again = trial.run(look, by=trial.eagerly)
    if again is None:
        return _raised(trial)
    besides = [again[1]]
    for choice in (0, 1) if trial.any(is_left) else ():
        other = trial.run(look, _bearable_tails(trial, choice), by=trial.eagerly)
        besides += [] if other is None else [other[1]]
    differs = any(mismatches(expected, again[0], step=trial.step))  # a graph need not be more exact than its step
    every = mismatches(graph[0], expected, USUAL if differs else BITWISE, step=trial.step)
    found = min(every, key=lambda one: one.slot is None, default=None)  # a slot is nearer to the cause
    is_drawn = trial.any(found and not differs) and _redraws(trial, expected, trial.eagerly)
    if found is not None:
        where = "" if trial.graph is None else f" (bucket {trial.graph.bucket})"
        why = "the step reads something that is not a slot, such as a host value or an address at capture"
        if is_drawn:
            why = "the step draws random numbers on the host, and the graph keeps those of its capture: draw by torch"
        why = f"; all slots agree: {why}"
        if found.slot in trial.declaration.functions:
            why = ": its function reads something that is not a slot, such as a host value, or its kernel= differs"
        return Finding(PARITY, found.slot, f"{found}{where}{why}")
    changed = next(iter(state.labels(graph[1], besides)), None)
    message = (
        f"a replay leaves other bytes than the step in {changed}, though all slots and outputs agree: the step reads "
        "something that is not a slot, such as a host value at capture, to decide what it writes there or where"
    )
    return None if changed is None else Finding(PARITY, None, message)


def _bearable_tails(trial: Trial, choice: int) -> Tensors:
    """Make copies of slots with other values in their tails that the rules allow.

    Padded rows may all write one reserved row, and any of them may be the last.
    """
    others = (name for name, slot in trial.slots.items() if slot.rewritten or slot.writers == BY_STEP)
    indices = (name for name in trial.filled if _may_index(trial, name))  # an eager step would check their values
    return other_tails(trial, choice, torch.Generator().manual_seed(choice), {*others, *indices})


def _raised(trial: Trial) -> Finding | None:
    """Return a finding if the step raised on this rank, or None."""
    if trial.error is None:
        return None
    return Finding(PARITY, None, f"the step raised {error_text(trial.error)} where its graph is replayed")
