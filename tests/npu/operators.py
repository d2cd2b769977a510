"""How a case for an operator of the stand-in is written: a call, its random inputs, the types to try."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

Maker = Callable[[torch.dtype], torch.Tensor]

SMALL = (torch.float32, torch.int64)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NUMBERS = (*FLOATS, torch.int64, torch.int32)
ALL = (*FLOATS, *WHOLE, torch.bool)


def named(owner: Any, names: str) -> list[Any]:
    """Calls of an owner by their names."""
    return [getattr(owner, name) for name in names.split()]


def values(*shape: int, low: int = -9, high: int = 10) -> Maker:
    """Random numbers of the type under test."""

    def make(dtype: torch.dtype) -> torch.Tensor:
        if dtype is torch.bool:
            return torch.rand(shape) < 0.5
        if dtype.is_floating_point:
            return (torch.rand(shape) * (high - low) + low).to(dtype)
        return torch.randint(0 if dtype is torch.uint8 else low, high, shape).to(dtype)

    return make


def positive(*shape: int) -> Maker:
    """Random numbers above zero."""
    return values(*shape, low=1)


def places(*shape: int, below: int, dtype: torch.dtype = torch.int64) -> Maker:
    """Random places, whatever the type under test."""
    return lambda _: torch.randint(0, below, shape, dtype=dtype)


def distinct(count: int, *, below: int, dtype: torch.dtype = torch.int64) -> Maker:
    """Random places, none of them twice: which of two writes to one place wins is not said."""
    return lambda _: torch.randperm(below)[:count].to(dtype)


def mask(*shape: int) -> Maker:
    """Random yes and no."""
    return lambda _: torch.rand(shape) < 0.5


def ascending(count: int) -> Maker:
    """Random numbers in order."""
    make = values(count)
    return lambda dtype: make(dtype).sort().values


@attrs.frozen
class Operator:
    """What is called, on which inputs, for which types, and whether a graph can hold it."""

    name: str
    call: Callable[..., Any]
    inputs: Sequence[Maker]
    dtypes: Sequence[torch.dtype]
    graph: bool

    def made(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Random inputs on the CPU."""
        return [make(dtype) for make in self.inputs]


def op(
    name: str, call: Callable[..., Any], *inputs: Maker, dtypes: Sequence[torch.dtype] = SMALL, graph: bool = True
) -> Operator:
    """One line of the table."""
    return Operator(name, call, inputs, dtypes, graph)


def into(change: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that writes into its first argument, as one that answers what it wrote."""

    def call(self: torch.Tensor, *others: Any) -> torch.Tensor:
        written = self.clone()
        change(written, *others)
        return written

    return call


def foreach(change: Callable[[list[torch.Tensor], list[torch.Tensor]], Any]) -> Callable[..., Any]:
    """An operator on two lists that writes into the first, as one on four tensors."""

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        written = [tensor.clone() for tensor in tensors[:2]]
        change(written, list(tensors[2:]))
        return written

    return call


A = values(4, 6)
B = positive(4, 6)
