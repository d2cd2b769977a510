"""Routes: the bucket that a batch fills, the graph or eager step that runs on it, and how its outputs are cut.

Steps without a graph have buckets of the exact size, in a runner's memory or in memory that grows.
"""

import abc
import operator
from typing import Any, ClassVar, Generic

import torch

from ...dataflow import log
from ...dataflow.axes import Live
from ...dataflow.buffers import Buffers
from ...dataflow.errors import BatchError
from ...dataflow.fill.bucket import hand_over
from ...dataflow.fill.kinds import KindTable
from ...dataflow.guard import GRADIENTS, outside_inference, without_gradients
from ...dataflow.inputs import V
from ...dataflow.plan import Absent
from ...dataflow.sources import Side
from ...dataflow.views import Viewer, Views
from .current import CurrentStep, with_current
from .graphs import Captured, Filler, Filling, GraphSet, ReadBatch
from .outputs import cut_live
from .stage import Stage
from .statistics import Counts, Decision, Tally


class Route(abc.ABC, Generic[V]):
    """Fills and runs the batches of one bucket. Subclasses are final.

    Attributes:
        filling: Fills the bucket.
        viewer: Makes the views of its batches.
        counts: Counts the steps of this route.
        captured: The graph, or None if the step runs eagerly.
        decision: Why there is no graph, or None if there is one.
    """

    decision: Decision | None = None
    range_name: ClassVar[str] = "slotgraph:replay"
    """The name of its runs in a profile."""
    needs_view: ClassVar[bool] = True
    """Whether the step runs on the view. If not, it is a graph that reads slots alone."""

    def __init__(self, filling: Filling, viewer: Viewer[V], counts: Counts, captured: Captured | None = None) -> None:
        self.captured = captured
        self.filling = filling
        self.filler: Filler[V] = filling.filler
        self.viewer = viewer
        self.counts = counts

    @abc.abstractmethod
    def run(self, view: V | None, live: Live) -> Any:
        """Run the filled step, count it, and return its outputs for live rows. view: Given if the route needs it."""


class GraphRoute(Route[V]):
    """A graph of the whole step."""

    needs_view: ClassVar[bool] = False
    captured: Captured

    def __init__(self, graphs: GraphSet[V], captured: Captured, counts: Counts) -> None:
        super().__init__(captured.filling, graphs.stage.viewer(captured.filling.bucket), counts, captured)
        self._graphs = graphs
        varying = graphs.stage.declaration.varying
        self._rows_of = operator.itemgetter(*map(varying.index, graphs.axes))  # live sizes as buckets name them
        self._output_place = None if graphs.output_rows is None else varying.index(graphs.output_rows)
        self._last_outputs: torch.Tensor | None = None
        self._last_rows = 0
        self._last_cut: torch.Tensor | None = None

    def run(self, view: V | None, live: Live) -> Any:
        """Replay the graph."""
        del view
        self._graphs.replay(self.captured)
        self.counts.replayed(self._rows_of(live))
        rows = None if self._output_place is None else live[self._output_place]
        outputs = self.captured.graph.outputs
        if type(outputs) is not torch.Tensor or self._graphs.stamps:  # a new container, since the caller may change it
            return self._graphs.stamped(cut_live(outputs, rows))
        if rows is None:
            return outputs.detach()  # an alias, since the caller may reshape it
        if outputs is self._last_outputs and rows == self._last_rows:
            if self._last_cut is None:
                with outside_inference():
                    self._last_cut = outputs[:rows]
            return self._last_cut.detach()  # `detach` takes less than half as long as a slice
        self._last_outputs = outputs
        self._last_rows = rows
        self._last_cut = None
        return outputs[:rows]


class EagerRoute(Route[V]):
    """A step without a graph, on live rows alone."""

    range_name: ClassVar[str] = "slotgraph:eager"

    def run(self, view: V | None, live: Live) -> Any:
        """Run the step on its view."""
        filler = self.filler
        stage = self.filler.stage
        hosts = filler.hosts
        filler.buffers.use.eager_runs += 1
        if hosts.possible and hosts.wants(self.filling.bucket.absent):  # the first such step
            outputs = hosts.look(lambda: _run(stage.run, view), self.filling.bucket.absent)
        else:
            outputs = _run(stage.run, view)
        if hosts.notes:
            hosts.note()
        self.counts.steps += 1
        self.counts.live += live[-1] if live else 0
        return outputs


def _run(step: Any, view: Any) -> Any:
    """Run a step on its view, without gradients."""
    current = CurrentStep(view)
    if GRADIENTS():
        return without_gradients(with_current, current, step, view)
    return with_current(current, step, view)


class EagerRoutes(Generic[V]):
    """Chooses the routes of batches without a graph.

    Each axis grows to the next power of two when a batch needs more.

    Attributes:
        stage: The declaration, the backend and the step.
        filler: Fills the present buffers, or None before the first batch.
        no_copy: Whether views consist of the batch's own tensors.
    """

    def __init__(
        self,
        stage: Stage[V],
        runner: str,
        table: KindTable,
        *,
        buffers: Buffers | None = None,
        no_copy: bool = False,
    ) -> None:
        """Start with `buffers`, those of a runner's buckets, until they are too small. runner: Its name in events."""
        self.stage = stage
        self.no_copy = no_copy
        self._runner = runner
        self._table = table
        self._routes = dict[tuple[Absent, str], EagerRoute[V]]()
        self.filler: Filler[V] | None = None
        self._use(None if buffers is None else self._over(buffers))

    @property
    def buffers(self) -> Buffers | None:
        """The buffers at their present capacity, or None before the first batch."""
        filler = self.filler  # read once: another thread may change it
        return None if filler is None else filler.buffers

    def route(self, call: ReadBatch, decision: Decision, tally: Tally) -> EagerRoute[V]:
        """Choose the route of a batch, and grow the buffers if they are too small.

        Args:
            call: The batch.
            decision: Why it has no graph.
            tally: Counts the runner's steps.

        Raises:
            BatchError: Its memory is bound and cannot grow.
        """
        filler = self._large_enough(call.live)
        key = call.absent, decision.why
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = self._make(filler, call.absent, tally.reasons[decision.why])
        route.decision = decision
        return route

    def fill(self, batch: Any, live: Live, side: Side) -> tuple[EagerRoute[V], V]:
        """Fill from a batch of these live sizes, for a tool, and return its route and view. Raises as a fill does."""
        call = ReadBatch(batch, side, self._table.gather(batch, side), None, live, self.stage.absent(batch, side))
        route = self._make(self._large_enough(live), call.absent, Counts())
        route.filling.fill(call, whole=True)
        return route, route.viewer(batch, live)

    def _make(self, filler: Filler[V], absent: Absent, counts: Counts) -> EagerRoute[V]:
        """Make the route of batches that lack some optional slots."""
        filling = filler.make(filler.buffers.capacity, absent, exact=True, computes=True)
        if not self.no_copy:
            return EagerRoute(filling, self.stage.viewer(filling.bucket), counts)
        handing = HandOver(filler, filling.bucket)
        return EagerRoute(handing, self.stage.viewer(filling.bucket, handing.shown), counts)

    def restore(self, filler: Filler[V] | None) -> None:
        """Return to the earlier memory, if the batch that it grew for was refused."""
        if filler is not self.filler:
            self._use(filler)

    def _use(self, filler: Filler[V] | None) -> None:
        """Switch to other memory, and drop the routes of the earlier memory."""
        self._table.forget()
        self._routes = {}
        capacity = {} if filler is None else filler.buffers.capacity
        self._capacity: Live = tuple([capacity.get(axis, -1) for axis in self.stage.declaration.varying])
        self.filler = filler

    def _large_enough(self, live: Live) -> Filler[V]:
        """Return a filler whose buffers hold these live sizes. Raise BatchError if bound buffers would have to grow."""
        stage = self.stage
        filler = self.filler
        declaration = self.stage.declaration
        if filler is not None and all(map(operator.le, live, self._capacity)):
            return filler
        none = dict.fromkeys((*declaration.axes, *declaration.following), 0)
        before = {**none, **stage.sizes} if filler is None else dict(filler.buffers.capacity)
        short = {axis: rows for axis, rows in zip(declaration.varying, live, strict=False) if rows > before[axis]}
        known = [*filler.buffers] if filler else []
        bound = [buffer.name for buffer in known if buffer.adopted and buffer.slot.varying]
        if bound:
            most = ", ".join(f"{axis} {rows}" for axis, rows in before.items() if axis in short)
            raise BatchError(
                f"slot {bound[0]!r} is bound to memory that cannot grow, and the batch has more rows than {most}"
            )
        capacity = before | {axis: 1 << max(rows - 1, 0).bit_length() for axis, rows in short.items()}
        kept = {buffer.name: buffer.tensor for buffer in known if buffer.adopted or buffer.slot.is_state}
        buffers = stage.allocate(capacity, kept, keep_bound=True)
        sizes = {axis.name: size for axis, size in capacity.items()}
        log.debug("grown", runner=self._runner, declaration=declaration.name, nbytes=buffers.nbytes, sizes=sizes)
        filler = self._over(buffers)
        self._use(filler)
        return filler

    def _over(self, buffers: Buffers) -> Filler[V]:
        """Make a filler without a fused kernel, which cannot work on live rows alone."""
        return Filler(self.stage, buffers, self.stage.lowering_without_kernel(), [buffers.capacity], self._table)


class HandOver(Filling):
    """Takes the place of a fill in steps that run on the batch's own tensors.

    Attributes:
        handed: The tensors of the last batch, by slot.
    """

    handed: Views | None = None

    def fill(self, call: ReadBatch, *, whole: bool) -> None:
        """Check the batch, keep its tensors, and compute the computed slots."""
        del whole
        filler = self.filler
        filler.hosts.wait()
        self.handed = hand_over(self.bucket, call.batch, call.live, call.side)
        filler.buffers.use.fills += 1

    def shown(self, _: Live) -> Views:
        """Return the tensors of the last batch, for views."""
        return self.handed or {}
