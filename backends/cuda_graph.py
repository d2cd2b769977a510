"""Capturing a step as a CUDA graph: either a graph, or an error and a device on which all else goes on."""

import contextlib
import gc
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, final

import attrs
import torch
from torch.utils import _pytree as pytree

from ..dataflow.errors import CaptureError, ReplayError
from .base import Graph
from .cuda_faults import first_line, not_captured, ran_out_of_memory
from .cuda_pool import GraphPool, Handle, Shared, bytes_on


@final
class CudaGraph(Graph):
    """A captured step; it is replayed on the current stream."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Any, nbytes: int) -> None:
        self._graph = graph
        self._outputs = outputs
        self._nbytes = nbytes
        self._launch = graph.replay

    @property
    def outputs(self) -> Any:
        """What the step returned at capture: the same tensors at each replay, with nothing in them before the first."""
        return self._outputs

    @property
    def nbytes(self) -> int:
        """Bytes that the pool grew by, without the outputs; nothing where the graph found room in the pool.

        The driver's own memory for a graph, some 10 KB a kernel, is not in it.
        """
        return self._nbytes

    def replay(self) -> None:
        """Launch the graph. ReplayError where torch or the driver refuses."""
        try:
            self._launch()
        except RuntimeError as error:
            message = f"the graph could not be replayed: {first_line(error)}"
            raise ReplayError(message) from error


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


def capture(
    shared: Shared, step: Callable[[], Any], pool: GraphPool, begin: Callable[..., AbstractContextManager[None]]
) -> CudaGraph:
    """Record a step into a pool. CaptureError, chained to what the step or CUDA said, with the device as before.

    begin: torch.cuda.graph with what is not decided here.
    """
    if torch.cuda.is_current_stream_capturing():
        message = "a step that is being captured cannot capture another"
        raise CaptureError(message)
    with shared.lock, torch.cuda.stream(shared.stream), _no_collections():
        alive, handle, graph = pool.graphs(), pool.handle(), torch.cuda.CUDAGraph()
        try:
            attempt = _attempt(step, begin(graph, pool=handle, stream=shared.stream), shared.device)
        except BaseException:  # an interrupt: what else can be raised is in the attempt
            shared.discard(graph, pool, handle)
            raise
        del alive  # kept so that the handle stayed good until here
        if attempt.error is not None:
            _clean_up(shared, graph, pool, handle, attempt.error)
            raise _told(attempt.error) from attempt.error
        pool.add(graph)
        return CudaGraph(graph, ordinary(attempt.outputs), _grown(attempt.before, bytes_on(shared.device)))


def _attempt(step: Callable[[], Any], capturing: AbstractContextManager[None], device: torch.device) -> _Attempt:
    attempt = _Attempt()
    try:
        with contextlib.ExitStack() as quietly, capturing:
            attempt.before = bytes_on(device)
            try:
                attempt.outputs = step()
            except Exception as error:  # noqa: BLE001 - raised again, once the capture is ended
                attempt.raised = error
                quietly.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")  # that the graph is empty: it is thrown away
    except Exception as error:  # noqa: BLE001 - likewise; torch says it when the capture begins or ends
        attempt.refused = error
    return attempt


def _clean_up(shared: Shared, graph: torch.cuda.CUDAGraph, pool: GraphPool, handle: Handle, error: Exception) -> None:
    if ran_out_of_memory(error):
        traceback.clear_frames(error.__traceback__)  # the step's tensors, which the error would keep alive
    try:
        shared.discard(graph, pool, handle)
    except RuntimeError as left:
        error.add_note(f"after this, the device could not be brought back: {first_line(left)}")


def _told(error: Exception) -> CaptureError:
    if isinstance(error, CaptureError):
        return CaptureError(str(error))
    return not_captured(error)


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
