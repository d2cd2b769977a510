"""Capturing a step as a device's graph: either a graph, or an error and a device on which all else goes on."""

import contextlib
import functools
import gc
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import attrs
import torch
from torch.utils import _pytree as pytree

from ..dataflow.errors import CaptureError, ReplayError, SlotGraphError
from .base import Graph, Interruption
from .faults import first_line, ran_out_of_memory
from .graph_pool import GraphPool, Shared
from .runtime import Handle, Recorded


@final
class DeviceGraph(Graph):
    """A captured step; it is replayed on the current stream.

    parts: graphs, and what is called between them as it is. outputs: what the step returned at capture.
    """

    def __init__(self, parts: "Sequence[Part]", outputs: Any, nbytes: int) -> None:
        self._parts = parts
        self._outputs = outputs
        self._nbytes = nbytes
        self._calls = [part.call for part in parts]
        self._launch = self._calls[0] if len(parts) == 1 else self._launch_all

    @property
    def outputs(self) -> Any:
        """What the step returned at capture: the same tensors at each replay, with nothing in them before the first."""
        return self._outputs

    @property
    def is_whole(self) -> bool:
        """Whether all of the step is in one graph, and nothing runs between its parts."""
        return len(self._parts) == 1

    @property
    def parts(self) -> int:
        """Graphs, without what runs between them."""
        return sum(part.graph is not None for part in self._parts)

    @property
    def nbytes(self) -> int:
        """Bytes that the pool grew by, without the outputs; nothing where the graph found room in the pool.

        The driver's own memory for a graph, some 10 KB a kernel, is not in it.
        """
        return self._nbytes

    def replay(self) -> None:
        """Launch the graph. ReplayError where torch or the driver refuses.

        What runs between graphs raises whatever it raises.
        """
        try:
            self._launch()
        except SlotGraphError:
            raise
        except RuntimeError as error:
            message = f"the graph could not be replayed: {first_line(error)}"
            raise ReplayError(message) from error

    def _launch_all(self) -> None:
        for call in self._calls:
            call()


@attrs.frozen(eq=False)
class Part:
    """What a replay calls: that of a graph, or what runs between two of them."""

    call: Callable[[], object]
    graph: Recorded | None = None


@attrs.define(eq=False)
class _Attempt:
    """What came of one capture: the step's outputs or error, torch's at the end, and the allocator's bytes before."""

    outputs: Any = None
    raised: Exception | None = None
    refused: Exception | None = None
    before: tuple[int, int] = (0, 0)

    @property
    def error(self) -> Exception | None:
        """What came first."""
        return self.raised or self.refused


@attrs.frozen
class Manner:
    """How a graph is recorded: what makes one with nothing in it, and what records into it, given pool and stream."""

    new: Callable[[], Recorded]
    begin: Callable[[Any, Handle, Any], AbstractContextManager[object]]


class Recording:
    """A capture under way: the graphs so far, what runs between them, and the graph that is being recorded.

    Libraries release their workspaces when a graph begins and before it ends. So the operators of the graph allocate
    workspaces in the graph's own pool, and nothing outside the graph uses them later. A workspace from a warm-up lies
    outside the pool. Clearing it would free memory that replays read (pytorch issues 192061 and 193402).
    """

    def __init__(self, shared: Shared, pool: GraphPool, manner: Manner) -> None:
        self.parts: list[Part] = []
        self.handle = pool.handle()
        self.graph = manner.new()
        self._shared = shared
        self._runtime = shared.runtime
        self._manner = manner
        self._open: AbstractContextManager[object] | None = None
        self._empty: list[Recorded] = []
        self._answers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._ranges: list[tuple[int, int]] | None = None  # of the pool, while nothing is allocated in it

    @property
    def graphs(self) -> list[Recorded]:
        """The graphs that are recorded, and those with nothing in them."""
        return [*self._empty, *(part.graph for part in self.parts if part.graph is not None)]

    def start(self) -> None:
        """Begin a graph."""
        self._ranges = None
        self.graph = self._manner.new()
        opened = self._manner.begin(self.graph, self.handle, self._shared.stream)
        opened.__enter__()
        self._open = opened
        self._runtime.release_workspaces()

    def stop(self) -> None:
        """End the graph, if one is being recorded, and keep it."""
        if self._open is not None:
            try:
                self._runtime.release_workspaces()
            finally:  # whatever interrupts that: a capture that is left open makes the device unusable
                opened, self._open = self._open, None
                opened.__exit__(None, None, None)
            self.parts.append(Part(self.graph.replay, self.graph))
            self.handle = self._runtime.handle_of(self.graph, self.handle)

    def interrupt(self, run: Interruption) -> Any:
        """End the graph and do what it records, so that `run` finds it done; call that; begin the next graph."""
        if self._open is None:  # inside a break, where nothing is being recorded
            return run(None)
        self._do()
        leaves, structure = pytree.tree_flatten(run(None))
        self.start()
        # What is allocated from here on is the graph's own memory, which later parts use again once it is free.
        places = [torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        tensors = [(place, leaf) for place, leaf in zip(places, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
        self._answers = tensors
        kept = [self._alias(place) if isinstance(place, torch.Tensor) else place for place in places]
        self.parts.append(Part(functools.partial(run, kept)))
        return pytree.tree_unflatten(places, structure)

    def _do(self) -> None:
        """End the graph that is being recorded, and do what it records."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self.stop()
        for place, answer in self._answers:
            place.copy_(answer)
        self._answers = []
        is_empty = False
        for warning in said:
            if self._runtime.warns_of_empty and self._runtime.warns_of_empty in str(warning.message):
                is_empty = True
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        if is_empty:  # nothing between two breaks, or memory alone, which lives in the pool for as long as a graph does
            self.parts.pop()
            self._empty.append(self.graph)
        else:
            self.graph.replay()

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        is_ours = tensor.device.type == self._shared.device.type
        return _ordinary(self._runtime.alias_of(tensor)) if is_ours else tensor

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """An alias of a tensor in the memory that this capture allocates from; any other tensor as it is."""
        plain = tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()
        if not plain or tensor.device.type != self._shared.device.type:
            return tensor
        if self._ranges is None:
            self._ranges = self._runtime.ranges(self.handle)
        address = tensor.data_ptr()
        return self._alias(tensor) if any(low <= address < high for low, high in self._ranges) else tensor


def capture(shared: Shared, step: Callable[[], Any], pool: GraphPool, manner: Manner) -> DeviceGraph:
    """Record a step into a pool. CaptureError, chained to what was said, with the device as it was before."""
    runtime = shared.runtime
    if runtime.is_capturing():
        message = "a step that is being captured cannot capture another"
        raise CaptureError(message)
    with shared.lock, runtime.on(shared.stream), _no_collections():
        alive, recording = pool.graphs(), Recording(shared, pool, manner)
        around, shared.recording = shared.recording, recording
        try:
            attempt = _attempt(step, recording, shared)
        except BaseException:  # an interrupt: what else can be raised is in the attempt
            _discard(shared, recording, pool)
            raise
        finally:
            shared.recording = around
        del alive  # kept so that the handle stayed good until here
        if attempt.error is not None:
            left = _clean_up(shared, recording, pool, attempt.error)
            raise _told(shared, attempt.error, left) from attempt.error
        for graph in recording.graphs:
            pool.add(graph)
        grown = _grown(attempt.before, runtime.bytes_on(shared.device))
        return DeviceGraph(recording.parts, ordinary(attempt.outputs), grown)


def _attempt(step: Callable[[], Any], recording: Recording, shared: Shared) -> _Attempt:
    attempt = _Attempt()
    try:
        with contextlib.ExitStack() as quietly, contextlib.ExitStack() as ending:
            ending.callback(recording.stop)  # it may have begun when what follows raises
            recording.start()
            attempt.before = shared.runtime.bytes_on(shared.device)
            try:
                attempt.outputs = step()
            except Exception as error:  # noqa: BLE001 - raised again, once the capture is ended
                attempt.raised = error
                quietly.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")  # that the graph is empty: it is thrown away
            if recording.parts and shared.runtime.warns_of_empty:  # after a break there may be nothing left to record
                quietly.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message=f".*{shared.runtime.warns_of_empty}")
    except Exception as error:  # noqa: BLE001 - likewise; torch says it when the capture begins or ends
        attempt.refused = error
    return attempt


def _clean_up(shared: Shared, recording: Recording, pool: GraphPool, error: Exception) -> str:
    """What the device could not be brought back from; nothing where all else goes on."""
    if ran_out_of_memory(error):
        traceback.clear_frames(error.__traceback__)  # the step's tensors, which the error would keep alive
    try:
        _discard(shared, recording, pool)
    except RuntimeError as left:
        return first_line(left)
    return ""


def _discard(shared: Shared, recording: Recording, pool: GraphPool) -> None:
    for graph in recording.graphs:
        graph.reset()
    shared.discard(recording.graph, pool, recording.handle)


def _told(shared: Shared, error: Exception, left: str) -> CaptureError:
    told = CaptureError(str(error)) if isinstance(error, CaptureError) else shared.runtime.told(error)
    if not left:
        return told
    return CaptureError(f"{told}. After this the device runs nothing more in this process ({left}): start it again")


def _grown(before: tuple[int, int], after: tuple[int, int]) -> int:
    """Bytes that the pool grew by, without those that are still in use: the outputs."""
    return max(0, (after[0] - before[0]) - (after[1] - before[1]))


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Keep Python's collector from freeing graphs and events in the middle of a capture, which would break it off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def ordinary(outputs: Any) -> Any:
    """The same memory in tensors that may be written outside inference mode too, whatever mode the capture was in."""
    leaves = pytree.tree_leaves(outputs)
    if not any(isinstance(leaf, torch.Tensor) and leaf.is_inference() for leaf in leaves):
        return outputs
    return pytree.tree_map_only(torch.Tensor, _ordinary, outputs)


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_inference() or tensor.layout is not torch.strided:
        return tensor
    with torch.inference_mode(mode=False):
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
