"""Axes: named dims whose sizes vary by step, expressions over them, and the sizes of one step."""

import collections
import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs
import numpy as np

from .errors import DeclarationError


def python_number(value: Any) -> Any:
    """Convert a NumPy number to Python's own, and return anything else unchanged."""
    return value.item() if isinstance(value, np.bool_ | np.integer | np.floating) else value


Sizes = Mapping["Axis", int]
Extent = tuple[int, ...]
"""A shape as integers."""
Live = tuple[int, ...]
"""Live rows on each varying axis, in the declaration's order. The rows of a runner's leading axis may follow them."""
LARGEST_SIZE: Final = 2**63 - 1  # the largest size that torch can represent


class _Arithmetic:
    """Adds and multiplies axes, expressions and integers."""

    def __add__(self, other: "int | Axis | Dim") -> "Dim":
        return _collected([*Dim.of(self).terms, *Dim.of(other).terms])

    def __mul__(self, other: "int | Axis | Dim") -> "Dim":
        pairs = itertools.product(Dim.of(self).terms, Dim.of(other).terms)
        return _collected([(tuple(sorted(a + b)), m * n) for (a, m), (b, n) in pairs])

    __radd__ = __add__
    __rmul__ = __mul__


@attrs.frozen(order=True, repr=False, cache_hash=True)
class Axis(_Arithmetic):
    """A symbolic size: it varies by step (live, padded and capacity differ), or is fixed for one runner.

    `TOKENS * 3`, `BATCH * STEPS + 1` are expressions over axes; a shape is made of them and of whole numbers.

    Args:
        name: An identifier, such as "PAGES".
        fixed: Whether a runner has one size for it.
    """

    name: str
    fixed: bool = attrs.field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        """Raise ValueError if the name is not an identifier, and TypeError if `fixed` is not a bool."""
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(f"the name of an axis is an identifier, such as 'PAGES', got {self.name!r}")
        if not isinstance(self.fixed, bool):
            raise TypeError(f"axis {self.name!r}: fixed is True or False, got {self.fixed!r}")

    def __repr__(self) -> str:
        """Return the name alone, as shapes show it."""
        return self.name


@attrs.frozen(repr=False)
class Dim(_Arithmetic):
    """A polynomial over axes in normal form, `((axes, factor), ...)`, so that equal expressions compare equal."""

    terms: tuple[tuple[tuple[Axis, ...], int], ...]

    @classmethod
    def of(cls, value: object) -> "Dim":
        """Convert an axis, expression or integer of at least 0 to an expression, or raise TypeError or ValueError."""
        if isinstance(value, Dim):
            return value
        if isinstance(value, Axis):
            return cls((((value,), 1),))
        value = python_number(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"a size is an axis, an expression over axes or a whole number, got {value!r}")
        if not 0 <= value <= LARGEST_SIZE:
            raise ValueError(f"a size is {'at least 0' if value < 0 else f'at most {LARGEST_SIZE}'}, got {value}")
        return cls((((), value),) if value else ())

    @property
    def axes(self) -> frozenset[Axis]:
        """Every axis in the expression."""
        return frozenset(axis for axes, _ in self.terms for axis in axes)

    @functools.cached_property
    def varies(self) -> bool:
        """Whether the size can differ from step to step."""
        return any(not axis.fixed for axis in self.axes)

    def at(self, sizes: Sizes) -> int:
        """Return the expression's value. Raise KeyError with the axis if `sizes` lacks one."""
        if self._lone is not None:
            return sizes[self._lone]
        return sum(factor * math.prod(sizes[axis] for axis in axes) for axes, factor in self.terms)

    @functools.cached_property
    def _lone(self) -> Axis | None:
        """The axis, or None if the expression is more than a single axis."""
        return self.terms[0][0][0] if len(self.terms) == 1 and len(self.terms[0][0]) == self.terms[0][1] == 1 else None

    def replace(self, relations: Mapping[Axis, "Dim"]) -> "Dim":
        """Return the expression with each axis in `relations` replaced by its expression."""
        total = Dim.of(0)
        for axes, factor in self.terms:
            total += math.prod((relations.get(axis, Dim.of(axis)) for axis in axes), start=Dim.of(factor))
        return total

    def reveals(self) -> Axis | None:
        """Return the one varying axis that this size determines, or None if it has no such axis or several."""
        varying = [axis for axes, _ in self.terms for axis in axes if not axis.fixed]
        return varying[0] if len(varying) == 1 else None

    def __repr__(self) -> str:
        """Return the expression as source code would write it."""
        terms = [(*axes, factor) if factor != 1 or not axes else axes for axes, factor in reversed(self.terms)]
        return " + ".join(" * ".join(map(str, term)) for term in terms) or "0"


def _collected(terms: Iterable[tuple[tuple[Axis, ...], int]]) -> Dim:
    """Add up terms, and merge those over the same axes."""
    factors = collections.Counter[tuple[Axis, ...]]()
    for axes, factor in terms:
        factors[axes] += factor
    return Dim(tuple(sorted((axes, factor) for axes, factor in factors.items() if factor)))


Shape = tuple[Dim, ...]


def shape_of(dims: object) -> Shape:
    """Make a shape from one size or a sequence of sizes."""
    return tuple(Dim.of(dim) for dim in (dims if isinstance(dims, tuple | list) else (dims,)))


def extent(shape: Shape, sizes: Sizes) -> Extent:
    """Evaluate a shape at given sizes."""
    return tuple(dim.at(sizes) for dim in shape)


BATCH: Final = Axis("BATCH")
"""The requests of a step."""
TOKENS: Final = Axis("TOKENS")
"""The tokens of a step; in a decode runner, BATCH times its width."""
WIDTH: Final = Axis("WIDTH", fixed=True)
"""Tokens that one request has in each step; a runner that is given `width` knows its size."""


@attrs.frozen
class Step:
    """The sizes of one step, as a computed slot sees them.

    Fixed axes are in both mappings. An axis whose size the batch does not determine is in neither, and reading it
    raises a DeclarationError.

    Args:
        live_sizes: Rows of the batch, for each axis.
        padded_sizes: Rows of the bucket, for each axis.
    """

    live_sizes: Sizes
    padded_sizes: Sizes

    def live(self, size: Axis | Dim) -> int:
        """Return the rows of the batch on an axis, or the value of an expression at these sizes."""
        try:
            return self.live_sizes[size]  # type: ignore[index] # an axis, in most cases
        except (KeyError, TypeError):
            return self._at(size, self.live_sizes)

    def padded(self, size: Axis | Dim) -> int:
        """Return the rows of the bucket on an axis, or the value of an expression at these sizes."""
        return self._at(size, self.padded_sizes)

    def _at(self, size: Axis | Dim, sizes: Sizes) -> int:
        try:
            return sizes[size] if isinstance(size, Axis) else Dim.of(size).at(sizes)
        except KeyError as error:
            axis = error.args[0]
        if axis.fixed:
            raise DeclarationError(f"no slot has {axis}: declare one with a dim of {axis}, so that its size is known")
        known = ", ".join(sorted(one.name for one in self.live_sizes if not one.fixed)) or "none"
        raise DeclarationError(
            f"this step does not know the size of {axis} (it knows {known}): declare a copied slot with a dim of {axis}"
        )
