"""The abstract base of all backends: a capability record and a handful of methods."""

import abc
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Final, Protocol

import attrs
import torch

from ..dataflow.capabilities import Capabilities, Placement
from ..dataflow.errors import CaptureError, ConfigError
from ..dataflow.packet import Upload


@attrs.frozen
class Availability:
    """Whether a backend can run on this machine, and why not; true or false in a condition.

    Attributes:
        available: Whether it can run.
        reason: Why it cannot, or "".
    """

    available: bool
    reason: str = ""

    def __bool__(self) -> bool:
        """Return whether the backend can run on this machine."""
        return self.available


def mode_of(error_mode: str | None, modes: Sequence[str]) -> str:
    """Return a capture mode, by default the first. Raise CaptureError if there is no such mode."""
    mode = modes[0] if error_mode is None else error_mode
    if mode not in modes:
        raise CaptureError(f"error_mode is one of {', '.join(map(repr, modes))}, not {error_mode!r}")
    return mode


NO_PARAMETERS: Final[Mapping[str, torch.Tensor]] = {}
"""What `capture` takes for a step without host parameters."""
Capturable = Callable[[], Any]
"""A step without arguments, as a device records it."""
Interruption = Callable[[Sequence[Any] | None], Any]
"""Called between two graphs: given None it returns its result, given tensors it writes its result to them."""


@attrs.frozen
class Memory:
    """A device's memory at one moment, in bytes.

    Attributes:
        total: All of it.
        free: What is free.
        allocated: What this process's allocator has.
    """

    total: int
    free: int
    allocated: int


class Graph(abc.ABC):
    """One captured step. Its addresses are fixed from capture on.

    Attributes:
        outputs: What the captured step returned. With true graphs, each replay returns the same tensors.
        nbytes: Bytes that it occupies without its inputs and outputs, as far as the device can tell.
        parts: The number of graphs that a replay launches in sequence. What interrupted the capture runs between them.
        is_recorded: Whether a replay repeats what was recorded, at its addresses; else it calls the step again.
    """

    outputs: Any = None
    nbytes: int = 0
    parts: int = 1
    is_recorded: bool = True

    @abc.abstractmethod
    def replay(self) -> None:
        """Run the captured step again on the current contents of its inputs.

        Raise ReplayError if that is impossible.
        """

    def check_addresses(self) -> None:  # noqa: B027 - most devices cannot tell, and need no override
        """Raise ReplayError if memory that the graph reads has moved since capture, as far as the device can tell."""


class Event(Protocol):
    """A point in the device's work that the host can query, as with torch's own events."""

    def query(self) -> bool:
        """Return whether the device has passed this point."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed this point."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the device time from this event to a later one, in milliseconds. Both must have passed."""
        ...


@attrs.frozen
class Fusion:
    """The kernels of a device that fill a bucket with one upload and one launch. `dataflow.packet` documents the data.

    Attributes:
        block: Words that one row of a table covers.
        kernel: Takes a table, a packet, and the buffers that are written. Returns a call that launches the kernel over
            the table on the current stream, which may be captured.
        edit: Takes the same. Returns a call that advances all lanes, then moves and writes the rows that the packet of
            an edit lists. None if the device has no such kernel; rows are then edited slot by slot.
    """

    block: int
    kernel: Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], Callable[[], None]]
    edit: Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], Callable[[], None]] | None = None


class Backend(abc.ABC):
    """A device adapter. Subclasses are final, and are made without arguments.

    Attributes:
        name: What users write.
        priority: "auto" takes the available backend of the highest priority.
    """

    name: ClassVar[str]
    priority: ClassVar[int] = 0

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Raise ConfigError, which names the method, if a method does not accept what runners pass."""
        super().__init_subclass__(**keywords)
        for name, verb in vars(Backend).items():
            own = None if name.startswith("_") else getattr(cls, name)
            if not (inspect.isfunction(verb) and inspect.isfunction(own)):
                continue
            taken = inspect.signature(verb).parameters.values()
            given = [one.name for one in taken if one.kind is one.POSITIONAL_OR_KEYWORD]
            named = [one.name for one in taken if one.kind is one.KEYWORD_ONLY]
            try:
                inspect.signature(own).bind(*given, **dict.fromkeys(named))
            except TypeError as error:
                call = ", ".join([*given[1:], *(f"{one}=" for one in named)])
                raise ConfigError(f"{cls.__name__}.{name}: {error}: runners call {name}({call})") from error

    @classmethod
    @abc.abstractmethod
    def is_available(cls) -> Availability:
        """Return whether this backend can run on this machine. If not, the result has the reason and the remedy."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """The record of what this device can do."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """The device of slots with placement "device", index included."""

    @abc.abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, placement: Placement) -> torch.Tensor:
        """Allocate uninitialised memory for one buffer on the device, or on the host (pinned if that has an effect)."""

    def pool(self) -> object | None:
        """Return a handle for memory that captures may share, or None if the device has none."""
        return None

    def stream(self) -> AbstractContextManager[object]:
        """Return the stream of warm-ups and captures as a context, which does nothing if the device has no streams."""
        return nullcontext()

    @abc.abstractmethod
    def capture(
        self,
        step: Capturable,
        *,
        pool: object | None = None,
        error_mode: str | None = None,
        parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS,
    ) -> Graph:
        """Record what `step` does, without lasting effect if the device has true capture.

        `parameters` has host tensors, by the name of the operator's argument that takes them. If the record says
        `host_parameters`, each replay passes their current values to the graph; else they are ordinary host memory.
        Raises CaptureError, chained to the error of the device or the step. Nothing is left half captured.
        """

    def interrupt(self, run: Interruption) -> Any:
        """End the graph that is being captured, call `run` outside of it, and continue with another graph.

        The graph captured so far has run when `run` is called, and each replay calls `run` at the same point. Returns
        the result of `run(None)` to the captured step, with its tensors copied into the graph's own memory. A replay
        calls `run(places)`: `places` has one tensor in that memory for each leaf of the result, and `run` must write
        all of them. Outside of a capture, `run(None)` is called once. Raises CaptureError if the device cannot do that.
        """
        del run
        raise CaptureError(f"backend {self.name!r} cannot interrupt a capture, which a break in a step needs")

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias of a tensor, so that later parts of the graph may reuse its memory. Call it inside `run`.

        The alias is valid for as long as the graph lives. Without it, each break would need memory of its own. Returns
        the tensor itself if it is not in that graph's memory.
        """
        return tensor

    def upload(self, nbytes: int) -> Upload | None:
        """Return a zeroed packet of `nbytes` bytes on the device with its upload, or None if the device has none.

        It is called if there is a `fusion()`, and if the record says `packed_uploads`.
        """
        del nbytes
        return None

    def fusion(self) -> Fusion | None:
        """Return the kernels that fill a bucket with one upload and one launch, or None if the device has none."""
        return None

    def mapped(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return host memory from `empty` as a tensor that kernels of the device can write, or itself if none can.

        A kernel makes a small copy faster than the device's copy engine.
        """
        return tensor

    def stream_key(self) -> Callable[[], int]:
        """Return a call that gives the current stream's number, which is constant if the device has no streams."""
        return int  # the function `int` returns 0

    def order(self, first: int, then: int) -> None:  # noqa: B027 - without streams there is nothing to wait for
        """Make stream number `then` wait for the work submitted so far to stream number `first`."""

    @abc.abstractmethod
    def event(self, again: Event | None = None) -> Event:
        """Return an event recorded now on the current stream.

        Args:
            again: An old event of this backend to reuse. The backend may record it again instead of making a new one.
        """

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all submitted work."""

    @abc.abstractmethod
    def memory(self) -> Memory:
        """Return the device's memory now."""
