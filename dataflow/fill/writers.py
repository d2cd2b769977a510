"""Writers: what copies sources into slots and resets tails, for any live sizes.

A writer is bound to buffers once, and takes live sizes as numbers of the call.
"""

import abc
import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import attrs
import numpy.typing as npt
import torch

from ..axes import Dim, Live
from ..guard import outside_inference
from ..sources import Sources, chosen
from ..tails import Number
from .packing import Packing
from .reach import Reach, Rows, boxes, index_of
from .ways import Way

K = TypeVar("K")
V = TypeVar("V")
_FOREACH_COPY: Final = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - no public name
_FOREACH_ZERO: Final = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage] - likewise
_ZEROED: Final = frozenset({torch.int16, torch.int32, torch.float16, torch.bfloat16, torch.float32})
"""Dtypes that every device zeroes together: an NPU refuses a list of others. Larger ones are zeroed as int32."""
_MEMMOVE: Final = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes._memmove_addr  # type: ignore[attr-defined] # noqa: SLF001 - what `ctypes.memmove` calls
)
"""C's own, which keeps Python's lock and returns nothing: a quarter faster than `ctypes.memmove`."""
_WORDS: Final[Mapping[int, torch.dtype]] = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""By itemsize, a dtype in which NumPy holds the bits of a slot whose own dtype it may not know."""
SLICE_BYTES: Final = 700
"""What a tensor that is a slice takes of the host's memory, about."""
MEMO_BYTES: Final = 1 << 20
"""What the slices that one object keeps may take together. The oldest go first."""
Taken: TypeAlias = tuple[Sources, tuple[int, ...]]
"""Sources as writers read them, and the addresses of those that are tensors."""


class Copies(abc.ABC):
    """Copies sources into some slots."""

    __slots__ = ()

    @abc.abstractmethod
    def copy(self, taken: Taken, live: Live) -> None:
        """Copy the live rows."""


class Tails(abc.ABC):
    """Resets the tails of some slots."""

    __slots__ = ()

    @abc.abstractmethod
    def reset(self, live: Live, dirty: Live) -> None:
        """Reset padded rows: at least those from the live ones up to the rows that may be dirty."""


@attrs.frozen(eq=False)
class TailOf:
    """The tail of one slot.

    Attributes:
        target: The slot's buffer, at full capacity.
        rows: Its rows.
        value: What padded rows hold.
    """

    target: torch.Tensor
    rows: Rows
    value: Number


def bits_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Give a host tensor's memory as an array of words, whatever its dtype."""
    with outside_inference():
        made: npt.NDArray[Any] = tensor.detach().view(_WORDS[tensor.dtype.itemsize]).numpy()
    return made


def bits_of_number(value: Number, dtype: torch.dtype) -> Any:
    """Give the word that a number is in a dtype."""
    with outside_inference():
        return bits_of(torch.full((1,), value, dtype=dtype, device="cpu"))[0]


class HostCopies(Copies):
    """Copies into host memory by address, with no slices of tensors."""

    __slots__ = ("_bytes", "_pieces")

    def __init__(self, ways: Sequence[Way], order: Mapping[int, int], rows: Mapping[str, Rows]) -> None:
        """Bind the slots. order: by a source's place, where its address is among those that are taken."""
        self._bytes = [(way.place, way.target.data_ptr()) for way in ways if way.is_bytes]
        found = dict[Dim, tuple[Reach, list[tuple[int, int, int, int]]]]()
        for way in ways:
            if not way.is_bytes:
                size, reach, pieces = _pieces_of(way, order[way.place], rows[way.slot])
                found.setdefault(size, (reach, []))[1].extend(pieces)
        self._pieces = [*found.values()]

    def copy(self, taken: Taken, live: Live) -> None:
        """Copy the live rows, in one piece for each outer row of a slot."""
        sources, addresses = taken
        for reach, pieces in self._pieces:
            rows = reach(live)
            for place, outer, target, row in pieces:
                nbytes = rows * row
                _MEMMOVE(target, addresses[place] + outer * nbytes, nbytes)
        for place, target in self._bytes:
            _MEMMOVE(target, sources[place], len(sources[place]))


def _pieces_of(way: Way, place: int, rows: Rows) -> tuple[Dim, Reach, list[tuple[int, int, int, int]]]:
    """Tell what of a slot varies, its reach, and its pieces: the outer row, the address, and the bytes of a row."""
    target = way.target
    address = target.data_ptr()
    if not rows.dims:
        return Dim.of(1), lambda _: 1, [(place, 0, address, target.nbytes)]
    dim = rows.dims[0]
    row = math.prod(target.shape[dim + 1 :]) * target.itemsize
    step = row * target.shape[dim]
    outer = range(math.prod(target.shape[:dim]))
    return rows.sizes[dim], rows.reaches[0], [(place, one, address + one * step, row) for one in outer]


class PlainCopies(Copies):
    """Copies each source by itself, as torch does: of any dtype that converts, of any layout, between any devices."""

    __slots__ = ("_targets",)

    def __init__(self, ways: Sequence[Way], rows: Mapping[str, Rows]) -> None:
        self._targets = [(way.place, way.target, rows[way.slot]) for way in ways]

    def copy(self, taken: Taken, live: Live) -> None:
        """Slice and copy."""
        sources, _ = taken
        for place, target, rows in self._targets:
            rows.cut(target, live).copy_(sources[place])


class ForeachCopies(Copies):
    """Copies into several slots by one foreach call, or into a single one."""

    __slots__ = ("_choose", "_known", "_most", "_packed", "_packing", "_targets")

    def __init__(
        self, ways: Sequence[Way], packed: Sequence[str], packing: Packing | None, rows: Mapping[str, Rows]
    ) -> None:
        """Bind the slots. packed: those that are copied from parts of the packet. packing: what knows these parts."""
        self._targets = [(way.target, rows[way.slot]) for way in ways]
        self._choose = chosen([way.place for way in ways])
        self._packed = packed
        self._packing = packing
        self._known = dict[Live, tuple[list[torch.Tensor], list[torch.Tensor]]]()
        self._most = slices_kept(len(ways) + 2 * len(packed))

    def copy(self, taken: Taken, live: Live) -> None:
        """Copy into slices that are kept, or made now."""
        targets, parts = self._known.get(live) or self._slice(live)
        sources = self._choose(taken[0])
        if parts:
            sources = (*sources, *parts)
        if len(targets) == 1:  # of some dtypes torch copies no lists
            targets[0].copy_(sources[0])
        else:
            _FOREACH_COPY(targets, sources)

    def _slice(self, live: Live) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Slice the slots, and the parts of the packet that some are copied from."""
        with outside_inference():
            targets = [rows.cut(target, live) for target, rows in self._targets]
            parts = list[torch.Tensor]()
            for slot in self._packed:
                target, part = self._packing.part(slot, live)  # type: ignore[union-attr] # there is one
                targets.append(target)
                parts.append(part)
        keep_newest(self._known, self._most)[live] = targets, parts
        return targets, parts


class HostTails(Tails):
    """Resets tails in host memory as words of NumPy's arrays."""

    __slots__ = ("_along_one", "_along_several")

    def __init__(self, tails: Sequence[TailOf]) -> None:
        self._along_several = list[tuple[npt.NDArray[Any], Rows, Any]]()
        found = dict[Dim, tuple[Reach, list[tuple[npt.NDArray[Any], tuple[slice, ...], Any]]]]()
        for one in tails:
            array, word = bits_of(one.target), bits_of_number(one.value, one.target.dtype)
            dims = one.rows.dims
            if len(dims) == 1:
                _, alike = found.setdefault(one.rows.sizes[dims[0]], (one.rows.reaches[0], []))
                alike.append((array, (slice(None),) * dims[0], word))
            else:
                self._along_several.append((array, one.rows, word))
        self._along_one = [*found.values()]

    def reset(self, live: Live, dirty: Live) -> None:
        """Write what may be dirty."""
        for reach, tails in self._along_one:
            rows = slice(reach(live), reach(dirty))
            for array, outer, word in tails:
                array[(*outer, rows)] = word
        for array, along, word in self._along_several:
            for box in boxes(along.at(live), along.at(dirty)):
                array[index_of(along.dims, box)] = word


class SlicedTails(Tails):
    """Resets tails wherever they lie, all padded rows of the bucket, whichever of them are dirty."""

    __slots__ = ("_known", "_most", "_padded", "_tails")

    def __init__(self, tails: Sequence[TailOf], padded: Live) -> None:
        """Bind the tails. padded: padded rows on each axis."""
        self._tails = tails
        self._padded = padded
        self._known = dict[Live, tuple[list[torch.Tensor], list[tuple[torch.Tensor, Number]]]]()
        self._most = slices_kept(len(tails))

    def reset(self, live: Live, dirty: Live) -> None:
        """Zero some together, and fill the others one by one."""
        del dirty
        zeros, others = self._known.get(live) or self._slice(live)
        if zeros:
            _FOREACH_ZERO(zeros)
        for tail, number in others:
            tail.fill_(number)

    def _slice(self, live: Live) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, Number]]]:
        """Slice the padded rows; -0.0 equals 0 but is another number."""
        zeros, others = list[torch.Tensor](), list[tuple[torch.Tensor, Number]]()
        with outside_inference():
            for tail in self._tails:
                is_zero = tail.value == 0 and math.copysign(1.0, tail.value) > 0
                for part in tail.rows.tails(tail.target, live, self._padded):
                    if is_zero and part.dtype in _ZEROED:
                        zeros.append(part)
                    elif is_zero and part.itemsize % torch.int32.itemsize == 0:
                        zeros.append(part.view(torch.int32))
                    else:
                        others.append((part, tail.value))
        keep_newest(self._known, self._most)[live] = zeros, others
        return zeros, others


def slices_kept(tensors: int) -> int:
    """Tell for how many live sizes slices are kept, so many tensors for each."""
    return max(1, MEMO_BYTES // (SLICE_BYTES * max(1, tensors)))


def keep_newest(cache: dict[K, V], size: int) -> dict[K, V]:
    """Make room for one more entry in a cache of a given size; the oldest goes first."""
    while len(cache) >= size:
        del cache[next(iter(cache))]
    return cache
