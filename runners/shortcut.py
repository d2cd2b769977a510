"""Shortcuts: a whole step that was done before in the same way, as straight-line code.

The general path sizes, routes, packs and counts through as many objects as there are nouns in it. In steady state all
of them give the answers that they gave before, and what tells so is one guard over the sources. A shortcut is made of
those answers, for one live size: whatever differs goes the general way, which is also the only one that refuses.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias

import attrs
import torch

from ..dataflow.caches import keep_newest
from ..dataflow.errors import BatchError
from ..dataflow.fused import FusedFill
from ..dataflow.gather import Gather
from ..dataflow.limits import Limits
from ..dataflow.manifest import Manifest
from ..dataflow.ready import Ready
from ..dataflow.sizing import Sizer
from ..dataflow.sources import NO_SIDE
from .captured import FORKS, Captured
from .decision import Repeated, Tally
from .filltimes import EVERY
from .graphs import GraphSet
from .stage import V

if TYPE_CHECKING:
    from .ranks.routing import Joint
    from .router import Router

MISS: Final = object()
"""What a shortcut answers where it does not hold."""
KEPT: Final = 1024
"""Live sizes that one runner has shortcuts for; the oldest goes first."""
_POINTER: Final = torch.Tensor.data_ptr


Run: TypeAlias = Callable[[Any], Any]


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

    def __call__(self, batch: Any) -> bool:
        return all(value is None for value in self.gather(batch, NO_SIDE))


def _never(batch: Any) -> Any:
    """No shortcut."""
    del batch
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
        holds: Sequence[Callable[[Any], bool]] = (),
    ) -> None:
        self._repeating = repeating
        self._holds = tuple(holds)
        self._graphs = graphs
        self._sizes = size.sizes
        self._tally = tally
        self._known: dict[tuple[int, ...], Shortcut] = {}
        self._runs: dict[tuple[int, ...], Run] = {}
        self._last: Run = _never

    @classmethod
    def of(
        cls, graphs: GraphSet[V], size: Sizer, tally: Tally, router: "Router | Joint", limits: Limits | None
    ) -> "Shortcuts[V] | None":
        """Those of a runner whose fills are part of graphs, where required sources tell all sizes; None of others.

        Nor are there any where other ranks are asked before each step.
        """
        own = router.alone
        if own is None or graphs.filler.lowering != "in_graph" or not size.required:
            return None
        holds = [own.same_fields] if own.decides_by_fields else []
        holds += [limits.allow] if limits is not None else []
        return cls(graphs, size, tally, router.repeating, holds)

    def run(self, batch: Any) -> Any:
        """The outputs of a step that goes as one before it; MISS where nothing was done."""
        outputs = self._last(batch)  # sizes stay the same more often than not, and its guard tells
        return self._other(batch) if outputs is MISS else outputs

    def _other(self, batch: Any) -> Any:
        try:
            run = self._runs.get(self._sizes(batch, NO_SIDE), _never)
        except BatchError:  # which the general way words better
            return MISS
        if run is self._last:
            return MISS
        self._last = run
        return run(batch)

    def learn(self, batch: Any, captured: Captured, live: tuple[int, ...], rows: int) -> None:
        """Remember how a step was done, if it was by an upload and a replay."""
        fused = captured.filling.fused
        ready = fused.fill.ready(live) if fused is not None else None
        if fused is None or ready is None or not ready.manifests or self._graphs.filler.hosts.notes:
            return
        manifest: Manifest = ready.manifests[0]
        sizes = self._sizes(batch, NO_SIDE)
        known = self._known.get(sizes)
        if known is not None and known.manifest is manifest:
            return
        made = Shortcut(captured, rows, manifest, self._tally.repeats(captured.rows, rows))
        keep_newest(self._known, KEPT)[sizes] = made
        make = self._straight if manifest.is_plain and ready.plain else self._mixed
        self._last = keep_newest(self._runs, KEPT)[sizes] = self._repeating(make(made, fused, ready), (*live, rows))

    def _also(self, fused: FusedFill) -> Callable[[Any], bool] | None:
        """What is asked of a batch beside its sources: None where there is nothing, which is the fastest."""
        slots = self._graphs.stage.declaration.slots
        missing = [source for name in fused.fill.plan.absent if (source := slots[name].reads(name)) is not None]
        asked: list[Callable[[Any], bool]] = [*self._holds]
        if missing:
            asked.append(_Absent(Gather(missing)))
        turn = self._graphs.buffers.turn
        if turn.neighbours:
            asked.append(lambda _: turn.follows(turn.stream))
        if len(asked) > 1:
            return lambda batch: all(holds(batch) for holds in asked)
        return asked[0] if asked else None

    def _straight(self, made: Shortcut, fused: FusedFill, ready: Ready) -> Run:
        """The step with everything that it needs in local names."""
        captured, clock, stream = made.captured, self._graphs.clock, self._graphs.filler.stream
        gather, feed, buffers = fused.fill.gather, fused.feed, self._graphs.buffers
        ledger, turn, neighbours = buffers.ledger, buffers.turn, bool(buffers.turn.neighbours)
        guard, known, words_for = made.manifest.guard, made.manifest.known.get, made.manifest.words
        replay, outputs, forks = captured.graph.replay, self._graphs.outputs, FORKS.count
        rows, also, values, counted = made.rows, self._also(fused), _values_of(fused, ready), made.counted
        now, note, due, start = time.perf_counter_ns, counted.times.add, counted.steps + 1, 0

        def run(batch: Any) -> Any:
            nonlocal due, start
            done = counted.steps
            if done >= due:
                start = now()
            if also is not None and not also(batch):
                return MISS
            sources = gather(batch, NO_SIDE)
            if not guard(*sources) or not stream() == turn.stream == clock.stream or forks != FORKS.count:
                return MISS
            pointers = tuple(map(_POINTER, sources))
            words = known(pointers) or words_for(pointers, sources)
            if words is None:
                return MISS
            if values is not None:
                words += values(batch)
            if neighbours:
                turn.fills += 1
            ledger.stamp = buffers.mine = ready
            buffers.unmarked = True
            feed.arm(words, sources)
            if done >= due:
                note(now() - start)
                due = done + EVERY
            replay()
            clock.replays += 1
            counted.steps = done + 1
            return outputs(captured, rows)

        return run

    def _mixed(self, made: Shortcut, fused: FusedFill, ready: Ready) -> Run:
        """The same where sources are host data, or strided, or some slots are filled apart."""
        captured, clock, stream = made.captured, self._graphs.clock, self._graphs.filler.stream
        gather, feed, buffers = fused.fill.gather, fused.feed, self._graphs.buffers
        ledger, turn, neighbours = buffers.ledger, buffers.turn, bool(buffers.turn.neighbours)
        pack, values = made.manifest.pack, fused.values
        replay, outputs, forks = captured.graph.replay, self._graphs.outputs, FORKS.count
        rows, also, counted = made.rows, self._also(fused), made.counted
        now, note, due, start = time.perf_counter_ns, counted.times.add, counted.steps + 1, 0
        apart = None if ready.plain else fused.fill.write

        def run(batch: Any) -> Any:
            nonlocal due, start
            done = counted.steps
            if done >= due:
                start = now()
            if also is not None and not also(batch):
                return MISS
            sources = gather(batch, NO_SIDE)
            packed = pack(sources)
            if packed is None or not stream() == turn.stream == clock.stream or forks != FORKS.count:
                return MISS
            words, data, kept = packed
            if neighbours:  # before the first write: what follows may raise in the middle
                turn.fills += 1
            if apart is not None:
                apart(ready, sources, batch)
            words = b"".join((words, *values(ready, batch), data))
            ledger.stamp = buffers.mine = ready
            buffers.unmarked = True
            feed.arm(words, kept)
            if done >= due:
                note(now() - start)
                due = done + EVERY
            replay()
            clock.replays += 1
            counted.steps = done + 1
            return outputs(captured, rows)

        return run
