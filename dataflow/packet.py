"""The packet: what one upload takes to the device, the table beside it, and what sends it.

One kernel writes every lane of a bucket: a slot's way through it. What is fixed at capture stands in a table on the
device, a row a block of elements; what changes in each step stands in the packet. Both are made of 64-bit words:

    table row   address of the slot, where the lane's first word stands in the packet (and the number of lanes << 32),
                outer row, first element, elements in a padded row, elements from one outer row to the next, tail
                pattern of eight bytes, flags; address and number whose sum the slot advances to (0 where it does not),
                elements in a row for each request, the word of the packet that counts the lane's live rows (and the
                number of counts << 32), elements of each of these rows; where the lane has rows along two axes, the row
                that this one is of, and the word that counts those, else 0 and a word that is 1; number of the last
                packet that the kernel has taken
    packet      the number of the table that it is meant for, which arms that table's kernel alone; the packet's own
                number, 0 where no slot advances; where the rows of an edit stand, and how many moves they are (and
                writes << 32); the live count of each size in `Declaration.counted`, that is of each axis, and then
                those of the step before an edit; then for each lane a word, its source's dtype where it is another
                than the slot's, else 0, or -1 where the lane is left alone; then for each lane the elements from one
                outer row of its source to the next, 0 where these follow one another; then for each lane its source's
                address, 0 where only the tail is reset

A kernel that has taken a packet before advances its slots' live rows and resets their tails, if that packet has a
number: it takes the live counts from the packet's head. So a step without news sends nothing. An edit's packet is armed
for no table, and taken by a kernel of its own: rows move, `from | to << 32` each, then rows of the lanes' sources are
written, each to the request that its word says. A packet for foreach copies has no lanes, and its first word arms no
table. Behind the words comes host data that the batch brought, then values that the host computed, each at a multiple
of `UNIT` bytes.
"""

import abc
import functools
import itertools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Final

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
"""What arms a packet of edits: no table has this number."""
WORD: Final = 8
"""Bytes of a word."""
TAIL: Final = 1 << 8
"""The flag for "reset the tail", above the item size."""
CODE_SHIFT: Final = 16
"""Bits below the slot's dtype in the flags."""
OWNER_SHIFT: Final = 32
"""Bits below the table's own number in the flags."""
BYTE: Final = 255
"""The bits of an item size, or of a dtype, in the flags."""
MOST_OUTER: Final = 1024
"""Outer rows from which a slot is better left to a plain copy, which takes them in one go."""
MOST_VARYING: Final = 2
"""Dims that vary in a slot that the kernel writes: live rows within live rows."""
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
"""Dtypes that the kernel converts between, whole numbers among themselves and floats among themselves."""
FIRST_FLOAT: Final = 8
_SIZES: Final = frozenset({1, 2, 4, 8})
UNIT: Final = 32
"""Bytes that each place in a packet is a multiple of: a vector unit's load, 16 bytes on CUDA and 32 on an NPU."""
_AT_REST: Final = bytes(WORD)
_NUMBER: Final = struct.Struct("<q").pack


@attrs.frozen(eq=False)
class Lane:
    """One slot's way through the kernel.

    target: the bucket's view. outer: rows, of all dims before the one that varies. row: elements of a padded row.
    stride: elements from one row to the next. inner: elements for each unit of the dim that varies, or of the whole
    slot where none does. pad: the tail's value; None where the tail is left. source, add: what it advances to. each:
    elements of a row for each request, 0 where its rows do not follow the requests. count: which of a packet's counts
    its live rows are. within: outer rows of each row along the first of two dims that vary. owns: which count tells
    how many of those are live.
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
        """The lane of a view of which at most two dims vary, see `has_lane`."""
        if not varying:
            return cls(slot, target, 1, target.numel(), 0, target.numel(), pad)
        dim = varying[-1]
        inner = math.prod(target.shape[dim + 1 :])
        before = [target.stride(i) for i in range(dim) if target.shape[i] > 1]  # a dim of one may have any stride
        outer, stride = math.prod(target.shape[:dim]), before[-1] if before else 0
        return cls(slot, target, outer, target.shape[dim] * inner, stride, inner, pad)

    @property
    def rule(self) -> tuple[int, int, int]:
        """What it advances to, and elements for each request."""
        return 0 if self.source is None else self.source.data_ptr(), self.add, self.each

    @property
    def flags(self) -> int:
        """Item size, whether there is a tail, and the dtype."""
        code = CODES.get(self.target.dtype, 0)
        return self.target.itemsize | (TAIL if self.pad is not None else 0) | code << CODE_SHIFT


def has_lane(dtype: torch.dtype, shape: tuple[int, ...], varying: tuple[int, ...]) -> str:
    """Why a slot of this padded shape cannot go through the kernel, or nothing."""
    if dtype.itemsize not in _SIZES:
        return f"{dtype.itemsize} bytes an element"
    first, last = (varying[0], varying[-1]) if varying else (0, 0)
    if len(varying) > MOST_VARYING or (first != last and math.prod(shape[:first]) != 1):
        return "several dims vary"
    return "many outer rows" if math.prod(shape[:last]) > MOST_OUTER else ""


def converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether the kernel converts from one dtype to another; torch.bool is taken as a source only."""
    one, other = CODES.get(source, 0), CODES.get(target, 0)
    return bool(one and other) and target != torch.bool and (one >= FIRST_FLOAT) == (other >= FIRST_FLOAT)


def code_of(source: torch.dtype, target: torch.dtype) -> int:
    """A lane's word in the packet: the source's dtype where it is another."""
    return 0 if source == target else CODES[source]


def pattern(value: Number | None, dtype: torch.dtype) -> int:
    """A tail's value as eight bytes, repeated."""
    if value is None:
        return 0
    with outside_inference():
        filled = torch.full((WORD // dtype.itemsize,), value, dtype=dtype, device="cpu")
    return int(struct.unpack("<q", filled.view(torch.uint8).numpy().tobytes())[0])


def rounded(nbytes: int) -> int:
    """Up to whole units."""
    return -(-nbytes // UNIT) * UNIT


def head_bytes(lanes: int, counts: int) -> int:
    """Bytes of a packet before what it carries itself."""
    return WORD * (HEAD + 2 * counts + 3 * lanes)


def row_stride(source: torch.Tensor, dim: int) -> int | None:
    """Elements from one outer row of a tensor to the next; None where rows overlap, or have gaps within or between.

    dim: the first dim of a row; those before it are the outer ones.
    """
    sizes, strides = source.shape, source.stride()
    dense = 1
    for size, stride in zip(reversed(sizes[dim:]), reversed(strides[dim:]), strict=True):
        if size != 1 and stride != dense:
            return None
        dense *= size
    found, expected = dense, None
    for size, stride in zip(reversed(sizes[:dim]), reversed(strides[:dim]), strict=True):
        if size != 1:
            if expected not in (None, stride):
                return None
            found, expected = stride if expected is None else found, stride * size
    return found if found >= dense else None


def table_of(lanes: Sequence[Lane], block: int, owner: int, counts: int) -> npt.NDArray[np.int64]:
    """Table number `owner`, one row for every `block` words of every outer row of every lane.

    counts: how many live counts the packet has.
    """
    rows = list[tuple[int, ...]]()
    for index, lane in enumerate(lanes):
        place = HEAD + 2 * counts + index | len(lanes) << 32
        count = HEAD + lane.count | counts << 32
        owns = HEAD + lane.owns
        bits = pattern(lane.pad, lane.target.dtype)
        flags = lane.flags | owner << OWNER_SHIFT
        for outer in range(lane.outer):
            for start in range(0, lane.row, block * WORD // lane.target.itemsize):
                where = lane.target.data_ptr(), place, outer, start, lane.row, lane.stride
                own = outer // lane.within if lane.owns else 0
                rows.append((*where, bits, flags, *lane.rule, count, lane.inner, own, owns, 0))
    return np.array(rows, np.int64).reshape(-1, COLUMNS)


class Upload(abc.ABC):
    """A packet on the device, and what takes bytes to it while the device may still read those sent before.

    Attributes:
        packet: Bytes on the device, at a fixed address that is a multiple of 64 at least.
        nbytes: Bytes that this holds, on the device and on the host.
    """

    packet: torch.Tensor
    nbytes: int

    @abc.abstractmethod
    def send(self, data: bytes, kept: object) -> None:
        """Start one copy of `data` to the packet on the current stream; `kept` stays alive until the device is past it.

        What the packet held beyond stays as it was.
        """

    def move(self, source: torch.Tensor) -> torch.Tensor:
        """A copy of a dense host tensor in memory of its own on the device, beside the packet.

        The source may change as soon as this returns. By default it waits until the device has read it.
        """
        with outside_inference():
            return source.detach().to(self.packet.device, copy=True)


class Feed:
    """One packet of `room` bytes that several buckets take turns to fill; it is made when first asked for.

    numbered: whether each packet that is sent gets a number of its own, as slots that advance need.
    """

    def __init__(self, upload: Callable[[int], Upload | None], room: int, *, numbered: bool = False) -> None:
        """Keep a backend's verb, which makes the packet."""
        self.room, self._make, self._data = room, upload, _AT_REST
        self._numbered = numbered
        self._sent = itertools.count(1)
        self._tables = itertools.count(1)

    @functools.cached_property
    def upload(self) -> Upload:
        """The packet, and what sends to it. ConfigError where the backend has none."""
        upload = self._make(self.room)
        if upload is None:
            raise ConfigError(
                "the backend's record says packed_uploads, or names fused lowerings, but upload() gives None"
            )
        return upload

    @property
    def nbytes(self) -> int:
        """Bytes of the packet, and of the host memory that uploads start from."""
        return self.upload.nbytes if "upload" in vars(self) else 0

    def number(self) -> int:
        """A number for one more table that this packet feeds: it arms no other."""
        return next(self._tables)

    def send(self, data: bytes, kept: object) -> None:
        """Have the packet hold a step's bytes; `kept` as `Upload.send` takes it."""
        if self._numbered and len(data) > WORD:
            data = b"".join((data[:WORD], _NUMBER(next(self._sent)), data[2 * WORD :]))
        elif data == self._data:
            return
        self._data = b""  # in case the next line raises
        self.upload.send(data, kept)
        self._data = data

    def move(self, source: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor beside the packet: see `Upload.move`."""
        return self.upload.move(source)

    def disarm(self) -> None:
        """Have the kernel do nothing, where it was armed."""
        if not self._data.startswith(_AT_REST):
            self.send(_AT_REST, None)

    def was_disarmed(self) -> None:
        """Note that the device has disarmed the packet itself."""
        self._data = _AT_REST
