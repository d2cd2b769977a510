"""Benchmarks: fills by this library and by hand, and ways of one's own, in turn in one run, for pytest-benchmark."""

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, final

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.axes import Sizes
from ...dataflow.capabilities import Lowering
from ...dataflow.errors import ConfigError, RegressionError, WrongBytesError
from ...dataflow.inputs import Inputs
from ...dataflow.sampling import NO_VALUES, Sample, Values, sample_batch
from ...dataflow.slots import Output, Slot, Staged
from ...dataflow.tails import Keep, Once
from ..stage import NO_SIZES
from .by_hand import FillByHand
from .ground import NO_RELATIONS, Ground, Lowered, Relations, differences
from .timing import Run, Spread, measure

SETS: Final = 4
"""Sets of sources that take turns, each with addresses and values of its own: a step that found what the last one left
could spare itself the upload."""
PER_SLOT: Final = "per_slot"
REGROUPED: Final = "regrouped"
PADDED: Final = 256
LIVE: Final = 0.75
"""A bucket's rows, and the part of them that is live, by default."""
ROUNDS: Final = 20
STEPS: Final = 20
ATTEMPTS: Final = 3
"""How often a ratio is measured before it counts as too high: another program may have had the core."""
KEY: Final = "slotgraph"
"""The name of the figures in pytest-benchmark's `extra_info`."""
_UNTIMED: Final[frozenset[Lowering]] = frozenset({"slot_by_slot", "in_graph"})
"""Lowerings that no race of fills shows: the oracle, which is not there for speed, and the fused kernel under another
name: what is spared by launching it in the step's graph, only whole steps show."""

Way = Callable[[Any], Any]
"""Takes a batch, or what stands for one."""


@attrs.frozen
class Figures:
    """What each way took, in microseconds a step, and its ratio to the way that all are held to.

    Ratios are medians over the rounds of one run, so that a slow machine is slow for both.
    """

    microseconds: Mapping[str, Spread]
    ratios: Mapping[str, float]

    @classmethod
    def of(cls, samples: Mapping[str, Sequence[float]], rounds: int, base: str) -> "Figures":
        """Figures of all steps' times, as many a round; ratios are to the way named `base`."""
        medians = {}
        for name, times in samples.items():
            each = len(times) // rounds
            medians[name] = [statistics.median(times[start : start + each]) for start in range(0, each * rounds, each)]
        pairs = {name: zip(found, medians[base], strict=True) for name, found in medians.items() if name != base}
        ratios = {name: statistics.median(one / other for one, other in pair) for name, pair in pairs.items()}
        return cls({name: Spread.of(times) for name, times in samples.items()}, ratios)


def ways_to_fill(
    ground: Ground, live: Sizes, values: Values, absent: Collection[str], lowerings: Sequence[Lowering]
) -> tuple[dict[str, Way], list[Sample]]:
    """Fill and view of one bucket: by hand, by each lowering, by hand in groups; and the batches that take turns.

    Args:
        ground: The declaration, and the bucket's sizes.
        live: The batches' sizes.
        values: What slots hold.
        absent: Optional slots that batches come without.
        lowerings: Those that are timed, the one that counts first. By default all that the backend has.

    Raises:
        WrongBytesError: A way leaves other bytes than the oracle.
    """
    stage, padded, rows, gone = ground.stage, ground.most, ground.live(live), frozenset(absent)
    capabilities = ground.backend.capabilities
    had = capabilities.lowerings
    timed = tuple(lowerings) or tuple(one for one in had if one not in _UNTIMED) or had

    def by_hand(name: str) -> Way:
        fill = FillByHand(ground.declaration, ground.backend, padded, grouped=name == REGROUPED)
        return lambda one: fill(one.batch, rows, one.side)

    def lowered(lowering: Lowering) -> Way:
        made = Lowered(ground, lowering, [padded])
        fill, filling = made.fill, made.filling(padded, gone)
        return lambda one: stage.view(fill(filling, one.batch, one.side, rows, gone), one.batch)

    ways = {PER_SLOT: by_hand(PER_SLOT)}
    ways |= {name: lowered(name) for name in timed}
    ways[REGROUPED] = by_hand(REGROUPED)
    drawn: dict[str, Any] = {"absent": absent, "values": values, "device": ground.backend.device}
    seeded = (torch.Generator().manual_seed(seed) for seed in range(SETS))
    samples = [sample_batch(ground.declaration, capabilities, live, one, **drawn) for one in seeded]
    with torch.no_grad():
        _verify(ways, samples, ground, live)
    return ways, samples


def _verify(ways: Mapping[str, Way], samples: Sequence[Sample], ground: Ground, live: Sizes) -> None:
    """Hold what each way leaves to the oracle, but for tails that no one reads."""
    slots, buffers = ground.declaration.slots, ground.stage.allocate(ground.most)
    for one in samples:
        right = ground.oracle(buffers, one.batch, one.side, live, ground.most)
        wanted = {name: view for name, view in right.items() if not _is_loose(slots[name])}
        for name, way in ways.items():
            view = way(one)
            ground.backend.synchronize()
            got = {slot: None if held is None else getattr(view, slot) for slot, held in wanted.items()}
            for fault in differences(got, wanted, slots, live):
                raise WrongBytesError(f"{ground.declaration.name} filled by {name!r}: {fault}")


def _is_loose(slot: Slot) -> bool:
    """Whether a slot's bytes are not all a fill's: of kept tails, of outputs, of what a producer writes."""
    return isinstance(slot, Output | Staged) or isinstance(slot.rule(), Keep | Once)


@final
@attrs.frozen
class Timer:
    """Times ways to do the same in one test by pytest-benchmark's fixture, which saves their figures."""

    benchmark: Any

    def fill(
        self,
        backend: Backend,
        inputs: type[Inputs],
        padded: Sizes = NO_SIZES,
        live: Sizes = NO_SIZES,
        *,
        values: Values = NO_VALUES,
        settings: object = None,
        relations: Relations = NO_RELATIONS,
        absent: Collection[str] = (),
        lowerings: Sequence[Lowering] = (),
        **options: Any,
    ) -> Figures:
        """Time the fill and view of one bucket by each lowering, against two fills by hand, held to the oracle first.

        Args:
            backend: Where it is filled; the fixture gives it.
            inputs: The declaration.
            padded: The bucket's sizes, by default 256 on each varying axis and 3 on each fixed one.
            live: The batch's sizes, by default three quarters of those.
            values: As `slotgraph.testing.batches` has them.
            settings: What `when=` of slots refers to.
            relations: Axes that follow from others.
            absent: Optional slots that batches come without.
            lowerings: The one that counts first. By default all that the backend has.
            **options: As `ways` has them; the ratio is to the fill slot by slot by hand.

        Returns:
            What each way took.

        Raises:
            WrongBytesError: A way leaves other bytes than the oracle.
            RegressionError: The ratio is too high.
        """
        sizes = {axis: PADDED for axis in inputs.slotgraph.varying if axis not in relations} | dict(padded)
        ground = Ground.of(inputs, backend, sizes, settings, relations)
        full = ground.most
        part = ground.sizes({axis: live.get(axis, max(1, int(full[axis] * LIVE))) for axis in ground.leads})
        if set(live) - set(ground.leads) or any(part[axis] > full[axis] for axis in ground.leads):
            raise ConfigError(
                f"live: sizes of the axes {list(ground.leads)}, at most the padded ones, got {dict(live)}"
            )
        ways, samples = ways_to_fill(ground, part, values, absent, lowerings)
        return self.ways(backend, ways, samples, f"fill of {inputs.__name__}", **options)

    def ways(
        self,
        backend: Backend,
        ways: Mapping[str, Way],
        batches: Sequence[Any],
        title: str,
        *,
        most: float | None = None,
        rounds: int = ROUNDS,
        steps: int = STEPS,
    ) -> Figures:
        """Time ways of one's own to do the same, in turn, such as an engine's fill and this library's.

        If pytest-benchmark is disabled, each way runs once, and no ratio is held to anything.

        Args:
            backend: Where it is done; the fixture gives it.
            ways: Calls that take a batch, by name. All are held to the first, and the second is the one that counts.
            batches: Batches of one size that take turns.
            title: What is done.
            most: The largest ratio that is allowed.
            rounds: Rounds in which the ways take turns.
            steps: Steps of each round.

        Returns:
            What each way took.

        Raises:
            RegressionError: The ratio is over `most` each time that it is measured.
        """
        if len(ways) < 2 or not batches:  # noqa: PLR2004 - a ratio is of two
            raise ConfigError(
                f"ways to time: at least two, the one that others are held to first, and batches; got {list(ways)}"
            )
        base, ours, *_ = ways
        benchmark, title = self.benchmark, f"{backend.name}: {title}"
        limit = math.inf if most is None or benchmark.disabled else most
        if benchmark.disabled:
            rounds, steps = 1, 1
        benchmark.group = benchmark.group or title

        def figured() -> Figures:
            runs = {name: Run(way, batches) for name, way in ways.items()}
            measure(list(runs.values()), backend, rounds, steps)
            return Figures.of({name: run.host for name, run in runs.items()}, rounds, base)

        figures = figured()
        for _ in range(ATTEMPTS - 1):
            if figures.ratios[ours] > limit:
                figures = figured()
        benchmark.extra_info[KEY] = attrs.asdict(figures)
        way, turns = ways[ours], itertools.cycle(batches)
        with torch.no_grad():
            benchmark.pedantic(lambda: way(next(turns)), rounds=rounds, iterations=steps, warmup_rounds=1)
        ratio = figures.ratios[ours]
        if ratio > limit:
            told = f"{ours} takes {ratio:.3f} of the time of {base}, where {limit} is allowed"
            raise RegressionError(f"{title}: {told} (measured {ATTEMPTS} times)")
        return figures
