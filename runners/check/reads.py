"""Reads: everything that graphs read lies where it lay at capture, and every slot is read by something."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from ...backends.operators import run_under
from ...dataflow.buffers import overlaps, span
from ...dataflow.capabilities import HOST
from ...dataflow.errors import ReplayError
from ...dataflow.inputs import Inputs
from ...dataflow.slots import Constant, Output, Slot
from ...dataflow.tails import Once
from ..comparison import named, ran_eagerly
from ..holdings import Change
from ..parts import Parts
from ..running import running
from ..traffic import Traffic, run_seen
from .fills import unwritten
from .report import Finding
from .trial import CheckedBatch, Subject, Trial

_BY_HOST: Final = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})


def check_moves(subject: Subject[Any], batches: Iterable[CheckedBatch]) -> Iterator[Finding]:
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
    by_storage = {_storage(change.now): change for change in changes}
    told: dict[str, str] = {}

    def note(operator: str, taken: Iterable[torch.Tensor], _: object = None) -> None:
        step = running()
        for tensor in taken if step is None or step.inside is None else ():  # breaks run anew in each step
            change = by_storage.get(_storage(tensor))
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


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch compares storages by it


def check_coverage(subject: Subject[Any], batches: Iterable[CheckedBatch]) -> Iterator[Finding]:
    """Fill each batch over two kinds of garbage, run it over two more, and look at what its operators take."""
    is_found, read, present = False, set(subject.read_outside), set[str]()
    for number, one in enumerate(batches):
        found = unwritten(subject, one, number)
        yield from found
        is_found = is_found or bool(found)
        if subject.together.any(is_found):  # what lies in slots that no one writes is nothing to run a step on
            continue
        view = subject.fill(one)
        present.update(name for name, value in vars(view).items() if value is not None)
        with subject.state.kept():
            read.update(_read_slots(subject.parts, view))
    stage = subject.parts.stage
    for name, slot in subject.slots.items():
        if is_found or name not in present - read or isinstance(slot, Output) or slot.is_parameter:
            continue
        reason = may_be_read(slot, lent=name in stage.lend, device=stage.backend.device)
        if reason is not None:
            subject.notes[f"no operator of the step reads slot {name!r}: {reason}"] = None
            continue
        message = (
            f"nothing reads slot {name!r}: no operator of the step takes it, and no computed slot needs it; leave it "
            f"out of the declaration, drop=[{name!r}], or name it in read_outside= if it is read between fill and "
            "replay"
        )
        yield Finding("coverage", name, message)


def may_be_read(slot: Slot, *, lent: bool, device: torch.device) -> str | None:
    """Why a slot may well be read though no operator of the step takes it, or None."""
    reasons = {
        "it is optional": slot.optional,
        "it is constant": isinstance(slot, Constant),
        "it is lent to something outside": lent,
        "it is written once": isinstance(slot.rule(), Once),
        "it is on the host, where it may be read before the replay": slot.placement == HOST,
        "a kernel that is launched by itself may": device.type != "cpu",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _read_slots(parts: Parts[Any], view: Inputs) -> set[str]:
    """Run the step without its graph on the view that was filled last, and name the slots that something reads.

    Functions of computed slots read what they name. An operator reads what it takes, but a mere view of a part of a
    slot does not read it. What is launched without an operator, as a kernel by itself may be, is not seen.
    """
    slots, values = parts.stage.declaration.slots, vars(view)
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
    outputs = run_under(TakenByHost(), lambda: run_seen(traffic, lambda: ran_eagerly(parts, view)))
    note(tensor for _, tensor in named(outputs))
    return read
