"""Values on their way into a buffer: the same shape and the same kind of number, no broadcast, no cast."""

from typing import Any

import numpy as np
import torch

from .axes import Axis, Dim, Sizes
from .capabilities import Capabilities
from .errors import ComputeError
from .hostdata import tensor_of
from .roles import FillRole, dtype_text, resolve_dtype
from .slots import Slot
from .step import Step
from .tails import holds, resolve_value


def initial_value(name: str, slot: Slot, capacity: Sizes, capabilities: Capabilities) -> Any:
    """What a slot's buffer holds at first: a number, a tensor or nested lists.

    Raises ComputeError where the number does not fit the slot's dtype on this device.
    """
    value, dtype = slot.initial(), resolve_dtype(slot.dtype, capabilities)
    if callable(value) and not isinstance(value, Axis | Dim | FillRole):
        return value(Step(capacity, capacity))
    number = resolve_value(value, capabilities, capacity)
    if not holds(dtype, number):
        message = f"slot {name!r}: {number!r} does not fit {dtype_text(dtype)} on this backend"
        raise ComputeError(message)
    return number


def write_all(target: torch.Tensor, value: Any, what: str) -> None:
    """Fill a whole buffer with one number, or write a value of its very shape; ComputeError begins with `what`."""
    if isinstance(value, bool | int | float):
        target.fill_(value)
    else:
        write(target, value, what)


def write(target: torch.Tensor, value: Any, what: str) -> None:
    """Write what a function returned into its slot; ComputeError, begun with `what`, before anything is written."""
    if isinstance(value, bool | int | float):
        _write_number(target, value, what)
        return
    tensor = _as_tensor(value, target, what)
    if tensor.shape != target.shape or tensor.dtype != target.dtype or tensor.layout != target.layout:
        layout = "" if tensor.layout == target.layout else f"{tensor.layout} "
        raise ComputeError(_misfit(what, target, f"{layout}{dtype_text(tensor.dtype)} of shape {list(tensor.shape)}"))
    if tensor.numel() == 1 and tensor.is_cpu and not target.is_cpu:
        target.fill_(tensor.item())  # a copy from memory that is not pinned would wait for the device
    else:
        target.copy_(tensor)


def _write_number(target: torch.Tensor, value: float, what: str) -> None:
    if target.numel() != 1 or not holds(target.dtype, value):
        raise ComputeError(_misfit(what, target, f"the number {value!r}"))
    target.fill_(float(value) if target.is_floating_point() else value)  # torch takes no int beyond 64 bits


def _as_tensor(value: Any, target: torch.Tensor, what: str) -> torch.Tensor:
    """A tensor as it is; an array as a tensor of its own dtype; lists of numbers that the target's dtype can hold."""
    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, list | tuple | np.ndarray | np.generic):
        raise ComputeError(_misfit(what, target, f"{type(value).__name__}"))
    try:
        return tensor_of(value, target.dtype)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ComputeError(_misfit(what, target, f"{value!r}: {error}")) from error


def _misfit(what: str, target: torch.Tensor, got: str) -> str:
    return f"{what}: expected {dtype_text(target.dtype)} of shape {list(target.shape)}, got {got}"
