"""Manifests: what one upload holds, for one live size and one kind of each source."""

import struct
from collections.abc import Mapping, Sequence
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
from .kinds import Detour, Kind
from .lanes import WORD, rest

_POINTER: Final = torch.Tensor.data_ptr
KEPT: Final = 256
"""Sets of addresses that one manifest remembers the words of; the oldest goes first."""

Packed: TypeAlias = tuple[bytes, bytes, Sources]
"""A packet's words, host data behind the host's values, and what must stay alive until the device has read it."""


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

    The packet: the words of `lanes`, then values that the host computed, then host data, all at multiples of eight.
    """

    def __init__(
        self, layout: Layout, kinds: Sequence[Kind], sources: Sources, wanted: Sequence[Wanted], buffers: Buffers
    ) -> None:
        self._alike = Alike(kinds, sources)
        self._tensors, self._chosen = self._alike.tensors, self._alike.chosen
        self._layout = layout
        self._buffers = buffers
        self._names = [want.name for want in wanted]
        self._dense = all(
            tensor.is_contiguous() for tensor in self._chosen(sources)
        )  # one in place may lie in rows apart
        self._only_tensors = self._alike.only_tensors
        self.guard = self._alike.guard
        self._carried = chosen(layout.carried)
        self._fused = chosen(sorted(layout.fused)) if len(layout.fused) < len(kinds) else None
        self._carriers = [(i, kinds[i].carrier) for i in layout.carried]
        self._only_arrays = all(kinds[i].host is np.ndarray for i in layout.carried)
        self._parts: list[Bytes] = [part for i in layout.carried for part in (b"", rest(kinds[i].nbytes))]
        self._compact = frozenset(index for index, kind in enumerate(kinds) if kind.compact)
        self._addresses = struct.Struct(f"<{len(layout.sources)}Q").pack
        copied = [index for index in layout.sources if index is not None]  # which come before all other lanes
        self._order = chosen(copied)
        self._rest = [layout.fixed.get(lane, 0) for lane in range(len(copied), len(layout.sources))]
        near = buffers.near or [(0, 0)]
        self._low, self._high = near[0][0], near[-1][1]
        self.known: dict[tuple[int, ...], bytes] = {}

    @property
    def is_plain(self) -> bool:
        """Whether every source is a dense tensor that travels by its address."""
        return self._only_tensors and self._dense and not self._compact and not self._carriers

    def pack(self, sources: Sources) -> Packed | None:
        """The packet but for the host's values; None where sources are not like those this was made for."""
        if self._only_tensors and not self._compact:
            if not self.guard(*sources):
                return None
            pointers = tuple(map(_POINTER, sources))
            words = self.known.get(pointers) or self.words(pointers, sources)
            if words is None or not self._carriers:
                return None if words is None else (words, b"", self._kept(sources))
            return self._carry(words, sources)
        return self._pack_mixed(sources)

    def misfit(self, sources: Sources) -> Detour:
        """Why sources of the right kinds were not packed all the same."""
        in_place = self._in_place(sources)
        tensors = [sources[index] for index in self._tensors if index not in in_place]
        if any(map(self._buffers.holds, tensors)):
            return "overlap"
        askew = any(tensor.data_ptr() % tensor.itemsize or not tensor.is_contiguous() for tensor in tensors)
        return "layout" if askew else "host_data"

    def _pack_mixed(self, sources: Sources) -> Packed | None:
        """The same where some are strided, or no tensors."""
        tensors = self._chosen(sources)
        if not self._alike.hosts(sources) or not self.guard(*tensors):
            return None
        if self._compact:
            sources = tuple([s.contiguous() if i in self._compact else s for i, s in enumerate(sources)])
            tensors = self._chosen(sources)
        pointers = tuple(map(_POINTER, tensors))
        words = self.known.get(pointers) or self.words(pointers, sources)
        return None if words is None else self._carry(words, sources)

    def _carry(self, words: bytes, sources: Sources) -> Packed | None:
        """Words, and the bytes of all host data; None where some lies in pieces, or is no list of numbers."""
        parts = self._parts.copy()
        try:
            if self._only_arrays:
                parts[::2] = self._carried(sources)
            else:
                parts[::2] = [carry(sources[index]) for index, carry in self._carriers if carry is not None]
            return words, b"".join(parts), self._kept(sources)
        except NOT_CARRIED:
            return None

    def _kept(self, sources: Sources) -> Sources:
        """What the kernel reads later: not what a plain copy has read by then, which may be large."""
        return sources if self._fused is None else self._fused(sources)

    def words(self, pointers: tuple[int, ...], sources: Sources) -> bytes | None:
        """A packet's words; None where a source lies in a buffer, or askew."""
        if self.is_plain and self._are_elsewhere(pointers):
            words = self._layout.head + self._addresses(*self._order(pointers), *self._rest)
        else:
            found = self._looked_at(pointers, sources)
            if found is None:
                return None
            words = self._layout.head + self._addresses(*found)
        keep_newest(self.known, KEPT)[pointers] = words
        return words

    def _are_elsewhere(self, pointers: tuple[int, ...]) -> bool:
        """Whether no address is near a buffer, and all are multiples of eight: then there is nothing to look at."""
        low, high, bits = self._low, self._high, 0
        for pointer in pointers:
            bits |= pointer
            if low <= pointer < high:
                return False
        return not bits % WORD

    def _looked_at(self, pointers: tuple[int, ...], sources: Sources) -> list[int] | None:
        """The lanes' addresses, source by source: none for one in place. None where one cannot be read safely."""
        layout, in_place = self._layout, self._in_place(sources)
        at = dict(zip(self._tensors, pointers, strict=True))
        for index in at.keys() - in_place:
            if at[index] % sources[index].itemsize or self._buffers.holds(sources[index]):
                return None
            if not sources[index].is_contiguous() and index in layout.fused:
                return None
        lanes = enumerate(layout.sources)
        return [layout.fixed.get(lane, 0 if i is None or i in in_place else at.get(i, 0)) for lane, i in lanes]

    def _in_place(self, sources: Sources) -> set[int]:
        """Sources that a producer wrote where the kernel would have; one that is copied apart is none."""
        buffers, names = self._buffers, self._names
        return {i for i in self._tensors if i in self._layout.fused and is_in_place(sources[i], buffers[names[i]])}
