"""Chooses buckets from the sizes that steps had, so that the least of their work is padding."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import numpy as np

from ...dataflow.errors import ConfigError
from ...dataflow.shown import Shown, Table
from .config import MOST_ROWS, Buckets, checked

MOST_SIZES: Final = 2048
"""The most sizes that are compared. If there are more, neighbouring sizes are merged into the largest of them."""


@attrs.frozen(repr=False)
class PlannedBuckets(Shown):
    """Buckets for the steps that were counted, as `plan_buckets` chose them.

    Attributes:
        sizes: The buckets, for the option `buckets` of a runner.
        steps: The steps that each of them would have run.
        waste: The share of padding in the rows of these steps.
        ladder: The buckets that a runner has by default, up to the same size.
        ladder_waste: The share of padding in theirs.
    """

    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    waste: float
    ladder: tuple[int, ...]
    ladder_waste: float

    def tables(self) -> Iterator[Table]:
        """Yield a row for each bucket, and the comparison with the default ladder."""
        title = f"{len(self.sizes)} buckets, {self.waste:.1%} padding"
        text = f"the default ladder: {len(self.ladder)} buckets, {self.ladder_waste:.1%} padding"
        rows = [{"bucket": size, "steps": steps} for size, steps in zip(self.sizes, self.steps, strict=True)]
        yield Table(title, rows, text)


def plan_buckets(
    rows: Mapping[int, int], graphs: int | None = None, *, waste: float = 0.0, largest: int | None = None
) -> PlannedBuckets:
    """Choose the buckets that pad these steps least.

    Of all choices of so many buckets it is one with the fewest padded rows, found by dynamic programming.

    Args:
        rows: How many steps had so many live rows, such as `runner.stats()["rows"]`.
        graphs: The most buckets. By default as many as `waste` needs.
        waste: A share of padding that is small enough: of the choices that reach it, take the one with the fewest
            buckets.
        largest: What the largest bucket must hold. By default the largest size in `rows`.

    Raises:
        ConfigError: There are no steps, or an argument does not fit.
    """
    checked("graphs", "a whole number, at least 1, or None", 1 if graphs is None else graphs, int, 1)
    checked("waste", "a share between 0 and 1", waste, (int, float), 0, 1)
    counted = _counted(rows, largest)
    sizes, steps = _thinned(np.array([*counted]), np.array([*counted.values()], dtype=np.float64))
    live = sum(size * count for size, count in counted.items())
    chosen = _chosen(sizes, steps, min(graphs or len(sizes), len(sizes)), live / (1 - waste) if waste < 1 else np.inf)
    ladder = Buckets.ladder(max(counted)).sizes
    own, default = (_padded(buckets, counted) for buckets in (chosen, ladder))
    per_bucket = [0] * len(chosen)
    for size, count in counted.items():
        per_bucket[int(np.searchsorted(chosen, size))] += count
    return PlannedBuckets(chosen, tuple(per_bucket), 1 - live / own, ladder, 1 - live / default)


def _counted(rows: Any, largest: int | None) -> dict[int, int]:
    """Return the steps by their live rows in ascending order, checked. Steps without rows count as one row."""
    found = dict[int, int]()
    for size, count in checked("rows", "a mapping of live rows to numbers of steps", rows, Mapping).items():
        checked("rows", f"live rows between 0 and {MOST_ROWS}", size, int, 0, MOST_ROWS)
        found[max(size, 1)] = found.get(max(size, 1), 0) + checked("rows", "numbers of steps", count, int, 0)
    if not sum(found.values()):
        raise ConfigError("rows has no steps: plan buckets from a runner that has run, runner.stats()['rows']")
    if largest is not None:
        checked("largest", f"at least {max(found)}, the largest size in rows", largest, int, max(found), MOST_ROWS)
        found.setdefault(largest, 0)
    return dict(sorted(found.items()))


def _thinned(sizes: Any, steps: Any) -> tuple[Any, Any]:
    """Return at most `MOST_SIZES` sizes with their steps: the largest of each group of neighbours."""
    starts = np.arange(0, len(sizes), -(-len(sizes) // MOST_SIZES))
    ends = np.append(starts[1:], len(sizes)) - 1
    return sizes[ends], np.add.reduceat(steps, starts)


def _chosen(sizes: Any, steps: Any, graphs: int, enough: float) -> tuple[int, ...]:
    """Return the fewest buckets whose padded rows are at most `enough`, or the best ones of so many graphs.

    `best[j]` is the fewest padded rows of the sizes up to the jth, which is a bucket, with so many buckets.
    """
    total = np.concatenate([[0.0], np.cumsum(steps)])
    best = sizes * total[1:]
    before = list[Any]()  # for each number of buckets, the last size below each bucket that has a bucket of its own
    while best[-1] > enough and len(before) + 1 < graphs:
        # a bucket j over all sizes above i takes sizes[j] rows for each of their steps
        choices = best[:, None] + sizes[None, :] * (total[None, 1:] - total[1:, None])
        choices[np.tril_indices(len(sizes))] = np.inf
        last = choices.argmin(0)
        found = choices[last, np.arange(len(sizes))]
        if found[-1] >= best[-1]:
            break
        before.append(last)
        best = found
    place = len(sizes) - 1
    chosen = [place]
    for last in reversed(before):
        place = int(last[place])
        chosen.append(place)
    return tuple(int(sizes[one]) for one in reversed(chosen))


def _padded(buckets: tuple[int, ...], counted: Mapping[int, int]) -> int:
    """Return the padded rows of all steps in these buckets."""
    return sum(buckets[int(np.searchsorted(buckets, size))] * count for size, count in counted.items())
