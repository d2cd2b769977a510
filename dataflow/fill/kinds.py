"""Kinds: the properties of sources that a bound plan depends on, and how live sizes are read from sources."""

import collections
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import numpy as np
import torch

from ..axes import Dim, Live, Sizes
from ..declaration import Declaration
from ..guard import Guard, dense_places, own_guard
from ..hostdata import is_ragged, plain_rows
from ..sizing import Gauge, Sizer
from ..slots import Slot
from ..sources import Gather, Side, Sources, chosen
from .reach import Reach, Rows

KINDS: Final = 8
"""The most kinds of batches that a table keeps. The oldest is dropped first."""
STRIDES: Final = 2
"""The most strides for which a slot's sources are read as they lie. Of sources with more, copies are made."""
MOST_DIMS: Final = 64
"""The most dims that a torch tensor can have."""
_LISTS: Final = (list, tuple)  # `isinstance` takes half as long with a tuple as with a union
_SHAPE: Final = operator.attrgetter("shape")
_IS_NESTED: Final = operator.attrgetter("is_nested")
_UNLIKE: Final = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""Errors of reading a source whose kind differs from the one before it."""


@attrs.frozen
class SizesAlike:
    """Dims of sources that must have the same size.

    Attributes:
        reach: Computes that size from live sizes.
        dims: The index of each source among those that are present, and its dim.
    """

    reach: Reach
    dims: list[tuple[int, int]]


def shape_of_list(value: Any) -> tuple[int, ...]:
    """Read the shape of nested lists, or of lists of arrays, from the first row of each.

    Code that converts them checks the other rows.
    """
    shape: tuple[int, ...] = ()
    while isinstance(value, _LISTS) and len(shape) <= MOST_DIMS:  # a list that contains itself has no end
        shape = (*shape, len(value))
        value = value[0] if value else None
    return (*shape, *value.shape) if isinstance(value, np.ndarray) else shape


def _reader(source: Any, rows: Rows) -> Callable[[Any], Sequence[int]]:
    """Return what reads the shape of a source. That of ragged rows is the shape in which they are laid out."""
    if rows.ragged and is_ragged(source):
        columns = rows.shape[1](())
        return lambda value: (len(value), columns)
    return shape_of_list if isinstance(source, list | tuple) else _SHAPE


def _sizes_alike(present: Sequence[tuple[Any, Rows]]) -> list[SizesAlike]:
    """Return the sizes of dims that no guard checks. Each source comes with the rows of its slot."""
    often = collections.Counter(id(source) for source, _ in present)
    found = dict[Dim, SizesAlike]()
    for number, (source, rows) in enumerate(present):
        is_guarded = isinstance(source, torch.Tensor) and often[id(source)] == 1
        dims = rows.dims if is_guarded else range(len(rows.shape))  # the guard checks all other dims
        for dim in dims:
            alike = found.setdefault(rows.sizes[dim], SizesAlike(rows.shape[dim], []))
            alike.dims.append((number, dim))
    return [*found.values()]


def is_strided(source: Any) -> bool:
    """Return whether a source is a tensor with gaps, or whose dims lie in another order."""
    is_plain = isinstance(source, torch.Tensor) and source.layout is torch.strided and not source.is_nested
    return is_plain and not source.is_contiguous()


class SourceKinds:
    """The kind of each source of a batch: its type, dtype, device and layout. Sizes along axes are free.

    Attributes:
        absent: Optional slots that have no source.
        plans: The plans bound for batches of these kinds, by bucket.
    """

    __slots__ = (
        "_dtypes",
        "_gauges",
        "_guard",
        "_last",
        "_layouts",
        "_lines",
        "_missing",
        "_of_tensors",
        "_present",
        "_ranks",
        "_readers",
        "_sizes",
        "_types",
        "absent",
        "plans",
    )

    def __init__(self, like: Sources, names: Sequence[str], rows: Sequence[Rows], sizer: Sizer | None) -> None:
        """Record the kinds of a batch's sources, which were admitted.

        Args:
            like: The sources, None for an absent one.
            names: The slots of the sources.
            rows: The rows of these slots.
            sizer: Determines how live sizes are read. None if callers give them.
        """
        self.absent = frozenset([name for name, source in zip(names, like, strict=True) if source is None])
        self.plans = dict[Any, list[Any]]()
        present = [place for place, source in enumerate(like) if source is not None]
        tensors = [place for place in present if isinstance(like[place], torch.Tensor)]
        others = [place for place in present if place not in tensors]
        self._missing = [place for place, source in enumerate(like) if source is None]
        self._present = chosen(present)
        self._of_tensors = chosen(tensors)
        first = [like[place] for place in tensors]
        free = [rows[place].dims for place in tensors]
        self._guard = own_guard(first, free)
        # Whether a source must be contiguous, or must not be. A single row always is, whatever its strides: a plan that
        # is bound by it reads rows as dense, so it may not be that of tables with gaps.
        self._layouts = [(tensors[place], True) for place in dense_places(first, free)]
        self._layouts += [(place, False) for place in tensors if is_strided(like[place])]
        self._types = [(place, type(like[place])) for place in others]
        self._dtypes = [(place, like[place].dtype) for place in others if isinstance(like[place], np.ndarray)]
        self._ranks = [(number, len(rows[place].shape)) for number, place in enumerate(present) if place in others]
        self._readers = [_reader(like[place], rows[place]) for place in present] if others else None
        self._sizes = _sizes_alike([(like[place], rows[place]) for place in present])
        self._lines = None if sizer is None else sizer.lines
        # by independent axis, the source that determines its rows, and how; None if none does, so that there are none
        self._gauges = list[tuple[int, Gauge] | None]()
        numbers = {names[place]: number for number, place in enumerate(present)}
        for gauges in () if sizer is None else sizer.gauges:
            self._gauges.append(next(((numbers[one.slot], one) for one in gauges if one.slot in numbers), None))
        self._last: tuple[Sequence[Sequence[int]] | None, Live, Guard | None] = None, (), None

    def read(self, sources: Sources) -> Live | None:
        """Read the live size of each axis. Return None for sources of other kinds, or whose sizes do not agree."""
        last_shapes, last_live, again = self._last
        if again is not None:  # the sources may have the same kinds and sizes as the last ones
            present = self._present(sources)
            try:
                if True not in map(_IS_NESTED, present) and again(*present):  # nested tensors crash
                    return last_live
            except AttributeError:  # a source that is not a tensor
                return None
        shapes = self._shapes(sources)
        if shapes is None:
            return None
        if shapes == last_shapes:
            again = own_guard(self._present(sources)) if self._readers is None and not self._missing else None
            self._last = shapes, last_live, again
            return last_live
        live = self._read(shapes)
        if live is None or not self._agree(shapes, live):
            return None
        self._last = shapes, live, None  # one assignment, so that an interrupt leaves all of them new or all old
        return live

    def fit(self, sources: Sources, live: Live) -> bool:
        """Return whether sources are of these kinds, and have the given live sizes."""
        shapes = self._shapes(sources)
        return shapes is not None and self._agree(shapes, live)

    def match(self, sources: Sources) -> bool:
        """Return whether sources are of these kinds, whatever their sizes."""
        return self._shapes(sources) is not None

    def _shapes(self, sources: Sources) -> Sequence[Sequence[int]] | None:  # noqa: C901, PLR0911 - each of them a test
        """Read the shape of each source that is present. Return None for sources of other kinds."""
        try:
            present = self._present(sources)
            if self._readers is None:
                shapes = tuple(map(_SHAPE, present))
                tensors = present
            else:
                shapes = tuple([read(source) for read, source in zip(self._readers, present, strict=True)])
                tensors = self._of_tensors(sources)
            if not self._guard(*tensors):  # no nested tensor comes here: reading its shape has raised
                return None
            for place, is_dense in self._layouts:
                if sources[place].is_contiguous() is not is_dense:
                    return None
            for place in self._missing:
                if sources[place] is not None:
                    return None
            for place, kind in self._types:
                if type(sources[place]) is not kind:
                    return None
            for place, dtype in self._dtypes:
                if sources[place].dtype != dtype:
                    return None
        except _UNLIKE:
            return None
        return shapes

    def _read(self, shapes: Sequence[Sequence[int]]) -> Live | None:
        """Read live sizes from shapes. Return None if callers give them, or if they do not follow from the shapes."""
        rows = list[int]()
        if self._lines is None:
            return None
        for found in self._gauges:
            if found is None:
                rows.append(0)
                continue
            source, gauge = found
            shape = shapes[source]
            if len(shape) <= gauge.dim:  # the lists are nested less deep than those of this kind
                return None
            count, rest = divmod(shape[gauge.dim] - gauge.base, gauge.slope)
            if rest or count < 0:
                return None
            rows.append(count)
        return tuple([base + slope * rows[index] for index, base, slope in self._lines])

    def _agree(self, shapes: Sequence[Sequence[int]], live: Live) -> bool:
        """Return whether each dim has the size that follows from live sizes."""
        for source, rank in self._ranks:
            if len(shapes[source]) != rank:
                return False
        for alike in self._sizes:
            size = alike.reach(live)
            for source, dim in alike.dims:
                if shapes[source][dim] != size:
                    return False
        return True


class KindTable:
    """Finds the kinds of a batch's sources among those seen before.

    Attributes:
        names: The slots that batches have sources for.
        gather: Reads all of these from a batch, in their order, as `plain` has them.
        rows: The rows of each slot.
        known: The kinds seen before, the latest first.
    """

    def __init__(self, declaration: Declaration, sizes: Sizes, sizer: Sizer | None = None) -> None:
        """Make an empty table.

        Args:
            declaration: The slots.
            sizes: The sizes of the fixed axes, and perhaps of others.
            sizer: Determines how live sizes are read. None if callers give them.
        """
        fixed = {axis: size for axis, size in sizes.items() if axis.fixed}
        self.names = tuple(declaration.sources)
        self._gather = Gather([*declaration.sources.values()])
        self.rows = {name: Rows(slot, declaration.varying, fixed) for name, slot in declaration.slots.items()}
        self._rows = [self.rows[name] for name in self.names]
        self._ragged = list[tuple[int, Slot, int]]()
        for place, rows in enumerate(self._rows):
            if rows.ragged:
                self._ragged.append((place, declaration.slots[self.names[place]], rows.shape[1](())))
        self._strides = dict[int, set[tuple[int, ...]]]()  # those of strided sources, by place
        self._uneven = set[int]()  # the places of sources whose strides differ from batch to batch
        self.gather: Callable[[Any, Side], Sources] = self._gather_plain if self._ragged else self._gather
        self._sizer = sizer
        self.known = list[SourceKinds]()

    def find(self, sources: Sources) -> SourceKinds | None:
        """Find the kinds of sources. The kinds found last are tried first."""
        for kinds in self.known:
            if kinds.match(sources):
                if kinds is not self.known[0]:  # one assignment, which no interrupt can split
                    self.known[:] = [kinds, *(other for other in self.known if other is not kinds)]
                return kinds
        return None

    def add(self, sources: Sources) -> SourceKinds:
        """Add the kinds of a batch that was admitted."""
        for place, source in enumerate(sources):
            if is_strided(source):
                self._strides.setdefault(place, set()).add(source.stride())
                if len(self._strides[place]) > STRIDES:
                    self._uneven.add(place)
                    self.gather = self._gather_plain
        kinds = SourceKinds(sources, self.names, self._rows, self._sizer)
        self.known[:] = [kinds, *self.known[: KINDS - 1]]
        return kinds

    def _gather_plain(self, batch: Any, side: Side) -> Sources:
        return self.plain(self._gather(batch, side))

    def plain(self, sources: Sources) -> Sources:
        """Return sources as plans take them.

        Jagged nested tensors in host memory become `Ragged`, and ragged rows on a device tables there. A plan belongs
        to strides, so that a source whose strides differ from batch to batch is made contiguous.
        """
        made = [*sources]
        for place, slot, columns in self._ragged:
            made[place] = plain_rows(slot, made[place], columns)
        for place in self._uneven:
            if is_strided(made[place]):
                made[place] = made[place].contiguous()
        return tuple(made)

    def forget(self) -> None:
        """Forget all kinds and their bound plans."""
        self.known[:] = []
