"""Edits between two steps: requests leave, join or change, and their rows are moved and written in the slots."""

import functools
import struct
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, final

import attrs
import torch

from .admission import admitted, check_sources, has_memory
from .axes import BATCH, TOKENS, Live
from .errors import BatchError, ConfigError
from .fill.bound import BoundPlan
from .fill.bucket import Bucket
from .fill.reach import reach_of
from .fill.writers import Taken
from .guard import below_modes
from .packet import EDIT, WORD, head_bytes
from .slots import Copied, Staged
from .sources import NO_SIDE, Sources
from .transition import rows_of_requests, words

Moves = Sequence[tuple[int, int]]
"""Rows that move, and where to."""
Keys = tuple[Hashable, ...]
NOWHERE: Final = -1
"""The row of a request that left before its rows were written."""
_WORD: Final = struct.Struct("<q")


def keys_in(keys: Any, call: str) -> Keys:
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


def rearrange(
    keys: Keys, rows: dict[Hashable, int], leaving: Iterable[Hashable], joining: Sequence[Hashable]
) -> tuple[Keys, Moves]:
    """Have requests leave and join.

    Requests that join take the rows of those that leave, then rows behind the last one. Requests in the last rows move
    to rows that are still free.

    Args:
        keys: The requests, in the order of their rows.
        rows: The row of each request. This changes it.
        leaving: Requests that leave.
        joining: Requests that join.

    Returns:
        The requests in the new order, and the rows that move.
    """
    order, before = [*keys], len(keys)
    free = sorted(map(rows.pop, leaving))
    after = before - len(free) + len(joining)
    order += [None] * (after - before)
    for row, key in zip((*free, *range(before, after)), joining, strict=False):
        order[row], rows[key] = key, row
    last = [row for row in range(before - 1, after - 1, -1) if row not in free]
    moves = [*zip(last, free[len(joining) :], strict=False)]
    for row, to in moves:
        order[to] = key = order[row]
        rows[key] = to
    del order[after:]
    return tuple(order), moves


@attrs.define(eq=False)
class RowWrite:
    """Rows that are written for some requests, admitted.

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
    """The slots that keep rows of requests from step to step, in one bucket: edits move and write these rows.

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
        self._words = {name: words(self.buffers[name].tensor) for name in kept}
        self._places = {name: (each, self._words[name].device) for name, (_, each) in self.rows.items()}

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
        """Read the sources of a batch."""
        return self.bucket.table.gather(batch, NO_SIDE)

    def take_known(self, keys: Keys, sources: Sources, names: Collection[str]) -> RowWrite | None:
        """Admit sources like those before, with a row for each key. Return None for any other."""
        if self._missing(sources, names):
            return None
        live = self.live_of(len(keys))
        lanes, others = self._parts(sources, names)
        found = self.bucket.take_known(lanes, live) if lanes else None
        rows = below_modes(self._copy_known, others, live) if others else {}
        return None if (lanes and found is None) or rows is None else _write_of(keys, live, found, rows)

    def admit(self, keys: Keys, sources: Sources, names: Collection[str]) -> RowWrite:
        """Admit sources of some slots for some requests. Raises as a fill does; nothing is written."""
        check_sources([(self.buffers[name], None, ()) for name in self._missing(sources, names)])
        live = self.live_of(len(keys))
        lanes, others = self._parts(sources, names)
        found = self.bucket.admit(tuple(map(self._outside, lanes)), live) if lanes else None
        rows = {}
        if others:
            for name, tensor in self.bucket.tensors_of(others, live).items():
                rows[name] = words(tensor.to(self.buffers[name].tensor.dtype, copy=True))
            if all(map(self._is_plain, self.bucket.table.names, others)):
                self.bucket.table.add(others)
        return _write_of(keys, live, found, rows)

    def _missing(self, sources: Sources, names: Collection[str]) -> list[str]:
        """Name the slots of `names` that have no source."""
        every = self.bucket.table.names
        return [name for name, source in zip(every, sources, strict=True) if source is None and name in names]

    def _parts(self, sources: Sources, names: Collection[str]) -> tuple[Sources, Sources]:
        """Divide the sources of some slots into those that the kernel writes and the others; () for none at all."""
        every, lanes = self.bucket.table.names, self.bucket.fused.intersection(names)
        found = list[Sources]()
        for some in (lanes, frozenset(names) - lanes):
            part = [one if name in some else None for name, one in zip(every, sources, strict=True)]
            found.append(tuple(part) if some else ())
        return found[0], found[1]

    def _copy_known(self, sources: Sources, live: Live) -> dict[str, torch.Tensor] | None:
        """Copy sources of kinds that a copy is enough for. Return None for any other."""
        if not any(kinds.fit(sources, live) for kinds in self.bucket.table.known):
            return None
        rows = dict[str, torch.Tensor]()
        try:
            for name, source in zip(self.bucket.table.names, sources, strict=True):
                if source is not None:
                    to, tensor = self.buffers[name], source
                    if not isinstance(source, torch.Tensor):
                        tensor = admitted(to, source, self.bucket.rows[name].extent(live))
                    elif not has_memory(source):
                        return None
                    rows[name] = words(tensor.to(to.tensor.dtype, copy=True))
        except BatchError:  # host data with other numbers
            return None
        return rows

    def _is_plain(self, name: str, source: Any) -> bool:
        """Say whether a copy brings a source to its slot: it lies there, or is host data for host memory."""
        device = self.buffers[name].tensor.device
        if isinstance(source, torch.Tensor):
            return source.device == device and not (source.is_neg() or source.is_conj())
        return source is None or device.type == "cpu"

    def _outside(self, source: Any) -> Any:
        """Give a source, or a copy of one that lies in slots: an edit has no rows of the slot's own."""
        low, high = self.buffers.near
        is_inside = isinstance(source, torch.Tensor) and low <= source.data_ptr() < high
        return source.clone() if is_inside else source

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
            counts: Live counts after the edit, see `counts_of`.
            before: Those of the step before, whose rows the kernel advances first; zeros to advance nothing.
            moves: Rows that move, and where to.
            write: The rows that are written.
            rows: The row of each of its requests.
            values: By slot, the bytes that the host has computed for slots without rows.
        """
        feed, data = self.bucket.feed, write.packet or self._left_alone
        places = [start | to << 32 for start, to in moves] + [*rows]
        head = EDIT, next(feed.sent), len(data) // WORD, len(moves) | len(rows) << 32, *counts, *before
        lanes = bytearray(data[self._lanes_at :])
        at = feed.upload.packet.data_ptr() + len(data) + WORD * len(places)
        for slot, value in values.items():
            code, address = self.whole[slot]
            _WORD.pack_into(lanes, code, 0)
            _WORD.pack_into(lanes, address, at)
            at += len(value)
        feed.start(b"".join((_pack(head), lanes, _pack(places), *values.values())), write.kept)

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
        return bytes(self._lanes_at) + _pack([-1] * lanes + [0] * 2 * lanes)

    def write(self, moves: Moves, writes: Sequence[tuple[RowWrite, Sequence[int]]], moving: Collection[str]) -> None:
        """Move the rows of some slots, and write rows, slot by slot in plain code."""
        if moves:
            starts, ends = (self._places_of(rows) for rows in zip(*moves, strict=True))
            for name in moving:
                slot, (dim, _), place = self._words[name], self.rows[name], self._places[name]
                slot.index_copy_(dim, ends[place], slot.index_select(dim, starts[place]))
        for write, rows in writes:
            there = [number for number, row in enumerate(rows) if row != NOWHERE]
            to = self._places_of([rows[number] for number in there])
            chosen = self._places_of(there) if len(there) < len(rows) else None  # of those that stay
            for name, values in write.slots.items():
                if name not in self.rows:
                    self._words[name].copy_(values)
                    continue
                (dim, _), place = self.rows[name], self._places[name]
                new = values if chosen is None else values.index_select(dim, chosen[place])
                self._words[name].index_copy_(dim, to[place], new)

    def _places_of(self, rows: Sequence[int]) -> Mapping[tuple[int, torch.device], torch.Tensor]:
        """Index the rows of requests, by the rows that a slot has for each of them and the slot's device."""
        found = dict[tuple[int, torch.device], torch.Tensor]()
        for each, device in {*self._places.values()}:
            places = [row * each + part for row in rows for part in range(each)]
            found[each, device] = torch.tensor(places, dtype=torch.int64, device=device)
        return found

    def live_of(self, requests: int) -> Live:
        """Give the live rows on each varying axis."""
        return tuple([requests * each for each in self._each])

    def counts_of(self, requests: int) -> list[int]:
        """Give a packet's live counts for so many requests."""
        live = self.live_of(requests)
        return [reach(live) for reach in self._counted]


def _write_of(
    keys: Keys, live: Live, found: tuple[BoundPlan, Taken] | None, rows: Mapping[str, torch.Tensor]
) -> RowWrite:
    """Make the write of sources that the kernel takes, and of rows that were copied."""
    if found is None:
        return RowWrite(keys, slots=rows)
    plan, (sources, addresses) = found
    packet = plan.packing.pack(sources, addresses, live)  # type: ignore[union-attr] # the kernel has one
    return RowWrite(keys, packet, sources, rows)


def _pack(numbers: Sequence[int]) -> bytes:
    """Pack the words of a packet."""
    return struct.pack(f"<{len(numbers)}q", *numbers)
