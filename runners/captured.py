"""What a capture leaves: the graph of a bucket, and the clock of its outputs."""

import os
import weakref
from collections.abc import Callable
from typing import Any, Final

import attrs
import torch

from ..backends.base import Graph
from ..dataflow.bucket import Bucket
from ..dataflow.views import alias
from .outputs import live_rows, map_tensors


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

    def live(self, rows: int | None) -> Any:
        """The outputs' first rows, or all of them; never the graph's own tensors, whose shape a caller might change."""
        outputs = self.graph.outputs
        return map_tensors(outputs, alias) if rows is None else live_rows(outputs, rows)


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
