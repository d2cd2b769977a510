"""Transitions: what slots hold in the next step if the host says nothing, and the operators that write it.

A rule `slot + number` or `other slot` is the fill kernel's, if no other rule reads what it writes. All others are run
before that kernel as torch operators, each after those whose new value it reads. Only live rows ever advance.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import attrs
import torch

from .axes import BATCH, TOKENS, Sizes
from .buffers import Buffers
from .computation import Computation, write
from .declaration import Declaration
from .guard import outside_inference
from .slots import Slot
from .sources import SETTINGS, Compute
from .views import Views


@attrs.frozen
class Advance:
    """How one slot advances: by its function, which the kernel does as `source + add`, or torch operators."""

    slot: str
    function: str
    needs: tuple[str, ...]
    by: Literal["kernel", "operators"] = "operators"
    source: str = ""
    add: int = 0

    def __str__(self) -> str:
        """One line of the plan."""
        if self.by == "operators":
            return f"advance {self.slot} = {self.function}({', '.join(self.needs)}), operators"
        number = f" {'-' if self.add < 0 else '+'} {abs(self.add)}" if self.add else ""
        return f"advance {self.slot} = {self.source}{number}, in the fill kernel"


@attrs.frozen
class _Term:
    """What stands for a slot where a rule is tried out: it can be added to, and nothing else."""

    slot: str
    add: int = 0

    def __add__(self, number: object) -> "_Term":
        return attrs.evolve(self, add=self.add + number) if type(number) is int else NotImplemented

    __radd__ = __add__

    def __sub__(self, number: object) -> "_Term":
        return self + -number if type(number) is int else NotImplemented


def linear(rule: Compute) -> tuple[str, int] | None:
    """The slot and the number whose sum a rule is; None where it is anything else."""
    try:
        made = rule.function(**{need: _Term(need) for need in rule.needs})
    except Exception:  # noqa: BLE001 - it does more with what it is given than to add a number
        return None
    return (made.slot, made.add) if isinstance(made, _Term) else None


def rows_of_requests(slot: Slot, sizes: Sizes) -> tuple[int, int] | None:
    """The dim of a slot that follows the requests, and its rows for each of them; None where there is none."""
    requests = sizes.get(BATCH, 0)
    for dim in slot.varying:
        axes, size = slot.shape[dim].axes, slot.shape[dim].at(sizes)
        if requests and size % requests == 0 and all(axis.fixed or axis in {BATCH, TOKENS} for axis in axes):
            return dim, size // requests
    return None


class Transition:
    """The operators of one bucket's rules, over its padded views, which are given to the rules' functions."""

    def __init__(
        self, rules: Sequence[Advance], declaration: Declaration, buffers: Buffers, views: Views, sizes: Sizes
    ) -> None:
        known = {SETTINGS: declaration.settings, **views}
        self._parts = [(*_part(rule.slot, declaration, buffers, known, sizes),) for rule in rules]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._parts)

    def run(self, requests: int) -> None:
        """Advance the rows of so many live requests, slot by slot."""
        with torch.no_grad():
            for computation, dim, each in self._parts:
                made, target = _value_of(computation), computation.target
                if each:
                    made, target = made.narrow(dim, 0, requests * each), target.narrow(dim, 0, requests * each)
                target.copy_(made)

    def record(self, requests: torch.Tensor, on: torch.Tensor | None = None) -> None:
        """The same where the device alone knows how many requests are live, and whether slots advance at all."""
        with torch.no_grad():
            for computation, dim, each in self._parts:
                made, target = _value_of(computation), computation.target
                mask = on
                if each:
                    shape = [-1 if place == dim else 1 for place in range(target.dim())]
                    rows = torch.arange(target.shape[dim], device=target.device).view(shape) < requests * each
                    mask = rows if on is None else rows & on
                target.copy_(made if mask is None else torch.where(mask, made, target))


def _part(name: str, declaration: Declaration, buffers: Buffers, known: dict[str, Any], sizes: Sizes) -> Iterator[Any]:
    """A rule's computation, the dim of its slot that follows the requests, and the rows for each of them."""
    slot = declaration.slots[name]
    yield Computation.bind(name, declaration, known, buffers[name].view(sizes), declaration.rules[name])
    yield from rows_of_requests(slot, sizes) or (0, 0)


def _value_of(computation: Computation) -> torch.Tensor:
    """What a rule's function gives, as a tensor like its slot. ComputeError where it is none."""
    value, target = computation.value(None), computation.target
    if isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (target.shape, target.dtype):
        return value
    with outside_inference():
        made = torch.empty_like(target)
    write(made, value, f"slot {computation.slot!r}: the result of its then=")
    return made
