"""The plan: a frozen, printable list of steps that fills one bucket."""

from collections.abc import Iterator

import attrs
import torch

from .capabilities import Placement
from .roles import dtype_text
from .tails import Number


@attrs.frozen
class TailReset:
    """Rows beyond the live size are set to `value`, along the dims that vary; in each step where `always`."""

    slot: str
    dims: tuple[int, ...]
    value: Number
    always: bool

    def __str__(self) -> str:
        """One line of the plan."""
        return f"reset   {self.slot}[live:] = {self.value}{' in each step' if self.always else ' where it was dirtied'}"


@attrs.frozen
class CopyGroup:
    """Slots that one call copies, all of one destination dtype, source dtype and placement.

    together: one foreach call for all; else one plain copy a slot. why: what set a slot apart.
    """

    slots: tuple[str, ...]
    dst_dtype: torch.dtype
    src_dtype: torch.dtype
    placement: Placement
    together: bool
    why: str = ""

    def __str__(self) -> str:
        """One line of the plan."""
        cast = "" if self.src_dtype == self.dst_dtype else f"{dtype_text(self.src_dtype)} -> "
        how = "foreach" if self.together else f"single: {self.why}"
        return f"copy    {', '.join(self.slots)}  ({cast}{dtype_text(self.dst_dtype)}, {self.placement}, {how})"


@attrs.frozen
class ComputeStep:
    """One computed slot: its function's name, what it needs, and where it runs."""

    slot: str
    function: str
    needs: tuple[str, ...]
    on: Placement

    def __str__(self) -> str:
        """One line of the plan."""
        return f"compute {self.slot} = {self.function}({', '.join(self.needs)}) on the {self.on}"


@attrs.frozen
class FillPlan:
    """How one bucket is filled: tails, then copies, then computed slots in dependency order.

    sizes: the bucket's padded sizes by axis name. absent: optional slots that this batch comes without.
    nbytes: bytes that the copies move when every row is live. mixed: whether one foreach call takes several groups.
    """

    declaration: str
    sizes: tuple[tuple[str, int], ...]
    absent: tuple[str, ...]
    tails: tuple[TailReset, ...]
    copies: tuple[CopyGroup, ...]
    computed: tuple[ComputeStep, ...]
    nbytes: int
    mixed: bool = False

    @property
    def calls(self) -> int:
        """Calls into torch for the copies."""
        together = sum(group.together for group in self.copies)
        return (min(together, 1) if self.mixed else together) + sum(len(g.slots) for g in self.copies if not g.together)

    def lines(self) -> Iterator[str]:
        """The plan as text, a step a line."""
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes)
        calls = "1 copy call" if self.calls == 1 else f"{self.calls} copy calls"
        yield f"plan of {self.declaration} for {sizes}: {calls}, {self.nbytes} bytes"
        if self.absent:
            yield f"absent  {', '.join(self.absent)}"
        yield from map(str, (*self.tails, *self.copies, *self.computed))

    def __str__(self) -> str:
        """The plan as text."""
        return "\n".join(self.lines())
