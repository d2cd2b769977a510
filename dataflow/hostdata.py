"""Host data: lists, arrays and host tensors that a batch brings for a slot, as tensors or as bytes."""

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

HOST_KINDS: Final = (list, tuple, np.ndarray, np.generic)
"""What a batch may bring in a tensor's place."""
NOT_CARRIED: Final = (ValueError, TypeError, OverflowError, BufferError, struct.error)
"""What a carrier raises for a source that it cannot make bytes of."""
_LETTERS: Final = {
    torch.int8: "b",
    torch.uint8: "B",
    torch.int16: "h",
    torch.int32: "i",
    torch.int64: "q",
    torch.float32: "f",
    torch.float64: "d",
    torch.bool: "?",
}
"""The standard library's letters for dtypes that Python's own numbers turn into."""


def letter_of(dtype: torch.dtype) -> str | None:
    """The letter under which `struct` packs numbers of a dtype, or None where it has none."""
    return _LETTERS.get(dtype)


def tensor_of(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """A host tensor of lists or arrays. An array keeps its dtype; numbers in lists take `dtype` where it holds them.

    A bool is no number here, and a float no index: such a list comes back in its own dtype. Raises RuntimeError,
    TypeError or ValueError, as torch does, for what is no box of numbers.
    """
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return torch.from_numpy(array if array.flags.writeable and array.flags.c_contiguous else array.copy())
    packed = _packed(value, dtype)
    if packed is not None:
        return packed
    loose = torch.as_tensor(value) if len(value) else torch.empty(0, dtype=dtype)
    if loose.dtype == torch.bool or loose.is_floating_point():
        return loose if loose.dtype == torch.bool or not dtype.is_floating_point else loose.to(dtype)
    return loose if dtype == torch.bool else torch.tensor(value, dtype=dtype)


def tensors_of(values: Sequence[Any], dtypes: Sequence[torch.dtype]) -> tuple[Any, ...] | None:
    """The same with tensors for lists and arrays; None where there are none of these, or one is no box of numbers."""
    if not any(isinstance(value, HOST_KINDS) for value in values):
        return None
    try:
        return tuple(
            [
                tensor_of(value, dtype) if isinstance(value, HOST_KINDS) else value
                for value, dtype in zip(values, dtypes, strict=True)
            ]
        )
    except (RuntimeError, TypeError, ValueError):  # which whoever admits sources says in words
        return None


def _packed(value: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """A tensor of one list of numbers of the dtype's kind, at a tenth of torch's time; None where it is not that."""
    carry = list_carrier(len(value), dtype) if len(value) else None
    if carry is None:
        return None
    try:
        return torch.frombuffer(bytearray(carry(value)), dtype=dtype)
    except NOT_CARRIED:
        return None


def array_dtype(array: np.ndarray[Any, Any]) -> torch.dtype | None:
    """The torch dtype of an array, or None where torch has none for it."""
    try:
        return torch.from_numpy(np.empty(0, array.dtype)).dtype
    except (TypeError, ValueError):
        return None


Bytes = Any
"""Bytes, or what holds them: anything that `bytes.join` takes."""

Carrier = Callable[[Any], Bytes]
"""Turns a host source into bytes, or into something that holds them; ValueError or struct.error where it cannot."""


def carry_array(source: Any) -> Any:
    """An array as it is: what joins bytes reads it, if it lies in one piece."""
    return source


def tensor_carrier(nbytes: int) -> Carrier:
    """For dense host tensors of so many bytes."""

    def carry(source: torch.Tensor) -> bytes:
        return ctypes.string_at(source.data_ptr(), nbytes)

    return carry


def list_carrier(rows: int, dtype: torch.dtype) -> Carrier | None:
    """For lists of so many numbers; None where Python has no bytes for the dtype."""
    letter = letter_of(dtype)
    if letter is None:
        return None
    pack = struct.Struct(f"{rows}{letter}").pack
    if dtype == torch.bool:
        return lambda source: pack(*_only(source, bool))
    return lambda source: pack(*_no_bool_first(source))


def _only(source: Any, kind: type) -> Any:
    if any(type(value) is not kind for value in source):
        message = f"expected {kind.__name__} alone"
        raise ValueError(message)
    return source


def _no_bool_first(source: Any) -> Any:
    """A list that begins with a bool is taken for one of bools, which are no numbers."""
    if source and type(source[0]) is bool:
        message = "expected numbers, got bools"
        raise ValueError(message)
    return source
