"""Refusals: why a batch does not fit, slot by slot, in words that say the way out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import attrs
import torch

from .binding import overlaps
from .errors import BatchError, MissingSourceError
from .ready import Fact, Ready
from .roles import dtype_text
from .slots import Slot

Spans = Sequence[tuple[int, int]]


class OtherDtypes(BatchError):  # noqa: N818 - not an error to the user: the fill plans anew and goes on
    """The batch fits, but sources have other dtypes than planned, which their slots convert."""

    def __init__(self, source_dtypes: Mapping[str, torch.dtype]) -> None:
        super().__init__("sources have other dtypes than planned")
        self.source_dtypes = dict(source_dtypes)


@attrs.frozen
class Wanted:
    """A slot that a fill copies, with its dtype on this device."""

    name: str
    slot: Slot
    dtype: torch.dtype

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether a source of this dtype can be copied into the slot."""
        return dtype == self.dtype or dtype in self.slot.converts_from()


def refuse(wanted: Sequence[Wanted], sources: Sequence[Any], ready: Ready, spans: Spans) -> NoReturn:
    """Say what is wrong with a batch: MissingSourceError if sources are missing, else BatchError with every fault."""
    rows = list(zip(wanted, sources, ready.facts, strict=True))
    missing = [_missing(want) for want, source, _ in rows if source is None]
    if missing:
        raise MissingSourceError("; ".join(missing))
    faults = [fault for want, source, fact in rows for fault in _faults(want, source, fact, spans)]
    if faults:
        raise BatchError("; ".join(faults))
    raise OtherDtypes({want.name: source.dtype for want, source, _ in rows if source.dtype != want.dtype})


def check_source(want: Wanted, source: Any, fact: Fact) -> None:
    """Hold one source that no fill copies to what its slot declares: MissingSourceError or BatchError."""
    if source is None:
        message = f"slot {want.name!r} is carried from the batch, which has none: compute it, or do not carry it"
        raise MissingSourceError(message)
    faults = list(_faults(want, source, fact, ()))
    if faults:
        raise BatchError("; ".join(faults))


def _missing(want: Wanted) -> str:
    source = want.slot.reads(want.name)
    return f"slot {want.name!r}: {source} is missing; give it, or declare the slot with default=None"


def _faults(want: Wanted, source: Any, fact: Fact, spans: Spans) -> Iterator[str]:
    slot, shape = want.slot, fact[2]
    device = fact[1] if isinstance(fact[1], torch.device) else torch.device("cpu")
    wanted = f"slot {want.name!r}: expected {dtype_text(want.dtype)} of shape {list(shape)} on {device}"
    if not isinstance(source, torch.Tensor):
        yield f"{wanted}, got {type(source).__name__}; make a tensor of it"
        return
    if not want.takes(source.dtype):
        lossy = source.dtype.is_floating_point and not want.dtype.is_floating_point
        way_out = "round it yourself" if lossy else f"convert it, or declare converts=({source.dtype},)"
        yield f"{wanted}, got {dtype_text(source.dtype)}; {way_out}"
    if source.layout != torch.strided:
        yield f"{wanted}, got a {source.layout} tensor; pass a dense one"
        return
    if source.device != device:
        yield f"{wanted}, got a tensor on {source.device}; move it there first"
    if tuple(source.shape) != shape:
        yield f"{wanted} ({', '.join(map(str, slot.shape))}), got shape {list(source.shape)}"
    elif not slot.takes_strided() and not source.is_contiguous():
        strides = list(source.stride())
        yield f"{wanted}, contiguous, got one with strides {strides}; pass `.contiguous()`, or declare strided=True"
    if overlaps(source, spans):
        yield f"slot {want.name!r}: the source lies in a slot's own buffer, which this fill writes; pass a copy"
