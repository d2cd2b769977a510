"""The base of all runners: how a step is run, and what can be asked of any runner."""

import abc
from collections.abc import Collection
from typing import Any, Generic

from ..dataflow import log
from ..dataflow.capabilities import Lowering
from ..dataflow.plan import FillPlan
from ..dataflow.sources import Side
from .capture import CaptureReport
from .decision import Decision
from .graphs import GraphSet
from .idle import empty_batch
from .modes import watchers_of
from .opaque import opaque
from .parts import Parts
from .stage import V
from .statistics import Statistics, statistics_of
from .unique import Unique
from .watching import Watch


@opaque
class Runner(Unique, abc.ABC, Generic[V]):
    """Fills a declaration's slots from a batch and runs a step on the view. Subclasses are final, or abstract.

    A call is a fill and a replay, and watchers are told of both. A function under torch.compile may call it.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Keep the compiler out of a subclass' own methods, too."""
        super().__init_subclass__(**options)
        opaque(cls)

    @property
    @abc.abstractmethod
    def parts(self) -> Parts[V]:
        """What it is made of, for tools that look at runners."""

    @property
    @abc.abstractmethod
    def watch(self) -> Watch:
        """Who is told of each step."""

    def __call__(self, batch: Any, **side: Any) -> Any:
        """Run one step and return its outputs for the live rows, valid until the next replay.

        Raises BatchError where the batch does not fit its declaration, ReplayError before `capture`.
        """
        if self.watch.watchers:
            return self.replay(self.fill(batch, **side))
        return self._step(batch, side)

    def fill(self, batch: Any, **side: Any) -> V:
        """Fill the inputs from a batch and return the view that the step sees.

        Raises as a call does; the buffers, the graphs and the batch are then as they were.
        """
        if self.watch.watchers:
            return self.watch.fill(lambda: self._fill_view(batch, side), batch, side)
        return self._fill_view(batch, side)

    def replay(self, view: V) -> Any:
        """Run the step on the view that was filled last. ReplayError where another fill has overwritten it."""
        if self.watch.watchers:
            return self.watch.replay(lambda: self._replay_view(view), view)
        return self._replay_view(view)

    @abc.abstractmethod
    def _step(self, batch: Any, side: Side) -> Any:
        """A fill and a replay at once."""

    @abc.abstractmethod
    def _fill_view(self, batch: Any, side: Side) -> V:
        """A fill."""

    @abc.abstractmethod
    def _replay_view(self, view: V) -> Any:
        """A replay."""

    @abc.abstractmethod
    def decide(self, batch: Any, **side: Any) -> Decision:
        """The path that a batch would take, its bucket, and why. Raises as a call does, where sizes tell."""

    @property
    def agreed(self) -> Decision | None:
        """What all ranks did in the last step that they agreed on, and which rank forced it; None where none did."""
        return self.parts.coordinator.agreed

    def agree_ahead(self, batch: Any, **side: Any) -> None:
        """Tell the other ranks the sizes of the next step's batch, while this step still runs.

        The next call then finds what they told. Its batch must have these sizes, and be one that fills admit: the
        others go by it. Without other ranks, or where all get the same batches, nothing is done. Raises as `decide`.
        """
        parts, coordinator = self.parts, self.parts.coordinator
        if coordinator.quiet:
            parts.stage.declaration.check_side(side)
            return
        with coordinator.before():
            own, live = self.decide(batch, **side), parts.size(batch, side)
        coordinator.ahead(own, live)

    def idle(self, batch: Any = None, **side: Any) -> Any:
        """Take part in the others' step without a request: zero live rows; the outputs for none.

        Where all ranks are idle nothing is run, and None returned. batch: one without rows; made as the declaration has
        it, where none is given. Raises as a call does; BatchError where the batch has rows, ConfigError where one must
        be given, because a field has no default.
        """
        parts, coordinator = self.parts, self.parts.coordinator
        if coordinator.size == 1:
            parts.stage.declaration.check_side(side)
            return None
        with coordinator.before():
            empty, given = empty_batch(parts, batch, side)
            own, live = self.decide(empty, **given), parts.size(empty, given)
        return None if coordinator.idle(own, live) else self(empty, **given)

    def wait(self) -> None:
        """Wait until the device has done what was asked of it: the step that was called last, for one.

        With ranks for no longer than their `timeout`, because a captured collective waits for a lost rank for ever:
        RankError then names it, and the collectives of the group are aborted. All ranks call it as often.
        """
        parts = self.parts
        backend = parts.stage.backend
        parts.coordinator.wait(backend.event(), backend.device)

    def stats(self) -> Statistics:
        """Its books as plain data: what was counted so far, and some of the times of its fills."""
        return statistics_of(self.parts)

    def log_stats(self) -> None:
        """One event, `statistics`, with all of them."""
        parts = self.parts
        log.info("statistics", runner=parts.name, **statistics_of(parts))


class GraphRunner(Runner[V]):
    """A runner that captures graphs. Subclasses are final, or abstract."""

    _is_debugged = False

    @property
    @abc.abstractmethod
    def graphs(self) -> GraphSet[V]:
        """The captured buckets, and the buffers that they read."""

    @abc.abstractmethod
    def capture(self) -> CaptureReport:
        """Capture every bucket, the largest first; with `lazy`, each when the first batch comes for it.

        Nothing is captured with `graphs` off. Raises CaptureError where buckets failed; the others are usable all the
        same, and `report` names both.
        """

    def _debug(self) -> None:
        """Let the debug modes that are on watch each step from now on, unless they do."""
        modes = self.parts.config.modes
        if modes and not self._is_debugged:
            self._is_debugged = True
            for watcher in watchers_of(self, modes):
                self.watch.add(watcher)

    @property
    def report(self) -> CaptureReport | None:
        """What the capture came to, or None before it."""
        return self.graphs.report

    @property
    def lowering(self) -> Lowering:
        """How fills are run."""
        return self.graphs.filler.lowering

    def plan(
        self,
        bucket: int,
        absent: Collection[str] = (),
        in_place: Collection[str] = (),
        hosted: Collection[str] = (),
    ) -> FillPlan:
        """How one bucket is filled, for batches without some optional slots, or with some in place or on the host.

        ConfigError where there is no such bucket or slot.
        """
        parts = self.parts
        foreign = self.graphs.buffers.foreign
        return parts.stage.plan(parts.sizes, bucket, self.lowering, absent, in_place, hosted, foreign)
