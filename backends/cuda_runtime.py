"""CUDA's names for what captures ask of a device; those of AMD's devices are the same."""

from contextlib import AbstractContextManager
from typing import Any, Final, final

import torch

from ..dataflow.errors import CaptureError
from .cuda_faults import ADVICE
from .faults import not_captured
from .runtime import Handle, Recorded, Runtime
from .segments import bytes_of, ranges_of

_C: Final[Any] = torch._C  # noqa: SLF001 - the allocator's side of a capture has no public name
_EMPTY: Final = "CUDA Graph is empty"


@final
class CudaRuntime(Runtime):
    """torch.cuda."""

    def new_graph(self) -> Recorded:
        """A CUDAGraph."""
        return torch.cuda.CUDAGraph()

    def recording(self, graph: Recorded, handle: Handle, stream: Any) -> AbstractContextManager[object]:
        """torch.cuda.graph."""
        cuda_graph: Any = graph
        return torch.cuda.graph(cuda_graph, pool=handle, stream=stream)

    def is_capturing(self) -> bool:
        """Whether the current stream is."""
        return torch.cuda.is_current_stream_capturing()

    def new_handle(self) -> Handle:
        """A handle that no graph has yet."""
        return torch.cuda.graph_pool_handle()

    def new_stream(self, device: torch.device) -> Any:
        """A stream of torch's own."""
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def current_stream(self, device: torch.device) -> Any:
        """The current one."""
        return torch.cuda.current_stream(device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """torch.cuda.stream."""
        return torch.cuda.stream(stream)

    def new_event(self, device: torch.device) -> Any:
        """A torch.cuda.Event."""
        del device
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def synchronize(self, device: torch.device) -> None:
        """torch.cuda.synchronize."""
        torch.cuda.synchronize(device)

    def free_and_total(self, device: torch.device) -> tuple[int, int]:
        """torch.cuda.mem_get_info."""
        return torch.cuda.mem_get_info(device)

    def bytes_on(self, device: torch.device) -> tuple[int, int]:
        """As the allocator counts them."""
        return bytes_of(torch.cuda.memory_stats_as_nested_dict(device))

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache."""
        torch.cuda.empty_cache()

    def release_workspaces(self) -> None:
        """Those of cuBLAS and cuBLASLt, which torch keeps for each handle and stream; there is no call for one stream.

        torch's own graph trees (`torch/_inductor/cudagraph_trees.py`) do the same around each recording.
        """
        _C._cuda_clearCublasWorkspaces()  # noqa: SLF001

    def close(self, device: torch.device, handle: Handle) -> bool:
        """By the allocator's own calls."""
        try:
            _C._cuda_endAllocateToPool(device.index, handle)  # noqa: SLF001
        except RuntimeError:  # "not currently recording": the capture ended in order
            return False
        _C._cuda_releasePool(device.index, handle)  # noqa: SLF001 - what an ended capture's reset does
        return True

    def ranges(self, handle: Handle) -> list[tuple[int, int]]:
        """As the allocator's snapshot tells them."""
        snapshot: Any = torch.cuda.memory_snapshot
        try:
            segments = snapshot(handle)
        except TypeError:  # an older torch tells of all pools at once
            segments = [one for one in snapshot() if tuple(one["segment_pool_id"]) == tuple(handle)]
        return ranges_of(segments)

    def alias_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, which it does not keep: as torch's own graph trees hold what lies in a pool."""
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        with torch.inference_mode(mode=False):
            bare = _C._construct_storage_from_data_pointer(address, tensor.device, nbytes)  # noqa: SLF001
            fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return fresh.set_(bare, tensor.storage_offset(), tensor.size(), tensor.stride())

    @property
    def warns_of_empty(self) -> str:
        """As torch words it."""
        return _EMPTY

    def told(self, error: BaseException) -> CaptureError:
        """With CUDA's ways out."""
        return not_captured(error, ADVICE)
