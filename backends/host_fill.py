"""The fused fill on host memory: what the kernel does, in plain code over the same table and packet.

It is an operator of torch's, so that a capture on the CPU records it like any other. It shows on a laptop what the
device will do, and is what the kernel is held to.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch

from ..dataflow.lanes import BYTE, CODE_SHIFT, CODES, COLUMNS, OWNER_SHIFT, SHIFT, TAIL, WORD
from .base import Fusion

BLOCK: Final = 1 << SHIFT
"""Words that one row of the table takes: blocks mean nothing here, so it takes any row whole."""
_PLACE: Final = (1 << 32) - 1
_DTYPES: Final = {code: dtype for dtype, code in CODES.items() if dtype != torch.bool}


# Not torch.library.custom_op, which imports the compiler: seconds.
_LIBRARY: Final[Any] = torch.library.Library("slotgraph", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("fill_lanes(Tensor table, Tensor packet, Tensor(a!)[] targets) -> ()")


def fill_lanes(table: torch.Tensor, packet: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Fill every lane of a table from a packet that is meant for it; `targets` are the slots' buffers."""
    torch.ops.slotgraph.fill_lanes(table, packet, list(targets))


@torch.library.impl(_LIBRARY, "fill_lanes", "CPU")
def _fill_lanes(table: torch.Tensor, packet: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Fill every lane of a table from a packet, if that is armed; `targets` are the slots' buffers."""
    del targets
    rows = table.view(-1, COLUMNS).tolist()
    lanes = rows[0][1] >> 32 if rows else 0
    words = packet.view(torch.int64)[: 1 + 3 * lanes].tolist()
    for row in rows:
        if words[0] == row[-1] >> OWNER_SHIFT:
            place = row[1] & _PLACE
            _fill(row, words[place], words[place + lanes], words[place + 2 * lanes])


def _fill(row: list[int], meta: int, pace: int, source: int) -> None:
    """Fill one outer row of one lane from a table row's first element on: what other blocks fill is filled again."""
    target, _, outer, start, padded, stride, pad, flags = row
    if meta < 0:
        return
    size, length, code = flags & BYTE, meta & ((1 << SHIFT) - 1), meta >> SHIFT
    live = min(length, padded)
    to = target + outer * stride * size
    if source and live > start:
        first, count = outer * pace + start, live - start
        if code:
            _convert(source, first, to + start * size, count, code, flags >> CODE_SHIFT & BYTE)
        else:
            ctypes.memmove(to + start * size, source + first * size, count * size)
    if flags & TAIL and live < padded:
        tail = pad.to_bytes(WORD, "little", signed=True)[:size] * (padded - live)
        ctypes.memmove(to + live * size, tail, len(tail))


def _convert(source: int, first: int, to: int, count: int, code: int, goal: int) -> None:
    """Write so many elements of one dtype as another, as torch converts them."""
    one, other = _DTYPES[code], _DTYPES[goal]
    data = ctypes.string_at(source + first * one.itemsize, count * one.itemsize)
    made = torch.frombuffer(bytearray(data), dtype=one).to(other)
    ctypes.memmove(to, made.data_ptr(), made.nbytes)


@final
class HostFusion(Fusion):
    """The fused fill in plain code, so that a laptop shows what a device will do."""

    @property
    def block(self) -> int:
        """More than a slot has, so that a table has one row for each outer row."""
        return BLOCK

    def kernel(self, table: torch.Tensor, packet: torch.Tensor, targets: Sequence[torch.Tensor]) -> Callable[[], None]:
        """The operator over a table."""
        return functools.partial(fill_lanes, table, packet, list(targets))
