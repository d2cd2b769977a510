"""Adopting memory: what a tensor must be to serve as a slot's buffer."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias, final

import attrs
import torch

from .axes import Sizes, extent
from .capabilities import Capabilities, Placement, dtype_text, resolve_dtype
from .declaration import Declaration
from .errors import BindError

Allocate: TypeAlias = Callable[[tuple[int, ...], torch.dtype, Placement], torch.Tensor]


@final
@attrs.frozen(eq=False)
class Exclusive:
    """A tensor to adopt that only the runner writes: `bind={"ids": Exclusive(tensor)}`.

    Its tail is then reset where an earlier step left it dirty, as that of memory which the runner allocates. Any other
    adopted tensor may be written by its owner between steps, so that its tail is reset in each step.
    """

    tensor: torch.Tensor


Bound: TypeAlias = torch.Tensor | Exclusive


def tensor_in(bound: Bound) -> torch.Tensor:
    """The tensor that is to be adopted."""
    return bound.tensor if isinstance(bound, Exclusive) else bound


def check_bindings(
    declaration: Declaration,
    capacity: Sizes,
    capabilities: Capabilities,
    empty: Allocate,
    bind: Mapping[str, Bound],
) -> None:
    """Refuse tensors that cannot be adopted, all of them at once: BindError."""
    faults = []
    tensors = {name: tensor_in(bound) for name, bound in bind.items()}
    for name, tensor in tensors.items():
        if name not in declaration.slots:
            faults.append(f"bind names {name!r}, which is no slot of {declaration.name}")
        elif not isinstance(tensor, torch.Tensor):
            faults.append(f"slot {name!r}: expected a tensor to adopt, got {type(tensor).__name__}")
        else:
            slot = declaration.slots[name]
            like = empty((0,), resolve_dtype(slot.dtype, capabilities), slot.placement)
            faults += _faults(name, tensor, like, extent(slot.shape, capacity))
    faults = faults or list(_overlaps(tensors))
    if faults:
        raise BindError("; ".join(faults))


def _faults(name: str, tensor: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...]) -> Iterator[str]:
    if tuple(tensor.shape) != shape:
        yield f"slot {name!r}: expected shape {list(shape)} (its full capacity), got {list(tensor.shape)}"
    if tensor.dtype != like.dtype:
        yield f"slot {name!r}: expected {dtype_text(like.dtype)}, got {dtype_text(tensor.dtype)}"
    if tensor.device != like.device:
        yield f"slot {name!r}: expected memory on {like.device}, got {tensor.device}"
    if not tensor.is_contiguous():
        yield f"slot {name!r}: expected a contiguous tensor, got strides {list(tensor.stride())}; adopt `.contiguous()`"
    if tensor.is_inference():
        yield f"slot {name!r}: made under inference_mode, so it cannot be filled outside it; make it outside"
    if tensor.requires_grad:
        yield f"slot {name!r}: requires grad; adopt `.detach()`"


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last address that a tensor's elements lie in."""
    if tensor.is_contiguous():
        return (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
    if tensor.numel() == 0:
        return (tensor.data_ptr(), tensor.data_ptr())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize)


def merge(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Address ranges in order, those that touch made one."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def overlaps(tensor: torch.Tensor, spans: Iterable[tuple[int, int]]) -> bool:
    """Whether a tensor's elements lie in one of several address ranges."""
    low, high = span(tensor)
    return any(low < stop and start < high for start, stop in spans)


def _overlaps(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    spans = sorted((span(tensor), name) for name, tensor in tensors.items())
    for ((_, stop), first), ((start, _), second) in itertools.pairwise(spans):
        if start < stop:
            yield f"slots {first!r} and {second!r} are bound to overlapping memory: each needs its own"
