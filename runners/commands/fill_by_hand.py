"""A fill by hand of what any runner reads, in the way that engines write it: the rival of a runner's own."""

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.axes import BATCH, TOKENS
from ...dataflow.buffers import allocate
from ...dataflow.capabilities import DEVICE
from ...dataflow.slots import Slot
from ...dataflow.tails import Number, Pad, resolve_value
from .runner_kinds import Kind
from .workload import COUNT, Batch

_AXES: Final = (BATCH, TOKENS)


@attrs.frozen(eq=False)
class _Rows:
    """A slot's memory, and how many rows of it each live request or token has; `axis` is its place in `_AXES`."""

    name: str
    buffer: torch.Tensor
    axis: int
    each: int
    pad: Number | None


@final
class FillByHand:
    """What engines write for a step: of each slot, the tail reset and the live rows copied, all sliced in each step.

    Counts that the host knows are written with `fill_`; what the device computes in a fill is called by its function.
    Tails that nobody reads are left alone, and requests that a view does not show are not padded.
    """

    def __init__(self, kind: Kind, backend: Backend) -> None:
        declaration, capacity = kind.declaration, kind.capacity
        self._buffers = allocate(declaration, capacity, backend.capabilities, backend.empty)
        self._kind, self._backend = kind, backend
        self._padded = [None if axis in kind.unpadded else capacity[axis] for axis in _AXES]
        slots = declaration.slots.items()
        self._copied = [self._rows(name, slot) for name, slot in slots if slot.reads(name) is not None]
        staged = [self._rows(name, slot) for name, slot in slots if slot.rewritten and slot.reads(name) is None]
        self._reset = [(rows, rows.pad) for rows in staged if rows.pad is not None]
        self._viewed = [self._rows(name, slot) for name, slot in slots if slot.varying]
        self._whole = {name: self._buffers[name].tensor for name, slot in slots if not slot.varying}
        self._count = self._whole.get(COUNT)
        self._computed = list(self._functions()) if kind.computes else []

    def __call__(self, batch: Batch) -> Any:
        """Fill from a batch, and return the view."""
        lives = batch.requests, batch.tokens
        padded = [live if most is None else most for live, most in zip(lives, self._padded, strict=True)]
        for rows in self._copied:
            buffer, each = rows.buffer, rows.each
            live, most = lives[rows.axis] * each, padded[rows.axis] * each
            if rows.pad is not None and live < most:
                buffer[live:most].fill_(rows.pad)
            buffer[:live].copy_(getattr(batch, rows.name), non_blocking=True)
        for rows, pad in self._reset:
            live, most = lives[rows.axis] * rows.each, padded[rows.axis] * rows.each
            if live < most:
                rows.buffer[live:most].fill_(pad)
        if self._count is not None:
            self._count.fill_(batch.tokens)
        view = types.SimpleNamespace(**self._whole)
        for rows in self._viewed:
            setattr(view, rows.name, rows.buffer[: padded[rows.axis] * rows.each])
        for name, function, needs in self._computed:
            getattr(view, name).copy_(function(*[getattr(view, need) for need in needs]))
        return view

    def _rows(self, name: str, slot: Slot) -> _Rows:
        """Rows for each request where they hang on requests, else for each token."""
        kind, rule, dim = self._kind, slot.rule(), slot.shape[0]
        axis = BATCH if BATCH in dim.axes else TOKENS
        one = {BATCH: 1, TOKENS: kind.width} if axis == BATCH else {TOKENS: 1}
        pad = resolve_value(rule.value, self._backend.capabilities, kind.fixed) if isinstance(rule, Pad) else None
        return _Rows(name, self._buffers[name].tensor, _AXES.index(axis), dim.at({**kind.fixed, **one}), pad)

    def _functions(self) -> Iterator[tuple[str, Callable[..., Any], Sequence[str]]]:
        declaration = self._kind.declaration
        for name in declaration.order:
            compute = declaration.slots[name].computes()
            if compute is not None and declaration.side(name) == DEVICE:
                yield name, compute.function, compute.needs
