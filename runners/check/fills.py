"""Fills over what earlier steps left, and over garbage: every slot is written, and is as the oracle leaves it."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import torch

from ...dataflow.axes import Step
from ...dataflow.buffers import Buffers
from ...dataflow.capabilities import DEVICE
from ...dataflow.oracle import fill_slot_by_slot
from ...dataflow.slots import Constant, Output, Slot
from ...dataflow.tails import Keep, Once, Pad
from ..bits import bits, first_unequal
from ..comparison import live_part, slots_kept, step_of
from .report import Finding
from .trial import CheckedBatch, Subject

_NAMED: Final = 4
"""Rows that a finding names."""


def garbage(like: torch.Tensor, generator: torch.Generator, *, flipped: bool = False) -> torch.Tensor:
    """Random bytes as a tensor of this kind, on the CPU. flipped: each bit the other way round."""
    if like.dtype == torch.bool:
        return (torch.randint(0, 2, like.shape, device="cpu", generator=generator) ^ flipped).bool()
    count = like.numel() * like.itemsize
    drawn = torch.randint(0, 256, (count,), dtype=torch.uint8, device="cpu", generator=generator)
    return (~drawn if flipped else drawn).view(like.dtype).reshape(like.shape)


def tails_of(slot: Slot, tensor: torch.Tensor, step: Step) -> Iterator[torch.Tensor]:
    """The parts of a padded view beyond the live rows, one along each varying dim. They may overlap."""
    for dim in slot.varying:
        live = slot.shape[dim].at(step.live_sizes)
        if live < tensor.shape[dim]:
            yield tensor.narrow(dim, live, tensor.shape[dim] - live)


@contextlib.contextmanager
def over_garbage(subject: Subject[Any], one: CheckedBatch, number: int, *, flipped: bool = False) -> Iterator[None]:
    """A block with random bytes in all that a fill of this batch must write, but for what lies there of the batch.

    Slots are afterwards as they were. flipped: each bit the other way round.
    """
    step, buffers, generator = _step_of(subject, one), subject.graphs.buffers, subject.generator(number)
    in_place = [source for source in sources(subject, one) if isinstance(source, torch.Tensor) and source.numel()]
    with slots_kept(subject.parts):
        with torch.no_grad():
            own = [(source, source.clone()) for source in in_place if buffers.holds(source)]
            for buffer in buffers:
                for part in _written_parts(buffer.name, buffer.slot, buffer.view(step.padded_sizes), step):
                    part.copy_(garbage(part, generator, flipped=flipped))
            for source, held in own:
                source.copy_(held)
        buffers.distrust()
        yield


def sources(subject: Subject[Any], one: CheckedBatch) -> list[Any]:
    """What a batch brings for slots."""
    read = (slot.reads(name) for name, slot in subject.slots.items())
    return [source.read(one.batch, one.side) for source in read if source is not None]


def _step_of(subject: Subject[Any], one: CheckedBatch) -> Step:
    """The sizes of a batch in the bucket that takes it."""
    parts, bucket = subject.parts, subject.runner.decide(one.batch, **one.side).bucket
    if bucket is None:
        raise ValueError("no bucket takes this batch")
    return parts.stage.declaration.step(parts.size(one.batch, one.side)[:-1], parts.sizes[bucket])


def _written_parts(name: str, slot: Slot, tensor: torch.Tensor, step: Step) -> list[torch.Tensor]:
    """The parts of a padded view that every fill must write. Device-computed slots are written with the step."""
    if isinstance(slot, Constant | Output):
        return []
    rule, is_read = slot.rule(), slot.reads(name) is not None
    if slot.computes() is not None or (is_read and not isinstance(rule, Keep | Once)):
        return [tensor]
    if is_read:
        return [live_part(slot, tensor, step)]
    return list(tails_of(slot, tensor, step)) if isinstance(rule, Pad) else []


def _writer_of(subject: Subject[Any], name: str) -> str:
    """What writes all of a slot: a fill, the step, or a function on the device, with a whole step's graph."""
    slot, declaration = subject.slots[name], subject.parts.stage.declaration
    if isinstance(slot, Output):
        return "step"
    late = slot.computes() is not None and declaration.side(name) == DEVICE and subject.runner.is_whole
    return "function" if late else "fill"


def unlike_oracle(subject: Subject[Any], one: CheckedBatch, number: int) -> list[Finding]:
    """Slots that a fill leaves otherwise, after a step on the same batch (it may write into tails) or over garbage."""
    with subject.state.kept():
        subject.run(one)
    found = _compared(subject, one)
    if not subject.together.any(bool(found)):
        with over_garbage(subject, one, number):
            found = _compared(subject, one)
    return found


def _compared(subject: Subject[Any], one: CheckedBatch) -> list[Finding]:
    """Fill, and compare with the oracle, which fills other memory that holds the same before."""
    stage, step, buffers = subject.parts.stage, _step_of(subject, one), subject.graphs.buffers
    with torch.inference_mode(mode=False), torch.no_grad():
        copied = {b.name: attrs.evolve(b, tensor=b.tensor.clone(), owner=None) for b in buffers}
    oracle = Buffers(copied, buffers.capacity)
    fill_slot_by_slot(stage.declaration, oracle, stage.backend.capabilities, step, one.batch, one.side)
    view, found = subject.fill(one), []
    step = step_of(view)
    for name, slot in subject.slots.items():
        tensor, right = vars(view)[name], oracle[name].view(step.padded_sizes)
        if tensor is None or _writer_of(subject, name) != "fill":
            continue
        place = first_unequal(right, tensor)
        if place is not None:
            told = _told(slot, place, tensor[place].item(), right[place].item(), step)
            found.append(Finding("poison", name, f"slot {name!r} {told}"))
    return found


def _told(slot: Slot, place: tuple[int, ...], held: Any, right: Any, step: Step) -> str:
    """What a fill left where."""
    where = f"row {place[0]}" if place else "its number"
    in_tail = any(place[dim] >= slot.shape[dim].at(step.live_sizes) for dim in slot.varying)
    if in_tail and slot.computes() is None:
        return (
            f"kept what lay in its tail: {where} holds {held} after a fill that must leave {right}: who writes there "
            "beside the fill, as the step itself may, must be declared by rewritten=True or restored=True"
        )
    return f"is not what its declaration says: {where} holds {held} after a fill, expected {right}"


def unwritten(subject: Subject[Any], one: CheckedBatch, number: int) -> list[Finding]:
    """Slots that a fill leaves unwritten. If there are none, those that the step leaves so."""
    left: list[dict[str, torch.Tensor]] = []
    for flipped in (False, True):
        with over_garbage(subject, one, number, flipped=flipped):
            filled = subject.trial(one).filled
        left.append({name: held for name, held in filled.items() if _writer_of(subject, name) == "fill"})
    trial = subject.trial(one)
    found = _unequal(subject, left, trial.step)
    if subject.together.any(bool(found)):
        return found
    names = [name for name in trial.slots if _writer_of(subject, name) != "fill"]
    ran: list[dict[str, torch.Tensor]] = []
    for flipped in (False, True):
        slots, generator = trial.slots, subject.generator(number)
        put = {name: garbage(slots[name], generator, flipped=flipped) for name in names}
        held = trial.run(lambda _: {name: trial.slots[name].clone() for name in names}, put)
        if not isinstance(held, Exception):  # which is for other checks to tell of
            ran.append(held)
    return _unequal(subject, ran, trial.step) if len(ran) > 1 else []


def _unequal(subject: Subject[Any], pair: Sequence[Mapping[str, torch.Tensor]], step: Step) -> list[Finding]:
    """Slots that differ with the garbage that was there before."""
    found = []
    for name in pair[0]:
        slot, writer = subject.slots[name], _writer_of(subject, name)
        one, other = (live_part(slot, held[name], step) if writer == "step" else held[name] for held in pair)
        if rows := _rows(one, other):
            message = _UNWRITTEN[writer].format(name, f"{rows} still hold what lay there before")
            found.append(Finding("coverage", name, message))
    return found


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


_UNWRITTEN: Final = {
    "fill": "slot {!r} is not written by a fill: {}; a kind of slot that a fill copies or resets must say so, by "
    "reads() and rule()",
    "step": "output slot {!r} is not written by the step: {}; write every live row in each step, or leave the slot out "
    "of the declaration",
    "function": "slot {!r} is not written by its function: {}; a function that takes `out` must fill all of it, padded "
    "rows too",
}
