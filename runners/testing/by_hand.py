"""A fill by hand of any declaration, in the two ways that engines write it: the baseline of this library's own."""

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch

from ...backends.base import Backend
from ...dataflow.axes import Sizes, Step, extent
from ...dataflow.buffers import allocate
from ...dataflow.computation import field_of, write
from ...dataflow.declaration import Declaration
from ...dataflow.slots import Slot
from ...dataflow.sources import NO_SIDE, OUT, Side
from ...dataflow.tails import Pad, resolve_value

_FOREACH_COPY: Final = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - torch has no public name for it
_FOREACH_ZERO: Final = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage] - likewise

Box = slice | tuple[slice, ...]


class _Plan(NamedTuple):
    """What a step of given sizes does, in lists of tuples."""

    copied: list[Any]  # name or None, source or None, buffer, live rows, tails, and what these hold
    computed: list[Any]  # name, slot, function, fields of the batch
    views: list[tuple[str, torch.Tensor, Box]]


class _Groups(NamedTuple):
    """Copies and resets that a step gathers anew: one foreach copy a pair of dtypes, and one foreach zero."""

    copies: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]]
    zeros: list[torch.Tensor]

    def add(self, target: torch.Tensor, source: torch.Tensor, *, moves: bool) -> None:
        if moves:  # where no foreach may read host memory, one has to move it first
            source = source.to(target.device)
        targets, copied = self.copies.setdefault((target.dtype, source.dtype, target.is_cpu), ([], []))
        targets.append(target)
        copied.append(source)

    def run(self) -> None:
        if self.zeros:
            _FOREACH_ZERO(self.zeros)
        for targets, copied in self.copies.values():
            _FOREACH_COPY(targets, copied, non_blocking=True)


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
        slots: Memory to fill, such as that which a graph reads. By default it is allocated.

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
        slots: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._declaration, self._capabilities, self._padded = declaration, backend.capabilities, padded
        if slots is None:
            made = allocate(declaration, padded, backend.capabilities, backend.empty)
            slots = {buffer.name: buffer.tensor for buffer in made}
        self.slots = slots
        self._grouped, self._moves = grouped, not backend.capabilities.foreach_host
        self._plans: dict[tuple[int, ...], _Plan] = {}

    def __call__(self, batch: Any, live: tuple[int, ...], side: Side = NO_SIDE) -> Any:
        """Fill from a batch and return the view: `fill`, and all slots sliced."""
        self.fill(batch, live, side)
        view = types.SimpleNamespace(**self.slots)
        for name, buffer, box in self._plans[live].views:
            setattr(view, name, buffer[box])
        return view

    def fill(self, batch: Any, live: tuple[int, ...], side: Side = NO_SIDE) -> None:  # noqa: C901, PLR0912 - no frame more than code by hand has
        """Fill from a batch.

        Args:
            batch: An object or a mapping.
            live: Its rows on each varying axis of the declaration.
            side: Its side arguments.
        """
        plan = self._plans.get(live) or self._planned(live)
        get: Any = batch.get if isinstance(batch, Mapping) else functools.partial(getattr, batch)
        groups = _Groups({}, []) if self._grouped else None
        for name, source, buffer, box, tails, pad in plan.copied:
            value = None
            if source is not None:
                value = get(name, None) if name else source.read(batch, side)
                if value is None:
                    continue
            for tail in tails:
                if groups is not None and pad == 0:
                    groups.zeros.append(buffer[tail])
                else:
                    buffer[tail].fill_(pad)
            if value is not None:
                given = value if type(value) is torch.Tensor else _tensor(value, buffer.dtype)
                if groups is None:
                    buffer[box].copy_(given, non_blocking=True)
                else:
                    groups.add(buffer[box], given, moves=self._moves)
        if groups is not None:
            groups.run()
        fields = self._declaration.fields
        for name, target, function, needs in plan.computed:
            value = function(**{need: field_of(batch, need, fields[need]) for need in needs})
            if isinstance(value, int | float):
                target.fill_(value)
            elif value is not None:  # else it has written its slot itself
                write(target, value, name)

    def _planned(self, live: tuple[int, ...]) -> _Plan:
        """Slices and functions for a step of given sizes: made once, as constants of code by hand are."""
        declaration, step = self._declaration, self._declaration.step(live, self._padded)
        plan = self._plans[live] = _Plan([], [], [])
        known: dict[str, Any] = {}
        for name, slot in declaration.slots.items():
            source, buffer = slot.reads(name), self.slots[name]
            box = _box(extent(slot.shape, step.padded_sizes), slot)
            known[name] = buffer[box] if slot.varying else buffer
            if slot.varying:
                plan.views.append((name, buffer, box))
            if source is not None or slot.rewritten:
                plain = None if source is None else source.plain_name
                rows = _box(extent(slot.shape, step.live_sizes), slot)
                plan.copied.append((plain, source, buffer, rows, *self._tails(slot, step)))
        for name in declaration.order:
            compute = declaration.slots[name].computes()
            if compute is None:
                continue
            given = {**known, **declaration.given(step.of(name)), OUT: known[name]}
            bound = {need: given[need] for need in (*compute.needs, *[OUT] * compute.writes_out) if need in given}
            needs = [need for need in compute.needs if need not in given]
            plan.computed.append((name, known[name], functools.partial(compute.function, **bound), needs))
        return plan

    def _tails(self, slot: Slot, step: Step) -> tuple[Sequence[Box], Any]:
        """Where the tails of a slot are, and what they hold."""
        rule = slot.rule()
        if not isinstance(rule, Pad):
            return (), 0
        live, padded = (extent(slot.shape, sizes) for sizes in (step.live_sizes, step.padded_sizes))
        fixed = {axis: size for axis, size in self._padded.items() if axis.fixed}
        ends = [
            (*map(slice, padded[:dim]), slice(live[dim], padded[dim]))
            for dim in slot.varying
            if live[dim] < padded[dim]
        ]
        return [one[0] if len(one) == 1 else one for one in ends], resolve_value(rule.value, self._capabilities, fixed)


def _box(sizes: Sequence[int], slot: Slot) -> Box:
    """Where the rows of a slot are, up to the last dim that varies: a single slice is no tuple, which takes longer."""
    ranges = tuple(map(slice, sizes[: max(slot.varying, default=0) + 1]))
    return ranges[0] if len(ranges) == 1 else ranges


def _tensor(source: Any, dtype: torch.dtype) -> torch.Tensor:
    """A host tensor of an array or a list; a tensor as it is."""
    if isinstance(source, torch.Tensor):
        return source
    return (
        torch.from_numpy(source) if isinstance(source, np.ndarray) else torch.tensor(source, dtype=dtype, device="cpu")
    )
