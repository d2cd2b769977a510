"""Sizing: how many rows a batch brings on each axis, and whether its host data keeps to the slots' limits."""

import collections
import contextlib
import math
import operator
from collections.abc import Mapping
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from .admission import NOT_TOLD, has_memory, unreadable
from .axes import Axis, Dim, Live, Sizes
from .capabilities import HOST
from .declaration import Declaration
from .errors import BatchError, DeclarationError, MissingSourceError, hint
from .hostdata import HOST_KINDS, unnested
from .slots import Slot
from .sources import NO_SIDE, Side, Source, keys_of, plain_name

Relations = Mapping[Axis, Dim]


@attrs.frozen
class Gauge:
    """Where one axis can be read: a slot's source and a dim of it, whose size is `base + slope * rows`."""

    axis: Axis
    slot: str
    source: Source
    dim: int
    base: int
    slope: int
    required: bool

    def size(self, value: Any) -> int:
        """The size of a source along the dim; MissingSourceError or BatchError where it does not tell."""
        try:
            return operator.index(value.shape[self.dim])
        except (*NOT_TOLD, IndexError):
            inner = value  # nested lists
            for _ in range(self.dim):
                inner = inner[0] if isinstance(inner, list | tuple) and inner else None
            if isinstance(inner, list | tuple):
                return len(inner)
        raise self._unreadable(value)

    def rows(self, value: Any) -> int:
        """Live rows on the axis by a source; MissingSourceError or BatchError where it does not tell."""
        rows, rest = divmod(self.size(value) - self.base, self.slope)
        if rest or rows < 0:
            raise self._unreadable(value)
        return rows

    def _unreadable(self, value: Any) -> BatchError:
        what = f"it tells how many rows the batch has on {self.axis}"
        if value is None:
            return MissingSourceError(f"slot {self.slot!r}: {self.source} is missing; {what}")
        size = " + ".join([str(self.base)] * bool(self.base) + [f"{self.slope} * {self.axis}"])
        is_told = isinstance(value, torch.Tensor) and not unreadable(value)
        got = f"shape {list(value.shape)}" if is_told else unreadable(value) or type(value).__name__
        return BatchError(f"slot {self.slot!r}: expected a size of {size} on dim {self.dim} ({what}), got {got}")


class Sizer:
    """Reads a batch's live sizes, one for each varying axis of a declaration in its order.

    relations: axes that follow from others, such as `{TOKENS: BATCH * 4}`. fixed: sizes of the fixed axes. lead: an
    axis whose rows are wanted, too. Raises DeclarationError where no copied slot tells the size of an axis.
    """

    def __init__(self, declaration: Declaration, relations: Relations, fixed: Sizes, lead: Axis | None = None) -> None:
        wanted = [*declaration.varying] if lead is None else [*declaration.varying, lead]
        sizes = [relations.get(axis, Dim.of(axis)) for axis in wanted]
        self._leads = leads = sorted({_told(size) for size in sizes})
        self._tellers = [_tellers(declaration, axis, relations, fixed) for axis in leads]
        self.gauges = tuple(found[:1] if found[0].required else found for found in self._tellers)
        self._check_side = declaration.check_side
        self._names = {*map(str, map(plain_name, declaration.sources.values()))}
        self._lines = tuple((leads.index(_told(size)), *_line(size, _told(size), fixed)) for size in sizes)

    def explain(self, error: BatchError, batch: Any, side: Side) -> None:
        """Begin an error with the different sizes that slots tell of an axis, the rarest one first.

        Where a source is missing, end it with the key that the batch has in its place, if one is near.
        """
        if isinstance(error, MissingSourceError):
            keys = keys_of(batch)
            for key in sorted(keys - self._names):
                if near := hint(key, self._names - keys):
                    error.args = (f"{error}; the batch has {key!r}: {near}",)
        for axis, tellers in zip(self._leads, self._tellers, strict=True):
            told = collections.defaultdict[int, list[str]](list)
            for one in tellers:
                with contextlib.suppress(BatchError):  # absent, or not of a size that tells
                    told[one.rows(one.source.read(batch, side))].append(repr(one.slot))
            if len(told) > 1:
                rarest = sorted(told.items(), key=lambda each: len(each[1]))
                said = " and ".join(f"{rows} off slot {', '.join(slots)}" for rows, slots in rarest)
                error.args = (f"{axis} is {said}: one of them is wrong; {error}",)

    def __call__(self, batch: Any, side: Side) -> Live:
        """Live rows on each varying axis, and last those of the lead axis where one was named.

        Raises BatchError for a side argument that no slot reads, and where a source does not tell.
        """
        if side:
            self._check_side(side)
        rows = list[int]()
        for gauges in self.gauges:  # a required one, or the first of several that is there; else there are no rows
            found = ((one, one.source.read(batch, side)) for one in gauges)
            rows.append(next((one.rows(value) for one, value in found if one.required or value is not None), 0))
        return tuple([base + slope * rows[lead] for lead, base, slope in self._lines])


def _told(size: Dim) -> Axis:
    """The axis that another follows from, or the axis itself."""
    lead = size.reveals()
    if lead is None:
        raise DeclarationError(f"an axis follows from one other that varies, to the first power, got {size}")
    return lead


def _line(size: Dim, axis: Axis, fixed: Sizes) -> tuple[int, int]:
    """Base and slope of a size along one axis."""
    base = size.at({**fixed, axis: 0})
    return base, size.at({**fixed, axis: 1}) - base


def _tellers(declaration: Declaration, axis: Axis, relations: Relations, fixed: Sizes) -> tuple[Gauge, ...]:
    """The sources that tell an axis: required ones first, then the plainest shape, then by name."""
    found = list[Gauge]()
    for name, source in declaration.sources.items():
        slot = declaration.slots[name]
        for dim, declared in enumerate(slot.shape):
            size = declared.replace(relations)
            if size.reveals() == axis:
                found.append(Gauge(axis, name, source, dim, *_line(size, axis, fixed), not slot.optional))
    if not found:
        raise DeclarationError(
            f"{declaration.name}: no copied slot tells the size of {axis}: declare one with a dim of {axis}"
        )
    return tuple(sorted(found, key=lambda one: (not one.required, one.base + one.slope, one.slot, one.dim)))


_PLAIN: Final = (int, float)
_NO_NUMBERS: Final = (RuntimeError, TypeError, ValueError)  # of what is no box of numbers, which the fill refuses


@attrs.frozen
class Limit:
    """The largest value of one slot's host data; no tensor for the device is read, which would wait for it."""

    name: str
    slot: Slot
    source: Source
    most: int

    def allow(self, batch: Any, side: Side) -> bool:
        """Whether a batch keeps to it."""
        return self._over(self.source.read(batch, side)) is None

    def check(self, batch: Any, side: Side = NO_SIDE) -> None:
        """Refuse a batch whose host data holds more than the slot takes: BatchError. Writes nothing."""
        found = self._over(self.source.read(batch, side))
        if found is not None:
            said = self.most if self.slot.limit == Dim.of(self.most) else f"{self.slot.limit} = {self.most}"
            raise BatchError(
                f"slot {self.name!r}: row {found[0]} is {found[1]}, over the limit of {said}: split or refuse what is "
                "that long before it is batched"
            )

    def _over(self, value: Any) -> tuple[Any, Any] | None:
        """The first row of host data that is over the limit, and what it is; None where there is none."""
        try:
            if isinstance(value, list | tuple):
                numbers, _ = unnested(value, len(self.slot.shape))
                if not numbers or _most_of(numbers) <= self.most:  # without an array made of them
                    return None
            elif isinstance(value, torch.Tensor):
                if not (self.slot.placement == HOST and value.is_cpu and has_memory(value)):
                    return None
            elif not isinstance(value, HOST_KINDS):
                return None
            array = _array_of(value)
            found = np.argwhere(array > self.most)
        except _NO_NUMBERS:
            return None
        if not len(found):
            return None
        row = found[0].tolist()
        return row[0] if len(row) == 1 else row, array[tuple(row)]


def limits_of(declaration: Declaration, sizes: Sizes) -> list[Limit]:
    """The limits of a declaration's slots at the sizes of the fixed axes."""
    slots = ((name, declaration.slots[name], source) for name, source in declaration.sources.items())
    return [Limit(*each, each[1].limit.at(sizes)) for each in slots if each[1].limit is not None]


def _most_of(numbers: list[Any] | tuple[Any, ...]) -> float:
    """The largest of plain numbers; infinity where other objects are among them, so that each is looked at."""
    try:
        return max(numbers) if type(numbers[0]) in _PLAIN else math.inf
    except _NO_NUMBERS:
        return math.inf


def _array_of(value: Any) -> "npt.NDArray[Any]":
    """Host data as an array; objects as the whole numbers that they stand for."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().double() if value.is_floating_point() else value
        return plain.resolve_neg().numpy()
    array = np.asarray(value)
    return np.vectorize(operator.index, [object])(array) if array.dtype == object else array
