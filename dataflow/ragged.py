"""Ragged rows: values of rows whose lengths differ, as engines have page tables."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def _numbers(what: str, name: str, value: Any) -> Any:
    """Copy whole numbers of one dim to an array. Raise TypeError for anything else."""
    found = np.asarray(value.detach() if isinstance(value, torch.Tensor) else value)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise TypeError(f"{what}: {name} are whole numbers in one dim, got {found.dtype} of shape {[*found.shape]}")
    return found.astype(np.int64)


class Ragged:
    """Rows of different lengths, for a slot that is declared with `ragged=True`.

    Give `offsets` if all values lie one after another, or `counts` if each row lies in one of a wider array.

    Values on a device are laid out there, and the host does not wait for it. So nothing is checked: a row that is too
    long, or leads out of the values, is an index out of range on the device.

    Args:
        values: An array or a tensor: of one dim with `offsets`, of two with `counts`.
        offsets: Where each row begins in `values`, and where the last one ends: whole numbers, one more than rows. For
            values on a device, a tensor on that device.
        counts: How many of its first columns are each row's: whole numbers, one for each row. For values on a device, a
            tensor on that device.

    Raises:
        TypeError: Not exactly one of `offsets` and `counts` is given, or an argument is not an array of numbers.
        ValueError: Offsets decrease or lead out of the values, or a count is not between 0 and the number of columns.
    """

    __slots__ = ("counts", "longest", "offsets", "values")

    def __init__(self, values: Any, *, offsets: Any = None, counts: Any = None) -> None:
        if (offsets is None) == (counts is None):
            raise TypeError("Ragged takes offsets= for rows that follow one another, or counts= for rows of an array")
        tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))
        if tensor.layout != torch.strided or tensor.dim() != (1 if counts is None else 2):
            dims = "one dim" if counts is None else "two dims"
            raise TypeError(f"Ragged: values have {dims}, got {tensor.layout} of shape {[*tensor.shape]}")
        self.values = tensor.detach().contiguous()
        name, given = ("offsets", offsets) if counts is None else ("counts", counts)
        if tensor.is_cpu:
            numbers = _numbers("Ragged", name, given)
        elif isinstance(given, torch.Tensor) and given.device == tensor.device and given.dim() == 1:
            numbers = given
        else:
            raise TypeError(f"Ragged: values are on {tensor.device}: give {name} as a tensor of one dim there")
        self.offsets: Any = numbers if counts is None else None
        self.counts: Any = numbers[1:] - numbers[:-1] if counts is None else numbers
        self.longest = self._check() if tensor.is_cpu else -1

    def _check(self) -> int:
        """Return the length of the longest row. Raise ValueError if a row leads out of the values."""
        columns = self.values.shape[-1]
        counts = self.counts
        ends = self.offsets
        which = ""
        longest = int(counts.view(np.uint64).max(initial=0))  # a negative count is larger than all others
        if longest > columns:
            row = np.argmax((counts < 0) | (counts > columns))
            which = f"; row {row} has {counts[row]}"
        if ends is None:
            rows = len(self.values)
            if len(counts) != rows or which:
                raise ValueError(f"Ragged: {rows} counts between 0 and {columns} are needed, got {len(counts)}{which}")
        elif not len(ends) or ends.item(0) < 0 or ends.item(-1) > columns or which:
            raise ValueError(f"Ragged: offsets grow from 0 to at most {columns} values, got {ends}{which}")
        return longest

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.counts)

    def __repr__(self) -> str:
        """Return one line."""
        return f"<Ragged: {len(self)} rows of {[*self.values.shape]} values on {self.values.device}>"

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and the length of the longest, or -1 if that is on a device."""
        return len(self), self.longest

    def flat(self) -> torch.Tensor:
        """Return the values of all rows, one after another. They are in host memory."""
        if self.offsets is not None:
            return self.values[self.offsets.item(0) : self.offsets.item(-1)]
        return self.values.masked_select(torch.from_numpy(mask_of(self.counts, self.values.shape[1])))

    def on_device(self, columns: int, pad: float) -> torch.Tensor:
        """Lay out the rows in a table on the device of the values, without waiting for it.

        Args:
            columns: The number of columns of the table.
            pad: What the rest of each row holds.
        """
        flat = torch.nn.functional.pad(self.values.reshape(-1), (0, 1), value=pad)
        column = torch.arange(columns, device=flat.device)
        counts = self.counts[:, None]
        begins = self.offsets
        if begins is None:
            begins = torch.arange(len(self) + 1, device=flat.device) * self.values.shape[1]
        index = torch.where(column < counts, begins[:-1, None] + column, len(flat) - 1)
        fits = (counts >= 0) & (counts <= columns)
        return flat[torch.where(fits, index, len(flat))]  # out of range if it does not fit, which the device reports

    def tolist(self) -> list[list[Any]]:
        """Return a list for each row. This waits for values on a device."""
        values: list[Any] = self.values.tolist()
        if self.offsets is None:
            return [row[:count] for row, count in zip(values, self.counts.tolist(), strict=True)]
        return [values[start:stop] for start, stop in itertools.pairwise(self.offsets.tolist())]


class Changed:
    """All ragged rows of a slot, and which of them differ from those of the last batch.

    Only these rows are sent, and rows behind those of the last batch. All rows are sent if the slot may not hold those
    of the last batch any more: after a batch of another bucket, an eager step, `steps()`, or an error; in memory that a
    pool shares or that you have bound; and where no kernel lays the rows out.

    Args:
        value: A list of all rows. `Ragged` is sent whole for less than it costs to choose rows of it.
        rows: The numbers of the rows that differ.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: There is no such row, or it is named twice.
    """

    __slots__ = ("rows", "value")

    def __init__(self, value: Sequence[Any], *, rows: Any) -> None:
        if not isinstance(value, list | tuple):
            raise TypeError(f"Changed takes a list of rows, got {type(value).__name__}")
        self.value = value
        self.rows = set[int]()
        for row in _numbers("Changed", "rows", rows).tolist():
            if row in self.rows or not 0 <= row < len(value):
                raise ValueError(f"Changed: row {row} is named twice, or is not one of {len(value)} rows")
            self.rows.add(row)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.value)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and -1, since the lengths of rows are not read."""
        return len(self), -1

    def since(self, kept: int) -> tuple[list[int], list[Any]]:
        """Return the numbers of the rows to send, and these rows. kept: How many rows the slot has."""
        numbers = sorted(self.rows.union(range(kept, len(self))))
        return numbers, [self.value[number] for number in numbers]


def without_nesting(value: Any) -> Any:
    """Return a jagged nested tensor of two dims as `Ragged`, the rows of `Changed`, and other values as they are."""
    if isinstance(value, Changed):
        return value.value
    if not (isinstance(value, torch.Tensor) and value.layout == torch.jagged and value.dim() == 2):  # noqa: PLR2004 - rows and columns
        return value
    jagged: Any = value  # torch's annotations do not have its methods
    if jagged.lengths() is not None:  # its rows have gaps between them
        jagged = jagged.contiguous()
    return Ragged(jagged.values(), offsets=jagged.offsets())


def mask_of(counts: Any, columns: int) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Return a mask of the first columns of each row, as many as it counts."""
    mask: np.ndarray[Any, np.dtype[np.bool_]] = np.arange(columns) < counts[:, None]
    return mask
