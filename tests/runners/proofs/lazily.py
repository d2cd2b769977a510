"""A device whose work is done later: what the tests of races need, on a machine without one.

Memory of placement "host" is the host's and is written at once. All other tensors are the device's: what writes them is
put off until somebody waits or reads, as a stream does it. A replay is put off as a whole, and reads the slots in host
memory only then.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, final

import attrs
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from slotgraph.backends import Availability, Backend, Capabilities
from slotgraph.backends.base import NO_PARAMETERS, Event, Fusion, Graph, Interruption, Memory, Placement, Upload
from slotgraph.backends.cpu_capture import CpuCaptureBackend
from slotgraph.backends.ring import Ring
from slotgraph.dataflow.capabilities import LADDER

_INNER = CpuCaptureBackend()
_NEW = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


class Queue:
    """The work that is put off. honest: whether events tell the truth; else they say at once that they have passed."""

    def __init__(self, *, honest: bool = True) -> None:
        self.work: list[Callable[[], object]] = []
        self.honest = honest
        self.done = self.handed = 0

    def add(self, call: Callable[[], object]) -> None:
        """Put it off."""
        self.work.append(call)
        self.handed += 1

    def run(self, until: int | None = None) -> None:
        """Do it, up to a point."""
        with _disable_current_modes():  # else what is done would be put off again
            while self.work and (until is None or self.done < until):
                self.done += 1
                self.work.pop(0)()


@attrs.define(eq=False)
class LazyEvent(Event):
    """A point in the queue."""

    queue: Queue
    at: int

    def query(self) -> bool:
        return self.queue.done >= self.at or not self.queue.honest

    def synchronize(self) -> None:
        if self.queue.honest:
            self.queue.run(self.at)

    def microseconds_since(self, earlier: Event) -> float:
        raise NotImplementedError


class LazyGraph(Graph):
    """A graph of cpu-capture's, replayed later."""

    def __init__(self, inner: Graph, queue: Queue) -> None:
        self._inner = inner
        self._queue = queue

    @property
    def outputs(self) -> Any:
        return self._inner.outputs

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes

    def replay(self) -> None:
        self._queue.add(self._inner.replay)

    def check_addresses(self) -> None:
        self._inner.check_addresses()


@final
class LazyBackend(Backend):
    """The lazy device. ring: whether its uploads go through a ring whose events tell the truth."""

    name: ClassVar[str] = "lazy"

    def __init__(self, *, ring: bool = True) -> None:
        self.queue = Queue()
        self.marks = Queue(honest=ring)
        self.host: list[tuple[int, int, torch.Tensor]] = []

    @classmethod
    def is_available(cls) -> Availability:
        return Availability(available=True)

    @property
    def capabilities(self) -> Capabilities:
        return attrs.evolve(_INNER.capabilities, lowerings=LADDER, packed_uploads=True)

    @property
    def device(self) -> torch.device:
        return _INNER.device

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, placement: Placement) -> torch.Tensor:
        made = _INNER.empty(shape, dtype, placement)
        if placement == "host":
            self.host.append((made.data_ptr(), made.data_ptr() + made.nbytes, made))
        return made

    def pool(self) -> object | None:
        return None

    def stream(self) -> AbstractContextManager[object]:
        return _INNER.stream()

    def capture(
        self,
        step: Callable[[], Any],
        *,
        pool: object | None = None,
        error_mode: str | None = None,
        parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS,
    ) -> Graph:
        self.synchronize()
        return LazyGraph(_INNER.capture(step, pool=pool, error_mode=error_mode, parameters=parameters), self.queue)

    def interrupt(self, run: Interruption) -> Any:
        return _INNER.interrupt(run)

    def upload(self, nbytes: int) -> Upload | None:
        packet = torch.zeros(nbytes, dtype=torch.uint8)
        entries = lambda size: torch.zeros(size, dtype=torch.uint8)  # noqa: E731 - the ring's own memory
        return Ring(packet, entries, self._start(packet), self._mark, self.synchronize)

    def _start(self, packet: torch.Tensor) -> Callable[[torch.Tensor, int, int], None]:
        to = packet.data_ptr()

        def start(memory: torch.Tensor, at: int, nbytes: int) -> None:
            self.queue.add(lambda: ctypes.memmove(to, memory.data_ptr() + at, nbytes))

        return start

    def _mark(self) -> LazyEvent:
        made = LazyEvent(self.queue, self.queue.handed)
        return made if self.marks.honest else LazyEvent(self.marks, 0)

    def fusion(self) -> Fusion | None:
        return _INNER.fusion()

    def event(self) -> Event:
        return LazyEvent(self.queue, self.queue.handed)

    def synchronize(self) -> None:
        self.queue.run()

    def memory(self) -> Memory:
        return _INNER.memory()

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in memory of the host's."""
        return any(low <= tensor.data_ptr() < high for low, high, _ in self.host)


class LazyMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Has the host's calls on the device's tensors put off: clones, and whatever writes in place. Others wait first."""

    def __init__(self, backend: LazyBackend) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._backend = backend

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Put off, do, or wait."""
        del types
        named, queue = dict(kwargs or {}), self._backend.queue
        if func.is_view or func._opname in _NEW or func._opname in ("detach", "alias", "is_pinned"):
            return func(*args, **named)
        first = next((leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)), None)
        if first is None:
            return func(*args, **named)
        if func._opname == "clone":
            made = torch.empty_like(args[0])
            queue.add(lambda: made.copy_(args[0]))
            return made
        if func._schema.is_mutable and not self._backend.is_host(first):
            queue.add(lambda: func(*args, **named))
            return None if not func._schema.returns else args[0]
        if not func._schema.is_mutable:
            queue.run()
        return func(*args, **named)
