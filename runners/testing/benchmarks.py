"""Benchmarks for pytest-benchmark: fills by this library and by hand, as engines write them, in turn in one run."""

import functools
import itertools
import math
import statistics
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import attrs
import numpy as np
import torch

from ...backends.base import Backend
from ...dataflow.axes import Sizes, Step, extent
from ...dataflow.buffers import allocate
from ...dataflow.capabilities import Lowering
from ...dataflow.computation import field_of, write
from ...dataflow.declaration import Declaration
from ...dataflow.errors import ConfigError, RegressionError, WrongBytesError
from ...dataflow.inputs import Inputs
from ...dataflow.sampling import NO_VALUES, Sample, Values, sample_batch
from ...dataflow.slots import Output, Slot, Staged
from ...dataflow.sources import NO_SIDE, OUT, Side, plain_name
from ...dataflow.tails import Keep, Once, Pad, resolve_value
from ..stage import NO_SIZES
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
_FOREACH_COPY: Final = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - torch has no public name for it
_FOREACH_ZERO: Final = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage] - likewise

Box = slice | tuple[slice, ...]


class _Plan(NamedTuple):
    """What a step of given sizes does, in lists of tuples."""

    copied: list[Any]  # name or None, source or None, buffer, live rows, tails, and what these hold
    computed: list[Any]  # name, slot, function, fields of the batch
    views: list[tuple[str, torch.Tensor, Box]]


class _Groups(NamedTuple):
    """Copies and resets that a step gathers anew: one foreach copy a pair of dtypes, and one foreach zero."""

    copies: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]]
    zeros: list[torch.Tensor]

    def add(self, target: torch.Tensor, source: torch.Tensor, *, moves: bool) -> None:
        if moves:  # where no foreach may read host memory, one has to move it first
            source = source.to(target.device)
        targets, copied = self.copies.setdefault((target.dtype, source.dtype, target.is_cpu), ([], []))
        targets.append(target)
        copied.append(source)

    def run(self) -> None:
        if self.zeros:
            _FOREACH_ZERO(self.zeros)
        for targets, copied in self.copies.values():
            _FOREACH_COPY(targets, copied, non_blocking=True)


@final
class FillByHand:
    """A fill as engines write it: for each slot one tail reset and one copy, and then the view, sliced in each step.

    As engines do, it copies host data without waiting for the device, which has read pageable memory when the call
    returns.

    Args:
        declaration: The slots.
        backend: Where they are.
        padded: The bucket's sizes.
        grouped: Whether copies go by foreach, the groups built anew in each step, and not one by one.
        slots: Memory to fill, such as that which a graph reads. By default it is allocated.

    Attributes:
        slots: Every padded row of each slot.
    """

    def __init__(
        self,
        declaration: Declaration,
        backend: Backend,
        padded: Sizes,
        *,
        grouped: bool = False,
        slots: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._declaration, self._capabilities, self._padded = declaration, backend.capabilities, padded
        if slots is None:
            made = allocate(declaration, padded, backend.capabilities, backend.empty)
            slots = {buffer.name: buffer.tensor for buffer in made}
        self.slots = slots
        self._grouped, self._moves = grouped, not backend.capabilities.foreach_host
        self._plans: dict[tuple[int, ...], _Plan] = {}

    def __call__(self, batch: Any, live: tuple[int, ...], side: Side = NO_SIDE) -> Any:
        """Fill from a batch and return the view: `fill`, and all slots sliced."""
        self.fill(batch, live, side)
        view = types.SimpleNamespace(**self.slots)
        for name, buffer, box in self._plans[live].views:
            setattr(view, name, buffer[box])
        return view

    def fill(self, batch: Any, live: tuple[int, ...], side: Side = NO_SIDE) -> None:  # noqa: C901, PLR0912 - no frame more than code by hand has
        """Fill from a batch.

        Args:
            batch: An object or a mapping.
            live: Its rows on each varying axis of the declaration.
            side: Its side arguments.
        """
        plan = self._plans.get(live) or self._planned(live)
        get: Any = batch.get if isinstance(batch, Mapping) else functools.partial(getattr, batch)
        groups = _Groups({}, []) if self._grouped else None
        for name, source, buffer, box, tails, pad in plan.copied:
            value = None
            if source is not None:
                value = get(name, None) if name else source.read(batch, side)
                if value is None:
                    continue
            for tail in tails:
                if groups is not None and pad == 0:
                    groups.zeros.append(buffer[tail])
                else:
                    buffer[tail].fill_(pad)
            if value is not None:
                given = value if type(value) is torch.Tensor else _tensor(value, buffer.dtype)
                if groups is None:
                    buffer[box].copy_(given, non_blocking=True)
                else:
                    groups.add(buffer[box], given, moves=self._moves)
        if groups is not None:
            groups.run()
        fields = self._declaration.fields
        for name, target, function, needs in plan.computed:
            value = function(**{need: field_of(batch, need, fields[need]) for need in needs})
            if isinstance(value, int | float):
                target.fill_(value)
            elif value is not None:  # else it has written its slot itself
                write(target, value, name)

    def _planned(self, live: tuple[int, ...]) -> _Plan:
        """Slices and functions for a step of given sizes: made once, as constants of code by hand are."""
        declaration, step = self._declaration, self._declaration.step(live, self._padded)
        plan = self._plans[live] = _Plan([], [], [])
        known: dict[str, Any] = {}
        for name, slot in declaration.slots.items():
            source, buffer = slot.reads(name), self.slots[name]
            box = _box(extent(slot.shape, step.padded_sizes), slot)
            known[name] = buffer[box] if slot.varying else buffer
            if slot.varying:
                plan.views.append((name, buffer, box))
            if source is not None or slot.rewritten:
                plain = plain_name(source)
                rows = _box(extent(slot.shape, step.live_sizes), slot)
                plan.copied.append((plain, source, buffer, rows, *self._tails(slot, step)))
        for name in declaration.order:
            compute = declaration.slots[name].computes()
            if compute is None:
                continue
            given = {**known, **declaration.given(step.of(name)), OUT: known[name]}
            bound = {need: given[need] for need in (*compute.needs, *[OUT] * compute.writes_out) if need in given}
            needs = [need for need in compute.needs if need not in given]
            plan.computed.append((name, known[name], functools.partial(compute.function, **bound), needs))
        return plan

    def _tails(self, slot: Slot, step: Step) -> tuple[Sequence[Box], Any]:
        """Where the tails of a slot are, and what they hold."""
        rule = slot.rule()
        if not isinstance(rule, Pad):
            return (), 0
        live, padded = (extent(slot.shape, sizes) for sizes in (step.live_sizes, step.padded_sizes))
        fixed = {axis: size for axis, size in self._padded.items() if axis.fixed}
        ends = [
            (*map(slice, padded[:dim]), slice(live[dim], padded[dim]))
            for dim in slot.varying
            if live[dim] < padded[dim]
        ]
        return [one[0] if len(one) == 1 else one for one in ends], resolve_value(rule.value, self._capabilities, fixed)


def _box(sizes: Sequence[int], slot: Slot) -> Box:
    """Where the rows of a slot are, up to the last dim that varies: a single slice is no tuple, which takes longer."""
    ranges = tuple(map(slice, sizes[: max(slot.varying, default=0) + 1]))
    return ranges[0] if len(ranges) == 1 else ranges


def _tensor(source: Any, dtype: torch.dtype) -> torch.Tensor:
    """A host tensor of an array or a list; a tensor as it is."""
    if isinstance(source, torch.Tensor):
        return source
    return (
        torch.from_numpy(source) if isinstance(source, np.ndarray) else torch.tensor(source, dtype=dtype, device="cpu")
    )


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
            ways: Calls that take a batch, by name. The first gives the right outputs, the second is what you measure.
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
