"""What the functions of a declaration raise, in words: the slot, the function, and the line."""

import contextlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from .errors import CaptureError, ComputeError, SlotGraphError

_OTHERS: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), contextlib.__file__)
"""Files that a failure is not blamed on: those of torch, and of this library."""


def place_of(error: BaseException) -> str:
    """The innermost line of the user's that an error came through: " at model.py:7, `x.item()`"."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OTHERS)]
    if not frames:
        return ""
    source = f", `{frames[-1].line}`" if frames[-1].line else ""
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}{source}"


def blame(slot: str, function: Callable[..., Any], error: Exception) -> NoReturn:
    """Raise what a slot's function raised, with the slot, the function and its line.

    Raises ComputeError, or CaptureError where a capture refused what the function does. Other errors of this library,
    and memory that ran out, are raised as they are.
    """
    name, place = getattr(function, "__qualname__", repr(function)), place_of(error)
    if isinstance(error, CaptureError):
        message = f"slot {slot!r}, in its function {name}{place}: {error}"
        raise CaptureError(message) from error
    if isinstance(error, SlotGraphError | torch.OutOfMemoryError):
        raise error
    message = f"slot {slot!r}: its function {name} raised {type(error).__name__}{place}: {error}"
    raise ComputeError(message) from error
