"""A computed slot's function bound to its arguments and to the memory that its result goes to."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from .compute import OUT, Compute
from .errors import ComputeError
from .sources import look_up
from .values import write


def field_of(batch: Any, name: str, default: Any) -> Any:
    """A field that is no slot: the batch's own, else the declaration's default, else None."""
    value = look_up(batch, name)
    if value is not None or default is attrs.NOTHING:
        return value
    return default.factory() if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]


def _number_of(target: torch.Tensor) -> type | None:
    """The kind of number that fills a one-element tensor, and is refused where it does not fit."""
    if target.numel() != 1 or target.is_complex():
        return None
    if target.dtype == torch.bool:
        return bool
    if not target.dtype.is_signed:  # where torch wraps negative numbers around
        return None
    return float if target.is_floating_point() else int


@attrs.frozen(eq=False)
class Computation:
    """A function with all that is known of its arguments before the batch; `fields` come from the batch."""

    slot: str
    compute: Compute
    function: Callable[..., Any]
    fields: Mapping[str, Any]
    target: torch.Tensor
    number: type | None

    @classmethod
    def bind(
        cls, slot: str, compute: Compute, known: Mapping[str, Any], fields: Mapping[str, Any], target: torch.Tensor
    ) -> "Computation":
        """Give a function what is known by name; `fields` are the declaration's fields with their defaults."""
        given = {need: known[need] for need in compute.needs if need in known}
        if compute.writes_out:
            given[OUT] = target
        unknown = {need: fields[need] for need in compute.needs if need not in known}
        function = functools.partial(compute.function, **given)
        return cls(slot, compute, function, unknown, target, _number_of(target))

    def on(self, known: Mapping[str, Any], fields: Mapping[str, Any]) -> "Computation":
        """The same function and target with other arguments."""
        return self.bind(self.slot, self.compute, known, fields, self.target)

    def run(self, batch: Any) -> None:
        """Call the function and write what it returns. ComputeError where the slot cannot hold that."""
        self.store(self.value(batch))

    def value(self, batch: Any) -> Any:
        """Call the function, with fields of the batch."""
        if self.fields:
            return self.function(**{name: field_of(batch, name, default) for name, default in self.fields.items()})
        return self.function()

    def store(self, value: Any) -> None:
        """Write what the function returned. ComputeError where the slot cannot hold it."""
        if type(value) is self.number:
            self._fill(value)  # type: ignore[arg-type] # its very type was just compared
        elif not self.compute.writes_out:
            write(self.target, value, self._what)

    @property
    def _what(self) -> str:
        return f"slot {self.slot!r}: its function's result"

    def _fill(self, value: float) -> None:
        """The common case, one number of the right kind, without further checks; torch refuses what does not fit."""
        try:
            self.target.fill_(value)
        except (RuntimeError, OverflowError) as error:
            message = f"{self._what}: {error}"
            raise ComputeError(message) from error
