"""Sizing: how many rows a batch has on each axis, and whether its host data is within the slots' limits."""

import collections
import contextlib
import inspect
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from .admission import NOT_TOLD, has_memory, unreadable, wrong_rank
from .axes import TOKENS, Axis, Dim, Live, Shape, Sizes
from .capabilities import HOST
from .declaration import Declaration
from .errors import BatchError, DeclarationError, Fault, MissingSourceError, hint, kind_text
from .hostdata import HOST_KINDS, unnested
from .slots import Slot
from .sources import NO_SIDE, Path, Side, Source, keys_of, look_up

Relations = Mapping[Axis, Dim]
_DEPTH: Final = 16
"""How deep nested lists are inspected."""


@attrs.frozen
class Gauge:
    """A dim of a slot's source from which one axis can be read: its size is `base + slope * rows`.

    Attributes:
        axis: The axis.
        slot: The slot's name.
        source: The slot's source.
        dim: The dim.
        shape: The slot's shape as declared.
        written: The dim's size, expressed over `axis` alone.
        base: The size for no rows.
        slope: What each row adds.
        required: Whether every batch must have the source.
    """

    axis: Axis
    slot: str
    source: Source
    dim: int
    shape: Shape
    written: Dim
    base: int
    slope: int
    required: bool

    @property
    def declared(self) -> Dim:
        """The dim's size as the slot declares it."""
        return self.shape[self.dim]

    def size(self, value: Any) -> int:
        """Return a source's size along the dim. Raise MissingSourceError or BatchError if it cannot be read."""
        try:
            return operator.index(value.shape[self.dim])
        except (*NOT_TOLD, IndexError):
            inner = value  # nested lists
            for _ in range(self.dim):
                inner = inner[0] if isinstance(inner, list | tuple) and inner else None
            if isinstance(inner, list | tuple):
                return len(inner)
        raise self._unreadable(value)

    def rows(self, value: Any) -> int:
        """Return the live rows on the axis.

        Raise MissingSourceError or BatchError if the source does not determine them.
        """
        rows, rest = divmod(self.size(value) - self.base, self.slope)
        if rest or rows < 0:
            raise self._unreadable(value)
        return rows

    def exact(self, size: int) -> float:
        """Return the number of live rows that gives a size, which may be a fraction."""
        return (size - self.base) / self.slope

    def misfit(self, value: Any) -> Fault | None:
        """Return a fault if a source has more or fewer dims than its slot, else None."""
        came = _shape_of(value)
        return None if came is None or len(came) == len(self.shape) else wrong_rank(self.slot, self.shape, came)

    def _unreadable(self, value: Any) -> BatchError:
        what = f"it determines how many rows the batch has on {self.axis}"
        if value is None:
            return MissingSourceError.of(Fault(self.slot, f"slot {self.slot!r}: {self.source} is missing; {what}"))
        if fault := self.misfit(value):
            return BatchError.of(fault)
        is_readable = isinstance(value, torch.Tensor) and not unreadable(value)
        got = f"shape {list(value.shape)}" if is_readable else unreadable(value) or type(value).__name__
        text = f"slot {self.slot!r}: expected a size of {self.written} on dim {self.dim} ({what}), got {got}"
        return BatchError.of(Fault(self.slot, text))


class Sizer:
    """Reads a batch's live sizes, one for each varying axis of a declaration in its order.

    Raises DeclarationError if no copied slot determines an axis.

    Args:
        declaration: The slots.
        relations: Axes that follow from others, such as `{TOKENS: BATCH * 4}`.
        fixed: Sizes of the fixed axes.
        lead: An axis whose rows are also read.
        factor: The name of the option for tokens per request, for errors.
        known: Axes whose size is not read, since the caller gives it.
    """

    def __init__(
        self,
        declaration: Declaration,
        relations: Relations,
        fixed: Sizes,
        lead: Axis | None = None,
        *,
        factor: str = "",
        known: Collection[Axis] = (),
    ) -> None:
        wanted = [axis for axis in declaration.varying if axis not in known]
        if lead is not None:
            wanted.append(lead)
        sizes = [relations.get(axis, Dim.of(axis)) for axis in wanted]
        self._leads = leads = sorted({_lead_of(size) for size in sizes})
        self._gauges = [_gauges(declaration, axis, relations, fixed) for axis in leads]
        self.gauges = tuple(found[:1] if found[0].required else found for found in self._gauges)
        self._check_side = declaration.check_side
        self._factor = factor
        paths = [source for source in declaration.sources.values() if isinstance(source, Path) and not source.from_side]
        self._names = dict.fromkeys(path.parts[0] for path in paths).keys()
        self.lines = tuple((leads.index(_lead_of(size)), *_line(size, _lead_of(size), fixed)) for size in sizes)

    def explain(self, error: BatchError, batch: Any, side: Side) -> None:
        """Replace an error about one slot by what is wrong with the batch as a whole.

        The batch may not be a batch at all, may have a missing key under another name, or its sources may differ in
        size.
        """
        if not error.faults:
            return
        texts = [fault.text for fault in error.faults]
        if isinstance(error, MissingSourceError):
            texts = self._no_batch(batch) or texts + self._nearest(batch)
        else:
            found = self._compare(batch, side)
            texts = found.texts + [fault.text for fault in error.faults if not found.covers(fault)]
        error.args = ("; ".join(texts),)

    def compare(self, batch: Any, side: Side) -> None:
        """Raise BatchError if sources differ in size, or have more or fewer dims than their slots."""
        found = self._compare(batch, side)
        if found.texts or found.misfits:
            raise BatchError("; ".join([*found.texts, *(fault.text for fault in found.misfits.values())]))

    def __call__(self, batch: Any, side: Side) -> Live:
        """Return the live rows on each varying axis, followed by those of the lead axis if there is one.

        Raises BatchError for a side argument that no slot reads, and if a source does not determine its axis.
        """
        if side:
            self._check_side(side)
        rows = list[int]()
        try:
            for gauges in self.gauges:  # the required source, or the first that is present; if there is none, 0 rows
                found = ((one, one.source.read(batch, side)) for one in gauges)
                rows.append(next((one.rows(value) for one, value in found if one.required or value is not None), 0))
        except BatchError as error:
            self.explain(error, batch, side)
            raise
        return tuple([base + slope * rows[lead] for lead, base, slope in self.lines])

    def _no_batch(self, batch: Any) -> list[str]:
        """Return an error text, in a list, for an argument that has no source of a slot and so is no batch."""
        names = [*self._names]
        is_tensor = isinstance(batch, torch.Tensor)  # a tensor's own attributes may have the names of slots
        if isinstance(batch, Mapping) or (not is_tensor and any(look_up(batch, one) is not None for one in names)):
            return []
        if not names or self._nearest(batch):
            return []
        example = f"{{{names[0]!r}: ...{', ...' * (len(names) > 1)}}}"
        what = "a batch is a mapping or an object with a value for each slot"
        return [f"{what}, got {kind_text(batch)}: pass {example}"]

    def _nearest(self, batch: Any) -> list[str]:
        """Suggest the missing source that each unused key of the batch may be a misspelling of."""
        keys = keys_of(batch)
        missing = self._names - keys
        found = list[str]()
        for key in sorted(keys - self._names):
            is_value = isinstance(batch, Mapping) or not callable(inspect.getattr_static(batch, key, None))
            if is_value and (near := hint(key, missing)):
                found.append(f"the batch has {key!r}: {near}")
        return found

    def _compare(self, batch: Any, side: Side) -> "_Comparison":
        """Read all sources that determine a size, and compare them."""
        found = _Comparison()
        for axis, gauges in zip(self._leads, self._gauges, strict=True):
            sizes = list[tuple[Gauge, int]]()
            count = len(found.misfits)
            for one in gauges:
                value = one.source.read(batch, side)
                if fault := one.misfit(value):
                    found.misfits[one.slot] = fault
                    continue
                with contextlib.suppress(BatchError):  # the source is absent, or its size cannot be read
                    sizes.append((one, one.size(value)))
            differ = len({one.exact(size) for one, size in sizes}) > 1
            if differ:
                found.texts.append(self._differing(axis, sizes))
            if differ or len(found.misfits) > count:
                found.places.update((one.slot, one.dim) for one in gauges)
        return found

    def _differing(self, axis: Axis, sizes: Sequence[tuple[Gauge, int]]) -> str:
        """Describe which size of an axis each slot has, those that differ from most others first."""
        factor = self._factor_of(axis, sizes)
        agree = collections.Counter(one.exact(size) for one, size in sizes)
        groups = dict[tuple[Dim, int], list[str]]()
        parts = list[str]()
        before = None
        for one, size in sorted(sizes, key=lambda each: agree[each[0].exact(each[1])]):
            groups.setdefault((one.declared if factor else one.written, size), []).append(repr(one.slot))
        for (dim, size), slots in groups.items():
            *others, last = slots
            names = f"{', '.join(others)} and {last} say" if others else f"{last} says"
            equals = " = " if " " in str(dim) else "="
            parts.append(f"{names} {size}" if dim == before else f"{names} {dim}{equals}{size}")
            before = dim
        text = "; ".join(parts)
        if not factor:
            return f"{text}: pass the same number of rows for all of them"
        return f"{text}; {TOKENS} is {factor} x {axis}: did you mean {self._factor}={factor}?"

    def _factor_of(self, axis: Axis, sizes: Sequence[tuple[Gauge, int]]) -> int:
        """Return the number of tokens per request if it is the only difference from the runner's options, else 0."""
        tokens = {(one.slope, size) for one, size in sizes if one.declared == Dim.of(TOKENS)}
        requests = {size for one, size in sizes if one.declared == Dim.of(axis)}
        if not self._factor or len(tokens) != 1 or len(requests) != 1:
            return 0
        [(expected, many)] = tokens
        [few] = requests
        factor, rest = divmod(many, few or many + 1)
        return 0 if rest or factor == expected else factor


@attrs.define
class _Comparison:
    """The result of comparing the sizes of a batch's sources.

    Attributes:
        texts: A sentence for each axis on which they differ.
        misfits: Sources with more or fewer dims than their slot, by slot.
        places: Pairs of slot and dim whose faults `texts` and `misfits` already explain.
    """

    texts: list[str] = attrs.field(factory=list)
    misfits: dict[str, Fault] = attrs.field(factory=dict)
    places: set[tuple[str, int]] = attrs.field(factory=set)

    def covers(self, fault: Fault) -> bool:
        """Return whether this comparison already explains a fault."""
        return bool(fault.dims) and all((fault.slot, dim) in self.places for dim in fault.dims)


def _shape_of(value: Any) -> list[int] | None:
    """Return the shape of a tensor, an array or nested lists, or None if it cannot be read."""
    try:
        if not isinstance(value, list | tuple):
            return [*value.shape]
        numbers, shape = unnested(value, _DEPTH)
    except NOT_TOLD:
        return None
    is_open = not numbers or isinstance(numbers[0], list | tuple) or hasattr(numbers[0], "shape")
    return None if is_open else shape


def _lead_of(size: Dim) -> Axis:
    """Return the one varying axis that a size depends on. Raise DeclarationError if there is no such axis."""
    lead = size.reveals()
    if lead is None:
        raise DeclarationError(f"a relation needs an expression linear in one varying axis, got {size}")
    return lead


def _line(size: Dim, axis: Axis, fixed: Sizes) -> tuple[int, int]:
    """Return base and slope of a size as a function of one axis."""
    base = size.at({**fixed, axis: 0})
    return base, size.at({**fixed, axis: 1}) - base


def _gauges(declaration: Declaration, axis: Axis, relations: Relations, fixed: Sizes) -> tuple[Gauge, ...]:
    """Return the gauges of an axis: required sources first, then the simplest size, then by name."""
    found = list[Gauge]()
    for name, source in declaration.sources.items():
        slot = declaration.slots[name]
        for dim, declared in enumerate(slot.shape):
            size = declared.replace(relations)
            line = _line(size, axis, fixed) if size.reveals() == axis else (0, 0)
            if line[1]:
                found.append(Gauge(axis, name, source, dim, slot.shape, size, *line, not slot.optional))
    if not found:
        raise DeclarationError(
            f"{declaration.name}: no copied slot determines the size of {axis}: declare one with a dim of {axis}"
        )
    return tuple(sorted(found, key=lambda one: (not one.required, one.base + one.slope, one.slot, one.dim)))


_PLAIN: Final = (int, float)
_NO_NUMBERS: Final = (RuntimeError, TypeError, ValueError)  # not numbers: the fill rejects them with a better error


@attrs.frozen
class Limit:
    """The largest value of one slot's host data. Device tensors are not read, since that would wait for the device."""

    name: str
    slot: Slot
    source: Source
    most: int

    def check(self, batch: Any, side: Side = NO_SIDE) -> None:
        """Raise BatchError if host data of the batch exceeds the limit. Writes nothing."""
        found = self._over(self.source.read(batch, side))
        if found is not None:
            limit = self.most if self.slot.limit == Dim.of(self.most) else f"{self.slot.limit} = {self.most}"
            raise BatchError(
                f"slot {self.name!r}: row {found[0]} is {found[1]}, over the limit of {limit}: split or refuse what is "
                "that long before it is batched"
            )

    def _over(self, value: Any) -> tuple[Any, Any] | None:
        """Return the first row of host data that exceeds the limit and its value, or None."""
        try:
            if isinstance(value, list | tuple):
                numbers, _ = unnested(value, len(self.slot.shape))
                if not numbers or _most_of(numbers) <= self.most:  # a fast path without an array
                    return None
            elif isinstance(value, torch.Tensor):
                if not (self.slot.placement == HOST and value.is_cpu and has_memory(value)):
                    return None
            elif not isinstance(value, HOST_KINDS):
                return None
            array = _array_of(value)
            found = np.argwhere(array > self.most)
        except _NO_NUMBERS:
            return None
        if not len(found):
            return None
        row = found[0].tolist()
        return row[0] if len(row) == 1 else row, array[tuple(row)]


def limits_of(declaration: Declaration, sizes: Sizes) -> list[Limit]:
    """Return the limits of a declaration's slots at the sizes of the fixed axes."""
    found = list[Limit]()
    for name, source in declaration.sources.items():
        slot = declaration.slots[name]
        if slot.limit is not None:
            found.append(Limit(name, slot, source, slot.limit.at(sizes)))
    return found


def _most_of(numbers: list[Any] | tuple[Any, ...]) -> float:
    """Return the largest of plain numbers, or infinity if there are other objects, to check each of them."""
    try:
        return max(numbers) if type(numbers[0]) in _PLAIN else math.inf
    except _NO_NUMBERS:
        return math.inf


def _array_of(value: Any) -> "npt.NDArray[Any]":
    """Convert host data to an array, and objects with `__index__` to integers."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().double() if value.is_floating_point() else value
        return plain.resolve_neg().numpy()
    array = np.asarray(value)
    return np.vectorize(operator.index, [object])(array) if array.dtype == object else array
