"""Chooses buckets from the sizes that steps had, so that the least of their work is padding."""

import collections
import itertools
import math
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np

from ...dataflow.axes import Axis
from ...dataflow.errors import ConfigError
from ...dataflow.shown import Shown, Table
from .config import MOST_ROWS, Buckets, checked, refuse
from .selection import BucketKey, padded_order, sizes_of
from .statistics import CaptureReport

MOST_SIZES: Final = 2048
"""The most sizes that are compared. If there are more, neighbouring sizes are merged into the largest of them."""
MOST_PAIRED: Final = 32
"""The most sizes on each of two axes that are compared."""
MOST_GRAPHS: Final = 64
"""The most buckets on two axes, if nothing else limits them."""


@attrs.frozen(repr=False)
class PlannedBuckets(Shown):
    """Buckets for the steps that were counted, as `plan_buckets` chose them.

    Attributes:
        sizes: The buckets, for the option `buckets` of a runner. On two axes, `over` says of which axes they are.
        steps: The steps that each of them would have run.
        waste: The share of padding in the rows of these steps.
        ladder: The buckets that a runner has by default, up to the same size. On two axes, the powers of two.
        ladder_waste: The share of padding in theirs.
    """

    sizes: tuple[BucketKey, ...]
    steps: tuple[int, ...]
    waste: float
    ladder: tuple[BucketKey, ...]
    ladder_waste: float

    def over(self, *axes: Axis) -> list[dict[Axis, int]]:
        """Return the buckets as sizes by axis, for the option `buckets` of a `GraphRunner` with these axes."""
        return [dict(zip(axes, sizes_of(bucket), strict=True)) for bucket in self.sizes]

    def tables(self) -> Iterator[Table]:
        """Yield a row for each bucket, and the comparison with the default ladder."""
        title = f"{len(self.sizes)} buckets, {self.waste:.1%} padding"
        text = f"the default ladder: {len(self.ladder)} buckets, {self.ladder_waste:.1%} padding"
        rows = [{"bucket": size, "steps": steps} for size, steps in zip(self.sizes, self.steps, strict=True)]
        yield Table(title, rows, text)


def plan_buckets(
    rows: Mapping[BucketKey, int],
    graphs: int | None = None,
    *,
    waste: float = 0.0,
    largest: BucketKey | None = None,
    bytes: int | None = None,  # noqa: A002 - the field's word
    seconds: float | None = None,
    report: CaptureReport | None = None,
) -> PlannedBuckets:
    """Choose the buckets that pad these steps least.

    Of all choices of so many buckets it is one with the fewest padded rows, found by dynamic programming. On two axes,
    padding is that of the product of the two sizes, and the choices are those with a ladder of sizes on the second axis
    for each size on the first one: all grids are among them, such as the powers of two on both axes.

    Args:
        rows: How many steps had so many live rows, or two such sizes, such as `runner.stats()["rows"]`.
        graphs: The most buckets. By default as many as `waste` needs, on two axes at most 64.
        waste: A share of padding that is small enough: of the choices that reach it, take the one with the fewest
            buckets.
        largest: What the largest bucket must hold. By default the largest size in `rows`, on each axis.
        bytes: The most memory of all graphs, if each takes as much as those of `report`.
        seconds: The longest that captures may take, if each takes as long as those of `report`.
        report: The report of a runner that has captured such graphs.

    Raises:
        ConfigError: There are no steps, or an argument does not fit.
    """
    checked("graphs", "a whole number, at least 1, or None", 1 if graphs is None else graphs, int, 1)
    checked("waste", "a share between 0 and 1", waste, (int, float), 0, 1)
    counted = _counted(rows, largest)
    graphs = _affordable(graphs, bytes, seconds, report)
    live = sum(math.prod(sizes_of(size)) * count for size, count in counted.items())
    enough = live / (1 - waste) if waste < 1 else np.inf
    if isinstance(next(iter(counted)), tuple):
        ladder: tuple[BucketKey, ...] = tuple(
            itertools.product(*(_powers(max(sizes)) for sizes in zip(*counted, strict=True)))
        )
        chosen = _chosen_pairs(counted, graphs or MOST_GRAPHS, enough)
    else:
        ladder = Buckets.ladder(max(counted)).sizes
        sizes, steps = _thinned(np.array([*counted]), np.array([*counted.values()], dtype=np.float64), MOST_SIZES)
        chosen = ()
        for padded, found in _ladders(sizes, steps, graphs or len(sizes)):
            chosen = tuple(found)
            if padded <= enough:
                break
    (taken, own), (_, default) = (_taken(buckets, counted) for buckets in (chosen, ladder))
    each = tuple(taken[bucket] for bucket in chosen)
    return PlannedBuckets(chosen, each, 1 - live / own, ladder, 1 - live / default)


def _affordable(
    graphs: int | None, nbytes: int | None, seconds: float | None, report: CaptureReport | None
) -> int | None:
    """Return how many graphs memory and time allow, or None if nothing limits them."""
    found = [] if graphs is None else [graphs]
    for name, budget in (("bytes", nbytes), ("seconds", seconds)):
        if budget is None:
            continue
        checked(name, "a number, more than 0", budget, (int, float), sys.float_info.min)
        made = checked("report", f"the report of a runner with graphs, with {name}=", report, CaptureReport)
        took = made.memory.graphs if name == "bytes" else made.seconds
        if took:
            found.append(max(1, int(min(budget * made.graphs / took, MOST_ROWS))))
    return min(found, default=None)


def _taken(buckets: Sequence[BucketKey], counted: Mapping[BucketKey, int]) -> tuple[Mapping[BucketKey, int], int]:
    """Return the steps that each bucket would run, and the padded rows of all steps."""
    steps, padded, order = collections.Counter[BucketKey](), 0, sorted(buckets, key=padded_order)
    for size, count in counted.items():
        bucket = next(one for one in order if all(map(operator.ge, sizes_of(one), sizes_of(size))))
        steps[bucket] += count
        padded += math.prod(sizes_of(bucket)) * count
    return steps, padded


def _counted(rows: Any, largest: Any) -> dict[BucketKey, int]:
    """Return the steps by their live rows in ascending order, checked. Steps without rows count as one row."""
    found = dict[BucketKey, int]()
    for size, count in checked("rows", "a mapping of live rows to numbers of steps", rows, Mapping).items():
        for one in sizes_of(size):
            checked("rows", f"live rows between 0 and {MOST_ROWS}", one, int, 0, MOST_ROWS)
        least = tuple(max(one, 1) for one in size) if isinstance(size, tuple) else max(size, 1)
        found[least] = found.get(least, 0) + checked("rows", "numbers of steps", count, int, 0)
    if not sum(found.values()):
        raise ConfigError("rows has no steps: plan buckets from a runner that has run, runner.stats()['rows']")
    every = [*found, *([] if largest is None else [largest])]
    if {type(one) for one in every} - {int} and {len(sizes_of(one)) for one in every} != {2}:
        refuse("rows", "live rows, or two sizes for each step, and largest= alike", rows)
    if largest is not None:
        for one, sizes in zip(sizes_of(largest), zip(*map(sizes_of, found), strict=True), strict=True):
            most = max(sizes)
            checked("largest", f"at least {most}, the largest size in rows", one, int, most, MOST_ROWS)
        found.setdefault(largest, 0)
    return {size: found[size] for size in sorted(found, key=sizes_of)}


def _chosen_pairs(counted: Mapping[BucketKey, int], graphs: int, enough: float) -> tuple[BucketKey, ...]:
    """Return the fewest buckets on two axes whose padded rows are at most `enough`, or the best ones of so many graphs.

    `best[j]` has, by the number of buckets, the fewest padded rows of the first j sizes of the first axis.
    """
    pairs = np.array([*counted])
    axes = [np.union1d(_thinned(np.unique(one), None, MOST_PAIRED)[0], _powers(int(one.max()))) for one in pairs.T]
    places = tuple(np.searchsorted(axis, one) for axis, one in zip(axes, pairs.T, strict=True))
    steps = np.zeros([len(axis) for axis in axes])
    np.add.at(steps, places, [*counted.values()])
    firsts, seconds = axes
    best: list[dict[int, tuple[float, tuple[BucketKey, ...]]]] = [{0: (0.0, ())}]
    for end, first in enumerate(firsts.tolist(), 1):
        found = dict[int, tuple[float, tuple[BucketKey, ...]]]()
        for start in range(end):
            weights = steps[start:end].sum(0)
            top = len(seconds) if end == len(firsts) else int(np.flatnonzero(weights).max(initial=-1)) + 1
            for padded, ladder in _ladders(seconds[:top], weights[:top], graphs):
                row = tuple((first, second) for second in ladder)
                for count, (before, buckets) in best[start].items():
                    total = before + padded * first
                    if count + len(row) <= graphs and total < found.get(count + len(row), (np.inf,))[0]:
                        found[count + len(row)] = total, (*buckets, *row)
        best.append(found)
    fewest = [(len(buckets), buckets) for padded, buckets in best[-1].values() if padded <= enough]
    return min(fewest)[1] if fewest else min(best[-1].values())[1]


def _powers(largest: int) -> list[int]:
    """Return the powers of two up to a size, and the size."""
    return sorted({largest, *(1 << bit for bit in range(largest.bit_length()))})


def _thinned(sizes: Any, steps: Any, most: int) -> tuple[Any, Any]:
    """Return at most `most` sizes with their steps, if given: the largest of each group of neighbours."""
    starts = np.arange(0, len(sizes), -(-len(sizes) // most))
    ends = np.append(starts[1:], len(sizes)) - 1
    return sizes[ends], None if steps is None else np.add.reduceat(steps, starts)


def _ladders(sizes: Any, steps: Any, graphs: int) -> Iterator[tuple[float, list[int]]]:
    """Yield the fewest padded rows of these steps, and the buckets, for 1 bucket and more, until more do not help.

    `best[j]` is the fewest padded rows of the sizes up to the jth, which is a bucket, with so many buckets.
    """
    if not len(sizes):
        yield 0.0, []
        return
    total = np.concatenate([[0.0], np.cumsum(steps)])
    best = sizes * total[1:]
    before = list[Any]()  # for each number of buckets, the last size below each bucket that has a bucket of its own
    while True:
        chosen = [len(sizes) - 1]
        for last in reversed(before):
            chosen.append(int(last[chosen[-1]]))
        yield float(best[-1]), sizes[chosen[::-1]].tolist()
        # a bucket j over all sizes above i takes sizes[j] rows for each of their steps
        choices = best[:, None] + sizes[None, :] * (total[None, 1:] - total[1:, None])
        choices[np.tril_indices(len(sizes))] = np.inf
        last = choices.argmin(0)
        found = choices[last, np.arange(len(sizes))]
        if found[-1] >= best[-1] or len(chosen) >= graphs:
            return
        before.append(last)
        best = found
