"""Writers: copy sources into slots and reset tails. A writer is bound to buffers once, and called with live sizes."""

import abc
import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import attrs
import numpy as np
import numpy.typing as npt
import torch

from ..axes import Dim, Live
from ..computation import word_of, words
from ..guard import outside_inference
from ..sources import Sources, chosen
from ..tails import Number
from .packing import Packing
from .reach import Reach, Rows, boxes, index_of
from .ways import FEW_ROWS, Way

K = TypeVar("K")
V = TypeVar("V")
_FOREACH_COPY: Final = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - no public name
_FOREACH_ZERO: Final = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage] - likewise
_ZEROED: Final = frozenset({torch.int16, torch.int32, torch.float16, torch.bfloat16, torch.float32})
"""Dtypes that every device can zero together: an NPU rejects a list of others. Larger ones are zeroed as int32."""
_MEMMOVE: Final = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes._memmove_addr  # type: ignore[attr-defined] # noqa: SLF001 - what `ctypes.memmove` calls
)
"""C's memmove, called without releasing the GIL and without a result: a quarter faster than `ctypes.memmove`."""
_STARTS: Final = 8
"""Into how many steps the rows of each axis are divided for the start of tail slices."""
_MOST_STARTS: Final = 32
"""The most starts of tails for which one object keeps slices."""
Pieces: TypeAlias = list[tuple[ctypes.c_void_p, int, int]]
"""Parts of slots that one call copies: the address, the index of the source's address, and the outer row."""
_MOST_PATTERN: Final = 1 << 16
"""The most bytes of a slot whose tail is written from a buffer that has its value in every element."""
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
        """Reset padded rows, at least those that may be dirty."""


@attrs.frozen(eq=False)
class TailOf:
    """The tail of one slot.

    Attributes:
        target: The slot's buffer, at full capacity.
        rows: Its rows.
        value: What padded rows hold.
        is_copied: Whether all live rows are copied afterwards.
    """

    target: torch.Tensor
    rows: Rows
    value: Number
    is_copied: bool = False


class HostCopies(Copies):
    """Copies into host memory by address, without slicing tensors."""

    __slots__ = ("_bytes", "_pieces")

    def __init__(self, ways: Sequence[Way], order: Mapping[int, int], rows: Mapping[str, Rows]) -> None:
        """Bind the slots. `order` maps a source's index to the index of its address."""
        self._bytes = [(way.place, way.target.data_ptr()) for way in ways if way.is_bytes]
        found = dict[tuple[Dim, int], tuple[Reach, int, Pieces, Pieces]]()
        for way in ways:
            if not way.is_bytes:
                size, reach, row, (first, *others) = _pieces_of(way, order[way.place], rows[way.slot])
                _, _, firsts, behind = found.setdefault((size, row), (reach, row, [], []))
                firsts.append(first)
                behind.extend(others)
        self._pieces = [*found.values()]

    def copy(self, taken: Taken, live: Live) -> None:
        """Copy the live rows. Each outer row of a slot is one piece."""
        sources, addresses = taken
        for reach, row, firsts, behind in self._pieces:
            nbytes = reach(live) * row
            for target, place, _ in firsts:
                _MEMMOVE(target, addresses[place], nbytes)
            for target, place, outer in behind:
                _MEMMOVE(target, addresses[place] + outer * nbytes, nbytes)
        for place, address in self._bytes:
            _MEMMOVE(address, sources[place], len(sources[place]))


def _pieces_of(way: Way, place: int, rows: Rows) -> tuple[Dim, Reach, int, Pieces]:
    """Return a slot's varying size and reach, the bytes of a row, and a piece for each outer row."""
    target = way.target
    address = target.data_ptr()
    if not rows.dims:
        return Dim.of(1), lambda _: 1, target.nbytes, [(ctypes.c_void_p(address), place, 0)]
    dim = rows.dims[0]
    row = math.prod(target.shape[dim + 1 :]) * target.itemsize
    step = row * target.shape[dim]
    outer = range(math.prod(target.shape[:dim]))
    pieces = [(ctypes.c_void_p(address + one * step), place, one) for one in outer]
    return rows.sizes[dim], rows.reaches[0], row, pieces


class PlainCopies(Copies):
    """Copies each source by `Tensor.copy_`: any dtype that converts, any layout, between any devices."""

    __slots__ = ("_targets",)

    def __init__(self, ways: Sequence[Way], rows: Mapping[str, Rows]) -> None:
        self._targets = [(way.place, way.target, rows[way.slot]) for way in ways]

    def copy(self, taken: Taken, live: Live) -> None:
        """Slice each slot to its live rows and copy."""
        sources, _ = taken
        for place, target, rows in self._targets:
            rows.cut(target, live).copy_(sources[place])


class ForeachCopies(Copies):
    """Copies into several slots by one foreach call, or into a single one.

    Its targets are tensors over the slots' buffers. For other live sizes they are resized in place, which takes less
    than half as long as slicing. Slots that vary along another dim than the first are sliced.
    """

    __slots__ = ("_choose", "_cut", "_live", "_own", "_packed", "_packing", "_parts", "_resized", "_targets")

    def __init__(
        self, ways: Sequence[Way], packed: Sequence[str], packing: Packing | None, rows: Mapping[str, Rows]
    ) -> None:
        """Bind the slots. `packed` names those whose values are in the packet, where `packing` finds them."""
        self._choose = chosen([way.place for way in ways])
        self._packed = packed
        self._packing = packing
        self._live: Live | None = None
        self._parts = list[torch.Tensor]()
        with outside_inference():
            self._targets = [way.target.detach() for way in ways]
        self._own = len(ways)
        self._cut = list[tuple[int, torch.Tensor, Rows]]()
        found = dict[Dim, tuple[Reach, list[tuple[torch.Tensor, tuple[int, ...]]]]]()
        for place, way in enumerate(ways):
            along = rows[way.slot]
            target = self._targets[place]
            if along.dims == (0,) and target.is_contiguous():
                _, alike = found.setdefault(along.sizes[0], (along.reaches[0], []))
                alike.append((target, tuple(target.shape[1:])))
            elif along.dims:
                self._cut.append((place, way.target, along))
        self._resized = [*found.values()]

    def copy(self, taken: Taken, live: Live) -> None:
        """Copy the live rows."""
        if live != self._live:
            self._move(live)
        targets = self._targets
        sources = self._choose(taken[0])
        if self._parts:
            sources = (*sources, *self._parts)
        if len(targets) == 1:  # torch has no foreach copy of some dtypes
            targets[0].copy_(sources[0])
        else:
            _FOREACH_COPY(targets, sources)

    def _move(self, live: Live) -> None:
        """Resize the targets to other live rows."""
        self._live = None  # an interrupt may come when only some are resized
        for reach, targets in self._resized:
            rows = reach(live)
            for target, row in targets:
                target.resize_((rows, *row))
        if self._cut or self._packed:
            with outside_inference():
                for place, buffer, along in self._cut:
                    self._targets[place] = along.cut(buffer, live)
                found = [self._packing.part(slot, live) for slot in self._packed]  # type: ignore[union-attr] # there is one
            self._targets[self._own :] = [target for target, _ in found]
            self._parts = [part for _, part in found]
        self._live = live


class HostTails(Tails):
    """Resets tails in host memory: of small slots as bytes, of others through NumPy arrays.

    Copying bytes from one buffer to another takes a quarter of the time of an assignment in NumPy.
    """

    __slots__ = ("_along_one", "_along_several", "_pieces")

    def __init__(self, tails: Sequence[TailOf]) -> None:
        self._along_several = list[tuple[npt.NDArray[Any], Rows, Any]]()
        pieces = dict[tuple[Dim, int, bytes], tuple[Reach, int, memoryview, list[memoryview]]]()
        found = dict[Dim, tuple[Reach, list[tuple[npt.NDArray[Any], tuple[slice, ...], Any]]]]()
        for one in tails:
            word = word_of(one.value, one.target.dtype)
            with outside_inference():
                array = words(one.target.detach()).numpy()
            dims = one.rows.dims
            outer = math.prod(array.shape[: dims[0]]) if dims else 0
            is_small = 0 < array.nbytes <= _MOST_PATTERN and outer <= FEW_ROWS and one.target.is_contiguous()
            if len(dims) == 1 and is_small:
                size = array.nbytes // outer
                row = size // array.shape[dims[0]]
                pattern = np.full(array.size // outer, word, array.dtype).tobytes()
                key = one.rows.sizes[dims[0]], row, pattern
                _, _, _, alike = pieces.setdefault(key, (one.rows.reaches[0], row, memoryview(pattern), []))
                memory = array.reshape(-1).view(np.uint8).data
                alike.extend([memory[start : start + size] for start in range(0, array.nbytes, size)])
            elif len(dims) == 1:
                _, arrays = found.setdefault(one.rows.sizes[dims[0]], (one.rows.reaches[0], []))
                arrays.append((array, (slice(None),) * dims[0], word))
            else:
                self._along_several.append((array, one.rows, word))
        self._pieces = [*pieces.values()]
        self._along_one = [*found.values()]

    def reset(self, live: Live, dirty: Live) -> None:
        """Write the rows that may be dirty."""
        for reach, row, pattern, slots in self._pieces:
            start = reach(live) * row
            stop = reach(dirty) * row
            if start < stop:
                values = pattern[start:stop]
                for slot in slots:
                    slot[start:stop] = values
        for reach, tails in self._along_one:
            rows = slice(reach(live), reach(dirty))
            for array, outer, word in tails:
                array[(*outer, rows)] = word
        for array, along, word in self._along_several:
            for box in boxes(along.at(live), along.at(dirty)):
                array[index_of(along.dims, box)] = word


class SlicedTails(Tails):
    """Resets all padded rows of tails, dirty or not, in any memory.

    In slots that are copied afterwards it may also reset live rows, so that fewer sizes need separate slices.
    """

    __slots__ = ("_copied", "_exact", "_known", "_padded", "_steps")

    def __init__(self, tails: Sequence[TailOf], padded: Live) -> None:
        """Bind the tails. `padded` gives the padded rows on each axis."""
        self._exact = [tail for tail in tails if not tail.is_copied]
        self._copied = [tail for tail in tails if tail.is_copied]
        self._padded = padded
        self._steps = [max(1, rows // _STARTS) for rows in padded]
        self._known = dict[Live, TailSlices]()

    def reset(self, live: Live, dirty: Live) -> None:
        """Zero some tails together, and fill the others one by one."""
        del dirty
        if self._copied:
            start = tuple([rows - rows % step for rows, step in zip(live, self._steps, strict=False)])
            slices = self._known.get(start)
            if slices is None:
                slices = keep_newest(self._known, _MOST_STARTS)[start] = self._slice(self._copied, start)
            slices.reset()
        if self._exact:
            self._slice(self._exact, live).reset()

    def _slice(self, tails: Sequence[TailOf], live: Live) -> "TailSlices":
        """Slice the padded rows. A tail of -0.0 is not zeroed: its bytes differ from those of 0."""
        zeros = list[torch.Tensor]()
        others = list[tuple[torch.Tensor, Number]]()
        with outside_inference():
            for tail in tails:
                is_zero = tail.value == 0 and math.copysign(1.0, tail.value) > 0
                for part in tail.rows.tails(tail.target, live, self._padded):
                    if is_zero and part.dtype in _ZEROED:
                        zeros.append(part)
                    elif is_zero and part.itemsize % torch.int32.itemsize == 0:
                        zeros.append(part.view(torch.int32))
                    else:
                        others.append((part, tail.value))
        return TailSlices(zeros, others)


@attrs.frozen(eq=False)
class TailSlices:
    """Padded rows of some slots.

    Attributes:
        zeros: The rows that become zero.
        others: The other rows, each with its value.
    """

    zeros: list[torch.Tensor]
    others: list[tuple[torch.Tensor, Number]]

    def reset(self) -> None:
        """Write the rows."""
        if self.zeros:
            _FOREACH_ZERO(self.zeros)
        for tail, number in self.others:
            tail.fill_(number)


def keep_newest(cache: dict[K, V], size: int) -> dict[K, V]:
    """Make room for one more entry in a cache of at most `size`, by dropping the oldest."""
    while len(cache) >= size:
        del cache[next(iter(cache))]
    return cache
