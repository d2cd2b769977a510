"""The CPU without graphs: a replay runs the callable again on its fixed views."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, final

import torch

from ..dataflow.errors import CaptureError, ReplayError, SlotGraphError
from .base import NO_PARAMETERS, Graph, Interruption
from .faults import raised_by_step
from .host import HostBackend


@final
class CallableGraph(Graph):
    """A step that is simply called again."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        self._outputs = step()

    @property
    def outputs(self) -> Any:
        """What the last call returned: new tensors each time."""
        return self._outputs

    @property
    def nbytes(self) -> int:
        """Nothing is recorded, so nothing is held."""
        return 0

    @property
    def is_recorded(self) -> bool:
        """No: the step itself is called."""
        return False

    def replay(self) -> None:
        """Call the step again; ReplayError chained to what it raises, but for errors of this library."""
        try:
            self._outputs = self._step()
        except SlotGraphError:
            raise
        except Exception as error:
            message = f"the step raised {type(error).__name__}: {error}"
            raise ReplayError(message) from error


@final
class CpuBackend(HostBackend):
    """Runs steps eagerly on fixed views: the fastest on a CPU, with none of a graph's restrictions."""

    name: ClassVar[str] = "cpu"

    def capture(
        self,
        step: Callable[[], Any],
        *,
        pool: object | None = None,
        error_mode: str | None = None,
        parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS,
    ) -> Graph:
        """Run the step once and keep it. A replay runs its code again, which reads parameters where they lie."""
        del pool, error_mode, parameters
        try:
            return CallableGraph(step)
        except CaptureError:
            raise
        except Exception as error:
            raise raised_by_step(error, "in its first run") from error

    def interrupt(self, run: Interruption) -> Any:
        """Call it: a replay runs the whole step again, and comes by here each time."""
        return run(None)


Adapter = CpuBackend
