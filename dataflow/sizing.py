"""Sizing: how many rows a batch brings on each axis, read off the sources that tell."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import torch

from .axes import Axis, Dim, Sizes
from .caches import keep_newest
from .declaration import Declaration
from .errors import BatchError, DeclarationError, MissingSourceError
from .gather import Gather
from .sources import Side, Source

Relations = Mapping[Axis, Dim]
KEPT: Final = 4096
"""Sizes that a sizer remembers the rows of."""


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

    def read(self, batch: Any, side: Side) -> int:
        """The size along the dim; MissingSourceError or BatchError where the source does not tell."""
        return self.size(self.source.read(batch, side))

    def size(self, value: Any) -> int:
        """The size of a source along the dim; MissingSourceError or BatchError where it does not tell."""
        try:
            size: int = value.shape[self.dim]
        except (AttributeError, IndexError, TypeError):
            if not isinstance(value, list | tuple):
                raise self._unreadable(value) from None
            return self._length(value)
        return size

    def _length(self, value: Any) -> int:
        """The size of nested lists along the dim."""
        inner = value
        for _ in range(self.dim):
            inner = inner[0] if isinstance(inner, list | tuple) and inner else None
        if not isinstance(inner, list | tuple):
            raise self._unreadable(value)
        return len(inner)

    def rows(self, size: int, batch: Any, side: Side) -> int:
        """Live rows on the axis where the source has `size` along the dim; BatchError where that is no size of it."""
        rows, rest = divmod(size - self.base, self.slope)
        if rest or rows < 0:
            raise self._unreadable(self.source.read(batch, side))
        return rows

    def _unreadable(self, value: Any) -> BatchError:
        what = f"it tells how many rows the batch has on {self.axis}"
        if value is None:
            return MissingSourceError(f"slot {self.slot!r}: {self.source} is missing; {what}")
        size = " + ".join([str(self.base)] * bool(self.base) + [f"{self.slope} * {self.axis}"])
        got = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
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
        self._gauges = tuple(_gauges(declaration, axis, relations, fixed) for axis in leads)
        self.required = all(gauges[0].required for gauges in self._gauges)
        self._firsts = tuple(gauges[0] for gauges in self._gauges)
        self._dims = tuple(gauge.dim for gauge in self._firsts)
        self._gather = Gather([gauge.source for gauge in self._firsts])
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._lines = tuple((leads.index(_told(size)), *_line(size, _told(size), fixed)) for size in sizes)

    def explain(self, error: BatchError) -> None:
        """Add to an error which slots told the sizes that the others were held to."""
        told = ", ".join(f"{gauges[0].axis} off slot {gauges[0].slot!r}" for gauges in self._gauges)
        note = f" (sizes were read: {told})"
        error.args = (str(error).removesuffix(note) + note,)

    def __call__(self, batch: Any, side: Side) -> tuple[int, ...]:
        """Live rows on each varying axis, and last those of the lead axis where one was named."""
        if not self.required:
            return self._spread([_first(gauges, batch, side) for gauges in self._gauges])
        sizes = self.sizes(batch, side)
        live = self._known.get(sizes)
        if live is None:
            rows = [gauge.rows(size, batch, side) for gauge, size in zip(self._firsts, sizes, strict=True)]
            live = keep_newest(self._known, KEPT)[sizes] = self._spread(rows)
        return live

    def sizes(self, batch: Any, side: Side) -> tuple[int, ...]:
        """The sizes of the sources that tell, where all of them are required; MissingSourceError or BatchError."""
        values = self._gather(batch, side)
        try:
            if len(values) == 1:
                return (values[0].shape[self._dims[0]],)
            return tuple([value.shape[dim] for value, dim in zip(values, self._dims, strict=True)])
        except (AttributeError, IndexError, TypeError):
            return tuple([gauge.size(value) for gauge, value in zip(self._firsts, values, strict=True)])

    def _spread(self, rows: list[int]) -> tuple[int, ...]:
        return tuple(base + slope * rows[lead] for lead, base, slope in self._lines)


def _told(size: Dim) -> Axis:
    """The axis that another follows from, or the axis itself."""
    lead = size.reveals()
    if lead is None:
        message = f"an axis follows from one other that varies, to the first power, got {size}"
        raise DeclarationError(message)
    return lead


def _line(size: Dim, axis: Axis, fixed: Sizes) -> tuple[int, int]:
    """Base and slope of a size along one axis."""
    base = size.at({**fixed, axis: 0})
    return base, size.at({**fixed, axis: 1}) - base


def _gauges(declaration: Declaration, axis: Axis, relations: Relations, fixed: Sizes) -> tuple[Gauge, ...]:
    """The source that tells an axis: a required one, the plainest shape, then by name; else all optional ones."""
    found = sorted(_candidates(declaration, axis, relations, fixed), key=lambda row: row[:4])
    if not found:
        message = f"{declaration.name}: no copied slot tells the size of {axis}: declare one with a dim of {axis}"
        raise DeclarationError(message)
    required = [row[-1] for row in found if not row[0]]
    return tuple(required[:1]) or tuple(row[-1] for row in found)


def _first(gauges: tuple[Gauge, ...], batch: Any, side: Side) -> int:
    """The size that the first of several optional sources tells; no rows where the batch has none of them."""
    for gauge in gauges:
        if gauge.source.read(batch, side) is not None:
            return gauge.rows(gauge.read(batch, side), batch, side)
    return 0


def _candidates(
    declaration: Declaration, axis: Axis, relations: Relations, fixed: Sizes
) -> Iterator[tuple[bool, int, str, int, Gauge]]:
    for name, slot in declaration.slots.items():
        source = slot.reads(name)
        for dim, declared in enumerate(slot.shape):
            size = declared.replace(relations)
            if source is None or size.reveals() != axis:
                continue
            base, slope = _line(size, axis, fixed)
            yield slot.optional, base + slope, name, dim, Gauge(axis, name, source, dim, base, slope, not slot.optional)
