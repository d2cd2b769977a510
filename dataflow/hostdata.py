"""Host data: converts lists, arrays and host tensors that a batch has for a slot to tensors or bytes."""

import contextlib
import ctypes
import functools
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, cast

import numpy as np
import torch

from .capabilities import dtype_text
from .packet import KEPT_ROW, WORD
from .ragged import Changed, Ragged, mask_of, without_nesting
from .slots import Slot
from .tails import Pad

HOST_KINDS: Final = (list, tuple, np.ndarray, np.generic, Ragged, Changed)
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
_LENGTHS: Final = 1024  # the most lengths of lists for which formats are kept
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
    if isinstance(value, Ragged | Changed):
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

    Raises the errors of `tensor_of` and `ragged_of`.
    """
    if slot.ragged and is_ragged(value):
        return laid_out(slot, dtype, value, wanted)
    return tensor_of(value, dtype, wanted)


def plain_rows(slot: Slot, value: Any, columns: int) -> Any:
    """Return a jagged nested tensor as `Ragged`, ragged rows on a device as a table there, and other values as given.

    `columns` is the size of the ragged slot's second dim.
    """
    found = value if isinstance(value, Changed) else without_nesting(value)
    if isinstance(found, Ragged) and not found.values.is_cpu:
        pad: Any = cast("Pad", slot.pad).value
        return found.on_device(columns, pad)
    return found


def is_ragged(value: Any) -> bool:
    """Return whether a value may have rows of different lengths: `Ragged`, `Changed`, or a list."""
    return isinstance(value, Ragged | Changed | list | tuple)


def laid_out(slot: Slot, dtype: torch.dtype, value: Any, wanted: Sequence[int]) -> torch.Tensor:
    """Lay out rows of different lengths in a host tensor, whose other elements hold the slot's pad value."""
    found = ragged_of(slot, dtype, value, wanted)
    pad: Any = cast("Pad", slot.pad).value
    made = torch.full(tuple(wanted), pad, dtype=dtype, device="cpu")
    is_value = torch.from_numpy(mask_of(found.counts, wanted[1]))
    if found.offsets is not None:
        return made.masked_scatter_(is_value, found.flat().to(dtype))
    values = found.values[:, : wanted[1]]  # whole rows, since it takes longer to choose their values
    made[:, : values.shape[1]] = values
    return made.masked_fill_(~is_value, pad)


def bytes_of_ragged(
    slot: Slot, dtype: torch.dtype, kept: Callable[[], int], value: Any, wanted: Sequence[int]
) -> bytes:
    """Pack rows of different lengths as the kernel reads them; see `.packet`.

    `kept` returns how many of the slot's rows are those of the last batch.
    """
    rows, columns = wanted
    first = WORD // dtype.itemsize * rows
    if not isinstance(value, Changed):
        return b"".join(_packed_rows(slot, dtype, value, wanted, first))
    numbers, sent = value.since(kept())
    words: Any = np.full(rows, KEPT_ROW)
    words[numbers], data = _packed_rows(slot, dtype, sent, (len(numbers), columns), first)
    return b"".join((words, data))


def _packed_rows(slot: Slot, dtype: torch.dtype, value: Any, wanted: Sequence[int], first: int) -> tuple[Any, Any]:
    """Return an array of a word for each row, and the values, which begin at element `first` of the packed data."""
    rows, columns = wanted
    if type(value) in _LISTS and len(value) == rows:  # an object for all rows would take as long as packing them
        with contextlib.suppress(*NOT_CARRIED):
            data = _joined(value, dtype)
            lengths = [*map(len, value)]
            if data is not None and max(lengths, default=0) <= columns:
                counts = np.array(lengths, np.int64)
                return (counts << 32) + (counts.cumsum() - counts + first), data
    return _packed_ragged(ragged_of(slot, dtype, value, wanted), dtype, first, columns)


def _packed_ragged(found: Ragged, dtype: torch.dtype, first: int, columns: int) -> tuple[Any, bytes]:
    """Return an array of a word for each row, and the values, which begin at element `first` of the packed data."""
    words = found.counts << 32
    values = found.values if found.values.dtype == dtype else found.values.to(dtype)
    if found.offsets is not None:
        start = found.offsets.item(0)
        stop = found.offsets.item(-1)
        words += found.offsets[:-1]
        words += first - start
        return words, bytes_of_tensor(values, start, stop)
    values = values[:, :columns].contiguous()  # whole rows, as above
    words += np.arange(len(found)) * values.shape[1] + first
    return words, bytes_of_tensor(values)


def ragged_of(slot: Slot, dtype: torch.dtype, value: Any, wanted: Sequence[int]) -> Ragged:
    """Return rows of different lengths as `Ragged`.

    Args:
        slot: Their slot.
        dtype: The slot's dtype. Values in lists become it, others must have it or one that the slot converts.
        value: `Ragged` in host memory, or a list of rows, each a list, a tuple or an array of one dim; or `Changed`.
        wanted: The number of rows, and the largest number of values in a row.

    Raises:
        TypeError: A row is not a row of numbers.
        ValueError: A row is too long, there are more or fewer rows, or the dtype cannot hold a number.
    """
    rows, columns = wanted
    value = value.value if isinstance(value, Changed) else value
    found = value if isinstance(value, Ragged) else _ragged_of_lists(value, dtype)
    if len(found) != rows:
        raise ValueError(f"it has {len(found)} rows")
    if found.longest > columns:
        row = np.argmax(found.counts > columns)
        raise ValueError(f"row {row} has {found.counts[row]} values, and the slot has room for {columns}")
    own = found.values.dtype
    if own != dtype and own not in slot.converts_from():
        raise TypeError(f"its values are {dtype_text(own)}: convert them, or declare converts=({own},)")
    return found


def _ragged_of_lists(rows: Sequence[Any], dtype: torch.dtype) -> Ragged:
    """Make `Ragged` of rows that are lists, tuples or arrays. Raise TypeError or ValueError, which names a row."""
    kinds = {*map(type, rows)}
    made: torch.Tensor | None = None
    with contextlib.suppress(*NOT_CARRIED):
        if kinds == {np.ndarray}:
            made = torch.from_numpy(np.concatenate(rows, dtype=LETTERS.get(dtype), casting="no"))
        else:
            joined = _joined(rows, dtype)
            made = None if joined is None else torch.frombuffer(joined, dtype=dtype)
    if made is None or made.dim() != 1 or made.dtype != dtype:
        made = torch.cat([torch.empty(0, dtype=dtype, device="cpu"), *_row_by_row(rows, dtype)])
    ends = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=ends[1:])
    return Ragged(made, offsets=ends)


def _joined(rows: Sequence[Any], dtype: torch.dtype) -> bytearray | None:
    """Pack the numbers of lists, one after another. Return None if one may be a bool, and raise if one does not fit."""
    if not _LISTS.issuperset(map(type, rows)):
        raise TypeError("expected lists or tuples")
    packers = _packers(dtype)
    packed = bytearray().join([packers[len(row)](*row) for row in rows])  # one list of all numbers would take longer
    data = np.frombuffer(packed, LETTERS.get(dtype))
    bits = (data == 0) | (data == 1)  # a bool is one of these
    if bits.any():
        ends = np.cumsum([*map(len, rows)])
        suspects = {*np.searchsorted(ends, np.flatnonzero(bits), "right").tolist()}
        has_bools = any(not _BOOLS.isdisjoint(map(type, rows[number])) for number in suspects)
        if has_bools or dtype == torch.bool:
            return None
    return packed


class _Packers(dict[int, Callable[..., bytes]]):
    """Packs numbers of one dtype, by how many they are. Raises TypeError if `struct` has no format for the dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __missing__(self, numbers: int) -> Callable[..., bytes]:
        if len(self) == _LENGTHS:
            self.clear()
        self[numbers] = pack = _format(numbers, self._dtype).pack
        return pack


_packers: Final = functools.cache(_Packers)


def _row_by_row(rows: Sequence[Any], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield each row as a tensor. Raise TypeError or ValueError for one that is malformed, which names it."""
    for number, row in enumerate(rows):
        if not (type(row) in _LISTS or (isinstance(row, np.ndarray) and row.ndim == 1)):
            raise TypeError(f"row {number} is {type(row).__name__}, expected a list of numbers")
        try:
            made = tensor_of(row, dtype, (-1,))
        except (RuntimeError, TypeError, ValueError) as error:
            raise type(error)(f"row {number}: {error}") from error
        if made.dim() != 1 or made.dtype != dtype:
            got = f"{dtype_text(made.dtype)} of shape {[*made.shape]}"
            raise TypeError(f"row {number} is {got}, expected numbers of {dtype_text(dtype)} in one dim: convert it")
        yield made


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
    if array.dtype == np.uint64:
        array = array.view(np.uint64)  # NumPy may call it `ulonglong`, which torch does not know
    made = torch.from_numpy(array)
    if made.dtype == torch.bool:
        return made
    if not _BOOLS.isdisjoint(map(type, numbers)):
        raise TypeError("bools and numbers together")
    is_whole = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if is_whole and made.is_floating_point() and all(isinstance(one, int | np.integer) for one in numbers):
        array = np.asarray(numbers, dtype=object)  # NumPy makes floats of numbers that int64 and uint64 hold apart
        _check_range(array, dtype)
        return torch.from_numpy(array.astype(np.uint64))
    if dtype.is_complex or made.is_complex():
        return made.to(dtype) if dtype.is_complex else made
    if dtype.is_floating_point or made.is_floating_point():  # convert directly, so that each value is rounded only once
        exact = made.double()
        made = exact.to(dtype if dtype.is_floating_point else torch.float32)
        lost = exact.isfinite() & ~made.double().isfinite()
        if lost.any():
            raise ValueError(f"{dtype_text(made.dtype)} cannot hold {exact[lost][0].item()}")
    elif dtype != torch.bool:
        _check_range(array, dtype)
        made = made.to(dtype)
    return made


def _check_range(array: "np.ndarray[Any, Any]", dtype: torch.dtype) -> None:
    """Raise ValueError for a whole number that the dtype cannot hold."""
    out = (array < torch.iinfo(dtype).min) | (array > torch.iinfo(dtype).max)
    if out.any():
        raise ValueError(f"{dtype_text(dtype)} cannot hold {array[out][0]}")


def bytes_of_tensor(source: torch.Tensor, start: int = 0, stop: int | None = None) -> bytes:
    """Read a dense host tensor, or some of its elements. Raise ValueError if its memory was freed."""
    address = source.data_ptr()
    size = source.itemsize
    nbytes = source.nbytes if stop is None else (stop - start) * size
    if nbytes and not address:
        raise ValueError("its memory was freed")
    return ctypes.string_at(address + start * size, nbytes)


def bytes_of_list(source: Any, dtype: torch.dtype) -> bytes:
    """Pack a list of numbers.

    Raise one of the errors in `NOT_CARRIED` for bools among numbers, and for numbers that do not fit the dtype.
    """
    pack = _packers(dtype)[len(source)]
    alike = _bools if dtype == torch.bool else _no_bools
    return pack(*alike(source))


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
