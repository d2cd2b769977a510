"""Admission: a batch's sources made ready to copy, or why they do not fit, slot by slot, with the way out."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from .buffers import Buffer, Buffers
from .capabilities import DEVICE, dtype_text
from .errors import BatchError, MissingSourceError
from .hostdata import HOST_KINDS, tensor_of
from .readable import unreadable
from .slots import Slot

Fact = tuple[torch.dtype, torch.device, tuple[int, ...]]
"""What is expected of a source: dtype, device and shape."""


@attrs.frozen
class Wanted:
    """A slot that a fill copies, with its dtype and its place on this device."""

    name: str
    slot: Slot
    dtype: torch.dtype
    device: torch.device

    @property
    def kind(self) -> tuple[torch.dtype, int]:
        """What lists and arrays for it become: a tensor of this dtype, and of so many dims."""
        return self.dtype, len(self.slot.shape)

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


def check_sources(
    wanted: Sequence[Wanted], sources: Sequence[Any], facts: Sequence[Fact], buffers: Buffers
) -> list[torch.Tensor]:
    """All sources as tensors, those of host data on the host.

    Raises MissingSourceError if sources are missing, else BatchError with every fault.
    """
    rows = list(zip(wanted, sources, facts, strict=True))
    missing = [_missing(want) for want, source, _ in rows if source is None]
    if missing:
        raise MissingSourceError("; ".join(missing))
    found = [_admit(want, source, fact, buffers[want.name]) for want, source, fact in rows]
    faults = [fault for tensor in found if isinstance(tensor, list) for fault in tensor]
    if faults:
        raise BatchError("; ".join(faults))
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def admit(
    wanted: Sequence[Wanted],
    sources: Sequence[Any],
    facts: Sequence[Fact],
    buffers: Buffers,
    move: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Make tensors of all sources: host data goes where its slot is, what lies in a buffer is copied first.

    move: what takes host data to the device, in memory of its own there. Raises as `check_sources`.
    """
    placed = []
    for want, source, tensor in zip(wanted, sources, check_sources(wanted, sources, facts, buffers), strict=True):
        if want.is_hosted(source):
            made = _dense(tensor, want.dtype, buffers)
            placed.append(made.to(want.device, copy=True) if move is None else move(made))
        elif is_in_place(tensor, buffers[want.name]):
            placed.append(tensor)
        else:
            placed.append(_readable(tensor, buffers))
    return tuple(placed)


def host_tensor(want: Wanted, source: Any, fact: Fact, buffers: Buffers) -> torch.Tensor:
    """Host data for one slot as a dense tensor of its dtype; ValueError where it is none, or does not fit."""
    if not want.is_hosted(source):
        message = "no host data"
        raise ValueError(message)
    return _dense(admitted_tensor(want, source, fact, buffers), want.dtype, buffers)


def admitted_tensor(want: Wanted, source: Any, fact: Fact, buffers: Buffers) -> torch.Tensor:
    """One source as a tensor; ValueError where it does not fit."""
    found = _admit(want, source, fact, buffers[want.name])
    if isinstance(found, list):
        raise ValueError("; ".join(found))  # noqa: TRY004 - what is wrong is what it holds
    return found


def _dense(tensor: torch.Tensor, dtype: torch.dtype, buffers: Buffers) -> torch.Tensor:
    """A host tensor in one piece, of a dtype, and in no slot's memory."""
    made = tensor.detach().resolve_neg().resolve_conj().to(dtype).contiguous()
    return made.clone() if buffers.holds(made) else made


def _admit(want: Wanted, source: Any, fact: Fact, buffer: Buffer) -> torch.Tensor | list[str]:
    """One source as a tensor, or what is wrong with it."""
    why = unreadable(source)
    if why:
        return [f"{_expected(want, fact)}, got {why}"]
    if is_in_place(source, buffer) and tuple(source.shape) == fact[2]:
        return source  # type: ignore[no-any-return] # a tensor, as was just found
    if isinstance(source, HOST_KINDS):
        try:
            source = tensor_of(source, *want.kind)
        except (RuntimeError, TypeError, ValueError) as error:
            return [f"{_expected(want, fact)}, got {type(source).__name__}: {error}"]
    faults = list(_faults(want, source, fact))
    return faults or source


def _readable(tensor: torch.Tensor, buffers: Buffers) -> torch.Tensor:
    """A source whose bytes can be read while slots are written: itself, or a copy."""
    if tensor.is_neg() or tensor.is_conj() or tensor.data_ptr() % tensor.itemsize or buffers.holds(tensor):
        return tensor.clone().resolve_neg().resolve_conj()
    return tensor


def is_in_place(source: Any, buffer: Buffer) -> bool:
    """Whether a source is the first part of its own slot's buffer, of the very same layout and dtype."""
    if not isinstance(source, torch.Tensor):
        return False
    mine = buffer.tensor
    same = source.data_ptr() == mine.data_ptr() and source.numel() > 0 and source.dtype == mine.dtype
    return same and source.stride() == mine.stride() and not source.is_neg() and not source.is_conj()


def check_carried(want: Wanted, source: Any, fact: Fact) -> None:
    """Hold one source that no fill copies to what its slot declares: MissingSourceError or BatchError."""
    why = unreadable(source)
    if why:
        message = f"{_expected(want, fact)}, got {why}"
        raise BatchError(message)
    if source is None:
        message = f"slot {want.name!r} is carried from the batch, which has none: compute it, or do not carry it"
        raise MissingSourceError(message)
    faults = list(_faults(want, source, fact))
    if not faults and source.device != want.device:
        faults = [f"{_expected(want, fact)}, got a tensor on {source.device}; move it there first"]
    if faults:
        raise BatchError("; ".join(faults))


def fits(want: Wanted, source: Any, shape: tuple[int, ...]) -> bool:
    """Whether nothing is wrong with a source that can be read."""
    if not isinstance(source, torch.Tensor) or source.shape != shape:
        return False
    there = source.device == want.device or (source.is_cpu and want.slot.placement == DEVICE)
    return there and want.takes(source.dtype) and (source.is_contiguous() or want.slot.strided)


def _missing(want: Wanted) -> str:
    source = want.slot.reads(want.name)
    return f"slot {want.name!r}: {source} is missing; give it, or declare the slot with default=None"


def _expected(want: Wanted, fact: Fact) -> str:
    return f"slot {want.name!r}: expected {dtype_text(want.dtype)} of shape {list(fact[2])} on {want.device}"


def _faults(want: Wanted, source: Any, fact: Fact) -> Iterator[str]:
    if fits(want, source, fact[2]):
        return
    slot, shape, wanted = want.slot, fact[2], _expected(want, fact)
    if not isinstance(source, torch.Tensor):
        yield f"{wanted}, got {type(source).__name__}; make a tensor of it"
        return
    if not want.takes(source.dtype):
        lossy = source.dtype.is_floating_point and not want.dtype.is_floating_point
        way_out = "round it yourself" if lossy else f"convert it, or declare converts=({source.dtype},)"
        yield f"{wanted}, got {dtype_text(source.dtype)}; {way_out}"
    if source.device != want.device and not (source.is_cpu and slot.placement == DEVICE):
        yield f"{wanted}, got a tensor on {source.device}; move it there first"
    if tuple(source.shape) != shape:
        yield f"{wanted} ({', '.join(map(str, slot.shape))}), got shape {list(source.shape)}"
    elif not slot.strided and not source.is_contiguous():
        strides = list(source.stride())
        yield f"{wanted}, contiguous, got one with strides {strides}; pass `.contiguous()`, or declare strided=True"
