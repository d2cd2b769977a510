"""The batches that checks run a step on: given ones, or drawn ones for every bucket and captured pattern."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import attrs
import torch

from ...dataflow.axes import BATCH, TOKENS, Axis
from ...dataflow.bucket import Absent
from ...dataflow.errors import ConfigError
from ...dataflow.sampling import NO_VALUES, Values, sample_batch
from ...dataflow.sources import NO_SIDE, Side
from ..parts import Parts
from ..runner import Runner

Batches: TypeAlias = Callable[[int, torch.Generator], Any] | Iterable[Any]
"""Batches to check with, or a function that makes one of so many rows. Each may be a pair with side arguments."""
_ALL: Final[Absent] = frozenset()


@attrs.frozen(eq=False)
class CheckedBatch:
    """One batch that checks run a step on, with its side arguments."""

    batch: Any
    side: Side = NO_SIDE


Makers: TypeAlias = Sequence[tuple[Absent, Callable[[], CheckedBatch]]]
"""For each batch the optional slots that it comes without, and a function that makes it anew whenever it is needed.

There may be many batches, and large ones.
"""


def batches_of(
    runner: Runner[Any], batches: Batches | None, *, rounds: int, seed: int, values: Values = NO_VALUES
) -> Makers:
    """The batches that are given, made or drawn.

    Made and drawn ones fill each bucket, leave the longest tail in it and the shortest, and `rounds` others.

    Raises:
        ConfigError: There are none, or the declaration does not tell how to draw them.
    """
    parts = runner.parts
    if batches is not None and not callable(batches):
        given = [_paired(one) for one in batches]
        if not given:
            message = "batches= has none: give some, or a function of rows and a generator, or leave it out"
            raise ConfigError(message)
        return [(parts.stage.absent(one.batch, one.side), functools.partial(lambda one: one, one)) for one in given]

    def made(number: int, bucket: int, rows: int, absent: Absent) -> CheckedBatch:
        generator = torch.Generator().manual_seed(seed + number)
        if callable(batches):
            return _paired(batches(rows, generator))
        lead = BATCH if runner.is_whole else TOKENS
        return _drawn(parts, lead, bucket, rows, absent, values, generator)

    patterns = [_ALL] if callable(batches) else sorted(parts.patterns, key=sorted)
    plans = [(*plan, absent) for plan in _sizes(parts, rounds, seed) for absent in patterns]
    return [(plan[-1], functools.partial(made, at, *plan)) for at, plan in enumerate(plans)]


def by_pattern(makers: Makers) -> Makers:
    """The first batch for each pattern of absent slots."""
    return [*dict(reversed(makers)).items()]


def _paired(made: Any) -> CheckedBatch:
    """A batch, or a pair of a batch and its side arguments."""
    is_pair = isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)  # noqa: PLR2004 - a pair
    return CheckedBatch(*made) if is_pair else CheckedBatch(made)


def _sizes(parts: Parts[Any], rounds: int, seed: int) -> list[tuple[int, int]]:
    """Every bucket, the largest first, with rows that do not fit the one below it."""
    generator, below, sizes = torch.Generator().manual_seed(seed), 0, list[list[tuple[int, int]]]()
    for bucket in sorted(parts.sizes):
        drawn = torch.randint(below + 1, bucket + 1, (rounds,), device="cpu", generator=generator).tolist()
        ends = dict.fromkeys([bucket, below + 1, max(bucket - 1, below + 1)])
        sizes.append([(bucket, rows) for rows in (*ends, *drawn)])
        below = bucket
    return [one for of_bucket in reversed(sizes) for one in of_bucket]


def _drawn(
    parts: Parts[Any], lead: Axis, bucket: int, rows: int, absent: Absent, values: Values, generator: torch.Generator
) -> CheckedBatch:
    """A random batch of so many rows, and of one row or more on every other axis."""
    stage, live = parts.stage, {lead: rows}
    for axis, size in parts.sizes[bucket].items():
        if axis.fixed:
            live[axis] = size
        elif axis != lead and axis not in stage.relations:
            most = min(size, rows) if lead == TOKENS and axis == BATCH else size
            live[axis] = int(torch.randint(1, most + 1, (1,), device="cpu", generator=generator)) if most else 0
    live.update({axis: size.at(live) for axis, size in stage.relations.items()})
    capabilities, device = stage.backend.capabilities, stage.backend.device
    sample = sample_batch(stage.declaration, capabilities, live, generator, absent=absent, values=values, device=device)
    return CheckedBatch(sample.batch, sample.side)
