"""Specializations: a plan bound to one bucket, one set of live sizes and one kind of each source.

The first batch of a kind takes the long way, which makes one of these. A later batch is like it if the guard says so.
What one source needs first, such as another dtype or dense memory, is done to that source alone.
"""

import functools
import itertools
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import torch

from .admission import is_in_place
from .buffers import Buffers
from .feed import Feed
from .guard import IS_NESTED, POINTER, guard_over, own_guard
from .hostdata import NOT_CARRIED, Bytes
from .kinds import Kind
from .lanes import WORD, head_bytes, rest, rounded
from .packet import UNARMED, UNIT, Lanes
from .readable import has_memory
from .ready import Ready, Targets
from .sources import Sources, chosen

K = TypeVar("K")
V = TypeVar("V")


def keep_newest(cache: dict[K, V], size: int) -> dict[K, V]:
    """Make room for one more entry in a cache of a given size; the oldest goes first."""
    while len(cache) >= size:
        del cache[next(iter(cache))]
    return cache


_FOREACH_COPY: Final = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - no public name
_ARRAY_FACTS: Final = operator.attrgetter("dtype", "shape", "strides")
KEPT: Final = 256
"""Sets of addresses that one specialization remembers the words of; the oldest goes first."""

Taken = tuple[bytes, Sources]
"""What a packet begins with and the host data in it, and sources as the kernel and copies read them."""
Words = Callable[[tuple[int, ...]], bytes]
"""Makes what a packet begins with, out of the addresses of sources."""


class Specialization:
    """Fills from sources that are like those it was made for.

    Attributes:
        ready: What its live sizes need.
        take: Looks at sources and writes nothing; None where they are not like those that it was made for.
        write: Fills from what `take` gave, all but what the device computes. Call it without gradients. ComputeError as
            `Computation.run` raises it.
    """

    def __init__(
        self,
        ready: Ready,
        names: Sequence[str],
        kinds: Mapping[str, Kind],
        sources: Sources,
        buffers: Buffers,
        feed: Feed | None,
        lanes: Lanes | None,
    ) -> None:
        """Bind a plan.

        Args:
            ready: What the live sizes need of the plan.
            names: The slots that sources are for, in the order of sources; some may be absent.
            kinds: How each source travels, by slot.
            sources: Those that this is made for.
            buffers: The memory behind the slots.
            feed: What takes packets to the device; None where nothing is uploaded.
            lanes: What the kernel writes; None where copies fill the slots.

        """
        self.ready = ready
        self._buffers = buffers
        self._feed = feed
        places = {name: place for place, name in enumerate(names) if name in kinds}
        found = {place: kinds[name] for name, place in places.items()}
        strict = [(place, kind.host) for place, kind in found.items() if not kind.loose]
        tensors = [place for place, host in strict if host is None]
        self._tensors = chosen(tensors)
        self._guard = guard_over(self._tensors(sources))
        self._arrays = [(place, _ARRAY_FACTS(sources[place])) for place, host in strict if host is np.ndarray]
        self._lists = [(place, host) for place, host in strict if host not in {None, np.ndarray}]
        self._hosted = bool(self._arrays or self._lists)
        self._prepared = [(place, kind.prepare) for place, kind in found.items() if kind.prepare is not None]
        self._addressed = [place for place, kind in found.items() if kind.carrier is None]
        self._at_addresses = chosen(self._addressed)
        self._names = tuple(names)
        fused = frozenset(lane.slot for lane in lanes.lanes) if lanes is not None else frozenset[str]()
        in_place = {place: name for name, place in places.items() if kinds[name].in_place}
        self._in_place = {place: buffers[name].tensor.data_ptr() for place, name in in_place.items()}
        beside = [name for name in in_place.values() if name not in fused]
        self._unmarked, self._marked = (beside, []) if lanes is not None else (list[str](), beside)
        self._fused = frozenset(places[name] for name in fused & places.keys())
        self._apart = frozenset(place for place, kind in found.items() if kind.pace is not None)
        kept = [place for place in sorted(self._fused) if found[place].carrier is None]
        self._kept = None if len(kept) == len(names) else chosen(kept)
        near = buffers.near or [(0, 0)]
        self._low, self._high = near[0][0], near[-1][1]
        self._known: dict[tuple[int, ...], bytes] = {}
        self._lay_out(kinds, places, lanes)
        self._early = [_copy_of(copies, self._sources_of) for copies in ready.early]
        self._late = [_copy_of(copies, self._sources_of) for copies in ready.late]
        plain = len(tensors) == len(self._addressed) == len(names) and not self._prepared
        self.take = self._taker(sources) if plain else self._take
        send: Callable[[Taken, Any], Sources] | None = None
        if feed is not None:
            send = functools.partial(self._send_for_copies, feed) if lanes is None else self._kernel_sender(feed)
        self.write: Callable[[Taken, Any], object] = self._writer(send) if ready.beside or send is None else send

    def _lay_out(self, kinds: Mapping[str, Kind], places: Mapping[str, int], lanes: Lanes | None) -> None:
        """Give everything that the packet carries its place."""
        ready, feed = self.ready, self._feed
        unit = UNIT if lanes is None else WORD
        head = UNARMED if feed is not None else b""
        at = len(head) if lanes is None else head_bytes(len(lanes.lanes))
        carried = [name for name in places if kinds[name].carrier is not None]
        starts: dict[str, int] = {}
        sizes = {value.slot: value.nbytes for value in ready.packed}
        for name in (*carried, *sizes):
            starts[name] = at
            at += rounded(kinds[name].nbytes, unit) if name in carried else sizes[name]
        if feed is not None and at > feed.room:
            message = f"the packet has {feed.room} bytes, too few for a bucket that it was not made for"
            raise ValueError(message)
        self._carriers = [(places[name], carrier) for name in carried if (carrier := kinds[name].carrier) is not None]
        self._parts: list[Bytes] = [part for name in carried for part in (b"", rest(kinds[name].nbytes, unit))]
        self._sources_of = dict(places)
        self._fixed: tuple[torch.Tensor, ...] = ()
        if lanes is not None and feed is not None:
            address = feed.upload.packet.data_ptr()
            values = frozenset(sizes)
            words = lanes.words(kinds, values, ready.step.live_sizes)
            known = {name: address + start for name, start in starts.items()}
            known |= {name: 0 for name, place in places.items() if place in self._in_place}
            order = {place: at for at, place in enumerate(self._addressed)}
            self._head: Words = _words_with(words, [lane.slot for lane in lanes.lanes], known, places, order)
            return
        self._head = lambda _: head
        if feed is not None:
            self._place_parts(starts, feed)

    def _place_parts(self, starts: Mapping[str, int], feed: Feed) -> None:
        """Have the packet's parts at hand as tensors: copies read them where they lie, at the same place each step."""
        packet, parts = feed.upload.packet, list[torch.Tensor]()
        targets = {value.slot: value.scratch for value in self.ready.packed}
        pairs = [zip(copies.names, copies.views, strict=True) for copies in self.ready.late]
        views = dict(itertools.chain.from_iterable(pairs))
        with torch.inference_mode(mode=False):
            for name, start in starts.items():
                target = targets.get(name, views[name])
                part = packet[start : start + target.nbytes]
                parts.append(part.view(target.dtype).view(target.shape))
                self._sources_of[name] = len(self._names) + len(parts) - 1
        for value in self.ready.moved:
            self._sources_of[value.slot] = len(self._names) + len(parts) + self.ready.moved.index(value)
        self._fixed = tuple(parts)

    def _taker(self, like: Sources) -> Callable[[Sources], Taken | None]:
        """`take` where each source is a tensor that is read as it lies, with what it needs in local names."""
        check, known, anew = own_guard(like), self._known.get, self._taken_anew

        def take(sources: Sources) -> Taken | None:
            try:
                if True in map(IS_NESTED, sources) or not check(*sources):
                    return None
            except AttributeError:  # no tensor
                return None
            pointers = tuple(map(POINTER, sources))
            head = known(pointers)
            return (head, sources) if head is not None else anew(pointers, sources)

        return take

    def _take(self, sources: Sources) -> Taken | None:
        """`take` in general."""
        if not self._guard(*self._tensors(sources)):
            return None
        if self._hosted and not self._are_alike(sources):
            return None
        try:
            if self._prepared:
                made = list(sources)
                for place, prepare in self._prepared:
                    made[place] = prepare(made[place])
                sources = tuple(made)
            data = self._data(sources) if self._carriers else b""
            pointers = tuple(map(POINTER, self._at_addresses(sources)))
            head = self._known.get(pointers)
            if head is None:
                found = self._taken_anew(pointers, sources)
                if found is None:
                    return None
                head, sources = found
        except NOT_CARRIED:
            return None
        return head + data if data else head, sources

    def _are_alike(self, sources: Sources) -> bool:
        """Whether lists and arrays are like those before. A carrier tells the length of a list."""
        for place, kind in self._lists:
            if type(sources[place]) is not kind:
                return False
        for place, facts in self._arrays:
            if type(sources[place]) is not np.ndarray or _ARRAY_FACTS(sources[place]) != facts:
                return False
        return True

    def _data(self, sources: Sources) -> bytes:
        """The bytes of all host data; NOT_CARRIED where some lies in pieces, or is no list of numbers."""
        parts = self._parts.copy()
        parts[::2] = [carry(sources[place]) for place, carry in self._carriers]
        return b"".join(parts)

    def _taken_anew(self, pointers: tuple[int, ...], sources: Sources) -> Taken | None:
        """A packet's first words, and the sources, with copies of those that slots' writes would change, or lie askew.

        None where a source is its slot's own memory now, or no longer is, or has no memory.
        """
        if not self._in_place and self._are_elsewhere(pointers):
            head = keep_newest(self._known, KEPT)[pointers] = self._head(pointers)
            return head, sources
        copies = {}
        for place, pointer in zip(self._addressed, pointers, strict=True):
            source = sources[place]
            if place in self._in_place:
                if pointer != self._in_place[place]:
                    return None
            elif not has_memory(source) or (
                self._low <= pointer < self._high and is_in_place(source, self._buffers[self._names[place]])
            ):
                return None
            elif pointer % source.itemsize or self._buffers.holds(source):
                copies[place] = _copy(source, apart=place in self._apart)
        if not copies:
            head = keep_newest(self._known, KEPT)[pointers] = self._head(pointers)
            return head, sources
        sources = tuple([copies.get(place, source) for place, source in enumerate(sources)])
        return self._head(tuple(map(POINTER, self._at_addresses(sources)))), sources

    def _are_elsewhere(self, pointers: tuple[int, ...]) -> bool:
        """Whether no address is near a buffer, and all are multiples of eight: then there is nothing to look at."""
        low, high, bits = self._low, self._high, 0
        for pointer in pointers:
            bits |= pointer
            if low <= pointer < high or not pointer:
                return False
        return not bits % WORD

    def _writer(  # noqa: C901 - in one piece: each call within would take longer than what it does
        self, send: Callable[[Taken, Any], Sources] | None
    ) -> Callable[[Taken, Any], None]:
        """`write` where there is more to do than an upload, with what it needs in local names."""
        buffers, ready, early, late = self._buffers, self.ready, self._early, self._late
        ledger, always, host, unmarked, marked = buffers.ledger, ready.always, ready.host, self._unmarked, self._marked

        def write(taken: Taken, batch: Any) -> None:
            sources = taken[1]
            try:
                for name in unmarked:
                    buffers.written_beside(name)
                if ledger.stamp is not ready or ledger.handed_out:
                    ready.reset(buffers)
                for tail, number in always:
                    tail.fill_(number)
                for copy, chosen_of in early:
                    copy(chosen_of(sources))
                for computation in host:
                    computation.run(batch)
                if send is not None:
                    sources = send(taken, batch)
                for copy, chosen_of in late:
                    copy(chosen_of(sources))
                for name in marked:
                    buffers[name].distrust()  # its producer may have written any row
            except BaseException:
                buffers.distrust()
                raise

        return write

    def _kernel_sender(self, feed: Feed) -> Callable[[Taken, Any], Sources]:
        """Computes what the upload takes along, and sends it for the kernel, with what it needs in local names."""
        ready, buffers, kept, arm = self.ready, self._buffers, self._kept, feed.arm
        ledger, values = buffers.ledger, [value.bytes_of for value in ready.packed]

        def send(taken: Taken, batch: Any) -> Sources:
            data, sources = taken
            for value in values:
                data += value(batch)
            ledger.stamp = buffers.mine = ready
            buffers.unmarked = True
            arm(data, sources if kept is None else kept(sources))
            return sources

        return send

    def _send_for_copies(self, feed: Feed, taken: Taken, batch: Any) -> Sources:
        """Compute what the upload takes along, and send it; the sources of later copies, those in the packet too."""
        data, sources = taken
        for value in self.ready.packed:
            data += value.bytes_of(batch)
        moved = [value.tensor_of(batch) for value in self.ready.moved]
        if len(data) > UNIT:
            feed.carry(data)
        return (*sources, *self._fixed, *map(feed.upload.move, moved))


def _words_with(
    words: bytes, slots: Sequence[str], known: Mapping[str, int], places: Mapping[str, int], order: Mapping[int, int]
) -> Words:
    """A call that makes a packet's words out of its fixed ones and the addresses of sources.

    known: addresses that are the same in each step, by slot; a slot that has no source has 0. order: where each
    source's address stands among those that the call is given.
    """
    fixed = [known.get(name, 0) for name in slots]
    given = [order.get(places[name]) if name in places and name not in known else None for name in slots]
    picked = chosen([len(order) + at if place is None else place for at, place in enumerate(given)])
    pack = struct.Struct(f"<{len(slots)}Q").pack
    rest_of_all = tuple(fixed)
    return lambda pointers: words + pack(*picked((*pointers, *rest_of_all)))


def _copy_of(copies: Targets, places: Mapping[str, int]) -> tuple[Callable[[Any], object], Callable[[Sources], Any]]:
    """A call that does some copies, together in one call of torch's or as one plain copy, and what it is given."""
    if len(copies.names) == 1:
        return copies.views[0].copy_, operator.itemgetter(places[copies.names[0]])
    return functools.partial(_FOREACH_COPY, copies.views), chosen([places[name] for name in copies.names])


def _copy(source: torch.Tensor, *, apart: bool) -> torch.Tensor:
    """A source elsewhere: as dense rows, or with its rows as far apart as the packet says."""
    if not apart:
        return source.clone(memory_format=torch.contiguous_format)
    return torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=source.device).copy_(source)
