"""The parameters of slots: each function takes one as it was declared, or raises TypeError or ValueError.

The error says what was expected. Who catches it adds the slot's name, the parameter's name and what was given.
"""

import keyword
import re
from collections.abc import Callable
from typing import Any, Final

import torch

from .axes import Dim
from .capabilities import DEVICE, HOST, Placement
from .compute import one_argument
from .roles import Role, dtype_text
from .tails import STALE, PadValue, Poison, pad_value

When = str | Callable[[Any], bool]
_DTYPES: Final = re.compile(r"bool|u?int(8|16|32|64)|b?float16|float(32|64)|complex(64|128)|float8_\w+")
"""Dtypes whose tensors torch fills and copies: no quantised ones, no bits, no numbers of less than a byte."""


def flag(value: bool) -> bool:  # noqa: FBT001 - the parameter's value itself
    """True or False, and nothing that is only taken for one of them."""
    if not isinstance(value, bool):
        message = "say True or False"
        raise TypeError(message)
    return value


def dtype_of(value: torch.dtype | Role) -> torch.dtype | Role:
    """A torch dtype that slots can have, or a role of such ones."""
    if isinstance(value, Role):
        if not isinstance(value.name, str):
            message = f"the name of a role is a text, got {value.name!r}"
            raise TypeError(message)
        _torch_dtype(value.default)
        dtypes_of(value.accepts)
        return value
    return _torch_dtype(value)


def dtypes_of(value: tuple[torch.dtype, ...]) -> tuple[torch.dtype, ...]:
    """Dtypes that a copy converts, in a tuple."""
    if not isinstance(value, tuple):
        message = "expected a tuple of torch dtypes, such as (torch.int32,)"
        raise TypeError(message)
    return tuple([_torch_dtype(dtype) for dtype in value])


def _torch_dtype(value: torch.dtype) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        message = f"expected a torch dtype, such as torch.int64, or a role, got {value!r}"
        raise TypeError(message)
    if not _DTYPES.fullmatch(dtype_text(value)):
        message = f"torch does not fill and copy tensors of {dtype_text(value)}: take torch.uint8 for bytes of your own"
        raise TypeError(message)
    return value


def placement_of(value: Placement) -> Placement:
    """One of the two."""
    if not isinstance(value, str) or value not in (DEVICE, HOST):
        message = f"say {DEVICE!r} or {HOST!r}"
        raise TypeError(message)
    return value


def when_of(value: When | None) -> When | None:
    """A dotted name in the settings, a function of them, or None."""
    if isinstance(value, str):
        if not all(value.split(".")):
            message = "a name in the settings is not empty; dots lead into what it names"
            raise ValueError(message)
    elif value is not None:
        one_argument(value, "a name in the settings, or a function of them")
    return value


def argument_of(value: str | None) -> str | None:
    """The name of an operator's argument, or None."""
    if value is not None and (not isinstance(value, str) or not value.isidentifier() or keyword.iskeyword(value)):
        message = "no name of an operator's argument: give one, such as 'actual_seq_lengths_kv'"
        raise TypeError(message)
    return value


def limit_of(value: object) -> Dim | None:
    """A whole number, an axis or an expression; None for no limit."""
    return None if value is None else Dim.of(value)


def starts_of(value: PadValue | None) -> PadValue | None:
    """A value, or None for the tail's."""
    return None if value is None else pad_value(value)


def poison_of(value: Poison | None) -> Poison | None:
    """A tuple of values, "stale", or None."""
    if value is None or (isinstance(value, str) and value == STALE):
        return value
    if not isinstance(value, tuple):
        message = f"say a tuple of the values that its tail bears, or {STALE!r}"
        raise TypeError(message)
    return tuple([pad_value(one) for one in value])


def constant_of(value: Any) -> Any:
    """A value, or a function of the step at full capacity."""
    return one_argument(value, "a function of the step") if callable(value) else pad_value(value)
