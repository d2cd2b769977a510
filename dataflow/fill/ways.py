"""Ways: how one source is written to its slot: from its address, converted first, or as bytes in the packet."""

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import attrs
import numpy as np
import torch

from ..admission import admitted, dense_of, is_hosted, is_in_place, lane_takes
from ..axes import Extent
from ..buffers import Buffer, Buffers
from ..hostdata import NOT_CARRIED, bytes_of_list, bytes_of_ragged, bytes_of_tensor, is_ragged
from ..packet import RAGGED, Move, row_stride
from .reach import Rows

Convert = Callable[..., Any]
FEW_ROWS: Final = 4
"""The most outer rows that are copied by address one by one. A copy by torch takes as long as this many."""


@attrs.frozen(eq=False)
class Way:
    """How one source is written to its slot.

    Attributes:
        slot: The slot's name.
        target: The slot's buffer, at full capacity.
        place: The source's index among those of a batch.
        dtype: The dtype of the data that is written: the slot's own, unless a copy or kernel converts.
        convert: Makes a tensor or bytes of the source first. None if the source is used as it is.
        rows: The rows of the slot, if `convert` also takes the shape, else None.
        is_bytes: Whether bytes are written.
        is_piece: Whether the data has the slot's dtype and lies in one piece or in few pieces.
        in_place: Whether the source is the slot's own memory, which a producer has written.
        pace: Elements from one outer row of the source to the next, 0 if the rows are adjacent, or `RAGGED`.
    """

    slot: str
    target: torch.Tensor
    place: int
    dtype: torch.dtype
    convert: Convert | None = None
    rows: Rows | None = None
    is_bytes: bool = False
    is_piece: bool = False
    in_place: bool = False
    pace: int = 0


@attrs.frozen
class Chooser:
    """Chooses the way of an admitted source to its slot.

    Attributes:
        to: The slot's buffer.
        place: The source's index among those of a batch.
        rows: The slot's rows.
        buffers: All buffers, which sources may overlap.
        kept: Returns how many of the slot's rows are those of the last batch.
        is_direct: Whether the slot is written by its address in host memory.
        is_lane: Whether the fill kernel writes the slot.
        is_packed: Whether a packet takes the slot's host data.
        move: Copies other host data to the device, or None if the device has no uploads.
    """

    to: Buffer
    place: int
    rows: Rows
    buffers: Buffers
    kept: Callable[[], int]
    is_direct: bool = False
    is_lane: bool = False
    is_packed: bool = False
    move: Move | None = None

    @property
    def _own(self) -> torch.dtype:
        """The slot's dtype."""
        return self.to.tensor.dtype

    def _way(self, dtype: torch.dtype, *convert: Any, **properties: Any) -> Way:
        """Make a way to the slot. `convert` is the function, and the slot's rows if the function takes the shape."""
        return Way(self.to.name, self.to.tensor, self.place, dtype, *convert, **properties)

    def choose(self, source: Any, tensor: torch.Tensor) -> Way:
        """Choose the way of a source, which was admitted as `tensor`."""
        if is_in_place(source, self.to):
            return self._way(self._own, in_place=True)
        if self.is_direct:
            return self._to_the_host(source, tensor)
        if is_hosted(self.to, source):
            return self._to_the_device(source, tensor)
        return self._from_an_address(source)

    def _from_an_address(self, source: torch.Tensor) -> Way:
        """Choose the way of a tensor on its slot's device."""
        is_plain = not (source.is_neg() or source.is_conj())  # a copy of raw bytes would lose the negation
        if is_plain and not self.is_lane:
            return self._way(source.dtype)
        if is_plain and lane_takes(self.to, source.dtype):
            if source.is_contiguous():
                return self._way(source.dtype)
            varying = self.to.slot.varying
            pace = row_stride(source, varying) if varying else None
            if pace is not None:
                return self._way(source.dtype, pace=pace)
        return self._way(self._own, _plain_copy(self._own))

    def _to_the_host(self, source: Any, tensor: torch.Tensor) -> Way:
        """Choose the way to a slot in host memory, which no kernel writes."""
        if isinstance(source, torch.Tensor):
            if source.is_neg() or source.is_conj():
                return self._way(source.dtype, _plain_copy(source.dtype))
            is_piece = has_few_rows(self.to) and source.dtype == self._own and source.is_contiguous()
            return self._way(source.dtype, is_piece=is_piece)
        lies_first = self.to.slot.varying in ((), (0,))
        convert = self._bytes_of(source, tensor) if lies_first and tensor.dtype == self._own else None
        if convert is not None:
            return self._way(self._own, convert, is_bytes=True, is_piece=True)
        return self._way(self._own, self._dense, self.rows)

    def _to_the_device(self, source: Any, tensor: torch.Tensor) -> Way:
        """Choose the way of host data to a slot on a device: in the packet, by a separate upload, or by a copy."""
        if not self.is_packed:
            return self._way(self._own, self._moved, self.rows)
        if self.is_lane and self.rows.ragged and is_ragged(source):
            pack = functools.partial(bytes_of_ragged, self.to.slot, self._own, self.kept)
            return self._way(self._own, pack, self.rows, is_bytes=True, pace=RAGGED)
        is_taken = lane_takes(self.to, tensor.dtype) if self.is_lane else tensor.dtype == self._own
        convert = self._bytes_of(source, tensor) if is_taken else None
        if convert is not None:
            return self._way(tensor.dtype, convert, is_bytes=True)
        return self._way(self._own, self._dense_bytes, self.rows, is_bytes=True)

    def _bytes_of(self, source: Any, tensor: torch.Tensor) -> Convert | None:
        """Choose the function that converts host data to bytes directly, or None if it must become a tensor first."""
        if isinstance(source, torch.Tensor):
            is_plain = source.is_contiguous() and not source.is_neg() and not source.is_conj()
            return bytes_of_tensor if is_plain else None
        if type(source) is np.ndarray:
            return np.ndarray.tobytes
        if type(source) in (list, tuple) and tensor.dim() == 1 and tensor.dtype == self._own:
            try:
                bytes_of_list(source, self._own)
            except NOT_CARRIED:  # such as floats for an integer slot
                return None
            return _packer_of_lists(self._own)
        return None

    def _dense(self, source: Any, shape: Extent) -> torch.Tensor:
        """Make a host tensor of a shape and the slot's dtype from any host data. It shares no memory with slots."""
        return dense_of(admitted(self.to, source, shape), self._own, self.buffers)

    def _dense_bytes(self, source: Any, shape: Extent) -> bytes:
        """Make bytes of host data."""
        return bytes_of_tensor(self._dense(source, shape))

    def _moved(self, source: Any, shape: Extent) -> torch.Tensor:
        """Make a tensor on the device from host data."""
        made = self._dense(source, shape)
        return made.to(self.to.tensor.device) if self.move is None else self.move(made)


def has_few_rows(to: Buffer) -> bool:
    """Return whether a slot's live rows form so few pieces that each is best copied by address."""
    varying = to.slot.varying
    return len(varying) <= 1 and math.prod(to.tensor.shape[: varying[0] if varying else 0]) <= FEW_ROWS


def _plain_copy(dtype: torch.dtype) -> Convert:
    """Make a function that copies a tensor to a contiguous one of a dtype."""

    def convert(source: torch.Tensor) -> torch.Tensor:
        if source.numel() and not source.data_ptr():
            raise ValueError("its memory was freed")
        return source.resolve_conj().resolve_neg().to(dtype, memory_format=torch.contiguous_format).contiguous()

    return convert


@functools.cache
def _packer_of_lists(dtype: torch.dtype) -> Convert:
    """Return the function that packs lists of numbers, cached so that each dtype has one."""
    return functools.partial(bytes_of_list, dtype=dtype)
