"""Edits: requests that leave, join or change between two steps, in every slot that has rows of requests."""

import functools
import struct
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

import attrs
import torch

from .admission import placed
from .axes import BATCH, TOKENS, Live
from .bucket import Absent, Bucket
from .errors import BatchError, ConfigError
from .guard import below_modes
from .packet import EDIT, HEAD, WORD
from .plan import FUSED, NONE, Pattern
from .ready import Planned
from .slots import Copied, Staged
from .sources import Sources
from .specialization import Taken
from .transition import rows_of_requests

_HEAD: Final = struct.Struct(f"<{HEAD}q").pack
NOWHERE: Final = -1
"""The row of a request that left before what is brought for it was written."""


@attrs.define
class Order:
    """Requests by key, in the order of their rows."""

    keys: tuple[Hashable, ...]
    rows: dict[Hashable, int]

    @classmethod
    def of(cls, keys: Iterable[Hashable]) -> "Order":
        """Requests in this order. BatchError where two have one key."""
        keys = tuple(keys)
        rows = {key: row for row, key in enumerate(keys)}
        if len(rows) != len(keys):
            raise BatchError(f"two requests have one key: {len(keys)} keys, {len(rows)} different ones")
        return cls(keys, rows)

    def arranged(
        self, leaving: Collection[Hashable], joining: Sequence[Hashable]
    ) -> tuple["Order", list[tuple[int, int]]]:
        """The order after some left and others joined, and which row moves to which.

        Who joins takes the rows of those that leave, then those behind the last. Other free rows are taken by the last.
        """
        rows, before = dict(self.rows), len(self.keys)
        free = sorted([rows.pop(key) for key in leaving])
        after = before - len(free) + len(joining)
        keys = [*self.keys, *[None] * (after - before)]
        places = [*free, *range(before, after)]
        for row, key in zip(places, joining, strict=False):
            keys[row], rows[key] = key, row
        free, taken = free[len(joining) :], {*free}
        last = [row for row in range(before - 1, after - 1, -1) if row not in taken]
        moves = [*zip(last, free, strict=False)]
        for row, to in moves:
            keys[to] = key = keys[row]
            rows[key] = to
        return Order(tuple(keys[:after]), rows), moves


@attrs.frozen(eq=False)
class Brought:
    """What an edit brings for some requests, admitted.

    keys: the requests, in the order of what is brought. slots: by name, where it is written slot by slot. taken: what a
    packet says of it. kept: what it points to.
    """

    keys: tuple[Hashable, ...]
    slots: Mapping[str, torch.Tensor]
    taken: bytes = b""
    kept: object = None


class RowBucket(Bucket):
    """The slots that keep rows of requests from step to step, in one bucket: takes what edits bring, and writes it.

    rows: by slot, the dim that follows the requests and its rows for each of them. apart: what the kernel does not edit.
    """

    def __init__(self, *given: Any, left_out: Absent = NONE, **options: Any) -> None:
        """As a bucket. left_out: optional slots that no batch brings."""
        super().__init__(*given, partial=True, **options)
        self._pattern_of_all = Pattern(left_out)
        slots, sizes = self.declaration.slots, self.sizes
        kept = {
            name: rows_of_requests(slot, sizes) for name, slot in slots.items() if isinstance(slot, Copied | Staged)
        }
        self.rows = {name: rows for name, rows in kept.items() if rows is not None and name not in left_out}
        fused = self.planned().fused
        self.apart = tuple(name for name in self.rows if name not in fused)

    def check(self) -> None:
        """ConfigError where rows of a slot cannot be told apart by request."""
        for name, slot in self.declaration.slots.items():
            others = [axis.name for axis in slot.axes if not axis.fixed and axis not in {BATCH, TOKENS}]
            if name in self.declaration.sources and (others or (slot.varying and name not in self.rows)):
                what = f"varies on {others[0]}" if others else f"has no whole number of rows for each request"
                raise ConfigError(f"slot {name!r} {what}: steps() edits rows of requests; make it a fixed axis")

    def bring(self, keys: Sequence[Hashable], sources: Sources, names: Collection[str]) -> Brought:
        """Admit sources of some slots for some requests. Raises as a fill does; nothing is written."""
        live = self.live_of(len(keys))
        left_out = frozenset(self.declaration.sources).difference(names)
        fused = self.lowering in FUSED
        apart = [(to, one) for to, one in zip(self._targets, sources, strict=True) if to.name in names]
        slots, taken, kept = dict[str, torch.Tensor](), b"", None
        if fused:
            (taken, kept) = self._take(sources, live, left_out)
            apart = [(to, one) for to, one in apart if to.name in self.apart]
        if apart:
            absent = frozenset(self.declaration.sources).difference(to.name for to, _ in apart)
            move = self.feed.move if self._packs else None
            for to, source, tensor in self._admitted(sources, live, absent):
                slots[to.name] = placed(to, source, tensor, self.buffers, move).to(to.tensor.dtype, copy=True)
        return Brought(tuple(keys), slots, taken, kept)

    def packet(
        self, requests: int, before: int, moves: Sequence[tuple[int, int]], brought: Brought | None, rows: Sequence[int]
    ) -> tuple[bytes, object]:
        """An edit's bytes, and what they point to. rows: of what is brought."""
        data = self._left_alone if brought is None else brought.taken
        words = [start | to << 32 for start, to in moves] + list(rows)
        head = _HEAD(EDIT, 0, requests, before, len(data) // WORD, len(moves) | len(rows) << 32)
        return head + data[HEAD * WORD :] + struct.pack(f"<{len(words)}q", *words), brought and brought.kept

    @functools.cached_property
    def _left_alone(self) -> bytes:
        """The bytes of a packet that brings nothing: every lane is left alone."""
        lanes = len(self.planned().lanes)
        return bytes(HEAD * WORD) + struct.pack(f"<{3 * lanes}q", *[-1] * lanes, *[0] * 2 * lanes)

    def write(
        self, moves: Sequence[tuple[int, int]], brought: Sequence[tuple[Brought, Sequence[int]]], names: Collection[str]
    ) -> None:
        """Move rows and write what is brought, slot by slot in the plainest code."""
        for name in names:
            (dim, each), tensor = self.rows[name], self.buffers[name].tensor
            for row, to in moves:
                tensor.narrow(dim, to * each, each).copy_(tensor.narrow(dim, row * each, each))
        for one, rows in brought:
            for name, values in one.slots.items():
                tensor = self.buffers[name].tensor
                if name not in self.rows:
                    tensor.copy_(values)
                    continue
                dim, each = self.rows[name]
                for index, row in enumerate(rows):
                    if row != NOWHERE:
                        tensor.narrow(dim, row * each, each).copy_(values.narrow(dim, index * each, each))

    def live_of(self, requests: int) -> Live:
        """Live rows on each varying axis."""
        sizes = self.sizes
        return tuple(requests * sizes[axis] // sizes[BATCH] for axis in self.declaration.varying)

    def _take(self, sources: Sources, live: Live, absent: Absent) -> Taken:
        """What a packet says of sources."""
        low, high = self.buffers.near
        own = [isinstance(one, torch.Tensor) and low <= one.data_ptr() < high for one in sources]
        if any(own):
            sources = tuple([one.clone() if inside else one for one, inside in zip(sources, own, strict=True)])
        return self.admit_sources(sources, live, absent)[1]

    def _planned(self, pattern: Pattern) -> Planned:
        """One plan for all, whose lanes are left alone where nothing is brought for them."""
        del pattern
        return super()._planned(self._pattern_of_all)
