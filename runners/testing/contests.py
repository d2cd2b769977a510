"""Contests: a declaration's fills, or a runner's steps, by this library and by hand, in turn in one run."""

import contextlib
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.axes import Sizes
from ...dataflow.capabilities import Lowering
from ...dataflow.errors import ConfigError, WrongBytesError
from ...dataflow.oracle import fill_slot_by_slot
from ...dataflow.sampling import Values, sample_batch
from ...dataflow.slots import Output, Slot, Staged
from ...dataflow.sources import Side
from ...dataflow.tails import Keep, Once
from ..filler import Filler
from ..runner import Runner
from ..stage import Stage
from .by_hand import FillByHand
from .bytes import differences, spoil
from .ground import Ground, make_filling
from .timing import Run, Spread, measure

SETS: Final = 4
"""Sets of sources that take turns, each with addresses and values of its own: a step that found what the last one left
could spare itself the upload."""
PER_SLOT: Final = "per_slot"
REGROUPED: Final = "regrouped"
EAGER: Final = "eager"
RUNNER: Final = "runner"
_UNTIMED: Final[frozenset[Lowering]] = frozenset({"slot_by_slot", "in_graph"})
"""Lowerings that no race of fills shows: the oracle, which is not there for speed, and the fused kernel under another
name: what is spared by launching it in the step's graph, only whole steps show."""


@attrs.frozen(eq=False)
class Load:
    """One batch of a contest, its side arguments, and its live sizes, one for each varying axis."""

    batch: Any
    side: Side
    live: tuple[int, ...]


Way = Callable[[Load], Any]


@attrs.frozen(eq=False)
class Contest:
    """Ways to do the same, and the loads that take turns.

    ours: the way whose time is the library's. base: the one that all others are held to. around: what a round of each
    way runs in.
    """

    ways: Mapping[str, Callable[[Any], Any]]
    loads: Sequence[Any]
    ours: str
    backend: Backend
    base: str = PER_SLOT
    around: Mapping[str, Callable[[], AbstractContextManager[object]]] = attrs.field(factory=dict)

    def run(self, rounds: int, steps: int) -> "Figures":
        """Time all ways, round by round in turn."""
        runs = {
            name: Run(way, self.loads, self.around.get(name, contextlib.nullcontext)) for name, way in self.ways.items()
        }
        measure(list(runs.values()), self.backend, rounds, steps)
        return Figures.of({name: run.host for name, run in runs.items()}, rounds, self.base)


@attrs.frozen
class Figures:
    """What each way took, in microseconds a step, and its ratio to the fill by hand, one slot after another.

    Ratios are medians over the rounds of one run, so that a slow machine is slow for both.
    """

    microseconds: Mapping[str, Spread]
    ratios: Mapping[str, float]

    @classmethod
    def of(cls, samples: Mapping[str, Sequence[float]], rounds: int, base: str = PER_SLOT) -> "Figures":
        """Figures of all steps' times, as many a round; ratios are to the way named `base`."""
        medians = {name: [statistics.median(part) for part in _parts(times, rounds)] for name, times in samples.items()}
        others = {name: found for name, found in medians.items() if name != base}
        ratios = {
            name: statistics.median(one / other for one, other in zip(found, medians[base], strict=True))
            for name, found in others.items()
        }
        return cls({name: Spread.of(times) for name, times in samples.items()}, ratios)

    def as_data(self) -> dict[str, Any]:
        """Plain data, as it is saved with a benchmark."""
        times = {name: attrs.asdict(spread) for name, spread in self.microseconds.items()}
        return {"microseconds": times, "ratios": dict(self.ratios)}


def _parts(times: Sequence[float], rounds: int) -> list[Sequence[float]]:
    each = len(times) // rounds
    return [times[start : start + each] for start in range(0, each * rounds, each)]


def contest_of_fills(
    ground: Ground, live: Sizes, padded: Sizes, values: Values, absent: Collection[str], lowerings: Sequence[Lowering]
) -> Contest:
    """Fill and view of one bucket: two by hand, and each lowering. WrongBytesError where one leaves other bytes.

    lowerings: those that are timed, the one that counts first; where none is named, all that the backend has.
    """
    had = ground.backend.capabilities.lowerings
    timed = tuple(lowerings) or tuple(one for one in had if one not in _UNTIMED) or had
    gone, loads = frozenset(absent), [_drawn(ground, live, values, absent, seed) for seed in range(SETS)]
    ways: dict[str, Way] = {name: _by_hand(ground, padded, grouped=name == REGROUPED) for name in (PER_SLOT, REGROUPED)}
    for lowering in timed:
        ways[lowering] = _lowered(ground, padded, lowering, gone)
    with torch.no_grad():
        _verify(ways, loads, ground, live, padded)
    return Contest(ways, loads, timed[0], ground.backend)


def _drawn(ground: Ground, live: Sizes, values: Values, absent: Collection[str], seed: int) -> Load:
    generator, capabilities = torch.Generator().manual_seed(seed), ground.backend.capabilities
    made = sample_batch(
        ground.declaration, capabilities, live, generator, absent=absent, values=values, device=ground.device
    )
    return Load(made.batch, made.side, ground.live(live))


def draw_for(
    stage: Stage[Any], live: Sizes, values: Values, absent: Collection[str]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Batches with their side arguments that a runner may be timed with, of given live sizes."""
    sizes = {axis: size for axis, size in stage.sizes.items() if axis.fixed} | dict(live)
    sizes |= {axis: size.at(sizes) for axis, size in stage.relations.items() if size.axes <= sizes.keys()}
    capabilities, device = stage.backend.capabilities, stage.backend.device
    found = []
    for seed in range(SETS):
        seeded = torch.Generator().manual_seed(seed)
        made = sample_batch(stage.declaration, capabilities, sizes, seeded, absent=absent, values=values, device=device)
        found.append((made.batch, made.side))
    return found


def _by_hand(ground: Ground, padded: Sizes, *, grouped: bool) -> Way:
    fill = FillByHand(ground.declaration, ground.backend, padded, grouped=grouped)
    return lambda load: fill(load.batch, load.live, load.side)


def _lowered(ground: Ground, padded: Sizes, lowering: Lowering, absent: frozenset[str]) -> Way:
    stage = ground.stage
    buffers = stage.allocate(padded)
    spoil(buffers, torch.Generator().manual_seed(0))
    filler = Filler(stage, buffers, lowering, [padded])
    filling = make_filling(filler, padded, absent)

    def fill(load: Load) -> Any:
        ready = filler.fill(filling, load.batch, load.live, absent, load.side, whole=False)
        if lowering != "slot_by_slot":  # which has done it all
            ready.compute_on_device(load.batch)
        return stage.view(ready, load.batch)

    return fill


def _verify(ways: Mapping[str, Way], loads: Sequence[Load], ground: Ground, live: Sizes, padded: Sizes) -> None:
    """Hold what each way leaves to the oracle, but for tails that no one reads. WrongBytesError says a difference."""
    declaration, backend = ground.declaration, ground.backend
    buffers = ground.stage.allocate(padded)
    for load in loads:
        step = ground.step(live, padded)
        right = fill_slot_by_slot(declaration, buffers, backend.capabilities, step, load.batch, load.side)
        wanted = {name: view for name, view in right.items() if not _is_loose(declaration.slots[name])}
        for name, way in ways.items():
            view = way(load)
            backend.synchronize()
            got = {slot: None if wanted[slot] is None else getattr(view, slot) for slot in wanted}
            fault = next(differences(got, wanted, declaration.slots, live), None)
            if fault is not None:
                message = f"{declaration.name} filled by {name!r}: {fault}"
                raise WrongBytesError(message)


def _is_loose(slot: Slot) -> bool:
    """Whether a slot's bytes are not all a fill's: of kept tails, of outputs, of what a producer writes."""
    return isinstance(slot, Output | Staged) or isinstance(slot.rule(), Keep | Once)


def contest_of_steps(runner: Runner[Any], batches: Sequence[tuple[Any, Side]]) -> Contest:
    """Whole steps of a captured runner: its own, eager ones, and a fill by hand before the same replay.

    batches: with side arguments; of one bucket and of one size. ConfigError where they are not.
    """
    parts = runner.parts
    if parts.graphs is None or parts.graphs.report is None:
        message = f"{parts.name} has captured nothing: call capture() first, and give a runner that has graphs"
        raise ConfigError(message)
    stage, varying = parts.stage, parts.stage.declaration.varying
    loads = [Load(batch, side, tuple(parts.size(batch, side))[: len(varying)]) for batch, side in batches]
    bucket = _only_bucket(runner, loads)
    by_hand = FillByHand(stage.declaration, stage.backend, parts.sizes[bucket])
    view: Any = None

    def replayed(load: Load) -> Any:
        """A fill by hand, and then the runner's own replay, on the view that it filled last."""
        by_hand.fill(load.batch, load.live, load.side)
        return runner.replay(view)

    @contextlib.contextmanager
    def filled() -> Iterator[None]:
        """Fill by the runner, so that there is a view to replay."""
        nonlocal view
        view = runner.fill(loads[0].batch, **loads[0].side)
        yield

    ways: dict[str, Way] = {
        PER_SLOT: replayed,
        EAGER: lambda load: parts.eager(load.batch, **load.side),
        RUNNER: lambda load: runner(load.batch, **load.side),
    }
    return Contest(ways, loads, RUNNER, stage.backend, around={PER_SLOT: filled})


def _only_bucket(runner: Runner[Any], loads: Sequence[Load]) -> int:
    """The bucket that all loads take. ConfigError where they differ in what a step's time hangs on."""
    stage, found = runner.parts.stage, dict[object, int | None]()
    for load in loads:
        decision = runner.decide(load.batch, **load.side)
        absent = tuple(sorted(stage.absent(load.batch, load.side)))
        found[decision.path, decision.bucket, load.live, absent] = decision.bucket
    bucket = next(iter(found.values()), None)
    if len(found) != 1 or bucket is None:
        took = ", ".join(sorted(map(str, found))) or "nothing"
        message = f"batches must be of one size, without the same slots, and take one bucket's graph; they took {took}"
        raise ConfigError(message)
    return bucket
