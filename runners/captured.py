"""What a capture leaves: the graph of a bucket, the order that it was made by, and the clock of its outputs."""

import os
import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import attrs
import torch

from ..backends.base import Graph
from ..dataflow.axes import Sizes
from ..dataflow.bucket import Absent
from ..dataflow.guard import own_guard
from ..dataflow.views import alias
from .config import RunnerConfig
from .coordination import Coordinator, Step
from .filler import Filling
from .outputs import live_rows, map_tensors


@attrs.define(eq=False)
class Captured:
    """One bucket for one pattern of absent slots: its graph, of the call `step`.

    verified: its addresses were found unmoved.
    """

    rows: int
    filling: Filling
    graph: Graph
    step: Step
    verified: bool = False

    def live(self, rows: int | None) -> Any:
        """The outputs' first rows, or all of them; never the graph's own tensors, whose shape a caller might change."""
        outputs = self.graph.outputs
        return map_tensors(outputs, alias) if rows is None else live_rows(outputs, rows)

    def cut(self, rows: int | None) -> Callable[[], Any]:
        """A call that does this after each replay of a bound step.

        A tensor that was handed out before is again, unless the graph has other outputs since, or someone changed it in
        place.
        """
        graph, last, kept, guard, address = self.graph, None, None, own_guard([]), 0

        def cut() -> Any:
            nonlocal last, kept, guard, address
            whole = graph.outputs
            if type(whole) is not torch.Tensor:  # a container may be changed by whoever gets it
                return self.live(rows)
            is_last = whole is last
            if is_last and kept is not None and guard(kept) and kept.data_ptr() == address:
                return kept
            outputs = alias(whole) if rows is None else whole[:rows]
            if is_last:  # a backend may make new ones at each replay, of which nothing is worth keeping
                kept, guard, address = outputs, own_guard([outputs]), outputs.data_ptr()
            else:
                last, kept = whole, None
            return outputs

        return cut


@attrs.frozen
class Order:
    """What is to be captured: buckets and their sizes, patterns of absent slots, and how.

    warmups: runs before each capture, of which the look at the step's state may be the first.
    """

    buckets: Mapping[int, Sizes]
    patterns: Collection[Absent]
    warmups: int
    error_mode: str | None
    progress: bool
    lazy: bool
    runner: str
    coordinator: Coordinator

    @classmethod
    def of(
        cls,
        config: RunnerConfig,
        buckets: Mapping[int, Sizes],
        patterns: Collection[Absent],
        runner: str,
        coordinator: Coordinator,
    ) -> "Order":
        """What a configuration asks for: none where its graphs are off. Of several ranks one shows a bar."""
        wanted = buckets if config.graphs else {}
        shown = config.progress and coordinator.rank == 0
        return cls(wanted, patterns, config.warmups, config.error_mode, shown, config.lazy, runner, coordinator)

    def warmups_after_look(self) -> int:
        """Runs between the look and the capture.

        The look is a warm-up where nothing can be compiled: compiled functions run as they were written under it. Of
        several ranks all run a step equally often, whatever each has imported.
        """
        looked = self.coordinator.size == 1 and "torch._dynamo" not in sys.modules
        return max(0, self.warmups - 1) if looked else self.warmups


@attrs.define(eq=False)
class Forks:
    """How often this process came out of a fork."""

    count: int = 0

    def note(self) -> None:
        """One more."""
        self.count += 1


FORKS: Final = Forks()
os.register_at_fork(after_in_child=FORKS.note)


@attrs.define(eq=False)
class Clock:
    """Replays so far in one pool of graph memory: each may overwrite what another graph of the pool handed out.

    stream: the one that the last of them was on.
    """

    replays: int = 0
    stream: int | None = None


_CLOCKS: Final["weakref.WeakKeyDictionary[object, Clock]"] = weakref.WeakKeyDictionary()


def clock_of(pool: object | None) -> Clock:
    """The clock of all runners whose graphs share a pool; one of its own where there is none."""
    return Clock() if pool is None else _CLOCKS.setdefault(pool, Clock())
