"""Tail rules: what happens to the rows beyond the live size."""

import math
from typing import Final, Literal

import attrs
import torch

from .axes import Axis, Dim, Sizes
from .capabilities import Capabilities
from .roles import FillRole

Number = bool | int | float
PadValue = Number | FillRole | Axis | Dim


@attrs.frozen
class Pad:
    """The tail holds `value` in each step: a number, a role that the backend decides, or a fixed axis' size."""

    value: PadValue

    def __str__(self) -> str:
        """As one writes it in a declaration."""
        return f"pad={self.value.name if isinstance(self.value, FillRole) else self.value}"


@attrs.frozen
class Keep:
    """The tail keeps whatever was there, for a stated reason."""

    reason: str

    def __str__(self) -> str:
        """The rule and its reason."""
        return f"keep ({self.reason})"


@attrs.frozen
class Once:
    """The whole slot is set to `value` when it is allocated; its tail is not touched again."""

    value: PadValue

    def __str__(self) -> str:
        """As one writes it in a declaration."""
        return f"once={self.value}"


Tail = Pad | Keep | Once
Poison = tuple[PadValue, ...] | Literal["stale"]
"""What a check may put into a tail: these values, or those that live rows had in one step or another."""
STALE: Final = "stale"


def keep(reason: str) -> Keep:
    """A tail that is left as it was: say why nothing reads it."""
    if not isinstance(reason, str) or not reason.strip():
        message = "keep() needs a reason: say why no one reads this tail"
        raise ValueError(message)
    return Keep(reason)


def once(value: PadValue) -> Once:
    """A tail that is written when the buffer is allocated, and never again."""
    return Once(value)


def tail_of(pad: PadValue | Tail | None) -> Tail | None:
    """A declaration's `pad=` as a rule; None where it said nothing."""
    return pad if pad is None or isinstance(pad, Pad | Keep | Once) else Pad(pad)


def resolve_value(value: PadValue, capabilities: Capabilities, fixed: Sizes) -> Number:
    """A pad value as a number, on one device and for one runner's fixed axes."""
    if isinstance(value, FillRole):
        return value.on(capabilities)
    if isinstance(value, Axis | Dim):
        return Dim.of(value).at(fixed)
    return value


def holds(dtype: torch.dtype, value: Number) -> bool:
    """Whether a dtype can hold a number exactly in kind: no float in an index, nothing out of range."""
    if dtype is torch.bool or isinstance(value, bool):
        return dtype is torch.bool and isinstance(value, bool)
    if dtype.is_floating_point or dtype.is_complex:
        fits = isinstance(value, int | float) and abs(value) <= torch.finfo(dtype).max
        return fits or (isinstance(value, float) and not math.isfinite(value))
    info = torch.iinfo(dtype)
    return isinstance(value, int) and info.min <= value <= info.max
