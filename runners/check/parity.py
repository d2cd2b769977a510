"""Parity: a step's graph beside the step as it is written, on the same padded view and on a batch without padding."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from ...dataflow.errors import MissingSourceError
from ...dataflow.slots import Output
from ...dataflow.tails import Keep
from ..comparison import (
    BITWISE,
    USUAL,
    Seen,
    Tolerances,
    computed_apart,
    differences,
    first_difference,
    graph_of,
    seen,
    slots_kept,
)
from ..eagerly import Eagerly
from ..state import Apart
from .poison import other_tails
from .report import Finding
from .trial import CheckedBatch, Subject, Tensors, Trial

NAME: Final = "parity"
COPIES: Final = 2
"""Copies of the state at once: as it was, and as the step left it."""
OTHER_SHAPES: Final[Tolerances] = {
    **USUAL,
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (5e-2, 5e-2),
    torch.float32: (1e-3, 1e-3),
}
"""How far a model's outputs for a padded batch may be from those for the batch alone: kernels for other shapes add in
another order, layer after layer. What padded rows do to live ones is for poison to find, which asks for equal bits."""


def check(subject: Subject[Any], batches: Iterable[CheckedBatch]) -> Iterator[Finding]:
    """Hold graphs to their step."""
    subject.state.check_room(COPIES)
    for one in batches:
        finding = _fault_on(subject, one)
        if finding is not None:
            yield finding


def _fault_on(subject: Subject[Any], one: CheckedBatch) -> Finding | None:
    """What is wrong with one batch: on the padded view, or else beside the batch alone, since that follows from it."""
    parts = subject.parts
    if parts.stage.declaration.ranks is not None:
        subject.fill(one)  # by which ranks know what all bring, as computed slots may ask
    with subject.state.kept(), slots_kept(parts):
        exact = _without_padding(subject, one)
    trial = subject.trial(one)
    finding = fault_of(trial)
    if subject.together.any(finding is not None):
        return finding
    if isinstance(exact, str):
        is_empty = not parts.size(one.batch, one.side)[-1]  # which is padded in each step, and nothing of it comes out
        return None if is_empty else Finding(NAME, None, exact)
    graph = trial.run(lambda outputs: seen(trial.view, outputs))
    return None if isinstance(graph, Exception) else _unpadded_fault(graph, exact)


def _without_padding(subject: Subject[Any], one: CheckedBatch) -> Seen | str:
    """What the step does with a batch if nothing is padded. A sentence if it raises there."""
    eager = subject.parts.eager
    try:
        view = eager.fill(one.batch, **one.side)
    except MissingSourceError:
        parts = subject.parts
        eager = Eagerly(parts.stage, parts.name, parts.size, buffers=subject.graphs.buffers)  # which carries nothing
        view = eager.fill(one.batch, **one.side)
    try:
        return seen(view, eager.run(view))
    except Exception as error:  # noqa: BLE001 - whatever a step makes of other sizes is a result
        return f"the step raised on the batch without padding: {type(error).__name__}: {error}"


def _unpadded_fault(graph: Seen, eager: Seen) -> Finding | None:
    found = first_difference(graph, eager, tolerance=OTHER_SHAPES)
    if found is None:
        return None
    if found.slot is not None:
        return Finding(NAME, found.slot, f"{found}: the fill of the padded bucket is not that of the batch")
    apart = computed_apart(graph, eager)
    told = "; ".join(map(str, apart)) or "all slots agree in their live rows"
    message = (
        f"{found}; {told}; on the padded view the step gives what the graph gives: padded rows, or what is computed "
        "for the bucket, reach live ones"
    )
    return Finding(NAME, apart[0].slot if apart else None, message)


def fault_of(trial: Trial[Any]) -> Finding | None:
    """What a graph does otherwise than its step, from the same slots and state. None if it does the same.

    A step that does not do the same twice is held to the usual tolerances.
    """
    state, together = trial.state, trial.together
    eager = trial.run(lambda outputs: (seen(trial.view, outputs), state.copy()), by=trial.eagerly)
    if trial.raised or isinstance(eager, Exception):
        return _raised(eager)
    expected, left = eager

    def look(outputs: Any) -> tuple[Seen, Apart]:
        return seen(trial.view, outputs), state.apart(left)

    graph = trial.run(look)
    if trial.raised or isinstance(graph, Exception):
        return _raised(graph)
    found = next(differences(graph[0], expected, tolerance=BITWISE), None)
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
    if any(differences(expected, again[0], tolerance=BITWISE)):  # so no more can be asked of its graph
        found = next(differences(graph[0], expected, tolerance=USUAL), None)
    if found is not None:
        captured = graph_of(trial.parts, trial.view)
        where = "" if captured is None else f" (bucket {captured.rows})"
        why = "the step reads something that is no slot, such as a host value or an address at capture"
        return Finding(NAME, found.slot, f"{found}{where}; all slots agree: {why}")
    told = next(iter(state.told(graph[1], besides)), None)
    message = (
        f"a replay leaves other bytes than the step in {told}, though all slots and outputs agree: the step reads "
        "something that is no slot, such as a host value at capture, to tell what it writes there or where"
    )
    return None if told is None else Finding(NAME, None, message)


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
    return Finding(NAME, None, f"the step raised {type(found).__name__}: {found} where its graph is replayed")
