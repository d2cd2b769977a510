"""A fill by hand of any declaration, in the two ways that engines write it: the baseline of this library's own."""

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import attrs
import numpy as np
import torch

from ...backends.base import Backend
from ...dataflow.axes import Sizes, Step, extent
from ...dataflow.buffers import allocate
from ...dataflow.capabilities import DEVICE
from ...dataflow.computation import field_of, write
from ...dataflow.declaration import Declaration
from ...dataflow.slots import Slot
from ...dataflow.sources import NO_SIDE, OUT, Side, Source
from ...dataflow.tails import Number, Pad, resolve_value

_FOREACH_COPY: Final = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - torch has no public name for it
_FOREACH_ZERO: Final = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage] - likewise

Box = slice | tuple[slice, ...]


class _Part(NamedTuple):
    """What a step of given sizes does to one slot: where its live rows and its tails are, and what these hold."""

    buffer: torch.Tensor
    live: Box
    tails: Sequence[Box]
    pad: Number


@attrs.frozen(eq=False)
class _Plan:
    """All that a step of given sizes does: copies, resets of slots without a source, computed slots, and the view."""

    sources: list[tuple[str | None, Source]]
    copied: list[_Part]
    reset: list[_Part]
    computed: list[tuple[str, torch.Tensor, Callable[..., Any], Sequence[str]]]
    views: list[tuple[str, torch.Tensor, Box]]


@final
class FillByHand:
    """A fill as engines write it: for each slot one tail reset and one copy, and then the view, sliced in each step.

    As engines do, it copies host data without waiting for the device, which has read pageable memory when the call
    returns.

    Args:
        declaration: The slots.
        backend: Where they are.
        padded: The bucket's sizes.
        grouped: Whether copies go by foreach, the groups built anew in each step, and not one by one.
        on_device: Whether slots that the device computes are computed here, and not in a graph.

    Attributes:
        slots: Every padded row of each slot.
    """

    def __init__(
        self,
        declaration: Declaration,
        backend: Backend,
        padded: Sizes,
        *,
        grouped: bool = False,
        on_device: bool = True,
    ) -> None:
        self._declaration, self._capabilities, self._padded = declaration, backend.capabilities, padded
        buffers = allocate(declaration, padded, backend.capabilities, backend.empty)
        self.slots: Mapping[str, torch.Tensor] = {name: buffers[name].tensor for name in declaration.slots}
        self._copy = self._regrouped if grouped else self._one_by_one
        self._moves = not backend.capabilities.foreach_host
        self._plans: dict[tuple[int, ...], _Plan] = {}
        wanted = [name for name in declaration.order if on_device or declaration.side(name) != DEVICE]
        self._computes = [(name, made) for name in wanted if (made := declaration.slots[name].computes()) is not None]

    def __call__(self, batch: Any, live: tuple[int, ...], side: Side = NO_SIDE) -> Any:
        """Fill from a batch and return the view: `fill`, and all slots sliced."""
        self.fill(batch, live, side)
        view = types.SimpleNamespace(**self.slots)
        for name, buffer, box in self._plans[live].views:
            setattr(view, name, buffer[box])
        return view

    def fill(self, batch: Any, live: tuple[int, ...], side: Side = NO_SIDE) -> None:
        """Fill from a batch.

        Args:
            batch: An object or a mapping.
            live: Its rows on each varying axis of the declaration.
            side: Its side arguments.
        """
        plan = self._plans.get(live) or self._planned(live)
        if isinstance(batch, Mapping):
            found = [batch.get(name) if name else source.read(batch, side) for name, source in plan.sources]
        else:
            found = [getattr(batch, name, None) if name else source.read(batch, side) for name, source in plan.sources]
        self._copy(plan.copied, found)
        for part in plan.reset:
            for tail in part.tails:
                part.buffer[tail].fill_(part.pad)
        fields = self._declaration.fields
        for name, target, function, needs in plan.computed:
            value = function(**{need: field_of(batch, need, fields[need]) for need in needs})
            if isinstance(value, int | float):
                target.fill_(value)
            elif value is not None:  # else it has written its slot itself
                write(target, value, name)

    def _one_by_one(self, parts: Sequence[_Part], sources: Sequence[Any]) -> None:
        """One tail reset and one copy a slot."""
        for (buffer, live, tails, pad), source in zip(parts, sources, strict=True):
            if source is not None:
                for tail in tails:
                    buffer[tail].fill_(pad)
                given = source if type(source) is torch.Tensor else _tensor(source, buffer.dtype)
                buffer[live].copy_(given, non_blocking=True)

    def _regrouped(self, parts: Sequence[_Part], sources: Sequence[Any]) -> None:
        """One foreach copy a pair of dtypes, and one foreach zero."""
        groups: dict[tuple[torch.dtype, torch.dtype, bool], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        zeros: list[torch.Tensor] = []
        for (buffer, live, tails, pad), source in zip(parts, sources, strict=True):
            if source is None:
                continue
            given = source if type(source) is torch.Tensor else _tensor(source, buffer.dtype)
            if self._moves:  # where no foreach may read host memory, one has to move it first
                given = given.to(buffer.device)
            targets, copied = groups.setdefault((buffer.dtype, given.dtype, buffer.is_cpu), ([], []))
            targets.append(buffer[live])
            copied.append(given)
            for tail in tails:
                if pad == 0:
                    zeros.append(buffer[tail])
                else:
                    buffer[tail].fill_(pad)
        if zeros:
            _FOREACH_ZERO(zeros)
        for targets, copied in groups.values():
            _FOREACH_COPY(targets, copied, non_blocking=True)

    def _planned(self, live: tuple[int, ...]) -> _Plan:
        """Slices and functions for a step of given sizes: made once, as constants of code by hand are."""
        declaration, step = self._declaration, self._declaration.step(live, self._padded)
        plan = self._plans[live] = _Plan([], [], [], [], [])
        known: dict[str, Any] = {}
        for name, slot in declaration.slots.items():
            source, buffer, box = slot.reads(name), self.slots[name], _rows(slot, step.padded_sizes)
            known[name] = buffer[box] if slot.varying else buffer
            if slot.varying:
                plan.views.append((name, buffer, box))
            if source is not None:
                plan.sources.append((source.plain_name, source))
                plan.copied.append(self._part(buffer, slot, step))
            elif slot.rewritten:
                plan.reset.append(self._part(buffer, slot, step))
        for name, compute in self._computes:
            given = {**known, **declaration.given(step.of(name)), OUT: known[name]}
            bound = {need: given[need] for need in (*compute.needs, *[OUT] * compute.writes_out) if need in given}
            needs = [need for need in compute.needs if need not in given]
            plan.computed.append((name, known[name], functools.partial(compute.function, **bound), needs))
        return plan

    def _part(self, buffer: torch.Tensor, slot: Slot, step: Step) -> _Part:
        rule, tails = slot.rule(), list[Box]()
        pad: Number = 0
        if isinstance(rule, Pad):
            live, padded = (extent(slot.shape, sizes) for sizes in (step.live_sizes, step.padded_sizes))
            pad = resolve_value(rule.value, self._capabilities, {a: n for a, n in self._padded.items() if a.fixed})
            tails = [
                _box(*map(slice, padded[:dim]), slice(live[dim], padded[dim]))
                for dim in slot.varying
                if live[dim] < padded[dim]
            ]
        return _Part(buffer, _rows(slot, step.live_sizes), tails, pad)


def _rows(slot: Slot, sizes: Sizes) -> Box:
    """Where the rows of a slot are, up to the last dim that varies."""
    return _box(*map(slice, extent(slot.shape, sizes)[: max(slot.varying, default=0) + 1]))


def _box(*ranges: slice) -> Box:
    """An index of the first dims: a single slice is no tuple, which would take torch longer."""
    return ranges[0] if len(ranges) == 1 else ranges


def _tensor(source: Any, dtype: torch.dtype) -> torch.Tensor:
    """A host tensor of an array or a list; a tensor as it is."""
    if isinstance(source, torch.Tensor):
        return source
    is_array = isinstance(source, np.ndarray)
    return torch.from_numpy(source) if is_array else torch.tensor(source, dtype=dtype, device="cpu")
