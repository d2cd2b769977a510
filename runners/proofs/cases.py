"""Cases: the batches that checks run a step on, for every bucket and captured pattern, drawn when asked for."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, overload

import attrs
import torch

from ...dataflow.axes import BATCH, TOKENS, Axis, Sizes
from ...dataflow.bucket import Absent
from ...dataflow.errors import ConfigError
from ...dataflow.sampling import NO_VALUES, Values, sample_batch
from ...dataflow.sources import NO_SIDE
from ..parts import Parts
from ..runner import Runner
from ..stacked.runner import StackRunner
from .report import Case

Batches: TypeAlias = Callable[[int, torch.Generator], Any] | Iterable[Any]
"""Batches to check with, or what makes one of so many rows; each a batch, or a batch and its side arguments."""
_ALL: Final[Absent] = frozenset()


@attrs.frozen
class Plan:
    """A case to come: its bucket's rows, its own, and what it is to come without."""

    bucket: int
    rows: int
    absent: Absent = _ALL


class Cases(Sequence[Case]):
    """Cases of one runner, made anew, and the same, whenever they are looked at: they may be many, and large.

    plans: what to draw, by index; empty where the caller gave batches. pattern_samples: one index for each pattern.
    """

    def __init__(self, make: Callable[[int], Case], plans: Sequence[Plan]) -> None:
        self._make = make
        self.plans = plans

    def __len__(self) -> int:
        """How many there are."""
        return len(self.plans)

    @overload
    def __getitem__(self, index: int) -> Case: ...
    @overload
    def __getitem__(self, index: slice) -> list[Case]: ...
    def __getitem__(self, index: int | slice) -> Case | list[Case]:
        """One of them, or several."""
        if isinstance(index, slice):
            return [self._make(one) for one in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            message = f"there are {len(self)} cases, and no number {index}"
            raise IndexError(message)
        return self._make(index % len(self))

    @property
    def pattern_samples(self) -> list[Case]:
        """One case for each pattern of absent slots."""
        first = {plan.absent: index for index, plan in reversed(list(enumerate(self.plans)))}
        return [self[index] for index in sorted(first.values())]


def cases_of(
    runner: Runner[Any], batches: Batches | None, *, rounds: int, seed: int, values: Values = NO_VALUES
) -> Cases:
    """What to check a runner with: the batches that are given, or made, or else drawn.

    Made and drawn ones fill each bucket, leave the longest tail in it and the shortest, and `rounds` others.
    ConfigError where there are none, or where a declaration does not tell how to draw them.
    """
    parts = runner.parts
    if batches is not None and not callable(batches):
        return _given(parts, list(batches))
    plans = list(_plans(parts, rounds, torch.Generator().manual_seed(seed)))
    if batches is None:
        lead = TOKENS if isinstance(runner, StackRunner) else BATCH
        return Cases(lambda index: _drawn(parts, lead, plans[index], seed + index, values), plans)
    plans = [plan for plan in plans if not plan.absent]

    def make(index: int) -> Case:
        return _case(parts, batches(plans[index].rows, torch.Generator().manual_seed(seed + index)))

    return Cases(make, plans)


def _given(parts: Parts[Any], batches: list[Any]) -> Cases:
    if not batches:
        message = "batches= has none: give some, or a function of rows and a generator, or leave it out"
        raise ConfigError(message)
    cases = [_case(parts, batch) for batch in batches]
    plans = [Plan(0, case.rows, parts.stage.absent(case.batch, case.side)) for case in cases]
    return Cases(cases.__getitem__, plans)


def _case(parts: Parts[Any], made: Any) -> Case:
    """A batch, or a batch and its side arguments, as a case."""
    paired = isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)  # noqa: PLR2004 - a pair
    batch, side = made if paired else (made, NO_SIDE)
    return Case(batch, side, parts.size(batch, side)[-1])


def _plans(parts: Parts[Any], rounds: int, generator: torch.Generator) -> Iterator[Plan]:
    """Rows for every bucket that do not fit the one before it, for every pattern; the largest first."""
    below = 0
    plans: list[Plan] = []
    for bucket in sorted(parts.sizes):
        drawn = torch.randint(below + 1, bucket + 1, (rounds,), device="cpu", generator=generator).tolist()
        for rows in [*dict.fromkeys([bucket, below + 1, max(bucket - 1, below + 1)]), *drawn]:
            plans += [Plan(bucket, rows, absent) for absent in sorted(parts.patterns, key=sorted)]
        below = bucket
    yield from sorted(plans, key=lambda plan: -plan.bucket)


def _drawn(parts: Parts[Any], lead: Axis, plan: Plan, seed: int, values: Values) -> Case:
    """A random batch of a plan's rows, and of one row or more on every other axis."""
    stage, generator = parts.stage, torch.Generator().manual_seed(seed)
    live: dict[Axis, int] = {lead: plan.rows}
    padded: Sizes = parts.sizes[plan.bucket]
    for axis, size in padded.items():
        if axis.fixed:
            live[axis] = size
        elif axis != lead and axis not in stage.relations:
            most = min(size, plan.rows) if lead == TOKENS and axis == BATCH else size
            live[axis] = int(torch.randint(1, most + 1, (1,), device="cpu", generator=generator)) if most else 0
    live.update({axis: size.at(live) for axis, size in stage.relations.items()})
    capabilities, device = stage.backend.capabilities, stage.backend.device
    sample = sample_batch(
        stage.declaration, capabilities, live, generator, absent=plan.absent, values=values, device=device
    )
    return Case(sample.batch, sample.side, plan.rows)
