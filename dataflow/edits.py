"""Edits: requests that leave, join or change between two steps, in every slot that has rows of requests."""

import functools
import struct
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, final

import attrs
import torch

from .admission import check_sources
from .axes import BATCH, TOKENS, Live
from .errors import BatchError, ConfigError
from .fill.bound import BoundPlan
from .fill.bucket import Bucket
from .fill.reach import reach_of
from .fill.writers import Taken
from .packet import EDIT, WORD, head_bytes
from .slots import Copied, Staged
from .sources import NO_SIDE, Sources
from .transition import rows_of_requests, words


@functools.lru_cache(1024)
def _words(count: int) -> Callable[..., bytes]:
    """What packs so many words."""
    return struct.Struct(f"<{count}q").pack


_ONE: Final = struct.Struct("<q")
Moves = Sequence[tuple[int, int]]
"""Rows that move, and where to."""
NOWHERE: Final = -1
"""The row of a request that left before what is brought for it was written."""
NO_SLOTS: Final[Mapping[str, torch.Tensor]] = {}


def keys_in(keys: Any, call: str) -> tuple[Hashable, ...]:
    """Return the keys of requests. BatchError for a single key, and for one that cannot be hashed.

    Args:
        keys: An iterable of keys. A text is a single key.
        call: How the caller writes it, for the error, such as "leave({})".
    """
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise BatchError(f"a key is one object: {call.format([keys])}")
    try:
        found = tuple(keys)
        hash(found)
    except TypeError as error:
        raise BatchError(
            f"keys are objects that can be hashed, such as numbers, texts and tuples of them, got {keys!r:.80}: {error}"
        ) from error
    return found


class Order:
    """Requests by key, in the order of their rows."""

    def __init__(self, keys: Iterable[Hashable]) -> None:
        """BatchError where two requests have one key."""
        self.keys = keys_in(keys, "steps(batch, keys={})")
        self.rows = {key: row for row, key in enumerate(self.keys)}
        if len(self.rows) != len(self.keys):
            raise BatchError(f"two requests have one key: {len(self.keys)} keys, {len(self.rows)} different ones")

    def arrange(self, leaving: Iterable[Hashable], joining: Sequence[Hashable]) -> Moves:
        """Have requests leave and join; which row moves to which.

        Those that join take the rows of those that leave, then rows behind the last. The last take other free rows.
        """
        rows, keys, before = self.rows, [*self.keys], len(self.keys)
        free = sorted(map(rows.pop, leaving))
        after = before - len(free) + len(joining)
        keys += [None] * (after - before)
        for row, key in zip((*free, *range(before, after)), joining, strict=False):
            keys[row], rows[key] = key, row
        moves: Moves = ()
        if after < before:
            taken = {*free}
            last = [row for row in range(before - 1, after - 1, -1) if row not in taken]
            moves = [*zip(last, free[len(joining) :], strict=False)]
            for row, to in moves:
                keys[to] = key = keys[row]
                rows[key] = to
            del keys[after:]
        self.keys = tuple(keys)
        return moves


@attrs.define(eq=False)
class Brought:
    """What an edit brings for some requests, admitted.

    Attributes:
        keys: The requests, in the order of what is brought.
        slots: By name, what is written slot by slot.
        packet: A packet that says the rest.
        kept: What that points to.
    """

    keys: tuple[Hashable, ...]
    slots: Mapping[str, torch.Tensor]
    packet: bytes = b""
    kept: object = None


@final
class RowBucket:
    """The slots that keep rows of requests from step to step, in one bucket: takes what edits bring, and writes it.

    Attributes:
        bucket: The bucket, which leaves alone what an edit does not bring.
        rows: By slot, the dim that follows the requests and its rows for each of them.
        apart: Slots with such rows that no kernel edits.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.declaration, self.buffers = bucket.declaration, bucket.buffers
        slots, sizes = self.declaration.slots, bucket.sizes
        self._each = [sizes[axis] // sizes[BATCH] for axis in self.declaration.varying]
        fixed = {axis: size for axis, size in sizes.items() if axis.fixed}
        self._counted = [reach_of(size, self.declaration.varying, fixed) for size in self.declaration.counted]
        self._lanes_at = head_bytes(0, len(self.declaration.counted))
        kept = {name: rows_of_requests(one, sizes) for name, one in slots.items() if isinstance(one, Copied | Staged)}
        self.rows = {name: rows for name, rows in kept.items() if rows is not None and name not in bucket.absent}
        # the kernel's edits know rows of requests, and no rows within them
        self.apart = tuple(name for name in self.rows if name not in bucket.fused or len(slots[name].varying) > 1)

    def has_one_each(self, name: str) -> bool:
        """Whether a slot has one number for each request."""
        return self.rows.get(name) == (0, 1) and len(self.declaration.slots[name].shape) == 1

    def check(self) -> None:
        """ConfigError where rows of a slot cannot be told apart by request."""
        for name, slot in self.declaration.slots.items():
            others = [axis.name for axis in slot.axes if not axis.fixed and axis not in {BATCH, TOKENS}]
            if name not in self.declaration.sources or name in self.bucket.absent:
                continue
            if others or (slot.varying and (name not in self.rows or len(slot.varying) > 1)):
                what = f"varies on {others[0]}" if others else "has no whole number of rows for each request"
                raise ConfigError(f"slot {name!r} {what}: steps() edits rows of requests; make it a fixed axis")

    def gather(self, batch: Any) -> Sources:
        """Read what a batch brings."""
        return self.bucket.table.gather(batch, NO_SIDE)

    def bring(self, keys: tuple[Hashable, ...], sources: Sources, names: Collection[str]) -> Brought:
        """Admit sources of some slots for some requests. Raises as a fill does; nothing is written."""
        bucket, live = self.bucket, self.live_of(len(keys))
        given = dict(zip(bucket.table.names, sources, strict=True))
        check_sources([(self.buffers[name], None, ()) for name in names if given[name] is None])
        lanes = bucket.fused.intersection(names)
        others = frozenset(names) - lanes
        brought = Brought(keys, NO_SLOTS)
        if lanes:
            own = [self._outside(one) for one in self._some(sources, lanes)]
            brought = self._packed(keys, bucket.admit(tuple(own), live), live)
        if others:
            found = bucket.tensors_of(self._some(sources, others), live)
            slots = {name: one.to(self.buffers[name].tensor.dtype, copy=True) for name, one in found.items()}
            brought = attrs.evolve(brought, slots=slots)
        return brought

    def known(self, keys: tuple[Hashable, ...], sources: Sources, names: Collection[str]) -> Brought | None:
        """Take sources like those before, a row for each of the keys. Return None for others, and never raise."""
        if not self.bucket.fused.issuperset(names):
            return None
        live = self.live_of(len(keys))
        found = self.bucket.take_known(self._some(sources, names), live)
        return None if found is None else self._packed(keys, found, live)

    def _packed(self, keys: tuple[Hashable, ...], found: tuple[BoundPlan, Taken], live: Live) -> Brought:
        """What a packet says of sources that were taken."""
        plan, (sources, addresses) = found
        packet = plan.packing.pack(sources, addresses, live)  # type: ignore[union-attr] # the kernel has one
        return Brought(keys, NO_SLOTS, packet, sources)

    def _some(self, sources: Sources, names: Collection[str]) -> Sources:
        """The sources of some slots, and None for the others."""
        every = self.bucket.table.names
        return tuple([one if name in names else None for name, one in zip(every, sources, strict=True)])

    def _outside(self, source: Any) -> Any:
        """A source, or a copy of one that lies in slots: an edit has no rows of the slot's own."""
        low, high = self.buffers.near
        is_inside = isinstance(source, torch.Tensor) and low <= source.data_ptr() < high
        return source.clone() if is_inside else source

    def send(
        self,
        requests: int,
        before: int | None,
        moves: Moves,
        brought: Brought | None,
        rows: Sequence[int],
        values: Mapping[str, bytes],
    ) -> None:
        """Send an edit's packet.

        Args:
            requests: Live requests after the edit.
            before: Live requests of the step before, whose rows the kernel advances first; None to advance nothing.
            moves: Rows that move, and where to.
            brought: What the edit brings; None if rows only move.
            rows: The row of each request that it brings something for.
            values: By slot, the bytes that the host has computed for slots without rows.
        """
        data, kept = (brought.packet or self._left_alone, brought.kept) if brought else (self._left_alone, None)
        words = [*[start | to << 32 for start, to in moves], *rows] if moves else rows
        live = self.counts_of(requests)
        last = [0] * len(live) if before is None else self.counts_of(before)
        head = EDIT, next(self.bucket.feed.sent), len(data) // WORD, len(moves) | len(rows) << 32, *live, *last
        parts = [_words(len(head))(*head), data[self._lanes_at :], _words(len(words))(*words)]
        if values:
            lanes = bytearray(parts[1])
            at = self.bucket.feed.upload.packet.data_ptr() + len(data) + WORD * len(words)
            for slot, made in values.items():
                place, address = self.whole[slot]
                _ONE.pack_into(lanes, place, 0)
                _ONE.pack_into(lanes, address, at)
                parts.append(made)
                at += len(made)
            parts[1] = bytes(lanes)
        self.bucket.feed.start(b"".join(parts), kept)

    @functools.cached_property
    def whole(self) -> Mapping[str, tuple[int, int]]:
        """Computed slots without rows that the kernel writes: where a lane's word is, and its address."""
        slots, computed, lanes = self.declaration.slots, self.declaration.functions, self.bucket.lanes
        return {
            one.slot: (WORD * place, WORD * (2 * len(lanes) + place))
            for place, one in enumerate(lanes)
            if one.slot in computed and not slots[one.slot].varying
        }

    @functools.cached_property
    def _left_alone(self) -> bytes:
        """The bytes of a packet that brings nothing: every lane is left alone."""
        lanes = len(self.bucket.lanes)
        return bytes(self._lanes_at) + struct.pack(f"<{3 * lanes}q", *[-1] * lanes, *[0] * 2 * lanes)

    def write(self, moves: Moves, brought: Sequence[tuple[Brought, Sequence[int]]], names: Collection[str]) -> None:
        """Move rows and write what is brought, slot by slot in plain code."""
        if moves:
            starts, to = zip(*moves, strict=True)
            for name in names:
                tensor, (dim, _) = words(self.buffers[name].tensor), self.rows[name]
                tensor.index_copy_(dim, self._index(name, to), tensor.index_select(dim, self._index(name, starts)))
        for one, rows in brought:
            there = [place for place, row in enumerate(rows) if row != NOWHERE]
            for name, values in one.slots.items():
                tensor = self.buffers[name].tensor
                if name not in self.rows:
                    tensor.copy_(values)
                    continue
                dim, _ = self.rows[name]
                new = words(values)
                if len(there) < len(rows):
                    new = new.index_select(dim, self._index(name, there))  # of those that stay
                words(tensor).index_copy_(dim, self._index(name, [rows[place] for place in there]), new)

    def _index(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        """The places of requests' rows in a slot, where it lies."""
        _, each = self.rows[name]
        places = rows if each == 1 else [row * each + part for row in rows for part in range(each)]
        return torch.tensor(places, dtype=torch.int64, device="cpu").to(self.buffers[name].tensor.device)

    def live_of(self, requests: int) -> Live:
        """Live rows on each varying axis."""
        return tuple([requests * each for each in self._each])

    def counts_of(self, requests: int) -> list[int]:
        """A packet's live counts for so many requests."""
        live = self.live_of(requests)
        return [reach(live) for reach in self._counted]
