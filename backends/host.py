"""What all backends on the CPU have in common: host memory, no streams, the host's clock."""

import ctypes
import math
import os
import resource
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Final, final

import torch
from torch.utils.dlpack import from_dlpack

from ..dataflow.capabilities import Lowering
from .base import Availability, Backend, Capabilities, Event, Fusion, Memory, Placement, Upload

LOWERINGS: Final[tuple[Lowering, ...]] = ("foreach", "slot_by_slot", "in_graph", "fused")
"""Foreach is the fastest here; the fused ones show what a device will do."""
_CAPABILITIES = Capabilities(
    foreach_mixed=True, capture_copies=frozenset({"device", "pinned", "pageable"}), lowerings=LOWERINGS
)


class HostEvent(Event):
    """A moment on the host's clock: CPU work is done when the call returns."""

    def __init__(self) -> None:
        self._nanoseconds = time.perf_counter_ns()

    def query(self) -> bool:
        """Always: the work before this moment is done."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def microseconds_since(self, earlier: Event) -> float:
        """Host time between two moments, in microseconds."""
        if not isinstance(earlier, HostEvent):
            message = f"expected an event of a CPU backend, got {type(earlier).__name__}"
            raise TypeError(message)
        return (self._nanoseconds - earlier._nanoseconds) / 1e3  # noqa: SLF001 - of the same class


@final
class HostUpload(Upload):
    """A packet that is written at once: what reads the packet before has done so."""

    def __init__(self, nbytes: int) -> None:
        with torch.inference_mode(mode=False):
            self._packet = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        self._address = self._packet.data_ptr()
        self._kept: object = None

    @property
    def packet(self) -> torch.Tensor:
        """The packet."""
        return self._packet

    @property
    def nbytes(self) -> int:
        """The packet's."""
        return self._packet.nbytes

    def send(self, data: bytes, kept: object) -> None:
        """Write the packet; what it points to lives until the next one."""
        self._kept = kept
        ctypes.memmove(self._address, data, len(data))


class HostBackend(Backend):
    """What every backend on the CPU has in common."""

    @classmethod
    def is_available(cls) -> Availability:
        """Everywhere."""
        return Availability(available=True)

    @property
    def capabilities(self) -> Capabilities:
        """Foreach everywhere, copies in capture from any memory, int64 cache locations."""
        return _CAPABILITIES

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, placement: Placement) -> torch.Tensor:
        """Host memory for either placement, which torch refuses to resize: another tensor owns it."""
        del placement
        nbytes = math.prod(shape) * dtype.itemsize
        with torch.inference_mode(mode=False):
            owner = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            return from_dlpack(owner).view(dtype).view(shape)

    def pool(self) -> object | None:
        """None: there is no graph memory to share."""
        return None

    def stream(self) -> AbstractContextManager[object]:
        """No stream: work runs where it is called."""
        return nullcontext()

    def upload(self, nbytes: int) -> Upload | None:
        """A packet in host memory."""
        return HostUpload(nbytes)

    def fusion(self) -> Fusion | None:
        """The fused fill in plain code."""
        from .host_fill import HostFusion  # noqa: PLC0415 - it registers an operator, which few need

        return HostFusion()

    def event(self) -> Event:
        """The present moment."""
        return HostEvent()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def memory(self) -> Memory:
        """The machine's memory, and this process's largest resident size so far as what is allocated."""
        page = os.sysconf("SC_PAGE_SIZE")
        return Memory(
            total=os.sysconf("SC_PHYS_PAGES") * page,
            free=os.sysconf("SC_AVPHYS_PAGES") * page,
            allocated=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
