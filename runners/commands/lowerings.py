"""The ways to fill a decode step that `slotgraph bench` compares: as engines hand-write them, and this library's."""

import abc
import bisect
import types
from typing import Any, ClassVar, Final, final

import torch

from ...backends.base import Backend
from ...dataflow.axes import BATCH, TOKENS
from ...dataflow.buffers import Buffers, allocate
from ...dataflow.errors import SlotGraphError
from ...dataflow.inputs import Inputs
from ...dataflow.oracle import fill_slot_by_slot
from ...dataflow.step import Step
from ...dataflow.tails import Number, Pad, resolve_value
from ..decode import DecodeRunner
from .workload import BUCKETS, Batch

_FOREACH_COPY: Final = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - torch has no public name for it
_FOREACH_ZERO: Final = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage] - likewise
COUNT: Final = "num_token_non_padded"


class WrongBytesError(SlotGraphError, AssertionError):
    """A lowering left other bytes than the oracle."""


class Lowering(abc.ABC):
    """A way to fill: called with a batch, it returns the view that a step would read."""

    name: ClassVar[str]

    @abc.abstractmethod
    def __call__(self, batch: Batch) -> Any:
        """Fill from a batch and hand out the padded view."""


class HandWritten(Lowering):
    """What the two hand-written ones share: buffers, a table of slots, and the count."""

    def __init__(self, inputs: type[Inputs], backend: Backend) -> None:
        buffers = _buffers(inputs, backend)
        self._slots = [
            (name, buffers[name].tensor, _pad(buffers[name].slot.rule(), backend))
            for name, slot in inputs.slotgraph.slots.items()
            if slot.reads(name) is not None
        ]
        self._count = buffers[COUNT].tensor


@final
class PerSlot(HandWritten):
    """One tail reset and one copy a slot, views sliced in each step."""

    name: ClassVar[str] = "per_slot"

    def __call__(self, batch: Batch) -> Any:
        """Fill slot by slot."""
        live, values = batch.rows, batch.tensors
        padded = BUCKETS[bisect.bisect_left(BUCKETS, live)]
        view = types.SimpleNamespace()
        for name, buffer, pad in self._slots:
            if live < padded:
                buffer[live:padded].fill_(pad)
            buffer[:live].copy_(getattr(values, name))
            setattr(view, name, buffer[:padded])
        self._count.fill_(live)
        view.num_token_non_padded = self._count
        return view


@final
class Regrouped(HandWritten):
    """One foreach copy a pair of dtypes and one foreach zero, the groups built anew in each step."""

    name: ClassVar[str] = "regrouped"

    def __call__(self, batch: Batch) -> Any:
        """Group, then fill."""
        live, values = batch.rows, batch.tensors
        padded = BUCKETS[bisect.bisect_left(BUCKETS, live)]
        view, zeros = types.SimpleNamespace(), []
        groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for name, buffer, pad in self._slots:
            source = getattr(values, name)
            targets, sources = groups.setdefault((buffer.dtype, source.dtype), ([], []))
            targets.append(buffer[:live])
            sources.append(source)
            if live < padded and pad == 0:
                zeros.append(buffer[live:padded])
            elif live < padded:
                buffer[live:padded].fill_(pad)
            setattr(view, name, buffer[:padded])
        if zeros:
            _FOREACH_ZERO(zeros)
        for targets, sources in groups.values():
            _FOREACH_COPY(targets, sources)
        self._count.fill_(live)
        view.num_token_non_padded = self._count
        return view


@final
class Foreach(Lowering):
    """This library's public path, `runner.fill(batch)`: sizing, routing, checks, planned foreach copies, typed view."""

    name: ClassVar[str] = "foreach"

    def __init__(self, inputs: type[Inputs], backend: Backend) -> None:
        self.runner = DecodeRunner(inputs, _one_output, buckets=BUCKETS, backend=backend, progress=False)
        self.runner.capture()

    def __call__(self, batch: Batch) -> Any:
        """Fill through the runner."""
        return self.runner.fill(batch.tensors)


@final
class FillAlone(Lowering):
    """The fill of one bucket alone: what is left when a runner's sizing and routing are taken off."""

    name: ClassVar[str] = "fill_alone"

    def __init__(self, inputs: type[Inputs], backend: Backend) -> None:
        runner = Foreach(inputs, backend).runner
        captured = [runner.graphs.get(rows, frozenset()) for rows in BUCKETS]
        self._buckets = [one.bucket for one in captured if one is not None]
        self._axes = len(inputs.slotgraph.varying)

    def __call__(self, batch: Batch) -> Any:
        """Fill the bucket; what the step sees, by slot."""
        bucket = self._buckets[bisect.bisect_left(BUCKETS, batch.rows)]
        ready = bucket.fill(batch.tensors, (batch.rows,) * self._axes)
        return types.SimpleNamespace(**ready.views)


LOWERINGS: Final[tuple[type[PerSlot | Regrouped | Foreach | FillAlone], ...]] = (PerSlot, Regrouped, Foreach, FillAlone)


def verify(lowering: Lowering, inputs: type[Inputs], backend: Backend, batches: list[Batch]) -> None:
    """Fill from each batch and hold every slot's bytes against the oracle's; WrongBytesError names what differs."""
    buffers = _buffers(inputs, backend)
    for batch in batches:
        padded = BUCKETS[bisect.bisect_left(BUCKETS, batch.rows)]
        step = Step({BATCH: batch.rows, TOKENS: batch.rows}, {BATCH: padded, TOKENS: padded})
        wanted = fill_slot_by_slot(inputs.slotgraph, buffers, backend.capabilities, step, batch.tensors)
        view = lowering(batch)
        backend.synchronize()
        for name, expected in wanted.items():
            if expected is not None and not _same_bytes(getattr(view, name), expected):
                message = (
                    f"{lowering.name} left other bytes in slot {name!r} than the oracle, {batch.rows}/{padded} rows"
                )
                raise WrongBytesError(message)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _buffers(inputs: type[Inputs], backend: Backend) -> Buffers:
    capacity = {BATCH: BUCKETS[-1], TOKENS: BUCKETS[-1]}
    return allocate(inputs.slotgraph, capacity, backend.capabilities, backend.empty)


def _pad(rule: object, backend: Backend) -> Number:
    return resolve_value(rule.value, backend.capabilities, {}) if isinstance(rule, Pad) else 0


def _one_output(view: Any) -> Any:
    """A step that a graph can be captured from; it is not replayed here."""
    return view.input_ids + 1
