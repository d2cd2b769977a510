"""Outputs: a graph's results as views of the live rows, stamped so that a stale one can be caught."""

import copy
import dataclasses
import enum
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

import attrs
import torch

from ..dataflow.axes import BATCH, TOKENS, Axis
from ..dataflow.errors import CaptureError, ConfigError, StaleOutputError
from ..dataflow.inputs import Inputs
from .config import axis_text

Generation = Callable[[], int]


def map_tensors(
    outputs: Any, function: Callable[[torch.Tensor], Any], others: Callable[[Any], Any] = lambda leaf: leaf
) -> Any:
    """The same structure with each tensor replaced: tuples, lists, mappings, attrs and data classes, nested.

    Containers are new, so that the caller may change them; `others` is asked about anything else.
    """
    if isinstance(outputs, torch.Tensor):
        return function(outputs)
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        names = [field.name for field in dataclasses.fields(outputs) if field.init]
        return dataclasses.replace(outputs, **{n: map_tensors(getattr(outputs, n), function, others) for n in names})
    if attrs.has(type(outputs)) and not isinstance(outputs, Inputs):  # of a view no second one can be made
        fields = [field for field in attrs.fields(type(outputs)) if field.init]
        return attrs.evolve(
            outputs, **{f.alias: map_tensors(getattr(outputs, f.name), function, others) for f in fields}
        )
    if isinstance(outputs, Mapping):
        made: Any = {} if type(outputs) is dict or not isinstance(outputs, MutableMapping) else copy.copy(outputs)
        made.update((key, map_tensors(value, function, others)) for key, value in outputs.items())
        return made
    if isinstance(outputs, list | tuple) and not isinstance(outputs, torch.Size):
        values = [map_tensors(value, function, others) for value in outputs]
        return type(outputs)(*values) if hasattr(outputs, "_fields") else type(outputs)(values)
    return others(outputs)


def rows_each(output_rows: Axis | None, width: int) -> int | None:
    """Output rows for each request of a width; None where they are handed out whole. ConfigError for another axis."""
    if output_rows is None:
        return None
    if output_rows not in (TOKENS, BATCH):
        raise ConfigError(f"output_rows is TOKENS, BATCH or None, got {axis_text(output_rows, (TOKENS, BATCH))}")
    return width if output_rows == TOKENS else 1


def cut_rows(outputs: Any, rows: int, what: str, live: int | None = None, error: type[Exception] = CaptureError) -> Any:
    """The live rows of outputs, each of which must have `rows` rows, one for each of `what`; else it is an error."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            raise error(
                f"the step returned a tensor of shape {list(tensor.shape)}, expected {rows} rows, one for each {what}: "
                f"pass output_rows= with the axis that its rows follow, or None to get it whole"
            )
        return tensor[:live]

    def leaf_of(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, bool | int | float | complex | str | torch.Size | enum.Enum):
            return leaf
        raise error(  # it may hold tensors where no one looks, with their padded rows
            f"the step returned {type(leaf).__name__}, of which rows cannot be cut: return tensors, or tuples, lists, "
            "mappings, attrs or data classes of them; or pass output_rows=None to get it whole"
        )

    return map_tensors(outputs, cut, leaf_of)


def nbytes_of(outputs: Sequence[Any], but: Collection[int] = ()) -> int:
    """Bytes of all tensors in several structures, shared memory counted once; but: storages that are no part of it."""
    return sum(size for storage, size in storages_of(outputs).items() if storage not in but)


def storages_of(outputs: Sequence[Any]) -> dict[int, int]:
    """The storages of all tensors in several structures, and their bytes."""
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    for one in outputs:
        map_tensors(one, note)
    return sizes


class Stamped(torch.Tensor):
    """An output that knows which replay made it, and refuses to be read after a later one. Used in debug mode."""

    _made: int
    _now: Generation

    @classmethod
    def stamp(cls, tensor: torch.Tensor, now: Generation) -> "Stamped":
        """The same memory, stamped with the present generation."""
        stamped = tensor.as_subclass(cls)
        stamped._made, stamped._now = now(), now  # noqa: SLF001 - its own fields
        return stamped

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Check every stamped argument, run the function on plain tensors, and stamp what still shares memory."""
        stamps: list[Stamped] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, Stamped):
                stamps.append(tensor)
            return tensor

        def inherit(tensor: torch.Tensor) -> torch.Tensor:
            address = tensor.untyped_storage().data_ptr()
            for stamped in stamps:
                if stamped.untyped_storage().data_ptr() == address:
                    return cls.stamp(tensor, stamped._now)  # noqa: SLF001 - a stamp passes on its clock
            return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)

        map_tensors([args, kwargs or {}], note)
        for stamped in stamps:
            stamped._check()  # noqa: SLF001 - its own method
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch documents for __torch_function__
            return map_tensors(func(*args, **(kwargs or {})), inherit)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy is an ordinary tensor, which no replay overwrites."""
        self._check()
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as above
            return copy.deepcopy(self.as_subclass(torch.Tensor), memo)

    def _check(self) -> None:
        made, now = self._made, self._now()
        if made != now:
            raise StaleOutputError(
                f"this output is of generation {made} and overwritten since (the runner is at {now}): "
                "use it before the next step, or keep a clone"
            )
