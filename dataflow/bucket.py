"""One bucket's fills: plans by what batches differ in, and a specialization for each kind of batch that came."""

from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch

from .admission import Admitted, Kind, check_sources, kind_of, placed
from .axes import Live, Sizes, extent
from .buffers import Buffers
from .capabilities import DEVICE, HOST, Capabilities, Lowering
from .declaration import Declaration
from .errors import BatchError
from .guard import below_modes, without_gradients
from .oracle import fill_slot_by_slot
from .packet import Feed
from .plan import FUSED, NONE, Pattern, packed_bytes, plan_fill
from .ready import Planned, Ready
from .sources import NO_SIDE, Side, Sources
from .specialization import Specialization, Specializations, Taken, keep_newest

Absent = frozenset[str]
PATTERNS: Final = 64
"""Patterns that one bucket keeps plans for."""
NO_FEED: Final = Feed(lambda _: None, 0)  # for buckets over what needs no packet


class Bucket:
    """Fills one bucket of padded sizes; an exact one shows the step live rows only, and takes any size up to its own.

    sizes: the padded size of every axis, at most the buffers' capacity. lowering: how fills are run. partial: whether
    slots for which nothing is brought are left alone. feed: the packet that uploads go by. table: where to keep
    specializations; one of its own, where it is not given.
    """

    def __init__(
        self,
        declaration: Declaration,
        sizes: Sizes,
        capabilities: Capabilities,
        buffers: Buffers,
        *,
        lowering: Lowering = "foreach",
        exact: bool = False,
        partial: bool = False,
        feed: Feed = NO_FEED,
        table: Specializations | None = None,
    ) -> None:
        self.declaration, self.sizes, self.buffers = declaration, dict(sizes), buffers
        self.lowering: Lowering = lowering
        self._capabilities, self._exact, self._partial, self.feed = capabilities, exact, partial, feed
        self._packs = lowering in FUSED or capabilities.packed_uploads
        self._room = packed_bytes(declaration, sizes, capabilities) if self._packs else {}
        self._table = Specializations(declaration) if table is None else table
        self.gather = self._table.gather
        self._targets = [buffers[name] for name in self._table.names]
        self._plans: dict[Pattern, Planned] = {}

    def fill(self, batch: Any, live: Live, absent: Absent = NONE, side: Side = NO_SIDE) -> Ready:
        """Fill from a batch of `live` rows on each varying axis; all but what the device computes.

        Raises MissingSourceError and BatchError before anything is written.
        """
        found, taken = self.admit(batch, live, absent, side)
        without_gradients(found.write, taken, batch)
        return found.ready

    def admit(
        self, batch: Any, live: Live, absent: Absent = NONE, side: Side = NO_SIDE
    ) -> tuple[Specialization, Taken]:
        """The specialization for a batch, and what it took of its sources; nothing is written. Raises as a fill."""
        return self.admit_sources(self.gather(batch, side), live, absent)

    def admit_sources(self, sources: Sources, live: Live, absent: Absent) -> tuple[Specialization, Taken]:
        """The same for sources that were gathered."""
        known = self._table.take(sources, (self, live, absent))
        if known is not None:
            return known
        kinds = self._kinds(sources, live, absent)  # the long way: look at each source, plan, and bind the plan
        planned = self._planned(self._pattern(kinds, absent))
        found = Specialization((self, live, absent), planned, self._table.names, kinds, sources, self.feed)
        taken = below_modes(found.take, sources)
        if taken is None:
            raise BatchError("sources changed while they were looked at")
        self._table.keep(sources, found)
        return found, taken

    def fill_slot_by_slot(self, batch: Any, live: Live, absent: Absent = NONE, side: Side = NO_SIDE) -> Ready:
        """The same by the oracle, what the device computes included."""
        ready, given = self.tensors(batch, live, absent, side)
        self.buffers.distrust()
        fill_slot_by_slot(self.declaration, self.buffers, self._capabilities, ready.step, batch, side, given)
        return ready

    def tensors(
        self, batch: Any, live: Live, absent: Absent = NONE, side: Side = NO_SIDE
    ) -> tuple[Ready, dict[str, torch.Tensor]]:
        """What a fill would copy, by slot, as tensors where slots are; nothing is written. Raises as a fill does."""
        ready, move = self.ready(live, absent), self.feed.move if self._packs else None
        rows = self._admitted(self.gather(batch, side), live, absent)
        return ready, {to.name: placed(to, source, tensor, self.buffers, move) for to, source, tensor in rows}

    def ready(self, live: Live, absent: Absent = NONE) -> Ready:
        """What live sizes need, of batches that come without some optional slots. BatchError if they do not fit."""
        return self.planned(absent).ready(live)

    def planned(self, absent: Absent = NONE) -> Planned:
        """The plan for batches that come without some optional slots, made on its first use."""
        return self._planned(Pattern(absent))

    def _admitted(self, sources: Sources, live: Live, absent: Absent) -> Admitted:
        """The slots that are there, their sources, and these as tensors; raises as `check_sources`."""
        sizes = self.declaration.step(live, self.sizes, exact=self._exact).live_sizes
        pairs = [(to, one) for to, one in zip(self._targets, sources, strict=True) if to.name not in absent]
        return check_sources([(to, source, extent(to.slot.shape, sizes)) for to, source in pairs])

    def _kinds(self, sources: Sources, live: Live, absent: Absent) -> dict[str, Kind]:
        """How each source travels. MissingSourceError and BatchError where one does not fit."""
        planned, found = self.planned(absent), dict[str, Kind]()
        for to, source, tensor in self._admitted(sources, live, absent):
            name, move = to.name, self.feed.move if self._packs and to.slot.placement == DEVICE else None
            fused = name in planned.fused
            carries = name in self._room and (fused or self.lowering not in FUSED)
            found[name] = kind_of(to, source, tensor, self.buffers, fused=fused, carries=carries, move=move)
        return found

    def _pattern(self, kinds: Mapping[str, Kind], absent: Absent) -> Pattern:
        """The plan that sources of some kinds need: the kernel takes them all by one."""
        if self.lowering in FUSED:
            return Pattern(absent)
        own = {(to.name, to.tensor.dtype) for to in self._targets}
        others = {(name, kind.dtype) for name, kind in kinds.items()} - own
        in_place = [name for name, kind in kinds.items() if kind.in_place]
        hosted = [name for name, kind in kinds.items() if kind.carrier is not None]
        return Pattern(absent, in_place, hosted, frozenset(others))

    def _planned(self, pattern: Pattern) -> Planned:
        known = self._plans.get(pattern)
        if known is None:
            given, foreign = (self.declaration, self.sizes, self._capabilities, pattern), self.buffers.foreign
            plan = plan_fill(*given, lowering=self.lowering, foreign=foreign)
            owner = self.feed.number() if self.lowering in FUSED else 0
            over = plan, self.declaration, self.buffers, self.sizes
            known = Planned(*over, exact=self._exact, partial=self._partial, owner=owner)
            keep_newest(self._plans, PATTERNS)[pattern] = known
        return known


def hand_over(bucket: Bucket, batch: Any, live: Live, absent: Absent = NONE, side: Side = NO_SIDE) -> Ready:
    """What a fill would have made ready, with the batch's tensors in the place of copies, of their own dtypes.

    Host data comes as a tensor where its slot is, and what the step writes as a copy. Raises as a fill does.
    """
    ready, given = bucket.tensors(batch, live, absent, side)
    slots = bucket.declaration.slots
    own = {name: one.clone() if slots[name].rewritten or slots[name].restored else one for name, one in given.items()}
    views = {**ready.shown(), **own}
    planned, step = ready.planned, ready.step
    computed = [(one.on, planned.computation(one, step, views)) for one in planned.plan.computed]
    host, device = ([computation for on, computation in computed if on == place] for place in (HOST, DEVICE))
    with torch.no_grad():
        for computation in host:
            computation.run(batch)
    return attrs.evolve(ready, views=views, shown=lambda: views, host=host, device=device)
