"""Packing: assembles the packet of a bound plan for one call. `..packet` documents the layout."""

import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import attrs
import torch

from ..axes import Extent, Live
from ..packet import HEAD, UNIT, WORD, Feed, Lane, code_of, head_bytes, rounded
from ..sources import Sources, chosen
from .reach import Reach, Rows
from .ways import Way

_PADDING: Final = [bytes(-nbytes % UNIT) for nbytes in range(UNIT)]
"""The bytes that fill up the last unit, by the bytes used in it."""


@attrs.frozen(eq=False)
class Carried:
    """One slot's data in the packet: host data of the batch, or a value that the host computes.

    Attributes:
        slot: The slot's name.
        target: The slot's buffer, at full capacity.
        dtype: The dtype of the data.
        rows: The slot's rows.
        padded: Padded rows on each axis if all rows are in the packet, or None for live rows only.
        place: The index of the source, or None for a value that the host computes.
        is_ragged: Whether it is packed as ragged rows, so that its size depends on their lengths.
    """

    slot: str
    target: torch.Tensor
    dtype: torch.dtype
    rows: Rows
    padded: Live | None
    place: int | None = None
    is_ragged: bool = False

    def shape(self, live: Live) -> Extent:
        """Return the shape of the data."""
        return self.rows.extent(live if self.padded is None else self.padded)

    def nbytes(self, live: Live) -> int:
        """Return the size of the data in bytes, for ragged rows the largest that they can have."""
        shape = self.shape(live)
        nbytes = self.dtype.itemsize
        for size in shape:
            nbytes *= size
        return nbytes + WORD * shape[0] if self.is_ragged else nbytes


class Packing:
    """Packs the packet of one bound plan.

    Attributes:
        feed: Sends the packet.
    """

    __slots__ = (
        "_addresses",
        "_base",
        "_carried",
        "_codes",
        "_counted",
        "_head",
        "_last",
        "_order",
        "_owner",
        "_parts",
        "_sized",
        "_spare",
        "_start",
        "feed",
    )

    def __init__(
        self,
        feed: Feed,
        lanes: Sequence[Lane],
        owner: int,
        counted: Sequence[Reach],
        ways: Sequence[Way],
        order: Mapping[int, int],
        carried: Sequence[Carried],
        *,
        left: Collection[str],
    ) -> None:
        """Lay out the parts that do not depend on sizes.

        Args:
            feed: Sends the packet.
            lanes: The lanes that the kernel writes.
            owner: The number of the kernel's table.
            counted: The sizes whose live counts are in the packet.
            ways: How sources reach their slots.
            order: By a source's place, the index of its address among those that `take` returns.
            carried: The data in the packet: first host data in the order of its ways, then computed values.
            left: Slots that the kernel does not write.
        """
        self.feed = feed
        self._owner = owner
        self._counted = counted
        self._carried = carried
        self._parts = chosen([one.place for one in carried if one.place is not None])
        self._spare = [0] * len(counted)  # no counts of a step before an edit
        self._head = struct.Struct(f"<{HEAD + 2 * len(counted)}q")
        self._start = rounded(head_bytes(len(lanes), len(counted)))
        self._base = feed.upload.packet.data_ptr()
        by_slot = {way.slot: way for way in ways if not way.in_place}
        codes = list[int]()
        paces = list[int]()
        picked = list[int]()
        places = {one.slot: len(order) + number for number, one in enumerate(carried)}
        nowhere = len(order) + len(carried)
        for lane in lanes:
            way = by_slot.get(lane.slot)
            if lane.slot in left:
                codes.append(-1)
            elif way is None:
                codes.append(0)
            else:
                codes.append(code_of(way.dtype, lane.target.dtype))
            paces.append(0 if way is None else way.pace)
            by_address = nowhere if way is None or way.is_bytes else order[way.place]
            picked.append(places.get(lane.slot, by_address))
        self._codes = struct.pack(f"<{2 * len(lanes)}q", *codes, *paces)
        self._order = chosen(picked)
        fill = self._start - WORD * (HEAD + 2 * len(counted) + 3 * len(lanes))
        self._addresses = struct.Struct(f"<{len(lanes)}Q{fill}x")
        self._last: tuple[tuple[int, ...] | None, Any, bytes] = None, None, b""
        self._sized: tuple[Any, bytes, Sequence[int]] = None, b"", ()

    def nbytes(self, live: Live) -> int:
        """Return the bytes of the packet of a call."""
        return self._start + sum(rounded(one.nbytes(live)) for one in self._carried)

    def pack(self, sources: Sources, addresses: tuple[int, ...], live: Live) -> bytes:
        """Pack the words and the host data of a call. The caller appends the values that the host computes."""
        parts = self._parts(sources)
        sizes = live, tuple(map(len, parts))
        last_addresses, last_sizes, words = self._last
        if addresses != last_addresses or sizes != last_sizes:
            words = self._pack_words(addresses, sizes)
        if not parts:
            return words
        pieces = [words]
        for part in parts:
            pieces.append(part)
            pieces.append(_PADDING[len(part) % UNIT])
        return b"".join(pieces)

    def _pack_words(self, addresses: tuple[int, ...], sizes: tuple[Live, Sequence[int]]) -> bytes:
        """Pack the words, and keep them for a call of the same addresses, live sizes, and bytes of host data."""
        last_sizes, begin, carried = self._sized
        if sizes != last_sizes:
            live, nbytes = sizes
            counts = [reach(live) for reach in self._counted]
            begin = self._head.pack(self._owner, 0, 0, 0, *counts, *self._spare) + self._codes
            carried = [self._base + start for start in self._starts(live, nbytes)]
            self._sized = sizes, begin, carried
        words = begin + self._addresses.pack(*self._order((*addresses, *carried, 0)))
        self._last = addresses, sizes, words  # one assignment, so that an interrupt leaves all of them new or all old
        return words

    def _starts(self, live: Live, nbytes: Sequence[int] = ()) -> list[int]:
        """Return the offset of each part in the packet. nbytes: The bytes of the first parts, if they are known."""
        starts = list[int]()
        start = self._start
        for number, one in enumerate(self._carried):
            starts.append(start)
            start += rounded(nbytes[number] if number < len(nbytes) else one.nbytes(live))
        return starts

    def part(self, slot: str, live: Live) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of a slot, and the part of the packet that is copied to them."""
        starts = self._starts(live)
        for one, start in zip(self._carried, starts, strict=True):
            if one.slot == slot:
                target = one.rows.cut(one.target, live if one.padded is None else one.padded)
                part = self.feed.upload.packet[start : start + one.nbytes(live)]
                return target, part.view(one.dtype).view(one.shape(live))
        raise KeyError(slot)
