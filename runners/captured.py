"""What a capture leaves: the graph of a bucket, the order that it was made by, and the clock of its outputs."""

import os
import weakref
from collections.abc import Callable
from typing import Any, Final

import attrs
import torch

from ..backends.base import Graph
from ..dataflow.bucket import Bucket
from ..dataflow.guard import Guard, own_guard
from ..dataflow.specialization import keep_newest
from ..dataflow.views import alias
from .outputs import live_rows, map_tensors

KEPT: Final = 1024
"""Live sizes whose outputs one graph remembers, cut."""


@attrs.define(eq=False)
class Filling:
    """One bucket's fills for one pattern of absent slots.

    kernel: what launches the kernel, `table` what it reads. alone: a graph of the kernel by itself, to be replayed
    where a fill must be done before the step's graph.
    """

    bucket: Bucket
    table: torch.Tensor | None = None
    kernel: Any = None
    alone: Graph | None = None


@attrs.define(eq=False)
class Captured:
    """One bucket for one pattern of absent slots: its graph, of the call `step`.

    verified: its addresses were found unmoved.
    """

    rows: int
    filling: Filling
    graph: Graph
    step: Callable[[], Any]
    verified: bool = False
    _live: dict[int | None, tuple[torch.Tensor, Guard, int]] = attrs.field(factory=dict, init=False)
    _last: Any = attrs.field(default=None, init=False)

    def live(self, rows: int | None) -> Any:
        """The outputs' first rows, or all of them; never the graph's own tensors, whose shape a caller might change.

        What was handed out before is again, unless the graph has other outputs since, or someone changed it in place.
        """
        whole, known = self.graph.outputs, self._live.get(rows)
        is_last = whole is self._last
        if known is not None and is_last and known[1](known[0]) and known[0].data_ptr() == known[2]:
            return known[0]
        if type(whole) is not torch.Tensor:  # a container may be changed by whoever gets it
            return map_tensors(whole, alias) if rows is None else live_rows(whole, rows)
        outputs = alias(whole) if rows is None else whole[:rows]
        if is_last:
            keep_newest(self._live, KEPT)[rows] = outputs, own_guard([outputs]), outputs.data_ptr()
        else:  # a backend may make new ones at each replay, of which nothing is worth keeping
            self._live.clear()
            self._last = whole
        return outputs


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
