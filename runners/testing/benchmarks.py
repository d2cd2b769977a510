"""Benchmarks: fills by this library and by hand, as engines write them, compared with the oracle and timed in turn."""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, final

import attrs
import numpy as np
import torch

from ...backends.base import Backend
from ...dataflow.axes import Live, Sizes, Step, extent
from ...dataflow.buffers import Buffers
from ...dataflow.capabilities import LoweringName
from ...dataflow.computation import Computation
from ...dataflow.declaration import Declaration
from ...dataflow.errors import ConfigError, RegressionError, WrongBytesError
from ...dataflow.hostdata import tensor_of
from ...dataflow.inputs import Inputs
from ...dataflow.sizing import Relations
from ...dataflow.slots import BY_PRODUCER, BY_STEP
from ...dataflow.sources import NO_SIDE, Side, plain_name
from ...dataflow.tails import Keep, Once, Pad, resolve_value
from ..engine.bits import first_unequal
from ..engine.sampling import NO_VALUES, Sample, Values
from ..engine.stage import NO_SIZES
from ..input_buffers import BucketBuffers
from .ground import NO_RELATIONS, Ground, fill_faults, lowered
from .timing import Run, Spread, measure

SETS: Final = 4
"""Sets of sources that take turns, each with its own addresses and values.

With a single set, a step could find what the last one left, and skip the upload.
"""
PER_SLOT: Final = "per_slot"
REGROUPED: Final = "regrouped"
PADDED, LIVE = 256, 0.75  # by default, a bucket's rows, and the share of them that is live
ATTEMPTS: Final = 3  # measurements before a ratio counts as too high: another program may have used the core
KEY: Final = "slotgraph"  # the name of the figures in pytest-benchmark's `extra_info`
_UNTIMED: Final[frozenset[LoweringName]] = frozenset({"slot_by_slot", "in_graph"})
"""Lowerings that are not timed in fills.

The oracle is not meant to be fast. The other is the fused kernel, launched in the step's graph: only whole steps show
what that saves.
"""
_FOREACH_COPY: Final = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - torch has no public name for it
_FOREACH_ZERO: Final = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage] - likewise

TakesBatch = Callable[[Any], Any]
"""Takes a batch, or a stand-in for one."""
ByHand = Callable[..., None]
"""Fills from a batch, its live rows on each varying axis, and its side arguments."""
Slices = slice | tuple[slice, ...]
_Plan = tuple[list[Any], list[Any]]
"""What a step of given sizes does.

Copies have a name or None, a source or None, the buffer, live rows, tails, and the tails' value. Computed slots have
the target, the function, and fields of the batch.
"""


def fill_by_hand(  # noqa: C901 - one function, as in code by hand
    declaration: Declaration,
    backend: Backend,
    padded: Sizes,
    buffers: Buffers,
    *,
    grouped: bool = False,
) -> ByHand:
    """Make a fill as engines write it: a tail reset and a copy for each slot.

    grouped: Whether each step copies by foreach.
    """
    plans, reads_host = dict[Live, _Plan](), not backend.capabilities.packed_uploads

    def fill(batch: Any, live: Live, side: Side = NO_SIDE) -> None:  # noqa: C901, PLR0912 - as above
        if live not in plans:
            plans[live] = _planned(declaration, backend, declaration.step(live, padded), buffers)
        copied, computed = plans[live]
        get: Any = batch.get if isinstance(batch, Mapping) else functools.partial(getattr, batch)
        zeros, copies = list[torch.Tensor](), dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]]()  # for foreach
        for name, source, buffer, box, tails, pad in copied:
            value = None
            if source is not None:
                value = get(name, None) if name else source.read(batch, side)
                if value is None:
                    continue
            for tail in tails:
                if grouped and pad == 0:
                    zeros.append(buffer[tail])
                else:
                    buffer[tail].fill_(pad)
            if value is None:
                continue
            given = value if type(value) is torch.Tensor else tensor_of(value, buffer.dtype)
            if not grouped:
                buffer[box].copy_(given, non_blocking=True)
                continue
            if not reads_host:  # move it first
                given = given.to(buffer.device)
            targets, sources = copies.setdefault((buffer.dtype, given.dtype, buffer.is_cpu), ([], []))
            targets.append(buffer[box])
            sources.append(given)
        if zeros:
            _FOREACH_ZERO(zeros)
        for targets, sources in copies.values():
            _FOREACH_COPY(targets, sources, non_blocking=True)
        for target, function, fields in computed:
            value = function(**{need: field.read(batch) for need, field in fields.items()})
            if isinstance(value, int | float):
                target.fill_(value)
            elif value is not None:  # with None it has written its slot itself
                target.copy_(value if type(value) is torch.Tensor else tensor_of(value, target.dtype))

    return fill


def _planned(declaration: Declaration, backend: Backend, step: Step, buffers: Buffers) -> _Plan:
    """Return slices and functions for a step of given sizes. They are made once, like constants of code by hand."""
    copied, computed, known = list[Any](), list[Any](), dict[str, Any]()
    for name, slot in declaration.slots.items():
        source, buffer, rule, tails, pad = slot.reads(name), buffers[name].tensor, slot.rule(), list[Slices](), None
        sizes, padded = (extent(slot.shape, one) for one in (step.live_sizes, step.padded_sizes))
        dims = max(slot.varying, default=0) + 1
        rows, box = (_box(*map(slice, one[:dims])) for one in (sizes, padded))
        known[name] = buffer[box]
        if isinstance(rule, Pad):
            pad = resolve_value(rule.value, backend.capabilities, step.padded_sizes)
            ends = [(dim, slice(sizes[dim], padded[dim])) for dim in slot.varying if sizes[dim] < padded[dim]]
            tails = [_box(*map(slice, padded[:dim]), end) for dim, end in ends]
        if source is not None or slot.rewritten:
            copied.append((plain_name(source), source, buffer, rows, tails, pad))
    for name in declaration.functions:
        bound = Computation.bind(name, declaration, {**declaration.given(step), **known}, known[name])
        computed.append((known[name], bound.function, bound.fields))
    return copied, computed


def _box(*ranges: slice) -> Slices:
    """Make an index. A single slice stays one, since a tuple takes longer."""
    return ranges[0] if len(ranges) == 1 else ranges


@attrs.frozen(eq=False)
class Contestant:
    """One way to fill, or to run a whole step.

    Attributes:
        call: Takes a batch.
        buffers: The memory of the slots that it fills.
    """

    call: TakesBatch
    buffers: Buffers


def verify(
    title: str,
    declaration: Declaration,
    backend: Backend,
    oracle: Contestant,
    others: Mapping[str, Contestant],
    batches: Iterable[tuple[Sizes, Any]],
) -> None:
    """Raise WrongBytesError if a contestant leaves other values in slots than the oracle, or returns another tensor.

    Tails that nothing reads, and absent slots, may have any values.

    Args:
        title: What they run.
        declaration: The slots.
        backend: The device.
        oracle: The contestant to compare with.
        others: The other contestants, by name.
        batches: Batches, each with its sizes.
    """
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
        return returned, {name: contestant.buffers[name].tensor.clone() for name in compared if name not in absent}

    for live, batch in batches:
        given = (batch.batch, batch.side) if isinstance(batch, Sample) else (batch, NO_SIDE)
        absent = {name for name, source in declaration.optional if source.read(*given) is None}
        right, wanted = run(oracle, batch)
        right = right.clone() if isinstance(right, torch.Tensor) else right
        for name, contestant in others.items():
            returned, held = run(contestant, batch)
            faults = list(fill_faults(held, wanted, slots, live))
            if isinstance(right, torch.Tensor) and isinstance(returned, torch.Tensor):
                is_alike = returned.shape == right.shape and first_unequal(returned, right) is None
                faults += [] if is_alike else ["it returned other outputs"]
            if faults:
                raise WrongBytesError(f"{title} by {name!r}: {faults[0]}")


@attrs.frozen
class Figures:
    """The times of each way, in microseconds a step, and its ratio to the base way.

    Ratios are medians over the rounds of one run, so that a slow machine is slow for both.
    """

    microseconds: Mapping[str, Spread]
    ratios: Mapping[str, float]

    @classmethod
    def of(cls, samples: Mapping[str, Sequence[float]], rounds: int, base: str) -> "Figures":
        """Summarize the times of all steps, equally many a round. Ratios are to the way named `base`."""
        medians = {name: np.median(np.reshape(times, (rounds, -1)), axis=1) for name, times in samples.items()}
        ratios = {name: float(np.median(one / medians[base])) for name, one in medians.items() if name != base}
        return cls({name: Spread.of(times) for name, times in samples.items()}, ratios)


def ways_to_fill(
    ground: Ground, live: Sizes, values: Values, absent: Collection[str], lowerings: Sequence[LoweringName]
) -> tuple[dict[str, TakesBatch], list[Sample]]:
    """Return the fill of one bucket by each way, and batches that take turns. Raise WrongBytesError if bytes differ."""
    declaration, backend, padded, rows = ground.declaration, ground.backend, ground.most, ground.live(live)
    had = backend.capabilities.lowerings
    timed = lowerings or [one for one in had if one not in _UNTIMED] or had
    right = ground.stage.allocate(padded)
    sources = [declaration.slots[name].axes for name in declaration.sources if name not in absent]
    untold = {axis: live[axis] for axis in set(declaration.varying).difference(*sources)} or NO_SIZES

    def by_hand(name: str) -> Contestant:
        buffers = ground.stage.allocate(padded)
        fill = fill_by_hand(declaration, backend, padded, buffers, grouped=name == REGROUPED)
        return Contestant(lambda one: fill(one.batch, rows, one.side), buffers)

    def by(lowering: LoweringName) -> Contestant:
        layer = lowered(ground, lowering)
        fill = BucketBuffers(layer, ground.live(padded)).fill
        return Contestant(lambda one: fill(one.batch, live=untold, **one.side), layer.buffers)

    ways = {PER_SLOT: by_hand(PER_SLOT)}
    ways |= {name: by(name) for name in timed}
    ways[REGROUPED] = by_hand(REGROUPED)
    oracle = Contestant(lambda one: ground.oracle(right, one.batch, one.side, live, padded), right)
    samples = [ground.sample(live, seed, absent, values) for seed in range(SETS)]
    verify(f"{declaration.name} filled", declaration, backend, oracle, ways, [(live, one) for one in samples])
    return {name: way.call for name, way in ways.items()}, samples


@final
@attrs.frozen
class Timer:
    """Times several ways to do the same in one test, with pytest-benchmark's fixture, which saves their figures."""

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
        """Time the fill of one bucket by each lowering, against two by hand, all compared with the oracle first.

        Args:
            backend: Where it is filled. The fixture gives it.
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
        ways: Mapping[str, TakesBatch],
        batches: Sequence[Any],
        title: str,
        *,
        most: float | None = None,
        rounds: int = 20,
        steps: int = 20,
    ) -> Figures:
        """Time your own ways to do the same, in turn, such as an engine's fill and this library's.

        If pytest-benchmark is disabled, each way runs once, and no ratio is checked.

        Args:
            backend: Where it is done. The fixture gives it.
            ways: Calls that take a batch, by name. The first gives the right outputs, the second is what you measure.
            batches: Batches of one size that take turns.
            title: What is done.
            most: The largest ratio that is allowed.
            rounds: Rounds in which the ways take turns.
            steps: Steps of each round.

        Returns:
            The times of each way.

        Raises:
            RegressionError: The ratio is over `most` each time that it is measured.
        """
        if len(ways) < 2 or not batches:  # noqa: PLR2004 - a ratio needs two
            raise ConfigError(f"ways: expected at least two, the right one first, and batches, got {list(ways)}")
        base, ours, *_ = ways
        benchmark, title = self.benchmark, f"{backend.name}: {title}"
        limit = math.inf if most is None or benchmark.disabled else most
        if benchmark.disabled:
            rounds, steps = 1, 1
        benchmark.group = benchmark.group or title
        figures, ratio = Figures({}, {}), math.inf
        for _ in range(ATTEMPTS):
            runs = {name: Run(way, batches) for name, way in ways.items()}
            measure(list(runs.values()), backend, rounds, steps)
            figures = Figures.of({name: run.host for name, run in runs.items()}, rounds, base)
            ratio = figures.ratios[ours]
            if ratio <= limit:
                break
        benchmark.extra_info[KEY] = attrs.asdict(figures)
        way, turns = ways[ours], itertools.cycle(batches)
        with torch.no_grad():
            benchmark.pedantic(lambda: way(next(turns)), rounds=rounds, iterations=steps, warmup_rounds=1)
        if ratio > limit:
            why = f"{ours} takes {ratio:.3f} of the time of {base}, where {limit} is allowed"
            raise RegressionError(f"{title}: {why} (measured {ATTEMPTS} times)")
        return figures
