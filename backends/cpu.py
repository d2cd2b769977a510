"""The CPU: host memory, no streams, the host's clock; and the backend `cpu`, whose replays run the step's code again.

The fused fill does what the kernel does, in plain code over the same table and packet, and must leave the same bytes.
It is a torch operator, so that a capture on the CPU records it like any other.
"""

import ctypes
import functools
import math
import os
import resource
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch
from torch.utils.dlpack import from_dlpack

from ..dataflow.capabilities import Capabilities, Placement
from ..dataflow.errors import CaptureError, ReplayError, SlotGraphError
from ..dataflow.guard import outside_inference
from ..dataflow.packet import BYTE, CODE_SHIFT, CODES, COLUMNS, OWNER_SHIFT, RAGGED, TAIL, WORD, Upload
from .base import NO_PARAMETERS, Availability, Backend, Capturable, Event, Fusion, Graph, Interruption, Memory
from .device_graph import not_captured

HOST_CAPABILITIES: Final = Capabilities(
    foreach_mixed=True, lowerings=("direct", "foreach", "slot_by_slot", "in_graph", "fused")
)
"""Copies by address are the fastest on a CPU. The fused lowerings show what a device will do."""


class HostEvent(Event):
    """A moment on the host's clock. CPU work is done when the call returns."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        """Return True: the work before this moment is done."""
        return True

    def synchronize(self) -> None:
        """Return at once, since there is nothing to wait for."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the host time between two moments, in milliseconds."""
        return float(end_event._seconds - self._seconds) * 1e3  # noqa: SLF001 - of the same class


@final
class HostUpload(Upload):
    """A packet that is written at once, since all earlier reads of it are done."""

    def __init__(self, nbytes: int) -> None:
        with outside_inference():
            self.packet = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        self.nbytes = nbytes
        self._address = self.packet.data_ptr()
        self._kept: object = None

    def send(self, data: bytes, kept: object) -> None:
        """Write the packet. What it points to lives until the next one."""
        self._kept = kept
        ctypes.memmove(self._address, data, len(data))


_PLACE: Final = (1 << 32) - 1
_DTYPES: Final = {code: dtype for dtype, code in CODES.items() if dtype != torch.bool}


# torch.library.custom_op would import the compiler, which takes seconds.
_LIBRARY: Final[Any] = torch.library.Library("slotgraph", "FRAGMENT")
_LIBRARY.define("fill_lanes(Tensor(b!) table, Tensor packet, Tensor(a!)[] targets) -> ()")
_LIBRARY.define("edit_lanes(Tensor table, Tensor packet, Tensor(a!)[] targets) -> ()")


@torch.library.impl(_LIBRARY, "fill_lanes", "CPU")
def _fill_lanes(table: torch.Tensor, packet: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Fill every lane of a table if the packet is new and for this table, else advance it. `targets`: the buffers."""
    del targets
    rows = table.view(-1, COLUMNS)
    words = _words(table, packet)
    armed, number = words[:2]
    for row, taken in zip(rows.tolist(), rows[:, -1], strict=True):
        is_new = not number or number != int(taken)
        is_mine = armed == row[7] >> OWNER_SHIFT
        if is_new and is_mine:
            place = row[1] & _PLACE
            lanes = row[1] >> 32
            _fill(row, words, words[place], words[place + lanes], words[place + 2 * lanes])
        elif number and armed:
            _advance(row, _live(row, words), moves=not is_new, tail=bool(row[7] & TAIL))
        if number and armed:
            taken.fill_(number)


@torch.library.impl(_LIBRARY, "edit_lanes", "CPU")
def _edit_lanes(table: torch.Tensor, packet: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Advance every lane of a table, then move and write rows of requests as the packet of an edit says."""
    del targets
    words = _words(table, packet)
    rows = words[2]
    counts = words[3]
    if not words[0]:
        return
    moves = [(pair & _PLACE, pair >> 32) for pair in words[rows : rows + (counts & _PLACE)]]
    writes = words[rows + len(moves) : rows + len(moves) + (counts >> 32)]
    blocks = table.view(-1, COLUMNS).tolist()
    for row in blocks:  # all lanes advance before the edit, since a lane may advance from another lane's values
        _advance(row, _live(row, words, before=True), moves=True, tail=False)
    for row in blocks:
        target, place, outer, _, padded, stride, _, flags, _, _, each, *_ = row
        size = flags & BYTE
        lanes = place >> 32
        to = target + outer * stride * size
        piece = each * size
        for one, other in moves:
            ctypes.memmove(to + other * piece, to + one * piece, piece)
        code, pace, source = (words[(place & _PLACE) + part * lanes] for part in range(3))
        pace = pace or len(writes) * each
        for index, request in enumerate(writes if each else [0]) if code >= 0 else ():
            count = each or padded
            first = outer * pace + index * each
            if request >= 0 and pace == RAGGED:
                _copy_ragged(row, source, index * each, to + request * piece, each)
            elif request >= 0:
                _copy(source, first, to + request * piece, count, code, flags)


def _words(table: torch.Tensor, packet: torch.Tensor) -> list[int]:
    """Return the words of a packet for a table, including the rows of an edit."""
    words = packet.view(torch.int64)
    armed, _, place, counts = words[:4].tolist()
    rows = place + (counts & _PLACE) + (counts >> 32) if armed else 0
    first = int(table.view(-1, COLUMNS)[0, 1]) if table.numel() else 4
    found: list[int] = words[: max((first & _PLACE) + 3 * (first >> 32), rows)].tolist()
    return found


def _live(row: list[int], words: list[int], *, before: bool = False) -> int:
    """Return the number of live elements of a table row, which is 0 outside the live rows of its first axis."""
    padded = row[4]
    count, inner, own, owns = row[11:15]
    shift = (count >> 32) * before
    return min(words[(count & _PLACE) + shift] * inner, padded) if own < words[owns + shift] else 0


def _fill(row: list[int], words: list[int], code: int, pace: int, source: int) -> None:
    """Fill one outer row of one lane, from a table row's first element on. Later table rows may write the same."""
    target, _, outer, start, _, stride, _, flags, *_, count, inner, _, _, _ = row
    if code < 0:
        return
    live = _live(row, words)
    to = target + (outer * stride + start) * (flags & BYTE)
    if pace == RAGGED:
        if not start:  # the first table row writes all of them
            _copy_ragged(row, source, 0, to, live)
    elif source and live > start:
        apart = pace or words[count & _PLACE] * inner
        _copy(source, outer * apart + start, to, live - start, code, flags)
    _reset(row, live)


def _advance(row: list[int], live: int, *, moves: bool, tail: bool) -> None:
    """Advance the live elements of a table row, if it has a rule, and reset its tail."""
    target, _, outer, _, _, stride, _, flags, source, add, *_ = row
    size = flags & BYTE
    if moves and source and live:
        _copy(source, outer * stride, target + outer * stride * size, live, 0, flags)
        if add:
            dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
            numbers = (ctypes.c_char * (live * size)).from_address(target + outer * stride * size)
            torch.frombuffer(numbers, dtype=dtype).add_(add)
    if tail:
        _reset(row, live)


def _reset(row: list[int], live: int) -> None:
    """Reset the tail of one outer row."""
    target, _, outer, _, padded, stride, pad, flags, *_ = row
    size = flags & BYTE
    if flags & TAIL and live < padded:
        tail = pad.to_bytes(WORD, "little", signed=True)[:size] * (padded - live)
        ctypes.memmove(target + (outer * stride + live) * size, tail, len(tail))


def _copy(source: int, first: int, to: int, count: int, code: int, flags: int) -> None:
    """Copy `count` elements of a source, from index `first` on, and convert them if there is a dtype code."""
    if code:
        _convert(source, first, to, count, code, flags >> CODE_SHIFT & BYTE)
    else:
        ctypes.memmove(to, source + first * (flags & BYTE), count * (flags & BYTE))


def _copy_ragged(row: list[int], source: int, first: int, to: int, count: int) -> None:
    """Copy ragged rows to `count` elements, from element `first` of their table on, with the pad value behind each.

    A row of length -1 stays as it is.
    """
    size = row[7] & BYTE
    columns = row[12]
    pad = row[6].to_bytes(WORD, "little", signed=True)[:size]
    for number in range(first // columns, (first + count) // columns):
        begin, length = struct.unpack("<2i", ctypes.string_at(source + WORD * number, WORD))
        if length >= 0:
            data = ctypes.string_at(source + begin * size, length * size) + pad * (columns - length)
            ctypes.memmove(to, data, len(data))
        to += columns * size


def _convert(source: int, first: int, to: int, count: int, code: int, goal: int) -> None:
    """Write `count` elements of one dtype as another, as torch converts them."""
    one = _DTYPES[code]
    other = _DTYPES[goal]
    data = ctypes.string_at(source + first * one.itemsize, count * one.itemsize)
    made = torch.frombuffer(bytearray(data), dtype=one).to(other)
    ctypes.memmove(to, made.data_ptr(), made.nbytes)


HOST_FUSION: Final = Fusion(
    1 << 48,
    lambda *given: functools.partial(torch.ops.slotgraph.fill_lanes, *given),
    lambda *given: functools.partial(torch.ops.slotgraph.edit_lanes, *given),
)
"""The fused fill in plain code. Its blocks are so large that one row of a table covers any slot's row."""


class HostBackend(Backend):
    """What every backend on the CPU has in common."""

    @classmethod
    def is_available(cls) -> Availability:
        """Return that the CPU is available, which it always is."""
        return Availability(available=True)

    @property
    def capabilities(self) -> Capabilities:
        """The CPU's capabilities: every lowering, copies by address first, and int64 cache locations."""
        return HOST_CAPABILITIES

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, placement: Placement) -> torch.Tensor:
        """Allocate host memory for either placement. Torch refuses to resize it, since another tensor owns it."""
        del placement
        nbytes = math.prod(shape) * dtype.itemsize
        with outside_inference():
            owner = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            return from_dlpack(owner).view(dtype).view(shape)

    def upload(self, nbytes: int) -> Upload | None:
        """Make a packet in host memory."""
        return HostUpload(nbytes)

    def fusion(self) -> Fusion | None:
        """Return the fused fill in plain code."""
        return HOST_FUSION

    def event(self, again: Event | None = None) -> Event:
        """Return the present moment."""
        del again
        return HostEvent()

    def synchronize(self) -> None:
        """Return at once, since there is nothing to wait for."""

    def memory(self) -> Memory:
        """Return the machine's memory. `allocated` is the largest resident size of this process so far."""
        page = os.sysconf("SC_PAGE_SIZE")
        return Memory(
            total=os.sysconf("SC_PHYS_PAGES") * page,
            free=os.sysconf("SC_AVPHYS_PAGES") * page,
            allocated=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )


@final
class CallableGraph(Graph):
    """A step that is simply called again. Its outputs are new tensors each time."""

    is_recorded = False

    def __init__(self, step: Capturable) -> None:
        self._step = step
        self.outputs = step()

    def replay(self) -> None:
        """Call the step again. Raise ReplayError chained to its error, except for errors of this library."""
        try:
            self.outputs = self._step()
        except SlotGraphError:
            raise
        except Exception as error:
            raise ReplayError(f"the step raised {type(error).__name__}: {error}") from error


@final
class CpuBackend(HostBackend):
    """Runs steps eagerly on fixed views: the fastest on a CPU, with none of a graph's restrictions."""

    name = "cpu"

    def capture(
        self,
        step: Capturable,
        *,
        pool: object | None = None,
        error_mode: str | None = None,
        parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS,
    ) -> Graph:
        """Run the step once and keep it.

        A replay runs its code again, which reads host parameters as ordinary tensors.
        """
        del pool, error_mode, parameters
        try:
            return CallableGraph(step)
        except CaptureError:
            raise
        except Exception as error:
            raise not_captured(error) from error

    def interrupt(self, run: Interruption) -> Any:
        """Call `run` once. A replay runs the whole step again, and comes to this call each time."""
        return run(None)
