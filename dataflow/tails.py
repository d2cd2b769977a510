"""Tail rules: what happens to the rows beyond the live size."""

import math
from collections.abc import Iterator
from typing import Any, Final, Literal

import attrs
import torch

from .axes import Axis, Dim, Sizes, python_number
from .capabilities import Capabilities, FillRole, dtype_text

Number = bool | int | float
PadValue = Number | FillRole | Axis | Dim


@attrs.frozen
class Pad:
    """The tail holds `value` in each step: a number, a role that the backend resolves, or a fixed axis' size."""

    value: PadValue

    def __str__(self) -> str:
        """Return the rule as a declaration writes it."""
        return f"pad={self.value.name if isinstance(self.value, FillRole) else self.value}"


@attrs.frozen
class Keep:
    """The tail keeps its old contents, for a stated reason."""

    reason: str

    def __str__(self) -> str:
        """Return the rule and its reason."""
        return f"keep ({self.reason})"


@attrs.frozen
class Once:
    """The whole slot is set to `value` when it is allocated. Its tail is not written again."""

    value: PadValue

    def __str__(self) -> str:
        """Return the rule as a declaration writes it."""
        return f"once={self.value}"


Tail = Pad | Keep | Once
Poison = tuple[PadValue, ...] | Literal["stale"]
"""What a check may put into a tail: these values, or values that live rows had in some step."""
STALE: Final = "stale"


def keep(reason: str) -> Keep:
    """Make the rule for a tail that no fill writes.

    Args:
        reason: Why nothing reads it. The plan prints it.
    """
    if not isinstance(reason, str) or not reason.strip():
        raise ValueError("keep() needs a reason: say why no one reads this tail")
    return Keep(reason)


def once(value: PadValue) -> Once:
    """Make the rule for a tail that is written when the buffer is allocated, and never again."""
    return Once(value)


def tail_of(pad: PadValue | Tail | None) -> Tail | None:
    """Convert a declaration's `pad=` to a rule, or None if none was given. Raise TypeError for anything else."""
    if pad is None or isinstance(pad, Keep):
        return pad
    return type(pad)(pad_value(pad.value)) if isinstance(pad, Pad | Once) else Pad(pad_value(pad))


def pad_value(value: PadValue) -> PadValue:
    """Check a declared value, and convert NumPy's numbers to Python's own. Raise TypeError for anything else."""
    number = python_number(value)
    if isinstance(number, FillRole) and not (isinstance(number.name, str) and isinstance(number.default, Number)):
        raise TypeError(f"a fill role has a text for its name and a number for its default, got {number}")
    if not isinstance(number, PadValue):
        raise TypeError("a value is a number, a fill role, a fixed axis, or an expression over fixed axes")
    return number


def resolve_value(value: PadValue, capabilities: Capabilities, fixed: Sizes) -> Number:
    """Resolve a pad value to a number, on one device and for one runner's fixed axes."""
    if isinstance(value, FillRole):
        return value.on(capabilities)
    if isinstance(value, Axis | Dim):
        return Dim.of(value).at(fixed)
    return value


def range_of(dtype: torch.dtype) -> tuple[type[bool] | type[int] | type[float], float, float]:
    """Return the kind of number that a dtype stores, and the smallest and largest value that it can hold."""
    if dtype is torch.bool:
        return bool, 0, 1
    if dtype.is_floating_point or dtype.is_complex:
        return float, torch.finfo(dtype).min, torch.finfo(dtype).max
    return int, torch.iinfo(dtype).min, torch.iinfo(dtype).max


def holds(dtype: torch.dtype, value: Number) -> bool:
    """Return whether a number is of a dtype's kind and range. Bools fit only bool slots, which also take 0 and 1."""
    kind, least, most = range_of(dtype)
    if isinstance(value, bool) and kind is not bool:
        return False
    if kind is float:
        fits = isinstance(value, int | float) and abs(value) <= most  # the smallest number of float8_e8m0fnu is above 0
        return fits or (isinstance(value, float) and not math.isfinite(value))
    return isinstance(value, int) and least <= value <= most


def value_faults(value: Any, dtype: torch.dtype) -> Iterator[str]:
    """Yield each reason why a value does not suit slots of a dtype, with a way to fix it. Functions are not checked."""
    if callable(value):
        return
    try:
        value = pad_value(value)
    except TypeError as error:
        yield f"{value!r}: {error}"
        return
    if isinstance(value, Axis | Dim) and Dim.of(value).varies:
        yield f"its value {value!r} varies by step: give a number or a fixed axis, or compute the slot"
    number = value.default if isinstance(value, FillRole) else value
    if isinstance(number, Number) and not holds(dtype, number):
        yield f"{number!r} does not fit {dtype_text(dtype)}: give a value of that type and range"
