"""Fills held to the oracle: over what earlier steps left, and over garbage, every slot is as its declaration says."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic

import torch

from ...dataflow.axes import Step
from ...dataflow.buffers import Buffer, Buffers
from ...dataflow.capabilities import DEVICE
from ...dataflow.oracle import fill_slot_by_slot
from ...dataflow.slots import Constant, Output, Slot
from ..bits import first_unequal
from ..runner import Runner
from ..stacked.runner import StackRunner
from ..stage import V
from ..state import State
from .replays import step_of
from .report import Case, Finding
from .tails import written_parts
from .together import Together

POISON: Final = "poison"


def bucket_step(runner: Runner[V], case: Case) -> Step:
    """The sizes of a case in the bucket that takes it. ValueError where none does."""
    parts = runner.parts
    bucket = runner.decide(case.batch, **case.side).bucket
    if bucket is None:
        message = "no bucket takes this batch"
        raise ValueError(message)
    live = parts.size(case.batch, case.side)[:-1]
    return parts.stage.declaration.step(live, parts.sizes[bucket])


def is_filled(runner: Runner[V], name: str) -> bool:
    """Whether a fill has written all of a slot; what the device computes follows with a whole step's graph."""
    declaration = runner.parts.stage.declaration
    computed = declaration.slots[name].computes() is not None
    return isinstance(runner, StackRunner) or not (computed and declaration.side(name) == DEVICE)


@contextlib.contextmanager
def over_garbage(
    runner: Runner[V], case: Case, generator: torch.Generator, *, flipped: bool = False
) -> Iterator[Callable[[], None]]:
    """Random bytes in all that a fill of this case must write, but for what lies there of the case itself.

    flipped: each bit the other way round. If the block raises, all is as it was; what it gets sees to that later.
    """
    step, buffers = bucket_step(runner, case), buffers_of(runner)
    parts = [
        part
        for buffer in buffers
        for part in written_parts(buffer.name, buffer.slot, buffer.view(step.padded_sizes), step)
    ]
    before, own = [part.clone() for part in parts], [(one, one.clone()) for one in _in_place(runner, case)]
    with torch.no_grad():
        for part in parts:
            part.copy_(garbage(part, generator, flipped=flipped))
        for source, values in own:
            source.copy_(values)
    buffers.distrust()

    def undo() -> None:
        with torch.no_grad():
            for part, values in zip(parts, before, strict=True):
                part.copy_(values)
        buffers.distrust()

    try:
        yield undo
    except BaseException:
        undo()
        raise


def garbage(like: torch.Tensor, generator: torch.Generator, *, flipped: bool = False) -> torch.Tensor:
    """Random bytes as a tensor of this kind, on the CPU; or each bit of them the other way round."""
    if like.dtype == torch.bool:
        return (torch.randint(0, 2, like.shape, device="cpu", generator=generator) ^ flipped).bool()
    count = like.numel() * like.itemsize
    drawn = torch.randint(0, 256, (count,), dtype=torch.uint8, device="cpu", generator=generator)
    return (~drawn if flipped else drawn).view(like.dtype).reshape(like.shape)


def buffers_of(runner: Runner[V]) -> Buffers:
    """The memory of a runner's slots. ValueError where it captures nothing."""
    graphs = runner.parts.graphs
    if graphs is None:
        message = "a runner without graphs has no buckets to fill"
        raise ValueError(message)
    return graphs.buffers


def _in_place(runner: Runner[V], case: Case) -> list[torch.Tensor]:
    """Sources that lie in the slots themselves."""
    buffers, slots = buffers_of(runner), runner.parts.stage.declaration.slots
    read = (slot.reads(name) for name, slot in slots.items())
    values = (source.read(case.batch, case.side) for source in read if source is not None)
    return [one for one in values if isinstance(one, torch.Tensor) and one.numel() and buffers.holds(one)]


class FillProof(Generic[V]):
    """Fills of one runner, held to the oracle, which fills buffers of its own from the same start."""

    def __init__(self, runner: Runner[V]) -> None:
        self._runner = runner
        self._together = Together(runner.parts)

    @functools.cached_property
    def _oracle(self) -> Buffers:
        """The same slots in other memory; what no fill writes is shared."""
        buffers = buffers_of(self._runner)
        made = {
            one.name: Buffer(one.name, one.slot, _other(one), tuple(0 for _ in one.slot.varying)) for one in buffers
        }
        return Buffers(made, buffers.capacity)

    def check(self, case: Case, state: State, generator: torch.Generator) -> list[Finding]:
        """Two fills: after a step on the same batch, which may have written into tails, and over garbage."""
        with state.kept():
            self._runner(case.batch, **case.side)
        found = self._compare(case)
        if not self._together.any(bool(found)):
            with over_garbage(self._runner, case, generator):
                found = self._compare(case)
        return found

    def _compare(self, case: Case) -> list[Finding]:
        """Fill, and find the slots that do not hold what the oracle's do."""
        right = self._right(case)
        view = self._runner.fill(case.batch, **case.side)
        step, slots = step_of(view), self._runner.parts.stage.declaration.slots
        found = []
        for name in (name for name in slots if is_filled(self._runner, name)):
            tensor = vars(view)[name]
            if tensor is None or isinstance(slots[name], Output):
                continue
            expected = right[name].view(step.padded_sizes)
            place = first_unequal(expected, tensor)
            if place is not None:
                values = tensor[place].item(), expected[place].item()
                found.append(Finding(POISON, name, _told(name, slots[name], place, values, step)))
        return found

    def _right(self, case: Case) -> Buffers:
        """What the oracle makes of the slots as they are now."""
        runner, step, oracle = self._runner, bucket_step(self._runner, case), self._oracle
        stage = runner.parts.stage
        with torch.no_grad():
            for buffer in buffers_of(runner):
                oracle[buffer.name].view(step.padded_sizes).copy_(buffer.view(step.padded_sizes))
        fill_slot_by_slot(stage.declaration, oracle, stage.backend.capabilities, step, case.batch, case.side)
        return oracle


def _other(buffer: Buffer) -> torch.Tensor:
    with torch.inference_mode(mode=False), torch.no_grad():
        return buffer.tensor if isinstance(buffer.slot, Output | Constant) else buffer.tensor.clone()


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
