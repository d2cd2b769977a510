"""Ascend NPUs, through torch_npu, which is imported only when the backend is requested.

Behaviour that is not obvious:

- Cache locations are int32, and nothing else is converted: other kernels require int64.
- Host data is cast on the host and uploaded in one packet, followed by grouped copies on the device. Nothing is copied
  by a foreach from host memory, and nothing asynchronously from memory that is not pinned.
- All captures on a device share one stream and one pool, as on CUDA. Input buffers are never shared.
- Host parameters: torch_npu records each operator that takes host arguments behind an event. Only an update of the
  graph records this event, so a launch without an update never ends. An update that starts too early changes what the
  previous launch reads. So each launch makes its own update first, after the previous launch has ended.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, final

import torch
from torch.utils import _python_dispatch as dispatch

from ..dataflow.capabilities import Capabilities
from ..dataflow.errors import BackendUnavailableError, CaptureError, ReplayError
from ..dataflow.guard import outside_inference
from .base import NO_PARAMETERS, Capturable, Graph, mode_of
from .device import StreamBackend
from .device_graph import Advice, Handle, Opened, first_line

_PACKAGE: Final = "torch_npu"
_VISIBLE: Final = "ASCEND_RT_VISIBLE_DEVICES"
_CAPABILITIES: Final = Capabilities(
    roles={"cache_loc": torch.int32},
    fills={"seq_len_fill": 0},
    pools_inputs=False,
    foreach_chunk=48,  # the most tensors in one foreach call
    packed_uploads=True,
    arenas=False,
    host_parameters=True,
    capture_error_modes=StreamBackend.error_modes,
    graphs_hint=1800,  # vLLM-Ascend's limit on graphs: a device has 2,048 streams, and each graph takes at least one
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
_CONDITIONS: Final[Advice] = (
    *((sign, _STREAMS_GONE) for sign in ("207005", "207008", "stream resources are insufficient")),
    ("captured on a non-default stream", "the current stream is the default one: capture on another"),
    (
        "task_queue_enable = 2",
        "set TASK_QUEUE_ENABLE=1 in the environment, or call torch.npu.set_task_queue_enable(1) before capture",
    ),
    (
        "pin_memory_expandable_segments",
        "take pin_memory_expandable_segments out of PYTORCH_NPU_ALLOC_CONF: others would get memory that a graph reads",
    ),
    (
        "the process exits for this inner error",
        (
            "an operator or a copy, as one from memory that is not pinned, was refused where torch_npu's queue ran it; "
            "stderr has its message, and ASCEND_LAUNCH_BLOCKING=1 makes it name the line"
        ),
    ),
)
"""By texts of torch_npu 2.13, in lower case. 207005 and 207008 are CANN's numbers, the only sign of too many graphs."""
_ADVICE: Final[Advice] = (
    (
        "aclop operators",
        "it has no kernel that a graph can hold, as masks and nonzero: use torch.where or an index of fixed size",
    ),
    *((sign, _ON_DEVICE) for sign in ("stream synchronize failed", "aclrtsynchronize", "aclrtmemcpy")),
)
"""The same, for what the step does."""

_Tensor: Final[Any] = torch.Tensor
Update = Mapping[str, Callable[[torch.Tensor], Any]]
"""How to update one operator at each replay: by argument, what converts the slot to a host tensor or a list."""


def npu() -> Any:
    """Return torch.npu, which torch_npu adds and type checkers do not know."""
    return getattr(torch, "npu")  # noqa: B009 - type checkers see no such attribute


def npu_c() -> Any:
    """Return torch_npu's bindings of the allocator and of streams, which have no public name."""
    return importlib.import_module("torch_npu._C")


@contextlib.contextmanager
def recording(graph: Any, handle: Handle, stream: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """Enter torch.npu.graph, which in torch_npu 2.13 leaves its stream and mode entered if a capture does not begin."""
    around = npu().current_stream()
    depth = len(_modes())
    try:
        with npu().graph(graph, pool=handle, stream=stream, **options):
            try:
                yield
            finally:
                npu().set_stream(stream)  # a capture must end on its own stream, or the device is lost
    finally:
        for mode in reversed(_modes()[depth:]):
            mode.__exit__(None, None, None)
        npu().set_stream(around)


def _modes() -> list[Any]:
    """Return the modes that intercept operators, the innermost last."""
    return list(dispatch._get_current_dispatch_mode_stack())  # noqa: SLF001 - no public name


@final
class UpdatedGraph:
    """An NPUGraph (`native`) whose operators take host parameters, given as tensors by operator argument."""

    def __init__(self, device: torch.device, parameters: Mapping[str, torch.Tensor]) -> None:
        self.native = npu().NPUGraph()
        self.reset = self.native.reset
        self.pool = self.native.pool
        self.native.graph_dispatch_mode.update_stream = _update_stream(device)
        self._device = device
        self._parameters = dict(parameters)
        self._updates: list[Update] = []  # one for each operator that takes host arguments
        self._passed: Any = None  # recorded after each launch
        self._broken = ""

    @contextlib.contextmanager
    def recorded(self, opened: AbstractContextManager[object]) -> Iterator[None]:
        """Record the graph in a context, and collect the operators that take host arguments.

        Raise CaptureError if an operator has host arguments that no replay updates.
        """
        with opened:
            yield
        records = self.native.graph_dispatch_mode.graph_dispatch_records
        self._updates += [_update_of(record, self._parameters) for record in records]

    @property
    def taken(self) -> frozenset[str]:
        """The host arguments that operators of the graph take."""
        return frozenset(name for update in self._updates for name in update)

    def replay(self) -> None:
        """Wait for the previous launch, update, and launch. Raise ReplayError if an earlier update was interrupted."""
        if not self._updates:
            self.native.replay()
            return
        if self._broken:
            raise ReplayError(f"updating this graph's host parameters was interrupted ({self._broken}): capture again")
        if self._passed is None:
            self._passed = npu().Event()
        else:  # the previous launch's operators have then read their values
            self._passed.synchronize()
        self._broken = "it was interrupted"
        try:
            self.native.update(cpu_update_input=self._values())
            self.native.replay()
            self._passed.record(npu().current_stream(self._device))
        except Exception as error:
            self._broken = first_line(error)
            raise
        self._broken = ""

    def _values(self) -> list[dict[str, Any]]:
        """Copy the host tensors' values for each operator, since a queue may read them after the next fill."""
        wanted = {pair for update in self._updates for pair in update.items()}
        found = {(name, copy): copy(self._parameters[name]) for name, copy in wanted}
        return [{name: found[name, copy] for name, copy in update.items()} for update in self._updates]


@functools.cache
def _update_stream(device: torch.device) -> Any:
    """Return a device's stream of updates. Torch_npu's own one serves all devices, and belongs to the first."""
    return npu().Stream(device)


def _update_of(record: Any, parameters: Mapping[str, torch.Tensor]) -> Update:
    """Return how to update an operator. A spec of torch_npu has "arg" or "kwarg", the position or key, and the name."""
    operator = str(record.op_cache_entry.__name__)
    handlers: Any = importlib.import_module("torch_npu.npu._npugraph_handlers.npugraph_handler")
    handler = handlers._NPU_GRAPH_OP_HANDLERS[operator]  # noqa: SLF001 - no public name
    specs = handler.get_update_specs(operator)
    given = dict(record.kwargs)
    for where, place, name in specs:
        if where == "kwarg":
            given[name] = record.kwargs.get(place)
        elif len(record.args) > place:
            given[name] = record.args[place]
    update = {}
    for name, parameter in parameters.items():
        value = given.get(name)
        if value is None:
            continue
        current = parameter.tolist()
        captured = list(value) if isinstance(value, tuple) else value
        is_apart = False
        if isinstance(value, torch.Tensor):
            captured = value.tolist()
            is_apart = not value.is_cpu or value.dtype != parameter.dtype
        if is_apart or captured != current:
            raise CaptureError(
                f"operator {operator} was given {captured!s:.60} for {name}, and the host parameter holds "
                f"{current!s:.60} ({parameter.dtype}): each replay passes the whole slot unchanged. Declare a slot of "
                "its own for what the operator takes: computed(..., placement='host', argument=...)"
            )
        update[name] = _Tensor.clone if isinstance(value, torch.Tensor) else _Tensor.tolist
    if not update and any(given.get(name) is not None for _, _, name in specs):
        raise CaptureError(
            f"operator {operator} takes its host arguments at each replay ({', '.join(name for _, _, name in specs)}), "
            "and the declaration has none of those that it was given: its host parameters are "
            f"{', '.join(map(repr, sorted(parameters)))}. Declare one, or set argument="
        )
    return update


@final
class NpuBackend(StreamBackend):
    """The NPU that is current when the backend is made."""

    name = "npu"
    priority = 9
    advice = _ADVICE
    conditions = _CONDITIONS

    def __init__(self) -> None:
        reason = self.why_not()
        if reason:
            raise BackendUnavailableError(reason)
        super().__init__(torch.device("npu", npu().current_device()), npu(), npu_c())

    @classmethod
    def why_not(cls) -> str:
        """Return why torch_npu and CANN are missing or see no device, or ""."""
        if sys.modules.get(_PACKAGE) is None and importlib.util.find_spec(_PACKAGE) is None:
            version = torch.__version__.split("+")[0]
            return f"torch_npu is not installed: `pip install torch_npu=={version}`, and the CANN that it needs"
        failed = _import()
        if failed:
            return failed
        started_in = getattr(npu(), "_original_pid", False)  # torch_npu itself detects only forks of multiprocessing
        if npu()._is_in_bad_fork() or started_in not in {False, os.getpid()}:  # noqa: SLF001 - no public name
            return "this process was forked after the NPU was used: start it with multiprocessing's 'spawn' method"
        try:
            return "" if npu().is_available() else _no_device()
        except RuntimeError as error:
            return f"the driver does not start: {first_line(error)}; `npu-smi info` shows what it sees"

    @property
    def capabilities(self) -> Capabilities:
        """The record of this device, for the reasons in the module's docstring."""
        return _CAPABILITIES

    def capture(
        self,
        step: Capturable,
        *,
        pool: object | None = None,
        error_mode: str | None = None,
        parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS,
    ) -> Graph:
        """Record the step on the capture stream without running it. `pool` comes from `pool()` or from torch_npu.

        Each replay passes the values of `parameters`, host tensors, to the operators that take these arguments. Also
        raises CaptureError for a parameter that no operator takes, and for an operator with host arguments that takes
        no parameter.
        """
        if not parameters:
            return super().capture(step, pool=pool, error_mode=error_mode)
        made: list[UpdatedGraph] = []
        options = {"capture_error_mode": mode_of(error_mode, self.error_modes), "auto_dispatch_capture": True}

        def begin(handle: Handle) -> Opened:
            made.append(UpdatedGraph(self.device, parameters))
            return made[-1], made[-1].recorded(recording(made[-1].native, handle, self.state.stream, options))

        graph = self.record(step, pool, begin)
        missing = sorted(parameters.keys() - made[0].taken)
        if missing and len(made) == 1:  # with several graphs, a call between them may take it
            raise CaptureError(
                f"no operator of the captured step takes the host parameter {missing[0]!r} (what is taken: "
                f"{', '.join(sorted(map(repr, made[0].taken))) or 'nothing'}): hand the slot to one under that name, "
                "set argument= to the operator's own name for it, or leave the slot out"
            )
        return graph

    def begin(self, handle: Handle, **options: Any) -> Opened:
        """Make an NPUGraph, which takes no arguments and records once, and the context that records into it."""
        graph = npu().NPUGraph()
        return graph, recording(graph, handle, self.state.stream, options)

    def alias_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a tensor over the same memory that does not keep it alive, as torch_npu does for updated operators."""
        with outside_inference():
            alias: torch.Tensor = npu_c()._weak_ref_tensor(tensor)  # noqa: SLF001
        return alias

    def stream_key(self) -> Callable[[], int]:
        """Return a call that gives the current stream's number, by which torch_npu finds its own streams."""
        return lambda: int(npu_c()._npu_getCurrentStream(self.device.index)[0])  # noqa: SLF001 - no public name

    def order(self, first: int, then: int) -> None:
        """Make one stream wait for another, by number.

        The host waits for the device if torch_npu does not know one of them.
        """
        known = min(first, then) >= 0
        try:
            if known:
                super().order(first, then)
        except RuntimeError:  # a stream of another library, on which torch_npu records no events
            known = False
        if not known:
            self.synchronize()


@functools.cache  # cached: after a failure the package is half imported, and a second import would fail differently
def _import() -> str:
    """Import torch_npu, and return what went wrong and the way out, or ""."""
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


def _no_device() -> str:
    visible = os.environ.get(_VISIBLE)
    if visible is not None:
        return f"no NPU is visible with {_VISIBLE}={visible!r}: unset it, or name a device; `npu-smi info` lists them"
    return "torch_npu and CANN are installed, but there is no NPU: `npu-smi info` shows what the driver sees"
