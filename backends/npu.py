"""Ascend NPUs, by torch_npu, which is imported when the backend is asked for and not before.

How it behaves, where that is not obvious:

- Cache locations are int32, and nothing else is converted: other kernels demand int64.
- Host data goes up in one packet, cast on the host; then come grouped copies on the device. Nothing is copied by a
  foreach from host memory, and nothing asynchronously from memory that is not pinned.
- All captures on a device share one stream and one pool, as on CUDA; input buffers are never shared.
- Host parameters are handed over at each replay: see `npu_graph`.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, final

import torch
from torch.utils import _python_dispatch as dispatch

from ..dataflow.capabilities import Capabilities
from ..dataflow.errors import BackendUnavailableError, ConfigError
from .base import NO_PARAMETERS, Graph, mode_of
from .device import StreamBackend
from .device_graph import Advice, Handle, Opened, first_line
from .npu_graph import FENCES, Fence, UpdatedGraph, check_taken, npu

_PACKAGE: Final = "torch_npu"
_VISIBLE: Final = "ASCEND_RT_VISIBLE_DEVICES"
_GRAPHS: Final = 1800
"""Graphs that a device's 2,048 streams bear, one stream a graph, with some left for all else: the number that
vLLM-Ascend settled on. A step that forks to other streams takes more of them."""
_CHUNK: Final = 48
"""Tensors that one foreach call takes at most."""
_CAPABILITIES: Final = Capabilities(
    roles={"cache_loc": torch.int32},
    fills={"seq_len_fill": 0},
    pools_inputs=False,
    foreach_host=False,
    foreach_chunk=_CHUNK,
    packed_uploads=True,
    arenas=False,
    host_parameters=True,
    capture_error_modes=StreamBackend.error_modes,
    graphs_hint=_GRAPHS,
)
_STREAMS_GONE: Final = (
    "the device has no streams left for another graph (2,048 in all; each graph takes at least one, and one more for "
    "each stream that the step forks to): capture fewer buckets or patterns, or fewer runners"
)
_ON_DEVICE: Final = (
    "it waits for the device, as item(), tolist(), cpu(), bool(), blocking copies, copies from memory that is not "
    "pinned, and synchronize do. Keep the value on the device (torch.where, index_select), or hand it to the step in a "
    "slot"
)
_EXPANDABLE: Final = (
    "take pin_memory_expandable_segments out of PYTORCH_NPU_ALLOC_CONF: a graph's pinned memory would be given to "
    "others while the graph reads it"
)
_NO_KERNEL: Final = (
    "this operator has no kernel that a graph can hold, as boolean masks and nonzero have none: use torch.where, "
    "masked_fill or an index of fixed size"
)
_BROKEN: Final = (
    "an operator or a copy, as one from memory that is not pinned, was refused where torch_npu's queue ran it; stderr "
    "has its message, and with ASCEND_LAUNCH_BLOCKING=1 the line is told"
)
_CONDITIONS: Final[Advice] = (
    ("207005", _STREAMS_GONE),
    ("207008", _STREAMS_GONE),
    ("stream resources are insufficient", _STREAMS_GONE),
    ("captured on a non-default stream", "the current stream is the default one: capture on another"),
    (
        "task_queue_enable = 2",
        "set TASK_QUEUE_ENABLE=1 in the environment, or call torch.npu.set_task_queue_enable(1) before capture",
    ),
    ("pin_memory_expandable_segments", _EXPANDABLE),
    ("the process exits for this inner error", _BROKEN),
)
"""By what torch_npu 2.13 says, in lower case; 207005 and 207008 are CANN's numbers, the one sign of too many graphs."""
_ADVICE: Final[Advice] = (
    ("aclop operators", _NO_KERNEL),
    ("stream synchronize failed", _ON_DEVICE),
    ("aclrtsynchronize", _ON_DEVICE),
    ("aclrtmemcpy", _ON_DEVICE),
)
"""Likewise, for what the step does."""


def npu_c() -> Any:
    """torch_npu's own side of the allocator and of streams, where there is no public name."""
    return importlib.import_module("torch_npu._C")


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


@final
class NpuBackend(StreamBackend):
    """The NPU that is current when the backend is made.

    fence: who waits until a graph's launch has read its host parameters before the next ones are written, the "host"
    or the "device": see `npu_graph.FENCES`.
    """

    name: ClassVar[str] = "npu"
    priority: ClassVar[int] = 9
    advice: ClassVar[Advice] = _ADVICE
    conditions: ClassVar[Advice] = _CONDITIONS

    def __init__(self, *, fence: Fence = "host") -> None:
        reason = self.why_not()
        if reason:
            raise BackendUnavailableError(reason)
        if fence not in FENCES:
            message = f"fence is one of {', '.join(map(repr, FENCES))}, not {fence!r}"
            raise ConfigError(message)
        super().__init__(torch.device("npu", npu().current_device()), npu(), npu_c())
        self._fence: Fence = fence

    @classmethod
    def why_not(cls) -> str:
        """Why torch_npu and CANN are not here, or see no device; nothing where they see one."""
        if sys.modules.get(_PACKAGE) is None and importlib.util.find_spec(_PACKAGE) is None:
            version = torch.__version__.split("+")[0]
            return (
                f"torch_npu is not installed: `pip install torch_npu=={version}`, and CANN of the version that it needs"
            )
        failed = _import()
        if failed:
            return failed
        if _is_forked():
            return "this process was forked after the NPU was used: start it with multiprocessing's 'spawn' method"
        try:
            return "" if npu().is_available() else _no_device()
        except RuntimeError as error:
            return f"the driver does not start: {first_line(error)}; `npu-smi info` shows what it sees"

    @property
    def capabilities(self) -> Capabilities:
        """What is said at the head of this module, as a record."""
        return _CAPABILITIES

    def capture(
        self,
        step: Callable[[], Any],
        *,
        pool: object | None = None,
        error_mode: str | None = None,
        parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS,
    ) -> Graph:
        """Record the step on the capture stream without running it; pool: as `pool()` or torch_npu hands it out.

        parameters: host tensors, whose values the operators of these arguments are told at each replay.
        Raises CaptureError for what an NPU refuses, naming the line and the way out; where a parameter reaches no
        operator, or an operator takes host arguments and none of the parameters; and from what the step raised.
        """
        if not parameters:
            return super().capture(step, pool=pool, error_mode=error_mode)
        made: list[UpdatedGraph] = []
        options = {"capture_error_mode": mode_of(error_mode, self.error_modes), "auto_dispatch_capture": True}

        def begin(handle: Handle) -> Opened:
            made.append(UpdatedGraph(self.device, parameters, self._fence))
            return made[-1], made[-1].recorded(recording(made[-1].native, handle, self.state.stream, options))

        graph = self.record(step, pool, begin)
        if graph.is_whole:  # else what runs between the parts may take them
            check_taken(made, parameters)
        return graph

    def begin(self, handle: Handle, **options: Any) -> Opened:
        """An NPUGraph, which takes no arguments and records once."""
        graph = npu().NPUGraph()
        return graph, recording(graph, handle, self.state.stream, options)

    def alias_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, which it does not keep: as torch_npu's records of updated operators hold tensors."""
        with torch.inference_mode(mode=False):
            alias: torch.Tensor = npu_c()._weak_ref_tensor(tensor)  # noqa: SLF001
        return alias

    def stream_key(self) -> Callable[[], int]:
        """A call that tells the current stream's number: torch_npu finds its own streams by it."""
        return functools.partial(_stream_number, self.device)

    def order(self, first: int, then: int) -> None:
        """Have one stream wait for another, by number; the host waits for all where torch_npu does not know one."""
        try:
            if min(first, then) >= 0:
                self._stream_of(then).wait_stream(self._stream_of(first))
                return
        except RuntimeError:  # another library's: torch_npu takes no events on it
            pass
        self.synchronize()

    def _stream_of(self, number: int) -> Any:
        default = npu().default_stream(self.device)
        return npu().Stream(stream_id=number, device_index=self.device.index, device_type=default.device_type)

    def streams_of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The stream that each tensor's memory was allocated on; other libraries' streams are numbers below zero."""
        known = [npu().default_stream(self.device), npu().current_stream(self.device), self.state.stream]
        numbers = {stream.npu_stream: stream.stream_id for stream in known}
        here, handles = _stream_number(self.device), self.stream_handles(tensors)
        return tuple(here if handle is None else numbers.get(handle, -handle) for handle in handles)


def _stream_number(device: torch.device) -> int:
    return int(npu_c()._npu_getCurrentStream(device.index)[0])  # noqa: SLF001 - no public name


@functools.cache  # a second try after a failure meets a package half imported, and says something else
def _import() -> str:
    """Import torch_npu; what went wrong, and the way out."""
    if getattr(torch, "npu", None) is not None:
        return ""
    try:
        importlib.import_module(_PACKAGE)
    except (ImportError, OSError, RuntimeError) as error:
        return (
            f"torch_npu is installed and cannot be imported ({first_line(error)}): install CANN, and `source "
            "set_env.sh` of its ascend-toolkit folder in the shell that starts this process"
        )
    return "" if getattr(torch, "npu", None) is not None else f"what is imported as {_PACKAGE} brings no torch.npu"


def _is_forked() -> bool:
    """Whether the NPU was used before a fork that made this process; torch_npu sees forks of multiprocessing alone."""
    started_in = getattr(npu(), "_original_pid", False)
    return bool(npu()._is_in_bad_fork()) or started_in not in {False, os.getpid()}  # noqa: SLF001 - no public name


def _no_device() -> str:
    visible = os.environ.get(_VISIBLE)
    if visible is not None:
        return f"no NPU is visible with {_VISIBLE}={visible!r}: unset it, or name a device; `npu-smi info` lists them"
    return "torch_npu and CANN are here, but no NPU: `npu-smi info` shows what the driver sees"
