"""Ragged rows of requests that a loop keeps on the host, to append to them."""

from collections.abc import Hashable, KeysView, Mapping
from typing import Any

import torch

from ...dataflow.buffers import Buffer
from ...dataflow.edits import Keys
from ...dataflow.errors import BatchError
from ...dataflow.hostdata import NOT_CARRIED, bytes_of_list, bytes_of_tensor
from ...dataflow.sources import Compute


class RaggedRows:
    """The rows of a ragged slot.

    Attributes:
        length: What gives the length that rows must have, or None.
        rows: By live request, the values of its row, or their bytes once they were needed, and their count. A row that
            came as a tensor on the device is left out, because the host would have to wait for it.
    """

    def __init__(self, to: Buffer) -> None:
        """Take the slot's buffer."""
        self._slot, self._dtype, self._room = to.name, to.tensor.dtype, to.tensor.shape[1]
        pad: Any = to.slot.pad
        self.length = to.slot.ragged if isinstance(to.slot.ragged, Compute) else None
        self._rest = bytes_of_tensor(torch.full((self._room,), pad.value, dtype=self._dtype, device="cpu"))
        self.rows: dict[Hashable, tuple[list[Any] | bytes, int]] = {}

    def note(self, keys: Keys, source: Any) -> None:
        """Note the rows of some requests. The source was admitted."""
        if isinstance(source, torch.Tensor) and not source.is_cpu:
            self.forget(keys)
            return
        rows = source if isinstance(source, list | tuple) else source.tolist()
        self.rows.update((key, ([*row], len(row))) for key, row in zip(keys, rows, strict=True))

    def forget(self, keys: Keys) -> None:
        """Forget the rows of some requests."""
        for key in keys:
            self.rows.pop(key, None)

    def counts(self, keys: KeysView[Hashable]) -> list[int]:
        """Return the number of values in some requests' rows. Raise BatchError if one is on the device."""
        for key in keys - self.rows.keys():
            self._bytes_of(key)
        return [self.rows[key][1] for key in keys]

    def appended(self, keys: Keys, added: Any) -> dict[Hashable, tuple[bytes, int]]:
        """Return rows with further values, of those requests that get any. Raise BatchError if they do not fit."""
        if not isinstance(added, list | tuple) or len(added) != len(keys):
            raise BatchError(f"slot {self._slot!r}: append takes a list with a list of values for each request")
        found = dict[Hashable, tuple[bytes, int]]()
        for key, values in zip(keys, added, strict=True):
            row, new = self._bytes_of(key), self._packed(key, values)
            count = self.rows[key][1] + len(values)
            if count > self._room:
                raise BatchError(
                    f"slot {self._slot!r}: the row of request {key!r} has {count - len(values)} values and gets "
                    f"{len(values)} more, and the slot has room for {self._room}"
                )
            if new:
                found[key] = row + new, count
        return found

    def table(self, rows: Mapping[Hashable, tuple[bytes, int]]) -> torch.Tensor:
        """Return whole rows, with the pad value behind the values."""
        whole = bytearray().join([row + self._rest[len(row) :] for row, _ in rows.values()])
        return torch.frombuffer(whole, dtype=self._dtype).view(len(rows), self._room)

    def _bytes_of(self, key: Hashable) -> bytes:
        if key not in self.rows:
            raise BatchError(
                f"slot {self._slot!r}: the row of request {key!r} came as a tensor on the device, which the host does "
                "not read: give rows in host memory"
            )
        row, count = self.rows[key]
        if isinstance(row, list):
            row = self._packed(key, row)
            self.rows[key] = row, count
        return row

    def _packed(self, key: Hashable, values: Any) -> bytes:
        try:
            return bytes_of_list(values, self._dtype)
        except NOT_CARRIED as error:
            raise BatchError(f"slot {self._slot!r}: values for request {key!r}: {error}") from error
