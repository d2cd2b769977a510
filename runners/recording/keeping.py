"""Keeping what a batch brings: how large a value is, and a copy of it that no later step can reach."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import numpy as np
import torch

from ...backends.base import DEVICE, HOST, Backend
from ...dataflow.hostdata import array_dtype
from ...dataflow.roles import dtype_text
from .plain import DEPTH, NotPlainError, lists_fit, plain_to_data
from .records import Value

Copy = Callable[[], torch.Tensor]
_WORD: Final = 8
"""Bytes of a number in a list."""
_FLAG: Final = torch.uint8
_NUMBERS: Final = {int: torch.int64, float: torch.float64, bool: torch.bool}


@attrs.frozen(eq=False)
class Found:
    """A value that is not copied yet: what it is, its bytes, and how to copy it; nothing to copy of plain data."""

    value: Value
    nbytes: int = 0
    copy: Copy | None = None
    on_device: bool = False


@attrs.frozen(eq=False)
class Kept:
    """A value, and the copy of its elements; on the host, but perhaps still on the way there."""

    value: Value
    tensor: torch.Tensor | None = None


class Keeper:
    """Copies values of one runner's steps to the host.

    What lies on the device is copied in the order of the stream, into pinned memory, and nobody waits for it: a copy
    is what the step found, and those made before a device failed can still be read after it did. most: bytes of one
    value; lists that would have more are not even looked through.
    """

    def __init__(self, backend: Backend, most: int) -> None:
        self._backend = backend
        self._most = most
        self._one: torch.Tensor | None = None

    def find(self, name: str, source: Any) -> Found:
        """What a source is; nothing is copied or read. Never raises: what cannot be kept says why."""
        try:
            return self._find(name, source)
        except NotPlainError as error:
            return _other(name, str(error))
        except Exception as error:  # noqa: BLE001 - a source may be anything, and a recording must not end a step
            return _other(name, f"{type(error).__name__}: {error}"[:300])

    def _find(self, name: str, source: Any) -> Found:
        if isinstance(source, torch.Tensor):
            return self._find_tensor(name, source)
        if isinstance(source, np.ndarray):
            return _find_array(name, source)
        if isinstance(source, list | tuple):
            kind: Any = "list" if isinstance(source, list) else "tuple"
            shape = _shape_of(source)
            if _WORD * math.prod(shape) > self._most:
                return Found(Value(name=name, kind=kind, shape=shape), _WORD * math.prod(shape))
            numbers = _numbers_in(source)
            if numbers is not None and lists_fit(numbers.shape):
                return _held(Value(name=name, kind=kind, **_facts(numbers)), numbers)
        data = plain_to_data(source)
        return Found(Value(name=name, kind="plain", value=data), len(repr(data)))

    def _find_tensor(self, name: str, source: torch.Tensor) -> Found:
        if source.layout != torch.strided or source.device.type == "meta":
            what = "meta" if source.device.type == "meta" else str(source.layout)
            return _other(name, f"a {what} tensor of shape {list(source.shape)}")
        dense = source.is_contiguous() and not source.is_neg() and not source.is_conj()
        where: Any = "device" if source.device.type == self._backend.device.type else "host"
        value = Value(name=name, kind="tensor", where=where, dense=dense, **_facts(source))
        nbytes = source.numel() * source.element_size()
        return Found(value, nbytes, lambda: self._copied(source), on_device=not source.is_cpu)

    def _copied(self, source: torch.Tensor) -> torch.Tensor:
        if source.is_cpu:
            made = source.clone(memory_format=torch.contiguous_format)
            return made.resolve_neg().resolve_conj() if made.is_neg() or made.is_conj() else made
        place = self._backend.empty(tuple(source.shape), source.dtype, HOST)
        return place.copy_(source, non_blocking=True)

    def keep(self, found: Sequence[Found]) -> "Copies":
        """The values with their elements copied. Raises what the device does where it has failed."""
        with torch.no_grad(), torch.inference_mode(mode=False):
            kept = [Kept(one.value, None if one.copy is None else one.copy()) for one in found]
            arrived = self._arrival() if any(one.on_device for one in found) else None
        return Copies(kept, sum(one.nbytes for one in found), arrived)

    def _arrival(self) -> torch.Tensor:
        if self._one is None:
            self._one = torch.ones(1, dtype=_FLAG, device=self._backend.device)
        flag = self._backend.empty((1,), _FLAG, HOST).zero_()
        return flag.copy_(self._one, non_blocking=True)


@attrs.define(eq=False)
class Copies:
    """Values that were copied together, and their bytes.

    arrived: a flag on the host that is 1 once the device has made all the copies; None where it makes none.
    """

    kept: list[Kept] = attrs.field(factory=list)
    nbytes: int = 0
    arrived: torch.Tensor | None = None

    @classmethod
    def sizes_of(cls, found: Sequence[Found], why: str) -> "Copies":
        """Values without their elements, and why they are without."""
        gone = [attrs.evolve(one.value, kept=False, value=None, why=why) if one.nbytes else one.value for one in found]
        return cls([Kept(value) for value in gone])

    def give_up(self, why: str) -> None:
        """Let go of copies that the device has not made by now."""
        if self.arrived is not None and not bool(self.arrived):
            self.kept = [
                Kept(attrs.evolve(one.value, kept=False, why=why)) if one.value.where == DEVICE else one
                for one in self.kept
            ]
        self.arrived = None


def _find_array(name: str, source: "np.ndarray[Any, Any]") -> Found:
    if array_dtype(source) is None:
        return _other(name, f"an array of {source.dtype}, which torch has no dtype for")
    tensor = torch.from_numpy(np.array(source, order="C"))
    return _held(Value(name=name, kind="array", **_facts(tensor)), tensor)


def _held(value: Value, tensor: torch.Tensor) -> Found:
    """A value of which a copy had to be made to know it."""
    return Found(value, tensor.nbytes, lambda: tensor)


def _other(name: str, why: str) -> Found:
    return Found(Value(name=name, kind="other", why=why))


def _facts(tensor: torch.Tensor) -> dict[str, Any]:
    return {"dtype": dtype_text(tensor.dtype), "shape": tuple(tensor.shape)}


def _shape_of(source: Sequence[Any]) -> tuple[int, ...]:
    """The shape of nested lists, by the first ones."""
    shape: list[int] = []
    row: Any = source
    while isinstance(row, list | tuple) and row and len(shape) <= DEPTH:
        shape.append(len(row))
        row = row[0]
    return tuple(shape)


def _numbers_in(source: Sequence[Any]) -> torch.Tensor | None:
    """A tensor of nested lists of one kind of number and one shape; None for all else, which plain data may be."""
    shape, flat = [len(source)], list(source)
    while flat and all(type(one) is list for one in flat) and len({len(one) for one in flat}) == 1:
        shape.append(len(flat[0]))
        flat = [one for row in flat for one in row]
    kinds = set(map(type, flat))
    if len(kinds) != 1 or (dtype := _NUMBERS.get(kinds.pop())) is None:
        return None
    try:
        return torch.tensor(flat, dtype=dtype, device="cpu").view(shape)
    except (OverflowError, RuntimeError):  # a number beyond int64, which plain data holds
        return None
