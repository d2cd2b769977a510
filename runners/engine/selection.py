"""Selects the graph of a batch: its bucket by the batch's sizes, and its variant by values of fields."""

import bisect
import itertools
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, final

import attrs

from ...dataflow.axes import Axis, Live, Sizes, python_number
from ...dataflow.declaration import Declaration
from ...dataflow.errors import ConfigError, did_you_mean
from .config import checked, is_collection, refuse

if TYPE_CHECKING:
    BucketKey: TypeAlias = Any  # users with one axis, who have ints, need no tests for tuples
else:
    BucketKey = int | tuple[int, ...]
"""A bucket: its padded rows, or its padded sizes in the order of the runner's axes if there are several."""
VariantKey: TypeAlias = tuple[Any, ...]
"""Values of fields that a graph has frozen, one for each variant of the runner."""


def sizes_of(bucket: BucketKey) -> tuple[int, ...]:
    """Return a bucket's padded sizes, one for each axis of the runner."""
    return bucket if isinstance(bucket, tuple) else (bucket,)


def padded_order(bucket: BucketKey) -> tuple[int, int, tuple[int, ...]]:
    """Return what orders buckets by their padded rows: the product of the sizes, then their sum, then the sizes."""
    sizes = sizes_of(bucket)
    return math.prod(sizes), sum(sizes), sizes


class BucketSelector:
    """Selects the first bucket that holds a batch.

    It is looked for once for each combination of padded sizes, and not for each combination of live sizes.

    Args:
        buckets: The padded sizes of each bucket, in the order of choice.
        places: The axes to compare, with the place of each in live sizes.
    """

    def __init__(self, buckets: Mapping[BucketKey, Sizes], places: Mapping[Axis, int]) -> None:
        self._buckets = buckets
        self._axes = [(n, axis, sorted({padded[axis] for padded in buckets.values()})) for axis, n in places.items()]
        self._known = dict[int, BucketKey | None]()

    def select(self, live: Live) -> BucketKey | None:
        """Return the first bucket that holds these live sizes, or None if none does."""
        cell = 0  # the number of this combination of padded sizes
        for place, _, sizes in self._axes:
            cell = cell * (len(sizes) + 1) + bisect.bisect_left(sizes, live[place])
        if cell not in self._known:
            holding = (
                one
                for one, padded in self._buckets.items()
                if all(live[n] <= padded[axis] for n, axis, _ in self._axes)
            )
            self._known[cell] = next(holding, None)
        return self._known[cell]


@final
@attrs.frozen
class Variant:
    """The values of one field that graphs are captured for: see `variant`.

    Attributes:
        field: The field's name.
        values: The values. A step sees one of them.
        at_least: Whether a batch's number takes the smallest value that is at least as large, and not an equal one.
    """

    field: str
    values: tuple[Any, ...]
    at_least: bool = False

    def select(self, value: Any) -> Any:
        """Return the value that the graph of a batch has, given the batch's own, or None if there is no such graph."""
        if type(value) is not int:
            value = python_number(value)
        if self.at_least:
            if type(value) not in (int, float) or not value <= self.values[-1]:  # NaN is not, either
                return None
            return self.values[bisect.bisect_left(self.values, value)]
        if not hasattr(value, "shape"):  # tensors and arrays have no `==` that returns a bool
            for known in self.values:
                if known == value:
                    return known
        return None

    def __str__(self) -> str:
        """Return the field and its values: `max_seqlen at least 512, 4096`."""
        return f"{self.field} {'at least ' * self.at_least}{', '.join(map(repr, self.values))}"


def variant(field: str, values: Collection[Any] | None = None, *, at_least: Collection[float] | None = None) -> Variant:
    """Capture graphs for several values of a field, such as the longest sequence that an attention kernel is told.

    A graph freezes what its step read on the host, so a batch runs only in a graph of its own value. With other values
    it runs eagerly. The option `variants` of runners takes these; each multiplies the graphs.

    Args:
        field: The field of the declaration.
        values: The values that batches have, by default False and True, those of a flag.
        at_least: Numbers in place of `values`: a batch takes the smallest that is at least its own, and its step sees
            that number.

    Raises:
        ConfigError: An argument does not fit.
    """
    what = f"variant {checked('variant', 'the name of a field', field, str)!r}"
    is_least = at_least is not None
    if is_least and values is not None:
        raise ConfigError(f"{what}: give values, or at_least=, not both")
    given: Any = at_least if is_least else (False, True) if values is None else values
    if not is_collection(given) or not given:
        refuse(what, "a list or tuple of at least one value", given)
    for value in given:
        if is_least:
            checked(f"{what}: at_least", "finite numbers", value, (int, float), -sys.float_info.max, sys.float_info.max)
        elif not _is_plain(value):
            refuse(what, "values that equal themselves and have a hash, such as numbers and names", value)
    if len(set(given)) < len(given):
        refuse(what, "each value once", given)
    return Variant(field, tuple(sorted(given) if is_least else given), is_least)


def _is_plain(value: Any) -> bool:
    """Return whether a value can be part of a graph's key."""
    try:
        hash(value)
    except TypeError:
        return False
    return value is not None and not hasattr(value, "shape") and bool(value == value)  # noqa: PLR0124 - NaN


def variants_of(declaration: Declaration, variants: Any) -> tuple[Variant, ...]:
    """Return the variants of a runner. Raise ConfigError if one is none, or names no field, or one twice."""
    if not is_collection(variants):
        refuse("variants", "a list of variants, such as [variant('max_seqlen', at_least=[512, 4096])]", variants)
    found = dict[str, Variant]()
    for one in variants:
        name = checked("variants", "what variant() returns", one, Variant).field
        if name not in declaration.fields:
            what = "is a slot, whose values no graph freezes" if name in declaration.slots else "is no field"
            near = did_you_mean(name, declaration.fields)
            raise ConfigError(f"variants names {name!r}, which {what}, of {declaration.name}{near}")
        if name in found:
            raise ConfigError(f"variants names field {name!r} twice: give all its values in one")
        found[name] = one
    return tuple(found.values())


def frozen_text(frozen: Mapping[str, Any]) -> str:
    """Return values of fields as text: `max_seqlen=512, causal=True`."""
    return ", ".join(f"{name}={value!r}" for name, value in frozen.items())


def frozen_by(variants: Sequence[Variant]) -> Mapping[VariantKey, Mapping[str, Any]]:
    """Return the values of fields that the graphs of each combination of variants freeze."""
    names = [one.field for one in variants]
    return {key: dict(zip(names, key, strict=True)) for key in itertools.product(*(one.values for one in variants))}
