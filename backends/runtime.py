"""The runtime: the calls of one kind of device for graphs, streams and memory, under one set of names."""

import abc
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch

from ..dataflow.errors import CaptureError

Handle: TypeAlias = Any
"""What torch calls a pool: two numbers, of a type without a public name; None where the first graph brings it."""


class Recorded(Protocol):
    """A graph as torch has it."""

    def replay(self) -> None:
        """Launch it on the current stream."""
        ...

    def reset(self) -> None:
        """Let go of all that it holds."""
        ...


class Runtime(abc.ABC):
    """What captures ask of a kind of device."""

    @abc.abstractmethod
    def new_graph(self) -> Recorded:
        """A graph with nothing in it."""

    @abc.abstractmethod
    def recording(self, graph: Recorded, handle: Handle, stream: Any) -> AbstractContextManager[object]:
        """Record what is called inside into a graph, in the way that nobody asked for anything else."""

    @abc.abstractmethod
    def is_capturing(self) -> bool:
        """Whether the current stream is."""

    @abc.abstractmethod
    def new_handle(self) -> Handle:
        """A handle for a pool that no graph has yet; None where only a graph has one."""

    def handle_of(self, graph: Recorded, handle: Handle) -> Handle:
        """The handle of the pool that a graph was recorded into."""
        del graph
        return handle

    @abc.abstractmethod
    def new_stream(self, device: torch.device) -> Any:
        """A stream that is not the default one."""

    @abc.abstractmethod
    def current_stream(self, device: torch.device) -> Any:
        """The current one."""

    @abc.abstractmethod
    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Make a stream the current one for a while."""

    @abc.abstractmethod
    def new_event(self, device: torch.device) -> Any:
        """An event that takes the time, not recorded yet."""

    @abc.abstractmethod
    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has done all work handed to it."""

    @abc.abstractmethod
    def free_and_total(self, device: torch.device) -> tuple[int, int]:
        """Bytes that are free on the device, and all that it has, as its driver counts them."""

    @abc.abstractmethod
    def bytes_on(self, device: torch.device) -> tuple[int, int]:
        """Bytes that torch's allocator holds on a device, and those of them that tensors use."""

    @abc.abstractmethod
    def empty_cache(self) -> None:
        """Have the allocator give back what nobody uses."""

    def release_workspaces(self) -> None:  # noqa: B027 - a device whose libraries keep none has nothing to do
        """Have libraries free the workspaces that they keep between calls, so that the next operator allocates anew."""

    def close(self, device: torch.device, handle: Handle) -> bool:
        """End the allocator's recording into a pool, where a broken capture left it open; whether it was."""
        del device, handle
        return False

    def ranges(self, handle: Handle) -> list[tuple[int, int]]:
        """First and one past the last address of each piece of memory in a pool, where the allocator tells."""
        del handle
        return []

    def alias_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, which it does not keep; the tensor where the device has no such thing."""
        return tensor

    @property
    def warns_of_empty(self) -> str:
        """What a warning says where a graph has nothing in it; nothing where none is given."""
        return ""

    @abc.abstractmethod
    def told(self, error: BaseException) -> CaptureError:
        """The error for a step that raised, or that the device refused, while it was captured."""
