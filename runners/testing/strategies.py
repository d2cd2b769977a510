"""Hypothesis strategies over a declaration: live sizes, batches, and schedules of steps, all of them shrinkable."""

from collections.abc import Collection
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
from ...dataflow.axes import Sizes, extent
from ...dataflow.capabilities import resolve_dtype
from ...dataflow.inputs import Inputs
from ...dataflow.sampling import NO_VALUES, Sample, Values, bounds, is_location, path_of, sample_batch, sampled_slots
from ...dataflow.slots import Slot
from ..stage import NO_SIZES
from .ground import NO_RELATIONS, Ground, Relations

__all__ = ["TURNS", "Turn", "batches", "hypothesis", "schedules", "schedules_on", "sizes", "st"]

FEW: Final = 8
"""Elements at most of a tensor that is drawn number by number, so that each shrinks; larger ones come of a seed."""
TURNS: Final = 5
_FLOATS: Final = 4.0
_SEEDS: Final = st.integers(0, (1 << 32) - 1)


@attrs.frozen(eq=False, repr=False)
class Turn:
    """One step of a schedule: its bucket's sizes, its live ones, absent slots, and what the batch brings.

    as_lists: slots that are brought as lists, not tensors.
    """

    padded: Sizes
    live: Sizes
    absent: frozenset[str]
    as_lists: frozenset[str]
    sample: Sample

    def __repr__(self) -> str:
        """Sizes and patterns on one line, without the numbers."""
        sizes = ", ".join(f"{axis}={self.live[axis]}/{self.padded[axis]}" for axis in sorted(self.padded))
        said = {"absent": self.absent, "as_lists": self.as_lists}
        return f"Turn({sizes}{''.join(f', {key}={sorted(names)}' for key, names in said.items() if names)})"


def sizes(
    inputs: type[Inputs],
    max_sizes: Sizes = NO_SIZES,
    *,
    settings: object = None,
    relations: Relations = NO_RELATIONS,
    least: int = 1,
) -> st.SearchStrategy[Sizes]:
    """Live sizes of every axis: `least` to the largest on each that varies; others follow by `relations`."""
    return st.deferred(lambda: sizes_on(Ground.of(inputs, "cpu", max_sizes, settings, relations), least))


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
    """Batches of a declaration, `sample.batch` and `sample.side`, which come without any of the optional slots.

    max_sizes: the largest sizes of varying axes, else 8, and those of fixed ones, else 3. values: by slot, the lowest
    and the highest number, or a function of shape, dtype and generator; by field its value. relations: axes that follow
    from others, as {TOKENS: BATCH * 4}. Raises ConfigError for what no one can draw, as functions of a batch.
    """

    @st.composite
    def drawn(draw: st.DrawFn) -> Sample:
        ground = Ground.of(inputs, backend, max_sizes, settings, relations)
        return draw_sample(draw, ground, draw(sizes_on(ground, least)), draw(absences(ground)), values)

    return drawn()


def schedules(
    inputs: type[Inputs],
    max_sizes: Sizes = NO_SIZES,
    *,
    backend: str | Backend = "cpu",
    values: Values = NO_VALUES,
    settings: object = None,
    relations: Relations = NO_RELATIONS,
    least: int = 1,
    turns: int = TURNS,
) -> st.SearchStrategy[list[Turn]]:
    """Steps one after another, at most `turns`, over a few buckets; each batch fits its own. See `batches`."""

    @st.composite
    def drawn(draw: st.DrawFn) -> list[Turn]:
        ground = Ground.of(inputs, backend, max_sizes, settings, relations)
        return draw(schedules_on(ground, values, least, turns))

    return drawn()


def sizes_on(ground: Ground, least: int, most: Sizes | None = None) -> st.SearchStrategy[Sizes]:
    """Sizes of every axis, those that lead drawn up to `most`."""
    highest = ground.most if most is None else most
    leads = {axis: st.integers(min(least, highest[axis]), highest[axis]) for axis in ground.leads}
    return st.fixed_dictionaries(leads).map(ground.sizes)


def absences(ground: Ground) -> st.SearchStrategy[frozenset[str]]:
    """Sets of optional slots that a batch comes without; slots of one source go together."""
    declaration = ground.declaration
    paths = {name: path_of(name, slot) for name, slot in sampled_slots(declaration)}
    required = {paths[name] for name, slot in sampled_slots(declaration) if not slot.optional}
    optional = sorted(name for name, _ in declaration.optional if paths[name] not in required)
    if not optional:
        return st.just(frozenset[str]())

    def together(chosen: Collection[str]) -> frozenset[str]:
        gone = {paths[name] for name in chosen}
        return frozenset(name for name in optional if paths[name] in gone)

    return st.sets(st.sampled_from(optional)).map(together)


def draw_sample(
    draw: st.DrawFn, ground: Ground, live: Sizes, absent: Collection[str], values: Values, *, few: int = FEW
) -> Sample:
    """A batch of given sizes; small tensors that `values` has nothing for are drawn number by number."""
    declaration, capabilities = ground.declaration, ground.backend.capabilities
    made: dict[str, Any] = {}
    for name, slot in sampled_slots(declaration):
        dtype, shape = resolve_dtype(slot.dtype, capabilities), extent(slot.shape, live)
        count = torch.Size(shape).numel()
        if name not in values and name not in absent and count <= few and not dtype.is_complex:
            numbers = draw(_numbers(slot, dtype, live, count))
            tensor = torch.tensor(numbers, dtype=torch.float64, device="cpu").to(dtype).reshape(shape)
            made[name] = lambda *_, tensor=tensor: tensor
    generator = torch.Generator().manual_seed(draw(_SEEDS))
    every = {**made, **values}
    return sample_batch(
        declaration, capabilities, live, generator, absent=absent, values=every, device=ground.backend.device
    )


def _numbers(slot: Slot, dtype: torch.dtype, live: Sizes, count: int) -> st.SearchStrategy[list[Any]]:
    """As many numbers as one slot of small values has."""
    most = slot.limit
    limit = None if most is None else most.at(live)
    if dtype.is_floating_point:
        one: st.SearchStrategy[Any] = st.floats(-_FLOATS, _FLOATS, width=16)
    elif is_location(slot) and (limit is None or limit >= count):
        return st.permutations(range(1, count + 1))
    else:
        one = st.integers(*((0, 1) if dtype == torch.bool else bounds(slot, limit)))
    return st.lists(one, min_size=count, max_size=count)


@st.composite
def schedules_on(draw: st.DrawFn, ground: Ground, values: Values, least: int, turns: int) -> list[Turn]:
    """Steps over at most three buckets, so that each is filled several times; no bucket is empty."""
    buckets = draw(st.lists(sizes_on(ground, max(least, 1)), min_size=1, max_size=3))
    made = []
    for _ in range(draw(st.integers(1, turns))):
        padded = draw(st.sampled_from(buckets))
        live, absent = draw(sizes_on(ground, least, padded)), draw(absences(ground))
        sample = draw_sample(draw, ground, live, absent, values)
        listed = draw(st.sets(st.sampled_from(names))) if (names := _flat(ground, absent)) else set[str]()
        _as_lists(ground, sample, listed)
        made.append(Turn(padded, live, absent, frozenset(listed), sample))
    return made


def _flat(ground: Ground, absent: Collection[str]) -> list[str]:
    """Slots whose values lists can tell: those of one dim, of numbers that are not complex."""
    capabilities = ground.backend.capabilities
    found = [
        name
        for name, slot in sampled_slots(ground.declaration)
        if len(slot.shape) == 1 and name not in absent and not resolve_dtype(slot.dtype, capabilities).is_complex
    ]
    return sorted(found)


def _as_lists(ground: Ground, sample: Sample, names: Collection[str]) -> None:
    """Bring some slots as lists: host data, which a fill takes as well."""
    for name in names:
        path = path_of(name, ground.declaration.slots[name])
        value, holder = path.read(sample.batch, sample.side), sample.side if path.beside else sample.batch
        if isinstance(value, torch.Tensor):
            for part in path.parts[:-1]:
                holder = holder[part]
            holder[path.parts[-1]] = value.tolist()
