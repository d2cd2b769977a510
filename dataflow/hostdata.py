"""Host data: converts lists, arrays and host tensors that a batch has for a slot to tensors or bytes."""

import ctypes
import functools
import itertools
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch

from .capabilities import dtype_text
from .ragged import Ragged, mask_of
from .slots import Slot

HOST_KINDS: Final = (list, tuple, np.ndarray, np.generic, Ragged)
"""Types that a batch may have instead of a tensor."""
NOT_CARRIED: Final = (ValueError, TypeError, OverflowError, BufferError, struct.error)
"""Errors for host data that cannot be converted to bytes as it is."""
LETTERS: Final = {
    torch.int8: "b",
    torch.uint8: "B",
    torch.int16: "h",
    torch.int32: "i",
    torch.int64: "q",
    torch.float16: "e",
    torch.float32: "f",
    torch.float64: "d",
    torch.bool: "?",
}
"""The format letters of `struct` for Python's numbers, by dtype."""
_BOOLS: Final = frozenset({bool, np.bool_})
_BITS: Final = frozenset({0, 1})  # a list that contains neither 0 nor 1 has no bools, and need not be searched
_LISTS: Final = frozenset({list, tuple})
_DIMS: Final = 64  # the most dims that a torch tensor can have
_PAD_THEM: Final = "pad them to one length"


def tensor_of(value: Any, dtype: torch.dtype, wanted: Sequence[int] | None = None) -> torch.Tensor:
    """Make a host tensor of lists or arrays.

    An array keeps its dtype, and numbers in lists take `dtype` if it holds them.

    `wanted` is the slot's shape, if it is known; lists without a number take their inner dims from it. A bool does not
    count as a number, nor a float as an integer, and such a list keeps its own dtype. Raises RuntimeError, TypeError or
    ValueError if the data is ragged or not numeric, or has bools among numbers, masks, or values that `dtype` cannot
    hold.
    """
    if isinstance(value, np.ndarray | np.generic):
        _refuse_masks([value])
        array = np.asarray(value)
        if array.dtype == object:
            raise TypeError(f"an array of objects, as NumPy makes of None or ragged rows: give numbers; {_PAD_THEM}")
        flags = array.flags
        is_plain = flags.writeable and flags.c_contiguous and min(array.strides, default=0) >= 0  # one row: any stride
        return torch.from_numpy(array if is_plain else array.copy())
    if isinstance(value, Ragged):
        raise TypeError("rows of different lengths: declare the slot with ragged=True")
    numbers, shape = unnested(value, _DIMS if wanted is None else len(wanted))
    if not numbers:
        is_open = wanted is not None and [*wanted[: len(shape)]] == shape
        return torch.empty(wanted if is_open else shape, dtype=dtype, device="cpu")  # type: ignore[arg-type] # not None
    try:  # packing one list of numbers of the dtype's kind takes a tenth of torch's time
        made: torch.Tensor | None = torch.frombuffer(bytearray(bytes_of_list(numbers, dtype)), dtype=dtype)
    except NOT_CARRIED:
        made = None
    made = _converted(numbers, dtype) if made is None else made
    return made if len(shape) == 1 else made.view(*shape, *made.shape[1:])


def tensor_for(slot: Slot, value: Any, dtype: torch.dtype, wanted: Sequence[int]) -> torch.Tensor:
    """Make a host tensor of lists or arrays for a slot. Rows of different lengths are laid out if the slot allows them.

    Raises the errors of `tensor_of` and `laid_out`.
    """
    if slot.ragged and is_ragged(value):
        return laid_out(value, dtype, wanted, slot.pad)
    return tensor_of(value, dtype, wanted)


def is_ragged(value: Any) -> bool:
    """Return whether a value may have rows of different lengths: `Ragged`, or a list."""
    return isinstance(value, Ragged | list | tuple)


def laid_out(value: Any, dtype: torch.dtype, wanted: Sequence[int], pad: Any) -> torch.Tensor:
    """Lay out rows of different lengths in a host tensor.

    Args:
        value: `Ragged`, or a list of rows, each a list, a tuple or an array of one dim.
        dtype: The dtype of the tensor. Values in lists are converted to it, others must have it.
        wanted: The number of rows and columns.
        pad: The tail rule of the slot, whose value the rest of each row holds.

    Raises:
        TypeError: A row is not a row of numbers.
        ValueError: A row is longer than the columns, or there are more or fewer rows.
    """
    (rows, columns), rest = wanted, pad.value
    counts = value.counts if isinstance(value, Ragged) else _lengths(value)
    if len(counts) != rows:
        raise ValueError(f"it has {len(counts)} rows")
    over = np.flatnonzero(counts > columns)
    if len(over):
        raise ValueError(f"row {over[0]} has {counts[over[0]]} values, and the slot has room for {columns}")
    made = torch.full((rows, columns), rest, dtype=dtype, device="cpu")
    if not isinstance(value, Ragged) and _pack_rows(value, made, counts, rest):
        return made
    values = value.values if isinstance(value, Ragged) else _joined(value, dtype)
    if values.dtype != dtype:
        raise TypeError(f"its values are {dtype_text(values.dtype)}: convert them")
    is_value = torch.from_numpy(mask_of(counts, columns))
    if values.dim() == 1:
        return made.masked_scatter_(is_value, value.flat() if isinstance(value, Ragged) else values)
    columns = min(columns, values.shape[1])
    made[:, :columns] = values[:, :columns]
    return made.masked_fill_(~is_value, rest)


def _pack_rows(lists: Any, made: torch.Tensor, counts: "np.ndarray[Any, Any]", rest: Any) -> bool:
    """Pack lists into the rows of a tensor. Return False if a value does not fit its dtype, or may be a bool."""
    if made.dtype not in LETTERS or made.dtype == torch.bool:
        return False
    room, at, pace = made.view(torch.uint8).numpy().data.cast("B"), 0, made.stride(0) * made.itemsize
    try:
        for row in lists:
            _format(len(row), made.dtype).pack_into(room, at, *row)
            at += pace
    except NOT_CARRIED:
        return False
    numbers = made.numpy()
    bits = np.count_nonzero((numbers == 0) | (numbers == 1))  # a bool is one of these
    if bits > (made.numel() - counts.sum() if rest in _BITS else 0):
        return _BOOLS.isdisjoint(map(type, itertools.chain.from_iterable(lists)))
    return True


def _joined(rows: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of all rows, one after another."""
    if any(isinstance(row, np.ndarray) for row in rows):
        return tensor_of(np.concatenate(rows), dtype)
    return tensor_of([*itertools.chain.from_iterable(rows)], dtype, (-1,))


def _lengths(rows: Any) -> "np.ndarray[Any, Any]":
    """Return the length of each row. Raise TypeError if a row is not a list, a tuple or an array of one dim."""
    for number, row in enumerate(rows):
        if not (type(row) in _LISTS or (isinstance(row, np.ndarray) and row.ndim == 1)):
            raise TypeError(f"row {number} is {type(row).__name__}, expected a list of numbers")
    return np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))


def unnested(value: Any, dims: int) -> tuple[Any, list[int]]:
    """Flatten nested lists, and return the numbers and their shape. Lists of different lengths stay nested.

    Raises ValueError if lists are nested two dims deeper than they should be, since a list that contains itself has no
    end.
    """
    shape = [len(value)]
    while value and isinstance(value[0], list | tuple):
        if len(shape) > dims:
            raise ValueError(f"lists nested {len(shape) + 1} deep or deeper, for {dims} dims")
        lengths = {len(row) if isinstance(row, list | tuple) else None for row in value}
        if len(lengths) > 1:  # leave such lists to NumPy, which reports the error
            break
        shape.append(len(value[0]))
        value = list(itertools.chain.from_iterable(value))
    return value, shape


def _refuse_masks(values: Iterable[Any]) -> None:
    """Raise TypeError if one of the values is a masked array, since a tensor would drop its mask."""
    if any(isinstance(one, np.ma.MaskedArray) for one in values):
        raise TypeError("a masked array, whose mask would be lost: fill the masked elements first, array.filled(...)")


def _checked_array(numbers: Any) -> "np.ndarray[Any, Any]":
    """Make an array of a list. Raise TypeError or ValueError for ragged rows, and for values that are not numbers."""
    _refuse_masks(numbers)
    if any(isinstance(one, torch.Tensor) and one.ndim for one in numbers):
        raise TypeError(f"a list of tensors: pass one tensor, for example from torch.stack; if ragged, {_PAD_THEM}")
    try:
        array = np.asarray(numbers)
    except ValueError as error:
        raise ValueError(f"its rows are ragged, or mixed with numbers: {_PAD_THEM}") from error
    if array.dtype.kind not in "biufc":  # text or objects, such as None and integers of more than 64 bits
        kinds = sorted({type(one).__name__ for one in numbers})
        raise TypeError(f"it holds {' and '.join(kinds)}; give numbers of at most 64 bits")
    return array


def _converted(numbers: Any, dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor through NumPy, for dtypes that `struct` has no format for, and numbers of another kind."""
    array = _checked_array(numbers)
    made = torch.from_numpy(array)
    if made.dtype == torch.bool:
        return made
    if not _BOOLS.isdisjoint(map(type, numbers)):
        raise TypeError("bools and numbers together")
    if dtype.is_complex or made.is_complex():
        return made.to(dtype) if dtype.is_complex else made
    if dtype.is_floating_point or made.is_floating_point():  # convert directly, so that each value is rounded only once
        exact = made.double()
        made = exact.to(dtype if dtype.is_floating_point else torch.float32)
        lost = exact.isfinite() & ~made.double().isfinite()
        if lost.any():
            raise ValueError(f"{dtype_text(made.dtype)} cannot hold {exact[lost][0].item()}")
    elif dtype != torch.bool:
        out = (array < torch.iinfo(dtype).min) | (array > torch.iinfo(dtype).max)
        if out.any():
            raise ValueError(f"{dtype_text(dtype)} cannot hold {array[out][0]}")
        made = made.to(dtype)
    return made


def bytes_of_tensor(source: torch.Tensor) -> bytes:
    """Read a dense host tensor. Raise ValueError if its memory was freed."""
    address, nbytes = source.data_ptr(), source.nbytes
    if nbytes and not address:
        raise ValueError("its memory was freed")
    return ctypes.string_at(address, nbytes)


def bytes_of_list(source: Any, dtype: torch.dtype) -> bytes:
    """Pack a list of numbers.

    Raise one of the errors in `NOT_CARRIED` for bools among numbers, and for numbers that do not fit the dtype.
    """
    pack = _format(len(source), dtype).pack
    alike = _bools if dtype == torch.bool else _no_bools
    return pack(*alike(source))


@functools.lru_cache(1024)
def _format(numbers: int, dtype: torch.dtype) -> struct.Struct:
    """Return the format that packs this many numbers. Raise TypeError if `struct` has none for the dtype."""
    if dtype not in LETTERS:
        raise TypeError(f"Python's struct module has no format for {dtype_text(dtype)}")
    return struct.Struct(f"={numbers}{LETTERS[dtype]}")  # without "=", C's own floats would overflow to infinity


def _bools(source: Any) -> Any:
    """Check that a list has only bools."""
    if type(source) not in _LISTS or any(type(value) is not bool for value in source):
        raise ValueError("expected bools alone")
    return source


def _no_bools(source: Any) -> Any:
    """Check that a value is a list without bools."""
    if type(source) not in _LISTS:
        raise ValueError("expected a list or tuple")
    if not _BITS.isdisjoint(source) and not _BOOLS.isdisjoint(map(type, source)):
        raise ValueError("expected numbers, got bools")
    return source
