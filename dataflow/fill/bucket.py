"""Buckets: the fills of one set of padded sizes and one set of absent slots, bound for each kind of batch."""

import copy
import functools
import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from ..admission import Admitted, check_sources, placed
from ..axes import BATCH, Live, Sizes, Step
from ..buffers import Buffer, Buffers
from ..capabilities import DEVICE, HOST, Capabilities, LoweringName, Placement
from ..computation import Computation, LastRun, PackedValue, Results, ResultTail, word_of
from ..declaration import Declaration
from ..done import reset_of, resets
from ..errors import BatchError, DeclarationError, blame
from ..guard import below_modes, outside_inference
from ..lowering import LOWERINGS, How
from ..oracle import fill_slot_by_slot
from ..packet import RAGGED, Feed, Lane, Move, table_of
from ..plan import (
    NONE,
    Absent,
    ComputeStep,
    CopyGroup,
    FillPlan,
    Pattern,
    TailReset,
    packed_bytes,
    plan_fill,
)
from ..slots import Slot
from ..sources import NO_SIDE, RANKS, SETTINGS, STEP, Side, Sources
from ..tails import Number
from ..transition import Transition, rows_of_requests
from ..views import Aliases, Views, alias
from .bound import BoundPlan, Functions, Writers, order_of
from .kinds import KindTable, SourceKinds
from .packing import Carried, Packing
from .reach import Rows, reach_of
from .ways import Chooser, Way
from .writers import (
    Copies,
    ForeachCopies,
    HostCopies,
    HostTails,
    PlainCopies,
    SlicedTails,
    TailOf,
    Tails,
    Taken,
    keep_newest,
)

NO_FEED: Final = Feed(lambda _: None, 0)  # for buckets that need no packet
NO_FUNCTIONS: Final = Functions((), (), ())
PATTERNS: Final = 64
"""The most patterns for which one bucket keeps plans."""
Given = Mapping[str, torch.Tensor]
"""Admitted sources as tensors on their slots' devices, by slot."""
MOST_PLANS: Final = 4
"""Bound plans that one bucket keeps for batches of the same kinds, since a source may be a slot's own memory or not."""
_SIZES: Final = frozenset({STEP, SETTINGS})  # a function that takes only these depends only on sizes


@attrs.frozen(eq=False)
class ShownSlots:
    """The tensors of a bucket for one call's live sizes.

    Attributes:
        live: Live rows on each axis. Only an exact bucket depends on them.
        shown: Aliases of the slots, for steps and callers, or None for one that is absent or switched off.
        functions: The functions that read them.
    """

    live: Live
    shown: Aliases
    functions: Functions


def run_all(computations: Sequence[Computation], batch: Any = None) -> None:
    """Run the functions on the device, in order."""
    if computations:
        with torch.no_grad():
            for computation in computations:
                computation.run(batch)


@final
class Bucket:
    """Fills one bucket of padded sizes, for batches that lack some optional slots.

    Attributes:
        declaration: The slots.
        sizes: The padded size of every axis, at most the buffers' capacity.
        padded: The padded sizes of the axes that vary.
        absent: Optional slots that the batches lack.
        buffers: The memory of the slots.
        lowering: How fills are run.
        exact: Whether steps see live rows only. Such a bucket takes any size up to its own, and has no tails.
        partial: Whether slots without a source are left alone.
        left: Slots that its fills do not write.
        frozen: Values of fields that a graph has frozen, which its functions and views see in place of a batch's own.
        feed: Sends packets.
        table: The kinds of batches seen so far.
        plan: The plan for tensors of the slots' own dtypes.
        views: The slots at their padded sizes, or None for one that is absent or switched off.
    """

    def __init__(
        self,
        declaration: Declaration,
        sizes: Sizes,
        capabilities: Capabilities,
        buffers: Buffers,
        *,
        absent: Absent = NONE,
        lowering: LoweringName = "foreach",
        feed: Feed = NO_FEED,
        table: KindTable | None = None,
        exact: bool = False,
        partial: bool = False,
        frozen: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.declaration = declaration
        self.sizes = dict(sizes)
        self.padded: Live = tuple([sizes[axis] for axis in declaration.varying])
        self.absent = absent
        self.buffers = buffers
        self.lowering = LOWERINGS[lowering]
        self.exact = exact
        self.partial = partial
        self.left: frozenset[str] = frozenset()
        self.frozen = frozen
        self.feed = feed
        self.table = KindTable(declaration, sizes) if table is None else table
        self.rows = self.table.rows
        self._capabilities = capabilities
        self._packs = self.lowering.has_kernel or (capabilities.packed_uploads and self.lowering.copies != "direct")
        self._room = packed_bytes(declaration, sizes, capabilities) if self._packs else {}
        self._plans = dict[Pattern, FillPlan]()
        self.plan = self._planned(Pattern(absent))
        self.owner = feed.number() if self.lowering.has_kernel else 0
        self.views = self._views(sizes)
        self._last: ShownSlots | None = None
        self._asked = False
        whole = declaration.step(self.padded, self.sizes)
        self._padded_sizes = whole.padded_sizes
        self._fixed = {axis: size for axis, size in whole.live_sizes.items() if axis.fixed}
        self._fits: Live | None = None
        self._last_step: tuple[Live, Step] | None = None

    def _views(self, sizes: Sizes) -> Views:
        names = self.declaration.slots
        absent = self.absent
        views = {name: None if name in absent else self.buffers[name].view(sizes) for name in names}
        return {**dict.fromkeys(self.declaration.disabled), **views}

    def _views_of(self, live: Live) -> Views:
        """Make tensors of the live rows of the slots that are present."""
        found = dict(self.views)
        with outside_inference():
            for rows, tensors in self._alike:
                index = rows.index(live)
                for name, tensor in tensors:
                    found[name] = tensor[index] if rows.dims else tensor.detach()
        return found

    @functools.cached_property
    def _alike(self) -> list[tuple[Rows, list[tuple[str, torch.Tensor]]]]:
        """The slots that are present, by their rows."""
        found = dict[Any, tuple[Rows, list[tuple[str, torch.Tensor]]]]()
        for name, rows in self.rows.items():
            if self.views[name] is not None:
                key = rows.dims, *(rows.sizes[dim] for dim in rows.dims)
                _, tensors = found.setdefault(key, (rows, []))
                tensors.append((name, self.buffers[name].tensor))
        return [*found.values()]

    def part(self, left: frozenset[str]) -> "Bucket":
        """Make a copy of the bucket whose fills leave some slots as they are."""
        made = copy.copy(self)
        made.left = left
        made._last = None  # noqa: SLF001 - its own
        return made

    @functools.cached_property
    def fused(self) -> frozenset[str]:
        """The slots that the fill kernel writes."""
        return frozenset(self.plan.fused)

    def at(self, live: Live) -> ShownSlots:
        """Return the tensors for steps of these sizes. An exact bucket caches only the last result."""
        last = self._last
        if last is None or (self.exact and last.live != live):
            views = self.views
            anew = None
            if self.exact:  # a size is often used in one step only, so aliases are made at the second use
                views = self._views_of(live)
                anew = functools.partial(self._views_of, live)
            last = self._last = ShownSlots(live, Aliases(views, anew), self._functions(views))
        return last

    def compute_on_device(self) -> None:
        """Run the functions on the device, for a bucket that is not exact."""
        run_all(self.functions(self.padded).on_device)

    def step(self, live: Live) -> Step:
        """Return the `Step` of a call's sizes, cached for the next call of the same sizes."""
        last = self._last_step
        if last is None or last[0] != live:
            known = dict(zip(self.declaration.varying, live, strict=False))
            known.update(self._fixed)
            last = self._last_step = live, Step(known, known if self.exact else self._padded_sizes)
        return last[1]

    def check_room(self, live: Live) -> None:
        """Raise BatchError if a batch has more rows than the bucket."""
        for axis, rows, most in zip(self.declaration.varying, live, self.padded, strict=False):
            if rows > most:
                raise BatchError(f"the batch has {rows} rows on {axis}, more than the {most} of this bucket")

    def admit(self, sources: Sources, live: Live) -> tuple[BoundPlan, Taken]:
        """Choose the bound plan for a batch, and take its sources. Writes nothing, and raises the errors of a fill."""
        kinds, found = below_modes(self.find, sources, live)
        if found is not None:
            return found
        plan = self._bind(sources, live)
        taken = below_modes(plan.take, sources, live)
        if taken is None:
            raise BatchError("sources changed while they were checked")
        kinds = self.table.add(sources) if kinds is None else kinds
        kinds.plans[self] = [plan, *kinds.plans.get(self, ())][:MOST_PLANS]
        return plan, taken

    def find(self, sources: Sources, live: Live) -> tuple[SourceKinds | None, tuple[BoundPlan, Taken] | None]:
        """Return the kinds of sources if they are known, and the sources as taken by a plan that was bound for them."""
        for kinds in self.table.known:
            if kinds.fit(sources, live):
                return kinds, self.take(kinds, sources, live)
        return None, None

    def take(self, kinds: SourceKinds, sources: Sources, live: Live) -> tuple[BoundPlan, Taken] | None:
        """Take sources of known kinds and sizes. Return None if no plan was bound for them."""
        if live is not self._fits:
            if not all(map(operator.le, live, self.padded)):
                return None
            self._fits = live
        plans: list[BoundPlan] = kinds.plans.get(self, [])
        for plan in plans:
            taken = plan.take(sources, live)
            if taken is not None:
                if plan is not plans[0]:
                    kinds.plans[self] = [plan, *(other for other in plans if other is not plan)]
                return plan, taken
        return None

    def fill_slot_by_slot(self, batch: Any, live: Live, side: Side, given: Given) -> None:
        """Fill by the oracle, including what the device computes. `given` is what `tensors` returned."""
        self.buffers.distrust()
        fill_slot_by_slot(
            self.declaration,
            self.buffers,
            self._capabilities,
            self.step(live),
            batch,
            side,
            given,
            left=self.left,
            frozen=self.frozen,
        )
        self.buffers.clean.done(self, live)

    def tensors(self, batch: Any, live: Live, side: Side = NO_SIDE) -> dict[str, torch.Tensor]:
        """Return what a fill would copy, by slot, as tensors on the slots' devices.

        Writes nothing, and raises the errors of a fill.
        """
        sources = self.table.gather(batch, side)
        self.check_room(live)
        move = self.feed.move if self._packs else None
        found = self._admitted(sources, live)
        return {to.name: placed(to, source, tensor, self.buffers, move) for to, source, tensor in found}

    def functions(self, live: Live) -> Functions:
        """Return the functions for a call of these sizes."""
        return self.at(live).functions

    def _functions(self, views: Views) -> Functions:
        """Bind the functions to views."""
        if not self._asked:
            self._ask(self.step(self.padded))
            self._asked = True
        resetting = self.declaration, views, self.sizes, self._capabilities
        on_device = [*resets(*resetting)]
        if not (self.plan.computed or on_device):
            return NO_FUNCTIONS
        on_host = list[Computation]()
        packed = list[PackedValue]()
        late = list[Computation]()  # resets that follow a function, which may have filled several slots
        filled: Collection[str] = ()
        for one, computation in self.computations(views, [one.slot for one in self._computed if one.packed]):
            if one.packed:
                packed.append(PackedValue.of(computation))
            elif one.on == HOST:
                on_host.append(computation)
            else:
                if one.slot not in filled:
                    on_device += late
                    late.clear()
                filled = computation.compute.fills
                on_device.append(computation)
                late += filter(None, [reset_of(one.slot, *resetting)])
        return Functions(on_host, packed, on_device + late)

    def computations(self, views: Views, last: Collection[str] = ()) -> Iterator[tuple[ComputeStep, Computation]]:
        """Bind the functions to the slots that they need and write, in the order in which they run.

        Slots in `last` are computed after the others: of a function that fills several, the first slot makes the call.
        """
        declaration = self.declaration
        results = Results()
        first = dict[tuple[str, ...], LastRun]()
        known = {SETTINGS: declaration.settings, RANKS: declaration.ranks, **self.frozen, **views}
        for one in sorted(self._computed, key=lambda one: one.slot in last):
            bind = functools.partial(Computation.bind, one.slot, declaration, known, alias(known[one.slot]))
            made = bind(results=results, tail=self.result_tails.get(one.slot))
            again = made.compute.again
            if again is not None:
                own = self.buffers.last_runs[one.slot]
                leader = first.setdefault(made.compute.fills or (one.slot,), own)
                if leader is not own:  # one call that fills several slots asks its `again` once
                    again = leader.again_for_others
                made = attrs.evolve(made, again=bind(again), last=own, move=self._move(one.slot))
            yield one, made

    @functools.cached_property
    def result_tails(self) -> Mapping[str, ResultTail]:
        """The tails that are written behind the results of functions."""
        found = dict[str, ResultTail]()
        for one in () if self.exact else self.plan.computed:
            if one.pad is not None:
                slot = self.declaration.slots[one.slot]
                dtype = self.buffers[one.slot].tensor.dtype
                axes = tuple(axis for axis in slot.axes if not axis.fixed)
                word = word_of(one.pad, dtype)
                found[one.slot] = ResultTail(axes, Rows(slot, axes, self.sizes), word)
        return found

    @property
    def _computed(self) -> list[ComputeStep]:
        """The names of computed slots that fills write, in order."""
        return [one for one in self.plan.computed if one.slot not in self.left]

    def _ask(self, step: Step) -> None:
        """Call each function that needs only sizes once, and raise DeclarationError if it asks for an unknown size.

        Any other error waits for the fill that needs the function's value.
        """
        for planned in self.plan.computed:
            compute = self.declaration.functions[planned.slot]
            if STEP in compute.needs and set(compute.needs) <= _SIZES and not compute.writes_out:
                given = self.declaration.given(step)
                try:
                    compute.function(**{need: given[need] for need in compute.needs})
                except DeclarationError as error:
                    blame(planned.slot, compute.function, error)
                except Exception:  # noqa: BLE001, S112 - see above
                    continue

    @functools.cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that the kernel writes, in the order of the plan."""
        pads = {tail.slot: tail.value for tail in self.plan.tails}
        return tuple([self._lane(name, self.declaration.slots[name], pads.get(name)) for name in self.plan.fused])

    def _lane(self, name: str, slot: Slot, pad: Number | None) -> Lane:
        """Make the lane of one slot, with its rule for the next step."""
        lane = Lane.of(name, self.buffers[name].view(self.sizes), slot.varying, pad)
        source, add = self.transitions[DEVICE].sources.get(name, (None, 0))
        lane = attrs.evolve(lane, source=None if source is None else source.view(self.sizes), add=add)
        if name in self.declaration.functions:  # the host computes every row, padded ones included
            return attrs.evolve(lane, inner=lane.row)
        if not slot.varying:
            return lane
        counted = self.declaration.counted
        shape = lane.target.shape
        first = slot.varying[0]
        last = slot.varying[-1]
        lane = attrs.evolve(lane, count=counted.index(slot.shape[last]))
        if first != last:
            return attrs.evolve(lane, within=math.prod(shape[first + 1 : last]), owns=counted.index(slot.shape[first]))
        requests = self.sizes.get(BATCH)
        return attrs.evolve(lane, each=lane.row // requests if requests and rows_of_requests(slot, self.sizes) else 0)

    @functools.cached_property
    def transitions(self) -> Mapping[Placement, Transition]:
        """The rules of slots on the device, and of slots on the host."""
        found: dict[Placement, Transition] = {}
        for side in (DEVICE, HOST):
            lanes = self.fused if self.lowering.is_in_graph and side == DEVICE else None
            found[side] = self._transition(side, lanes)
        return found

    @functools.cached_property
    def transition_in_graph(self) -> Transition:
        """The rules of slots on the device, for a graph of several steps whose live counts are a tensor."""
        return self._transition(DEVICE, ())

    def _transition(self, side: Placement, lanes: Collection[str] | None) -> Transition:
        slots = self.declaration.slots
        written = {one.slot: one.value for one in self.plan.tails if one.always and slots[one.slot].placement == side}
        rules = [one for one in self.plan.advances if slots[one.slot].placement == side]
        return Transition(rules, written, lanes, self.declaration, self.buffers, self.views, self.sizes)

    def tails(self, live: Live, *, always: bool) -> Iterator[tuple[torch.Tensor, Number]]:
        """Yield each tail's padded rows and value: of tails that are reset in each step, or of all others."""
        for tail in self.plan.tails:
            if tail.always == always and not tail.fused:
                for part in self.rows[tail.slot].tails(self.buffers[tail.slot].tensor, live, self.padded):
                    yield part, tail.value

    def table_of_lanes(self, block: int) -> npt.NDArray[np.int64]:
        """Make the kernel's table of the lanes, in blocks of `block` words."""
        return table_of(self.lanes, block, self.owner, len(self.declaration.counted))

    def _bind(self, sources: Sources, live: Live) -> BoundPlan:
        """Admit sources, and bind a plan for their kinds. Raise BatchError if one does not fit. Writes nothing."""
        self.check_room(live)
        self.at(live)  # so that errors of functions come before any write
        ways = self._ways(sources, live)
        plan = self._planned(self._pattern(ways))
        return BoundPlan(plan, self, self.buffers, ways, self._writers(plan, ways))

    def _admitted(self, sources: Sources, live: Live) -> Admitted:
        """Check the sources of the slots that are present, and make tensors of them. Raises as `check_sources` does."""
        asked = list[Any]()
        for name, source in zip(self.table.names, sources, strict=True):
            if not (name in self.absent or name in self.left or (self.partial and source is None)):
                asked.append((self.buffers[name], source, self.rows[name].extent(live)))
        return check_sources(asked)

    def _ways(self, sources: Sources, live: Live) -> list[Way]:
        """Choose how each source reaches its slot. Raise MissingSourceError or BatchError if one does not fit."""
        places = {name: place for place, name in enumerate(self.table.names)}
        ways = list[Way]()
        for to, source, tensor in self._admitted(sources, live):
            name = to.name
            is_lane = name in self.fused
            is_packed = name in self._room and (is_lane or not self.lowering.has_kernel)
            chooser = Chooser(
                to,
                places[name],
                self.rows[name],
                self.buffers,
                functools.partial(self._rows_kept, to),
                is_direct=name in self._direct,
                is_lane=is_lane,
                is_packed=is_packed,
                move=self._move(name),
            )
            ways.append(chooser.choose(source, tensor))
        return ways

    def _move(self, name: str) -> Move | None:
        """Return what copies host data to a slot's device, if that has uploads."""
        return self.feed.move if self._packs and self.buffers[name].slot.placement == DEVICE else None

    def _rows_kept(self, to: Buffer) -> int:
        """Return how many rows of a slot are those of the last batch, which nothing else can have written since."""
        slot = to.slot
        live = self.buffers.clean.last_of(self)
        may_differ = to.foreign or to.pooled or slot.rewritten or slot.restored or to.name in self.declaration.rules
        return 0 if may_differ or live is None else self.rows[to.name].shape[0](live)

    @functools.cached_property
    def _direct(self) -> frozenset[str]:
        """The slots that are written by address in host memory."""
        every = self.lowering.copies == "direct"
        return frozenset([name for name, slot in self.declaration.slots.items() if every or slot.placement == HOST])

    def _pattern(self, ways: Sequence[Way]) -> Pattern:
        """Return the pattern of the plan that sources need. With a kernel, one plan suits all sources."""
        if self.lowering.has_kernel:
            return Pattern(self.absent)
        in_place = [way.slot for way in ways if way.in_place]
        hosted = [way.slot for way in ways if way.is_bytes and way.slot in self._room]
        others = frozenset((way.slot, way.dtype) for way in ways if way.dtype != way.target.dtype)
        return Pattern(self.absent, in_place, hosted, others)

    def _planned(self, pattern: Pattern) -> FillPlan:
        known = self._plans.get(pattern)
        if known is None:
            known = plan_fill(
                self.declaration,
                self.sizes,
                self._capabilities,
                pattern,
                lowering=self.lowering.name,
                foreign=self.buffers.foreign,
            )
            keep_newest(self._plans, PATTERNS)[pattern] = known
        return known

    def _writers(self, plan: FillPlan, ways: Sequence[Way]) -> Writers:
        """Make the writers of a plan."""
        order = order_of(ways)
        packing = None
        if self.lowering.has_kernel or plan.packed:
            packing = self._packing(plan, ways, order)
        early = list[Copies]()
        late = list[Copies]()
        for group in _merged(plan):
            names = set(group.slots).difference(self.left)
            ways_of_group = [way for way in ways if way.slot in names and not way.in_place]
            is_late = packing is not None and group.placement == DEVICE
            made = self._copies(group.how, ways_of_group, [n for n in plan.packed if n in names], packing, order)
            (late if is_late else early).extend(made)
        are_reset = not (self.exact or self.partial)
        resets = [tail for tail in plan.tails if are_reset and not tail.fused and tail.slot not in self.left]
        copied = {way.slot for way in ways if not way.in_place}
        in_place = any(way.in_place and way.slot not in self.fused for way in ways)
        return Writers(
            always=self._tails([tail for tail in resets if tail.always], copied),
            tails=self._tails([tail for tail in resets if not tail.always], copied),
            early=early,
            late=late,
            packing=packing,
            computes=not self.partial and any(one.on == HOST for one in self._computed),
            # a plan with a kernel suits sources in place, too, and does not mark their tails `always`
            distrusts=bool(in_place) and self.lowering.has_kernel,
        )

    def _packing(self, plan: FillPlan, ways: Sequence[Way], order: Mapping[int, int]) -> Packing:
        """Lay out the packet."""
        carried = list[Carried]()
        for way in ways:
            if way.is_bytes and (way.slot in self.fused or way.slot in plan.packed):
                rows = self.rows[way.slot]
                is_ragged = way.pace == RAGGED
                carried.append(Carried(way.slot, way.target, way.dtype, rows, None, way.place, is_ragged))
        carried.sort(key=operator.attrgetter("is_ragged"))  # what comes behind them moves with their lengths
        for one in () if self.partial else self._computed:
            if one.packed:
                target = self.buffers[one.slot].tensor
                padded = None if self.exact else self.padded
                carried.append(Carried(one.slot, target, target.dtype, self.rows[one.slot], padded))
        fixed = {axis: size for axis, size in self.sizes.items() if axis.fixed}
        counted = [reach_of(size, self.declaration.varying, fixed) for size in self.declaration.counted]
        lanes = self.lanes if self.lowering.has_kernel else ()
        left = self.left
        if self.partial:
            left = self.fused.difference([way.slot for way in ways if not way.in_place])
        made = Packing(self.feed, lanes, self.owner, counted, ways, order, carried, left=left)
        if made.nbytes(self.padded) > self.feed.room:
            raise ValueError(f"the packet has {self.feed.room} bytes, too few for this bucket: it was made for others")
        return made

    def _copies(
        self, how: How, ways: Sequence[Way], packed: Sequence[str], packing: Packing | None, order: Mapping[int, int]
    ) -> Iterator[Copies]:
        """Yield the writers of one group of copies. `packed` names slots whose values come from the packet."""
        others = [way for way in ways if way.slot not in packed]
        direct = [way for way in others if way.is_piece and (way.is_bytes or how == "direct")]
        others = [way for way in others if way not in direct]
        if direct:
            yield HostCopies(direct, order, self.rows)
        if how == "foreach":
            if others or packed:
                yield ForeachCopies(others, packed, packing, self.rows)
            return
        if how == "direct":
            if others:
                yield PlainCopies(others, self.rows)
            return
        for way in others:
            yield ForeachCopies((way,), (), packing, self.rows)
        for name in packed:
            yield ForeachCopies((), (name,), packing, self.rows)

    def _tails(self, tails: Sequence[TailReset], copied: Collection[str]) -> list[Tails]:
        """Make the writers that reset some tails. `copied` names slots whose live rows are copied afterwards."""
        direct = list[TailOf]()
        others = list[TailOf]()
        for one in tails:
            tail = TailOf(self.buffers[one.slot].tensor, self.rows[one.slot], one.value, one.slot in copied)
            (direct if one.slot in self._direct else others).append(tail)
        made: list[Tails] = [HostTails(direct)] if direct else []
        return [*made, SlicedTails(others, self.padded)] if others else made


def _merged(plan: FillPlan) -> list[CopyGroup]:
    """Return the groups that are copied together: all direct ones and, if the plan mixes them, all foreach ones."""
    groups = list[CopyGroup]()
    for how in ("direct", "foreach", "single"):
        found = [group for group in plan.copies if group.how == how]
        if found and (how == "direct" or (how == "foreach" and plan.mixed)):
            found = [attrs.evolve(found[0], slots=tuple(name for group in found for name in group.slots))]
        groups += found
    return groups


def hand_over(bucket: Bucket, batch: Any, live: Live, side: Side = NO_SIDE) -> Views:
    """Return the slots' values as a fill would make them, but with the batch's own tensors instead of copies.

    Host data becomes a tensor on its slot's device. A source of another dtype, or of a slot that the step writes,
    becomes a copy. Raises the errors of a fill.
    """
    given = bucket.tensors(batch, live, side)
    views = {**bucket.at(live).shown()}
    for name, source in given.items():
        slot = bucket.declaration.slots[name]
        views[name] = source.to(bucket.buffers[name].tensor.dtype, copy=slot.rewritten or slot.restored)
    step = bucket.step(live)
    with torch.no_grad():
        for _, computation in bucket.computations(views):
            computation.run(batch, step)
    return views
