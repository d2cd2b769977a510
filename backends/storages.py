"""The storages that a capture meets: those that it allocates, those that it finds, and what it overwrote."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import attrs
import torch
from torch.utils.weak import TensorWeakRef

from ..dataflow.errors import ReplayError
from .refusals import refuse, storage_key

MOVED: Final = "a graph's addresses are fixed: pass an output of the right shape, allocated before it is written"


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an operator's arguments or results, in order; lists and tuples are searched."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


@attrs.define
class Found:
    """A storage that was there before the capture, the operator that took it first, and the tensors that it was in.

    It keeps the storage alive. before: the bytes that it had, where the step writes it.
    """

    storage: torch.UntypedStorage
    address: int
    nbytes: int
    operator: str
    tensors: list[tuple[TensorWeakRef, int]] = attrs.field(factory=list)
    before: torch.UntypedStorage | None = None

    @property
    def has_moved(self) -> bool:
        """Whether the storage is not where it was at capture, or of another size."""
        return (self.storage.data_ptr(), self.storage.nbytes()) != (self.address, self.nbytes)

    def check(self) -> None:
        """Raise ReplayError if the storage, or a tensor over it that still lives, is not where it was at capture."""
        if self.has_moved:
            message = (
                f"a storage of {self.nbytes} bytes that {self.operator} takes in the graph was resized or moved: "
                "capture again"
            )
            raise ReplayError(message)
        for reference, address in self.tensors:
            tensor = reference()
            if tensor is not None and tensor.data_ptr() != address:
                what = f"a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, that {self.operator} takes"
                message = f"{what} has moved from {address:#x} to {tensor.data_ptr():#x}: capture again"
                raise ReplayError(message)


_ALL_ONES: Final = 255  # a byte


class Storages:
    """What a capture knows of each storage; `restore` and `poison` make it leave no trace."""

    def __init__(self) -> None:
        self._found: dict[int, Found] = {}
        self._owned: dict[int, torch.Tensor] = {}
        self._made: dict[int, torch.Tensor] = {}  # what operators returned, alive, so that no id is used twice
        self.constants: set[int] = set()

    def read(self, tensor: torch.Tensor, operator: str) -> None:
        """Note a tensor that an operator takes."""
        key = storage_key(tensor)
        if key in self._owned or id(tensor) in self._made:
            return
        storage = tensor.untyped_storage()
        found = self._found.setdefault(key, Found(storage, storage.data_ptr(), storage.nbytes(), operator))
        self._made[id(tensor)] = tensor
        found.tensors.append((TensorWeakRef(tensor), tensor.data_ptr()))

    def write(self, tensor: torch.Tensor) -> None:
        """Keep a found storage's bytes before its first write: all of them, whatever the size of the view."""
        key = storage_key(tensor)
        if key in self.constants:
            refuse("a write into a tensor made from a host value", "make it with torch.full or torch.zeros")
        found = self._found.get(key)
        if found is not None and found.before is None:
            found.before = found.storage.clone()  # type: ignore[no-untyped-call]

    def made(self, tensor: torch.Tensor) -> bool:
        """Note a tensor that an operator returned; whether it lies in a storage that was not known before."""
        key = storage_key(tensor)
        self._made[id(tensor)] = tensor
        if key in self._owned or key in self._found:
            return False
        self._owned[key] = tensor.detach()
        return True

    def constant(self, tensor: torch.Tensor) -> None:
        """Note a tensor that the step made from a host value; the graph bakes it in."""
        self.constants.add(storage_key(tensor))

    def restore(self) -> None:
        """Give every storage that was there before the bytes that it had."""
        for found in self._found.values():
            if found.before is not None:
                if found.storage.nbytes() != found.nbytes:
                    found.storage.resize_(found.nbytes)
                found.storage.copy_(found.before)
                found.before = None

    def poison(self) -> None:
        """Fill what the capture allocated with NaN, the extreme integer or true, to be seen if read too early."""
        for tensor in self._owned.values():
            storage = tensor.untyped_storage()
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            try:
                whole.fill_(_poison(tensor.dtype))
            except NotImplementedError:  # the packed floats of 4 bits, which no operator fills
                torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).fill_(_ALL_ONES)

    def nbytes(self, outputs: Iterable[torch.Tensor]) -> int:
        """Bytes that the capture allocated, without the storages of the outputs."""
        handed_out = {storage_key(tensor) for tensor in outputs}
        return sum(own.untyped_storage().nbytes() for key, own in self._owned.items() if key not in handed_out)

    def seal(self) -> list[Found]:
        """All that was there before; raises CaptureError where the step itself moved one."""
        if any(found.has_moved for found in self._found.values()):
            refuse("a storage that it resizes", MOVED)
        return list(self._found.values())


def _poison(dtype: torch.dtype) -> float | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype == torch.bool:
        return True
    limits = torch.iinfo(dtype)
    return limits.min or limits.max
