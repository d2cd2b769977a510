"""Chooses buckets from the sizes that steps had, so that the least of their work is padding."""

import itertools
import math
import operator
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

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
Pair: TypeAlias = tuple[int, ...]
"""Sizes on two axes. With one axis, the first is 1."""


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
    graphs = _affordable(graphs, {"bytes": bytes, "seconds": seconds}, report)
    is_paired = isinstance(next(iter(rows)), tuple)
    tops = [max(sizes) for sizes in zip(*counted, strict=True)]
    if is_paired:
        ladder = [*itertools.product(*map(_powers, tops))]
        chosen = _chosen(counted, graphs or MOST_GRAPHS, MOST_PAIRED, waste)
    else:
        ladder = [(1, size) for size in Buckets.ladder(tops[1]).sizes]
        chosen = _chosen(counted, graphs or MOST_SIZES, MOST_SIZES, waste)
    steps, own = _taken(chosen, counted)
    _, default = _taken(ladder, counted)
    buckets, usual = (tuple(one if is_paired else one[1] for one in found) for found in (chosen, ladder))
    return PlannedBuckets(buckets, tuple(steps[one] for one in chosen), own, usual, default)


def _affordable(graphs: int | None, budgets: Mapping[str, float | None], report: CaptureReport | None) -> int | None:
    """Return how many graphs memory and time allow, or None if nothing limits them."""
    found = [] if graphs is None else [graphs]
    for name, budget in budgets.items():
        if budget is not None:
            checked(name, "a number, more than 0", budget, (int, float), sys.float_info.min, sys.float_info.max)
            made = checked("report", f"the report of a runner with graphs, with {name}=", report, CaptureReport)
            took = made.memory.graphs if name == "bytes" else made.seconds
            found.append(max(1, int(budget * made.graphs / (took or 1))))
    return min(found, default=None)


def _rows(steps: Mapping[Pair, int]) -> int:
    """Return the rows of all steps: on two axes, the products of the sizes."""
    return sum(math.prod(sizes) * count for sizes, count in steps.items())


def _taken(buckets: Iterable[Pair], counted: Mapping[Pair, int]) -> tuple[Counter[Pair], float]:
    """Return the steps that each bucket would run, and the share of padding."""
    steps = Counter[Pair]()
    order = sorted(buckets, key=padded_order)
    for sizes, count in counted.items():
        steps[next(one for one in order if all(map(operator.ge, one, sizes)))] += count
    return steps, 1 - _rows(counted) / _rows(steps)


def _counted(rows: Any, largest: Any) -> Counter[Pair]:
    """Return the steps by two sizes, checked: with one axis, the first is 1. Steps without rows count as one row."""
    found = Counter[Pair]()
    for size, count in checked("rows", "a mapping of live rows to numbers of steps", rows, Mapping).items():
        for one in sizes_of(size):
            checked("rows", f"live rows between 0 and {MOST_ROWS}", one, int, 0, MOST_ROWS)
        least = (1, *(max(one, 1) for one in sizes_of(size)))[-2:]
        found[least] += checked("rows", "numbers of steps", count, int, 0)
    if not found.total():
        raise ConfigError("rows has no steps: plan buckets from a runner that has run, runner.stats()['rows']")
    every = [*rows, *([] if largest is None else [largest])]
    if {type(one) for one in every} - {int} and {len(sizes_of(one)) for one in every} != {2}:
        refuse("rows", "live rows, or two sizes for each step, and largest= alike", rows)
    if largest is not None:
        pair = (1, *sizes_of(largest))[-2:]
        for one, most in zip(pair, map(max, zip(*found, strict=True)), strict=True):
            checked("largest", f"at least {most}, the largest size in rows", one, int, most, MOST_ROWS)
        found[pair] += 0
    return found


def _chosen(counted: Mapping[Pair, int], graphs: int, most: int, waste: float) -> tuple[Pair, ...]:
    """Return the fewest buckets with at most this share of padding, or the best ones of so many graphs.

    `best[j]` has, by the number of buckets, the fewest padded rows of the first j sizes of the first axis. At most so
    many sizes of each axis are compared, and powers of two.
    """
    enough = _rows(counted) / (1 - waste) if waste < 1 else math.inf
    pairs = np.array([*counted])
    # of many sizes, each of these stands for neighbours that it holds
    axes = [np.union1d((known := np.unique(one))[:: -len(known) // most], _powers(int(one.max()))) for one in pairs.T]
    steps = np.zeros([len(axis) for axis in axes])
    np.add.at(steps, tuple(map(np.searchsorted, axes, pairs.T)), [*counted.values()])
    steps[-1, -1] += sys.float_info.min  # the largest sizes need a bucket, even without steps
    firsts, seconds = axes
    best: list[dict[int, tuple[float, tuple[Pair, ...]]]] = [{0: (0.0, ())}]
    for end, first in enumerate(firsts.tolist(), 1):
        found = dict[int, tuple[float, tuple[Pair, ...]]]()
        for start in range(end):
            weights = np.trim_zeros(steps[start:end].sum(0), "b")
            for padded, ladder in _ladders(seconds[: len(weights)], weights, graphs):
                for count, (before, buckets) in best[start].items():
                    total = before + padded * first
                    number = count + len(ladder)
                    if number <= graphs and total < found.get(number, (math.inf,))[0]:
                        found[number] = total, (*buckets, *((first, second) for second in ladder))
                if end - start == len(firsts) and padded * first <= enough:
                    break  # more buckets are not needed
        best.append(found)
    return min(best[-1].values(), key=lambda one: (max(one[0], enough), len(one[1])))[1]


def _powers(largest: int) -> list[int]:
    """Return the powers of two up to a size, and the size."""
    return sorted({largest, *(1 << bit for bit in range(largest.bit_length()))})


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
