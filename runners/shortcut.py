"""Shortcuts: a whole step that was done before in the same way, as straight-line code.

The general path sizes, routes, packs and counts through as many objects as there are nouns in it. In steady state all
of them give the answers that they gave before, and what tells so is one guard over the sources. A shortcut is made of
those answers, for one live size: whatever differs goes the general way, which is also the only one that refuses.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeAlias

import attrs
import torch

from ..dataflow.caches import keep_newest
from ..dataflow.errors import BatchError
from ..dataflow.fused import FusedFill
from ..dataflow.gather import Gather
from ..dataflow.manifest import Manifest
from ..dataflow.ready import Ready
from ..dataflow.sizing import Sizer
from ..dataflow.sources import NO_SIDE
from .captured import FORKS, Captured
from .graphs import GraphSet
from .stage import V

MISS: Final = object()
"""What a shortcut answers where it does not hold."""
KEPT: Final = 1024
"""Live sizes that one runner has shortcuts for; the oldest goes first."""
_POINTER: Final = torch.Tensor.data_ptr


Run: TypeAlias = Callable[[Any], Any]
Count: TypeAlias = Callable[[Captured, int, int], None]


@attrs.define(eq=False)
class Shortcut:
    """One live size's whole step; `steps` are counted here, and go to the runner's books when someone asks."""

    captured: Captured
    rows: int
    manifest: Manifest
    steps: int = 0


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

    count: takes note of steps that were done, given their graph, their live rows, and how many. holds: what must be
    true of a batch beside its sources for its steps to go as those before.
    """

    def __init__(
        self, graphs: GraphSet[V], size: Sizer, count: Count, holds: Sequence[Callable[[Any], bool]] = ()
    ) -> None:
        self._holds = tuple(holds)
        self._graphs = graphs
        self._sizes = size.sizes
        self._count = count
        self._known: dict[tuple[int, ...], Shortcut] = {}
        self._runs: dict[tuple[int, ...], Run] = {}
        self._last: Run = _never

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
        if fused is None or ready is None or not ready.manifests:
            return
        manifest: Manifest = ready.manifests[0]
        sizes = self._sizes(batch, NO_SIDE)
        known = self._known.get(sizes)
        if known is not None and known.manifest is manifest:
            return
        if known is not None:
            self._settle(known)
        elif len(self._known) >= KEPT:
            self.settle()
        made = Shortcut(captured, rows, manifest)
        keep_newest(self._known, KEPT)[sizes] = made
        make = self._straight if manifest.is_plain and ready.plain else self._mixed
        self._last = keep_newest(self._runs, KEPT)[sizes] = make(made, fused, ready)

    def settle(self) -> None:
        """Hand over what was counted here."""
        for one in self._known.values():
            self._settle(one)

    def _settle(self, one: Shortcut) -> None:
        if one.steps:
            self._count(one.captured, one.rows, one.steps)
            one.steps = 0

    def _also(self, fused: FusedFill) -> Callable[[Any], bool] | None:
        """What is asked of a batch beside its sources: None where there is nothing, which is the fastest."""
        slots = self._graphs.stage.declaration.slots
        missing = [source for name in fused.fill.plan.absent if (source := slots[name].reads(name)) is not None]
        asked: list[Callable[[Any], bool]] = [*self._holds]
        if missing:
            asked.append(_Absent(Gather(missing)))
        if len(asked) > 1:
            return lambda batch: all(holds(batch) for holds in asked)
        return asked[0] if asked else None

    def _straight(self, made: Shortcut, fused: FusedFill, ready: Ready) -> Run:
        """The step with everything that it needs in local names."""
        captured, clock, filler = made.captured, self._graphs.clock, self._graphs.filler
        gather, feed, buffers = fused.fill.gather, fused.feed, self._graphs.buffers
        guard, known, words_for = made.manifest.guard, made.manifest.known.get, made.manifest.words
        stream, values = filler.stream, _values_of(fused, ready)
        replay, outputs, forks = captured.graph.replay, self._graphs.outputs, FORKS.count
        rows, also = made.rows, self._also(fused)

        def run(batch: Any) -> Any:
            if also is not None and not also(batch):
                return MISS
            sources = gather(batch, NO_SIDE)
            if not guard(*sources) or not stream() == filler.last_stream == clock.stream or forks != FORKS.count:
                return MISS
            pointers = tuple(map(_POINTER, sources))
            words = known(pointers) or words_for(pointers, sources)
            if words is None:
                return MISS
            if values is not None:
                words += values(batch)
            buffers.stamp = ready
            buffers.unmarked = True
            feed.arm(words, sources)
            replay()
            clock.replays += 1
            made.steps += 1
            return outputs(captured, rows)

        return run

    def _mixed(self, made: Shortcut, fused: FusedFill, ready: Ready) -> Run:
        """The same where sources are host data, or strided, or some slots are filled apart."""
        captured, clock, filler = made.captured, self._graphs.clock, self._graphs.filler
        gather, feed, buffers = fused.fill.gather, fused.feed, self._graphs.buffers
        pack, stream, values = made.manifest.pack, filler.stream, fused.values
        replay, outputs, forks = captured.graph.replay, self._graphs.outputs, FORKS.count
        rows, also = made.rows, self._also(fused)
        apart = None if ready.plain else fused.fill.write

        def run(batch: Any) -> Any:
            if also is not None and not also(batch):
                return MISS
            sources = gather(batch, NO_SIDE)
            packed = pack(sources)
            if packed is None or not stream() == filler.last_stream == clock.stream or forks != FORKS.count:
                return MISS
            words, data, kept = packed
            if apart is not None:
                apart(ready, sources, batch)
            words = b"".join((words, *values(ready, batch), data))
            buffers.stamp = ready
            buffers.unmarked = True
            feed.arm(words, kept)
            replay()
            clock.replays += 1
            made.steps += 1
            return outputs(captured, rows)

        return run
