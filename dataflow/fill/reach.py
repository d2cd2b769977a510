"""Reaches: how many rows slots have along the dims that vary, as functions of a call's live sizes."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch

from ..axes import Axis, Dim, Extent, Live, Sizes
from ..slots import Slot

Reach: TypeAlias = Callable[[Live], int]
"""Computes a dim's size from live sizes, one for each varying axis in the declaration's order; more may follow."""
Box: TypeAlias = tuple[tuple[int, int], ...]
"""The first row and one past the last, along each dim that varies."""


def reach_of(dim: Dim, varying: Sequence[Axis], fixed: Sizes) -> Reach:
    """Compile a dim to a function of live sizes."""
    places = {axis: place for place, axis in enumerate(varying)}
    lead = dim.reveals()
    if lead is not None and dim == Dim.of(lead):
        place = places[lead]
        return lambda live: live[place]  # torch.compile knows no itemgetter
    base = dim.at({**fixed, **dict.fromkeys(varying, 0)})
    if not dim.varies:
        return lambda _: base
    if lead is not None:
        place = places[lead]
        slope = dim.at({**fixed, **dict.fromkeys(varying, 1)}) - base
        return lambda live: base + slope * live[place]
    terms = list[tuple[int, list[int]]]()
    for axes, factor in dim.terms:
        known = math.prod(fixed[axis] for axis in axes if axis.fixed)
        terms.append((factor * known, [places[axis] for axis in axes if not axis.fixed]))
    return lambda live: sum(factor * math.prod([live[place] for place in axes]) for factor, axes in terms)


def index_of(dims: Sequence[int], box: Box) -> tuple[slice, ...]:
    """Make an index for a box of rows along some dims, with full slices for the dims between them."""
    index = [slice(None)] * (dims[-1] + 1 if dims else 0)
    for dim, (start, stop) in zip(dims, box, strict=True):
        index[dim] = slice(start, stop)
    return tuple(index)


def boxes(live: Extent, padded: Extent) -> Iterator[Box]:
    """Yield the rows within `padded` but outside `live`, as boxes that do not overlap."""
    for dim, (start, stop) in enumerate(zip(live, padded, strict=True)):
        if start < stop:
            before = tuple((0, size) for size in live[:dim])
            behind = tuple((0, size) for size in padded[dim + 1 :])
            yield (*before, (start, stop), *behind)


class Rows:
    """The rows of one slot, as functions of live sizes.

    Attributes:
        dims: The dims that vary.
        reaches: The reach of each of them.
        sizes: The size of every dim, as declared.
        shape: The reach of every dim.
        ragged: Whether a source may have rows of different lengths.
    """

    __slots__ = ("dims", "ragged", "reaches", "shape", "sizes")

    def __init__(self, slot: Slot, varying: Sequence[Axis], fixed: Sizes) -> None:
        self.dims = slot.varying
        self.shape = [reach_of(dim, varying, fixed) for dim in slot.shape]
        self.sizes = slot.shape
        self.ragged = slot.ragged
        self.reaches = [self.shape[dim] for dim in slot.varying]

    def at(self, live: Live) -> Extent:
        """Return the size along each dim that varies."""
        return tuple([reach(live) for reach in self.reaches])

    def extent(self, live: Live) -> Extent:
        """Return the size along every dim."""
        return tuple([reach(live) for reach in self.shape])

    def index(self, live: Live) -> slice | tuple[slice, ...]:
        """Return the index of the live rows in the slot's buffer."""
        if self.dims == (0,):
            return slice(self.reaches[0](live))
        return index_of(self.dims, tuple([(0, reach(live)) for reach in self.reaches])) if self.dims else ()

    def cut(self, tensor: torch.Tensor, live: Live) -> torch.Tensor:
        """Slice the live rows of the slot's buffer."""
        return tensor[self.index(live)]

    def tails(self, tensor: torch.Tensor, live: Live, padded: Live) -> Iterator[torch.Tensor]:
        """Slice the padded rows of the slot's buffer, in parts that do not overlap."""
        if len(self.dims) == 1:
            reach = self.reaches[0]
            start = reach(live)
            stop = reach(padded)
            if start < stop:
                yield tensor[start:stop] if self.dims == (0,) else tensor.narrow(self.dims[0], start, stop - start)
            return
        for box in boxes(self.at(live), self.at(padded)):
            yield tensor[index_of(self.dims, box)]
