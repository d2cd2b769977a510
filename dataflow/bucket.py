"""One bucket's fills: plans by what batches differ in, and a specialization for each kind of batch that came."""

import functools
from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch

from .admission import Fact, Wanted, admit, check_sources
from .axes import Sizes, extent
from .buffers import Buffers
from .capabilities import DEVICE, Capabilities, Lowering, resolve_dtype
from .declaration import Declaration
from .errors import BatchError
from .feed import Feed, Feeder
from .gradients import without_gradients
from .guard import below_modes
from .kinds import Kind, kind_of
from .oracle import fill_slot_by_slot
from .packet import Lanes
from .plan import FUSED, FillPlan
from .planner import LARGE_BYTES, NO_CASTS, NONE, plan_fill, slot_bytes
from .ready import Preparer, Ready
from .sources import NO_SIDE, Gather, Side, Sources
from .specialization import Specialization, Taken, keep_newest
from .views import Views

Absent = frozenset[str]
KEPT: Final = 1024
"""Live sizes, each with a pattern of absent slots, that one bucket keeps specializations for; the oldest goes first."""
KINDS: Final = 4
"""Kinds of sources that one of these has specializations for."""
PATTERNS: Final = 64
"""Patterns that one bucket keeps plans for."""


def absent_from(declaration: Declaration, batch: Any, side: Side = NO_SIDE) -> frozenset[str]:
    """Optional slots that a batch comes without."""
    return frozenset([name for name, source in declaration.optional if source.read(batch, side) is None])


def gathering(declaration: Declaration) -> tuple[tuple[str, ...], Gather]:
    """The slots that batches bring sources for, and what reads all of these, in one order."""
    sources = {name: source for name, slot in declaration.slots.items() if (source := slot.reads(name)) is not None}
    return tuple(sources), Gather([*sources.values()])


@attrs.frozen
class _Pattern:
    """What batches differ in, so that each needs a plan of its own."""

    absent: Absent
    in_place: frozenset[str] = NONE
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    hosted: frozenset[str] = NONE


@attrs.define(eq=False, slots=False)
class Planned:
    """One plan of a bucket, and what its specializations are made with.

    lanes: what the kernel writes by it. carried: slots whose host data a packet has room for.
    """

    plan: FillPlan
    ready: Preparer
    lanes: Lanes | None = None
    carried: frozenset[str] = NONE

    @functools.cached_property
    def fused(self) -> frozenset[str]:
        """Slots that the kernel writes."""
        return NONE if self.lanes is None else frozenset(lane.slot for lane in self.lanes.lanes)


class Bucket:
    """Fills one bucket of padded sizes; an exact one shows the step live rows only, and takes any size up to its own.

    sizes: the padded size of every axis, at most the buffers' capacity. feeder: what gives the packet, where there is
    an upload. lowering: how fills are run.
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
        feeder: Feeder | None = None,
    ) -> None:
        self.declaration = declaration
        self.sizes = dict(sizes)
        self.buffers = buffers
        self.lowering: Lowering = lowering
        self._capabilities = capabilities
        self._exact = exact
        self._feeder = feeder
        self._names, self.gather = gathering(declaration)
        slots = [(name, declaration.slots[name]) for name in self._names]
        self._wanted = [
            Wanted(name, slot, resolve_dtype(slot.dtype, capabilities), buffers[name].tensor.device)
            for name, slot in slots
        ]
        self._plans: dict[_Pattern, Planned] = {}
        self._table: dict[tuple[tuple[int, ...], Absent], list[Specialization]] = {}

    def fill(self, batch: Any, live: tuple[int, ...], absent: Absent = NONE, side: Side = NO_SIDE) -> Ready:
        """Fill from a batch of `live` rows on each varying axis; all but what the device computes.

        Raises MissingSourceError and BatchError before anything is written.
        """
        found, taken = self.take(self.gather(batch, side), live, absent)
        without_gradients(found.write, taken, batch)
        return found.ready

    def take(self, sources: Sources, live: tuple[int, ...], absent: Absent = NONE) -> tuple[Specialization, Taken]:
        """The specialization for a batch's sources, and what it took of them; nothing is written.

        Raises MissingSourceError and BatchError.
        """
        known = self._table.get((live, absent), [])
        for place, one in enumerate(known):
            taken = below_modes(one.take, sources)
            if taken is not None:
                if place:
                    known.insert(0, known.pop(place))
                return one, taken
        return self._specialized(sources, live, absent)

    def admit(self, batch: Any, live: tuple[int, ...], absent: Absent = NONE, side: Side = NO_SIDE) -> None:
        """Raise as a fill of the batch would; nothing is written."""
        self.take(self.gather(batch, side), live, absent)

    def fill_slot_by_slot(
        self, batch: Any, live: tuple[int, ...], absent: Absent = NONE, side: Side = NO_SIDE
    ) -> Ready:
        """The same by the oracle, what the device computes included."""
        ready, given = self.tensors(batch, live, absent, side)
        self.buffers.distrust()
        fill_slot_by_slot(self.declaration, self.buffers, self._capabilities, ready.step, batch, side, given)
        return ready

    def tensors(
        self, batch: Any, live: tuple[int, ...], absent: Absent = NONE, side: Side = NO_SIDE
    ) -> tuple[Ready, dict[str, torch.Tensor]]:
        """What a fill would copy, by slot, without writing anything; raises as a fill does.

        Every source is a tensor where its slot is: host data is in memory of its own there.
        """
        ready, sources = self.ready(live, absent), self.gather(batch, side)
        wanted, brought, facts = self._present(sources, self._facts(live), absent)
        move = self._move if self._packs else None
        admitted = admit(wanted, brought, facts, self.buffers, move)
        return ready, dict(zip([want.name for want in wanted], admitted, strict=True))

    def feed(self) -> Feed:
        """The packet. ValueError where the bucket was made without."""
        if self._feeder is None:
            message = "this bucket has no feeder, which a device that packs uploads needs"
            raise ValueError(message)
        return self._feeder()

    def ready(self, live: tuple[int, ...], absent: Absent = NONE) -> Ready:
        """What live sizes need, of batches that come without some optional slots. BatchError if they do not fit."""
        known = self._table.get((live, absent))
        return known[0].ready if known else self.planned(absent).ready(live)

    def latest(self, live: tuple[int, ...], absent: Absent) -> Specialization:
        """The specialization that filled last of those for some live sizes."""
        return self._table[live, absent][0]

    def planned(self, absent: Absent = NONE) -> Planned:
        """The plan for batches that come without some optional slots, made on its first use."""
        return self._planned(_Pattern(absent))

    def _specialized(self, sources: Sources, live: tuple[int, ...], absent: Absent) -> tuple[Specialization, Taken]:
        """The long way: look at each source, plan, and bind the plan."""
        facts = self._facts(live)
        kinds = self._kinds(sources, facts, absent)
        if kinds is None or any(kind.loose for kind in kinds.values()):
            check_sources(*self._present(sources, facts, absent), self.buffers)
        if kinds is not None:
            found = self._bound(kinds, sources, live, absent)
            taken = below_modes(found.take, sources)
            if taken is not None:
                known = self._table.get((live, absent), [])
                keep_newest(self._table, KEPT)[live, absent] = [found, *known][:KINDS]
                return found, taken
        message = "sources changed while they were looked at"
        raise BatchError(message)

    def _present(
        self, sources: Sources, facts: Mapping[str, Fact], absent: Absent
    ) -> tuple[list[Wanted], list[Any], list[Fact]]:
        """What is wanted, brought and expected for the slots that are there."""
        rows = [row for row in zip(self._wanted, sources, strict=True) if row[0].name not in absent]
        wanted = [want for want, _ in rows]
        return wanted, [source for _, source in rows], [facts[want.name] for want in wanted]

    def _bound(
        self, kinds: Mapping[str, Kind], sources: Sources, live: tuple[int, ...], absent: Absent
    ) -> Specialization:
        pattern = _Pattern(absent)
        if self.lowering not in FUSED:
            dtypes = {want.name: want.dtype for want in self._wanted}
            others = {name: kind.dtype for name, kind in kinds.items() if kind.dtype != dtypes[name]}
            in_place = frozenset(name for name, kind in kinds.items() if kind.in_place)
            hosted = frozenset(name for name, kind in kinds.items() if kind.hosted)
            pattern = _Pattern(absent, in_place, tuple(sorted(others.items(), key=str)), hosted)
        planned = self._planned(pattern)
        plan = planned.plan
        feed = self.feed() if planned.lanes is not None or plan.packed or plan.moved else None
        return Specialization(planned.ready(live), self._names, kinds, sources, self.buffers, feed, planned.lanes)

    def _kinds(self, sources: Sources, facts: Mapping[str, Fact], absent: Absent) -> dict[str, Kind] | None:
        """How each source travels; None where one does not fit."""
        planned, packs = self.planned(absent), self._packs
        found: dict[str, Kind] = {}
        for want, source in zip(self._wanted, sources, strict=True):
            name = want.name
            if name in absent:
                continue
            move = self._move if packs and want.slot.placement == DEVICE else None
            fused, carries = name in planned.fused, name in planned.carried
            kind = kind_of(want, source, facts[name], self.buffers, fused=fused, carries=carries, move=move)
            if kind is None:
                return None
            found[name] = kind
        return found

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.feed().upload.move(tensor)

    @property
    def _packs(self) -> bool:
        """Whether host data for slots on the device is taken up in packets."""
        return self._feeder is not None and (self.lowering in FUSED or self._capabilities.packed_uploads)

    def _is_carried(self, want: Wanted) -> bool:
        """Whether a packet for copies has room for host data of a slot."""
        small = slot_bytes(want.slot, self.sizes, self._capabilities) < LARGE_BYTES
        return small and want.slot.placement == DEVICE

    def _facts(self, live: tuple[int, ...]) -> dict[str, Fact]:
        """What is expected of each source."""
        sizes = self.declaration.step(live, self.sizes, exact=self._exact).live_sizes
        return {want.name: (want.dtype, want.device, extent(want.slot.shape, sizes)) for want in self._wanted}

    def _planned(self, pattern: _Pattern) -> Planned:
        known = self._plans.get(pattern)
        if known is None:
            plan = plan_fill(
                self.declaration,
                self.sizes,
                self._capabilities,
                lowering=self.lowering,
                absent=pattern.absent,
                in_place=pattern.in_place,
                source_dtypes=dict(pattern.dtypes) or NO_CASTS,
                hosted=pattern.hosted,
                foreign=self.buffers.foreign,
            )
            ready = Preparer(plan, self.declaration, self.buffers, self.sizes, exact=self._exact)
            lanes, carried = None, NONE
            if self.lowering in FUSED:
                lanes = Lanes.of(plan, self.declaration, self.buffers, self.feed().number())
                carried = lanes.carried
            elif self._packs:
                carried = frozenset(want.name for want in self._wanted if self._is_carried(want))
            known = keep_newest(self._plans, PATTERNS)[pattern] = Planned(plan, ready, lanes, carried)
        return known


def hand_over(
    bucket: Bucket, batch: Any, live: tuple[int, ...], absent: frozenset[str] = frozenset(), side: Side = NO_SIDE
) -> Ready:
    """What a fill would have made ready, with the batch's tensors in the place of copies.

    A source whose dtype its slot converts comes through as it is; host data for a slot on the device, as a tensor of
    its own there; one that the step writes, as a copy, because the batch is the caller's. Raises as a fill does.
    """
    ready, given = bucket.tensors(batch, live, absent, side)
    slots = bucket.declaration.slots
    own = {
        name: value.clone() if slots[name].rewritten or slots[name].restored else value for name, value in given.items()
    }
    views: Views = {**ready.shown(), **own}
    declaration = bucket.declaration
    known, fields = {**declaration.given(ready.step), **views}, declaration.fields
    host = [computation.on(known, fields) for computation in ready.host]
    with torch.no_grad():
        for computation in host:
            computation.run(batch)
    if ready.packed or ready.moved:
        move = bucket.feed().upload.move
        for value in (*ready.packed, *ready.moved):
            views = {**views, value.slot: move(value.on(known, fields).tensor_of(batch))}
    known |= views
    device = [computation.on(known, fields) for computation in ready.device]
    return attrs.evolve(ready, views=views, shown=lambda: views, host=host, device=device)
