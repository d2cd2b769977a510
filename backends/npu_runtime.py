"""An NPU's names for what captures ask of a device. torch_npu has been imported by whoever makes one."""

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, final

import torch
from torch.utils import _python_dispatch as dispatch

from ..dataflow.errors import CaptureError
from .faults import not_captured
from .npu_faults import ADVICE, CONDITIONS
from .runtime import Handle, Recorded, Runtime
from .segments import bytes_of, ranges_of

NOTHING: Final[Mapping[str, Any]] = {}


def npu() -> Any:
    """torch.npu, which torch_npu brings; checkers know nothing of it."""
    return getattr(torch, "npu")  # noqa: B009 - no attribute that a checker could see


def npu_c() -> Any:
    """torch_npu's own side of the allocator and of streams, where there is no public name."""
    return importlib.import_module("torch_npu._C")


@final
class NpuRuntime(Runtime):
    """torch.npu."""

    def new_graph(self) -> Recorded:
        """An NPUGraph, which takes no arguments and records once."""
        graph: Recorded = npu().NPUGraph()
        return graph

    def recording(self, graph: Recorded, handle: Handle, stream: Any) -> AbstractContextManager[object]:
        """torch.npu.graph."""
        return recording(graph, handle, stream, NOTHING)

    def is_capturing(self) -> bool:
        """Whether the current stream is."""
        return bool(npu().is_current_stream_capturing())

    def new_handle(self) -> Handle:
        """A handle that no graph has yet."""
        return npu().graph_pool_handle()

    def new_stream(self, device: torch.device) -> Any:
        """A stream of torch_npu's own."""
        return npu().Stream(device)

    def current_stream(self, device: torch.device) -> Any:
        """The current one."""
        return npu().current_stream(device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """torch.npu.stream."""
        context: AbstractContextManager[object] = npu().stream(stream)
        return context

    def new_event(self, device: torch.device) -> Any:
        """A torch.npu.Event."""
        del device
        return npu().Event(enable_timing=True)

    def synchronize(self, device: torch.device) -> None:
        """torch.npu.synchronize."""
        npu().synchronize(device)

    def free_and_total(self, device: torch.device) -> tuple[int, int]:
        """torch.npu.mem_get_info."""
        free, total = npu().mem_get_info(device)
        return int(free), int(total)

    def bytes_on(self, device: torch.device) -> tuple[int, int]:
        """As the allocator counts them."""
        return bytes_of(npu().memory_stats_as_nested_dict(device))

    def empty_cache(self) -> None:
        """torch.npu.empty_cache."""
        npu().empty_cache()

    def close(self, device: torch.device, handle: Handle) -> bool:
        """By the allocator's own calls."""
        try:
            npu_c()._npu_endAllocateToPool(device.index, handle)  # noqa: SLF001
        except RuntimeError:  # it is not recording: the capture ended in order
            return False
        npu_c()._npu_releasePool(device.index, handle)  # noqa: SLF001 - what an ended capture's reset does
        return True

    def ranges(self, handle: Handle) -> list[tuple[int, int]]:
        """As the allocator's snapshot tells them."""
        return ranges_of(npu().memory_snapshot(handle))

    def alias_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, which it does not keep: as torch_npu's records of updated operators hold tensors."""
        with torch.inference_mode(mode=False):
            alias: torch.Tensor = npu_c()._weak_ref_tensor(tensor)  # noqa: SLF001
        return alias

    def told(self, error: BaseException) -> CaptureError:
        """With an NPU's ways out."""
        return not_captured(error, ADVICE, CONDITIONS)


@contextlib.contextmanager
def recording(graph: Any, handle: Handle, stream: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """torch.npu.graph, which leaves nothing behind where a capture does not even begin, or does not end.

    torch_npu 2.13 enters the stream, and the mode that watches operators, before it begins the capture, and would leave
    both entered where that raises.
    """
    around, depth = npu().current_stream(), len(_modes())
    try:
        with npu().graph(graph, pool=handle, stream=stream, **options):
            try:
                yield
            finally:
                npu().set_stream(stream)  # a capture ends on its own stream: with another, the device is lost
    finally:
        for mode in reversed(_modes()[depth:]):
            mode.__exit__(None, None, None)
        npu().set_stream(around)


def _modes() -> list[Any]:
    """Modes that watch operators, the innermost last."""
    return list(dispatch._get_current_dispatch_mode_stack())  # noqa: SLF001 - no public name
