"""Buckets: the padded sizes that graphs are captured for, and which one a batch goes to."""

import bisect
import reprlib
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import attrs

from ..dataflow.axes import BATCH, Axis, Sizes
from ..dataflow.bucket import Absent
from ..dataflow.computation import field_of
from ..dataflow.declaration import Declaration
from ..dataflow.errors import ConfigError, ReplayError
from ..dataflow.sources import look_up
from .capture import CaptureReport
from .decision import Decision, Path, Why

_STEPS: Final = ((8, 1), (256, 8), (512, 16))
"""Default ladder: powers of two to 8, then by 8 to 256, by 16 to 512, by 32 beyond: little waste, few graphs."""


def _ascending(sizes: Any) -> tuple[int, ...]:
    """The sizes in order. ConfigError where one is no whole number of at least 1, or given twice."""
    found = list(sizes) if isinstance(sizes, Iterable) else []
    if not found or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in found):
        raise ConfigError(f"buckets are whole numbers of at least 1, at least one of them, got {found or sizes!r}")
    if len(set(found)) < len(found):
        raise ConfigError(f"buckets are given once each, got {found}")
    return tuple(sorted(found))


def _check_waste(_: object, __: object, waste: object) -> None:
    if isinstance(waste, bool) or not isinstance(waste, int | float) or not 0 <= waste <= 1:
        raise ConfigError(f"max_waste is a share of the padded rows between 0 and 1, got {waste!r}")


@attrs.frozen
class Buckets:
    """Padded row counts in ascending order, and the largest share of padding that is worth a replay.

    max_waste: a batch of which more than this share of the padded rows would be padding is refused.
    """

    sizes: tuple[int, ...] = attrs.field(converter=_ascending)
    max_waste: float = attrs.field(default=1.0, validator=_check_waste)

    @classmethod
    def ladder(cls, largest: int, max_waste: float = 1.0) -> "Buckets":
        """A default ladder up to `largest` rows."""
        sizes = {1 << power for power in range(largest.bit_length()) if 1 << power <= min(largest, 8)} | {largest}
        start = 8
        for stop, step in (*_STEPS[1:], (largest, 32)):
            sizes |= set(range(start, min(stop, largest) + 1, step))
            start = max(start, stop)
        return cls(sizes, max_waste)

    @classmethod
    def doubling(cls, largest: int, max_waste: float = 1.0) -> "Buckets":
        """Buckets for tokens: 16, 32, then two for each power of two (48 and 64, 96 and 128, ...) up to `largest`.

        At most a third of a batch of more than 16 tokens is padding; a graph of many tokens is dear to keep.
        """
        powers = [1 << power for power in range(4, max(largest - 1, 1).bit_length() + 1)]
        sizes = {size for power in powers for size in (power, power * 3 // 2 if power > 16 else power)}  # noqa: PLR2004
        return cls({size for size in sizes if size < largest} | {largest}, max_waste)

    @property
    def largest(self) -> int:
        """The largest bucket."""
        return self.sizes[-1]

    def fit(self, rows: int) -> int | None:
        """The smallest bucket that holds `rows`, or None where none does; no rows go to the smallest."""
        index = bisect.bisect_left(self.sizes, rows)
        return self.sizes[index] if index < len(self.sizes) else None

    def waste(self, rows: int, bucket: int) -> float:
        """The share of a bucket's rows that would be padding; none for the batch of an idle rank, which has no rows."""
        return (bucket - rows) / bucket if rows else 0.0

    def table(self) -> list[int | None]:
        """The bucket for each row count up to the largest, None where padding would exceed the limit."""
        fits = [(rows, self.fit(rows) or self.largest) for rows in range(self.largest + 1)]
        return [bucket if self.waste(rows, bucket) <= self.max_waste else None for rows, bucket in fits]


class Router:
    """Decides for one runner which bucket a batch goes to, or why it runs eagerly, by a table over row counts.

    has: whether there is a graph of a bucket and a pattern. report: what captures came to. enabled: whether anything is
    captured at all; without, every decision is eager. leading: axes that the bucket decides. path: what a batch takes
    that fits one.
    """

    def __init__(
        self,
        declaration: Declaration,
        buckets: Buckets,
        capacity: Sizes,
        has: Callable[[int | None, Absent], bool],
        report: Callable[[], CaptureReport | None],
        *,
        enabled: bool,
        leading: Collection[Axis],
        path: Path,
    ) -> None:
        self._enabled, self._buckets, self._has, self._report = enabled, buckets, has, report
        self._table = buckets.table()
        self._fits = {rows: Decision(path, rows, "fits", f"bucket {rows} fits") for rows in buckets.sizes}
        self._counted = "rows" if BATCH in leading else "tokens"
        own = [(i, axis) for i, axis in enumerate(declaration.varying) if axis not in leading]
        self._limits = [(i, axis, capacity[axis]) for i, axis in own]
        self._fixed_fields = {
            name: field_of(None, name, default)
            for name, default in declaration.fields.items()
            if default is not attrs.NOTHING
        }

    def decide(self, live: tuple[int, ...], absent: Absent, batch: Any) -> Decision:
        """The path of a batch with these live sizes, the leading axis last. ReplayError before anything is captured."""
        rows = live[-1]
        bucket = self._table[rows] if rows < len(self._table) else None
        if bucket is not None and self._has(bucket, absent):
            for index, _, most in self._limits:
                if live[index] > most:
                    return self._refusal(live, absent, batch)
            if self._fixed_fields and self._differing(batch):
                return self._refusal(live, absent, batch)
            return self._fits[bucket]
        return self._refusal(live, absent, batch)

    def _refusal(self, live: tuple[int, ...], absent: Absent, batch: Any) -> Decision:
        """Why no graph takes the batch."""
        report = self._report()
        if report is None:
            raise ReplayError("nothing is captured yet: call capture() first")
        if not self._enabled:
            return _eager("disabled", "graphs are switched off, by graphs=False")
        rows = live[-1]
        bucket = self._buckets.fit(rows)
        if bucket is None or any(live[index] > most for index, _, most in self._limits):
            return _eager("too_large", self._too_large(live))
        if self._table[rows] is None:
            share, most_waste = self._buckets.waste(rows, bucket), self._buckets.max_waste
            return _eager("waste", f"bucket {bucket} would be {share:.0%} padding, over the limit of {most_waste:.0%}")
        if bucket in report.failed:
            return _eager("not_captured", report.failed[bucket])
        if not self._has(bucket, absent):
            names = ", ".join(map(repr, sorted(absent)))
            return _eager("absent", f"no graph was captured without {names}; pass absent=[{{{names}}}] to capture one")
        name = self._differing(batch)
        came, seen = _brief(look_up(batch, name)), self._fixed_fields[name]
        return _eager("field_differs", f"field {name!r} is {came}, not {seen!r}, with which graphs were captured")

    def _too_large(self, live: tuple[int, ...]) -> str:
        for index, axis, most in self._limits:
            if live[index] > most:
                return f"{live[index]} rows on {axis} are more than the {most} of every bucket"
        return f"{live[-1]} {self._counted} are more than the largest bucket, {self._buckets.largest}"

    @property
    def decides_by_fields(self) -> bool:
        """Whether some fields must have the values that graphs saw."""
        return bool(self._fixed_fields)

    def same_fields(self, batch: Any) -> bool:
        """Whether all of them do."""
        return not self._differing(batch)

    def _differing(self, batch: Any) -> str:
        """The first field whose value in the batch is not the one that graphs saw, or nothing."""
        for name, captured in self._fixed_fields.items():
            value = look_up(batch, name)
            if value is not None and not _same(value, captured):
                return name
        return ""


def _same(value: Any, captured: Any) -> bool:
    """Whether two field values are one; a tensor or an array, of which `==` makes another, is never the same."""
    return value is captured or (not hasattr(value, "shape") and bool(value == captured))


def _brief(value: Any) -> str:
    """A field's value in a sentence; of a tensor or an array its kind alone, which asks no device."""
    return type(value).__name__ if hasattr(value, "shape") else reprlib.repr(value)


def _eager(why: Why, reason: str) -> Decision:
    return Decision("eager", None, why, reason)
