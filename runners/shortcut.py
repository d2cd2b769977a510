"""Shortcuts: a whole step that was done before in the same way, as straight-line code.

The general path sizes, routes, packs and counts through as many objects as there are nouns in it. In steady state all
of them give the answers that they gave before, and what tells so is one guard over the sources. A shortcut is made of
those answers, for one live size: whatever differs goes the general way, which is also the only one that refuses.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, Generic, TypeAlias

from ..dataflow.bucket import KINDS, gathering
from ..dataflow.caches import keep_newest
from ..dataflow.errors import BatchError
from ..dataflow.gather import Sources
from ..dataflow.guard import FUNCTION_MODES, below_modes
from ..dataflow.limits import Limits
from ..dataflow.sizing import Sizer
from ..dataflow.sources import Side
from ..dataflow.specialization import Specialization
from .captured import FORKS, Captured
from .coordination import Coordinator
from .decision import Tally
from .filltimes import EVERY
from .graphs import GraphSet
from .router import Router
from .stage import V

MISS: Final = object()
"""What a shortcut answers where it does not hold."""
KEPT: Final = 1024
"""Live sizes, each with a pattern of absent slots, that one runner has shortcuts for; the oldest goes first."""

Holds: TypeAlias = Callable[[Any, Side], bool]
Run: TypeAlias = Callable[..., Any]
Key: TypeAlias = Callable[[Sources], Hashable]
"""Sizes of the sources that tell live sizes, and which optional sources are there."""


class Shortcuts(Generic[V]):
    """The shortcuts of one runner, whose graphs are replayed right after their fill.

    tally: where they are counted. repeating: what a step of some live sizes becomes for those who are to know of it.
    holds: what must be true of a batch beside its sources for its steps to go as those before.
    """

    def __init__(
        self,
        graphs: GraphSet[V],
        size: Sizer,
        tally: Tally,
        repeating: Callable[[Run, tuple[int, ...]], Run],
        holds: Sequence[Holds] = (),
    ) -> None:
        self._repeating = repeating
        self._holds = tuple(holds)
        self._graphs = graphs
        self._arguments = graphs.stage.declaration.arguments
        self._tally = tally
        declaration = graphs.stage.declaration
        names, self._gather = gathering(declaration)
        self._key = _key_of(size.told(names), [names.index(name) for name, _ in declaration.optional])
        self._runs: dict[Hashable, list[tuple[Run, Specialization]]] = {}

    @classmethod
    def of(
        cls,
        graphs: GraphSet[V],
        size: Sizer,
        tally: Tally,
        router: Router,
        coordinator: Coordinator,
        limits: Limits | None,
    ) -> "Shortcuts[V] | None":
        """Those of a runner where required sources tell all sizes; None of others, and of fills slot by slot.

        Nor are there any where other ranks are asked before each step.
        """
        if not coordinator.quiet or graphs.filler.lowering == "slot_by_slot" or not size.required:
            return None
        holds: list[Holds] = [lambda batch, _: router.same_fields(batch)] if router.decides_by_fields else []
        holds += [limits.allow] if limits is not None else []
        return cls(graphs, size, tally, coordinator.repeated, holds)

    def run(self, batch: Any, side: Side) -> Any:
        """The outputs of a step that goes as one before it; MISS where nothing was done."""
        if side and self._arguments is not None and not self._arguments.issuperset(side):
            return MISS  # the general way refuses it
        sources = self._gather(batch, side)
        try:
            known = self._runs.get(self._key(sources))
        except (BatchError, TypeError):  # which the general way words better
            return MISS
        if known is None:
            return MISS
        outputs = known[0][0](batch, side, sources)
        return outputs if outputs is not MISS or len(known) == 1 else self._other(known, batch, side, sources)

    def _other(self, known: list[tuple[Run, Specialization]], batch: Any, side: Side, sources: Sources) -> Any:
        """The same by another of the kinds that there are; it comes first from then on."""
        for place in range(1, len(known)):
            outputs = known[place][0](batch, side, sources)
            if outputs is not MISS:
                known.insert(0, known.pop(place))
                return outputs
        return MISS

    def learn(self, batch: Any, side: Side, captured: Captured, live: tuple[int, ...], rows: int) -> None:
        """Remember how a step was done."""
        found = captured.filling.bucket.latest(live, self._graphs.stage.absent(batch, side))
        key = self._key(self._gather(batch, side))
        known = self._runs.get(key, [])
        if all(one is not found for _, one in known):
            run = self._repeating(self._run(found, captured, rows), (*live, rows))
            keep_newest(self._runs, KEPT)[key] = [(run, found), *known][:KINDS]

    def _also(self) -> Holds | None:
        """What is asked of a batch beside its sources: None where there is nothing, which is the fastest."""
        asked = self._holds
        if len(asked) > 1:
            return lambda batch, side: all(holds(batch, side) for holds in asked)
        return asked[0] if asked else None

    def _order(self) -> None:
        """Let this step wait for what was handed to other streams."""
        filler, turn, clock = self._graphs.filler, self._graphs.buffers.turn, self._graphs.clock
        last = turn.stream
        filler.order()
        clock.stream = turn.stream if clock.stream == last else filler.follow(clock.stream)

    def _run(self, found: Specialization, captured: Captured, rows: int) -> Run:  # noqa: C901 - in one piece, as `run` is
        """The step with everything that it needs in local names."""
        clock, filler, turn = self._graphs.clock, self._graphs.filler, self._graphs.buffers.turn
        take, write, stream, neighbours = found.take, found.write, filler.stream, bool(turn.neighbours)
        hosts = filler.hosts if filler.hosts.possible else None
        alone = captured.filling.alone.replay if filler.lowering == "fused" and captured.filling.alone else None
        replay, outputs, forks, order = captured.graph.replay, self._graphs.outputs, FORKS.count, self._order
        also, counted = self._also(), self._tally.repeats(captured.rows, rows)
        now, note, due, start, modes = time.perf_counter_ns, counted.times.add, counted.steps + 1, 0, FUNCTION_MODES

        def run(batch: Any, side: Side, sources: Sources) -> Any:
            nonlocal due, start
            done = counted.steps
            if done >= due:
                start = now()
            if forks != FORKS.count or (also is not None and not also(batch, side)):
                return MISS
            if not (here := stream()) == turn.stream == clock.stream or (neighbours and not turn.follows(here)):
                order()  # before sources are read, which may lie in slots
            if (taken := below_modes(take, sources) if modes() else take(sources)) is None:
                return MISS
            if neighbours:
                turn.fills += 1  # before the first write: what follows may raise in the middle
            if hosts is not None:
                hosts.wait()
            write(taken, batch)
            if alone is not None:
                alone()
            if done >= due:
                note(now() - start)
                due = done + EVERY
            replay()
            clock.replays += 1
            counted.steps = done + 1
            if hosts is not None:
                hosts.note()
            return outputs(captured, rows)

        return run


def _key_of(told: Key, optional: Sequence[int]) -> Key:
    """What tells sizes, and which optional sources are there, where there are any."""
    if not optional:
        return told
    return lambda sources: (told(sources), *[sources[place] is None for place in optional])
