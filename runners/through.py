"""The base of runners that are a decode runner with a step, a width and outputs of their own."""

import abc
from collections.abc import Collection
from typing import Any

from ..dataflow.sources import Side
from .capture import CaptureReport
from .decision import Decision
from .decode import DecodeRunner
from .graphs import GraphSet
from .parts import Parts
from .runner import GraphRunner
from .stage import V
from .watching import Watch


class Through(GraphRunner[V]):
    """Says what a decode runner says, of the one that it is made of."""

    @property
    @abc.abstractmethod
    def decode(self) -> DecodeRunner[V]:
        """The decode runner that captures and replays."""

    def capture(self) -> CaptureReport:
        """Capture every bucket: see `DecodeRunner.capture`."""
        return self.decode.capture()

    @property
    def graphs(self) -> GraphSet[V]:
        """The captured buckets, and the buffers that they read."""
        return self.decode.graphs

    @property
    def parts(self) -> Parts[V]:
        """What it is made of, for tools that look at runners."""
        return self.decode.parts

    @property
    def watch(self) -> Watch:
        """Who is told of each step."""
        return self.decode.watch

    def __call__(self, batch: Any, **side: Any) -> Any:
        """Run one step and return its outputs for the live rows, valid until the next replay."""
        return self.decode(batch, **side)

    def _step(self, batch: Any, side: Side) -> Any:
        return self.decode(batch, **side)

    def _fill_view(self, batch: Any, side: Side) -> V:
        return self.decode._fill_view(batch, side)  # noqa: SLF001 - its watchers are these, and were told

    def _replay_view(self, view: V) -> Any:
        return self.decode._replay_view(view)  # noqa: SLF001 - likewise

    def inputs(self, bucket: int, absent: Collection[str] = ()) -> V:
        """A bucket's slots, for a producer that writes them itself: see `DecodeRunner.inputs`."""
        return self.decode.inputs(bucket, absent)

    def decide(self, batch: Any, **side: Any) -> Decision:
        """The path that a batch would take, its bucket, and why."""
        return self.decode.decide(batch, **side)
