"""One bucket's fills: a plan for each pattern of absent optional slots and source dtypes that batches come with."""

from collections.abc import Mapping
from typing import Any

import torch

from .axes import Sizes
from .buffers import Buffers
from .capabilities import Capabilities
from .declaration import Declaration
from .fill import Fill
from .gather import Sources
from .planner import NO_CASTS, plan_fill
from .ready import Preparer, Ready
from .refusal import OtherDtypes
from .sources import NO_SIDE, Side

Pattern = tuple[frozenset[str], tuple[tuple[str, torch.dtype], ...]]


def absent_from(declaration: Declaration, batch: Any, side: Side = NO_SIDE) -> frozenset[str]:
    """Optional slots that a batch comes without."""
    optional = [(name, slot) for name, slot in declaration.slots.items() if slot.optional]
    return frozenset(n for n, s in optional if (source := s.reads(n)) is not None and source.read(batch, side) is None)


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
        self._fills: dict[Pattern, Fill] = {}
        self._last: dict[frozenset[str], Fill] = {}

    def fill(
        self, batch: Any, live: tuple[int, ...], absent: frozenset[str] = frozenset(), side: Side = NO_SIDE
    ) -> Ready:
        """Fill from a batch of `live` rows on each varying axis; all but what the device computes.

        Raises MissingSourceError and BatchError before anything is written.
        """
        fill, ready, sources = self.check(batch, live, absent, side)
        fill.write(ready, sources, batch)
        return ready

    def check(
        self, batch: Any, live: tuple[int, ...], absent: frozenset[str] = frozenset(), side: Side = NO_SIDE
    ) -> tuple[Fill, Ready, Sources]:
        """What a fill would copy, and where, without writing anything; raises as a fill does."""
        fill = self._last.get(absent) or self.fill_for(absent)
        try:
            return (fill, *fill.check(batch, side, live))
        except OtherDtypes as other:
            fill = self._last[absent] = self.fill_for(absent, other.source_dtypes)
        return (fill, *fill.check(batch, side, live))

    def fill_for(self, absent: frozenset[str] = frozenset(), dtypes: Mapping[str, torch.dtype] = NO_CASTS) -> Fill:
        """The fill for one pattern, planned on its first use."""
        pattern = (absent, tuple(sorted(dtypes.items(), key=str)))
        fill = self._fills.get(pattern)
        if fill is None:
            plan = plan_fill(self.declaration, self.sizes, self._capabilities, absent=absent, source_dtypes=dtypes)
            preparer = Preparer(plan, self.declaration, self.buffers, self.sizes, exact=self._exact)
            fill = self._fills[pattern] = Fill(preparer)
        self._last.setdefault(absent, fill)
        return fill
