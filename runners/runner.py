"""The base of all runners: how a step is run, and what can be asked of any runner."""

import abc
import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Generic, Unpack

from ..dataflow import log
from ..dataflow.capabilities import Lowering
from ..dataflow.plan import FillPlan
from ..dataflow.sources import Side
from .capture import CaptureReport
from .decision import Decision
from .graphs import GraphSet
from .opaque import opaque
from .parts import Parts
from .recording.recorder import LAST, MAX_BYTES, Recording
from .stage import V
from .statistics import Statistics, statistics_of
from .unique import Unique
from .watching import Watch

if TYPE_CHECKING:
    from .explained.records import RunnerExplanation
    from .proofs.cases import Batches
    from .proofs.check import CheckOptions
    from .proofs.report import CheckReport


@opaque
class Runner(Unique, abc.ABC, Generic[V]):
    """Fills a declaration's slots from a batch and runs a step on the view. Subclasses are final, or abstract.

    A call is a fill and a replay; whoever watches a runner is told of both. A function under torch.compile may call it.
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
        agreement = self.parts.agreement
        return None if agreement is None else agreement.agreed

    def agree_ahead(self, batch: Any, **side: Any) -> None:
        """Tell the other ranks the sizes of the next step's batch, while this step still runs.

        The next call then finds what they told. Its batch must have these sizes, and be one that fills admit: the
        others go by it. Without other ranks, or where all get the same batches, nothing is done. Raises as `decide`.
        """
        agreement = self.parts.agreement
        if agreement is None:
            self.parts.stage.declaration.check_side(side)
            return
        with agreement.before():
            own, live = self.decide(batch, **side), self.parts.size(batch, side)
        agreement.ahead(own, live)

    def idle(self, batch: Any = None, **side: Any) -> Any:
        """Take part in the others' step without a request: zero live rows; the outputs for none.

        Where all ranks are idle nothing is run, and None returned. batch: one without rows; made as the declaration has
        it, where none is given. Raises as a call does; BatchError where the batch has rows, ConfigError where one must
        be given, because a field has no default.
        """
        from .ranks.idle import empty_batch  # noqa: PLC0415 - it draws what it knows of batches from checks' own rules

        agreement = self.parts.agreement
        if agreement is None:
            self.parts.stage.declaration.check_side(side)
            return None
        with agreement.before():
            empty, given = empty_batch(self.parts, agreement, batch, side)
            own, live = self.decide(empty, **given), self.parts.size(empty, given)
        return None if agreement.idle(own, live) else self(empty, **given)

    def wait(self) -> None:
        """Wait until the device has done what was asked of it: the step that was called last, for one.

        With ranks for no longer than their `timeout`, because a captured collective waits for a lost rank for ever:
        RankError then names it, and the collectives of the group are aborted. All ranks call it as often.
        """
        parts = self.parts
        backend, agreement = parts.stage.backend, parts.agreement
        event = backend.event()
        if agreement is None:
            event.synchronize()
        else:
            agreement.ranks.wait(event, backend.device)

    def stats(self) -> Statistics:
        """Its books as plain data: what was counted so far, and some of the times of its fills."""
        return statistics_of(self.parts)

    def record(
        self,
        path: str | os.PathLike[str],
        *,
        last: int = LAST,
        max_bytes: int = MAX_BYTES,
        outputs: bool = False,
        staged: Collection[str] = (),
    ) -> Recording:
        """Keep the last steps' inputs from now on, and write them to a `.safetensors` file when a step raises.

        Also on `save()` and at the end of `with runner.record(...)`; `close()` ends it. max_bytes: of all that is kept;
        a step that is larger by itself leaves its sizes. outputs: keep what the steps return, too. staged: slots that
        producers write beside the step, whose contents are kept too. `slotgraph replay` runs the file's steps again.
        ConfigError for a path that cannot be written, or what makes no sense.
        """
        return Recording(self, path, last=last, max_bytes=max_bytes, outputs=outputs, staged=staged)

    def check(self, batches: "Batches | None" = None, **options: "Unpack[CheckOptions]") -> "CheckReport":
        """Hold a captured runner to what its declaration promises: see `proofs.check.check_runner`.

        Each bucket is replayed with poison in its tails, beside the step as it is written, and over garbage. batches:
        what to check with, or a function of rows and a generator that makes it; drawn, where nothing is said.
        """
        from .proofs.check import check_runner  # noqa: PLC0415 - checks know all kinds of runners, which this is

        return check_runner(self, batches, **options)

    def explain(self, batch: Any = None, **side: Any) -> "RunnerExplanation":
        """What it declares, plans, captured, holds in memory and has decided, as data; for tables and pictures, too.

        batch: one whose way is told, too; where there are ranks, the one that this rank would take alone. Nothing is
        run or captured, nobody is asked. The memory of its pool is laid out, if that was not done before.
        """
        from .explained.explanation import explain_runner  # noqa: PLC0415 - it knows all kinds of runners

        return explain_runner(self, batch, side)

    def log_stats(self) -> None:
        """One event, `statistics`, with all of them."""
        parts = self.parts
        log.info("statistics", runner=parts.name, **statistics_of(parts))


class GraphRunner(Runner[V]):
    """A runner that captures graphs. Subclasses are final, or abstract."""

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

    def _prove(self) -> None:
        """From now on, have the debug modes look at each step that are on and do so; once."""
        modes = self.parts.config.modes
        if modes:
            from .debug import prove  # noqa: PLC0415 - it needs runners, and few need it

            prove(self, modes)

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
