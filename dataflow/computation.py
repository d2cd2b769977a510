"""A computed slot's function bound to its arguments and to the memory that its result goes to."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from .compute import OUT, STEP, Compute
from .errors import ComputeError
from .failures import blame
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
    """A function with all that is known of its arguments before the batch; `fields` come from the batch.

    read: the slots among its arguments, by name, and aliases of them, which are what it is given: each alias has a
    version counter of its own. versions: what these counted last. A function that writes a slot which it is given would
    change what later steps see.
    """

    slot: str
    compute: Compute
    function: Callable[..., Any]
    fields: Mapping[str, Any]
    target: torch.Tensor
    number: type | None
    read: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = attrs.field(factory=dict)
    versions: list[int] = attrs.field(factory=list)

    @classmethod
    def bind(
        cls, slot: str, compute: Compute, known: Mapping[str, Any], fields: Mapping[str, Any], target: torch.Tensor
    ) -> "Computation":
        """Give a function what is known by name; `fields` are the declaration's fields with their defaults."""
        given = {need: known[need] for need in compute.needs if need in known}
        if STEP in given:
            given[STEP] = given[STEP].of(slot)
        with torch.inference_mode(mode=False):
            slots = {need: (value, value.data) for need, value in given.items() if isinstance(value, torch.Tensor)}
            if compute.writes_out:
                given[OUT] = target.data
        given |= {need: alias for need, (_, alias) in slots.items()}
        read = {need: pair for need, pair in slots.items() if not pair[1].is_inference()}  # which count no versions
        unknown = {need: fields[need] for need in compute.needs if need not in known}
        function = functools.partial(compute.function, **given)
        versions = [alias._version for _, alias in read.values()]  # noqa: SLF001 - torch's own name
        return cls(slot, compute, function, unknown, target, _number_of(target), read, versions)

    def on(self, known: Mapping[str, Any], fields: Mapping[str, Any]) -> "Computation":
        """The same function and target with other arguments."""
        return self.bind(self.slot, self.compute, known, fields, self.target)

    def run(self, batch: Any) -> None:
        """Call the function and write what it returns. ComputeError where it raises, or the slot cannot hold that."""
        self.store(self.value(batch))

    def value(self, batch: Any) -> Any:
        """Call the function, with fields of the batch. ComputeError where it raises, or changes what it is given."""
        try:
            if self.fields:
                value = self.function(**{name: field_of(batch, name, default) for name, default in self.fields.items()})
            else:
                value = self.function()
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            blame(self.slot, self.compute.function, error)
        if self.read:
            self._check_read()
        return value

    @property
    def is_alone(self) -> bool:
        """Whether the function is given neither fields nor slots, so that it can be called as it is."""
        return not self.fields and not self.read

    def _check_read(self) -> None:
        """ComputeError where the function wrote a slot that it was given, or changed its shape."""
        now = [alias._version for _, alias in self.read.values()]  # noqa: SLF001 - torch's own name
        if now != self.versions:
            for slot, alias in self.read.values():
                alias.data = slot  # its shape again
            written = [
                name for name, before, after in zip(self.read, self.versions, now, strict=True) if before != after
            ]
            self.versions[:] = now
            message = (
                f"slot {self.slot!r}: its function changes {', '.join(map(repr, written))}, which it is given to read: "
                "let it make a tensor of its own, or return what it computes"
            )
            raise ComputeError(message)

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
