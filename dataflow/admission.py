"""Admission: a batch's sources checked against their slots, and how each travels to its slot."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import attrs
import numpy as np
import torch

from .axes import Extent, Shape
from .buffers import Buffer, Buffers
from .capabilities import DEVICE, dtype_text
from .errors import BatchError, Fault, MissingSourceError
from .guard import outside_inference
from .hostdata import HOST_KINDS, NOT_CARRIED, Carrier, array_carrier, list_carrier, tensor_carrier, tensor_of
from .packet import converts, row_stride

NOT_TOLD: Final = (AttributeError, TypeError, ValueError, RuntimeError)
"""Errors of reading the shape, strides or address of a source that is not a tensor, or of a tensor that hides them."""
_PLAIN: Final = vars(torch.Tensor)["__torch_dispatch__"]
_HAS_STORAGE: Final = torch._C._has_storage  # noqa: SLF001 - no public name
Admitted = list[tuple[Buffer, Any, torch.Tensor]]
"""Slots, what a batch brings for them, and that as a tensor: on the host where it is host data."""
Move = Callable[[torch.Tensor], torch.Tensor]
"""Takes a dense host tensor to the device; see `Upload.move`."""


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether there is memory behind a tensor that has elements."""
    return bool(tensor.data_ptr() or not tensor.numel())


def unreadable(source: Any) -> str:  # noqa: PLR0911 - a reason a line
    """Why the elements of a tensor cannot be read at its address, and the way out; nothing where they can."""
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


def _takes(to: Buffer, dtype: torch.dtype) -> bool:
    """Whether a source of this dtype can be copied into the slot."""
    return dtype == to.tensor.dtype or dtype in to.slot.converts_from()


def _is_hosted(to: Buffer, source: Any) -> bool:
    """Whether a source is host data for a slot on the device."""
    if isinstance(source, torch.Tensor):
        return source.is_cpu and not to.tensor.is_cpu and to.slot.placement == DEVICE
    return isinstance(source, HOST_KINDS) and to.slot.placement == DEVICE


def check_sources(rows: Sequence[tuple[Buffer, Any, Extent]]) -> Admitted:
    """Slots' sources, each also as a tensor, on the host where it is host data. rows: sources and the wanted shapes.

    Raises MissingSourceError if sources are missing, else BatchError with every fault.
    """
    found, faults = Admitted(), list[Fault]()
    for to, source, _ in rows:
        if source is None:
            missing = f"slot {to.name!r}: {to.slot.reads(to.name)} is missing"
            faults.append(Fault(to.name, f"{missing}; give it, or declare the slot with default=None"))
    if faults:
        raise MissingSourceError.of(*faults)
    for to, source, shape in rows:
        try:
            found.append((to, source, _admitted(to, source, shape)))
        except BatchError as error:
            faults += error.faults
    if faults:
        raise BatchError.of(*faults)
    return found


def placed(to: Buffer, source: Any, tensor: torch.Tensor, buffers: Buffers, move: Move | None) -> torch.Tensor:
    """An admitted source as a tensor where its slot is, which can be read while slots are written."""
    if _is_hosted(to, source):
        made = _dense(tensor, to.tensor.dtype, buffers)
        return made.to(to.tensor.device, copy=True) if move is None else move(made)
    askew = tensor.is_neg() or tensor.is_conj() or tensor.data_ptr() % tensor.itemsize
    if is_in_place(tensor, to) or not (askew or buffers.holds(tensor)):
        return tensor
    return tensor.clone().resolve_neg().resolve_conj()


def _dense(tensor: torch.Tensor, dtype: torch.dtype, buffers: Buffers) -> torch.Tensor:
    """A host tensor in one piece, of a dtype, and in no slot's memory."""
    made = tensor.detach().resolve_neg().resolve_conj().to(dtype).contiguous()
    return made.clone() if buffers.holds(made) else made


def _admitted(to: Buffer, source: Any, shape: Extent) -> torch.Tensor:
    """One source as a tensor; BatchError with all that is wrong with it."""
    made: Any = source
    if isinstance(source, HOST_KINDS):
        try:
            made = tensor_of(source, to.tensor.dtype, shape)
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
    """Whether a source is the first part of its own slot's buffer, of the very same layout and dtype."""
    if not isinstance(source, torch.Tensor):
        return False
    mine = to.tensor
    same = source.data_ptr() == mine.data_ptr() and source.numel() > 0 and source.dtype == mine.dtype
    return same and source.stride() == mine.stride() and not source.is_neg() and not source.is_conj()


def _expected(to: Buffer, shape: Extent) -> str:
    own = to.tensor
    return f"slot {to.name!r}: expected {dtype_text(own.dtype)} of shape {list(shape)} on {own.device}"


def wrong_rank(slot: str, shape: Shape, came: Sequence[int]) -> Fault:
    """Name a source of this shape, which has more or fewer dims than its slot."""
    expected = f"{len(shape)} dimension{'s' * (len(shape) != 1)}"
    return Fault(slot, f"slot {slot!r}: expected {expected}, got {len(came)}: shape {[*came]} for {[*shape]}")


def _faults(to: Buffer, source: Any, shape: Extent) -> Iterator[Fault]:
    """Each thing that is wrong with a source that can be read."""
    name, expected = to.name, _expected(to, shape)
    if not isinstance(source, torch.Tensor):
        yield Fault(name, f"{expected}, got {type(source).__name__}; make a tensor of it")
        return
    dtype, device, came = to.tensor.dtype, to.tensor.device, tuple(source.shape)
    if not _takes(to, source.dtype):
        lossy = source.dtype.is_floating_point and not dtype.is_floating_point
        way_out = "round it yourself" if lossy else f"convert it, or declare converts=({source.dtype},)"
        yield Fault(name, f"{expected}, got {dtype_text(source.dtype)}; {way_out}")
    if source.device != device and not (source.is_cpu and to.slot.placement == DEVICE):
        yield Fault(name, f"{expected}, got a tensor on {source.device}; move it there first")
    if len(came) != len(shape):
        yield wrong_rank(name, to.slot.shape, came)
    elif came != shape:
        dims = [dim for dim, size in enumerate(shape) if size != came[dim]]
        text = f"{expected} ({', '.join(map(str, to.slot.shape))}), got shape {list(came)}"
        yield Fault(name, text, tuple(dims))
    elif not (source.is_contiguous() or to.slot.strided):
        way_out = "pass `.contiguous()`, or declare strided=True"
        yield Fault(name, f"{expected}, contiguous, got one with strides {list(source.stride())}; {way_out}")


@attrs.frozen
class Kind:
    """One source's way: by its address, where it needs that after `prepare`, or with its bytes in the packet.

    dtype: the source's, once it is prepared. carrier: what makes bytes of it, if it travels with its bytes, `nbytes` of
    them. prepare: what makes another tensor of it first. pace: elements from one outer row to the next, of a tensor
    that the kernel reads in rows apart. loose: whether its carrier or `prepare` looks at the type by itself and takes
    all kinds of host data. in_place: whether it is the slot's own memory, which its producer has written.
    """

    dtype: torch.dtype
    carrier: Carrier | None = None
    nbytes: int = 0
    prepare: Callable[[Any], torch.Tensor] | None = None
    pace: int | None = None
    loose: bool = False
    in_place: bool = False


def kind_of(
    to: Buffer, source: Any, tensor: torch.Tensor, buffers: Buffers, *, fused: bool, carries: bool, move: Move | None
) -> Kind:
    """How a source travels to its slot. tensor: what was admitted. fused: whether the kernel writes the slot.

    carries: whether the packet has room for its bytes. move: takes other host data to the device; None without uploads.
    """
    if isinstance(source, torch.Tensor):
        if is_in_place(source, to):
            return Kind(source.dtype, in_place=True)
        if not _is_hosted(to, source):
            return _of_tensor(to, source, fused=fused)
    carrier = _carrier_of(to, source, tensor)
    if carrier is not None:
        if carries and (_is_taken(to, tensor.dtype) if fused else tensor.dtype == to.tensor.dtype):
            return Kind(tensor.dtype, carrier, tensor.nbytes)
        if tensor.nbytes and not carries and move is None and not isinstance(source, torch.Tensor):
            return Kind(tensor.dtype, prepare=_by_copy(carrier, tensor))
    return _of_any(to, tuple(tensor.shape), buffers, carries=carries, move=move)


def _by_copy(carry: Any, like: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    """Puts host data into one tensor, which is written anew for each batch, and copied at once."""
    with outside_inference():
        made = torch.empty_like(like, memory_format=torch.contiguous_format)
    array: Any = made.numpy()
    room = memoryview(array).cast("B")

    def prepare(brought: Any) -> torch.Tensor:
        room[:] = memoryview(carry(brought)).cast("B")
        return made

    return prepare


def _of_any(to: Buffer, shape: Extent, buffers: Buffers, *, carries: bool, move: Move | None) -> Kind:
    """Host data of any kind that fits: in the packet, by an upload of its own, or as a tensor where its slot is."""
    dtype, device = to.tensor.dtype, to.tensor.device

    def dense(brought: Any) -> torch.Tensor:
        if not _is_hosted(to, brought):
            raise ValueError("no host data")
        return _dense(_admitted(to, brought, shape), dtype, buffers)

    if carries:
        nbytes = math.prod(shape) * dtype.itemsize
        carry = tensor_carrier(nbytes)
        return Kind(dtype, lambda brought: carry(dense(brought)), nbytes, loose=True)
    if move is not None:
        return Kind(dtype, prepare=lambda brought: move(dense(brought)), loose=True)
    return Kind(dtype, prepare=lambda brought: _admitted(to, brought, shape).to(device, dtype), loose=True)


def _of_tensor(to: Buffer, source: torch.Tensor, *, fused: bool) -> Kind:
    """A tensor that fits, where its slot is. A plain copy converts it, and reads it as it lies."""
    own = to.tensor.dtype
    if not (source.is_neg() or source.is_conj()):  # before it is converted: negated bytes are no negative numbers
        if not fused or (source.is_contiguous() and _is_taken(to, source.dtype)):
            return Kind(source.dtype)
        varying, pace = to.slot.varying, None
        if varying and _is_taken(to, source.dtype):
            pace = row_stride(source, varying[0])
        if pace is not None:
            return Kind(source.dtype, pace=pace)

    def prepare(brought: torch.Tensor) -> torch.Tensor:
        if not has_memory(brought):
            raise ValueError("its memory was freed")
        return brought.resolve_conj().resolve_neg().to(own, memory_format=torch.contiguous_format).contiguous()

    return Kind(own, prepare=prepare)


def _carrier_of(to: Buffer, source: Any, tensor: torch.Tensor) -> Carrier | None:
    """What makes bytes of host data without a tensor in between; None where one is needed."""
    if isinstance(source, torch.Tensor):
        is_plain = source.is_contiguous() and not source.is_neg() and not source.is_conj()
        return tensor_carrier(source.nbytes) if is_plain else None
    if type(source) is np.ndarray:
        return array_carrier(source) if source.flags.c_contiguous else None
    own = to.tensor.dtype
    if type(source) in (list, tuple) and tensor.dim() == 1 and tensor.dtype == own:
        with contextlib.suppress(*NOT_CARRIED):  # numbers of other kinds
            carrier = list_carrier(len(source), own)
            carrier(source)
            return carrier
    return None


def _is_taken(to: Buffer, dtype: torch.dtype) -> bool:
    """Whether the kernel can write a source of this dtype into the slot."""
    own = to.tensor.dtype
    return dtype == own or (_takes(to, dtype) and converts(dtype, own))
