"""Host reads: slots in host memory that a device copies from when it gets there, which is after a replay has returned.

The host's next fill would overwrite them under the copy. So where a step is seen to copy from such slots, an event
stands behind each of its runs, and the next fill of that memory waits for it; all other runners spend nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..backends.base import Backend
from ..dataflow.bucket import Absent
from ..dataflow.buffers import Buffers, BufferTurn, span
from ..dataflow.capabilities import HOST
from ..dataflow.plan import NONE
from .traffic import Traffic, run_seen


class HostReads:
    """What one runner's device work reads of slots in host memory.

    possible: whether there is any slot in host memory. slots: those that operators were seen to read, and by which.
    """

    def __init__(self, backend: Backend, buffers: Buffers | None) -> None:
        self.buffers = buffers
        self.slots: dict[str, str] = {}
        self._backend = backend
        self._turn = BufferTurn() if buffers is None else buffers.turn
        handed = backend.capabilities.host_parameters  # by the host, at each replay
        host = [
            buffer
            for buffer in buffers or ()
            if buffer.slot.placement == HOST and buffer.nbytes and not (handed and buffer.slot.is_parameter)
        ]
        self._spans = [(*span(buffer.tensor), buffer.name) for buffer in host]
        self.possible = bool(host)
        self._looked: set[Absent] = set()
        self._unsure = False

    def wants(self, absent: Absent = NONE) -> bool:
        """Whether steps without some optional slots should be looked at."""
        return self.possible and absent not in self._looked

    @property
    def notes(self) -> bool:
        """Whether steps are followed by an event: operators read host slots, or nobody could tell."""
        return bool(self.slots) or self._unsure or (self.possible and not self._looked)

    def look(self, run: Callable[[], Any], absent: Absent = NONE) -> Any:
        """Run a step, and see which host slots its operators read; what it returned."""
        self._looked.add(absent)
        try:
            return run_seen(Traffic(done=self._note), run)
        except BaseException:
            self._unsure = True
            raise

    def _note(self, operator: str, taken: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """An operator that moves data between a host slot and the device; on the CPU, where both are one, any."""
        kind = self._backend.device.type
        if kind == "cpu" or any(tensor.device.type == kind for tensor in (*taken, *results)):
            for tensor in taken:
                address = tensor.data_ptr() if tensor.is_cpu else None
                for low, high, name in self._spans:
                    if address is not None and low <= address < high:
                        self.slots.setdefault(name, operator)

    def wait(self) -> None:
        """Before host slots are written: until the device has read what steps so far read there.

        No other runner's: of a pool's runners, each has its host slots for itself.
        """
        event = self._turn.reading
        if event is not None:
            event.synchronize()
            self._turn.reading = None

    def note(self) -> None:
        """A step was handed to the device."""
        if self.notes:
            self._turn.reading = self._backend.event()
