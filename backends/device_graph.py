"""Capturing a step as a device's graph: either a graph, or an error and a device on which all else goes on."""

import contextlib
import functools
import gc
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, final

import torch
from torch.utils import _pytree as pytree

from ..dataflow.errors import CaptureError, ReplayError, SlotGraphError
from .base import Graph, Interruption
from .device import GraphDevice, GraphPool, Handle, Opened, Recorded
from .faults import first_line, ran_out_of_memory

Part: TypeAlias = tuple[Callable[[], object], Recorded | None]
"""What a replay calls: that of a graph, and the graph; or what runs between two graphs, and None."""


@final
class DeviceGraph(Graph):
    """A captured step; it is replayed on the current stream.

    parts: graphs, and what is called between them as it is. outputs: what the step returned at capture.
    """

    def __init__(self, parts: Sequence[Part], outputs: Any, nbytes: int) -> None:
        self._parts = parts
        self._outputs = outputs
        self._nbytes = nbytes
        self._calls = [call for call, _ in parts]
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
        return sum(graph is not None for _, graph in self._parts)

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


class DeviceCapture:
    """A capture under way: the graphs so far, what runs between them, and the graph that is being recorded.

    begin: makes a graph that records into a pool.

    Libraries release their workspaces when a graph begins and before it ends. So the operators of the graph allocate
    workspaces in the graph's own pool, and nothing outside the graph uses them later. A workspace from a warm-up lies
    outside the pool. Clearing it would free memory that replays read (pytorch issues 192061 and 193402).
    """

    def __init__(self, device: GraphDevice, pool: GraphPool, begin: Callable[[Handle], Opened]) -> None:
        self.parts: list[Part] = []
        self.handle = pool.handle()
        self.graph: Recorded | None = None
        self._device = device
        self._begin = begin
        self._open: AbstractContextManager[object] | None = None
        self._empty: list[Recorded] = []
        self._answers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._ranges: list[tuple[int, int]] | None = None  # of the pool, while nothing is allocated in it

    @property
    def graphs(self) -> list[Recorded]:
        """The graphs that are recorded, and those with nothing in them."""
        return [*self._empty, *(graph for _, graph in self.parts if graph is not None)]

    def start(self) -> None:
        """Begin a graph."""
        self._ranges = None
        self.graph, opened = self._begin(self.handle)
        opened.__enter__()
        self._open = opened
        self._device.release_workspaces()

    def stop(self) -> None:
        """End the graph, if one is being recorded, and keep it."""
        if self._open is not None and self.graph is not None:
            try:
                self._device.release_workspaces()
            finally:  # whatever interrupts that: a capture that is left open makes the device unusable
                opened, self._open = self._open, None
                opened.__exit__(None, None, None)
            self.parts.append((self.graph.replay, self.graph))
            self.handle = self._device.handle_of(self.graph, self.handle)

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
        self.parts.append((functools.partial(run, kept), None))
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
            if self._device.warns_of_empty and self._device.warns_of_empty in str(warning.message):
                is_empty = True
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        replay, graph = self.parts[-1]
        if is_empty and graph is not None:  # nothing between two breaks, or memory alone: it lives as long as a graph
            self.parts.pop()
            self._empty.append(graph)
        else:
            replay()

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        is_ours = tensor.device.type == self._device.device.type
        return _ordinary(self._device.alias_of(tensor)) if is_ours else tensor

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """An alias of a tensor in the memory that this capture allocates from; any other tensor as it is."""
        plain = tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()
        if not plain or tensor.device.type != self._device.device.type:
            return tensor
        if self._ranges is None:
            self._ranges = self._device.ranges(self.handle)
        address = tensor.data_ptr()
        return self._alias(tensor) if any(low <= address < high for low, high in self._ranges) else tensor


def capture(
    device: GraphDevice, step: Callable[[], Any], pool: GraphPool, begin: Callable[[Handle], Opened]
) -> DeviceGraph:
    """Record a step into a pool. CaptureError, chained to what was said, with the device as it was before."""
    if device.is_capturing():
        message = "a step that is being captured cannot capture another"
        raise CaptureError(message)
    with device.lock, device.on(device.stream), _no_collections():
        alive, recording = pool.graphs(), DeviceCapture(device, pool, begin)
        around, device.recording = device.recording, recording
        try:
            outputs, error, before = _attempt(step, recording, device)
        except BaseException:  # an interrupt: any other error is returned
            _discard(device, recording, pool)
            raise
        finally:
            device.recording = around
        del alive  # kept so that the handle stayed good until here
        if error is not None:
            raise _cleaned_up(device, recording, pool, error) from error
        for graph in recording.graphs:
            pool.add(graph)
        return DeviceGraph(recording.parts, ordinary(outputs), _grown(before, device.held_and_used()))


def _attempt(
    step: Callable[[], Any], recording: DeviceCapture, device: GraphDevice
) -> tuple[Any, Exception | None, tuple[int, int]]:
    """The step's outputs, the first error, of the step or of torch, and the allocator's bytes before."""
    outputs, raised, before = None, None, (0, 0)
    try:
        with contextlib.ExitStack() as quietly, contextlib.ExitStack() as ending:
            ending.callback(recording.stop)  # it may have begun when what follows raises
            recording.start()
            before = device.held_and_used()
            try:
                outputs = step()
            except Exception as error:  # noqa: BLE001 - raised again, once the capture is ended
                raised = error
                quietly.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")  # that the graph is empty: it is thrown away
            if recording.parts and device.warns_of_empty:  # after a break there may be nothing left to record
                quietly.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message=f".*{device.warns_of_empty}")
    except Exception as error:  # noqa: BLE001 - likewise; torch says it when the capture begins or ends
        raised = raised or error
    return outputs, raised, before


def _cleaned_up(device: GraphDevice, recording: DeviceCapture, pool: GraphPool, error: Exception) -> CaptureError:
    """Leave nothing of the capture; the error to raise, which says so where the device cannot go on."""
    if ran_out_of_memory(error):
        traceback.clear_frames(error.__traceback__)  # the step's tensors, which the error would keep alive
    left = ""
    try:
        _discard(device, recording, pool)
    except RuntimeError as refused:
        left = f". After this the device runs nothing more in this process ({first_line(refused)}): start it again"
    return CaptureError(f"{error if isinstance(error, CaptureError) else device.error(error)}{left}")


def _discard(device: GraphDevice, recording: DeviceCapture, pool: GraphPool) -> None:
    for graph in recording.graphs:
        graph.reset()
    device.discard(recording.graph, pool, recording.handle)


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
