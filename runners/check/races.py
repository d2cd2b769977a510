"""Races: steps in flight one behind the other, their sources overwritten right after the call, against each alone."""

import contextlib
import copy
import itertools
import math
import time
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import attrs
import numpy as np
import torch
from torch import nn

from ...backends.base import Backend
from ...backends.ring import ENTRIES, SEGMENT
from ...dataflow.capabilities import HOST
from ..comparison import Mismatch, copies, live_part, mismatches, named, slots_kept, step_of
from ..stacked.capture import parts_of
from .fills import sources
from .report import Finding
from .trial import CheckedBatch, Subject, Tensors

NAME: Final = "races"
STEPS: Final = ENTRIES + SEGMENT
"""Steps in flight: more than a ring has entries."""
SHARE: Final = 0.25
"""The share of the device's free memory that the outputs of all these steps may take."""
_DATA: Final = (torch.Tensor, np.ndarray, str, bytes, int, float, complex, type)
_BUSY, _MOST, _SIDE = 0.03, 500, 1024
"""Seconds of products of square matrices that a device is given first, so that the host runs ahead; how many at most
(a queue has an end, too), and their rows."""


def check(subject: Subject[Any], batches: Iterable[CheckedBatch]) -> Iterator[Finding]:
    """Run batches one behind the other without waiting, and each by itself. A step that differs is a finding.

    Host sources are overwritten as soon as the call returns, device sources in stream order. Outputs are copied in
    stream order. If a step differs, all run again, and the slots of that one tell through which it came: one whose
    values differ, or one that the device reads late.
    """
    wanted = _sequence(subject, list(batches))
    alone, flight = (_steps(subject, wanted, flight=flight) for flight in (False, True))
    apart = ((number, _apart(one, other)) for number, (one, other) in enumerate(zip(alone, flight, strict=True)))
    number, told = next((pair for pair in apart if pair[1] is not None), (0, None))
    if not subject.together.any(told is not None):
        return
    alone, flight = (_steps(subject, wanted, number, flight=flight) for flight in (False, True))
    slot = _apart(alone[number], flight[number])
    if told is None:
        return
    name, why = None, "no slot tells why: it came through an upload, an output, or other memory"
    for late, operator in itertools.islice(subject.graphs.filler.hosts.slots.items(), 1):
        copies_late = f"{operator} copies from slot {late!r} in host memory when the device gets there"
        name, why = late, f"{copies_late}, and the next fill came first"
    if slot is not None:
        name, where = slot.where, attrs.evolve(slot, where=repr(slot.where))
        why = f"slot {where}: the fill read its source, or what carries it to the device, after that was overwritten"
    yield Finding(NAME, name, f"step {number} of {len(wanted)} in flight: {told}; {why}")


def _apart(alone: Tensors, flight: Tensors) -> Mismatch | None:
    return next(mismatches(alone, flight, names=("alone", "in flight")), None)


def _sequence(subject: Subject[Any], batches: Sequence[CheckedBatch]) -> list[CheckedBatch]:
    """Batches in turn: as many as there is memory for the outputs of, but two at least."""
    with subject.state.kept():
        nbytes = sum(tensor.nbytes for _, tensor in named(subject.run(batches[0])))
    free = subject.parts.stage.backend.memory().free
    most = subject.together.least(min(STEPS, int(SHARE * free / (2 * nbytes))) if nbytes else STEPS)
    return list(itertools.islice(itertools.cycle(batches), max(2, most)))


def _steps(
    subject: Subject[Any], batches: Sequence[CheckedBatch], asked: int | None = None, *, flight: bool
) -> list[Tensors]:
    """Run each step by itself, or all in flight one behind the other, and return what each gave.

    Alone, the device has done a step before the next begins. In flight, sources are overwritten right after the call.

    asked: the step of which slots are returned, not outputs. All are then filled by themselves.
    """
    backend, runs = subject.parts.stage.backend, []
    given = [CheckedBatch(_copied(one.batch), _copied(one.side)) for one in batches] if flight else batches
    with subject.state.kept(), slots_kept(subject.parts):
        if flight:
            _keep_busy(backend)
        for number, one in enumerate(given):
            values = sources(subject, one)
            runs.append(_run(subject, one, number, asked))
            if flight:
                _overwrite(values)
            else:
                backend.synchronize()
    return runs


def _run(subject: Subject[Any], one: CheckedBatch, number: int, asked: int | None) -> Tensors:
    """Copies of what a step gave. Of the step that is asked for, copied slots on the device as the fill leaves them."""
    if asked is None:
        return copies(subject.run(one), "output")
    view = subject.fill(one)
    step, held = step_of(view), dict[str, torch.Tensor]()
    for name, slot in subject.slots.items() if number == asked else ():
        tensor = vars(view)[name]
        if tensor is not None and slot.reads(name) is not None and slot.placement != HOST:
            held[name] = live_part(slot, tensor, step).clone()
    subject.runner.replay(view)
    return held


def _copied(batch: Any) -> Any:
    """A copy of a batch in memory of its own, of the same kind. Modules, and what is no data, such as locks, stay."""
    made: dict[int, Any] = {}
    seen, todo = set[int](), [batch]
    while todo:
        one = todo.pop()
        if id(one) in seen or (isinstance(one, _DATA) and not isinstance(one, torch.Tensor)):
            continue
        seen.add(id(one))
        parts = [] if isinstance(one, nn.Module | types.ModuleType | torch.Tensor) else list(parts_of(one))
        todo += parts
        if isinstance(one, torch.Tensor):
            copied = one.detach().clone()
            made[id(one)] = copied.pin_memory() if one.is_pinned() else copied
        elif not parts:
            made[id(one)] = one
    return copy.deepcopy(batch, made)


def _overwrite(values: Iterable[Any]) -> None:
    """Overwrite sources with other numbers, none of which is out of an index's range."""
    for value in values:
        if isinstance(value, torch.Tensor):
            with contextlib.suppress(RuntimeError), torch.no_grad():  # nothing can be written to expanded memory
                if value.dtype.is_floating_point or value.dtype.is_complex:
                    value.mul_(-1).sub_(1)
                else:
                    value.zero_()
        elif isinstance(value, np.ndarray):
            value[...] = 0
        elif isinstance(value, list):
            value[:] = value[::-1] if value and isinstance(value[0], list) else [0] * len(value)


def _keep_busy(backend: Backend) -> None:
    """Give the device something to do first, so that steps stand in a queue behind it."""
    if backend.device.type == "cpu":
        return
    block = torch.full((_SIDE, _SIDE), 1 / _SIDE, device=backend.device)  # no random numbers, which steps may draw
    block = block @ block  # the first may load a library
    backend.synchronize()
    begun = time.perf_counter()
    block = block @ block
    backend.synchronize()
    for _ in range(min(_MOST, math.ceil(_BUSY / (time.perf_counter() - begun)))):
        block = block @ block
