"""One bucket's fills: a plan for each pattern of absent slots, slots in place and source dtypes of its batches."""

from typing import Any

import attrs
import torch

from .admission import OtherSources
from .axes import Sizes
from .buffers import Buffers
from .capabilities import Capabilities, Lowering
from .declaration import Declaration
from .feed import Feed
from .fill import Fill
from .fused import FusedFill
from .gather import Sources
from .lanes import Lane
from .oracle import fill_slot_by_slot
from .packer import Packer, lanes_of
from .planner import NO_CASTS, NONE, plan_fill
from .ready import Preparer, Ready
from .sources import NO_SIDE, Side

Absent = frozenset[str]


def absent_from(declaration: Declaration, batch: Any, side: Side = NO_SIDE) -> frozenset[str]:
    """Optional slots that a batch comes without."""
    return frozenset([name for name, source in declaration.optional if source.read(batch, side) is None])


@attrs.frozen
class _Pattern:
    """What batches differ in, so that each needs a plan of its own."""

    absent: Absent
    in_place: frozenset[str] = NONE
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()


class Bucket:
    """Fills one bucket of padded sizes; an exact one shows the step live rows only, and takes any size up to its own.

    sizes: the padded size of every axis, at most the buffers' capacity.
    """

    def __init__(
        self,
        declaration: Declaration,
        sizes: Sizes,
        capabilities: Capabilities,
        buffers: Buffers,
        *,
        exact: bool = False,
    ) -> None:
        self.declaration = declaration
        self.sizes = dict(sizes)
        self._capabilities = capabilities
        self.buffers = buffers
        self._exact = exact
        self._fills: dict[_Pattern, Fill] = {}
        self._last: dict[Absent, Fill] = {}

    def fill(self, batch: Any, live: tuple[int, ...], absent: Absent = NONE, side: Side = NO_SIDE) -> Ready:
        """Fill from a batch of `live` rows on each varying axis; all but what the device computes.

        Raises MissingSourceError and BatchError before anything is written.
        """
        fill, ready, sources = self.check(batch, live, absent, side)
        fill.write(ready, sources, batch)
        return ready

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
        """What a fill would copy, and where, without writing anything; raises as a fill does."""
        fill = self._last.get(absent) or self._fill_for(_Pattern(absent))
        try:
            return (fill, *fill.check(batch, side, live))
        except OtherSources as other:
            admitted = other.admitted
        dtypes = tuple(sorted(admitted.source_dtypes.items(), key=str))
        sources = dict(zip(fill.copied, admitted.sources, strict=True))  # another plan has another order
        fill = self._last[absent] = self._fill_for(_Pattern(absent, admitted.in_place, dtypes))
        return fill, fill.ready(live), tuple([sources[name] for name in fill.copied])

    def fill_for(self, absent: Absent = NONE) -> Fill:
        """The fill for batches that come without some optional slots, planned on its first use."""
        return self._fill_for(_Pattern(absent))

    def lanes(self, lowering: Lowering) -> list[Lane]:
        """What the kernel would write of this bucket where every slot is there."""
        plan = plan_fill(self.declaration, self.sizes, self._capabilities, lowering=lowering)
        return lanes_of(plan, self.declaration, self.buffers, self.sizes)

    def fused(self, lowering: Lowering, feed: Feed, absent: Absent = NONE) -> FusedFill:
        """The fused fill for batches that come without some optional slots."""
        plan = plan_fill(self.declaration, self.sizes, self._capabilities, lowering=lowering, absent=absent)
        fill = Fill(Preparer(plan, self.declaration, self.buffers, self.sizes, exact=False))
        packer = Packer(plan, self.declaration, self.buffers, fill.wanted, feed.address, feed.room, feed.number())
        return FusedFill(fill, packer, feed)

    def _fill_for(self, pattern: _Pattern) -> Fill:
        fill = self._fills.get(pattern)
        if fill is None:
            plan = plan_fill(
                self.declaration,
                self.sizes,
                self._capabilities,
                absent=pattern.absent,
                in_place=pattern.in_place,
                source_dtypes=dict(pattern.dtypes) or NO_CASTS,
            )
            fill = self._fills[pattern] = Fill(
                Preparer(plan, self.declaration, self.buffers, self.sizes, exact=self._exact)
            )
        self._last.setdefault(pattern.absent, fill)
        return fill
