"""A graph with host parameters: before each launch, its operators are told what the host tensors hold.

torch_npu records each operator that takes host arguments behind an event that only an update of the graph records. So
a launch without an update would wait for ever, and an update before the launch before it has run would be seen by that
one. Here each launch brings its own update, before it, and no update starts until the launch before has ended.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, final

import torch

from ..dataflow.errors import CaptureError, ReplayError
from .device_graph import first_line

Fence = Literal["host", "device"]
FENCES: Final[tuple[Fence, ...]] = ("host", "device")
"""Who waits for the launch before: the host, which is right however a device takes updates, or the stream of updates,
which lets the host run ahead, and is right where updates are work of that stream, as CANN's manual says (vLLM-Ascend
relies on it since pull request 16798; no one has shown it here)."""

Update = Mapping[str, Callable[[torch.Tensor], Any]]
"""What one operator is told at each replay: by argument, what makes it of the slot: a host tensor, or a list."""
_CLONE: Final[Any] = torch.Tensor.clone
_LIST: Final[Any] = torch.Tensor.tolist
_MOST_SHOWN: Final = 60
_HANDLERS: Final = "torch_npu.npu._npugraph_handlers.npugraph_handler"


def npu() -> Any:
    """torch.npu, which torch_npu brings; checkers know nothing of it."""
    return getattr(torch, "npu")  # noqa: B009 - no attribute that a checker could see


@final
class UpdatedGraph:
    """An NPUGraph whose operators take host parameters.

    parameters: host tensors, by operator argument. native: torch_npu's graph.
    """

    def __init__(self, device: torch.device, parameters: Mapping[str, torch.Tensor], fence: Fence) -> None:
        self.native = npu().NPUGraph()
        self.native.graph_dispatch_mode.update_stream = _update_stream(device)
        self._device = device
        self._parameters = dict(parameters)
        self._fence = fence
        self._updates: list[Update] = []  # of each operator that takes host arguments
        self._passed: Any = None  # what is recorded after each launch
        self._broken = ""

    @contextlib.contextmanager
    def recorded(self, opened: AbstractContextManager[object]) -> Iterator[None]:
        """Around what records the graph. CaptureError where an operator has host arguments that no replay tells."""
        with opened:
            yield
        records = self.native.graph_dispatch_mode.graph_dispatch_records
        self._updates += [_update_of(record, self._parameters) for record in records]

    @property
    def taken(self) -> frozenset[str]:
        """Arguments that some operator takes."""
        return frozenset(name for update in self._updates for name in update)

    def reset(self) -> None:
        """Let go of the graph."""
        self.native.reset()

    def replay(self) -> None:
        """Update once the launch before has ended, then launch. ReplayError where an update has broken off before."""
        if not self._updates:
            self.native.replay()
            return
        if self._broken:
            message = f"an update of this graph's host parameters broke off ({self._broken}): capture it anew"
            raise ReplayError(message)
        self._wait()
        self._broken = "it was interrupted"
        try:
            self.native.update(cpu_update_input=self._values())
            self.native.replay()
            self._passed.record(npu().current_stream(self._device))
        except Exception as error:
            self._broken = first_line(error)
            raise
        self._broken = ""

    def _wait(self) -> None:
        """Until the launch before has ended: its operators have then read what they were told."""
        if self._passed is None:
            self._passed = npu().Event()
        elif self._fence == "host":
            self._passed.synchronize()
        else:
            self._passed.wait(self.native.graph_dispatch_mode.update_stream)

    def _values(self) -> list[dict[str, Any]]:
        """For each operator, copies of what the host tensors hold, since a queue may read them after the next fill."""
        wanted = {pair for update in self._updates for pair in update.items()}
        found = {(name, copy): copy(self._parameters[name]) for name, copy in wanted}
        return [{name: found[name, copy] for name, copy in update.items()} for update in self._updates]


def check_taken(graphs: Sequence[UpdatedGraph], parameters: Collection[str]) -> None:
    """CaptureError where a parameter reaches no operator: its value would be the one that it had at capture."""
    taken = frozenset(name for graph in graphs for name in graph.taken)
    missing = sorted(set(parameters) - taken)
    if missing:
        message = (
            f"no operator of the captured step takes the host parameter {missing[0]!r} (what is taken: "
            f"{', '.join(sorted(map(repr, taken))) or 'nothing'}): hand the slot to one under that name, set argument= "
            "to the operator's own name for it, or leave the slot out"
        )
        raise CaptureError(message)


@functools.cache
def _update_stream(device: torch.device) -> Any:
    """A device's stream of updates; torch_npu has one for all devices, which belongs to the first."""
    return npu().Stream(device)


def _update_of(record: Any, parameters: Mapping[str, torch.Tensor]) -> Update:
    """What an operator takes of the parameters, each as it was given to it; nothing, if it has no host arguments."""
    given = {name: value for name, value in _arguments_of(record).items() if value is not None}
    found = {name: value for name, value in given.items() if name in parameters}
    for name, value in found.items():
        if not _is_held(value, parameters[name]):
            raise CaptureError(_changed(record, name, value, parameters[name]))
    if not found and any(name in given for _, _, name in _specs_of(record)):
        raise CaptureError(_untold(record, parameters))
    return {name: _CLONE if isinstance(value, torch.Tensor) else _LIST for name, value in found.items()}


def _is_held(value: Any, parameter: torch.Tensor) -> bool:
    """Whether an operator was given what the slot holds, all of it and as it is."""
    if isinstance(value, torch.Tensor):
        return value.is_cpu and value.dtype == parameter.dtype and torch.equal(value, parameter)
    return bool((list(value) if isinstance(value, tuple) else value) == parameter.tolist())


def _arguments_of(record: Any) -> dict[str, Any]:
    """What torch_npu can update of an operator, by name, with the values at capture."""
    found = dict(record.kwargs)
    for where, place, name in _specs_of(record):
        if where == "kwarg":
            found[name] = record.kwargs.get(place)
        elif len(record.args) > place:
            found[name] = record.args[place]
    return found


def _name_of(record: Any) -> str:
    return str(record.op_cache_entry.__name__)


def _specs_of(record: Any) -> list[tuple[str, Any, str]]:
    """Where torch_npu finds the host arguments of an operator: "arg" or "kwarg", its place there, and its name."""
    handlers: Any = importlib.import_module(_HANDLERS)._NPU_GRAPH_OP_HANDLERS  # noqa: SLF001 - no public name
    specs: list[tuple[str, Any, str]] = handlers[_name_of(record)].get_update_specs(_name_of(record))
    return specs


def _changed(record: Any, name: str, value: Any, parameter: torch.Tensor) -> str:
    there = value.tolist() if isinstance(value, torch.Tensor) else value
    return (
        f"operator {_name_of(record)} was given {_short(there)} for {name}, and the host parameter holds "
        f"{_short(parameter.tolist())} ({parameter.dtype}): each replay hands over what the slot holds, all of it, as "
        "it is. Derive what the operator takes in a slot of its own: computed(..., placement='host', argument=...)"
    )


def _short(values: Any) -> str:
    text = str(values)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _untold(record: Any, parameters: Collection[str]) -> str:
    takes = ", ".join(name for _, _, name in _specs_of(record))
    declared = ", ".join(map(repr, sorted(parameters)))
    return (
        f"operator {_name_of(record)} takes its host arguments at each replay ({takes}), and the declaration has none "
        f"of those that it was given: its host parameters are {declared}. Declare one, or set argument="
    )
