"""Check of parity: graphs do what their steps do, on the padded view and for the batch alone."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from ...dataflow.slots import BY_STEP
from ...dataflow.tails import Keep
from ..engine.config import PARITY
from ..engine.sampling import Sample
from .compare import BITWISE, OTHER_SHAPES, USUAL, Leaves, Seen, differences, mismatches, seen
from .poison import other_tails
from .trial import Finding, Tensors, Trial, error_text

COPIES: Final = 2  # copies of the state: as it was, and as the step left it


def check_parity(trial: Trial, batches: Iterable[Sample]) -> Iterator[Finding]:
    """Compare graphs with their step: on the padded view, and then with the batch alone."""
    trial.state.check_room(COPIES)
    yield from filter(None, (apart_from_step(trial, one) for one in batches))


def apart_from_step(trial: Trial, one: Sample) -> Finding | None:
    """Return what the graph of a batch does differently from the step, padded or not, or None."""
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
    found = next(differences(graph, alone, OTHER_SHAPES), None)
    is_drawn = trial.any(found) and _redraws(trial, graph.outputs, by=None)
    if found is not None and found.where in graph.copied:
        return Finding(PARITY, found.slot, f"{found}: the fill of the padded bucket is not that of the batch")
    if found is None or is_drawn:  # a step draws other numbers for another shape
        return None
    apart = list(mismatches(graph.computed, alone.computed, step=graph.step))
    slots = "; ".join(map(str, apart)) or "all slots agree in their live rows"
    message = (
        f"{found}; {slots}; on the padded view the step gives what the graph gives: padded rows, or what is computed "
        "for the bucket, reach live ones"
    )
    return Finding(PARITY, apart[0].slot if apart else None, message)


def _seen_alone(trial: Trial, one: Sample) -> Seen | Exception:
    """Run the step as it is written on a batch without padding. Return what it raises."""
    runner = trial.runner
    if trial.declaration.ranks is not None:
        trial.fill(one)  # computed slots may need the sizes of all ranks, which a fill exchanges
    with trial.state.kept(), trial.slots_kept():
        live = runner.size(one.batch, one.side)
        route, view = runner.eager.fill(one.batch, live, one.side)
        trial.produce(view)
        try:
            return seen(view, route.run(view, live))
        except Exception as error:  # noqa: BLE001 - an error of a step at other sizes is a result
            return error


def _redraws(trial: Trial, outputs: Leaves, by: Any) -> bool:
    """Return whether another run by the same way gives other outputs with other random numbers."""
    other = trial.run(lambda made: trial.seen(made).outputs, by=by, draws=1)
    return other is not None and any(mismatches(outputs, other, USUAL, step=trial.step))


def parity_fault(trial: Trial) -> Finding | None:
    """Return what a graph does differently from its step, or None.

    The usual tolerances apply if two runs of the step differ.
    """
    state = trial.state
    eager = trial.run(lambda outputs: (trial.seen(outputs).outputs, state.copy()), by=trial.eagerly)
    if eager is None:
        return _raised(trial)
    expected, left = eager

    def look(outputs: Any) -> tuple[Any, Any]:
        return trial.seen(outputs).outputs, state.apart(left)

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
    for turn in (0, 1) if trial.any(is_left) else ():
        other = trial.run(look, _bearable_tails(trial, turn), by=trial.eagerly)
        besides += [] if other is None else [other[1]]
    differs = any(mismatches(expected, again[0], step=trial.step))  # a graph need not be more exact than its step
    every = mismatches(graph[0], expected, USUAL if differs else BITWISE, step=trial.step)
    found = min(every, key=lambda one: one.slot is None, default=None)  # a slot says more than an output
    is_drawn = trial.any(found and not differs) and _redraws(trial, expected, by=trial.eagerly)
    if found is not None:
        where = "" if trial.graph is None else f" (bucket {trial.graph.rows})"
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
        slot = trial.slots[name]
        is_index = isinstance(slot.rule(), Keep) and not filled.dtype.is_floating_point  # eager steps check indices
        if is_index or slot.rewritten or slot.writers == BY_STEP:
            spared.add(name)
    return other_tails(trial, turn, torch.Generator().manual_seed(turn), spared)


def _raised(trial: Trial) -> Finding | None:
    """Return a finding if the step raised on this rank, or None."""
    if trial.error is None:
        return None
    return Finding(PARITY, None, f"the step raised {error_text(trial.error)} where its graph is replayed")
