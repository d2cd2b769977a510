"""One value as a batch may bring it: as a tensor of any make, host data, memory of a slot; and plain as well."""

from collections.abc import Callable
from typing import Any, Final

import attrs
import numpy as np
import torch

from slotgraph.dataflow.axes import Sizes
from slotgraph.dataflow.buffers import Buffer, Buffers

FLAT: Final = ("list", "tuple")
_NEGATED: Final[Callable[[torch.Tensor], torch.Tensor]] = vars(torch)["_neg_view"]
HOST_DATA: Final = (*FLAT, "array", "turned array", "frozen array", "slot array")
IN_BUFFERS: Final = ("other slot", "own slot", "own columns", "in place", "slot array")
_OTHERS: Final = ("askew", "negated", "parameter", "inference", "expanded", "sliced", "host")
KINDS: Final[tuple[str, ...]] = ("plain", "plain", "plain", *HOST_DATA, *IN_BUFFERS, *_OTHERS)


@attrs.frozen
class Given:
    """What a batch brings for one slot, and the same value as a tensor of its own, which the oracle gets."""

    kind: str
    value: Any
    plain: torch.Tensor


@attrs.frozen
class Maker:
    """Makes what a batch brings for one slot. buffers, live: the buffers that are filled, and the live sizes."""

    buffer: Buffer
    dtype: torch.dtype
    value: torch.Tensor
    buffers: Buffers
    live: Sizes

    def make(self, kind: str) -> Given:
        """A value of a kind, or plain where there is none of that kind."""
        made = getattr(self, f"_{kind.replace(' ', '_')}")() if kind != "plain" else None
        if made is None:
            return Given("plain", self.value, self.value.clone(memory_format=torch.contiguous_format))
        return Given(kind, made, self._plain(made))

    def _plain(self, made: Any) -> torch.Tensor:
        if isinstance(made, list | tuple):
            return self.value.clone(memory_format=torch.contiguous_format)
        tensor = torch.from_numpy(np.array(made)) if isinstance(made, np.ndarray) else made
        with torch.inference_mode(mode=False), torch.no_grad():
            fresh = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=self.value.device)
            return fresh.copy_(tensor)

    def _list(self) -> list[Any] | None:
        return self.value.tolist() if self._nested() else None

    def _tuple(self) -> tuple[Any, ...] | None:
        return tuple(self.value.tolist()) if self._nested() else None

    def _slot_array(self) -> "np.ndarray[Any, Any] | None":
        return _numpy(self._first_rows(torch.device("cpu")))

    def _other_slot(self) -> torch.Tensor | None:
        return self._first_rows(self.value.device)

    def _host(self) -> torch.Tensor:
        return self.value.cpu()

    def _nested(self) -> bool:
        """Whether lists say all of it: the slot's dtype, and a shape that can be read off them."""
        is_told = self.value.dim() == 1 or (self.value.dim() > 1 and self.value.numel() > 0)
        return is_told and self.value.dtype == self.dtype

    def _array(self) -> "np.ndarray[Any, Any] | None":
        return _numpy(self.value.contiguous().cpu())

    def _turned_array(self) -> "np.ndarray[Any, Any] | None":
        array = self._array()
        if array is None or array.size < 2:
            return None
        return np.asfortranarray(array) if array.ndim > 1 else np.ascontiguousarray(array[::-1])[::-1]

    def _frozen_array(self) -> "np.ndarray[Any, Any] | None":
        array = self._array()
        if array is not None:
            array = array.copy()
            array.flags.writeable = False
        return array

    def _first_rows(self, device: torch.device) -> torch.Tensor | None:
        """The first rows of another slot's memory on a device, whatever it holds."""
        count = self.value.numel()
        for buffer in self.buffers:
            tensor = buffer.tensor
            alike = (tensor.dtype, tensor.device) == (self.value.dtype, device)
            if buffer is not self.buffer and alike and 0 < count <= tensor.numel():
                return tensor.flatten()[:count].view(self.value.shape)
        return None

    def _own_slot(self) -> torch.Tensor | None:
        """The slot's own memory, but for the first element."""
        tensor, count = self.buffer.tensor, self.value.numel()
        if tensor.dtype != self.value.dtype or not 0 < count < tensor.numel():
            return None
        return tensor.flatten()[1 : 1 + count].view(self.value.shape)

    def _own_columns(self) -> torch.Tensor | None:
        """The slot's own columns, but for the first: rows that lie apart, where the slot takes strided sources."""
        tensor, shape = self.buffer.tensor, self.value.shape
        room = all(size + (dim == len(shape) - 1) <= tensor.shape[dim] for dim, size in enumerate(shape))
        if not self.buffer.slot.strided or tensor.dtype != self.value.dtype or not self.value.numel() or not room:
            return None
        for dim, size in enumerate(shape[:-1]):
            tensor = tensor.narrow(dim, 0, size)
        return tensor[..., 1 : 1 + shape[-1]]

    def _in_place(self) -> torch.Tensor | None:
        """The slot's own live rows, into which a producer has written the value."""
        room = zip(self.value.shape, self.buffer.tensor.shape, strict=True)
        if self.value.dtype != self.dtype or not self.value.numel() or any(wanted > most for wanted, most in room):
            return None
        return self.buffer.view(self.live).copy_(self.value)

    def _askew(self) -> torch.Tensor | None:
        if self.value.itemsize == 1 or not self.value.numel():
            return None
        plain = self.value.clone(memory_format=torch.contiguous_format).cpu()
        data = bytearray(1) + bytearray(plain.view(-1).view(torch.uint8).numpy().tobytes())
        return torch.frombuffer(data, dtype=self.value.dtype, offset=1).view(self.value.shape)

    def _negated(self) -> torch.Tensor | None:
        """A view that is negated when it is read."""
        if self.value.dtype == torch.bool or not self.value.numel():
            return None
        return _NEGATED(self.value.neg())

    def _parameter(self) -> torch.Tensor | None:
        return torch.nn.Parameter(self.value) if self.value.is_floating_point() else None

    def _inference(self) -> torch.Tensor:
        with torch.inference_mode():
            return self.value.clone()

    def _expanded(self) -> torch.Tensor | None:
        """One column for all, where the slot takes strided sources."""
        if not self.buffer.slot.strided or not self.value.numel():
            return None
        return self.value[..., :1].clone().expand(self.value.shape)

    def _sliced(self) -> torch.Tensor:
        if self.value.dim() == 0:
            return self.value
        larger = torch.cat([self.value[:1], self.value, self.value[:1]])
        start = min(1, len(self.value))
        return larger[start : start + len(self.value)]


def _numpy(tensor: torch.Tensor | None) -> "np.ndarray[Any, Any] | None":
    """The same memory as an array; nothing for dtypes that numpy has not."""
    return None if tensor is None or tensor.dtype == torch.bfloat16 or not tensor.is_cpu else tensor.numpy()
