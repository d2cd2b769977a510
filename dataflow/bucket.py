"""One bucket's fills: a plan for each pattern of absent slots, host data, slots in place and dtypes of its batches."""

import contextlib
from typing import Any, Final

import attrs
import torch

from .admission import Admitted, OtherSources
from .axes import Sizes
from .buffers import Buffers
from .caches import keep_newest
from .capabilities import Capabilities, Lowering
from .declaration import Declaration
from .feed import Feed, Feeder
from .fill import KEPT as KEPT_SIZES
from .fill import Fill
from .fused import FusedFill
from .gather import Sources
from .lanes import Lane
from .oracle import fill_slot_by_slot
from .packer import Packer, lanes_of
from .plan import FillPlan
from .planner import NO_CASTS, NONE, plan_fill
from .ready import Preparer, Ready
from .sources import NO_SIDE, Side

Absent = frozenset[str]
KEPT: Final = 64
"""Patterns that one bucket keeps fills for; the oldest goes first."""
SIZES: Final = 4 * KEPT_SIZES
"""Live sizes that all fills of one bucket keep ready together: each takes some ten to thirty KiB."""


def absent_from(declaration: Declaration, batch: Any, side: Side = NO_SIDE) -> frozenset[str]:
    """Optional slots that a batch comes without."""
    return frozenset([name for name, source in declaration.optional if source.read(batch, side) is None])


@attrs.frozen
class _Pattern:
    """What batches differ in, so that each needs a plan of its own."""

    absent: Absent
    in_place: frozenset[str] = NONE
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    hosted: frozenset[str] = NONE

    @classmethod
    def of(cls, absent: Absent, admitted: Admitted, hosted: frozenset[str]) -> "_Pattern":
        """The pattern of a batch."""
        return cls(absent, admitted.in_place, tuple(sorted(admitted.source_dtypes.items(), key=str)), hosted)


class Bucket:
    """Fills one bucket of padded sizes; an exact one shows the step live rows only, and takes any size up to its own.

    sizes: the padded size of every axis, at most the buffers' capacity. feeder: what gives the packet for host data,
    where the device packs uploads.
    """

    def __init__(
        self,
        declaration: Declaration,
        sizes: Sizes,
        capabilities: Capabilities,
        buffers: Buffers,
        *,
        exact: bool = False,
        feeder: Feeder | None = None,
    ) -> None:
        self.declaration = declaration
        self.sizes = dict(sizes)
        self._capabilities = capabilities
        self.buffers = buffers
        self._exact = exact
        self._feeder = feeder
        self._fills: dict[_Pattern, Fill] = {}
        self._last: dict[Absent, Fill] = {}
        self._last_moved: dict[Absent, Fill] = {}

    def fill(self, batch: Any, live: tuple[int, ...], absent: Absent = NONE, side: Side = NO_SIDE) -> Ready:
        """Fill from a batch of `live` rows on each varying axis; all but what the device computes.

        Raises MissingSourceError and BatchError before anything is written.
        """
        fill = self._last.get(absent) or self._first(self._last, absent)
        try:
            ready, sources = fill.check(batch, side, live)
        except OtherSources as other:
            admitted = other.admitted
            fill, ready, sources = self._planned(fill, _Pattern.of(absent, admitted, admitted.hosted), admitted, live)
            keep_newest(self._last, KEPT)[absent] = fill
        fill.write(ready, sources, batch)
        return ready

    def admit(self, batch: Any, live: tuple[int, ...], absent: Absent = NONE, side: Side = NO_SIDE) -> None:
        """Raise as a fill of the batch would; nothing is written, and no host data is moved."""
        fill = self._last.get(absent) or self._first(self._last, absent)
        with contextlib.suppress(OtherSources):  # others than the last ones, and good all the same
            fill.check(batch, side, live)

    def fill_slot_by_slot(
        self, batch: Any, live: tuple[int, ...], absent: Absent = NONE, side: Side = NO_SIDE
    ) -> Ready:
        """The same by the oracle, what the device computes included."""
        fill, ready, sources = self.check(batch, live, absent, side)
        given = dict(zip(fill.copied, sources, strict=True))
        self.buffers.distrust()
        fill_slot_by_slot(self.declaration, self.buffers, self._capabilities, ready.step, batch, side, given)
        return ready

    def check(
        self, batch: Any, live: tuple[int, ...], absent: Absent = NONE, side: Side = NO_SIDE
    ) -> tuple[Fill, Ready, Sources]:
        """What a fill would copy, and where, without writing anything; raises as a fill does.

        Every source is a tensor where its slot is: host data is in memory of its own there.
        """
        fill = self._last_moved.get(absent) or self._first(self._last_moved, absent)
        try:
            return (fill, *fill.check(batch, side, live))
        except OtherSources as other:
            admitted = self._moved(fill, other.admitted)
        found = self._planned(fill, _Pattern.of(absent, admitted, NONE), admitted, live)
        keep_newest(self._last_moved, KEPT)[absent] = found[0]
        return found

    def feed(self) -> Feed:
        """The packet for host data. ValueError where the bucket was made without."""
        if self._feeder is None:
            message = "this bucket has no feeder, which a device that packs uploads needs"
            raise ValueError(message)
        return self._feeder()

    def _first(self, last: dict[Absent, Fill], absent: Absent) -> Fill:
        """What is tried first: tensors on the device, of their slots' dtypes."""
        fill = keep_newest(last, KEPT)[absent] = self._fill_for(_Pattern(absent))
        return fill

    def _moved(self, fill: Fill, admitted: Admitted) -> Admitted:
        """The same with host data moved to the device, each piece by itself."""
        if not admitted.hosted:
            return admitted
        move = self.feed().upload.move
        named = zip(fill.copied, admitted.sources, strict=True)
        sources = tuple([move(source) if name in admitted.hosted else source for name, source in named])
        return attrs.evolve(admitted, sources=sources)

    def _planned(
        self, fill: Fill, pattern: _Pattern, admitted: Admitted, live: tuple[int, ...]
    ) -> tuple[Fill, Ready, Sources]:
        """The fill of a pattern for sources that another fill has admitted."""
        sources = dict(zip(fill.copied, admitted.sources, strict=True))  # another plan has another order
        fill = self._fill_for(pattern)
        ready = fill.ready(live)
        return fill, ready, fill.carry(ready, tuple([sources[name] for name in fill.copied]))

    def fill_for(self, absent: Absent = NONE) -> Fill:
        """The fill for batches that come without some optional slots, planned on its first use."""
        return self._fill_for(_Pattern(absent))

    def lanes(self, lowering: Lowering) -> list[Lane]:
        """What the kernel would write of this bucket where every slot is there."""
        plan = self._plan(lowering=lowering)
        return lanes_of(plan, self.declaration, self.buffers, self.sizes)

    def fused(self, lowering: Lowering, feed: Feed, absent: Absent = NONE) -> FusedFill:
        """The fused fill for batches that come without some optional slots."""
        plan = self._plan(lowering=lowering, absent=absent)
        fill = Fill(Preparer(plan, self.declaration, self.buffers, self.sizes, exact=False))
        packer = Packer(plan, self.declaration, self.buffers, fill.wanted, feed)
        return FusedFill(fill, packer, feed)

    def _plan(self, **how: Any) -> FillPlan:
        return plan_fill(self.declaration, self.sizes, self._capabilities, foreign=self.buffers.foreign, **how)

    def _fill_for(self, pattern: _Pattern) -> Fill:
        fill = self._fills.get(pattern)
        if fill is None:
            plan = self._plan(
                absent=pattern.absent,
                in_place=pattern.in_place,
                source_dtypes=dict(pattern.dtypes) or NO_CASTS,
                hosted=pattern.hosted,
            )
            preparer = Preparer(
                plan, self.declaration, self.buffers, self.sizes, exact=self._exact, feeder=self._feeder
            )
            fill = keep_newest(self._fills, KEPT)[pattern] = Fill(preparer)
            for one in self._fills.values():
                one.keep(min(KEPT_SIZES, SIZES // len(self._fills)))
        return fill
