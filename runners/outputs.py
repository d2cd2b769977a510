"""Outputs: a graph's results as views of the live rows, stamped so that a stale one can be caught."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from ..dataflow.errors import CaptureError, StaleOutputError

Generation = Callable[[], int]
KEPT: Final = 256
"""Live sizes whose output views one graph keeps."""


def map_tensors(outputs: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same structure of tuples, lists and mappings with each tensor replaced; anything else stays."""
    if isinstance(outputs, torch.Tensor):
        return function(outputs)
    if isinstance(outputs, Mapping):
        return {key: map_tensors(value, function) for key, value in outputs.items()}
    if not isinstance(outputs, list | tuple):
        return outputs
    values = [map_tensors(value, function) for value in outputs]
    if all(new is old for new, old in zip(values, outputs, strict=True)):
        return outputs
    return type(outputs)(*values) if hasattr(outputs, "_fields") else type(outputs)(values)


def check_rows(outputs: Any, rows: int, what: str) -> None:
    """Every tensor must have `rows` rows: CaptureError, which says what was expected and how to say otherwise."""

    def check(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            message = (
                f"the step returned a tensor of shape {list(tensor.shape)}, expected {rows} rows, one for each padded "
                f"row of {what}: pass output_rows= with the axis that its rows follow, or None to get it whole"
            )
            raise CaptureError(message)
        return tensor

    map_tensors(outputs, check)


def live_rows(outputs: Any, rows: int) -> Any:
    """The first `rows` rows of every tensor; a tensor that has no more is returned as it is."""
    return map_tensors(outputs, lambda tensor: tensor if tensor.shape[0] == rows else tensor[:rows])


def nbytes_of(outputs: Sequence[Any]) -> int:
    """Bytes of all tensors in several structures, shared memory counted once."""
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()

    for one in outputs:
        map_tensors(one, note)
    return sum(sizes.values())


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
        map_tensors([args, kwargs or {}], lambda t: stamps.append(t) if isinstance(t, Stamped) else None)
        for stamped in stamps:
            stamped._check()  # noqa: SLF001 - its own method
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch documents for __torch_function__
            result = func(*args, **(kwargs or {}))
        return map_tensors(result, lambda tensor: _inherit(tensor, stamps))

    def _check(self) -> None:
        made, now = self._made, self._now()
        if made != now:
            message = (
                f"this output was made by replay {made} and overwritten since (the runner is at {now}): "
                "use it before the next replay, or keep a clone"
            )
            raise StaleOutputError(message)


def _inherit(tensor: torch.Tensor, stamps: Sequence[Stamped]) -> torch.Tensor:
    """A result that shares memory with a stamped output is as perishable as that; any other is an ordinary tensor."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - looking at addresses must not check
        address = tensor.untyped_storage().data_ptr()
        for stamped in stamps:
            if stamped.untyped_storage().data_ptr() == address:
                return Stamped.stamp(tensor, stamped._now)  # noqa: SLF001 - a stamp passes on its clock
        return tensor.as_subclass(torch.Tensor)
