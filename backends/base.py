"""The abstract base of all backends: a capability record and a handful of verbs."""

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
    """Whether a backend can run here, and why not; true or false in a condition."""

    available: bool
    reason: str = ""

    def __bool__(self) -> bool:
        """Whether the backend can run here."""
        return self.available


def mode_of(error_mode: str | None, modes: Sequence[str]) -> str:
    """A mode of capture, by default the first. CaptureError where there is no such mode."""
    mode = modes[0] if error_mode is None else error_mode
    if mode not in modes:
        raise CaptureError(f"error_mode is one of {', '.join(map(repr, modes))}, not {error_mode!r}")
    return mode


NO_PARAMETERS: Final[Mapping[str, torch.Tensor]] = {}
"""What `capture` takes where a step has no host parameters."""
Capturable = Callable[[], Any]
"""A step without arguments, as a device records it."""
Interruption = Callable[[Sequence[Any] | None], Any]
"""What is called between two graphs: without places it answers, with them it writes its answer there."""


@attrs.frozen
class Memory:
    """A device's memory at one moment, in bytes: in all, free, and held by this process's allocator."""

    total: int
    free: int
    allocated: int


class Graph(abc.ABC):
    """One captured step. Its addresses are fixed from capture on.

    Attributes:
        outputs: What the captured step returned; the same tensors at each replay where the device has true graphs.
        nbytes: Bytes that it holds beside its inputs and outputs, as far as the device can tell.
        parts: Graphs that a replay launches in turn; what interrupted the capture runs between them.
        is_recorded: Whether a replay repeats what was recorded, at its addresses; else it calls the step again.
    """

    outputs: Any = None
    nbytes: int = 0
    parts: int = 1
    is_recorded: bool = True

    @abc.abstractmethod
    def replay(self) -> None:
        """Run the captured step again on whatever its inputs hold now. ReplayError where that cannot be."""

    def check_addresses(self) -> None:  # noqa: B027 - most devices cannot tell, which is no fault of theirs
        """Raise ReplayError if memory that the graph reads has moved since capture, as far as the device can tell."""


class Event(Protocol):
    """A point in the device's work that the host can ask about, as torch's own events are."""

    def query(self) -> bool:
        """Whether the device has passed this point."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed this point."""

    def elapsed_time(self, end_event: Any) -> float:
        """Device time from this event to a later one, in milliseconds; both must have passed."""
        ...


@attrs.frozen
class Fusion:
    """A device's own way to fill a bucket in one upload and one launch: `dataflow.packet` says of what.

    Attributes:
        block: Words that one row of a table takes.
        kernel: Takes a table, a packet, and the buffers that are written. Returns a call that launches the kernel over
            the table on the current stream, which may be captured.
        edit: Takes the same. Returns a call that advances all lanes, and then moves and writes rows of requests as an
            edit's packet says. None where the device has no such way: rows are then edited slot by slot.
    """

    block: int
    kernel: Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], Callable[[], None]]
    edit: Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], Callable[[], None]] | None = None


class Backend(abc.ABC):
    """A device adapter. Subclasses are final, and are made without arguments.

    name: what users write. priority: among the available ones, "auto" takes the highest.
    """

    name: ClassVar[str]
    priority: ClassVar[int] = 0

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Check that the class's verbs take what runners call them with. ConfigError names the verb."""
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
        """Whether this backend can run here; where not, the reason and the command that helps."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """What this device can do."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Where slots with placement "device" live, index included."""

    @abc.abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, placement: Placement) -> torch.Tensor:
        """Uninitialised memory for one buffer: on the device, or on the host (pinned where that means something)."""

    def pool(self) -> object | None:
        """A handle for memory that captures may share; None where the device has no such thing."""
        return None

    def stream(self) -> AbstractContextManager[object]:
        """The stream that warm-ups and captures run on, as a context; one that does nothing where there are none."""
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
        """Record what `step` does, without lasting effect where the device has true capture.

        parameters: host tensors, by the name of the operator's argument that takes them. Where the record says
        `host_parameters`, each replay hands the graph what they hold then; elsewhere they are ordinary host memory.
        Raises CaptureError, chained to what the device or the step said; nothing is left half captured.
        """

    def interrupt(self, run: Interruption) -> Any:
        """In the middle of a capture: end the graph so far, call `run` as it is, and go on with another graph.

        What the graph so far does has been done when `run` is called, and a replay calls it again at the same place.
        Returns what the captured step gets: the answer of `run(None)`, its tensors in places of the graph's own
        memory. A replay calls `run(places)`, with one place for each leaf of the answer, which it must write. Outside
        of a capture `run(None)` is called once. Raises CaptureError where the device cannot do that.
        """
        del run
        raise CaptureError(f"backend {self.name!r} cannot interrupt a capture, which a break in a step needs")

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """In `run` of an interruption: the same memory, for as long as the graph lives, but free for its later parts.

        Else memory for each break alone would be kept apart. The same tensor where it is no memory of that graph.
        """
        return tensor

    def upload(self, nbytes: int) -> Upload | None:
        """A packet of so many bytes on the device, which holds zeros, and what feeds it; None where there is no way.

        Asked for where there is a `fusion()`, and where the record says `packed_uploads`.
        """
        del nbytes
        return None

    def fusion(self) -> Fusion | None:
        """The device's way to fill in one upload and one launch; None where it has no such way."""
        return None

    def mapped(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same host memory, from `empty`, as a tensor that kernels of the device write; itself where none can.

        A small copy by a kernel takes a device less time than one by its copy engine.
        """
        return tensor

    def stream_key(self) -> Callable[[], int]:
        """A call that tells the current stream by a number; one number where the device has no streams."""
        return int  # int() is 0

    def order(self, first: int, then: int) -> None:  # noqa: B027 - there is nothing to wait for without streams
        """Have one stream, told by its number, wait for what was handed to another so far."""

    @abc.abstractmethod
    def event(self, again: Event | None = None) -> Event:
        """An event recorded now on the current stream.

        Args:
            again: An event of this backend that nobody needs any more, to record it anew if that takes less time.
        """

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all work handed to it."""

    @abc.abstractmethod
    def memory(self) -> Memory:
        """The device's memory now."""
