"""Shortcuts: a whole step that was done before in the same way, as straight-line code.

The general path sizes, routes, packs and counts through as many objects as there are nouns in it. In steady state all
of them give the answers that they gave before, and what tells so is one guard over the sources. A shortcut is made of
those answers, for one live size: whatever differs goes the general way, which is also the only one that refuses.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeAlias

import attrs

from ..dataflow.bucket import Absent
from ..dataflow.caches import keep_newest
from ..dataflow.errors import BatchError
from ..dataflow.fused import FusedFill
from ..dataflow.gather import Gather
from ..dataflow.guard import below_modes
from ..dataflow.limits import Limits
from ..dataflow.manifest import Manifest
from ..dataflow.ready import Ready
from ..dataflow.sizing import Sizer
from ..dataflow.sources import Side
from .captured import FORKS, Captured
from .coordination import Coordinator
from .decision import Repeated, Tally
from .filltimes import EVERY
from .graphs import GraphSet
from .router import Router
from .stage import V

MISS: Final = object()
"""What a shortcut answers where it does not hold."""
KEPT: Final = 1024
"""Live sizes, each with a pattern of absent slots, that one runner has shortcuts for; the oldest goes first."""
MIXTURES: Final = 4
"""Kinds of sources that one of these has shortcuts for."""

Holds: TypeAlias = Callable[[Any, Side], bool]
Run: TypeAlias = Callable[[Any, Side], Any]
Key: TypeAlias = tuple[tuple[int, ...], Absent]
"""Sizes of the sources that tell live sizes, and absent slots."""


@attrs.define(eq=False)
class Shortcut:
    """One live size's whole step. counted: the runner's own count of such steps."""

    captured: Captured
    rows: int
    manifest: Manifest
    counted: Repeated


@attrs.frozen(eq=False)
class _Absent:
    """Whether a batch comes without certain slots."""

    gather: Gather

    def __call__(self, batch: Any, side: Side) -> bool:
        return all(value is None for value in self.gather(batch, side))


def _never(batch: Any, side: Side) -> Any:
    """No shortcut."""
    del batch, side
    return MISS


def _values_of(fused: FusedFill, ready: Ready) -> Callable[[Any], bytes] | None:
    """What makes bytes of the host's values; None where it computes none."""
    if not ready.packed:
        return None
    if len(ready.packed) == 1:
        return ready.packed[0].bytes_of
    return lambda batch: b"".join(fused.values(ready, batch))


class Shortcuts(Generic[V]):
    """The shortcuts of one runner whose graphs begin with their fill.

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
        self._sizes = size.sizes
        self._tally = tally
        self._runs: dict[Key, list[tuple[Manifest, Run]]] = {}
        self._last: Run = _never

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
        """Those of a runner whose fills are part of graphs, where required sources tell all sizes; None of others.

        Nor are there any where other ranks are asked before each step.
        """
        if not coordinator.quiet or graphs.filler.lowering != "in_graph" or not size.required:
            return None
        holds: list[Holds] = [lambda batch, _: router.same_fields(batch)] if router.decides_by_fields else []
        holds += [limits.allow] if limits is not None else []
        return cls(graphs, size, tally, coordinator.repeated, holds)

    def run(self, batch: Any, side: Side) -> Any:
        """The outputs of a step that goes as one before it; MISS where nothing was done."""
        if side and self._arguments is not None and not self._arguments.issuperset(side):
            return MISS  # the general way refuses it
        outputs = self._last(batch, side)  # steps are alike more often than not, and its guard tells
        return self._other(batch, side) if outputs is MISS else outputs

    def _other(self, batch: Any, side: Side) -> Any:
        try:
            runs = self._runs.get((self._sizes(batch, side), self._graphs.stage.absent(batch, side)), ())
        except (BatchError, TypeError):  # which the general way words better
            return MISS
        last = self._last
        for _, run in runs:
            outputs = MISS if run is last else run(batch, side)
            if outputs is not MISS:
                self._last = run
                return outputs
        return MISS

    def learn(self, batch: Any, side: Side, captured: Captured, live: tuple[int, ...], rows: int) -> None:
        """Remember how a step was done, if it was by an upload and a replay."""
        fused = captured.filling.fused
        ready = fused.fill.ready(live) if fused is not None else None
        if fused is None or ready is None or not ready.manifests:
            return
        manifest: Manifest = ready.manifests[0]
        key = self._sizes(batch, side), self._graphs.stage.absent(batch, side)
        known = self._runs.get(key, [])
        if any(one is manifest for one, _ in known):
            return
        made = Shortcut(captured, rows, manifest, self._tally.repeats(captured.rows, rows))
        self._last = run = self._repeating(self._run(made, fused, ready), (*live, rows))
        keep_newest(self._runs, KEPT)[key] = [(manifest, run), *known][:MIXTURES]

    def _also(self, fused: FusedFill) -> Holds | None:
        """What is asked of a batch beside its sources: None where there is nothing, which is the fastest."""
        slots = self._graphs.stage.declaration.slots
        missing = [source for name in fused.fill.plan.absent if (source := slots[name].reads(name)) is not None]
        asked = [*self._holds]
        if missing:
            asked.append(_Absent(Gather(missing)))
        if len(asked) > 1:
            return lambda batch, side: all(holds(batch, side) for holds in asked)
        return asked[0] if asked else None

    def _order(self) -> None:
        """Let this step wait for what was handed to other streams."""
        filler, turn, clock = self._graphs.filler, self._graphs.buffers.turn, self._graphs.clock
        last = turn.stream
        filler.order()
        clock.stream = turn.stream if clock.stream == last else filler.follow(clock.stream)

    def _run(self, made: Shortcut, fused: FusedFill, ready: Ready) -> Run:  # noqa: C901 - in one piece, as `run` is
        """The step with everything that it needs in local names."""
        captured, clock, filler = made.captured, self._graphs.clock, self._graphs.filler
        gather, feed, buffers, stream = fused.fill.gather, fused.feed, self._graphs.buffers, filler.stream
        ledger, turn, neighbours = buffers.ledger, buffers.turn, bool(buffers.turn.neighbours)
        pack, kept, values = made.manifest.pack, made.manifest.kept, _values_of(fused, ready)
        hosts, apart = filler.hosts if filler.hosts.possible else None, None if ready.plain else fused.fill.write
        replay, outputs, forks, order = captured.graph.replay, self._graphs.outputs, FORKS.count, self._order
        rows, also, counted = made.rows, self._also(fused), made.counted
        now, note, due, start = time.perf_counter_ns, counted.times.add, counted.steps + 1, 0

        def run(batch: Any, side: Side) -> Any:  # noqa: C901 - each call saved is a fiftieth of a step
            nonlocal due, start
            done = counted.steps
            if done >= due:
                start = now()
            if forks != FORKS.count or (also is not None and not also(batch, side)):
                return MISS
            if not (here := stream()) == turn.stream == clock.stream or (neighbours and not turn.follows(here)):
                order()  # before sources are read, which may lie in slots
            if (packed := below_modes(pack, gather(batch, side))) is None:
                return MISS
            words, data, sources = packed
            if neighbours:
                turn.fills += 1  # before the first write: what follows may raise in the middle
            if hosts is not None:
                hosts.wait()
            if apart is not None:
                apart(ready, sources, batch)
            if values is not None:
                words += values(batch)
            if data:
                words += data
            ledger.stamp = buffers.mine = ready
            buffers.unmarked = True
            feed.arm(words, kept(sources))
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
