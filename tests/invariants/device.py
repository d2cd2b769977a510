"""A device with streams whose work is done later, at random.

Memory of placement "host" is the host's, and is written at once. All other tensors are the device's: what writes them,
and each replay, goes to the current stream, and is done when somebody waits for it, or when the test says so.
"""

import ctypes
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final, final

import attrs
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from slotgraph.backends import HOST, Capabilities, Event, Fusion, Graph, Placement, Upload, load
from slotgraph.backends.cpu import HOST_FUSION, HostBackend
from slotgraph.backends.ring import Ring

INNER: Final = load("cpu-capture")()
_NEW: Final = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_LOOKS: Final = frozenset({"detach", "alias", "is_pinned"})


@attrs.define(eq=False)
class Stream:  # work in order. handed: how much ever came. done: how much of it was begun
    work: list[Callable[[], object]] = attrs.field(factory=list)
    handed: int = 0
    done: int = 0

    def run(self, until: int) -> None:
        while self.work and self.done < until:
            self.done += 1
            self.work.pop(0)()


@attrs.define(eq=False)
class Point(Event):  # a point in a stream. tells: whether it says the truth; else it says that it has passed
    stream: Stream
    at: int
    tells: bool = True

    def query(self) -> bool:
        return self.stream.done >= self.at or not self.tells

    def synchronize(self) -> None:
        if self.tells:
            with _disable_current_modes():  # else what is done would be put off again
                self.stream.run(self.at)

    def elapsed_time(self, end_event: Any) -> float:
        raise NotImplementedError


@final
class LaterGraph(Graph):  # a graph of cpu-capture's, which is replayed on the current stream
    def __init__(self, inner: Graph, device: "Device") -> None:
        self._inner, self._device = inner, device
        self.outputs, self.nbytes = inner.outputs, inner.nbytes

    def replay(self) -> None:
        self._device.add(self._inner.replay)

    def check_addresses(self) -> None:
        self._inner.check_addresses()


@final
class Device(HostBackend):
    """The device. current: the stream that is. buffers: all memory that it was asked for.

    fault: what it breaks. `mark`: events of uploads say that they have passed.
    """

    name: ClassVar[str] = "invariants"

    def __init__(self, fault: str = "") -> None:
        self.fault, self.current, self.is_late = fault, 0, False
        self.streams = [Stream() for _ in range(3)]
        self.buffers: list[torch.Tensor] = []
        self._host: list[torch.Tensor] = []

    @property
    def capabilities(self) -> Capabilities:
        record = INNER.capabilities
        lowerings = tuple(one for one in record.lowerings if one != "direct")
        return attrs.evolve(record, packed_uploads=True, lowerings=lowerings)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, placement: Placement) -> torch.Tensor:
        made = super().empty(shape, dtype, placement)
        self.buffers.append(made)
        return self._on_host(made) if placement == HOST else made

    def _on_host(self, memory: torch.Tensor) -> torch.Tensor:
        """The same, as the host's; it lives as long as this does, so that its address tells."""
        self._host.append(memory)
        return memory

    def capture(self, step: Callable[[], Any], **options: Any) -> Graph:
        return LaterGraph(INNER.capture(step, **options), self)

    def upload(self, nbytes: int) -> Upload:
        packet = torch.zeros(nbytes, dtype=torch.uint8)
        to = packet.data_ptr()

        def start(memory: torch.Tensor, at: int, count: int) -> None:
            self.add(lambda: ctypes.memmove(to, memory.data_ptr() + at, count))

        def pinned(count: int) -> torch.Tensor:
            return self._on_host(torch.zeros(count, dtype=torch.uint8))

        return Ring(packet, pinned, start, lambda _: self._point(tells=self.fault != "mark"), self.synchronize)

    def fusion(self) -> Fusion:
        return HOST_FUSION

    def stream_key(self) -> Callable[[], int]:
        return lambda: self.current

    def order(self, first: int, then: int) -> None:
        earlier = self.streams[first]
        at = earlier.handed
        if self.is_late:
            self._put(self.streams[then], lambda: earlier.run(at))

    def event(self, again: Event | None = None) -> Event:
        del again
        return self._point(tells=True)

    def _point(self, *, tells: bool) -> Point:
        stream = self.streams[self.current]
        return Point(stream, stream.handed, tells)

    def synchronize(self) -> None:
        self._drain(random.Random(0))

    def bytes_now(self) -> list[bytes]:
        return [one.view(-1).view(torch.uint8).numpy().tobytes() for one in self.buffers]

    def add(self, call: Callable[[], object]) -> None:
        if self.is_late:
            self._put(self.streams[self.current], call)
        else:
            call()

    @staticmethod
    def _put(stream: Stream, call: Callable[[], object]) -> None:
        stream.work.append(call)
        stream.handed += 1

    def _drain(self, draw: random.Random) -> None:
        """Do all work, the streams by turns as they are drawn."""
        with _disable_current_modes():
            while waiting := [stream for stream in self.streams if stream.work]:
                stream = draw.choice(waiting)
                stream.run(stream.done + 1)

    @contextmanager
    def later(self, draw: random.Random | None = None) -> Iterator[None]:
        """Work is done later, at the latest at the end of the block."""
        self.is_late = True
        try:
            with _Later(self):
                yield
            self._drain(draw or random.Random(0))
        finally:
            self.is_late = False

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in memory of the host's."""
        at = tensor.data_ptr()
        return any(one.data_ptr() <= at < one.data_ptr() + one.nbytes for one in self._host)


class _Later(TorchDispatchMode):
    """Puts off what writes the device's tensors, and copies of them; what reads them waits for the current stream."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        named, device, name = dict(kwargs or {}), self._device, func._opname
        first = next((leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)), None)
        if first is None or func.is_view or name in _NEW or name in _LOOKS:
            return func(*args, **named)
        if name == "clone":
            made = torch.empty_like(args[0])
            device.add(lambda: made.copy_(args[0]))
            return made
        if func._schema.is_mutable and not device.is_host(first):
            device.add(lambda: func(*args, **named))
            return args[0] if func._schema.returns else None
        if not func._schema.is_mutable:
            with _disable_current_modes():
                stream = device.streams[device.current]
                stream.run(stream.handed)
        return func(*args, **named)
