"""Sizing: how many rows a batch brings on each axis, read off the sources that tell."""

import collections
import contextlib
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from .admission import NOT_TOLD, unreadable
from .axes import Axis, Dim, Sizes
from .declaration import Declaration
from .errors import BatchError, DeclarationError, MissingSourceError
from .sources import Gather, Side, Source

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

    def read(self, batch: Any, side: Side) -> int:
        """The size along the dim; MissingSourceError or BatchError where the source does not tell."""
        return self.size(self.source.read(batch, side))

    def size(self, value: Any) -> int:
        """The size of a source along the dim; MissingSourceError or BatchError where it does not tell."""
        try:
            size: int = value.shape[self.dim]
        except (*NOT_TOLD, IndexError):
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
        try:
            rows, rest = divmod(operator.index(size) - self.base, self.slope)
        except NOT_TOLD:
            raise self._unreadable(self.source.read(batch, side)) from None
        if rest or rows < 0:
            raise self._unreadable(self.source.read(batch, side))
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

    relations: axes that follow from others, such as `{TOKENS: BATCH * 4}`. fixed: sizes of the fixed axes.
    lead: the axis whose rows are wanted beside the sizes, whether or not a slot has it.
    Raises DeclarationError where no copied slot tells the size of an axis.
    """

    def __init__(self, declaration: Declaration, relations: Relations, fixed: Sizes, lead: Axis | None = None) -> None:
        wanted = [*declaration.varying] if lead is None else [*declaration.varying, lead]
        sizes = [relations.get(axis, Dim.of(axis)) for axis in wanted]
        leads = sorted({_told(size) for size in sizes})
        self._tellers = tuple(_tellers(declaration, axis, relations, fixed) for axis in leads)
        self.gauges = tuple(_chosen(tellers) for tellers in self._tellers)
        self._check_side = declaration.check_side
        self.required = all(gauges[0].required for gauges in self.gauges)
        self._firsts = tuple(gauges[0] for gauges in self.gauges)
        self._gather = Gather([gauge.source for gauge in self._firsts])
        self._lines = tuple((leads.index(_told(size)), *_line(size, _told(size), fixed)) for size in sizes)

    def explain(self, error: BatchError, batch: Any, side: Side) -> None:
        """Say in an error which slots told the sizes that the others were held to.

        Where most slots agree on another size, the error names the slots that do not, in place of what it said.
        """
        votes = [_votes(tellers, batch, side) for tellers in self._tellers]
        if not isinstance(error, MissingSourceError):
            faults = [
                fault for gauges, rows in zip(self.gauges, votes, strict=True) for fault in _outvoted(gauges, rows)
            ]
            if faults:
                error.args = ("; ".join(faults),)
                return
        told = ", ".join(_told_by(gauges[0], rows) for gauges, rows in zip(self.gauges, votes, strict=True))
        note = f" (sizes were read: {told})"
        error.args = (str(error).removesuffix(note) + note,)

    def __call__(self, batch: Any, side: Side) -> tuple[int, ...]:
        """Live rows on each varying axis, and last those of the lead axis where one was named.

        Raises BatchError for a side argument that no slot reads, and where a source does not tell.
        """
        if side:
            self._check_side(side)
        if not self.required:
            return self._spread([_first(gauges, batch, side) for gauges in self.gauges])
        sources = self._gather(batch, side)
        sizes = [gauge.size(source) for gauge, source in zip(self._firsts, sources, strict=True)]
        return self._spread([gauge.rows(size, batch, side) for gauge, size in zip(self._firsts, sizes, strict=True)])

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


def _tellers(declaration: Declaration, axis: Axis, relations: Relations, fixed: Sizes) -> tuple[Gauge, ...]:
    """The sources that tell an axis: required ones first, then the plainest shape, then by name."""
    found = sorted(_candidates(declaration, axis, relations, fixed), key=lambda row: row[:4])
    if not found:
        message = f"{declaration.name}: no copied slot tells the size of {axis}: declare one with a dim of {axis}"
        raise DeclarationError(message)
    return tuple(row[-1] for row in found)


def _chosen(tellers: tuple[Gauge, ...]) -> tuple[Gauge, ...]:
    """The source that is believed: the first, if it is required; else all of them, of which the first present is."""
    return tellers[:1] if tellers[0].required else tellers


def _votes(tellers: tuple[Gauge, ...], batch: Any, side: Side) -> dict[Gauge, int]:
    """The rows that a batch's sources tell on an axis, by where they were read; each source counts once."""
    votes: dict[Source, tuple[Gauge, int]] = {}
    for gauge in tellers:
        with contextlib.suppress(BatchError):  # absent, or not of a size that tells
            votes.setdefault(gauge.source, (gauge, gauge.rows(gauge.read(batch, side), batch, side)))
    return dict(votes.values())


def _outvoted(gauges: tuple[Gauge, ...], votes: Mapping[Gauge, int]) -> Iterator[str]:
    """What is wrong with the slots that tell other rows than most do, where the believed slot is one of them."""
    believed = next((votes[gauge] for gauge in gauges if gauge in votes), None)
    ranked = collections.Counter(votes.values()).most_common(2)
    if len(ranked) < 2 or ranked[0][1] == ranked[1][1] or ranked[0][0] == believed:  # noqa: PLR2004 - two sizes
        return
    most = ranked[0][0]
    right = ", ".join(repr(gauge.slot) for gauge, rows in votes.items() if rows == most)
    for gauge, rows in votes.items():
        if rows != most:
            expected, got = (gauge.base + gauge.slope * count for count in (most, rows))
            yield (
                f"slot {gauge.slot!r}: expected a size of {expected} on dim {gauge.dim}, for {most} rows on "
                f"{gauge.axis} as {right} have, got {got}"
            )


def _told_by(gauge: Gauge, votes: Mapping[Gauge, int]) -> str:
    """Which slot told an axis; where slots disagree and no size has a majority, what each of them tells."""
    ranked = collections.Counter(votes.values()).most_common(2)
    if len(ranked) > 1 and ranked[0][1] == ranked[1][1]:
        each = ", ".join(f"{rows} off slot {one.slot!r}" for one, rows in votes.items())
        return f"{gauge.axis} is {each}: one of them is wrong"
    return f"{gauge.axis} off slot {gauge.slot!r}"


def _first(gauges: tuple[Gauge, ...], batch: Any, side: Side) -> int:
    """The rows that the first of several optional sources tells; no rows where the batch has none of them."""
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
