"""Graphs of a device: their pools, their replays, and the errors for steps that cannot be captured."""

import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, TypeAlias, final

import torch
from torch.utils import _pytree as pytree

from ..dataflow.errors import CaptureError, ComputeError, ReplayError, SlotGraphError, place_of
from ..dataflow.views import ordinary_alias
from .base import Graph

Handle: TypeAlias = Any
"""What torch calls a pool: two numbers, of a type without a public name. None if the first graph brings the pool."""
Advice: TypeAlias = Iterable[tuple[str, str]]
"""A part of an error's text, in lower case, and the way out for such an error."""

_LOWER: Final = (
    "lower the number of buckets, the largest bucket, or the share of memory that the engine's KV cache takes"
)
_IN_CPP: Final = re.compile(r"^\S+:\S+\.cpp:\d+ (NPU function error: )?")
_ASKED: Final = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)


class Recorded(Protocol):
    """The methods of torch's graph objects that this package uses."""

    def replay(self) -> None:
        """Launch it on the current stream."""

    def reset(self) -> None:
        """Release all that it holds."""

    def pool(self) -> Handle:
        """Return the handle of its memory."""


Opened: TypeAlias = tuple[Recorded, AbstractContextManager[object]]
"""An empty graph, and the context in which calls are recorded into it."""
Part: TypeAlias = tuple[Callable[[], object], Recorded | None]
"""What a replay calls: a graph's `replay` and the graph, or what runs between two graphs and None."""


@final
class GraphPool:
    """The graph memory of one device. Later graphs reuse memory that earlier graphs need only during their own steps.

    Torch rejects a handle whose graphs are all gone, and may reject one whose capture failed. `draw` makes a new one.
    """

    def __init__(self, draw: Callable[[], Handle]) -> None:
        self._draw = draw
        self._handle: Handle | None = None
        self._graphs: weakref.WeakSet[Recorded] = weakref.WeakSet()

    def handle(self) -> Handle:
        """Return the handle for the next capture."""
        if self._handle is None or not self._graphs:
            self._handle = self._draw()
        return self._handle

    def graphs(self) -> list[Recorded]:
        """Return the graphs that use this memory."""
        return list(self._graphs)

    def add(self, graphs: Iterable[Recorded], handle: Handle) -> None:
        """Record graphs that were captured with a handle."""
        self._graphs.update(graphs)
        self._handle = handle

    def forget(self) -> None:
        """Draw another handle next time. Graphs that were captured keep their memory."""
        self._handle = None


@final
class DeviceGraph(Graph):
    """A captured step, replayed on the current stream. Its outputs hold nothing before the first replay.

    Attributes:
        nbytes: By how much the pool grew, without the outputs and the driver's own memory, some 10 KB a kernel.
    """

    def __init__(self, parts: Sequence[Part], outputs: Any, nbytes: int) -> None:
        self.outputs = outputs
        self.nbytes = nbytes
        self.graphs = [graph for _, graph in parts if graph is not None]
        self.parts = len(self.graphs)
        self._calls = [call for call, _ in parts]

    def replay(self) -> None:
        """Launch the graph.

        Raise ReplayError if torch or the driver refuses. Errors of calls between graphs stay as they are.
        """
        try:
            for call in self._calls:
                call()
        except SlotGraphError:
            raise
        except RuntimeError as error:
            raise ReplayError(f"the graph could not be replayed: {first_line(error)}") from error


def ordinary(outputs: Any) -> Any:
    """Return outputs as tensors that may be written outside inference mode, whatever mode the capture was in."""
    return pytree.tree_map_only(torch.Tensor, _ordinary, outputs)


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    return ordinary_alias(tensor) if tensor.is_inference() and tensor.layout is torch.strided else tensor


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether the device had too little memory, going by errors of the allocator, the driver or a library."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "alloc_failed" in text)
    )


def out_of_memory(error: BaseException, while_: str) -> CaptureError:
    """Make the error for a bucket that the device has no memory for."""
    asked = _ASKED.search(str(error))
    reason = f"tried to allocate {asked[1]}" if asked else first_line(error)
    return CaptureError(f"the device's memory ran out {while_} ({reason}): {_LOWER}")


def not_captured(error: BaseException, advice: Advice = (), conditions: Advice = ()) -> CaptureError:
    """Make the error for a step that raised or was refused. `conditions` has advice for faults outside the step."""
    if ran_out_of_memory(error):
        return out_of_memory(error, "while this bucket was captured")
    reason = first_line(error)
    text = str(error).lower()
    place = "" if isinstance(error, ComputeError) else place_of(error)  # a ComputeError already names the line
    refusals = [("nothing can be captured as things are", one) for one in conditions]
    refusals += [(f"a captured step cannot do what it does{place}", one) for one in advice]
    for refused, (sign, way_out) in refusals:
        if sign in text:
            return CaptureError(f"{refused} ({reason}): {way_out}")
    if isinstance(error, ComputeError):
        return CaptureError(reason)
    if isinstance(error, Warning):
        what = f"the step warned{place} while it was captured, and this process turns such warnings into errors"
        return CaptureError(f"{what}: {type(error).__name__}: {reason}")
    return CaptureError(f"the step raised {type(error).__name__}{place} while it was captured: {reason}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without a leading C++ file and line."""
    lines = _IN_CPP.sub("", str(error).strip()).splitlines()
    return lines[0] if lines else type(error).__name__
