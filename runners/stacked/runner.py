"""What every runner offers of which only a part is captured, by tokens."""

import abc
from typing import Any

from ...dataflow.sources import Side
from ..buckets import Buckets
from ..capture import CaptureReport
from ..decision import Decision
from ..graphs import GraphSet
from ..parts import Parts
from ..runner import GraphRunner
from ..stage import V
from ..watching import Watch
from .runs import StackRuns


class StackRunner(GraphRunner[V]):
    """A runner whose graphs are those of a stack. Subclasses are final, and say what of a step is captured."""

    @property
    @abc.abstractmethod
    def runs(self) -> StackRuns[V]:
        """The parts that it is made of."""

    def capture(self) -> CaptureReport:
        """Capture every bucket, the largest first; with `lazy`, each when the first batch comes for it.

        A bucket is captured on the declaration's `placeholder`, one request that owns all its tokens, and its graphs
        hold for any number of requests. Nothing is captured with `graphs` off. Raises CaptureError where buckets
        failed; the others are usable all the same, and `report` names both.
        """
        try:
            return self.runs.capture()
        finally:
            self._debug()

    @property
    def buckets(self) -> Buckets:
        """The tokens that graphs are captured for."""
        return self.runs.buckets

    @property
    def graphs(self) -> GraphSet[V]:
        """The captured buckets; no fill is inside one, because what runs before it reads the slots, too."""
        return self.runs.graphs

    @property
    def parts(self) -> Parts[V]:
        """What it is made of, for tools that look at runners."""
        return self.runs.parts

    @property
    def watch(self) -> Watch:
        """Who is told of each step."""
        return self.runs.watch

    def _step(self, batch: Any, side: Side) -> Any:
        return self.runs.step(batch, side)

    def _fill_view(self, batch: Any, side: Side) -> V:
        """Token slots padded to the bucket, request slots live."""
        return self.runs.fill(batch, side)

    def _replay_view(self, view: V) -> Any:
        return self.runs.replay(view)

    def decide(self, batch: Any, **side: Any) -> Decision:
        """The path that a batch would take, its bucket, and why."""
        return self.runs.decide(batch, side)
