"""A backend whose graphs are handed host parameters, and that writes down which, and when."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, final

import attrs
import torch

from slotgraph.backends import NO_PARAMETERS, Backend, Capabilities, Graph, choose
from slotgraph.backends.base import Interruption
from slotgraph.backends.host import HostBackend

Handed = dict[str, Any]
INNER: Final = ("cpu", "cpu-capture")


@final
class HandingGraph(Graph):
    """A graph that reads its parameters once in each replay, before it does anything else."""

    def __init__(self, graph: Graph, parameters: Mapping[str, torch.Tensor], log: list[Handed]) -> None:
        self.graph = graph
        self.parameters = dict(parameters)
        self._log = log

    @property
    def outputs(self) -> Any:
        """Those of the graph itself."""
        return self.graph.outputs

    @property
    def nbytes(self) -> int:
        """Likewise."""
        return self.graph.nbytes

    def check_addresses(self) -> None:
        """Likewise."""
        self.graph.check_addresses()

    def replay(self) -> None:
        """Take the parameters as they are now, then run; a graph without any takes none."""
        if self.parameters:
            self._log.append({name: tensor.tolist() for name, tensor in self.parameters.items()})
        self.graph.replay()


@final
class HandingBackend(HostBackend):
    """One of the CPU's backends, said to have host parameters.

    handed: what graphs were handed, one entry a replay. captured: the graphs that were captured with some.
    """

    name: ClassVar[str] = "handing"

    def __init__(self, inner: str) -> None:
        self._inner: Backend = choose(inner)
        self.handed: list[Handed] = []
        self.captured: list[HandingGraph] = []

    @property
    def capabilities(self) -> Capabilities:
        """An NPU's in what matters here."""
        return attrs.evolve(self._inner.capabilities, host_parameters=True, fills={"seq_len_fill": 0})

    def capture(
        self,
        step: Callable[[], Any],
        *,
        pool: object | None = None,
        error_mode: str | None = None,
        parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS,
    ) -> Graph:
        """The inner backend's, with the parameters."""
        made = HandingGraph(self._inner.capture(step, pool=pool, error_mode=error_mode), parameters, self.handed)
        if parameters:
            self.captured.append(made)
        return made

    def interrupt(self, run: Interruption) -> Any:
        """The inner backend's."""
        return self._inner.interrupt(run)

    def since(self) -> list[Handed]:
        """What was handed over since this was last asked."""
        handed, self.handed[:] = [*self.handed], []
        return handed
