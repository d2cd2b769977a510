"""Addresses, coverage and races: what graphs read lies where it was, is written and read, and is not written early.

Races run steps in flight one behind the other, their sources overwritten right after the call, against each alone.
"""

import contextlib
import copy
import itertools
import math
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...backends.base import Backend
from ...backends.operators import run_under, storage_key
from ...backends.ring import ENTRIES, SEGMENT
from ...dataflow.buffers import overlaps, span
from ...dataflow.capabilities import HOST
from ...dataflow.errors import ReplayError
from ...dataflow.inputs import Inputs
from ...dataflow.sampling import Sample
from ...dataflow.slots import Constant, Output, Slot
from ...dataflow.tails import Once
from ..bits import garbage, unequal_rows
from ..comparison import copies, live_part, mismatches, named, ran_eagerly, slots_kept
from ..runner import Runner
from ..running import running
from ..stacked.capture import parts_of
from ..state import Change
from ..traffic import Traffic, run_seen
from .trial import Finding, Subject, Tensors, Trial

STEPS: Final = ENTRIES + SEGMENT
"""Steps in flight: more than a ring has entries."""
SHARE: Final = 0.25
"""The share of the device's free memory that the outputs of all these steps may take."""
_BY_HOST: Final = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})
_DATA: Final = (torch.Tensor, np.ndarray, str, bytes, int, float, complex, type)
_BUSY, _PRODUCTS, _WIDTH = 0.03, 500, 1024
"""Seconds of products of square matrices that a device is given first, so that the host runs ahead; how many at most
(a queue has an end, too), and their rows."""


def check_moves(subject: Subject[Any], batches: Iterable[Sample]) -> Iterator[Finding]:
    """Slots whose buffer has moved, and other memory that graphs read and that has moved.

    Of what the step holds (closures, globals, attributes, a model's weights) only what it reads on one of the batches
    is told, with the operator that reads it.
    """
    for name in subject.graphs.buffers.moved():
        message = f"the buffer of slot {name!r} has moved since capture: its graphs read and write what was there"
        yield Finding("addresses", name, message)
    faults: dict[str, list[str]] = {}
    for (rows, _), captured in subject.graphs.captured.items():
        try:
            captured.graph.check_addresses()
        except ReplayError as error:
            faults.setdefault(str(error), []).append(str(rows))
    for fault, buckets in faults.items():
        yield Finding("addresses", None, f"bucket {', '.join(buckets)}: {fault}")
    changes = subject.graphs.holdings.changed()
    for one in batches if subject.together.any(bool(changes)) else ():
        told = readers(subject.trial(one), changes)
        yield from (Finding("addresses", None, message) for message in told.values())
        changes = [change for change in changes if change.holding.name not in told]


def readers(trial: Trial[Any], changes: Sequence[Change]) -> dict[str, str]:
    """What is to be said of tensors that have moved, by their name, if the step reads them."""
    by_storage = {storage_key(change.now): change for change in changes}
    told: dict[str, str] = {}

    def note(operator: str, taken: Iterable[torch.Tensor], _: object = None) -> None:
        step = running()
        for tensor in taken if step is None or step.inside is None else ():  # breaks run anew in each step
            change = by_storage.get(storage_key(tensor))
            if change is not None:
                name = change.holding.name
                told.setdefault(
                    name,
                    f"{operator} reads {name}, and {change.what} ({change.holding.text}): graphs read where it was; "
                    "write into the tensor of the capture (copy_), or capture again",
                )

    with trial.together.raising("the look at what a step reads"):
        raised = trial.run(
            lambda outputs: note("the caller", (tensor for _, tensor in named(outputs))),
            by=lambda: run_seen(Traffic(done=note), trial.eagerly),
        )
        if raised is not None:
            raise raised
    return told


def check_coverage(subject: Subject[Any], batches: Iterable[Sample]) -> Iterator[Finding]:
    """Run each batch over two kinds of garbage, and look at what its operators take."""
    is_found, read, present = False, set(subject.read_outside), set[str]()
    for number, one in enumerate(batches):
        found = _unwritten(subject, one, number)
        yield from found
        is_found = is_found or bool(found)
        if subject.together.any(is_found):  # what lies in slots that no one writes is nothing to run a step on
            continue
        view = subject.fill(one)
        present.update(name for name, value in vars(view).items() if value is not None)
        with subject.state.kept():
            read.update(_read_slots(subject.runner, view))
    stage = subject.runner.stage
    for name, slot in subject.slots.items():
        if is_found or name not in present - read or isinstance(slot, Output) or slot.is_parameter:
            continue
        reason = may_be_read(slot, stage.backend.device)
        if reason is not None:
            subject.notes[f"no operator of the step reads slot {name!r}: {reason}"] = None
            continue
        message = (
            f"nothing reads slot {name!r}: no operator of the step takes it, and no computed slot needs it; leave it "
            f"out of the declaration, drop=[{name!r}], or name it in read_outside= if it is read between fill and "
            "replay"
        )
        yield Finding("coverage", name, message)


def _unwritten(subject: Subject[Any], one: Sample, number: int) -> list[Finding]:
    """Outputs, and slots of functions on the device, that a step leaves unwritten."""
    trial, ran, found = subject.trial(one), list[Tensors](), list[Finding]()
    names = [name for name in trial.slots if not subject.is_filled(name)]
    for flipped in (False, True):
        slots, generator = trial.slots, torch.Generator().manual_seed(subject.seed + number)
        put = {name: garbage(slots[name], generator, flipped=flipped) for name in names}
        held = trial.run(lambda _: {name: trial.slots[name].clone() for name in names}, put)
        ran += [] if isinstance(held, Exception) else [held]  # an error is for other checks to tell of
    for name in names if len(ran) > 1 else ():
        slot = subject.slots[name]
        is_output = isinstance(slot, Output)
        pair = [live_part(slot, held[name], trial.step) if is_output else held[name] for held in ran]
        if rows := unequal_rows(*pair):
            what, by, must = _UNWRITTEN[is_output]
            message = f"{what} {name!r} is not written by {by}: {rows} still hold what lay there before; {must}"
            found.append(Finding("coverage", name, message))
    return found


_UNWRITTEN: Final = {
    True: ("output slot", "the step", "write every live row in each step, or leave the slot out of the declaration"),
    False: ("slot", "its function", "a function that takes `out` must fill all of it, padded rows too"),
}


def may_be_read(slot: Slot, device: torch.device) -> str | None:
    """Why a slot may well be read though no operator of the step takes it, or None."""
    reasons = {
        "it is optional": slot.optional,
        "it is constant": isinstance(slot, Constant),
        "it is written once": isinstance(slot.rule(), Once),
        "it is on the host, where it may be read before the replay": slot.placement == HOST,
        "a kernel that is launched by itself may": device.type != "cpu",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _read_slots(runner: Runner[Any], view: Inputs) -> set[str]:
    """Run the step without its graph on the view that was filled last, and name the slots that something reads.

    Functions of computed slots read what they name. An operator reads what it takes, but a mere view of a part of a
    slot does not read it. What is launched without an operator, as a kernel by itself may be, is not seen.
    """
    slots, values = runner.stage.declaration.slots, vars(view)
    spans = {name: span(values[name]) for name in slots if values[name] is not None}
    computes = (slot.computes() for slot in slots.values())
    read = {need for compute in computes if compute is not None for need in compute.needs}

    def note(tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel():
                read.update(name for name, place in spans.items() if overlaps(tensor, [place]))

    class TakenByHost(TorchFunctionMode):
        """Tells of tensors that the host takes as numbers, which is no operator's work if they are on the CPU."""

        def __torch_function__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            del types
            if getattr(func, "__name__", "") in _BY_HOST:
                note(args[:1])
            return func(*args, **(kwargs or {}))

    traffic = Traffic(done=lambda _, taken, __: note(taken))
    outputs = run_under(TakenByHost(), lambda: run_seen(traffic, lambda: ran_eagerly(runner, view)))
    note(tensor for _, tensor in named(outputs))
    return read


def check_races(subject: Subject[Any], batches: Iterable[Sample]) -> Iterator[Finding]:
    """Run batches one behind the other without waiting, and each by itself. A step that differs is a finding.

    Host sources are overwritten as soon as the call returns, device sources in stream order. Outputs and slots are
    copied in stream order. The slots of the first step whose outputs differ tell through which it came: one whose
    values differ, or one that the device reads late.
    """
    wanted = _sequence(subject, list(batches))
    alone, flight = (_steps(subject, wanted, flight=flight) for flight in (False, True))
    for number, (one, other) in enumerate(zip(alone, flight, strict=True)):
        told, slot = (
            next(mismatches(*both, names=("alone", "in flight")), None) for both in zip(one, other, strict=True)
        )
        if told is None:
            continue
        name, why = None, "no slot tells why: it came through an upload, an output, or other memory"
        for late, operator in itertools.islice(subject.graphs.filler.hosts.slots.items(), 1):
            copies_late = f"{operator} copies from slot {late!r} in host memory when the device gets there"
            name, why = late, f"{copies_late}, and the next fill came first"
        if slot is not None:
            name = slot.slot
            why = f"{slot}: the fill read its source, or what carries it to the device, after that was overwritten"
        yield Finding("races", name, f"step {number} of {len(wanted)} in flight: {told}; {why}")
        return


def _sequence(subject: Subject[Any], batches: Sequence[Sample]) -> list[Sample]:
    """Batches in turn: as many as there is memory for what is copied of them, but two at least."""
    with subject.state.kept():
        nbytes = sum(tensor.nbytes for part in _run(subject, batches[0]) for tensor in part.values())
    free = subject.runner.stage.backend.memory().free
    most = subject.together.least(min(STEPS, int(SHARE * free / (2 * nbytes))) if nbytes else STEPS)
    return list(itertools.islice(itertools.cycle(batches), max(2, most)))


def _steps(subject: Subject[Any], batches: Sequence[Sample], *, flight: bool) -> list[tuple[Tensors, Tensors]]:
    """Run each step by itself, or all in flight one behind the other, and return what each gave and its slots.

    Alone, the device has done a step before the next begins. In flight, sources are overwritten right after the call.
    """
    backend, runs = subject.runner.stage.backend, []
    given = [Sample(_copied(one.batch), _copied(one.side)) for one in batches] if flight else batches
    with subject.state.kept(), slots_kept(subject.runner):
        if flight:
            _keep_busy(backend)
        for one in given:
            values = subject.sources(one)
            runs.append(_run(subject, one))
            if flight:
                _overwrite(values)
            else:
                backend.synchronize()
    return runs


def _run(subject: Subject[Any], one: Sample) -> tuple[Tensors, Tensors]:
    """Copies of what a step gave, and of what it leaves in copied slots on the device."""
    sizes, held = subject.step_of(one).live_sizes, dict[str, torch.Tensor]()
    outputs = copies(subject.run(one), "output")
    for name, slot in subject.slots.items():
        source = slot.reads(name)
        if source is not None and slot.placement != HOST and source.read(one.batch, one.side) is not None:
            held[f"slot {name!r}"] = subject.graphs.buffers[name].view(sizes).clone()
    return outputs, held


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
    block = torch.full((_WIDTH, _WIDTH), 1 / _WIDTH, device=backend.device)  # no random numbers, which steps may draw
    block = block @ block  # the first may load a library
    backend.synchronize()
    begun = time.perf_counter()
    block = block @ block
    backend.synchronize()
    for _ in range(min(_PRODUCTS, math.ceil(_BUSY / (time.perf_counter() - begun)))):
        block = block @ block
