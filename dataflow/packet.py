"""The packet that one upload takes to the device, the fused kernel's table on the device, and the sender of packets.

One kernel writes every lane of a bucket, that is every slot that it fills. What is fixed at capture is in the table,
which has a row for each block of elements. What changes in each step is in the packet. Both consist of 64-bit words.

Each table row has these columns:

    0   the slot's address
    1   the packet word that is the lane's first (and the number of lanes << 32)
    2   the outer row
    3   the first element in that row
    4   elements in a padded row
    5   elements from one outer row to the next
    6   the tail's pattern of eight bytes
    7   flags
    8   the address of the slot that it advances from, 0 if it does not advance
    9   the number that is added to advance
    10  elements in a row for each request
    11  the packet word that counts the lane's live rows (and the number of counts << 32)
    12  elements of each of these rows
    13  for a lane with rows along two axes, the row along the first axis that this row belongs to, else 0
    14  the packet word that counts the rows along that first axis, else a word that is 1
    15  the number of the last packet that the kernel has taken

The packet has, in order:

    the number of the table that it is for, which arms the kernel of that table only
    the packet's own number, 0 if no slot advances
    the word at which the rows of an edit begin
    how many moves these rows are (and how many writes << 32)
    the live count of each size in `Declaration.counted`
    the same counts of the step before an edit
    for each lane, its source's dtype if that differs from the slot's, else 0; -1 if the lane is left alone
    for each lane, the elements from one outer row of its source to the next, 0 if the rows are adjacent; -1 if its
    source is ragged
    for each lane, its source's address, 0 if only the tail is reset

If a kernel finds a packet that it has taken before, and the packet has a number, it advances its slots' live rows and
resets their tails, with the live counts in the packet. So a step without new data sends nothing. An edit's packet arms
no table and is taken by a kernel of its own: rows move, `from | to << 32` each, and then rows of the lanes' sources are
written, each to the request in its word. A packet for foreach copies has no lanes, and its first word arms no table.
After the words comes host data of the batch, then values that the host computed, each at a multiple of `UNIT` bytes.
Ragged data begins with a word for each row, `begin | length << 32`, both in elements and the first counted from that
data's own first byte. The rows' values follow, in the slot's dtype. The kernel writes the pad value behind each row.
The word -1 leaves a row as it is.
"""

import abc
import functools
import itertools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import torch

from .errors import ConfigError
from .guard import outside_inference
from .tails import Number

COLUMNS: Final = 16
HEAD: Final = 4
"""Words of a packet before its live counts."""
EDIT: Final = -1
"""The first word of a packet of edits. No table has this number."""
WORD: Final = 8
"""Bytes of a word."""
TAIL: Final = 1 << 8
"""The flag for "reset the tail", above the item size."""
CODE_SHIFT: Final = 16
"""Bits below the slot's dtype in the flags."""
RAGGED: Final = -1
"""The row stride of a source that is ragged."""
KEPT_ROW: Final = -1
"""The word of a ragged row that the kernel leaves as it is."""
OWNER_SHIFT: Final = 32
"""Bits below the table's own number in the flags."""
BYTE: Final = 255
"""The bits of an item size, or of a dtype, in the flags."""
MOST_OUTER: Final = 1024
"""A slot with more outer rows is better written by a plain copy, which takes them all at once."""
MOST_VARYING: Final = 2
"""The largest number of varying dims in a slot that the kernel writes: live rows within live rows."""
CODES: Final[Mapping[torch.dtype, int]] = {
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.uint8: 5,
    torch.bool: 5,
    torch.float16: 8,
    torch.bfloat16: 9,
    torch.float32: 10,
}
"""Dtypes that the kernel converts: integers to integers, and floats to floats."""
FIRST_FLOAT: Final = 8
_SIZES: Final = frozenset({1, 2, 4, 8})
UNIT: Final = 32
"""Each part of a packet begins at a multiple of this: the bytes of a vector load, 16 on CUDA and 32 on an NPU."""
_AT_REST: Final = bytes(WORD)
_NUMBER: Final = struct.Struct("<q").pack


@attrs.frozen(eq=False)
class Lane:
    """How the kernel writes one slot.

    Attributes:
        slot: The slot's name.
        target: The bucket's view of the slot.
        outer: The number of rows, over all dims before the one that varies.
        row: Elements of a padded row.
        stride: Elements from one row to the next.
        inner: Elements for each unit of the dim that varies, or of the whole slot if none does.
        pad: The tail's value, or None if the tail is left alone.
        source: The slot that it advances from, or None if it does not advance.
        add: The number that is added to advance.
        each: Elements that belong to one request, 0 if the slot's rows do not belong to requests.
        count: The index of the packet's count that is its number of live rows.
        within: If two dims vary, the number of outer rows for each row along the first.
        owns: If two dims vary, the index of the packet's count of live rows along the first.
    """

    slot: str
    target: torch.Tensor
    outer: int
    row: int
    stride: int
    inner: int
    pad: Number | None
    source: torch.Tensor | None = None
    add: int = 0
    each: int = 0
    count: int = 0
    within: int = 1
    owns: int = 0

    @classmethod
    def of(cls, slot: str, target: torch.Tensor, varying: tuple[int, ...], pad: Number | None) -> "Lane":
        """Make the lane of a view in which at most two dims vary; see `has_lane`."""
        if not varying:
            return cls(slot, target, 1, target.numel(), 0, target.numel(), pad)
        dim = varying[-1]
        inner = math.prod(target.shape[dim + 1 :])
        before = [target.stride(i) for i in range(dim) if target.shape[i] > 1]  # a dim of size 1 may have any stride
        outer = math.prod(target.shape[:dim])
        stride = before[-1] if before else 0
        return cls(slot, target, outer, target.shape[dim] * inner, stride, inner, pad)

    @property
    def flags(self) -> int:
        """The item size, whether there is a tail, and the dtype."""
        code = CODES.get(self.target.dtype, 0)
        return self.target.itemsize | (TAIL if self.pad is not None else 0) | code << CODE_SHIFT


def has_lane(dtype: torch.dtype, shape: tuple[int, ...], varying: tuple[int, ...]) -> str:
    """Return why the kernel cannot write a slot of this padded shape, or ""."""
    if dtype.itemsize not in _SIZES:
        return f"{dtype.itemsize} bytes an element"
    first, last = (varying[0], varying[-1]) if varying else (0, 0)
    if len(varying) > MOST_VARYING or (first != last and math.prod(shape[:first]) != 1):
        return "several dims vary"
    return "many outer rows" if math.prod(shape[:last]) > MOST_OUTER else ""


def converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether the kernel converts from one dtype to another. It takes torch.bool only as a source."""
    one = CODES.get(source, 0)
    other = CODES.get(target, 0)
    return bool(one and other) and target != torch.bool and (one >= FIRST_FLOAT) == (other >= FIRST_FLOAT)


def code_of(source: torch.dtype, target: torch.dtype) -> int:
    """Return a lane's dtype word in the packet: the source's dtype if it differs from the slot's, else 0."""
    return 0 if source == target else CODES[source]


def pattern(value: Number | None, dtype: torch.dtype) -> int:
    """Return a tail's value as eight bytes, repeated."""
    if value is None:
        return 0
    with outside_inference():
        filled = torch.full((WORD // dtype.itemsize,), value, dtype=dtype, device="cpu")
    return int(struct.unpack("<q", filled.view(torch.uint8).numpy().tobytes())[0])


def rounded(nbytes: int) -> int:
    """Round up to whole units."""
    return -(-nbytes // UNIT) * UNIT


def head_bytes(lanes: int, counts: int) -> int:
    """Return the number of bytes of a packet's words, after which its data comes."""
    return WORD * (HEAD + 2 * counts + 3 * lanes)


def row_stride(source: torch.Tensor, varying: Sequence[int]) -> int | None:
    """Return the elements from one outer row of a tensor to the next, or None if rows overlap or have gaps.

    A row begins at the last of the dims that vary, and the dims before it are the outer ones. Gaps may be within rows
    or unequal between them. Of a dim that varies the stride counts even if it has a single row, since the next batch
    with these strides may have more.
    """
    sizes = source.shape
    strides = source.stride()
    last = varying[-1]
    dense = 1
    for dim in range(source.dim() - 1, last - 1, -1):
        if strides[dim] != dense and (sizes[dim] != 1 or dim in varying):
            return None
        dense *= sizes[dim]
    found = dense
    expected = None
    for dim in range(last - 1, -1, -1):
        if sizes[dim] != 1 or dim in varying:
            if expected not in (None, strides[dim]):
                return None
            found = strides[dim] if expected is None else found
            expected = strides[dim] * sizes[dim]
    return found if found >= dense else None


def table_of(lanes: Sequence[Lane], block: int, owner: int, counts: int) -> npt.NDArray[np.int64]:
    """Make table number `owner`, with one row for every `block` words of every outer row of every lane.

    `counts` is the number of live counts in the packet.
    """
    rows = list[tuple[int, ...]]()
    for index, lane in enumerate(lanes):
        place = HEAD + 2 * counts + index | len(lanes) << 32
        count = HEAD + lane.count | counts << 32
        owns = HEAD + lane.owns
        bits = pattern(lane.pad, lane.target.dtype)
        flags = lane.flags | owner << OWNER_SHIFT
        source = 0 if lane.source is None else lane.source.data_ptr()
        for outer in range(lane.outer):
            for start in range(0, lane.row, block * WORD // lane.target.itemsize):
                where = lane.target.data_ptr(), place, outer, start, lane.row, lane.stride
                own = outer // lane.within if lane.owns else 0
                rows.append((*where, bits, flags, source, lane.add, lane.each, count, lane.inner, own, owns, 0))
    return np.array(rows, np.int64).reshape(-1, COLUMNS)


Move: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Copies a dense host tensor to the device; see `Upload.move`."""


class Upload(abc.ABC):
    """A packet on the device, which can be sent while the device may still read the one before.

    Attributes:
        packet: Bytes on the device, at a fixed address that is a multiple of at least 64.
        nbytes: Bytes that this occupies, on the device and on the host.
    """

    packet: torch.Tensor
    nbytes: int

    @abc.abstractmethod
    def send(self, data: bytes, kept: object) -> None:
        """Start one copy of `data` to the packet on the current stream. `kept` stays alive until it was read.

        The packet's bytes after `data` stay as they were.
        """

    def move(self, source: torch.Tensor) -> torch.Tensor:
        """Copy a dense host tensor to new memory on the device, outside the packet.

        The source may change as soon as this returns. By default it waits until the device has read it.
        """
        with outside_inference():
            return source.detach().to(self.packet.device, copy=True)


class Feed:
    """Sends packets of at most `room` bytes, which several buckets share. Its memory is allocated on first use.

    `numbered` gives each packet that is sent its own number, which slots that advance need.
    """

    def __init__(self, upload: Callable[[int], Upload | None], room: int, *, numbered: bool = False) -> None:
        """Take the backend's function that makes the packet."""
        self.room = room
        self._make = upload
        self._data = _AT_REST
        self._numbered = numbered
        self._sent = itertools.count(1)
        self._tables = itertools.count(1)

    @functools.cached_property
    def upload(self) -> Upload:
        """The packet and its upload. Raises ConfigError if the backend has none."""
        upload = self._make(self.room)
        if upload is None:
            raise ConfigError(
                "the backend's record says packed_uploads, or names fused lowerings, but upload() returned None"
            )
        return upload

    @property
    def nbytes(self) -> int:
        """Bytes of the packet, and of the host memory that uploads start from; 0 until the packet is made."""
        return self.upload.nbytes if "upload" in vars(self) else 0

    def number(self) -> int:
        """Return the number of a new table. A packet is for the table whose number it has."""
        return next(self._tables)

    def send(self, data: bytes, kept: object) -> None:
        """Send a step's bytes to the packet, unless it holds them already; `kept` is as for `Upload.send`."""
        if self._numbered and len(data) > WORD:
            data = b"".join((data[:WORD], _NUMBER(next(self._sent)), data[2 * WORD :]))
        elif data == self._data:
            return
        self._data = b""  # the packet is unknown if the next line raises
        self.upload.send(data, kept)
        self._data = data

    def move(self, source: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to the device, outside the packet; see `Upload.move`."""
        return self.upload.move(source)

    def disarm(self) -> None:
        """Make the next launch of the kernel do nothing."""
        if not self._data.startswith(_AT_REST):
            self.send(_AT_REST, None)

    def was_disarmed(self) -> None:
        """Record that a kernel on the device has made the packet invalid."""
        self._data = _AT_REST
