"""Values on their way into a buffer: the same shape and the same kind of number, no broadcast, no cast."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .axes import Sizes
from .capabilities import Capabilities
from .errors import ComputeError
from .failures import blame
from .hostdata import tensor_of
from .roles import dtype_text, resolve_dtype
from .slots import Slot
from .step import Step
from .tails import holds, resolve_value


def initial_value(name: str, slot: Slot, capacity: Sizes, capabilities: Capabilities) -> Any:
    """What a slot's buffer holds at first: a number, a tensor or nested lists.

    Raises ComputeError where a number that the slot may be given does not fit its dtype on this device, or where the
    function of a constant raises.
    """
    dtype, found = resolve_dtype(slot.dtype, capabilities), []
    for value in slot.declared_values():
        if callable(value):
            found.append(_called(name, value, Step(capacity, capacity)))
            continue
        number = resolve_value(value, capabilities, capacity)
        if not holds(dtype, number):
            message = f"slot {name!r}: {number!r} does not fit {dtype_text(dtype)} on this backend"
            raise ComputeError(message)
        found.append(number)
    return found[0]


def _called(name: str, function: Callable[[Step], Any], step: Step) -> Any:
    try:
        return function(step)
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        blame(name, function, error)


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
    if tensor.is_meta:
        message = f"{_misfit(what, target, 'a tensor on meta')}, which has no data: name the device in the function"
        raise ComputeError(message)
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
        return tensor_of(value, target.dtype, target.dim())
    except (RuntimeError, TypeError, ValueError) as error:
        raise ComputeError(_misfit(what, target, f"{value!r}: {error}")) from error


def _misfit(what: str, target: torch.Tensor, got: str) -> str:
    return f"{what}: expected {dtype_text(target.dtype)} of shape {list(target.shape)}, got {got}"
