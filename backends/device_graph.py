"""Graphs of a device: the pools that they lie in, their replays, and what is said where one cannot be captured."""

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
"""What torch calls a pool: two numbers, of a type without a public name; None where the first graph brings it."""
Advice: TypeAlias = Iterable[tuple[str, str]]
"""What an error says, in lower case, and the way out where it says so."""

_LOWER: Final = (
    "lower the number of buckets, the largest bucket, or the share of memory that the engine's KV cache takes"
)
_IN_CPP: Final = re.compile(r"^\S+:\S+\.cpp:\d+ (NPU function error: )?")
_ASKED: Final = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)


class Recorded(Protocol):
    """A graph as torch has it."""

    def replay(self) -> None:
        """Launch it on the current stream."""

    def reset(self) -> None:
        """Let go of all that it holds."""

    def pool(self) -> Handle:
        """The handle of its memory."""


Opened: TypeAlias = tuple[Recorded, AbstractContextManager[object]]
"""A graph with nothing in it, and the context that records what is called inside into it."""
Part: TypeAlias = tuple[Callable[[], object], Recorded | None]
"""What a replay calls: that of a graph, and the graph; or what runs between two graphs, and None."""


@final
class GraphPool:
    """Graph memory of one device: what one graph needs for its steps alone, the next one uses too.

    torch refuses a handle whose graphs are all gone, and may refuse one whose capture was broken off: `draw` another.
    """

    def __init__(self, draw: Callable[[], Handle]) -> None:
        self._draw = draw
        self._handle: Handle | None = None
        self._graphs: weakref.WeakSet[Recorded] = weakref.WeakSet()

    def handle(self) -> Handle:
        """The handle for the next capture."""
        if self._handle is None or not self._graphs:
            self._handle = self._draw()
        return self._handle

    def graphs(self) -> list[Recorded]:
        """The graphs that use this memory."""
        return list(self._graphs)

    def add(self, graphs: Iterable[Recorded], handle: Handle) -> None:
        """Note graphs that were captured by a handle."""
        self._graphs.update(graphs)
        self._handle = handle

    def forget(self) -> None:
        """Draw another handle next time; graphs that were captured keep what they have."""
        self._handle = None


@final
class DeviceGraph(Graph):
    """A captured step, replayed on the current stream. Its outputs hold nothing before the first replay.

    nbytes: that the pool grew by, without the outputs and the driver's own memory, some 10 KB a kernel.
    """

    def __init__(self, parts: Sequence[Part], outputs: Any, nbytes: int) -> None:
        self.outputs, self.nbytes = outputs, nbytes
        self.graphs = [graph for _, graph in parts if graph is not None]
        self.parts = len(self.graphs)
        self._calls = [call for call, _ in parts]

    def replay(self) -> None:
        """Launch the graph. ReplayError where torch or the driver refuses; what runs between graphs raises as it is."""
        try:
            for call in self._calls:
                call()
        except SlotGraphError:
            raise
        except RuntimeError as error:
            raise ReplayError(f"the graph could not be replayed: {first_line(error)}") from error


def ordinary(outputs: Any) -> Any:
    """The same memory in tensors that may be written outside inference mode too, whatever mode the capture was in."""
    return pytree.tree_map_only(torch.Tensor, _ordinary, outputs)


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    return ordinary_alias(tensor) if tensor.is_inference() and tensor.layout is torch.strided else tensor


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether the device had too little memory, as the allocator, the driver or a library says it."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "alloc_failed" in text)
    )


def out_of_memory(error: BaseException, while_: str) -> CaptureError:
    """The error for a bucket that the device has no memory for."""
    asked = _ASKED.search(str(error))
    said = f"tried to allocate {asked[1]}" if asked else first_line(error)
    return CaptureError(f"the device's memory ran out {while_} ({said}): {_LOWER}")


def not_captured(error: BaseException, advice: Advice = (), conditions: Advice = ()) -> CaptureError:
    """The error for a step that raised or was refused; conditions: advice for what is wrong whatever the step does."""
    if ran_out_of_memory(error):
        return out_of_memory(error, "while this bucket was captured")
    said, text = first_line(error), str(error).lower()
    place = "" if isinstance(error, ComputeError) else place_of(error)  # which says it itself
    refusals = [("nothing can be captured as things are", one) for one in conditions]
    refusals += [(f"a captured step cannot do what it does{place}", one) for one in advice]
    for refused, (sign, way_out) in refusals:
        if sign in text:
            return CaptureError(f"{refused} ({said}): {way_out}")
    if isinstance(error, ComputeError):
        return CaptureError(said)
    if isinstance(error, Warning):
        what = f"the step warned{place} while it was captured, and this process turns such warnings into errors"
        return CaptureError(f"{what}: {type(error).__name__}: {said}")
    return CaptureError(f"the step raised {type(error).__name__}{place} while it was captured: {said}")


def first_line(error: BaseException) -> str:
    """What an error says, without a place in C++ before it or the paragraphs after it."""
    lines = _IN_CPP.sub("", str(error).strip()).splitlines()
    return lines[0] if lines else type(error).__name__
