"""Manifests: what one upload holds, for one live size and one kind of each source."""

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, TypeAlias

import attrs
import numpy as np
import torch

from .admission import Wanted, is_in_place
from .alike import Alike
from .buffers import Buffers
from .caches import keep_newest
from .gather import Sources, chosen
from .hostdata import NOT_CARRIED, Bytes
from .kinds import Kind
from .lanes import WORD, rest
from .readable import has_memory

_POINTER: Final = torch.Tensor.data_ptr
KEPT: Final = 256
"""Sets of addresses that one manifest remembers the words of; the oldest goes first."""

Packed: TypeAlias = tuple[bytes, bytes, Sources]
"""A packet's words, host data behind the host's values, and the sources as the kernel and copies read them."""


@attrs.frozen
class Layout:
    """Where everything stands in a packet.

    head: the words before the addresses. sources: each lane's source, None where it has none. fixed: addresses of
    lanes whose bytes ride in the packet. carried: sources whose bytes do, in order. fused: sources that have a lane.
    nbytes: the whole packet's.
    """

    head: bytes
    sources: tuple[int | None, ...]
    fixed: Mapping[int, int]
    carried: tuple[int, ...]
    fused: frozenset[int]
    nbytes: int


class Manifest:
    """Packs sources that are like those it was made for, and no others.

    What one source needs beforehand, such as another dtype or dense memory, is done to that source alone. The packet:
    the words of `lanes`, then values that the host computed, then host data, all at multiples of eight.
    """

    def __init__(
        self, layout: Layout, kinds: Sequence[Kind], sources: Sources, wanted: Sequence[Wanted], buffers: Buffers
    ) -> None:
        self._alike = alike = Alike(kinds, sources)
        self._guard = alike.guard if alike.only_tensors else None
        self._prepared = [(index, kind.prepare) for index, kind in enumerate(kinds) if kind.prepare is not None]
        prepared = frozenset(index for index, _ in self._prepared)
        self._tensors = tuple(sorted({*alike.tensors, *prepared}))
        self._chosen = chosen(self._tensors) if len(self._tensors) < len(kinds) else tuple
        self._layout = layout
        self._buffers = buffers
        self._wanted = tuple(wanted)
        by_address = [index for index in self._tensors if index in layout.fused - prepared]
        self._apart = frozenset(index for index, kind in enumerate(kinds) if kind.pace is not None)
        self._dense = all(index in self._apart or sources[index].is_contiguous() for index in by_address)
        self._carried = chosen(layout.carried)
        self._fused = chosen(sorted(layout.fused)) if len(layout.fused) < len(kinds) else tuple
        self._carriers = [(i, kinds[i].carrier) for i in layout.carried]
        self._only_arrays = all(kinds[i].host is np.ndarray for i in layout.carried)
        self._parts: list[Bytes] = [part for i in layout.carried for part in (b"", rest(kinds[i].nbytes))]
        self._addresses = struct.Struct(f"<{len(layout.sources)}Q").pack
        self._order, self._fixed = self._placed()
        near = buffers.near or [(0, 0)]
        self._low, self._high = near[0][0], near[-1][1]
        self._known: dict[tuple[int, ...], bytes] = {}

    def _placed(self) -> tuple[Callable[[Sources], Sources], tuple[int, ...]]:
        """What takes the lanes' addresses out of those of all tensors, with the fixed ones behind them."""
        at = {index: place for place, index in enumerate(self._tensors)}
        fixed, places = list[int](), list[int]()
        for lane, index in enumerate(self._layout.sources):
            if index is None or lane in self._layout.fixed:
                places.append(len(at) + len(fixed))
                fixed.append(self._layout.fixed.get(lane, 0))
            else:
                places.append(at[index])
        return chosen(places), tuple(fixed)

    def pack(self, sources: Sources) -> Packed | None:
        """The packet but for the host's values; None where sources are not like those this was made for."""
        if not (self._alike(sources) if self._guard is None else self._guard(*sources)):
            return None
        try:
            if self._prepared:
                made = list(sources)
                for index, prepare in self._prepared:
                    made[index] = prepare(made[index])
                sources = tuple(made)
            pointers = tuple(map(_POINTER, self._chosen(sources)))
            words = self._known.get(pointers) or self._words_of(pointers, sources)
            if words is None:
                moved = self._moved(sources)
                if moved is None:
                    return None
                words, sources = moved
            return words, self._data(sources) if self._carriers else b"", sources
        except NOT_CARRIED:
            return None

    def _data(self, sources: Sources) -> bytes:
        """The bytes of all host data; NOT_CARRIED where some lies in pieces, or is no list of numbers."""
        parts = self._parts.copy()
        if self._only_arrays:
            parts[::2] = self._carried(sources)
        else:
            parts[::2] = [carry(sources[index]) for index, carry in self._carriers if carry is not None]
        return b"".join(parts)

    def kept(self, sources: Sources) -> Sources:
        """What the kernel reads later: not what a plain copy has read by then, which may be large."""
        return self._fused(sources)

    def _words_of(self, pointers: tuple[int, ...], sources: Sources) -> bytes | None:
        """A packet's words; None where a source lies in a buffer, or askew: see `_moved`."""
        if self._dense and self._are_elsewhere(pointers):
            words = keep_newest(self._known, KEPT)[pointers] = self._words(pointers)
            return words
        in_place = self._in_place(sources)
        if not all(self._is_readable(index, sources[index]) for index in self._tensors if index not in in_place):
            return None
        return self._words_beside(pointers, in_place)

    def _moved(self, sources: Sources) -> tuple[bytes, Sources] | None:
        """A packet's words, and the sources, of which those are copies that lie in a buffer, or askew.

        None where one is strided, and may be so only in place, or where its memory was freed.
        """
        made, in_place = list(sources), self._in_place(sources)
        for index in self._tensors:
            source, want = made[index], self._wanted[index]
            if index not in in_place and not self._is_readable(index, source):
                if not has_memory(source) or not (source.is_contiguous() or want.slot.takes_strided()):
                    return None
                made[index] = _copy(source, apart=index in self._apart)
        sources = tuple(made)
        return self._words_beside(tuple(map(_POINTER, self._chosen(sources))), in_place), sources

    def _words_beside(self, pointers: tuple[int, ...], in_place: set[int]) -> bytes:
        """A packet's words, where some slots are written already: of these the kernel writes the tail alone."""
        if not in_place <= self._layout.fused:
            return self._words(pointers, in_place)  # not remembered: `_in_place` has to tell of these in each step
        words = keep_newest(self._known, KEPT)[pointers] = self._words(pointers, in_place)
        return words

    def _words(self, pointers: tuple[int, ...], in_place: Collection[int] = ()) -> bytes:
        addresses = self._order((*pointers, *self._fixed))
        if in_place:
            lanes = zip(self._layout.sources, addresses, strict=True)
            addresses = tuple([0 if index in in_place else address for index, address in lanes])
        return self._layout.head + self._addresses(*addresses)

    def _is_readable(self, index: int, source: torch.Tensor) -> bool:
        """Whether a source can be read at its address while slots are written."""
        if source.data_ptr() % source.itemsize or self._buffers.holds(source) or not has_memory(source):
            return False
        return index not in self._layout.fused or index in self._apart or source.is_contiguous()

    def _are_elsewhere(self, pointers: tuple[int, ...]) -> bool:
        """Whether no address is near a buffer, and all are multiples of eight: then there is nothing to look at."""
        low, high, bits = self._low, self._high, 0
        for pointer in pointers:
            bits |= pointer
            if low <= pointer < high or not pointer:
                return False
        return not bits % WORD

    def _in_place(self, sources: Sources) -> set[int]:
        """Sources that a producer wrote where they belong; of a slot that no kernel writes the buffer is told."""
        found = {i for i in self._tensors if is_in_place(sources[i], self._buffers[self._wanted[i].name])}
        for index in found - self._layout.fused:
            self._buffers.written_beside(self._wanted[index].name)
        return found


def _copy(source: torch.Tensor, *, apart: bool) -> torch.Tensor:
    """A source elsewhere: as dense rows, or with its rows as far apart as the packet says."""
    if not apart:
        return source.clone(memory_format=torch.contiguous_format)
    return torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=source.device).copy_(source)
