"""Fills over what earlier steps left, and over garbage: every slot must be as the oracle leaves it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from ...dataflow.axes import Step
from ...dataflow.buffers import Buffers
from ...dataflow.capabilities import DEVICE
from ...dataflow.oracle import fill_slot_by_slot
from ...dataflow.slots import Constant, Output, Slot
from ...dataflow.tails import Keep, Once, Pad
from ..bits import first_unequal
from .batches import CheckedBatch
from .comparison import live_part, step_of
from .report import Finding
from .tails import tails_of
from .trial import Subject, slots_kept


def unlike_oracle(subject: Subject[Any], one: CheckedBatch, generator: torch.Generator) -> list[Finding]:
    """Slots that a fill leaves otherwise, after a step on the same batch (it may write into tails) or over garbage."""
    with subject.state.kept():
        subject.runner(one.batch, **one.side)
    found = _compared(subject, one)
    if not subject.together.any(bool(found)):
        with over_garbage(subject, one, generator):
            found = _compared(subject, one)
    return found


def _compared(subject: Subject[Any], one: CheckedBatch) -> list[Finding]:
    """Fill, and compare with the oracle, which fills other memory that holds the same before."""
    stage = subject.parts.stage
    with torch.inference_mode(mode=False), torch.no_grad():
        right = {b.name: attrs.evolve(b, tensor=b.tensor.clone(), owner=None) for b in subject.graphs.buffers}
    oracle = Buffers(right, subject.graphs.buffers.capacity)
    fill_slot_by_slot(
        stage.declaration, oracle, stage.backend.capabilities, _step_of(subject, one), one.batch, one.side
    )
    view, found = subject.fill(one), []
    step = step_of(view)
    for name, slot in stage.declaration.slots.items():
        tensor, expected = vars(view)[name], oracle[name].view(step.padded_sizes)
        if tensor is None or isinstance(slot, Output) or not is_filled(subject, name):
            continue
        place = first_unequal(expected, tensor)
        if place is not None:
            message = _told(name, slot, place, (tensor[place].item(), expected[place].item()), step)
            found.append(Finding("poison", name, message))
    return found


def _told(name: str, slot: Slot, place: tuple[int, ...], values: tuple[Any, Any], step: Step) -> str:
    """What a fill left where."""
    held, right = values
    where = f"row {place[0]}" if place else "its number"
    in_tail = any(place[dim] >= slot.shape[dim].at(step.live_sizes) for dim in slot.varying)
    if in_tail and slot.computes() is None:
        return (
            f"slot {name!r} kept what lay in its tail: {where} holds {held} after a fill that must leave {right}: who "
            "writes there beside the fill, as the step itself may, must be declared by rewritten=True or restored=True"
        )
    return f"slot {name!r} is not what its declaration says: {where} holds {held} after a fill, expected {right}"


def is_filled(subject: Subject[Any], name: str) -> bool:
    """Whether a fill has written all of a slot. What the device computes follows with a whole step's graph."""
    declaration = subject.parts.stage.declaration
    computed = declaration.slots[name].computes() is not None
    return not subject.runner.is_whole or not (computed and declaration.side(name) == DEVICE)


@contextlib.contextmanager
def over_garbage(
    subject: Subject[Any], one: CheckedBatch, generator: torch.Generator, *, flipped: bool = False
) -> Iterator[None]:
    """A block with random bytes in all that a fill of this batch must write, but for what lies there of the batch.

    Slots are afterwards as they were. flipped: each bit the other way round.
    """
    step, declared = _step_of(subject, one), subject.parts.stage.declaration.slots
    read = (slot.reads(name) for name, slot in declared.items())
    values = (source.read(one.batch, one.side) for source in read if source is not None)
    in_place = [v for v in values if isinstance(v, torch.Tensor) and v.numel() and subject.graphs.buffers.holds(v)]
    with slots_kept(subject.parts):
        with torch.no_grad():
            own = [(source, source.clone()) for source in in_place]
            for buffer in subject.graphs.buffers:
                for part in _written_parts(buffer.name, buffer.slot, buffer.view(step.padded_sizes), step):
                    part.copy_(garbage(part, generator, flipped=flipped))
            for source, held in own:
                source.copy_(held)
        subject.graphs.buffers.distrust()
        yield


def _step_of(subject: Subject[Any], one: CheckedBatch) -> Step:
    """The sizes of a batch in the bucket that takes it."""
    parts, bucket = subject.parts, subject.runner.decide(one.batch, **one.side).bucket
    if bucket is None:
        message = "no bucket takes this batch"
        raise ValueError(message)
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


def garbage(like: torch.Tensor, generator: torch.Generator, *, flipped: bool = False) -> torch.Tensor:
    """Random bytes as a tensor of this kind, on the CPU. flipped: each bit the other way round."""
    if like.dtype == torch.bool:
        return (torch.randint(0, 2, like.shape, device="cpu", generator=generator) ^ flipped).bool()
    count = like.numel() * like.itemsize
    drawn = torch.randint(0, 256, (count,), dtype=torch.uint8, device="cpu", generator=generator)
    return (~drawn if flipped else drawn).view(like.dtype).reshape(like.shape)
