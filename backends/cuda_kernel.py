"""The fused fill: one Triton kernel that copies, converts, pads and advances every lane of a bucket; and edits of rows.

`..dataflow.packet` documents the table and the packet. A program handles one row of the table: one block of one lane.
If source, slot and everything to be written of the block are multiples of eight bytes, whatever the dtype, it moves
eight bytes at a time, else it goes element by element. Addresses come from memory, so the compiler assumes only that
each is a multiple of its own dtype's size, which the packer guarantees.
"""
# Triton's language is no typed Python: it infers types, and capitals are values that it compiles in.
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0915, PLR0917, PLR2004 - see above; many arguments, and numbers for sizes
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# pyright: reportCallIssue=false

import functools
from typing import Final

import torch
import triton  # pyright: ignore[reportMissingImports] - there only on Linux
import triton.language as tl  # pyright: ignore[reportMissingImports] - likewise

from ..dataflow.packet import BYTE, CODE_SHIFT, CODES, COLUMNS, FIRST_FLOAT, OWNER_SHIFT, TAIL

BLOCK: Final = 1024
"""Words that one program handles, whatever the dtype of their elements: a power of two."""
WARPS: Final = 4
PIECE: Final = 128
"""Elements that a program of an edit moves at a time."""
PARTS: Final = 8
"""Programs that share one lane's rows in an edit."""

_COLUMNS = tl.constexpr(COLUMNS)
_PLACE = tl.constexpr((1 << 32) - 1)
_SIZE = tl.constexpr(BYTE)
_TAIL = tl.constexpr(TAIL)
_GOAL = tl.constexpr(CODE_SHIFT)
_OWNER = tl.constexpr(OWNER_SHIFT)
_CHAR = tl.constexpr(CODES[torch.int8])
_BYTE = tl.constexpr(CODES[torch.uint8])
_SHORT = tl.constexpr(CODES[torch.int16])
_LONG = tl.constexpr(CODES[torch.int64])
_FLOAT = tl.constexpr(FIRST_FLOAT)
_HALF = tl.constexpr(CODES[torch.float16])
_BRAIN = tl.constexpr(CODES[torch.bfloat16])


@triton.jit(do_not_specialize_on_alignment=["table", "packet"])  # one compilation, whatever the alignment of the two
def fill_lanes(table, packet, ADVANCE: tl.constexpr, BLOCK: tl.constexpr):
    """Fill one block of one lane, if the packet is new and meant for this table, else advance it.

    Table and packet are words. With `ADVANCE`, only advance the live rows of the step before: an edit comes next.
    """
    row = table + tl.program_id(0) * _COLUMNS
    armed = tl.load(packet)
    number = tl.load(packet + 1)
    target = tl.load(row)
    places = tl.load(row + 1)
    outer = tl.load(row + 2)
    start = tl.load(row + 3)
    padded = tl.load(row + 4)
    stride = tl.load(row + 5)
    pad = tl.load(row + 6)
    flags = tl.load(row + 7)
    source = tl.load(row + 8)
    add = tl.load(row + 9)
    count = tl.load(row + 11)
    inner = tl.load(row + 12)
    own = tl.load(row + 13)
    is_active = (armed != 0) & (number != 0)
    code = add * 0
    pace = stride
    counts = packet + (count >> 32 if ADVANCE else 0)
    whole = tl.load(counts + (count & _PLACE)) * inner
    length = tl.where(own < tl.load(counts + tl.load(row + 14)), whole, 0)
    if not ADVANCE:
        is_new = (number == 0) | (number != tl.load(row + 15))
        tl.debug_barrier()  # all threads have loaded the number before one stores the next
        tl.store(row + 15, number, mask=is_new & is_active)
        source = tl.where(is_new, 0, source)
        if is_new & (armed == (flags >> _OWNER)):
            lane = packet + (places & _PLACE)
            lanes = places >> 32
            code = tl.load(lane)
            pace = tl.load(lane + lanes)
            pace = tl.where(pace == 0, whole, pace)
            source = tl.load(lane + 2 * lanes)
            add = code * 0
            is_active = code >= 0
    if is_active:
        size = (flags & _SIZE).to(tl.int32)
        width = _width(code, size)
        since = source + (outer * pace + start) * width
        to = target + (outer * stride + start) * size
        # From here on, positions count from the block's start. The kernel writes from `first` up to before `stop`.
        span = BLOCK * 8 // size
        live = _within(tl.minimum(length, padded) - start, span)
        first = tl.where(source == 0, live, 0)
        stop = live
        if not ADVANCE:
            stop = tl.where((flags & _TAIL) != 0, _within(padded - start, span), live)
        edges = since | to | (live | stop) * size
        if pace < 0:
            _ragged_rows(source, to, start, live, stop, pad, inner, size, BLOCK)
        elif ((edges & 7) == 0) & (code == 0) & (add == 0):
            _words(since, to, first * size >> 3, live * size >> 3, stop * size >> 3, pad, BLOCK)
        else:
            _elements(since, to, first, live, stop, pad, add, code, width, flags, BLOCK)


@triton.jit(do_not_specialize_on_alignment=["table", "packet"])
def edit_lanes(table, packet, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Move rows of one lane's requests, then write the edit's rows. `PARTS` programs share the work."""
    row = table + tl.program_id(0) * _COLUMNS
    places = tl.load(row + 1)
    counts = tl.load(packet + 3)
    rows = packet + tl.load(packet + 2)
    lane = packet + (places & _PLACE)
    lanes = places >> 32
    lane_code = tl.load(lane)
    pace = tl.load(lane + lanes)
    source = tl.load(lane + 2 * lanes)
    outer = tl.load(row + 2)
    flags = tl.load(row + 7)
    each = tl.load(row + 10)
    pad = tl.load(row + 6)
    inner = tl.load(row + 12)
    size = (flags & _SIZE).to(tl.int32)
    base = tl.load(row) + outer * tl.load(row + 5) * size
    part = tl.program_id(1).to(tl.int64)
    if (tl.load(row + 3) == 0) & (tl.load(packet) != 0):
        code = tl.where(lane_code < 0, 0, lane_code)
        width = _width(code, size)
        pace = tl.where(pace == 0, (counts >> 32) * each, pace)
        since = source + outer * pace * width
        if each == 0:
            count = tl.where((lane_code < 0) | (part != 0), 0, tl.load(row + 4)).to(tl.int32)
            _elements(since, base, 0, count, count, 0, 0, code, width, flags, BLOCK)
        else:
            count = each.to(tl.int32)
            moves = counts & _PLACE
            at = part
            while at < moves:
                pair = tl.load(rows + at)
                to = base + (pair >> 32) * each * size
                _elements(base + (pair & _PLACE) * each * size, to, 0, count, count, 0, 0, part * 0, size, flags, BLOCK)
                at += PARTS
            at = part
            writes = tl.where(lane_code < 0, 0, counts >> 32)
            while at < writes:
                request = tl.load(rows + moves + at)
                if request >= 0:  # a request that has left has row -1
                    to = base + request * each * size
                    if pace < 0:  # the source is ragged
                        _ragged_rows(source, to, at * each, count, count, pad, inner, size, BLOCK)
                    else:
                        _elements(since + at * each * width, to, 0, count, count, 0, 0, code, width, flags, BLOCK)
                at += PARTS


@triton.jit
def _width(code, size):
    """Return the bytes of a source's element. Without a code, it has the slot's dtype."""
    is_one = (code == _CHAR) | (code == _BYTE)
    is_two = (code == _SHORT) | (code == _HALF) | (code == _BRAIN)
    converted = tl.where(is_one, 1, tl.where(is_two, 2, tl.where(code == _LONG, 8, 4)))
    return tl.where(code == 0, size, converted)


@triton.jit
def _within(place, span):
    """Clamp a position to the block."""
    return tl.minimum(tl.maximum(place, 0), span).to(tl.int32)


@triton.jit
def _words(since, to, first, live, stop, pad, BLOCK: tl.constexpr):
    """Move live words and write the tail. Words that are loaded outside the live range are never stored.

    Moving two words at a time gains nothing on an H200: a step takes 4.4 instead of 4.6 us at 64 KiB, and 12.6 instead
    of 12.5 us at 16 MiB.
    """
    at = tl.arange(0, BLOCK)
    is_live = at < live
    values = tl.load(since.to(tl.pointer_type(tl.int64)) + at, mask=(at >= first) & is_live)
    tl.store(to.to(tl.pointer_type(tl.int64)) + at, tl.where(is_live, values, pad), mask=(at >= first) & (at < stop))


@triton.jit
def _elements(since, to, first, live, stop, pad, add, code, width, flags, BLOCK: tl.constexpr):
    """Move live elements, converted if they have a code, plus a number, and write the tail."""
    size = (flags & _SIZE).to(tl.int32)
    begin = stop * 0
    while begin < stop:
        at = tl.arange(0, BLOCK) + begin
        is_live = at < live
        bits = _read(since, at, (at >= first) & is_live, width, BLOCK)
        if code == _BYTE:
            bits = bits & 255
        elif code >= _FLOAT:
            bits = _round(bits, code, (flags >> _GOAL) & _SIZE)
        _write(to, at, tl.where(is_live, bits + add, pad), (at >= first) & (at < stop), size)
        begin += BLOCK


@triton.jit
def _ragged_rows(source, to, start, live, stop, pad, columns, size, BLOCK: tl.constexpr):
    """Write ragged rows from element `start` of their table on, with the pad value behind each, and the tail.

    A row whose word is negative stays as it is.
    """
    begin = stop * 0
    while begin < stop:
        at = tl.arange(0, BLOCK) + begin
        is_live = at < live
        place = at + start.to(tl.int32)
        row = place // columns.to(tl.int32)
        word = tl.load(source.to(tl.pointer_type(tl.int64)) + row, mask=is_live, other=0)
        column = place - row * columns.to(tl.int32)
        is_value = is_live & (column < (word >> 32))
        bits = _read(source, (word & _PLACE) + column, is_value, size, BLOCK)
        _write(to, at, tl.where(is_value, bits, pad), (at < stop) & (word >= 0), size)
        begin += BLOCK


@triton.jit
def _read(since, at, mask, width, BLOCK: tl.constexpr):
    """Read elements of `width` bytes as signed integers."""
    bits = tl.full((BLOCK,), 0, tl.int64)
    if width == 1:
        bits = tl.load(since.to(tl.pointer_type(tl.int8)) + at, mask=mask).to(tl.int64)
    elif width == 2:
        bits = tl.load(since.to(tl.pointer_type(tl.int16)) + at, mask=mask).to(tl.int64)
    elif width == 4:
        bits = tl.load(since.to(tl.pointer_type(tl.int32)) + at, mask=mask).to(tl.int64)
    else:
        bits = tl.load(since.to(tl.pointer_type(tl.int64)) + at, mask=mask)
    return bits


@triton.jit
def _write(to, at, bits, mask, size):
    """Write the lowest bytes of integers, as many as an element has. Larger numbers wrap."""
    if size == 1:
        tl.store(to.to(tl.pointer_type(tl.int8)) + at, bits.to(tl.int8), mask=mask)
    elif size == 2:
        tl.store(to.to(tl.pointer_type(tl.int16)) + at, bits.to(tl.int16), mask=mask)
    elif size == 4:
        tl.store(to.to(tl.pointer_type(tl.int32)) + at, bits.to(tl.int32), mask=mask)
    else:
        tl.store(to.to(tl.pointer_type(tl.int64)) + at, bits, mask=mask)


@triton.jit
def _round(bits, code, goal):
    """Return a float's bits as those of the nearest float of another dtype, ties to even.

    Conversions of bfloat16 use integer arithmetic, which Triton's interpreter does right (its own conversion
    truncates), with the one NaN that CUDA makes.
    """
    single = bits.to(tl.int32)
    if code == _HALF:
        single = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    elif code == _BRAIN:
        single = single << 16
    if goal == _HALF:
        single = single.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    elif goal == _BRAIN:
        nearest = (single + 0x7FFF + ((single >> 16) & 1)) >> 16
        single = tl.where((single & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, nearest)
    return single.to(tl.int64)


def _launcher(table, packet, _targets, *, edits):
    """Return a launch over a table, whose rows have the addresses of the targets.

    It fills all lanes by one program for each row, or advances them and then edits their rows.
    """
    words = packet.view(torch.int64)
    rows = table.shape[0]

    def launch():
        if rows:
            fill_lanes[(rows,)](table, words, ADVANCE=edits, BLOCK=BLOCK, num_warps=WARPS)
            if edits:
                edit_lanes[(rows, PARTS)](table, words, PARTS=PARTS, BLOCK=PIECE, num_warps=1)

    return launch


filling: Final = functools.partial(_launcher, edits=False)
editing: Final = functools.partial(_launcher, edits=True)
