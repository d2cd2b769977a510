"""Kinds: how a source travels to its slot, by its address or with its bytes in the upload."""

import math
from typing import Any, Literal

import attrs
import numpy as np
import torch

from .admission import Fact, Wanted, host_tensor, is_in_place
from .buffers import Buffer, Buffers
from .hostdata import Carrier, array_dtype, carry_array, list_carrier, tensor_carrier
from .lanes import converts

Detour = Literal["overlap", "layout", "conversion", "host_data", "foreign_stream"]
"""Why a batch is filled by the next lowering: a source lies in a slot's buffer; has a layout that its bytes alone do
not tell; has a dtype that the kernel does not convert; is host data that no upload carries; lives on another stream."""


@attrs.frozen
class Misfit:
    """Why a batch's sources cannot be packed: the next lowering takes it, or says what is wrong with it."""

    why: Detour


@attrs.frozen
class Kind:
    """One source's way: by its address, where it is strided after it was compacted, or with its bytes in the packet.

    dtype: the source's. carrier: what makes bytes of it, if it travels with its bytes, `nbytes` of them. host: its
    type, if it is no tensor. loose: whether its carrier takes all kinds of host data, and asks itself what it is.
    """

    dtype: torch.dtype
    carrier: Carrier | None = None
    nbytes: int = 0
    compact: bool = False
    host: type | None = None
    loose: bool = False


def kind_of(want: Wanted, source: Any, shape: tuple[int, ...], buffer: Buffer, *, fused: bool) -> Kind | Misfit:
    """How a source travels to its slot; a misfit where it cannot, or is none at all."""
    if isinstance(source, torch.Tensor):
        if fused and is_in_place(source, buffer) and tuple(source.shape) == shape:
            return Kind(source.dtype)
        return _of_tensor(want, source, shape, fused=fused)
    if not fused:
        return Misfit("host_data")
    if type(source) is np.ndarray:
        return _of_array(want, source, shape)
    if type(source) in (list, tuple) and len(shape) == 1 and len(source) == shape[0]:
        carrier = list_carrier(shape[0], want.dtype)
        if carrier is not None:
            return Kind(want.dtype, carrier, shape[0] * want.dtype.itemsize, host=type(source))
    return Misfit("host_data")


def hosted_kind(want: Wanted, source: Any, fact: Fact, buffers: Buffers, *, loose: bool) -> Kind:
    """How host data travels to a slot that foreach copies fill: in the slot's own dtype.

    loose: as a tensor, for data that is moved by itself.
    """

    def tensor(brought: Any) -> torch.Tensor:
        return host_tensor(want, brought, fact, buffers)

    if loose:
        return Kind(want.dtype, tensor, loose=True)
    kind = _as_it_is(want, source, fact[2])
    if kind is None:
        carry = tensor_carrier(math.prod(fact[2]) * want.dtype.itemsize)
        return Kind(want.dtype, lambda brought: carry(tensor(brought)), loose=True)
    return kind


def _as_it_is(want: Wanted, source: Any, shape: tuple[int, ...]) -> Kind | None:
    """Host data whose bytes are the slot's, with no more ado; None for all other."""
    nbytes = math.prod(shape) * want.dtype.itemsize
    if isinstance(source, torch.Tensor):
        kind = _of_tensor(want, source, shape, fused=True) if want.is_hosted(source) else None
        return kind if isinstance(kind, Kind) and kind.dtype == want.dtype else None
    if type(source) is np.ndarray:
        kind = _of_array(want, source, shape)
        return kind if isinstance(kind, Kind) and kind.dtype == want.dtype else None
    carrier = list_carrier(shape[0], want.dtype) if type(source) in (list, tuple) and len(shape) == 1 else None
    return None if carrier is None else Kind(want.dtype, carrier, nbytes, host=type(source))


def _of_array(want: Wanted, source: "np.ndarray[Any, Any]", shape: tuple[int, ...]) -> Kind | Misfit:
    dtype = array_dtype(source)
    if dtype is None or tuple(source.shape) != shape or not source.flags.c_contiguous or not _is_taken(want, dtype):
        return Misfit("host_data")
    return Kind(dtype, carry_array, source.nbytes, host=np.ndarray)


def _of_tensor(want: Wanted, source: torch.Tensor, shape: tuple[int, ...], *, fused: bool) -> Kind | Misfit:
    plain = source.layout == torch.strided and not source.is_neg() and not source.is_conj()
    if not plain or tuple(source.shape) != shape:
        return Misfit("layout")
    if not (_is_taken(want, source.dtype) if fused else source.dtype == want.dtype):
        return Misfit("conversion")
    strided = not source.is_contiguous()
    if source.device == want.device:
        allowed = not strided or want.slot.takes_strided()
        return Kind(source.dtype, compact=strided and fused) if allowed else Misfit("layout")
    if not source.is_cpu or not fused or strided:
        return Misfit("host_data")
    return Kind(source.dtype, tensor_carrier(source.nbytes), source.nbytes)


def _is_taken(want: Wanted, dtype: torch.dtype) -> bool:
    """Whether the kernel can write a source of this dtype into the slot."""
    return dtype == want.dtype or (want.takes(dtype) and converts(dtype, want.dtype))
