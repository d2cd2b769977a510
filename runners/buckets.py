"""Buckets: the padded sizes that graphs are captured for, and which one a batch goes to."""

import bisect
from collections.abc import Iterable
from typing import Any, Final

import attrs

from ..dataflow.errors import ConfigError

_STEPS: Final = ((8, 1), (256, 8), (512, 16))
"""Default ladder: powers of two to 8, then by 8 to 256, by 16 to 512, by 32 beyond: little waste, few graphs."""


def _ascending(sizes: Any) -> tuple[int, ...]:
    """The sizes in order. ConfigError where one is no whole number of at least 1, or given twice."""
    found = list(sizes) if isinstance(sizes, Iterable) else []
    if not found or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in found):
        message = f"buckets are whole numbers of at least 1, at least one of them, got {found or sizes!r}"
        raise ConfigError(message)
    if len(set(found)) < len(found):
        message = f"buckets are given once each, got {found}"
        raise ConfigError(message)
    return tuple(sorted(found))


def _check_waste(_: object, __: object, waste: object) -> None:
    if isinstance(waste, bool) or not isinstance(waste, int | float) or not 0 <= waste <= 1:
        message = f"max_waste is a share of the padded rows between 0 and 1, got {waste!r}"
        raise ConfigError(message)


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
