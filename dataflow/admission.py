"""Admission: checks a batch's sources against their slots, and makes tensors of them."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from .axes import Extent, Shape
from .buffers import Buffer, Buffers
from .capabilities import DEVICE, dtype_text
from .errors import BatchError, Fault, MissingSourceError
from .hostdata import HOST_KINDS, tensor_for
from .packet import Move, converts

NOT_TOLD: Final = (AttributeError, TypeError, ValueError, RuntimeError)
"""Raised by reading the shape, strides or address of a value that is not a tensor, or of a tensor that hides them."""
_PLAIN: Final = vars(torch.Tensor)["__torch_dispatch__"]
_HAS_STORAGE: Final = torch._C._has_storage  # noqa: SLF001 - no public name
Admitted = list[tuple[Buffer, Any, torch.Tensor]]
"""Slots, their sources in a batch, and the same as tensors, which are on the host for host data."""


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory, or has no elements and needs none."""
    return bool(tensor.data_ptr() or not tensor.numel())


def unreadable(source: Any) -> str:  # noqa: PLR0911 - a reason a line
    """Return why a tensor's elements cannot be read at its address and how to fix it, or "" if they can."""
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
        if source.device.type == "meta" or has_memory(source):  # for a meta tensor, the error is about the device
            return ""
    except NOT_TOLD as error:
        return f"a {kind.__name__} that cannot be read: {error}"
    return "a tensor without memory of its own, such as one whose storage was freed; pass one that has some"


def takes(to: Buffer, dtype: torch.dtype) -> bool:
    """Return whether a source of this dtype can be copied into the slot."""
    return dtype == to.tensor.dtype or dtype in to.slot.converts_from()


def is_hosted(to: Buffer, source: Any) -> bool:
    """Return whether a source is host data for a slot on the device."""
    if isinstance(source, torch.Tensor):
        return source.is_cpu and not to.tensor.is_cpu and to.slot.placement == DEVICE
    return isinstance(source, HOST_KINDS) and to.slot.placement == DEVICE


def check_sources(rows: Sequence[tuple[Buffer, Any, Extent]]) -> Admitted:
    """Check slots' sources, and return each with a tensor of it, which is on the host for host data.

    Each row gives a buffer, a source and the expected shape. Raises MissingSourceError if sources are missing, else
    BatchError with every fault.
    """
    found = Admitted()
    faults = list[Fault]()
    for to, source, _ in rows:
        if source is None:
            missing = f"slot {to.name!r}: {to.slot.reads(to.name)} is missing"
            faults.append(Fault(to.name, f"{missing}; give it, or declare the slot with default=None"))
    if faults:
        raise MissingSourceError.of(*faults)
    for to, source, shape in rows:
        try:
            found.append((to, source, admitted(to, source, shape)))
        except BatchError as error:
            faults += error.faults
    if faults:
        raise BatchError.of(*faults)
    return found


def placed(to: Buffer, source: Any, tensor: torch.Tensor, buffers: Buffers, move: Move | None) -> torch.Tensor:
    """Return an admitted source as a tensor on its slot's device that no write to a slot changes."""
    if is_hosted(to, source):
        made = dense_of(tensor, to.tensor.dtype, buffers)
        return made.to(to.tensor.device, copy=True) if move is None else move(made)
    askew = tensor.is_neg() or tensor.is_conj() or tensor.data_ptr() % tensor.itemsize
    if is_in_place(tensor, to) or not (askew or buffers.holds(tensor)):
        return tensor
    return tensor.clone().resolve_neg().resolve_conj()


def dense_of(tensor: torch.Tensor, dtype: torch.dtype, buffers: Buffers) -> torch.Tensor:
    """Return a contiguous host tensor of a dtype that shares no memory with a slot."""
    made = tensor.detach().resolve_neg().resolve_conj().to(dtype).contiguous()
    return made.clone() if buffers.holds(made) else made


def admitted(to: Buffer, source: Any, shape: Extent) -> torch.Tensor:
    """Return one source as a tensor. Raise BatchError with all that is wrong with it."""
    made: Any = source
    if isinstance(source, HOST_KINDS):
        try:
            made = tensor_for(to.slot, source, to.tensor.dtype, shape)
        except (RuntimeError, TypeError, ValueError) as error:
            text = f"{_expected(to, shape)}, got {type(source).__name__}: {error}"
            raise BatchError.of(Fault(to.name, text)) from error
    elif why := unreadable(source):
        raise BatchError.of(Fault(to.name, f"{_expected(to, shape)}, got {why}"))
    if not is_in_place(made, to) or tuple(made.shape) != shape:
        faults = [*_faults(to, made, shape)]
        if faults:
            raise BatchError.of(*faults)
    return made  # type: ignore[no-any-return] # a tensor: all else is a fault


def is_in_place(source: Any, to: Buffer) -> bool:
    """Return whether a source is its slot's own memory: the same address, strides and dtype."""
    if not isinstance(source, torch.Tensor):
        return False
    mine = to.tensor
    same = source.data_ptr() == mine.data_ptr() and source.numel() > 0 and source.dtype == mine.dtype
    return same and source.stride() == mine.stride() and not source.is_neg() and not source.is_conj()


def _expected(to: Buffer, shape: Extent) -> str:
    own = to.tensor
    return f"slot {to.name!r}: expected {dtype_text(own.dtype)} of shape {list(shape)} on {own.device}"


def wrong_rank(slot: str, shape: Shape, came: Sequence[int]) -> Fault:
    """Make the fault for a source of this shape, which has more or fewer dims than its slot."""
    expected = f"{len(shape)} dimension{'s' * (len(shape) != 1)}"
    shapes = f"shape {[*came]} for {[*shape]}"
    return Fault(slot, f"slot {slot!r}: expected {expected}, got {len(came)}: {shapes}; reshape it")


def _faults(to: Buffer, source: Any, shape: Extent) -> Iterator[Fault]:
    """Yield each thing that is wrong with a source that can be read."""
    name = to.name
    if not isinstance(source, torch.Tensor):
        taken = "a tensor, an array or a list" if shape else "a tensor or a NumPy number"
        yield Fault(name, f"{_expected(to, shape)}, got {type(source).__name__}; give {taken}")
        return
    dtype = to.tensor.dtype
    device = to.tensor.device
    came = tuple(source.shape)
    if source.dtype != dtype and not takes(to, source.dtype):
        lossy = source.dtype.is_floating_point and not dtype.is_floating_point
        way_out = "round it yourself" if lossy else f"convert it, or declare converts=({source.dtype},)"
        yield Fault(name, f"{_expected(to, shape)}, got {dtype_text(source.dtype)}; {way_out}")
    if source.device != device and not (source.is_cpu and to.slot.placement == DEVICE):
        yield Fault(name, f"{_expected(to, shape)}, got a tensor on {source.device}; move it there first")
    if len(came) != len(shape):
        yield wrong_rank(name, to.slot.shape, came)
    elif came != shape:
        dims = [dim for dim, size in enumerate(shape) if size != came[dim]]
        text = f"{_expected(to, shape)} ({', '.join(map(str, to.slot.shape))}), got shape {list(came)}"
        yield Fault(name, text, tuple(dims))
    elif not (source.is_contiguous() or to.slot.strided):
        way_out = "pass `.contiguous()`, or declare strided=True"
        strides = list(source.stride())
        yield Fault(name, f"{_expected(to, shape)}, contiguous, got one with strides {strides}; {way_out}")


def lane_takes(to: Buffer, dtype: torch.dtype) -> bool:
    """Return whether the kernel can write a source of this dtype into the slot."""
    own = to.tensor.dtype
    return dtype == own or (takes(to, dtype) and converts(dtype, own))
