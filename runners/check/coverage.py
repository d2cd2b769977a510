"""Coverage: every slot is written in each step, or is constant, and none is there that nothing reads."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from ...backends.operators import run_under
from ...dataflow.binding import overlaps, span
from ...dataflow.capabilities import HOST
from ...dataflow.compute import OUT
from ...dataflow.declaration import Declaration
from ...dataflow.inputs import Inputs
from ...dataflow.slots import Constant, Output, Slot
from ...dataflow.tails import Once
from ..bits import bits
from ..parts import Parts
from ..traffic import Traffic, run_seen
from .batches import CheckedBatch
from .comparison import live_part, named
from .fills import garbage, is_filled, over_garbage
from .report import Finding
from .trial import Subject, ran_eagerly

NAME: Final = "coverage"
_NAMED: Final = 4
"""Rows that a finding names."""
_BY_HOST: Final = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})


def check(subject: Subject[Any], batches: Iterable[CheckedBatch]) -> list[Finding]:
    """Fill each batch over two kinds of garbage, run it over two more, and look at what its operators take."""
    found: dict[str | None, Finding] = {}
    read, present = set(subject.read_outside), set[str]()
    for number, one in enumerate(batches):
        for finding in _unwritten(subject, one, subject.seed + number):
            found.setdefault(finding.slot, finding)
        if subject.together.any(bool(found)):  # what lies in slots that no one writes is nothing to run a step on
            continue
        view = subject.fill(one)
        present.update(name for name, value in vars(view).items() if value is not None)
        with subject.state.kept():
            read.update(read_slots(subject.parts, view))
    if found:
        return list(found.values())
    unread = [name for name in subject.parts.stage.declaration.slots if name in present - read]
    return [one for one in (_judged(subject, name) for name in unread) if one is not None]


def _unwritten(subject: Subject[Any], one: CheckedBatch, seed: int) -> list[Finding]:
    """Slots that a fill leaves unwritten. If there are none, those that the step leaves so."""
    left, again = (_filled(subject, one, seed, flipped=flipped) for flipped in (False, True))
    names = [name for name in left if is_filled(subject, name)]
    found = [_finding("fill", name, rows) for name in names if (rows := _rows(left[name], again[name]))]
    if subject.together.any(bool(found)):
        return found
    trial, kinds = subject.trial(one), dict[str, str]()
    for name in trial.slots:
        if isinstance(trial.declared[name], Output):
            kinds[name] = "step"
        elif not is_filled(subject, name):
            kinds[name] = "function"

    def look(_: Any) -> dict[str, torch.Tensor]:
        return {name: trial.slots[name].clone() for name in kinds}

    def over(*, flipped: bool) -> dict[str, torch.Tensor] | Exception:
        generator = torch.Generator().manual_seed(seed)
        return trial.run(look, {name: garbage(trial.slots[name], generator, flipped=flipped) for name in kinds})

    first, second = over(flipped=False), over(flipped=True)
    if isinstance(first, Exception) or isinstance(second, Exception):  # which is for other checks to tell of
        return []
    for name, kind in kinds.items():
        slot, held = trial.declared[name], (first[name], second[name])
        rows = _rows(*(live_part(slot, one, trial.step) if kind == "step" else one for one in held))
        found += [_finding(kind, name, rows)] if rows else []
    return found


_UNWRITTEN: Final = {
    "fill": "slot {!r} is not written by a fill: {}; a kind of slot that a fill copies or resets must say so, by "
    "reads() and rule()",
    "step": "output slot {!r} is not written by the step: {}; write every live row in each step, or leave the slot out "
    "of the declaration",
    "function": "slot {!r} is not written by its function: {}; a function that takes `out` must fill all of it, padded "
    "rows too",
}


def _finding(by: str, name: str, rows: str) -> Finding:
    return Finding(NAME, name, _UNWRITTEN[by].format(name, f"{rows} still hold what lay there before"))


def _filled(subject: Subject[Any], one: CheckedBatch, seed: int, *, flipped: bool) -> dict[str, torch.Tensor]:
    """What slots hold after a fill over garbage."""
    with over_garbage(subject, one, torch.Generator().manual_seed(seed), flipped=flipped):
        return subject.trial(one).filled


def _rows(one: torch.Tensor, other: torch.Tensor) -> str:
    """Rows in which two tensors differ by a bit, as text. Empty if they do not."""
    differs = (bits(one) != bits(other)).any(-1).reshape(one.shape)
    if not differs.any():
        return ""
    if not one.dim():
        return "it"
    rows = differs.reshape(one.shape[0], -1).any(-1).nonzero()[:, 0].tolist()
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:_NAMED]))}{more}"


def _judged(subject: Subject[Any], name: str) -> Finding | None:
    """A finding for a slot that nothing reads, if that can be known. Otherwise a note."""
    stage = subject.parts.stage
    slot = stage.declaration.slots[name]
    if isinstance(slot, Output) or slot.is_parameter:
        return None
    reason = may_be_read(slot, lent=name in stage.lend, device=stage.backend.device)
    if reason is not None:
        subject.notes[f"no operator of the step reads slot {name!r}: {reason}"] = None
        return None
    message = (
        f"nothing reads slot {name!r}: no operator of the step takes it, and no computed slot needs it; leave it out "
        f"of the declaration, drop=[{name!r}], or name it in read_outside= if it is read between fill and replay"
    )
    return Finding(NAME, name, message)


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


def read_slots(parts: Parts[Any], view: Inputs) -> set[str]:
    """Run the step without its graph on the view that was filled last, and name the slots that something reads.

    Functions of computed slots read what they name. An operator reads what it takes, but a mere view of a part of a
    slot does not read it. What is launched without an operator, as a kernel by itself may be, is not seen.
    """
    declaration, values = parts.stage.declaration, vars(view)
    spans = {name: span(values[name]) for name in declaration.slots if values[name] is not None}
    read = needed_slots(declaration)

    def note(tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel():
                read.update(name for name, place in spans.items() if overlaps(tensor, [place]))

    traffic = Traffic(done=lambda _, taken, __: note(taken))
    outputs = run_under(_TakenByHost(note), lambda: run_seen(traffic, lambda: ran_eagerly(parts, view)))
    note(tensor for _, tensor in named(outputs))
    return read


class _TakenByHost(TorchFunctionMode):
    """Tells of tensors that the host takes as numbers, which is no operator's work if they are on the CPU."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Tell of one, and call it."""
        del types
        if getattr(func, "__name__", "") in _BY_HOST:
            self._note(args[:1])
        return func(*args, **(kwargs or {}))


def needed_slots(declaration: Declaration) -> set[str]:
    """Slots that computed ones are made of."""
    computes = (slot.computes() for slot in declaration.slots.values())
    return {need for compute in computes if compute is not None for need in compute.needs if need != OUT}
