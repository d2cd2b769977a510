"""Routes: where a batch is filled, what runs on it, and how its outputs are cut."""

import abc
from typing import Any, ClassVar, Generic

import torch

from ...dataflow.axes import Live
from ...dataflow.guard import GRADIENTS, outside_inference, without_gradients
from ...dataflow.inputs import V
from ...dataflow.views import Viewer
from .graphs import Captured, Filler, Filling, GraphSet
from .running import Running, under_way
from .statistics import Counts, Decision


class Route(abc.ABC, Generic[V]):
    """What happens to the batches of one bucket. Subclasses are final.

    Attributes:
        filling: Fills the bucket.
        viewer: Makes the views of its batches.
        counts: Counts the steps of this route.
        captured: The graph, or None if the step runs eagerly.
        decision: Why there is no graph, or None if there is one.
    """

    decision: Decision | None = None
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

    def count(self, live: Live) -> None:
        """Count a step that has run."""
        self.counts.steps += 1
        self.counts.live += live[-1] if live else 0


class GraphRoute(Route[V]):
    """A graph of the whole step."""

    needs_view: ClassVar[bool] = False

    def __init__(
        self, graphs: GraphSet[V], captured: Captured, viewer: Viewer[V], counts: Counts, rows_each: int | None
    ) -> None:
        """Take a graph. rows_each: Output rows for each live row, or None if outputs are whole."""
        super().__init__(captured.filling, viewer, counts, captured)
        self._captured = captured
        self._graphs = graphs
        self._rows_each = rows_each
        self._last_outputs: torch.Tensor | None = None
        self._last_rows = 0
        self._last_cut: torch.Tensor | None = None

    def run(self, view: V | None, live: Live) -> Any:
        """Replay the graph."""
        del view
        self._graphs.replay(self._captured)
        self.counts.steps += 1
        self.counts.live += live[-1]
        rows = None if self._rows_each is None else live[-1] * self._rows_each
        outputs = self._captured.graph.outputs
        if type(outputs) is not torch.Tensor or self._graphs.stamps:  # the caller may change a container
            return self._graphs.stamped(self._captured.live(rows))
        if rows is None:
            return outputs.detach()  # never the graph's own tensor, which the caller might change
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

    def run(self, view: V | None, live: Live) -> Any:
        """Run the step on its view."""
        filler, stage = self.filler, self.filler.stage
        hosts = filler.hosts
        step = stage.run if stage.restored else stage.step
        filler.buffers.turn.eager_runs += 1
        if hosts.possible and hosts.wants(self.filling.bucket.absent):  # the first step without these slots
            outputs = hosts.look(lambda: _run(step, view), self.filling.bucket.absent)
        else:
            outputs = _run(step, view)
        if hosts.notes:
            hosts.note()
        self.count(live)
        return outputs


def _run(step: Any, view: Any) -> Any:
    """Run a step on its view, without gradients."""
    running = Running(view)
    if GRADIENTS():
        return without_gradients(under_way, running, step, view)
    return under_way(running, step, view)
