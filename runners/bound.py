"""Bound steps: a step as straight-line code, with everything that the batches before it found out.

The long way sizes a batch, routes it to a bucket and makes a specialization. A bound step repeats the answers, and one
guard over the sources says whether they still hold. Where they do not, the long way follows, which alone refuses.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, TypeAlias

from ..dataflow.bucket import KINDS, gathering
from ..dataflow.computation import Computation
from ..dataflow.declaration import Declaration
from ..dataflow.errors import BatchError
from ..dataflow.gradients import GRADIENTS, without_gradients
from ..dataflow.guard import FUNCTION_MODES, below_modes
from ..dataflow.readable import NOT_TOLD
from ..dataflow.sizing import Sizer
from ..dataflow.sources import Side, Sources
from ..dataflow.specialization import Specialization, keep_newest
from ..dataflow.turns import BufferTurn
from .captured import FORKS
from .decision import EVERY, FIRST, FillTimes
from .graphs import GraphSet
from .hostreads import HostReads

MISS: Final = object()
"""What a bound step answers to a batch that is not like those before it. Nothing was done."""
KEPT: Final = 1024
"""Live sizes, each with a pattern of absent slots, that one runner keeps bound steps for. The oldest goes first."""

Holds: TypeAlias = Callable[[Any, Side], bool]
Run: TypeAlias = Callable[[Any, Side, Sources], Any]
Key: TypeAlias = Callable[[Sources], Hashable]


class BoundSteps:
    """The bound steps of one runner, by live sizes and by which optional sources a batch has."""

    def __init__(self, declaration: Declaration, size: Sizer) -> None:
        self._arguments = declaration.arguments
        names, self._gather = gathering(declaration)
        self._key = _key_of(size, names, [name for name, _ in declaration.optional])
        self._runs: tuple[dict[Hashable, list[tuple[Run, Specialization]]], ...] = ({}, {})

    def __len__(self) -> int:
        """How many live sizes and patterns there are steps for."""
        return sum(map(len, self._runs))

    def run(self, batch: Any, side: Side, whole: bool = True) -> Any:  # noqa: FBT001, FBT002 - a keyword takes longer
        """Run a step, or a fill where it is not `whole`. MISS where no step or fill like it came before."""
        if side and self._arguments is not None and not self._arguments.issuperset(side):
            return MISS  # the long way refuses it
        sources = self._gather(batch, side)
        try:
            known = self._runs[whole].get(self._key(sources))
        except (BatchError, TypeError):  # which the long way words better
            return MISS
        if known is None:
            return MISS
        outputs = known[0][0](batch, side, sources)
        return outputs if outputs is not MISS or len(known) == 1 else self._other(known, batch, side, sources)

    def _other(self, known: list[tuple[Run, Specialization]], batch: Any, side: Side, sources: Sources) -> Any:
        """Try the other kinds of sources that came with these sizes. The one that fits is tried first from then on."""
        for place in range(1, len(known)):
            outputs = known[place][0](batch, side, sources)
            if outputs is not MISS:
                known.insert(0, known.pop(place))
                return outputs
        return MISS

    def learn(self, batch: Any, side: Side, found: Specialization, run: Callable[[], Run], *, whole: bool) -> None:
        """Keep a step, or a fill, for batches like this one."""
        runs = self._runs[whole]
        key = self._key(self._gather(batch, side))
        known = runs.get(key, [])
        if all(one is not found for _, one in known):
            keep_newest(runs, KEPT)[key] = [(run(), found), *known][:KINDS]


def bind(
    found: Specialization,
    finish: Callable[[Any], Any],
    *,
    turn: BufferTurn,
    times: FillTimes,
    graphs: GraphSet[Any] | None = None,
    hosts: HostReads | None = None,
    launch: Callable[[], object] | None = None,
    device: Sequence[Computation] = (),
    holds: Sequence[Holds] = (),
) -> Run:
    """Make a bound step, with everything that it needs in local names.

    Args:
        found: The specialization that fills the slots.
        finish: Does the rest with the batch, once the slots are filled.
        turn: Of the memory that is filled.
        times: Takes the time of some fills.
        graphs: The runner's graphs, whose streams a fill waits for.
        hosts: What device work reads of host slots; None where there are none.
        launch: What a fill does after it has written, such as a launch of the kernel.
        device: What the device computes from slots and the batch, where the graph does not do it.
        holds: What must be true of a batch beside its sources.

    """
    take, write, forks, also = found.take, found.write, FORKS.count, _all_of(holds)
    stream = None if graphs is None else graphs.filler.stream
    clock, order, neighbours = (turn, None, ()) if graphs is None else (graphs.clock, graphs.order, turn.neighbours)
    now, note, modes, gradients, left, start = time.perf_counter_ns, times.add, FUNCTION_MODES, GRADIENTS, FIRST, 0

    def run(batch: Any, side: Side, sources: Sources) -> Any:
        nonlocal left, start
        left -= 1
        if left <= 0:
            start = now()
        if forks != FORKS.count or (also is not None and not also(batch, side)):
            return MISS
        if stream is not None and (
            not (here := stream()) == turn.stream == clock.stream or (neighbours and not turn.follows(here))
        ):
            order()  # type: ignore[misc] # before sources are read, which may lie in slots
        if (taken := below_modes(take, sources) if modes() else take(sources)) is None:
            return MISS
        turn.fills += 1  # before the first write: what follows may raise in the middle
        if hosts is not None:
            hosts.wait()
        without_gradients(write, taken, batch) if gradients() else write(taken, batch)
        if launch is not None:
            launch()
        for one in device:
            without_gradients(one.run, batch) if gradients() else one.run(batch)
        if left <= 0:
            note(now() - start)
            left = EVERY
        return finish(batch)

    return run


def _all_of(holds: Sequence[Holds]) -> Holds | None:
    """What is asked of a batch beside its sources: None where there is nothing, which is the fastest."""
    if len(holds) > 1:
        return lambda batch, side: all(one(batch, side) for one in holds)
    return holds[0] if holds else None


def _key_of(size: Sizer, names: Sequence[str], optional: Sequence[str]) -> Key:
    """Make a call that tells from sources which sizes they have, and which optional ones are there.

    Two batches that are alike in that have the same live sizes, and lack the same slots.
    """
    axes = [[(names.index(gauge.slot), gauge) for gauge in gauges] for gauges in size.gauges]
    firsts = [(place, gauge.dim) for (place, gauge), *_ in axes]
    absent = [names.index(name) for name in optional]

    def told(sources: Sources) -> Hashable:
        present = (next(((one, sources[at]) for at, one in axis if sources[at] is not None), None) for axis in axes)
        return (
            *[0 if one is None else one[0].size(one[1]) for one in present],
            *[sources[at] is None for at in absent],
        )

    def sizes(sources: Sources) -> Hashable:
        found: list[Any] = []
        try:
            for place, dim in firsts:
                source = sources[place]
                found.append(source.shape[dim] if dim or type(source) is not list else len(source))
        except (*NOT_TOLD, IndexError):  # nested lists, and what the long way refuses
            return told(sources)
        if absent:
            found += [sources[place] is None for place in absent]
        return tuple(found)

    return sizes if size.required else told
