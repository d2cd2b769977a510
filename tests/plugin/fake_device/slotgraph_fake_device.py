"""A device that is a CPU in disguise: int32 cache locations, every buffer by itself, two tensors in a foreach call."""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, final

import attrs
import torch

from slotgraph.backends import NO_PARAMETERS, Availability, Backend, Capabilities, Event, Graph, Memory, Placement
from slotgraph.dataflow.errors import CaptureError

_RECORD = Capabilities(
    roles={"cache_loc": torch.int32},
    fills={"seq_len_fill": 0},
    pools_inputs=False,
    foreach_chunk=2,
    arenas=False,
    graphs_hint=1800,
)


class FakeEvent(Event):
    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end_event: "FakeEvent") -> float:
        return (end_event._seconds - self._seconds) * 1e3


class FakeGraph(Graph):  # a step that is called again
    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        self.outputs = step()

    def replay(self) -> None:
        self.outputs = self._step()


class _Fake(Backend):
    """What both variants share; nothing of slotgraph's own adapters is used."""

    _on_stream = 0

    @classmethod
    def is_available(cls) -> Availability:
        return Availability(available=True)

    @property
    def capabilities(self) -> Capabilities:
        return _RECORD

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, placement: Placement) -> torch.Tensor:
        """A tensor of its own, at the start of its storage, holding what must not be read."""
        del placement
        with torch.inference_mode(mode=False):
            garbage = torch.full((math.prod(shape) * dtype.itemsize,), 0xA5, dtype=torch.uint8)
            return garbage.view(dtype).view(shape)

    @contextmanager
    def stream(self) -> Iterator[object]:
        self._on_stream += 1
        try:
            yield self
        finally:
            self._on_stream -= 1

    def capture(
        self,
        step: Callable[[], Any],
        *,
        pool: object | None = None,
        error_mode: str | None = None,
        parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS,
    ) -> Graph:
        """Call the step once, on the stream alone."""
        del pool, error_mode, parameters
        if not self._on_stream:
            raise CaptureError("this device captures on its own stream only")
        try:
            return FakeGraph(step)
        except Exception as error:
            raise CaptureError(f"the step raised {type(error).__name__}: {error}") from error

    def event(self, again: Event | None = None) -> Event:
        del again
        return FakeEvent()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def memory(self) -> Memory:
        page = os.sysconf("SC_PAGE_SIZE")
        return Memory(os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page, 0)


@final
class FakeBackend(_Fake):
    """The device, with foreach calls of two tensors."""

    name: ClassVar[str] = "fake-device"
    priority: ClassVar[int] = -5


@final
class SingleBackend(_Fake):  # the device on a bad day: no foreach at all
    name: ClassVar[str] = "fake-device-single"
    priority: ClassVar[int] = -6

    @property
    def capabilities(self) -> Capabilities:
        return attrs.evolve(_RECORD, foreach_device=False)


@final
class AbsentBackend(_Fake):  # the same device, on a machine that has none
    name: ClassVar[str] = "fake-device-absent"
    priority: ClassVar[int] = 1000

    @classmethod
    def is_available(cls) -> Availability:
        return Availability(available=False, reason="no fake device: modprobe fake")
