"""Ragged rows of requests that a loop keeps on the host, to append to them."""

import array
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from ...dataflow.buffers import Buffer
from ...dataflow.capabilities import dtype_text
from ...dataflow.edits import Keys
from ...dataflow.errors import BatchError
from ...dataflow.hostdata import LETTERS, NOT_CARRIED, bytes_of_list
from ...dataflow.ragged import Ragged, without_nesting


class RaggedRows:
    """The rows of a ragged slot.

    Attributes:
        rows: By live request, the values of its row. A row that came as a tensor on the device is left out, because the
            host would have to wait for it.
    """

    def __init__(self, to: Buffer) -> None:
        """Take the slot's buffer."""
        self._to = to
        self.rows: dict[Hashable, Sequence[Any]] = {}

    def note(self, keys: Keys, source: Any) -> None:
        """Note the rows of some requests. The source was admitted."""
        source = without_nesting(source)
        values = source.values if isinstance(source, Ragged) else source
        if isinstance(values, torch.Tensor) and not values.is_cpu:
            self.forget(keys)
        else:
            rows = source if isinstance(source, list | tuple) else source.tolist()
            self.rows.update(zip(keys, map(list, rows), strict=True))

    def forget(self, keys: Keys) -> None:
        """Forget the rows of some requests."""
        for key in keys:
            self.rows.pop(key, None)

    def row(self, key: Hashable) -> Sequence[Any]:
        """Return a request's row. Raise BatchError if it is on the device."""
        if key not in self.rows:
            raise BatchError(
                f"slot {self._to.name!r}: the host has no row of request {key!r}: it came as a tensor on the device, "
                "or these requests lack the slot; give rows in host memory"
            )
        return self.rows[key]

    def appended(self, keys: Keys, added: Any) -> dict[Hashable, Sequence[Any]]:
        """Return rows with further values, of those requests that get any. Raise BatchError if they do not fit."""
        name = self._to.name
        dtype = self._to.tensor.dtype
        room = self._to.tensor.shape[1]
        if not isinstance(added, list | tuple) or len(added) != len(keys):
            raise BatchError(f"slot {name!r}: append takes a list with a list of values for each request")
        if LETTERS.get(dtype, "e") in "e?":  # which Python's arrays do not have
            raise BatchError(f"slot {name!r}: append takes no values of {dtype_text(dtype)}: give whole rows, by edit")
        found = dict[Hashable, Sequence[Any]]()
        for key, values in zip(keys, added, strict=True):
            before = self.row(key)
            try:
                row = array.array(LETTERS[dtype], before)
                row.frombytes(bytes_of_list(values, dtype))
            except NOT_CARRIED as error:
                what = f"slot {name!r}: values for request {key!r}: {error}"
                raise BatchError(f"{what}; give a list of numbers that {dtype_text(dtype)} holds") from error
            if len(row) > room:
                raise BatchError(
                    f"slot {name!r}: the row of request {key!r} has {len(row) - len(values)} values and gets "
                    f"{len(values)} more, and the slot has room for {room}"
                )
            if values:
                found[key] = row
        return found

    def table(self, rows: Mapping[Hashable, Sequence[Any]]) -> torch.Tensor:
        """Return whole rows that were appended to, with the pad value behind the values."""
        tensor: torch.Tensor = self._to.tensor
        pad: Any = self._to.slot.pad  # a number
        rest: Any = array.array(LETTERS[tensor.dtype], [pad.value]) * tensor.shape[1]
        whole = bytearray().join([row + rest[len(row) :] for row in rows.values()])
        return torch.frombuffer(whole, dtype=tensor.dtype).view(len(rows), -1)
