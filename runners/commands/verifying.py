"""What is measured is right: each contestant is held to the oracle, byte for byte, before anything is timed."""

from collections.abc import Mapping, Sequence

import torch

from ...dataflow.axes import BATCH, TOKENS
from ...dataflow.errors import WrongBytesError
from ...dataflow.oracle import fill_slot_by_slot
from ...dataflow.step import Step
from .lowerings import BARE, Contestant
from .workload import Batch, Workload, plus_one

Slots = Mapping[str, torch.Tensor | None]


def verify(workload: Workload, contestants: Sequence[Contestant], batches: Sequence[Batch]) -> None:
    """Run all contestants over the batches, first their fills, then their whole steps; WrongBytesError names a fault.

    A step must leave every slot as the oracle does, and return what the step makes of the oracle's slots.
    """
    buffers, backend = workload.buffers(), workload.backend
    for check in (_check_fill, _check_step):
        for batch in batches:
            step = Step({BATCH: batch.rows, TOKENS: batch.rows}, {BATCH: batch.padded, TOKENS: batch.padded})
            wanted = fill_slot_by_slot(workload.inputs.slotgraph, buffers, backend.capabilities, step, batch)
            for contestant in contestants:
                if contestant.name != BARE:
                    check(contestant, batch, step, wanted, workload)


def _check_fill(contestant: Contestant, batch: Batch, step: Step, wanted: Slots, workload: Workload) -> None:
    del step
    if contestant.fill is not None:
        view = contestant.fill(batch)
        workload.backend.synchronize()
        _compare({name: getattr(view, name) for name in wanted}, wanted, f"{contestant.name}'s fill", batch)


def _check_step(contestant: Contestant, batch: Batch, step: Step, wanted: Slots, workload: Workload) -> None:
    if contestant.step is None:
        return
    outputs = contestant.step(batch)
    workload.backend.synchronize()
    found = {name: contestant.buffers[name].view(step.padded_sizes) for name in wanted}
    _compare(found, wanted, f"{contestant.name}'s step", batch)
    if not same_bytes(outputs, plus_one(Batch(**wanted))[: batch.rows]):
        message = f"{contestant.name} returned other outputs than the oracle's slots give, {_rows(batch)}"
        raise WrongBytesError(message)


def _compare(found: Slots, wanted: Slots, whose: str, batch: Batch) -> None:
    for name, expected in wanted.items():
        if expected is not None and not same_bytes(found[name], expected):
            message = f"{whose} left other bytes in slot {name!r} than the oracle, {_rows(batch)}"
            raise WrongBytesError(message)


def _rows(batch: Batch) -> str:
    return f"{batch.rows}/{batch.padded} rows"


def same_bytes(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and each byte."""
    same = one is not None and one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(*(each.contiguous().view(torch.uint8) for each in (one, other) if each is not None))
