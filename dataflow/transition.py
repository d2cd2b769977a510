"""Transitions: what slots hold in the next step if the host says nothing, and the operators that write it.

A rule `slot + number` or `other slot`, whose result no other rule reads, is done together with all others of its kind:
by the fill kernel in a graph, else by foreach operators. All other rules are run before that as torch operators, each
after those whose new value it reads, into memory of their own, from which slots are written. Only live rows advance.
"""

from collections.abc import Callable, Sequence
from typing import Final

import attrs
import torch

from .axes import BATCH, TOKENS, Sizes
from .buffers import Buffers
from .computation import Computation
from .declaration import Declaration
from .guard import outside_inference
from .slots import Slot
from .sources import SETTINGS
from .views import Views

_FOREACH_COPY: Final = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - no public name
_FOREACH_ADD: Final = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage] - likewise
_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by their bytes: torch adds and moves these, and not all other dtypes of that size."""


@attrs.frozen
class Advance:
    """How one slot advances: to the sum of a slot and a number, with all others that do, or by operators."""

    slot: str
    function: str
    needs: tuple[str, ...]
    source: str = ""
    add: int = 0

    @property
    def value(self) -> str:
        """What it advances to, in words."""
        number = f" {'-' if self.add < 0 else '+'} {abs(self.add)}" if self.add else ""
        return f"{self.source}{number}" if self.source else f"{self.function}({', '.join(self.needs)})"

    def __str__(self) -> str:
        """One line of the plan."""
        return f"advance {self.slot} = {self.value}{'' if self.source else ', operators'}"


def rows_of_requests(slot: Slot, sizes: Sizes) -> tuple[int, int] | None:
    """The dim of a slot that follows the requests, and its rows for each of them; None where there is none."""
    requests = sizes.get(BATCH, 0)
    for dim in slot.varying if requests else ():
        one, size = {**sizes, BATCH: 1, TOKENS: sizes.get(TOKENS, 0) // requests}, slot.shape[dim]
        if all(axis.fixed or axis in {BATCH, TOKENS} for axis in size.axes):
            each = size.at(one)
            return (dim, each) if each * requests == size.at(sizes) else None
    return None


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers of the same size, where torch has some."""
    return tensor.view(_WORDS.get(tensor.itemsize, tensor.dtype))


class Transition:
    """One bucket's rules, over its padded views: their operators, and what slots are then written from.

    sources: by slot, the slot or the result of operators that it is written from, and the number that is added.
    """

    def __init__(
        self, rules: Sequence[Advance], declaration: Declaration, buffers: Buffers, views: Views, sizes: Sizes
    ) -> None:
        known, made = {SETTINGS: declaration.settings, **views}, dict[str, torch.Tensor]()
        self.sources: dict[str, tuple[torch.Tensor, int]] = {}
        self._computations: list[Computation] = []
        self._targets = {rule.slot: buffers[rule.slot].view(sizes) for rule in rules}
        self._rows = {rule.slot: rows_of_requests(declaration.slots[rule.slot], sizes) for rule in rules}
        for rule in rules:
            target = self._targets[rule.slot]
            if rule.source:
                source = made.get(rule.source)
                source = buffers[rule.source].view(sizes) if source is None else source
            else:
                with outside_inference():
                    source = torch.empty_strided(
                        target.shape, target.stride(), dtype=target.dtype, device=target.device
                    ).zero_()
                given = declaration.rules[rule.slot]
                self._computations.append(Computation.bind(rule.slot, declaration, {**known, **made}, source, given))
                made[rule.slot] = source
            self.sources[rule.slot] = source, rule.add

    def compute(self) -> None:
        """Run the rules that are functions; nothing is written to slots."""
        for computation in self._computations:
            computation.run(None)

    def of(self, requests: int) -> Callable[[], None]:
        """A call that advances the rows of so many live requests."""
        copies, adds = (list[torch.Tensor](), list[torch.Tensor]()), dict[int, list[torch.Tensor]]()
        for slot, (whole, add) in self.sources.items():
            rows, target, source = self._rows[slot], self._targets[slot], whole
            if rows is not None:
                dim, each = rows
                target, source = (one.narrow(dim, 0, requests * each) for one in (target, source))
            if source.data_ptr() != target.data_ptr():
                copies[0].append(target)
                copies[1].append(source)
            if add:
                target = words(target)
                least = torch.iinfo(target.dtype).min
                wrapped = (add - least) % (-2 * least) + least  # the same bits in signed numbers
                adds.setdefault(wrapped, []).append(target)

        def advance() -> None:
            self.compute()
            if copies[0]:
                _FOREACH_COPY(*copies)
            for add, targets in adds.items():
                _FOREACH_ADD(targets, add)

        return advance
