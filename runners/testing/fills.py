"""Compares fills with the oracle, on random steps from Hypothesis: the strategies and the assertion."""

import functools
from collections.abc import Sequence
from typing import Any, Final

try:
    import hypothesis
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "slotgraph.testing needs hypothesis, which is not installed: pip install 'slotgraph[testing]'",
        name="hypothesis",
    ) from error

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.axes import Sizes
from ...dataflow.capabilities import LoweringName, resolve_dtype
from ...dataflow.errors import WrongBytesError
from ...dataflow.inputs import Inputs
from ...dataflow.sizing import Relations
from ..engine.sampling import NO_VALUES, Sample, Values, path_of, put
from ..engine.stage import NO_SIZES
from ..input_buffers import BucketBuffers
from .ground import NO_RELATIONS, Ground, fill_faults, lowered, scribble, spoilt, untouched

_SPREAD: Final = 100
_SEEDS: Final = st.integers(0, (1 << 32) - 1)


@attrs.frozen(eq=False, repr=False)
class DrawnStep:
    """One step of a schedule: its sizes, its absent slots, and its batch, some slots of it as lists."""

    padded: Sizes
    live: Sizes
    absent: frozenset[str]
    as_lists: frozenset[str]
    sample: Sample

    def __repr__(self) -> str:
        """Return sizes and patterns on one line, without the numbers."""
        sizes = ", ".join(f"{axis}={self.live[axis]}/{self.padded[axis]}" for axis in sorted(self.padded))
        names_of = {"absent": self.absent, "as_lists": self.as_lists}
        return f"DrawnStep({sizes}{''.join(f', {key}={sorted(names)}' for key, names in names_of.items() if names)})"


def batches(
    inputs: type[Inputs],
    max_sizes: Sizes = NO_SIZES,
    *,
    backend: str | Backend = "cpu",
    values: Values = NO_VALUES,
    settings: object = None,
    relations: Relations = NO_RELATIONS,
    least: int = 1,
) -> st.SearchStrategy[Sample]:
    """Draw batches of a declaration, `sample.batch` and `sample.side`, which may lack any of the optional slots.

    Hypothesis draws sizes, absent slots, and the seed of the values.

    Args:
        inputs: The declaration.
        max_sizes: The largest sizes of varying axes, by default 8, and the sizes of fixed ones, by default 3.
        backend: Where tensors for slots on the device are.
        values: By slot the lowest and the highest number, or a function of shape, dtype and generator; by field its
            value.
        settings: What `when=` of slots refers to.
        relations: Axes that follow from others, as {TOKENS: BATCH * 4}.
        least: The fewest rows on an axis.

    Raises:
        ConfigError: A slot's source cannot be drawn, such as a function of the batch.
    """

    @st.composite
    def drawn(draw: st.DrawFn) -> Sample:
        ground = Ground.of(inputs, backend, max_sizes, settings, relations)
        live = draw(_sizes(ground, least, ground.most))
        absent = draw(_absences(ground))
        return ground.sample(live, draw(_SEEDS), absent, values)

    return drawn()


def _sizes(ground: Ground, least: int, most: Sizes) -> st.SearchStrategy[Sizes]:
    """Draw sizes of every axis, with leading axes up to `most`."""
    leads = {axis: st.integers(min(least, most[axis]), most[axis]) for axis in ground.leads}
    return st.fixed_dictionaries(leads).map(ground.sizes)


def _absences(ground: Ground) -> st.SearchStrategy[frozenset[str]]:
    """Draw sets of optional slots that a batch lacks. Slots of one source are absent together."""
    declaration = ground.declaration
    paths = {name: path_of(declaration, name) for name in declaration.sources}
    required = {path for name, path in paths.items() if not declaration.slots[name].optional}
    optional = sorted(name for name in paths if paths[name] not in required)
    sources = st.sets(st.sampled_from([paths[name] for name in optional])) if optional else st.just(set[Any]())
    return sources.map(lambda gone: frozenset(name for name in optional if paths[name] in gone))


@st.composite
def _schedules(draw: st.DrawFn, ground: Ground, values: Values, least: int) -> list[DrawnStep]:
    """Draw steps over at most three buckets, so that each is filled several times. No bucket is empty."""
    buckets = draw(st.lists(_sizes(ground, max(least, 1), ground.most), min_size=1, max_size=3))
    made = list[DrawnStep]()
    slots = ground.declaration.slots
    capabilities = ground.backend.capabilities
    for _ in range(draw(st.integers(1, 5))):
        padded = draw(st.sampled_from(buckets))
        live = draw(_sizes(ground, least, padded))
        absent = draw(_absences(ground))
        sample = ground.sample(live, draw(_SEEDS), absent, values)
        flat = [
            name
            for name in sorted(ground.declaration.sources.keys() - absent)
            if len(slots[name].shape) == 1 and not resolve_dtype(slots[name].dtype, capabilities).is_complex
        ]
        listed = draw(st.sets(st.sampled_from(flat))) if flat else set[str]()
        for path in (path_of(ground.declaration, name) for name in listed):
            value = path.read(sample.batch, sample.side)
            if isinstance(value, torch.Tensor):
                put(sample, path, value.tolist())
        made.append(DrawnStep(padded, live, absent, frozenset(listed), sample))
    return made


def assert_fill_equals_oracle(
    inputs: type[Inputs],
    max_sizes: Sizes = NO_SIZES,
    *,
    backend: str | Backend = "auto",
    lowerings: Sequence[LoweringName] = (),
    values: Values = NO_VALUES,
    settings: object = None,
    relations: Relations = NO_RELATIONS,
    least: int = 1,
    max_examples: int | None = None,
) -> None:
    """Fill a declaration by every lowering of a backend, and slot by slot, and check that the bytes are the same.

    Random steps follow one another over buffers full of random bytes: live and padded sizes, batches, absent slots,
    tensors and lists. Hypothesis draws them, under its own settings. Slots that no computed slot reads get any numbers.
    For others, see `values` of `slotgraph.testing.batches`.

    Args:
        inputs: The declaration.
        max_sizes: The largest sizes of varying axes, by default 8, and the sizes of fixed ones, by default 3.
        backend: Where it is filled, by name or as an instance.
        lowerings: By default all that the backend has.
        values: The values of slots, see `slotgraph.testing.batches`.
        settings: What `when=` of slots refers to.
        relations: Axes that follow from others, as {TOKENS: BATCH * 4}.
        least: The fewest rows on an axis.
        max_examples: For each lowering. By default that of Hypothesis's profile.

    Raises:
        WrongBytesError: An AssertionError, which names lowering, step, slot and row.
    """
    __tracebackhide__ = True  # so that pytest shows the user's line
    ground = Ground.of(inputs, backend, max_sizes, settings, relations)
    own = hypothesis.settings()
    declaration = ground.declaration
    read = {need for one in declaration.functions.values() for need in one.needs}
    free = {name for name in declaration.sources.keys() - read if declaration.slots[name].limit is None}
    drawn = _schedules(ground, {**dict.fromkeys(free, _noise), **values}, least)

    @hypothesis.settings(
        own,
        deadline=None,
        max_examples=max_examples or own.max_examples,
        phases=[phase for phase in own.phases if phase is not hypothesis.Phase.explain],  # needs no explanation
        suppress_health_check={*own.suppress_health_check, hypothesis.HealthCheck.too_slow},  # first calls are slow
    )
    @hypothesis.given(schedule=drawn, seed=st.integers(0, 1 << 30))
    def fills(lowering: LoweringName, schedule: list[DrawnStep], seed: int) -> None:
        _play(ground, lowering, schedule, seed)

    for lowering in lowerings or ground.backend.capabilities.lowerings:
        try:
            fills(lowering)
        except WrongBytesError as error:
            raise error.with_traceback(None)  # noqa: B904 - without the frames of Hypothesis and of this module


def _noise(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Draw numbers from a small range, all equally likely, and none below zero for an unsigned dtype."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, device="cpu", generator=generator).bool()
    low = -_SPREAD if dtype.is_signed else 0
    return torch.randint(low, _SPREAD, shape, device="cpu", generator=generator).to(dtype)


def _play(ground: Ground, lowering: LoweringName, schedule: list[DrawnStep], seed: int) -> None:
    """Fill buffers by a lowering, and others by the oracle.

    After each step, slots that the step may write get random bytes.
    """
    layer = lowered(ground, lowering, seed)
    right = spoilt(ground, seed)
    declaration = ground.declaration
    bucket = functools.cache(functools.partial(BucketBuffers[Any], layer))
    for number, one in enumerate(schedule, 1):
        batch = one.sample.batch
        side = one.sample.side
        with torch.no_grad():
            view = bucket(ground.live(one.padded)).fill(batch, live=one.live, absent=one.absent, **side)
            wanted = ground.oracle(right, batch, side, one.live, one.padded)
            ground.backend.synchronize()
            faults = [*fill_faults(vars(view), wanted, declaration.slots, one.live), *untouched(layer.buffers, right)]
            for buffers in (layer.buffers, right):
                scribble(buffers, one.padded, torch.Generator().manual_seed(seed))
        if faults:
            step = f"step {number} of {len(schedule)}, {one!r}"
            raise WrongBytesError(f"{declaration.name} filled by {lowering!r}, {step}: {faults[0]}")
