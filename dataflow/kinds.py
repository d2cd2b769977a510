"""Kinds: how a source travels to its slot, by its address or with its bytes in the upload."""

import functools
import math
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch

from .admission import Fact, Wanted, admitted_tensor, fits, host_tensor, is_in_place
from .buffers import Buffers
from .hostdata import (
    HOST_KINDS,
    NOT_CARRIED,
    Carrier,
    array_carrier,
    array_dtype,
    list_carrier,
    tensor_carrier,
    tensor_of,
)
from .lanes import converts, row_stride
from .readable import has_memory, unreadable

Prepare = Callable[[Any], torch.Tensor]
"""Makes a tensor of a source that the kernel, or a plain copy, can read; raises as a carrier does where it cannot."""
Move = Callable[[torch.Tensor], torch.Tensor]
"""Takes a dense host tensor to the device; see `Upload.move`."""


@attrs.frozen
class Kind:
    """One source's way: by its address, where it needs that after `prepare`, or with its bytes in the packet.

    dtype: the source's, once it is prepared. carrier: what makes bytes of it, if it travels with its bytes, `nbytes` of
    them. prepare: what makes another tensor of it first. pace: elements from one outer row to the next, of a tensor
    that the kernel reads in rows apart. loose: whether its carrier or `prepare` takes all kinds of host data; those of
    lists and arrays look at the type by themselves, in any case. in_place: whether it is the slot's own memory, which
    its producer has written. hosted: whether it is host data that is taken up to a slot on the device.
    """

    dtype: torch.dtype
    carrier: Carrier | None = None
    nbytes: int = 0
    prepare: Prepare | None = None
    pace: int | None = None
    loose: bool = False
    in_place: bool = False
    hosted: bool = False


def kind_of(
    want: Wanted, source: Any, fact: Fact, buffers: Buffers, *, fused: bool, carries: bool, move: Move | None
) -> Kind | None:
    """How a source travels to its slot; None where it does not fit.

    fused: whether the kernel writes the slot; else a copy does. carries: whether the packet has room for its bytes.
    move: what takes to the device the host data that the packet does not carry; None where nothing is uploaded.
    """
    if isinstance(source, torch.Tensor):
        if unreadable(source) or source.shape != fact[2]:
            return None
        if is_in_place(source, buffers[want.name]):
            return Kind(source.dtype, in_place=True)
        if not want.is_hosted(source):
            return _of_tensor(want, source, fused=fused) if fits(want, source, fact[2]) else None
    return _of_host_data(want, source, fact, buffers, fused=fused, carries=carries, move=move)


def _of_host_data(
    want: Wanted, source: Any, fact: Fact, buffers: Buffers, *, fused: bool, carries: bool, move: Move | None
) -> Kind | None:
    """Host data: with its bytes in the packet, by an upload of its own, or as a tensor where its slot is."""
    if not isinstance(source, HOST_KINDS) and not fits(want, source, fact[2]):
        return None
    if carries:
        takes = (lambda dtype: _is_taken(want, dtype)) if fused else (lambda dtype: dtype == want.dtype)
        kind = _as_it_is(want, source, fact[2], takes) or _as_tensor(want, fact, buffers)
        return attrs.evolve(kind, hosted=True)
    if move is not None:
        up = move
        return Kind(
            want.dtype, prepare=lambda brought: up(host_tensor(want, brought, fact, buffers)), loose=True, hosted=True
        )
    return _on_host(want, source, fact, buffers)


def _of_tensor(want: Wanted, source: torch.Tensor, *, fused: bool) -> Kind:
    """A tensor that fits, where its slot is. A plain copy converts it, and reads it as it lies."""
    if source.is_neg() or source.is_conj():  # before it is converted: negated bytes are no negative numbers
        return Kind(
            want.dtype, prepare=lambda brought: _live(brought).resolve_conj().resolve_neg().to(want.dtype).contiguous()
        )
    if not fused or (source.dtype == want.dtype and source.is_contiguous()):
        return _plain(source.dtype)
    if not _is_taken(want, source.dtype):
        return Kind(
            want.dtype, prepare=lambda brought: _live(brought).to(want.dtype, memory_format=torch.contiguous_format)
        )
    pace = _pace(want, source)
    if pace is not None or source.is_contiguous():
        return Kind(source.dtype, pace=pace)
    return Kind(source.dtype, prepare=lambda brought: _live(brought).contiguous())


@functools.cache
def _plain(dtype: torch.dtype) -> Kind:
    """A tensor that is read as it lies."""
    return Kind(dtype)


def _pace(want: Wanted, source: torch.Tensor) -> int | None:
    """How far apart the rows are that the kernel reads; None of a dense tensor, and of one that it cannot read."""
    varying = want.slot.varying
    if source.is_contiguous() or not varying or not want.slot.takes_strided():
        return None
    return row_stride(source, varying[0])


def _live(source: torch.Tensor) -> torch.Tensor:
    """A tensor that can be read; ValueError where its memory was freed since one like it was looked at."""
    if not has_memory(source):
        message = "its memory was freed"
        raise ValueError(message)
    return source


def _on_host(want: Wanted, source: Any, fact: Fact, buffers: Buffers) -> Kind | None:
    """Lists and arrays for a slot that a plain copy fills from host memory; None where they do not fit."""
    kind = _as_it_is(want, source, fact[2], want.takes)
    if kind is None or kind.carrier is None:
        try:
            admitted_tensor(want, source, fact, buffers)
        except ValueError:
            return None

        def admitted(brought: Any) -> torch.Tensor:  # of the slot's dtype, whatever this one and those to come are of
            return admitted_tensor(want, brought, fact, buffers).to(device=want.device, dtype=want.dtype)

        return Kind(want.dtype, prepare=admitted, loose=True)
    carrier = kind.carrier
    if isinstance(source, np.ndarray):
        return attrs.evolve(
            kind, carrier=None, nbytes=0, prepare=lambda brought: tensor_of(carrier(brought), want.dtype)
        )
    with torch.inference_mode(mode=False):
        made = torch.empty(fact[2], dtype=want.dtype, device="cpu")  # written anew for each batch, and copied at once
    array: Any = made.numpy()
    room: Any = memoryview(array).cast("B") if kind.nbytes else bytearray()

    def prepare(brought: Any) -> torch.Tensor:
        room[:] = carrier(brought)
        return made

    return attrs.evolve(kind, carrier=None, nbytes=0, prepare=prepare)


def _as_tensor(want: Wanted, fact: Fact, buffers: Buffers) -> Kind:
    """Host data of any kind, whose bytes are those of a tensor of the slot's dtype."""
    nbytes = math.prod(fact[2]) * want.dtype.itemsize
    carry = tensor_carrier(nbytes)
    return Kind(want.dtype, lambda brought: carry(host_tensor(want, brought, fact, buffers)), nbytes, loose=True)


def _as_it_is(want: Wanted, source: Any, shape: tuple[int, ...], takes: Callable[[torch.dtype], bool]) -> Kind | None:
    """Host data of a dtype that is taken, whose bytes need no tensor in between; None for all other."""
    kind = None
    if isinstance(source, torch.Tensor):
        plain = fits(want, source, shape) and source.is_contiguous() and not source.is_neg() and not source.is_conj()
        if plain and want.is_hosted(source):
            kind = Kind(source.dtype, tensor_carrier(source.nbytes), source.nbytes)
    elif type(source) is np.ndarray:
        kind = _of_array(source, shape)
    elif type(source) in (list, tuple) and len(shape) == 1 and len(source) == shape[0]:
        carrier = list_carrier(shape[0], want.dtype)
        if carrier is not None and _carries(carrier, source):
            kind = Kind(want.dtype, carrier, shape[0] * want.dtype.itemsize)
    return kind if kind is not None and takes(kind.dtype) else None


def _carries(carrier: Carrier, source: Any) -> bool:
    """Whether a list is of the plain numbers that its carrier takes."""
    try:
        carrier(source)
    except NOT_CARRIED:
        return False
    return True


def _of_array(source: "np.ndarray[Any, Any]", shape: tuple[int, ...]) -> Kind | None:
    dtype = array_dtype(source)
    if dtype is None or tuple(source.shape) != shape or not source.flags.c_contiguous:
        return None
    return Kind(dtype, array_carrier(source), source.nbytes)


def _is_taken(want: Wanted, dtype: torch.dtype) -> bool:
    """Whether the kernel can write a source of this dtype into the slot."""
    return dtype == want.dtype or (want.takes(dtype) and converts(dtype, want.dtype))
