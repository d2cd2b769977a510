"""Admission: a batch's sources held to their slots, each fault with the way out, and how each travels to its slot."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import attrs
import numpy as np
import torch

from .buffers import Buffer, Buffers
from .capabilities import DEVICE, dtype_text
from .errors import BatchError, MissingSourceError
from .hostdata import HOST_KINDS, NOT_CARRIED, Carrier, array_carrier, list_carrier, tensor_carrier, tensor_of
from .packet import converts, row_stride
from .slots import Slot

NOT_TOLD: Final = (AttributeError, TypeError, ValueError, RuntimeError)
"""Errors of reading the shape, strides or address of a source that is no tensor, or of a tensor that hides them."""
_PLAIN: Final = vars(torch.Tensor)["__torch_dispatch__"]
_HAS_STORAGE: Final = torch._C._has_storage  # noqa: SLF001 - no public name
Extent = tuple[int, ...]
Prepare = Callable[[Any], torch.Tensor]
"""Makes a tensor of a source that the kernel, or a plain copy, can read; raises as a carrier does where it cannot."""
Move = Callable[[torch.Tensor], torch.Tensor]
"""Takes a dense host tensor to the device; see `Upload.move`."""


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether there is memory behind a tensor that has elements."""
    return bool(tensor.data_ptr() or not tensor.numel())


def unreadable(source: Any) -> str:  # noqa: PLR0911 - a reason a line
    """Why the elements of a tensor cannot be read at its address, and the way out; nothing where they can.

    Nothing is said of what is no tensor. A nested tensor must be asked nothing but whether it is one.
    """
    if not isinstance(source, torch.Tensor):
        return ""
    if source.is_nested or source.layout != torch.strided:
        return f"a {'nested' if source.is_nested else source.layout} tensor; pass a dense one"
    kind = type(source)
    if getattr(kind, "__torch_dispatch__", _PLAIN) is not _PLAIN:
        return f"a {kind.__name__}, which has no memory of its own; pass the plain tensor in it, as `.to_local()` gives"
    if not _HAS_STORAGE(source):
        return "a tensor inside of a torch.func transform; run the step outside of vmap and grad"
    try:
        if source.device.type == "meta" or has_memory(source):  # of the former the device is wrong
            return ""
    except NOT_TOLD as error:
        return f"a {kind.__name__} that cannot be read: {error}"
    return "a tensor without memory of its own, such as one whose storage was freed; pass one that has some"


@attrs.frozen
class Wanted:
    """A slot that a fill copies, with its dtype and its place on this device."""

    name: str
    slot: Slot
    dtype: torch.dtype
    device: torch.device

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether a source of this dtype can be copied into the slot."""
        return dtype == self.dtype or dtype in self.slot.converts_from()

    def is_hosted(self, source: Any) -> bool:
        """Whether a source is host data for a slot on the device."""
        if self.slot.placement != DEVICE:
            return False
        if isinstance(source, torch.Tensor):
            return source.is_cpu and self.device.type != "cpu"
        return isinstance(source, HOST_KINDS)


def check_sources(rows: Sequence[tuple[Wanted, Any, Extent]], buffers: Buffers) -> list[torch.Tensor]:
    """All sources as tensors, those of host data on the host; rows: of a slot, its source and the wanted shape.

    Raises MissingSourceError if sources are missing, else BatchError with every fault.
    """
    missing = [
        f"slot {want.name!r}: {want.slot.reads(want.name)} is missing; give it, or declare the slot with default=None"
        for want, source, _ in rows
        if source is None
    ]
    if missing:
        raise MissingSourceError("; ".join(missing))
    found = [_admit(want, source, shape, buffers[want.name]) for want, source, shape in rows]
    faults = [fault for tensor in found if isinstance(tensor, list) for fault in tensor]
    if faults:
        raise BatchError("; ".join(faults))
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def placed(want: Wanted, source: Any, tensor: torch.Tensor, buffers: Buffers, move: Move | None) -> torch.Tensor:
    """An admitted source as a tensor where its slot is, which can be read while slots are written.

    move: what takes host data to the device, in memory of its own there.
    """
    if want.is_hosted(source):
        made = _dense(tensor, want.dtype, buffers)
        return made.to(want.device, copy=True) if move is None else move(made)
    askew = tensor.is_neg() or tensor.is_conj() or tensor.data_ptr() % tensor.itemsize
    if is_in_place(tensor, buffers[want.name]) or not (askew or buffers.holds(tensor)):
        return tensor
    return tensor.clone().resolve_neg().resolve_conj()


def _dense(tensor: torch.Tensor, dtype: torch.dtype, buffers: Buffers) -> torch.Tensor:
    """A host tensor in one piece, of a dtype, and in no slot's memory."""
    made = tensor.detach().resolve_neg().resolve_conj().to(dtype).contiguous()
    return made.clone() if buffers.holds(made) else made


def _admit(want: Wanted, source: Any, shape: Extent, buffer: Buffer) -> torch.Tensor | list[str]:
    """One source as a tensor, or what is wrong with it."""
    made: Any = source
    if isinstance(source, HOST_KINDS):
        try:
            made = tensor_of(source, want.dtype, len(shape))
        except (RuntimeError, TypeError, ValueError) as error:
            return [f"{_expected(want, shape)}, got {type(source).__name__}: {error}"]
    elif why := unreadable(source):
        return [f"{_expected(want, shape)}, got {why}"]
    elif is_in_place(source, buffer) and tuple(source.shape) == shape:
        return made  # type: ignore[no-any-return] # a tensor, as was just found
    return [_expected(want, shape) + fault for fault in _faults(want, made, shape)] or made


def is_in_place(source: Any, buffer: Buffer) -> bool:
    """Whether a source is the first part of its own slot's buffer, of the very same layout and dtype."""
    if not isinstance(source, torch.Tensor):
        return False
    mine = buffer.tensor
    same = source.data_ptr() == mine.data_ptr() and source.numel() > 0 and source.dtype == mine.dtype
    return same and source.stride() == mine.stride() and not source.is_neg() and not source.is_conj()


def _expected(want: Wanted, shape: Extent) -> str:
    return f"slot {want.name!r}: expected {dtype_text(want.dtype)} of shape {list(shape)} on {want.device}"


def _faults(want: Wanted, source: Any, shape: Extent) -> Iterator[str]:
    """What is wrong with a source that can be read, each as the end of a sentence that says what was expected."""
    if not isinstance(source, torch.Tensor):
        yield f", got {type(source).__name__}; make a tensor of it"
        return
    if not want.takes(source.dtype):
        lossy = source.dtype.is_floating_point and not want.dtype.is_floating_point
        way_out = "round it yourself" if lossy else f"convert it, or declare converts=({source.dtype},)"
        yield f", got {dtype_text(source.dtype)}; {way_out}"
    if source.device != want.device and not (source.is_cpu and want.slot.placement == DEVICE):
        yield f", got a tensor on {source.device}; move it there first"
    if tuple(source.shape) != shape:
        yield f" ({', '.join(map(str, want.slot.shape))}), got shape {list(source.shape)}"
    elif not (source.is_contiguous() or want.slot.strided):
        strides = list(source.stride())
        yield f", contiguous, got one with strides {strides}; pass `.contiguous()`, or declare strided=True"


@attrs.frozen
class Kind:
    """One source's way: by its address, where it needs that after `prepare`, or with its bytes in the packet.

    dtype: the source's, once it is prepared. carrier: what makes bytes of it, if it travels with its bytes, `nbytes` of
    them. prepare: what makes another tensor of it first. pace: elements from one outer row to the next, of a tensor
    that the kernel reads in rows apart. loose: whether its carrier or `prepare` takes all kinds of host data; those of
    lists and arrays look at the type by themselves, in any case. in_place: whether it is the slot's own memory, which
    its producer has written.
    """

    dtype: torch.dtype
    carrier: Carrier | None = None
    nbytes: int = 0
    prepare: Prepare | None = None
    pace: int | None = None
    loose: bool = False
    in_place: bool = False


def kind_of(
    want: Wanted, source: Any, tensor: torch.Tensor, buffers: Buffers, *, fused: bool, carries: bool, move: Move | None
) -> Kind:
    """How a source that was admitted travels to its slot.

    tensor: what was admitted, on the host where it is host data. fused: whether the kernel writes the slot; else a copy
    does. carries: whether the packet has room for its bytes. move: what takes to the device the host data that the
    packet does not carry; None where nothing is uploaded.
    """
    if isinstance(source, torch.Tensor):
        if is_in_place(source, buffers[want.name]):
            return Kind(source.dtype, in_place=True)
        if not want.is_hosted(source):
            return _of_tensor(want, source, fused=fused)
    carrier = _carrier_of(want, source, tensor)
    if carrier is not None:
        if carries and (_is_taken(want, tensor.dtype) if fused else tensor.dtype == want.dtype):
            return Kind(tensor.dtype, carrier, tensor.nbytes)
        if tensor.nbytes and not carries and move is None and not isinstance(source, torch.Tensor):
            return Kind(tensor.dtype, prepare=_by_copy(carrier, tensor))
    return _of_any(want, tuple(tensor.shape), buffers, carries=carries, move=move)


def _by_copy(carry: Any, like: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    """Puts host data into one tensor, which is written anew for each batch, and copied at once."""
    with torch.inference_mode(mode=False):
        made = torch.empty_like(like, memory_format=torch.contiguous_format)
    array: Any = made.numpy()
    room = memoryview(array).cast("B")

    def prepare(brought: Any) -> torch.Tensor:
        room[:] = memoryview(carry(brought)).cast("B")
        return made

    return prepare


def _of_any(want: Wanted, shape: Extent, buffers: Buffers, *, carries: bool, move: Move | None) -> Kind:
    """Host data of any kind that fits: in the packet, by an upload of its own, or as a tensor where its slot is."""

    def admitted(brought: Any) -> torch.Tensor:
        found = _admit(want, brought, shape, buffers[want.name])
        if isinstance(found, list):
            raise ValueError("; ".join(found))  # noqa: TRY004 - what is wrong is what it holds
        return found

    def dense(brought: Any) -> torch.Tensor:
        if not want.is_hosted(brought):
            raise ValueError("no host data")
        return _dense(admitted(brought), want.dtype, buffers)

    if carries:
        nbytes = math.prod(shape) * want.dtype.itemsize
        carry = tensor_carrier(nbytes)
        return Kind(want.dtype, lambda brought: carry(dense(brought)), nbytes, loose=True)
    if move is not None:
        return Kind(want.dtype, prepare=lambda brought: move(dense(brought)), loose=True)
    device, dtype = want.device, want.dtype  # of the slot, whatever this one and those to come are of
    return Kind(dtype, prepare=lambda brought: admitted(brought).to(device=device, dtype=dtype), loose=True)


def _of_tensor(want: Wanted, source: torch.Tensor, *, fused: bool) -> Kind:
    """A tensor that fits, where its slot is. A plain copy converts it, and reads it as it lies."""
    if not (source.is_neg() or source.is_conj()):  # before it is converted: negated bytes are no negative numbers
        if not fused or (source.is_contiguous() and _is_taken(want, source.dtype)):
            return Kind(source.dtype)
        varying, pace = want.slot.varying, None
        if varying and _is_taken(want, source.dtype):
            pace = row_stride(source, varying[0])
        if pace is not None:
            return Kind(source.dtype, pace=pace)

    def prepare(brought: torch.Tensor) -> torch.Tensor:
        if not has_memory(brought):
            raise ValueError("its memory was freed")
        return brought.resolve_conj().resolve_neg().to(want.dtype, memory_format=torch.contiguous_format).contiguous()

    return Kind(want.dtype, prepare=prepare)


def _carrier_of(want: Wanted, source: Any, tensor: torch.Tensor) -> Carrier | None:
    """What makes bytes of host data without a tensor in between; None where one is needed."""
    if isinstance(source, torch.Tensor):
        is_plain = source.is_contiguous() and not source.is_neg() and not source.is_conj()
        return tensor_carrier(source.nbytes) if is_plain else None
    if type(source) is np.ndarray:
        return array_carrier(source) if source.flags.c_contiguous else None
    carrier = list_carrier(len(source), want.dtype) if type(source) in (list, tuple) and tensor.dim() == 1 else None
    if carrier is not None and tensor.dtype == want.dtype:
        with contextlib.suppress(*NOT_CARRIED):  # numbers of other kinds
            carrier(source)
            return carrier
    return None


def _is_taken(want: Wanted, dtype: torch.dtype) -> bool:
    """Whether the kernel can write a source of this dtype into the slot."""
    return dtype == want.dtype or (want.takes(dtype) and converts(dtype, want.dtype))
