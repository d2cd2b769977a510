"""Checks of memory: what graphs read has not moved, is written and read, and is not overwritten too early."""

import collections
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ...backends.operators import run_under, storage_key
from ...backends.ring import ENTRIES, SEGMENT
from ...dataflow.buffers import overlaps, span
from ...dataflow.capabilities import HOST
from ...dataflow.errors import RecordingError, ReplayError
from ...dataflow.inputs import Inputs
from ...dataflow.slots import BY_STEP
from ...dataflow.sources import look_up
from ...dataflow.tails import Once
from ..comparison import copies, live_part, mismatches, named, ran_eagerly, slots_kept
from ..engine.bits import garbage, unequal_rows
from ..engine.current import current_step
from ..engine.runner import Runner
from ..engine.sampling import Sample, rebuilt
from ..engine.state import Change
from ..engine.traffic import Traffic, run_seen
from ..testing.timing import occupier
from .trial import Finding, Subject, Tensors, Trial

RACE_STEPS: Final = ENTRIES + SEGMENT  # steps in flight: more than a ring has entries
FREE_SHARE: Final = 0.25
"""The share of the device's free memory that the outputs of all these steps may take."""
_BY_HOST: Final = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})


def check_moves(subject: Subject, batches: Iterable[Sample]) -> Iterator[Finding]:
    """Find slots whose buffer has moved, and other moved memory that the step reads on a batch."""
    for name in subject.buffers.moved():
        message = f"the buffer of slot {name!r} has moved since capture: its graphs read and write what was there"
        yield Finding("addresses", name, message)
    faults = collections.defaultdict[str, list[str]](list)
    for (rows, _), captured in subject.graphs.captured.items():
        try:
            captured.graph.check_addresses()
        except ReplayError as error:
            faults[str(error)].append(str(rows))
    for fault, buckets in faults.items():
        yield Finding("addresses", None, f"bucket {', '.join(buckets)}: {fault}")
    changes = subject.graphs.holdings.changed()
    for one in batches if subject.together.any(changes) else ():
        found = readers(subject.trial(one), changes)
        yield from found.values()
        changes = [change for change in changes if change[0].name not in found]


def readers(trial: Trial, changes: Sequence[Change]) -> dict[str, Finding]:
    """Return a finding for each tensor that has moved and that the step reads, by its name."""
    by_storage = {storage_key(now): holding for holding, now in changes}
    found: dict[str, Finding] = {}

    def note(operator: str, taken: Iterable[torch.Tensor], _: object = None) -> None:
        step = current_step()
        for tensor in taken if step is None or step.inside is None else ():  # each step runs breaks anew
            holding = by_storage.get(storage_key(tensor))
            if holding is not None:
                is_freed = holding.is_freed
                what = "the memory of the capture is freed" if is_freed else "it is other memory than at capture"
                message = (
                    f"{operator} reads {holding.name}, and {what} ({holding.text}): graphs read where it was; write "
                    "into the tensor of the capture (copy_), or capture again"
                )
                found.setdefault(holding.name, Finding("addresses", None, message))

    with trial.together.raising("the look at what a step reads"):
        raised = trial.run(
            lambda outputs: note("the caller", (tensor for _, tensor in named(outputs))),
            by=lambda: run_seen(Traffic(done=note), trial.eagerly),
        )
        if raised is not None:
            raise raised
    return found


def check_coverage(subject: Subject, batches: Iterable[Sample]) -> Iterator[Finding]:
    """Run each batch over two kinds of garbage, and find slots that nothing writes or no operator reads."""
    is_found, read, present = False, set(subject.read_outside), set[str]()
    for number, one in enumerate(batches):
        found = list(_unwritten(subject, one, number))
        yield from found
        is_found = is_found or bool(found)
        if subject.together.any(is_found):  # do not run a step on slots that nothing writes
            continue
        view = subject.fill(one)
        present.update(name for name, value in vars(view).items() if value is not None)
        with subject.state.kept():
            read.update(_read_slots(subject.runner, view))
    for name, slot in subject.slots.items():
        if is_found or name not in present - read or slot.writers == BY_STEP or slot.argument is not None:
            continue
        reasons = {
            "it is optional": slot.optional,
            "it is constant": not slot.writers,
            "it is written once": isinstance(slot.rule(), Once),
            "it is on the host, where it may be read before the replay": slot.placement == HOST,
            "a kernel that is launched by itself may": subject.backend.device.type != "cpu",
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason is not None:
            subject.notes[f"no operator of the step reads slot {name!r}: {reason}"] = None
            continue
        message = (
            f"nothing reads slot {name!r}: no operator of the step takes it, and no computed slot needs it; leave it "
            f"out of the declaration, drop=[{name!r}], or name it in read_outside= if it is read between fill and "
            "replay"
        )
        yield Finding("coverage", name, message)


def _unwritten(subject: Subject, one: Sample, number: int) -> Iterator[Finding]:
    """Find outputs, and slots of functions on the device, that a step leaves unwritten over two kinds of garbage."""
    trial, ran = subject.trial(one), list[Tensors]()
    names = [name for name in trial.slots if not subject.is_filled(name)]
    for flipped in (False, True):
        slots, generator = trial.slots, torch.Generator().manual_seed(subject.seed + number)
        put = {name: garbage(slots[name], generator, flipped=flipped) for name in names}
        held = trial.run(lambda _: {name: trial.slots[name].clone() for name in names}, put)
        if isinstance(held, Exception):  # other checks report it
            return
        ran.append(held)
    for name in names:
        slot, pair = subject.slots[name], [held[name] for held in ran]
        what = f"slot {name!r} is not written by its function"
        must = "a function that takes `out` must fill all of it, padded rows too"
        if slot.writers == BY_STEP:
            pair = [live_part(slot, tensor, trial.step) for tensor in pair]
            what = f"output slot {name!r} is not written by the step"
            must = "write every live row in each step, or leave the slot out of the declaration"
        if rows := unequal_rows(*pair):
            yield Finding("coverage", name, f"{what}: {rows} still hold what lay there before; {must}")


def _read_slots(runner: Runner[Any], view: Inputs) -> set[str]:
    """Return the slots that operators of an eager run, and functions of computed slots, read.

    Making a view reads none.
    """
    slots, values = runner.stage.declaration.slots, vars(view)
    spans = {name: span(values[name]) for name in slots if values[name] is not None}
    read = {need for slot in slots.values() for need in slot.needs}

    def note(tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel():
                read.update(name for name, place in spans.items() if overlaps(tensor, [place]))

    class TakenByHost(TorchFunctionMode):
        """Notes tensors that the host reads as numbers, for which no operator runs if they are on the CPU."""

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


def check_races(subject: Subject, batches: Iterable[Sample]) -> Iterator[Finding]:
    """Run batches in flight, with sources overwritten after each call, and each alone, and compare."""
    drawn = list(batches)
    with subject.state.kept():
        nbytes = sum(tensor.nbytes for part in _run(subject, drawn[0]) for tensor in part.values())
    room = int(FREE_SHARE * subject.backend.memory().free / max(2 * nbytes, 1))
    rooms = subject.runner.coordinator.gather("how many steps there is room for", "", min(RACE_STEPS, room))
    wanted = list(itertools.islice(itertools.cycle(drawn), max(2, min(steps for _, steps in rooms))))
    try:
        given = [_copied(subject, one) for one in wanted]
    except RecordingError as error:
        subject.notes[f"races were left out: {error}"] = None
        return
    alone, flight = _steps(subject, wanted, flight=False), _steps(subject, given, flight=True)
    for number, (one, other) in enumerate(zip(alone, flight, strict=True)):
        output, slot = (
            next(mismatches(*both, names=("alone", "in flight")), None) for both in zip(one, other, strict=True)
        )
        if output is None:
            continue
        name, why = None, "no slot tells why: it came through an upload, an output, or other memory"
        if slot is not None:
            name = slot.slot
            why = f"{slot}: the fill read its source, or what carries it to the device, after that was overwritten"
        elif late := next(iter(subject.graphs.filler.hosts.slots.items()), None):
            name, operator = late
            copies_late = f"{operator} copies from slot {name!r} in host memory when the device gets there"
            why = f"{copies_late}, and the next fill came first"
        yield Finding("races", name, f"step {number} of {len(wanted)} in flight: {output}; {why}")
        return


def _copied(subject: Subject, one: Sample) -> Sample:
    """Make a batch with the same values in memory of its own."""
    values = subject.sources(one)
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            made = value.detach().clone()
            values[name] = made.pin_memory() if value.is_pinned() else made
        else:
            values[name] = copy.deepcopy(value)
    declaration = subject.declaration
    return rebuilt(declaration, values, {name: look_up(one.batch, name) for name in declaration.fields})


def _steps(subject: Subject, batches: Sequence[Sample], *, flight: bool) -> list[tuple[Tensors, Tensors]]:
    """Run steps, alone or in flight, and return the results of each.

    In flight, sources are overwritten after each call.
    """
    backend, runs = subject.backend, []
    with subject.state.kept(), slots_kept(subject.runner):
        if flight and backend.device.type != "cpu":
            occupier(backend)(30_000)  # microseconds of work, so that the host runs ahead
        for one in batches:
            values = subject.sources(one).values() if flight else ()
            runs.append(_run(subject, one))
            for value in values:  # zeros are in the range of each index
                if isinstance(value, torch.Tensor):
                    value.zero_()
                elif isinstance(value, np.ndarray):
                    value[...] = 0
                elif isinstance(value, list):
                    value[:] = [[0] * len(row) if isinstance(row, list) else 0 for row in value]
            if not flight:
                backend.synchronize()
    return runs


def _run(subject: Subject, one: Sample) -> tuple[Tensors, Tensors]:
    """Run a step, and return copies of its outputs and of its copied slots on the device."""
    sizes, held = subject.step_of(one).live_sizes, dict[str, torch.Tensor]()
    outputs = copies(subject.runner(one.batch, **one.side), "output")
    for name, source in subject.sources(one).items():
        if subject.slots[name].placement != HOST and source is not None:
            held[f"slot {name!r}"] = subject.buffers[name].view(sizes).clone()
    return outputs, held
