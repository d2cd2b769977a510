"""The base of runners that are a decode runner with a step, a width and outputs of their own."""

import abc
from collections.abc import Collection, Mapping
from typing import Any

from ..dataflow.capabilities import Lowering
from ..dataflow.plan import FillPlan
from ..dataflow.sources import Side
from .capture import CaptureReport
from .decision import Decision
from .decode import DecodeRunner
from .parts import Parts
from .runner import Runner
from .stage import V
from .watching import Watch


class Through(Runner[V]):
    """Says what a decode runner says, of the one that it is made of."""

    @property
    @abc.abstractmethod
    def decode(self) -> DecodeRunner[V]:
        """The decode runner that captures and replays."""

    def capture(self) -> CaptureReport:
        """Capture every bucket: see `DecodeRunner.capture`."""
        return self.decode.capture()

    @property
    def report(self) -> CaptureReport | None:
        """What the capture came to, or None before it."""
        return self.decode.report

    @property
    def lowering(self) -> Lowering:
        """How fills are run."""
        return self.decode.lowering

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
        return self.decode.fill(batch, **side)

    def _replay_view(self, view: V) -> Any:
        return self.decode.replay(view)

    def inputs(self, bucket: int, absent: Collection[str] = ()) -> V:
        """A bucket's slots, for a producer that writes them itself: see `DecodeRunner.inputs`."""
        return self.decode.inputs(bucket, absent)

    def decide(self, batch: Any, **side: Any) -> Decision:
        """The path that a batch would take, its bucket, and why."""
        return self.decode.decide(batch, **side)

    def plan(
        self,
        bucket: int,
        absent: Collection[str] = (),
        in_place: Collection[str] = (),
        hosted: Collection[str] = (),
    ) -> FillPlan:
        """How one bucket is filled."""
        return self.decode.plan(bucket, absent, in_place, hosted)

    def stats(self) -> Mapping[str, Any]:
        """Steps, buckets, reasons and lowerings as plain data: see `DecodeRunner.stats`."""
        return self.decode.stats()
