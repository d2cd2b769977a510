"""What every runner offers of which only a part is captured, by tokens."""

import abc
from collections.abc import Collection, Mapping
from typing import Any

from ...dataflow.capabilities import Lowering
from ...dataflow.plan import FillPlan
from ...dataflow.sources import Side
from ..buckets import Buckets
from ..capture import CaptureReport
from ..decision import Decision
from ..parts import Parts
from ..runner import Runner
from ..stage import V
from ..watching import Watch
from .runs import StackRuns


class StackRunner(Runner[V]):
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
        return self.runs.capture()

    @property
    def buckets(self) -> Buckets:
        """The tokens that graphs are captured for."""
        return self.runs.buckets

    @property
    def report(self) -> CaptureReport | None:
        """What the capture came to, or None before it."""
        return self.runs.graphs.report

    @property
    def lowering(self) -> Lowering:
        """How fills are run; never inside a graph, because what runs before it reads the slots, too."""
        return self.runs.lowering

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

    def plan(
        self,
        bucket: int,
        absent: Collection[str] = (),
        in_place: Collection[str] = (),
        hosted: Collection[str] = (),
    ) -> FillPlan:
        """How one bucket is filled, for batches without some optional slots, or with some in place or on the host."""
        return self.runs.plan(bucket, absent, in_place, hosted)

    def stats(self) -> Mapping[str, Any]:
        """Plain data: steps by path, live and padded tokens and waste per bucket, eager steps by reason, lowerings."""
        return self.runs.stats()
