"""Bound steps: a step as straight-line code, with everything that the batches before it found out.

The long way sizes a batch, routes it to a bucket and makes a specialization. A bound step repeats the answers, and one
guard over the sources says whether they still hold. Where they do not, the long way follows, which alone refuses.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ..dataflow.buffers import BufferTurn
from ..dataflow.computation import Computation
from ..dataflow.guard import FUNCTION_MODES, GRADIENTS, below_modes, without_gradients
from ..dataflow.sources import Side, Sources
from ..dataflow.specialization import MISS, Run, Specialization
from .captured import FORKS
from .decision import EVERY, FIRST, FillTimes
from .graphs import GraphSet
from .hostreads import HostReads

Holds: TypeAlias = Callable[[Any, Side], bool]


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
