"""Ragged rows: values of rows whose lengths differ, as engines have page tables."""

from typing import Any

import numpy as np
import torch


def _numbers(name: str, value: Any) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return whole numbers of one dim as an array. Raise TypeError or ValueError for anything else."""
    found = np.asarray(value.detach() if isinstance(value, torch.Tensor) else value)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise TypeError(f"Ragged: {name} are whole numbers in one dim, got {found.dtype} of shape {[*found.shape]}")
    return found.astype(np.int64, copy=False)


class Ragged:
    """Rows of different lengths in host memory, for a slot that is declared with `ragged=True`.

    Give `offsets` if all values lie one after another, or `counts` if each row lies in one of a wider array.

    Args:
        values: An array or a tensor in host memory: of one dim with `offsets`, of two with `counts`.
        offsets: Where each row begins in `values`, and where the last one ends: whole numbers, one more than rows.
        counts: How many of its first columns are each row's: whole numbers, one for each row.

    Raises:
        TypeError: Not exactly one of `offsets` and `counts` is given, or an argument is not an array of numbers.
        ValueError: Offsets decrease or lead out of the values, or a count is not between 0 and the number of columns.
    """

    __slots__ = ("counts", "offsets", "values")

    def __init__(self, values: Any, *, offsets: Any = None, counts: Any = None) -> None:
        if (offsets is None) == (counts is None):
            raise TypeError("Ragged takes offsets= for rows that follow one another, or counts= for rows of an array")
        tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))
        if not tensor.is_cpu or tensor.layout != torch.strided or tensor.dim() != (1 if counts is None else 2):
            dims, got = "one dim" if counts is None else "two dims", f"{[*tensor.shape]} on {tensor.device}"
            raise TypeError(f"Ragged: values are in host memory and have {dims}, got {got}")
        self.values, self.offsets = tensor.detach(), None
        if counts is None:
            self.offsets = ends = _numbers("offsets", offsets)
            if not len(ends) or ends[0] < 0 or ends[-1] > len(tensor) or (np.diff(ends) < 0).any():
                raise ValueError(f"Ragged: offsets grow from 0 to at most {len(tensor)} values, got {ends}")
            self.counts = np.diff(ends)
            return
        self.counts = _numbers("counts", counts)
        rows, columns = tensor.shape
        if len(self.counts) != rows or (rows and not 0 <= self.counts.min() <= self.counts.max() <= columns):
            raise ValueError(f"Ragged: {rows} counts between 0 and {columns} are needed, got {self.counts}")

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.counts)

    def __repr__(self) -> str:
        """Return one line."""
        return f"<Ragged: {len(self)} rows, {int(self.counts.sum())} values>"

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and the length of the longest."""
        return len(self), int(self.counts.max(initial=0))

    def flat(self) -> torch.Tensor:
        """Return the values of all rows, one after another."""
        if self.offsets is not None:
            return self.values[self.offsets[0] : self.offsets[-1]]
        return self.values[torch.from_numpy(mask_of(self.counts, self.values.shape[1]))]

    def tolist(self) -> list[list[Any]]:
        """Return a list for each row."""
        ends = np.cumsum(self.counts)
        numbers: list[Any] = self.flat().tolist()
        return [numbers[end - count : end] for count, end in zip(self.counts, ends, strict=True)]


def mask_of(counts: Any, columns: int) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Return a mask of the first columns of each row, as many as it counts."""
    mask: np.ndarray[Any, np.dtype[np.bool_]] = np.arange(columns) < counts[:, None]
    return mask
