"""Check of transitions: slots advance by their rules, in steps with edits and without, whatever padded rows have."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import attrs
import torch

from ...dataflow.axes import Step
from ...dataflow.buffers import Buffers, at_rest
from ...dataflow.errors import BatchError, ConfigError, SlotGraphError
from ...dataflow.guard import outside_inference
from ...dataflow.oracle import advance_slot_by_slot, fill_slot_by_slot
from ...dataflow.plan import Absent
from ...dataflow.slots import BY_STEP
from ...dataflow.tails import Once, Pad
from ...dataflow.transition import rows_of_requests
from ..comparison import live_part, mismatches, slots_kept, tails_of
from ..engine.sampling import Sample
from ..testing.ground import fill_faults
from .replays import OTHER_SHAPES, cloned
from .trial import Finding, Subject, Tensors

TRANSITION: Final = "transition"
LAST: Final = 3
"""The last step that is checked.

The first is a fill, the next has no edit, then come one with an edit and one without.
"""
ALONE: Final = "have its then= make live rows of live ones alone, or of tails that change nothing"


def check_transition(subject: Subject, batches: Iterable[Sample]) -> Iterator[Finding]:
    """Let slots advance from each batch, in steps without an edit and in one with, and compare with their rules."""
    with subject.state.kept(), slots_kept(subject.runner):
        for one in batches:
            yield from itertools.islice(_faults(subject, one), 1)  # the first fault causes the others


def _faults(subject: Subject, one: Sample) -> Iterator[Finding]:
    """Find what is wrong with rules on one batch, or with what runs them."""
    runner, stage, buffers, step = subject.runner, subject.runner.stage, subject.buffers, subject.step_of(one)
    declaration, record, absent = stage.declaration, stage.backend.capabilities, stage.absent(one.batch, one.side)
    right, when = cloned(buffers), "on initial values, as captures run it"
    written = {name for name, slot in subject.slots.items() if slot.rewritten or slot.writers == BY_STEP}
    compared = [name for name in subject.slots if name not in absent | written]
    try:
        with at_rest(right, record):
            rows = advance_slot_by_slot(declaration, right, record, step)
        runner(one.batch, **one.side)
        _leave_stale_rows(subject, step)
        for last in runner.steps(one.batch):  # type: ignore[attr-defined] # a DecodeRunner's
            stage.backend.synchronize()
            for name in [one for one in dict.fromkeys((*rows, *compared)) if one in compared and last.number]:
                mine, other = ({name: held[name].view(step.padded_sizes)} for held in (buffers, right))
                for fault in fill_faults(mine, other, subject.slots, step.live_sizes):
                    yield Finding(TRANSITION, name, f"{fault}, {when}")
            if last.number == LAST:
                return
            if not last.number:
                yield from _bucket_faults(subject, step, absent)
            right = cloned(buffers)
            rows = advance_slot_by_slot(declaration, right, record, step)
            when = "in a step without news"
            if last.number == 1:
                when, requests = "in a step with an edit", len(last.keys)
                stay = [max(requests - 2, 0), *range(1, requests - 2)]  # the first and the last of several leave
                bucket = runner.buckets.fit(len(stay))  # type: ignore[attr-defined] # as above
                if subject.graphs.has(bucket, absent):
                    last.leave({*last.keys} - {last.keys[row] for row in stay})
                    rows = _of_requests(subject, rows, stay, step)
                    live = [step.live_sizes[axis] // requests * len(stay) for axis in declaration.varying]
                    step = declaration.step(live, runner.sizes[bucket])
                last.edit()
            fill_slot_by_slot(declaration, right, record, step, one.batch, given=rows)
    except (BatchError, ConfigError) as error:
        subject.notes[f"no transition was checked: {error}"] = None
    except SlotGraphError as error:
        yield Finding(TRANSITION, None, f"{error}, {when}")


def _of_requests(subject: Subject, rows: Mapping[str, torch.Tensor], stay: list[int], step: Step) -> Tensors:
    """Return the rows of some requests, in slots that have rows of requests."""
    found = dict(rows)
    for name, tensor in rows.items():
        place = rows_of_requests(subject.slots[name], step.padded_sizes)
        if place is not None:
            dim, each = place
            at = [row * each + part for row in stay for part in range(each)]
            found[name] = tensor.index_select(dim, torch.tensor(at, device=tensor.device))
    return found


def _leave_stale_rows(subject: Subject, step: Step) -> None:
    """Write live rows of copied slots wherever a fill does not write, as after a fuller batch."""
    for name in subject.declaration.sources:
        slot, tensor = subject.slots[name], subject.buffers[name].tensor
        for dim in slot.varying if not isinstance(slot.rule(), Once) else ():
            live = slot.shape[dim].at(step.live_sizes)
            if live:
                tensor.copy_(tensor.index_select(dim, torch.arange(tensor.shape[dim], device=tensor.device) % live))
    subject.buffers.distrust()


def _bucket_faults(subject: Subject, step: Step, absent: Absent) -> Iterator[Finding]:
    """Find rules whose live rows depend on the bucket, or on padded rows whose values no rule defines."""
    runner, stage, held = subject.runner, subject.runner.stage, cloned(subject.buffers)
    exact = attrs.evolve(step, padded_sizes=step.live_sizes)
    largest = attrs.evolve(step, padded_sizes={**step.padded_sizes, **runner.sizes[max(runner.sizes)]})
    on_host, extreme, negative = _on_host(held), _on_host(held), _on_host(held)
    with torch.no_grad():
        for name, slot in subject.slots.items():
            rule = slot.rule()
            is_free = slot.writers == BY_STEP or not (rule is None or isinstance(rule, Pad))
            for tail in tails_of(slot, extreme[name].view(step.padded_sizes), step) if is_free else ():
                is_float = tail.is_floating_point() or tail.is_complex()
                tail.fill_(math.nan if is_float else tail.dtype == torch.bool or torch.iinfo(tail.dtype).max)
            if name in subject.signed:
                live = live_part(slot, negative[name].tensor, step)
                live.copy_(-live.abs() - 1)

    def advanced(buffers: Buffers, sizes: Step) -> Tensors | None:
        """Return the live rows that rules make, or None if one cannot run on such values."""
        try:
            rows = advance_slot_by_slot(stage.declaration, cloned(buffers), stage.backend.capabilities, sizes)
        except SlotGraphError:
            return None
        return {name: rows[name] for name in stage.declaration.rules if name not in absent}

    others = "where padded rows that no rule tells hold other values"
    for right, other, sizes, where in (
        (held, held, exact, "where the bucket has no padded rows"),
        (held, held, largest, "in the largest bucket"),
        (on_host, extreme, step, others),
        (negative, negative, exact, "where the bucket has no padded rows"),
        (negative, negative, largest, "in the largest bucket"),
    ):
        usual, found = advanced(right, step), advanced(other, sizes)
        if usual is None or found is None:
            continue
        for name in [apart.where for apart in mismatches(found, usual, OTHER_SHAPES)]:
            fault = next(fill_faults(found, {name: usual[name]}, subject.slots, step.live_sizes))
            yield Finding(TRANSITION, name, f"{fault}, {where}: {ALONE}")


def _on_host(buffers: Buffers) -> Buffers:
    """Return the same bytes in host memory, where an invalid index raises and does not stop a device."""
    found = cloned(buffers)
    with outside_inference():
        for buffer in found:
            buffer.tensor = buffer.tensor.cpu()
    return found
