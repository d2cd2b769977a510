"""The packer: a step's source addresses, live sizes, host data and host values as one piece of bytes to upload."""

import struct
from collections.abc import Sequence
from typing import Final

from .admission import Wanted
from .axes import Sizes
from .buffers import Buffers
from .declaration import Declaration
from .feed import Feed
from .gather import Sources
from .kinds import Kind, Misfit, kind_of
from .lanes import Lane, head_bytes, meta, rounded
from .manifest import Layout, Manifest, Packed
from .plan import FillPlan
from .planner import LARGE_BYTES
from .ready import Ready
from .tails import Number

_MANIFESTS: Final = 4
"""Mixtures of sources that one live size remembers."""


def lanes_of(plan: FillPlan, declaration: Declaration, buffers: Buffers, padded: Sizes) -> list[Lane]:
    """The lanes of a plan, in the order of `plan.fused`."""
    pads: dict[str, Number] = {tail.slot: tail.value for tail in plan.tails}
    slots = declaration.slots
    return [Lane.of(name, buffers[name].view(padded), slots[name].varying, pads.get(name)) for name in plan.fused]


def most_bytes(lanes: Sequence[Lane], declaration: Declaration) -> int:
    """Bytes that a packet of these lanes may have: its words, and all slots but large ones as host data."""
    bodies = [_body_bytes(lane, declaration) for lane in lanes]
    return head_bytes(len(lanes)) + sum(body for body in bodies if body <= LARGE_BYTES)


def _body_bytes(lane: Lane, declaration: Declaration) -> int:
    """Bytes of a lane's padded rows in the widest dtype that its sources may have."""
    dtypes = (lane.target.dtype, *declaration.slots[lane.slot].converts_from())
    return rounded(lane.outer * lane.row * max(dtype.itemsize for dtype in dtypes))


class Packer:
    """Packs for one plan. What it makes for one live size and one kind of each source is a `Manifest`.

    feed: what takes packets to the device.
    """

    def __init__(
        self,
        plan: FillPlan,
        declaration: Declaration,
        buffers: Buffers,
        wanted: Sequence[Wanted],
        feed: Feed,
    ) -> None:
        sizes = {axis: size for axis in declaration.axes for name, size in plan.sizes if axis.name == name}
        places = {want.name: index for index, want in enumerate(wanted)}
        packed = {one.slot for one in plan.computed if one.packed}
        self.lanes = tuple(lanes_of(plan, declaration, buffers, sizes))
        self.owner = feed.number()
        self._feed = feed
        self._buffers = buffers
        self._wanted = tuple(wanted)
        self._slots = [declaration.slots[lane.slot] for lane in self.lanes]
        self._sources = [places.get(lane.slot) for lane in self.lanes]
        self._fused = frozenset(index for index in self._sources if index is not None)
        self._carries = frozenset(
            index
            for lane, index in zip(self.lanes, self._sources, strict=True)
            if index is not None and _body_bytes(lane, declaration) <= LARGE_BYTES
        )
        self._values_at = [index for index, lane in enumerate(self.lanes) if lane.slot in packed]

    def pack(self, ready: Ready, sources: Sources) -> Packed | Misfit:
        """The packet but for the host's values; a misfit where the kernel cannot read a source."""
        manifests: list[Manifest] = ready.manifests
        for place, manifest in enumerate(manifests):
            packed = manifest.pack(sources)
            if packed is not None:
                if place:
                    manifests.insert(0, manifests.pop(place))
                return packed
        return self._anew(ready, sources)

    def _anew(self, ready: Ready, sources: Sources) -> Packed | Misfit:
        kinds = self._kinds(ready, sources)
        if isinstance(kinds, Misfit):
            return kinds
        layout = self._layout(ready, kinds)
        made = Manifest(layout, kinds, sources, self._wanted, self._buffers)
        packed = made.pack(sources) if layout.nbytes <= self._feed.room else None
        if packed is None:
            return Misfit()
        ready.manifests.insert(0, made)
        del ready.manifests[_MANIFESTS:]
        return packed

    def _kinds(self, ready: Ready, sources: Sources) -> list[Kind] | Misfit:
        found, move = [], self._feed.upload.move
        for index, (want, source, fact) in enumerate(zip(self._wanted, sources, ready.facts, strict=True)):
            fused, carries = index in self._fused, index in self._carries
            kind = kind_of(want, source, fact, self._buffers, fused=fused, carries=carries, move=move)
            if isinstance(kind, Misfit):
                return kind
            found.append(kind)
        return found

    def _layout(self, ready: Ready, kinds: Sequence[Kind]) -> Layout:
        """Give everything that the packet carries its place, and write down what is the same in each step."""
        fixed: dict[int, int] = {}
        at = self._feed.address + head_bytes(len(self.lanes))
        for index, value in zip(self._values_at, ready.packed, strict=True):
            fixed[index] = at
            at += value.nbytes
        for index, source in enumerate(self._sources):
            if source is not None and kinds[source].carrier is not None:
                fixed[index] = at
                at += rounded(kinds[source].nbytes)
        metas = [self._meta(index, ready, kinds) for index in range(len(self.lanes))]
        paces = [self._pace(index, ready, kinds) for index in range(len(self.lanes))]
        head = struct.pack(f"<{1 + 2 * len(metas)}q", self.owner, *metas, *paces)
        order = [source for source in self._sources if source is not None and kinds[source].carrier is not None]
        return Layout(head, tuple(self._sources), fixed, tuple(order), self._fused, at - self._feed.address)

    def _meta(self, index: int, ready: Ready, kinds: Sequence[Kind]) -> int:
        """A lane's first word. What the host computed has no tail: every padded row is live."""
        lane, source = self.lanes[index], self._sources[index]
        dtype = lane.target.dtype if source is None else kinds[source].dtype
        return meta(self._live(index, ready), dtype, lane.target.dtype)

    def _live(self, index: int, ready: Ready) -> int:
        """Live elements in a lane's row."""
        lane, slot = self.lanes[index], self._slots[index]
        if index in self._values_at or not slot.varying:
            return lane.row
        return slot.shape[slot.varying[0]].at(ready.step.live_sizes) * lane.inner

    def _pace(self, index: int, ready: Ready, kinds: Sequence[Kind]) -> int:
        """A lane's second word: its source's rows lie one behind another, if they are not apart."""
        source = self._sources[index]
        pace = None if source is None else kinds[source].pace
        return self._live(index, ready) if pace is None else pace
