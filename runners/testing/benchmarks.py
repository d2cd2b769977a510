"""Fills by this library and by hand: compares them with the oracle, and times them for pytest-benchmark."""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, final

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.axes import Live, Sizes
from ...dataflow.buffers import Buffers
from ...dataflow.capabilities import LoweringName
from ...dataflow.declaration import Declaration
from ...dataflow.errors import ConfigError, RegressionError, WrongBytesError
from ...dataflow.inputs import Inputs
from ...dataflow.sizing import Relations
from ...dataflow.slots import BY_PRODUCER, BY_STEP
from ...dataflow.sources import NO_SIDE
from ...dataflow.tails import Keep, Once
from ..engine.bits import first_unequal
from ..engine.sampling import NO_VALUES, Sample, Values
from ..engine.stage import NO_SIZES
from ..input_buffers import BucketBuffers
from .by_hand import PER_SLOT, REGROUPED, fill_by_hand
from .ground import NO_RELATIONS, Ground, fill_faults, lowered
from .timing import Figures, Run, measure

SETS: Final = 4
"""Sets of sources that take turns, each with its own addresses and values.

With a single set, a step could find what the last one left, and skip the upload.
"""
ORACLE: Final[LoweringName] = "slot_by_slot"
PADDED: Final = 256  # by default, the rows of a bucket
ATTEMPTS: Final = 3  # measurements before a ratio counts as too high, since another program may have used the core
KEY: Final = "slotgraph"  # the name of the figures in pytest-benchmark's `extra_info`
_UNTIMED: Final = frozenset({ORACLE, "in_graph"})
"""Lowerings that are not timed in fills.

The oracle is not meant to be fast. The other is the fused kernel, launched in the step's graph: only whole steps show
what that saves.
"""

TakesBatch = Callable[[Any], Any]
"""Takes a batch, or a stand-in for one."""


@attrs.frozen(eq=False)
class Contestant:
    """One way to fill, or to run a whole step.

    Attributes:
        call: Takes a batch.
        buffers: The memory of the slots that it fills.
    """

    call: TakesBatch
    buffers: Buffers


@attrs.frozen(eq=False)
class Drawn(Sample):
    """A batch for the ways that are compared, with its sizes.

    Attributes:
        sizes: Its live rows on each axis.
        rows: The same on each varying axis, as a fill takes them.
        given: Sizes of axes that none of its sources determines.
    """

    sizes: Sizes
    rows: Live
    given: Sizes = NO_SIZES


def draw(ground: Ground, live: Sizes, seed: int, values: Values = NO_VALUES, absent: Collection[str] = ()) -> Drawn:
    """Draw a batch of some sizes, see `Ground.part`."""
    slots = ground.declaration
    sizes = ground.part(live)
    sample = ground.sample(sizes, seed, absent, values)
    read = [slots.slots[name].axes for name in slots.sources if name not in absent]
    given = {axis: sizes[axis] for axis in set(slots.varying).difference(*read)} or NO_SIZES
    return Drawn(sample.batch, sample.side, sizes, ground.live(sizes), given)


def verify(
    title: str,
    declaration: Declaration,
    backend: Backend,
    oracle: Contestant,
    others: Mapping[str, Contestant],
    batches: Iterable[tuple[Sizes, Any]],
    *,
    outputs: bool = True,
) -> None:
    """Raise WrongBytesError if a contestant leaves other values in slots than the oracle, or returns another tensor.

    Tails that nothing reads, and absent slots, may have any values.

    Args:
        title: The name of the benchmark.
        declaration: The slots.
        backend: The device.
        oracle: The contestant to compare with.
        others: The other contestants, by name.
        batches: Batches, each with its sizes.
        outputs: Whether to compare outputs, too. Leave it off for a step with random outputs.
    """
    __tracebackhide__ = True
    slots = declaration.slots
    compared = [
        name
        for name, slot in slots.items()
        if not (slot.writers in {BY_STEP, BY_PRODUCER} or isinstance(slot.rule(), Keep | Once))
    ]

    def run(contestant: Contestant, batch: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        with torch.no_grad():
            returned = contestant.call(batch)
        backend.synchronize()
        own = returned.clone() if isinstance(returned, torch.Tensor) and outputs else None
        return own, {name: contestant.buffers[name].tensor.clone() for name in compared if name not in absent}

    for live, batch in batches:
        given = (batch.batch, batch.side) if isinstance(batch, Sample) else (batch, NO_SIDE)
        absent = {name for name, source in declaration.optional if source.read(*given) is None}
        right, wanted = run(oracle, batch)
        for name, contestant in others.items():
            returned, held = run(contestant, batch)
            faults = list(fill_faults(held, wanted, slots, live))
            if returned is not None and right is not None:
                is_alike = returned.shape == right.shape and first_unequal(returned, right) is None
                faults += [] if is_alike else ["it returned other outputs"]
            if faults:
                raise WrongBytesError(f"{title} by {name!r}: {faults[0]}")


def ways_to_fill(
    ground: Ground, lowerings: Sequence[LoweringName] = (), hands: Sequence[str] = (PER_SLOT, REGROUPED)
) -> tuple[Contestant, dict[str, Contestant]]:
    """Return the oracle, and fills of one bucket: slot by slot by hand, by each lowering, and others by hand."""
    padded = ground.most
    had = ground.backend.capabilities.lowerings
    right = ground.stage.allocate(padded)

    def by_hand(way: str) -> Contestant:
        buffers = ground.stage.allocate(padded)
        fill = fill_by_hand(ground.declaration, ground.backend, padded, buffers, way)
        return Contestant(lambda one: fill(one.batch, one.rows, one.side), buffers)

    def by(lowering: LoweringName) -> Contestant:
        layer = lowered(ground, lowering)
        fill = BucketBuffers(layer, ground.live(padded)).fill
        return Contestant(lambda one: fill(one.batch, live=one.given, **one.side), layer.buffers)

    ways = {hands[0]: by_hand(hands[0])}
    ways |= {name: by(name) for name in lowerings or [one for one in had if one not in _UNTIMED] or had}
    ways |= {way: by_hand(way) for way in hands[1:]}
    return Contestant(lambda one: ground.oracle(right, one.batch, one.side, one.sizes, padded), right), ways


@final
@attrs.frozen
class Timer:
    """Times several implementations of the same work in one test. Each gets a row in pytest-benchmark's table.

    Attributes:
        benchmark: pytest-benchmark's fixture.
    """

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
        lowerings: Sequence[LoweringName] = (),
        **options: Any,
    ) -> Figures:
        """Time the fill of one bucket by each lowering and by two handwritten fills. All are first compared.

        Args:
            backend: The backend that fills. The fixture gives it.
            inputs: The declaration.
            padded: The bucket's sizes, by default 256 on each varying axis and 3 on each fixed one.
            live: The batch's sizes, by default three quarters of those.
            values: As for `slotgraph.testing.batches`.
            settings: What `when=` of slots refers to.
            relations: Axes that follow from others.
            absent: Optional slots that batches lack.
            lowerings: The lowering that is measured, and then others. By default all that the backend has.
            **options: As for `ways`. The ratio is to the fill slot by slot by hand.

        Returns:
            The times of each way.

        Raises:
            WrongBytesError: A way leaves other bytes than the oracle.
            RegressionError: The ratio is too high.
        """
        __tracebackhide__ = True
        sizes = {axis: PADDED for axis in inputs.slotgraph.varying if axis not in relations} | dict(padded)
        ground = Ground.of(inputs, backend, sizes, settings, relations)
        batches = [draw(ground, live, seed, values, absent) for seed in range(SETS)]
        oracle, ways = ways_to_fill(ground, lowerings)
        sized = [(one.sizes, one) for one in batches]
        verify(f"{ground.declaration.name} filled", ground.declaration, backend, oracle, ways, sized)
        calls = {name: way.call for name, way in ways.items()}
        return self.ways(backend, calls, batches, f"fill of {inputs.__name__}", **options)

    def ways(
        self,
        backend: Backend,
        ways: Mapping[str, TakesBatch],
        batches: Sequence[Any],
        title: str,
        *,
        most: float | None = None,
        rounds: int = 20,
        steps: int = 20,
    ) -> Figures:
        """Time several implementations of the same work, alternating, such as an engine's fill and this library's.

        If pytest-benchmark is disabled, each way runs once, and no ratio is checked.

        Args:
            backend: The backend that they run on. The fixture gives it.
            ways: Calls that take a batch, by name. The first is the base of ratios, the second is what you measure.
            batches: Batches of one size, used one after another.
            title: The name of the benchmark.
            most: The largest ratio that is allowed.
            rounds: The number of rounds, in each of which every way runs.
            steps: The number of steps of each way in a round.

        Returns:
            The times of each way.

        Raises:
            RegressionError: The ratio is over `most` each time that it is measured.
        """
        __tracebackhide__ = True
        if len(ways) < 2 or not batches:  # noqa: PLR2004 - a ratio needs two
            raise ConfigError(f"ways: expected at least two, the right one first, and batches, got {list(ways)}")
        base, ours, *_ = ways
        benchmark = self.benchmark
        title = f"{backend.name}: {title}"
        benchmark.group = benchmark.group or f"{title} ({benchmark.name})"  # several tests may have one title
        if benchmark.disabled:
            rounds = 1
            steps = 1
            most = None
        times = dict[str, Sequence[float]]()
        figures = Figures({}, {})
        for _ in range(ATTEMPTS):
            runs = {name: Run(way, batches) for name, way in ways.items()}
            measure(list(runs.values()), backend, rounds, steps)
            times = {name: run.host for name, run in runs.items()}
            figures = Figures.of(times, rounds, base)
            if most is None or figures.ratios[ours] <= most:
                break
        self._add_rows(ways, batches[0], times, figures, ours)
        if most is not None and figures.ratios[ours] > most:
            why = f"{ours} takes {figures.ratios[ours]:.3f} of the time of {base}, where {most} is allowed"
            raise RegressionError(f"{title}: {why} (measured {ATTEMPTS} times)")
        return figures

    def _add_rows(
        self,
        ways: Mapping[str, TakesBatch],
        batch: Any,
        times: Mapping[str, Sequence[float]],
        figures: Figures,
        ours: str,
    ) -> None:
        """Add a row for each way to pytest-benchmark's table.

        Its fixture adds the row of one call, whose times are replaced by the measured ones. It can be used once, so the
        other rows come from copies of it.
        """
        rows = {name: self.benchmark if name == ours else copy.copy(self.benchmark) for name in ways}
        for name, row in rows.items():
            row.name = f"{name}, {figures.ratios[name]:.2f} of the first" if name in figures.ratios else name
            row.fullname = f"{row.fullname} {name}"
            row.extra_info = {**row.extra_info, KEY: {"way": name, **attrs.asdict(figures)}}
            with torch.no_grad():
                row.pedantic(ways[name], (batch,))
            if row.stats is not None:  # None if disabled
                row.stats.stats.data = [microseconds / 1e6 for microseconds in times[name]]
