"""Specializations: a plan bound to one bucket, one set of live sizes and one kind of each source, and their one table.

The first batch of a kind takes the long way, which makes one of these. A later batch is like it if the guard says so.
What one source needs first, such as another dtype or dense memory, is done to that source alone.
"""

import functools
import operator
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch

from .admission import NOT_TOLD, Kind, has_memory, is_in_place
from .axes import Live
from .declaration import Declaration
from .errors import BatchError
from .guard import IS_NESTED, POINTER, below_modes, outside_inference, own_guard
from .hostdata import NOT_CARRIED
from .packet import UNIT, WORD, Feed, rounded
from .plan import FUSED
from .ready import Planned, Targets
from .sizing import Sizer
from .sources import Gather, Side, Sources, chosen

K = TypeVar("K")
V = TypeVar("V")


def keep_newest(cache: dict[K, V], size: int) -> dict[K, V]:
    """Make room for one more entry in a cache of a given size; the oldest goes first."""
    while len(cache) >= size:
        del cache[next(iter(cache))]
    return cache


_FOREACH_COPY: Final = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - no public name
_UNLIKE: Final = (AttributeError, *NOT_CARRIED)  # what is raised over a source that is of another kind
ADDRESSES: Final = 256
"""Sets of addresses that one specialization remembers the words of."""
KEPT: Final = 4096
"""Live sizes, each with a pattern of absent slots, that a table has specializations for."""
KINDS: Final = 8
"""Specializations for one of these: for kinds of sources, and for the buckets that took it."""
MISS: Final = object()
"""What a bound step answers to a batch that is not like those before it. Nothing was done."""

Taken = tuple[bytes, Sources]
"""What a packet begins with and the host data in it, and sources as the kernel and copies read them."""
MadeFor = tuple[object, Live, frozenset[str]]
"""A bucket, live sizes and absent slots."""
Run = Callable[[Any, Side, Sources], Any]
"""A bound step: see `bind` of runners."""


def not_bound(*_: Any) -> Any:
    """What stands for a step or a fill that no runner has bound yet."""
    return MISS


class Specialization:
    """Fills from sources that are like those it was made for.

    ready: what its live sizes need. take: looks at sources and writes nothing; None where they are unlike. write: fills
    from what `take` gave, all but what the device computes; ComputeError. bound: a fill by runners, and a whole step.
    """

    def __init__(
        self,
        made_for: MadeFor,
        planned: Planned,
        names: Sequence[str],
        kinds: Mapping[str, Kind],
        sources: Sources,
        feed: Feed,
    ) -> None:
        """Bind a plan. names: of slots, in the order of sources. kinds: how each travels. sources: those made for."""
        self.made_for = made_for
        self.ready = planned.ready(made_for[1])
        self.bound: list[Run] = [not_bound, not_bound]
        self._planned = planned
        self._buffers = planned.buffers
        self._feed = feed if planned.uploads else None
        self._kinds = {place: (name, kinds[name]) for place, name in enumerate(names) if name in kinds}
        self._by_address = [place for place, (_, kind) in self._kinds.items() if kind.carrier is None]
        self._places = {name: place for place, (name, _) in self._kinds.items()}
        self._fixed: list[torch.Tensor] = []
        self._words = self._laid_out(kinds, len(names))
        self._known: dict[tuple[int, ...], bytes] = {}
        self.take = self._taker(sources)
        self.write = self._writer(len(names))

    def _laid_out(self, kinds: Mapping[str, Kind], count: int) -> Callable[[tuple[int, ...]], bytes]:
        """Give all that the packet carries its place; what makes its first words out of the sources' addresses."""
        ready, feed, lanes = self.ready, self._feed, self._planned.lanes
        if feed is None:
            return lambda _: b""
        at = rounded(self._planned.head_bytes)
        sizes = {name: rounded(kind.nbytes) for name, kind in self._kinds.values() if kind.carrier is not None}
        sizes |= {value.computation.slot: value.nbytes for value in ready.packed}
        starts: dict[str, int] = {}
        for name, nbytes in sizes.items():
            starts[name] = at
            at += nbytes
        if at > feed.room:
            raise ValueError(f"the packet has {feed.room} bytes, too few for a bucket that it was not made for")
        targets = {name: view for copies in ready.late for name, view in copies.items()}
        with outside_inference():  # the parts that copies read stand as tensors behind the sources
            for name in starts.keys() & targets.keys():
                target, start = targets[name], starts[name]
                self._places[name] = count + len(self._fixed)
                part = feed.upload.packet[start : start + target.nbytes]
                self._fixed.append(part.view(target.dtype).view(target.shape))
        slots, address = [lane.slot for lane in lanes], feed.upload.packet.data_ptr()
        words = self._planned.words(
            kinds, frozenset(value.computation.slot for value in ready.packed), ready.step.live_sizes
        )
        given = [self._kinds[place][0] for place in self._by_address]
        order = {name: at for at, name in enumerate(given) if not kinds[name].in_place}
        fixed = [address + starts[name] if name in starts else 0 for name in slots]
        picked = chosen([order.get(name, len(given) + at) for at, name in enumerate(slots)])
        pack = struct.Struct(f"<{len(slots)}Q{-self._planned.head_bytes % UNIT}x").pack
        return lambda pointers: words + pack(*picked((*pointers, *fixed)))

    def _taker(self, like: Sources) -> Callable[[Sources], Taken | None]:
        """`take`, with what it needs in local names."""
        kinds, known, anew = [(place, kind) for place, (_, kind) in self._kinds.items()], self._known.get, self._anew
        tensors = [place for place, kind in kinds if isinstance(like[place], torch.Tensor) and not kind.loose]
        prepared = [(place, kind.prepare) for place, kind in kinds if kind.prepare is not None]
        carried = [(p, kind.carrier, bytes(-kind.nbytes % UNIT)) for p, kind in kinds if kind.carrier is not None]
        guarded, addressed = _some(tensors, len(like)), _some(self._by_address, len(like))
        check = own_guard(like if guarded is None else guarded(like))

        def take(sources: Sources) -> Taken | None:
            try:
                found = sources if guarded is None else guarded(sources)
                if True in map(IS_NESTED, found) or not check(*found):
                    return None
                if prepared:
                    made = list(sources)
                    for place, prepare in prepared:
                        made[place] = prepare(made[place])
                    sources = tuple(made)
                data = b""
                if carried:
                    data = b"".join([part for place, carry, pad in carried for part in (carry(sources[place]), pad)])
                pointers = tuple(map(POINTER, sources if addressed is None else addressed(sources)))
                words = known(pointers)
                if words is None:
                    taken = anew(pointers, sources)
                    if taken is None:
                        return None
                    words, sources = taken
            except _UNLIKE:
                return None
            return words + data if data else words, sources

        return take

    def _anew(self, pointers: tuple[int, ...], sources: Sources) -> Taken | None:
        """A packet's first words, and sources, with copies of those that writes would change; None if one is unlike."""
        buffers, copies = self._buffers, dict[int, torch.Tensor]()
        low, high = buffers.near
        for place, pointer in zip(self._by_address, pointers, strict=True):
            name, kind = self._kinds[place]
            if kind.in_place:
                if pointer != buffers[name].tensor.data_ptr():
                    return None
            elif pointer % WORD or low <= pointer < high or not pointer:  # else there is nothing to look at
                source = sources[place]
                if not has_memory(source) or (kind.prepare is None and is_in_place(source, buffers[name])):
                    return None
                if pointer % source.itemsize or buffers.holds(source):
                    if kind.pace is None:
                        copies[place] = source.clone(memory_format=torch.contiguous_format)
                    else:  # with its rows as far apart as the packet says
                        copies[place] = source.new_empty_strided(source.shape, source.stride()).copy_(source)
        if not copies:
            words = keep_newest(self._known, ADDRESSES)[pointers] = self._words(pointers)
            return words, sources
        sources = tuple([copies.get(place, source) for place, source in enumerate(sources)])
        return self._words(tuple([sources[place].data_ptr() for place in self._by_address])), sources

    def _writer(self, count: int) -> Callable[[Taken, Any], object]:  # noqa: C901 - as `write` within
        """`write`, with what it needs in local names."""
        buffers, ready, feed, ledger = self._buffers, self.ready, self._feed, self._buffers.ledger
        always, host, values = ready.always, ready.host, [value.bytes_of for value in ready.packed]
        fused, fixed, has_tails = self._planned.fused, self._fixed, self._planned.has_tails
        early = [_copy_of(copies, self._places) for copies in ready.early]
        late = [_copy_of(copies, self._places) for copies in ready.late]
        apart = [name for name, kind in self._kinds.values() if kind.in_place and name not in fused]
        beside = apart and self._planned.plan.lowering in FUSED
        has_more = bool(always or early or host or has_tails)
        kept = _some([place for place in self._by_address if self._kinds[place][0] in fused], count)

        def write(taken: Taken, batch: Any) -> None:  # noqa: C901 - calls within would take longer
            data, sources = taken
            try:
                if has_more:
                    if beside:  # its producer may have written any row, and no plan says so
                        ledger.stamp = None
                    if has_tails and (ledger.stamp is not ready or ledger.handed_out):
                        ready.reset(ledger)
                    for tail, number in always:
                        tail.fill_(number)
                    for copy, chosen_of in early:
                        copy(chosen_of(sources))
                    for computation in host:
                        computation.run(batch)
                ledger.stamp = ready
                if feed is not None:
                    for value in values:
                        data += value(batch)
                    feed.send(data, sources if kept is None else kept(sources))
                    if fixed:
                        sources = (*sources, *fixed)
                for copy, chosen_of in late:
                    copy(chosen_of(sources))
            except BaseException:
                buffers.distrust()
                raise

        return write


def _put_first(known: list[Specialization], one: Specialization) -> None:
    """Move one to the front, in one assignment: an interrupt finds the list as it was or as it will be."""
    known[:] = [one, *(other for other in known if other is not one)]


class Specializations:
    """The one table of specializations: those of one runner's buckets, by what sources tell of sizes and absent slots.

    names: the slots that batches bring sources for. gather: reads all of these from a batch, in their order.
    """

    def __init__(self, declaration: Declaration, size: Sizer | None = None) -> None:
        """Make an empty one. size: reads live sizes; without it, nothing can be bound."""
        sources = declaration.sources
        self.names = tuple(sources)
        self.gather = Gather([*sources.values()])
        self._arguments = declaration.arguments
        self._key = None if size is None else _key_of(size, self.names, [name for name, _ in declaration.optional])
        self._known: dict[Hashable, list[Specialization]] = {}

    def run(self, batch: Any, side: Side, whole: bool = True) -> Any:  # noqa: FBT001, FBT002 - a keyword takes longer
        """Run a bound step, or a fill where it is not `whole`. MISS where no step or fill like it came before."""
        if side and self._arguments is not None and not self._arguments.issuperset(side):
            return MISS  # the long way refuses it
        try:
            sources = self.gather(batch, side)
            known = self._known.get(self._key(sources))  # type: ignore[misc] # there is one where something is bound
        except Exception:  # noqa: BLE001 - the long way raises it, in better words, and tells other ranks
            return MISS
        if known is None:
            return MISS
        outputs = known[0].bound[whole](batch, side, sources)
        if outputs is not MISS:
            return outputs
        for one in known[1:]:  # the others that came with these sizes; what fits is tried first from then on
            outputs = one.bound[whole](batch, side, sources)
            if outputs is not MISS:
                _put_first(known, one)
                break
        return outputs

    def take(self, sources: Sources, made_for: MadeFor) -> tuple[Specialization, Taken] | None:
        """What fits the sources, and what it took of them; nothing is written."""
        known = self._known.get(self._key_or(sources, made_for), [])
        for one in known:
            taken = below_modes(one.take, sources) if one.made_for == made_for else None
            if taken is not None:
                if one is not known[0]:
                    _put_first(known, one)
                return one, taken
        return None

    def keep(self, sources: Sources, found: Specialization) -> None:
        """Keep what was made for sources like these."""
        key = self._key_or(sources, found.made_for)
        keep_newest(self._known, KEPT)[key] = [found, *self._known.get(key, ())][:KINDS]

    def latest(self, batch: Any, side: Side) -> Specialization | None:
        """What filled last of all for the sizes and absent slots of a batch."""
        sources = self.gather(batch, side)
        known = self._known.get(self._key_or(sources, None))
        return known[0] if known else None

    def _key_or(self, sources: Sources, otherwise: Hashable) -> Hashable:
        """The key, or another where sources do not tell one, as where live sizes are given or are no plain numbers."""
        if self._key is None:
            return otherwise
        try:
            key = self._key(sources)
            hash(key)
        except (BatchError, TypeError):
            return otherwise
        return key


def _key_of(size: Sizer, names: Sequence[str], optional: Sequence[str]) -> Callable[[Sources], Hashable]:
    """Make a call that tells from sources which sizes they have, and which optional ones are there."""
    axes = [[(names.index(gauge.slot), gauge) for gauge in gauges] for gauges in size.gauges]
    firsts = [(place, gauge.dim) for (place, gauge), *_ in axes]
    absent = [names.index(name) for name in optional]

    def key(sources: Sources) -> Hashable:
        found: list[Any] = []
        try:
            for place, dim in firsts:
                source = sources[place]
                found.append(source.shape[dim] if dim or type(source) is not list else len(source))
        except (*NOT_TOLD, IndexError):  # nested lists, an optional source that is absent, what the long way refuses
            present = [[(gauge, sources[at]) for at, gauge in axis if sources[at] is not None] for axis in axes]
            found = [gauges[0][0].size(gauges[0][1]) if gauges else 0 for gauges in present]
        if absent:
            found += [sources[place] is None for place in absent]
        return tuple(found)

    if len(firsts) != 1 or absent:
        return key
    ((place, dim),) = firsts

    def only(sources: Sources) -> Hashable:
        source = sources[place]
        try:
            return source.shape[dim] if dim or type(source) is not list else len(source)
        except (*NOT_TOLD, IndexError):
            return key(sources)

    return only


def _some(places: list[int], count: int) -> Callable[[Sources], Sources] | None:
    """A call that takes some sources out of all; None where these are all."""
    return None if places == [*range(count)] else chosen(places)


def _copy_of(copies: Targets, places: Mapping[str, int]) -> tuple[Callable[[Any], object], Callable[[Sources], Any]]:
    """A call that does some copies, together in one call of torch's or as one plain copy, and what it is given."""
    at, views = [places[name] for name in copies], [*copies.values()]
    if len(views) == 1:
        return views[0].copy_, operator.itemgetter(*at)
    return functools.partial(_FOREACH_COPY, views), chosen(at)
