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
from .axes import Axis, Dim, Sizes
from .capabilities import HOST
from .declaration import Declaration
from .errors import BatchError, DeclarationError, MissingSourceError
from .hostdata import HOST_KINDS, unnested
from .sources import NO_SIDE, Gather, Side, Source

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

    def disagrees(self, most: int, rows: int, right: str) -> str:
        """What is wrong with a slot that tells other rows than most others do."""
        expected, got = (self.base + self.slope * count for count in (most, rows))
        return (
            f"slot {self.slot!r}: expected a size of {expected} on dim {self.dim}, for {most} rows on {self.axis} as "
            f"{right} have, got {got}"
        )

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

    relations: axes that follow from others, such as `{TOKENS: BATCH * 4}`. fixed: sizes of the fixed axes.
    lead: the axis whose rows are wanted beside the sizes, whether or not a slot has it.
    Raises DeclarationError where no copied slot tells the size of an axis.
    """

    def __init__(self, declaration: Declaration, relations: Relations, fixed: Sizes, lead: Axis | None = None) -> None:
        wanted = [*declaration.varying] if lead is None else [*declaration.varying, lead]
        sizes = [relations.get(axis, Dim.of(axis)) for axis in wanted]
        leads = sorted({_told(size) for size in sizes})
        self._tellers = [_tellers(declaration, axis, relations, fixed) for axis in leads]
        self.gauges = tuple(found[:1] if found[0].required else found for found in self._tellers)
        self._check_side = declaration.check_side
        self._firsts = tuple(gauges[0] for gauges in self.gauges)
        self.required = all(gauge.required for gauge in self._firsts)
        self._gather = Gather([gauge.source for gauge in self._firsts])
        self._lines = tuple((leads.index(_told(size)), *_line(size, _told(size), fixed)) for size in sizes)

    def explain(self, error: BatchError, batch: Any, side: Side) -> None:
        """Say in an error which slots told the sizes that the others were held to.

        Where most slots agree on another size, the error names the slots that do not, in place of what it said. Where
        no size has a majority, all are told.
        """
        told, faults = list[str](), list[str]()
        for gauges, tellers in zip(self.gauges, self._tellers, strict=True):
            axis, votes = gauges[0].axis, _votes(tellers, batch, side)
            ranked = collections.Counter(votes.values()).most_common(2)
            if len(ranked) > 1 and ranked[0][1] == ranked[1][1]:
                each = ", ".join(f"{rows} off slot {one.slot!r}" for one, rows in votes.items())
                told.append(f"{axis} is {each}: one of them is wrong")
                continue
            told.append(f"{axis} off slot {gauges[0].slot!r}")
            most = ranked[0][0] if ranked else None
            if most == next((votes[one] for one in gauges if one in votes), None):
                continue
            right = ", ".join(repr(one.slot) for one, rows in votes.items() if rows == most)
            faults += [one.disagrees(most or 0, rows, right) for one, rows in votes.items() if rows != most]
        if faults and not isinstance(error, MissingSourceError):
            error.args = ("; ".join(faults),)
            return
        note = f" (sizes were read: {', '.join(told)})"
        error.args = (str(error).removesuffix(note) + note,)

    def __call__(self, batch: Any, side: Side) -> tuple[int, ...]:
        """Live rows on each varying axis, and last those of the lead axis where one was named.

        Raises BatchError for a side argument that no slot reads, and where a source does not tell.
        """
        if side:
            self._check_side(side)
        if self.required:
            sources = self._gather(batch, side)
            rows = [gauge.rows(source) for gauge, source in zip(self._firsts, sources, strict=True)]
        else:
            rows = [_first(gauges, batch, side) for gauges in self.gauges]
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


def _first(gauges: tuple[Gauge, ...], batch: Any, side: Side) -> int:
    """The rows that the first of several optional sources tells; no rows where the batch has none of them."""
    for gauge in gauges:
        value = gauge.source.read(batch, side)
        if value is not None:
            return gauge.rows(value)
    return 0


def _votes(tellers: tuple[Gauge, ...], batch: Any, side: Side) -> dict[Gauge, int]:
    """The rows that a batch's sources tell on an axis, by where they were read; each source counts once."""
    votes: dict[Source, tuple[Gauge, int]] = {}
    for gauge in tellers:
        with contextlib.suppress(BatchError):  # absent, or not of a size that tells
            votes.setdefault(gauge.source, (gauge, gauge.rows(gauge.source.read(batch, side))))
    return dict(votes.values())


_PLAIN: Final = (int, float)
_NO_NUMBERS: Final = (RuntimeError, TypeError, ValueError)
"""The errors of a value that is not a box of numbers. No limit is held against it: the fill refuses it."""


@attrs.frozen
class Limit:
    """The largest value of one slot's host data: `text` as it was declared, and the number that it comes to.

    dims: of the slot. on_host: whether a tensor is host data for this slot. One for a slot on the device is not looked
    into, wherever it lies: that would wait for the device.
    """

    slot: str
    source: Source
    text: str
    most: int
    on_host: bool
    dims: int

    def over(self, value: Any) -> tuple[Any, Any] | None:
        """The first row of host data that is over the limit, and what it is; None where there is none."""
        try:
            if isinstance(value, list | tuple):
                numbers, _ = unnested(value, self.dims)
                if not numbers or _most_of(numbers) <= self.most:  # without an array made of them
                    return None
            elif isinstance(value, torch.Tensor):
                if not (self.on_host and value.is_cpu and has_memory(value)):
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


@attrs.frozen
class Limits:
    """The limits of one runner's slots, held against each batch before anything is written."""

    limits: tuple[Limit, ...]

    @classmethod
    def of(cls, declaration: Declaration, sizes: Sizes) -> "Limits | None":
        """The limits at the sizes of the fixed axes; None where no slot has one, so that nothing need be asked."""
        found = []
        for name, source in declaration.sources.items():
            slot = declaration.slots[name]
            if slot.limit is not None:
                most, on_host = slot.limit.at(sizes), slot.placement == HOST
                found.append(Limit(name, source, str(slot.limit), most, on_host, len(slot.shape)))
        return cls(tuple(found)) if found else None

    def allow(self, batch: Any, side: Side) -> bool:
        """Whether a batch keeps to them all."""
        return all(limit.over(limit.source.read(batch, side)) is None for limit in self.limits)

    def check(self, batch: Any, side: Side = NO_SIDE) -> None:
        """Refuse a batch whose host data holds more than a slot takes: BatchError. Writes nothing."""
        for limit in self.limits:
            found = limit.over(limit.source.read(batch, side))
            if found is not None:
                said = limit.text if limit.text == str(limit.most) else f"{limit.text} = {limit.most}"
                raise BatchError(
                    f"slot {limit.slot!r}: row {found[0]} is {found[1]}, over the limit of {said}: split or refuse "
                    "what is that long before it is batched"
                )


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
