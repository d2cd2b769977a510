"""Edits between two steps: requests leave, join or change, and their rows are moved and written in the slots."""

import array
import ctypes
import functools
import struct
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, final

import attrs
import torch

from .admission import check_sources
from .axes import BATCH, TOKENS, Live
from .computation import words
from .errors import BatchError, ConfigError
from .fill.bound import BoundPlan
from .fill.bucket import Bucket
from .fill.writers import Taken
from .guard import below_modes
from .packet import EDIT, WORD, head_bytes
from .sources import NO_SIDE, Sources
from .transition import rows_of_requests

Moves = Sequence[tuple[int, int]]
"""Pairs of a row that moves and its new index."""
Keys = tuple[Hashable, ...]
NOWHERE: Final = -1
"""The row of a request that left before its rows were written."""
_WORD: Final = struct.Struct("<q")


def keys_in(keys: Any, call: str) -> Keys:
    """Return the keys of requests. Raise BatchError for a single key, or for one that cannot be hashed.

    Args:
        keys: An iterable of keys. A string counts as a single key.
        call: How the user writes the call, for the error, such as "leave({})".
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


def rearrange(
    keys: Keys, rows: dict[Hashable, int], leaving: Iterable[Hashable], joining: Sequence[Hashable]
) -> tuple[Keys, Moves]:
    """Update the rows of requests when some leave and some join.

    Requests that join take the rows of those that leave, then rows after the last one. Requests in the last rows move
    to rows that are still free.

    Args:
        keys: The requests, in the order of their rows.
        rows: The row of each request. This changes it.
        leaving: Requests that leave.
        joining: Requests that join.

    Returns:
        The requests in the new order, and the rows that move.
    """
    order = [*keys]
    free = sorted(map(rows.pop, leaving))
    moves = list[tuple[int, int]]()
    for key in joining:
        row = free.pop(0) if free else len(order)
        order[row : row + 1] = [key]
        rows[key] = row
    while free:
        key = order.pop()
        if free[-1] == len(order):  # its request leaves, so that this row is free, too
            free.pop()
            continue
        row = free.pop(0)
        moves.append((len(order), row))
        order[row] = key
        rows[key] = row
    return tuple(order), moves


@attrs.define(eq=False)
class RowWrite:
    """Admitted rows to write for some requests.

    Attributes:
        keys: The requests, in the order of the rows.
        packet: A packet that writes rows; empty if there is none.
        kept: The sources that the packet points to.
        slots: By name, rows that are written slot by slot.
    """

    keys: Keys = ()
    packet: bytes = b""
    kept: object = None
    slots: Mapping[str, torch.Tensor] = attrs.field(factory=dict)


@final
class RowBucket:
    """One bucket's slots that keep rows of requests from step to step. Edits move and write these rows.

    Attributes:
        bucket: The bucket, whose fills skip slots without a source.
        rows: By slot, the dim whose rows belong to requests, and the number of rows for each request.
        apart: Slots with such rows that no kernel edits, which are edited one by one.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.declaration = bucket.declaration
        self.buffers = bucket.buffers
        slots = self.declaration.slots
        sizes = bucket.sizes
        self._each = [sizes[axis] // sizes[BATCH] for axis in self.declaration.varying]
        self._lanes_at = head_bytes(0, len(self.declaration.counted))
        kept = {
            name: rows_of_requests(one, sizes) for name, one in slots.items() if one.writers & {"batch", "producer"}
        }
        self.rows = {name: rows for name, rows in kept.items() if rows is not None and name not in bucket.absent}
        # the kernel edits whole rows of requests, and no rows within these
        self.apart = tuple(name for name in self.rows if name not in bucket.fused or len(slots[name].varying) > 1)
        self._words = {name: words(self.buffers[name].tensor) for name in kept}
        self._layouts = {name: (each, self._words[name].device) for name, (_, each) in self.rows.items()}

    def check(self) -> None:
        """Raise ConfigError if a slot's rows cannot be assigned to requests."""
        for name, slot in self.declaration.slots.items():
            others = [axis.name for axis in slot.axes if not axis.fixed and axis not in {BATCH, TOKENS}]
            if name not in self.declaration.sources or name in self.bucket.absent:
                continue
            if others or (slot.varying and (name not in self.rows or len(slot.varying) > 1)):
                what = f"varies on {others[0]}" if others else "has no whole number of rows for each request"
                raise ConfigError(f"slot {name!r} {what}: steps() edits rows of requests; make it a fixed axis")

    def gather(self, batch: Any) -> Sources:
        """Read a batch's sources for slots with rows of requests."""
        table = self.bucket.table
        every = zip(table.names, table.gather(batch, NO_SIDE), strict=True)
        return tuple([source if name in self.rows else None for name, source in every])

    def take_known(self, keys: Keys, sources: Sources, names: Collection[str]) -> RowWrite | None:
        """Admit sources of a known kind, one for each name, with a row for each key. Return None for any other."""
        live = self.live_of(len(keys))
        _, found = below_modes(self.bucket.find, sources, live)
        if found is None or len(found[0].ways) != len(names):
            return None
        return self._write_of(keys, live, *found)

    def admit(self, keys: Keys, sources: Sources, names: Collection[str]) -> RowWrite:
        """Admit sources for some requests, one for each name. Raises as a fill does, and writes nothing."""
        given = dict(zip(self.bucket.table.names, sources, strict=True))
        check_sources([(self.buffers[name], None, ()) for name in names if given[name] is None])
        for name, source in given.items():  # the memory of a slot cannot be the source of an edit
            if isinstance(source, torch.Tensor) and self.buffers.reaches(source.data_ptr()):
                given[name] = source.clone()
        live = self.live_of(len(keys))
        return self._write_of(keys, live, *self.bucket.admit(tuple(given.values()), live))

    def _write_of(self, keys: Keys, live: Live, plan: BoundPlan, taken: Taken) -> RowWrite:
        """Make the write of admitted sources: a packet for the kernel, and copies for other slots."""
        sources, addresses = taken
        slots = dict[str, torch.Tensor]()
        for way in plan.ways:
            if way.slot not in self.bucket.fused:
                rows = sources[way.place]
                if way.is_bytes:
                    made = torch.empty(self.bucket.rows[way.slot].extent(live), dtype=way.dtype, device="cpu")
                    ctypes.memmove(made.data_ptr(), rows, len(rows))
                    rows = made if way.target.is_cpu else self.bucket.feed.move(made)
                slots[way.slot] = words(rows.to(way.target.dtype, copy=True))
        packet = plan.packing.pack(sources, addresses, live) if plan.packing is not None else b""
        return RowWrite(keys, packet, sources, slots)

    def send(
        self,
        counts: Sequence[int],
        before: Sequence[int],
        moves: Moves,
        write: RowWrite,
        rows: Sequence[int],
        values: Mapping[str, bytes],
    ) -> None:
        """Send an edit's packet.

        Args:
            counts: Live counts after the edit, see `Declaration.counts`.
            before: Live counts of the step before, whose rows the kernel advances first; zeros to advance nothing.
            moves: Pairs of the row to move and its new index.
            write: The rows that are written.
            rows: The row of each request in `write`.
            values: By slot, the bytes that the host has computed for slots without rows.
        """
        feed = self.bucket.feed
        data = write.packet or self._left_alone
        places = _words_of([*[start | to << 32 for start, to in moves], *rows])
        head = _words_of([EDIT, 0, len(data) // WORD, len(moves) | len(rows) << 32, *counts, *before])
        lanes = data[self._lanes_at :]
        if values:
            changed = bytearray(lanes)
            at = feed.upload.packet.data_ptr() + len(data) + len(places)
            for slot, value in values.items():
                _WORD.pack_into(changed, WORD * self.whole[slot], 0)
                _WORD.pack_into(changed, WORD * (2 * len(self.bucket.lanes) + self.whole[slot]), at)
                at += len(value)
            lanes = bytes(changed)
        feed.send(b"".join((head, lanes, places, *values.values())), write.kept)

    @functools.cached_property
    def whole(self) -> Mapping[str, int]:
        """By slot, the lanes of computed slots without rows of requests, which the kernel writes whole."""
        slots = self.declaration.slots
        computed = self.declaration.functions
        lanes = enumerate(lane.slot for lane in self.bucket.lanes)
        return {slot: number for number, slot in lanes if slot in computed and not slots[slot].varying}

    @functools.cached_property
    def _left_alone(self) -> bytes:
        """The bytes of a packet that skips every lane."""
        lanes = len(self.bucket.lanes)
        return bytes(self._lanes_at) + _words_of([-1] * lanes + [0] * 2 * lanes)

    @torch.no_grad()
    def write(self, moves: Moves, writes: Sequence[tuple[RowWrite, Sequence[int]]], moving: Collection[str]) -> None:
        """Move the rows of some slots, and write rows, slot by slot in plain code."""
        if moves:
            starts, ends = zip(*moves, strict=True)
            at = self._places_of(starts)
            moved = {n: self._words[n].index_select(self.rows[n][0], at[self._layouts[n]]) for n in moving}
            writes = [(RowWrite(slots=moved), ends), *writes]
        for write, rows in writes:
            there = [number for number, row in enumerate(rows) if row != NOWHERE]
            to = self._places_of([rows[number] for number in there])
            chosen = self._places_of(there) if len(there) < len(rows) else None  # requests that stay
            for name, values in write.slots.items():
                if name not in self.rows:
                    self._words[name].copy_(values)
                    continue
                dim, _ = self.rows[name]
                layout = self._layouts[name]
                new = values if chosen is None else values.index_select(dim, chosen[layout])
                self._words[name].index_copy_(dim, to[layout], new)

    def _places_of(self, rows: Sequence[int]) -> Mapping[tuple[int, torch.device], torch.Tensor]:
        """Index the rows of requests, for each combination of rows per request and device that slots have."""
        found = dict[tuple[int, torch.device], torch.Tensor]()
        for each, device in {*self._layouts.values()}:
            places = [row * each + part for row in rows for part in range(each)]
            found[each, device] = torch.tensor(places, dtype=torch.int64, device=device)
        return found

    def live_of(self, requests: int) -> Live:
        """Return the live rows on each varying axis."""
        return tuple([requests * each for each in self._each])


def _words_of(numbers: list[int]) -> bytes:
    """Make a packet's words of integers."""
    return array.array("q", numbers).tobytes()
