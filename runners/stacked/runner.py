"""What every runner offers of which only a part is captured, by tokens."""

import abc
from collections.abc import Collection, Mapping
from typing import Any, Generic

from ...dataflow.capabilities import Lowering
from ...dataflow.plan import FillPlan
from ..buckets import Buckets
from ..capture import CaptureReport
from ..decision import Decision
from ..stage import V
from .runs import StackRuns


class StackRunner(abc.ABC, Generic[V]):
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

    def __call__(self, batch: Any, **side: Any) -> Any:
        """Run one step and return its outputs, valid until the next replay.

        Raises BatchError where the batch does not fit its declaration, ReplayError before `capture`.
        """
        return self.runs.step(batch, side)

    def fill(self, batch: Any, **side: Any) -> V:
        """Fill the inputs from a batch and return the view: token slots padded to the bucket, request slots live.

        Raises as a call does; the buffers, the graphs and the batch are then as they were.
        """
        return self.runs.fill(batch, side)

    def replay(self, view: V) -> Any:
        """Run the step on the view that was filled last. ReplayError where another fill has overwritten it."""
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
