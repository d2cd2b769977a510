"""Check of transitions: slots advance by their rules, with and without edits, whatever values padded rows have."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, Final

import attrs
import torch

from ...dataflow.axes import Step
from ...dataflow.buffers import Buffers, at_rest
from ...dataflow.errors import BatchError, ConfigError, SlotGraphError
from ...dataflow.oracle import advance_slot_by_slot, fill_slot_by_slot
from ...dataflow.slots import BY_STEP
from ...dataflow.tails import Once, Pad
from ...dataflow.transition import rows_of_requests
from ..engine.graphs import Captured
from ..engine.sampling import Sample
from ..testing.ground import fill_faults
from .chunks import chunk_faults, ended_faults, reserved_faults
from .trial import OTHER_SHAPES, Finding, Tensors, Trial, cloned, live_part, mismatches, tails_of

TRANSITION: Final = "transition"
LAST: Final = 3
"""The last step that is checked.

The first is a fill, the next has no edit, then come one with an edit and one without.
"""
ALONE: Final = "have its then= make live rows of live ones alone, or of tails that change nothing"


def check_transition(trial: Trial, batches: Iterable[Sample]) -> Iterator[Finding]:
    """Run steps from each batch, some without an edit and one with an edit, and compare slots with their rules."""
    seen = set[Captured | None]()
    with trial.state.kept(), trial.slots_kept():
        for one in batches:
            found = next(_faults(trial, one), None)  # later faults may only follow from the first
            if found is not None:
                yield found
                continue
            trial.fill(one)
            faults = [*ended_faults(trial), *reserved_faults(trial)]
            if trial.graph not in seen:
                seen.add(trial.graph)
                faults += chunk_faults(trial, one)
            for name, fault in faults:
                yield Finding(TRANSITION, name, fault)


def _faults(trial: Trial, one: Sample) -> Iterator[Finding]:
    """Find faults of the rules on one batch, or of the kernels and graphs that run them."""
    trial.fill(one)
    runner: Any = trial.runner  # only a DecodeRunner has `steps`
    declaration = trial.declaration
    record = trial.backend.capabilities
    step = trial.step
    right = cloned(trial.buffers)
    when = "on initial values, as captures run it"
    try:
        with at_rest(right, record):
            rows = advance_slot_by_slot(declaration, right, record, step)
        runner(one.batch, **one.side)
        _leave_stale_rows(trial, step)
        for last in runner.steps(one.batch):
            trial.backend.synchronize()
            if last.number:
                for name, fault in _unlike(trial, right, (*rows, *trial.slots), step):
                    yield Finding(TRANSITION, name, f"{fault}, {when}")
            else:
                yield from _bucket_faults(trial)
            if last.number == LAST:
                return
            right = cloned(trial.buffers)
            rows = advance_slot_by_slot(declaration, right, record, step)
            when = "in a step without an edit"
            if last.number == 1:
                when = "in a step with an edit"
                rows, step = _edited(trial, last, rows, step)
            fill_slot_by_slot(declaration, right, record, step, one.batch, given=rows)
    except (BatchError, ConfigError) as error:
        trial.notes[f"no transition was checked: {error}"] = None
    except SlotGraphError as error:
        yield Finding(TRANSITION, None, f"{error}, {when}")


def _unlike(trial: Trial, right: Buffers, names: Iterable[str], step: Step) -> Iterator[tuple[str, str]]:
    """Yield each slot with wrong values, and the fault. Slots that the step writes are not compared."""
    for name in names:
        slot = trial.slots[name]
        if name not in trial.runner.stage.absent_in(trial.view) and not slot.rewritten and slot.writers != BY_STEP:
            mine, other = ({name: held[name].view(step.padded_sizes)} for held in (trial.buffers, right))
            yield from ((name, fault) for fault in fill_faults(mine, other, trial.slots, step.live_sizes))


def _edited(trial: Trial, last: Any, rows: Tensors, step: Step) -> tuple[Tensors, Step]:
    """Let the first and the last request leave before the next step, if there is a graph for the others.

    Return the rows of the others, and the sizes of the step.
    """
    runner: Any = trial.runner
    requests = len(last.keys)
    made = dict(rows)
    stay = [max(requests - 2, 0), *range(1, requests - 2)]
    bucket = runner.buckets.fit(len(stay))
    if trial.graphs.has(bucket, runner.stage.absent_in(trial.view), tuple(trial.frozen.values())):
        last.leave({*last.keys} - {last.keys[row] for row in stay})
        for name, tensor in rows.items():
            place = rows_of_requests(trial.slots[name], step.padded_sizes)
            if place is not None:
                dim, each = place
                at = [row * each + part for row in stay for part in range(each)]
                made[name] = tensor.index_select(dim, torch.tensor(at, device=tensor.device))
        live = [step.live_sizes[axis] // requests * len(stay) for axis in trial.declaration.varying]
        step = trial.declaration.step(live, runner.sizes[bucket])
    last.edit()
    return made, step


def _leave_stale_rows(trial: Trial, step: Step) -> None:
    """Copy live rows into the rows that a fill does not write, as a fuller batch would leave them."""
    for name in trial.declaration.sources:
        slot = trial.slots[name]
        tensor = trial.buffers[name].tensor
        for dim in slot.varying if not isinstance(slot.rule(), Once) else ():
            live = slot.shape[dim].at(step.live_sizes)
            if live:
                tensor.copy_(tensor.index_select(dim, torch.arange(tensor.shape[dim], device=tensor.device) % live))
    trial.buffers.distrust()


def _bucket_faults(trial: Trial) -> Iterator[Finding]:
    """Find rules whose live rows depend on the bucket, or on padded rows whose values no rule defines."""
    declaration = trial.declaration
    record = trial.backend.capabilities
    sizes = trial.runner.sizes
    step = trial.step
    absent = trial.runner.stage.absent_in(trial.view)
    exact = attrs.evolve(step, padded_sizes=step.live_sizes)
    largest = attrs.evolve(step, padded_sizes={**step.padded_sizes, **sizes[max(sizes)]})

    def advanced(buffers: Buffers, sizes: Step = step) -> Tensors:
        """Return the live rows that rules compute, or none if a rule cannot run on these values."""
        try:
            rows = advance_slot_by_slot(declaration, cloned(buffers), record, sizes)
        except SlotGraphError:
            return {}
        return {name: rows[name] for name in declaration.rules if name not in absent}

    held = cloned(trial.buffers)
    negative = cloned(trial.buffers)
    on_host, extreme = (cloned(trial.buffers, torch.device("cpu")) for _ in range(2))  # where invalid indices raise
    with torch.no_grad():
        for name in trial.signed or ():
            live = live_part(trial.slots[name], negative[name].tensor, step)
            live.copy_(-live.abs() - 1)
        for name, slot in trial.slots.items():
            rule = slot.rule()
            is_free = slot.writers == BY_STEP or not (rule is None or isinstance(rule, Pad))
            for tail in tails_of(slot, extreme[name].view(step.padded_sizes), step) if is_free else ():
                is_float = tail.is_floating_point() or tail.is_complex()
                tail.fill_(math.nan if is_float else tail.dtype == torch.bool or torch.iinfo(tail.dtype).max)
    pairs = [("if padded rows that no rule defines hold other values", advanced(on_host), advanced(extreme))]
    for buffers in (negative, held):
        usual = advanced(buffers)
        pairs[:0] = [
            ("where the bucket has no padded rows", usual, advanced(buffers, exact)),
            ("in the largest bucket", usual, advanced(buffers, largest)),
        ]
    for where, usual, found in pairs:
        for name in [apart.where for apart in mismatches(found, usual, OTHER_SHAPES)] if usual and found else ():
            fault = next(fill_faults(found, {name: usual[name]}, trial.slots, step.live_sizes))
            yield Finding(TRANSITION, name, f"{fault}, {where}: {ALONE}")
