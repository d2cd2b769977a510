"""Limits: the largest value that host data may hold, looked at before anything is written."""

import math
import operator
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from .admission import has_memory
from .axes import Sizes
from .capabilities import HOST
from .declaration import Declaration
from .errors import BatchError
from .hostdata import HOST_KINDS, unnested
from .sources import NO_SIDE, Side, Source

_PLAIN: Final = (int, float)
_NO_NUMBERS: Final = (RuntimeError, TypeError, ValueError)
"""What a value raises that is no box of numbers; the fill refuses it in words of its own."""


@attrs.frozen
class Limit:
    """One slot's limit: `text` as it was declared, and the number that it comes to.

    dims: of the slot. on_host: whether a tensor is host data for this slot. One for a slot on the device is not looked
    into, wherever it lies: that would wait for the device.
    """

    slot: str
    source: Source
    text: str
    most: int
    on_host: bool
    dims: int

    def fault(self, value: Any) -> str:
        """What is wrong with host data, by its first row over the limit; nothing where it keeps to it."""
        if not self.is_over(value):
            return ""
        try:
            array = _array_of(value)
        except _NO_NUMBERS:
            return ""  # an array among numbers, which the fill refuses
        where = np.argwhere(array > self.most)[0].tolist()
        row = where[0] if len(where) == 1 else where
        limit = self.text if self.text == str(self.most) else f"{self.text} = {self.most}"
        return (
            f"slot {self.slot!r}: row {row} is {array[tuple(where)]}, over the limit of {limit}: split or refuse what "
            "is that long before it is batched"
        )

    def is_over(self, value: Any) -> bool:
        """Whether host data holds more; the fill refuses what is no number."""
        try:
            if isinstance(value, list | tuple):
                value, _ = unnested(value, self.dims)
                if value and type(value[0]) in _PLAIN:
                    most = _most_of(value)  # without an array made of them
                    if most == most:  # noqa: PLR0124 - a list that begins with NaN has no other maximum
                        return bool(most > self.most)
            elif isinstance(value, torch.Tensor) and not (self.on_host and value.is_cpu and has_memory(value)):
                return False
            return isinstance(value, (*HOST_KINDS, torch.Tensor)) and bool((_array_of(value) > self.most).any())
        except _NO_NUMBERS:
            return False
        return False


@attrs.frozen
class Limits:
    """The limits of one runner's slots, held against each batch."""

    limits: tuple[Limit, ...]

    @classmethod
    def of(cls, declaration: Declaration, sizes: Sizes) -> "Limits | None":
        """The limits at the sizes of the fixed axes; None where no slot has one, so that nothing need be asked."""
        found = []
        for name, source in declaration.sources.items():
            slot = declaration.slots[name]
            if slot.limit is not None:
                most, on_host = slot.limit.at(sizes), slot.placement == HOST
                found.append(Limit(name, source, str(slot.limit), most, on_host, len(slot.shape)))
        return cls(tuple(found)) if found else None

    def allow(self, batch: Any, side: Side) -> bool:
        """Whether a batch keeps to them all."""
        return not any(limit.is_over(limit.source.read(batch, side)) for limit in self.limits)

    def check(self, batch: Any, side: Side = NO_SIDE) -> None:
        """Refuse a batch whose host data holds more than a slot takes: BatchError. Writes nothing."""
        for limit in self.limits:
            fault = limit.fault(limit.source.read(batch, side))
            if fault:
                raise BatchError(fault)


def _most_of(numbers: list[Any] | tuple[Any, ...]) -> float:
    """The largest of plain numbers; NaN where other objects are among them, so that each is looked at."""
    try:
        most = max(numbers)
    except TypeError:
        return math.nan
    return most if type(most) in _PLAIN else math.nan


def _number_in(item: Any) -> Any:
    """What a fill makes of an object in a list: the whole number that it stands for, else the object itself."""
    return operator.index(item) if hasattr(type(item), "__index__") else item


_NUMBERS_IN: Final = np.frompyfunc(_number_in, 1, 1)


def _array_of(value: Any) -> "npt.NDArray[Any]":
    if not isinstance(value, torch.Tensor):
        array = np.asarray(value)
        return _NUMBERS_IN(array) if array.dtype == object else array
    plain = value.detach().double() if value.is_floating_point() else value
    return plain.resolve_neg().numpy()
