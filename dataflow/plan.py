"""The plan: a frozen, printable list of steps that fills one bucket."""

from collections.abc import Iterator
from typing import Final, Literal

import attrs
import torch

from .capabilities import Lowering, Placement, dtype_text
from .tails import Number

How = Literal["fused", "foreach", "single", "in place"]
FUSED: Final = frozenset({"in_graph", "fused"})
"""Lowerings that launch the fused kernel."""


@attrs.frozen
class TailReset:
    """Rows beyond the live size are set to `value`, along the dims that vary; in each step where `always`.

    fused: whether the fused kernel does it, which writes every tail in each step.
    """

    slot: str
    dims: tuple[int, ...]
    value: Number
    always: bool
    fused: bool = False

    def __str__(self) -> str:
        """One line of the plan."""
        when = "in each step" if self.always or self.fused else "where it was dirtied"
        return f"reset   {self.slot}[live:] = {self.value} {when}{', fused' if self.fused else ''}"


@attrs.frozen
class CopyGroup:
    """Slots that are copied in one way, all of one destination dtype, source dtype and placement.

    how: "fused" into one kernel with all others that are, together in one "foreach" call, each by a "single" plain
    copy, or not at all, because a producer wrote them "in place". why: what set a slot apart.
    """

    slots: tuple[str, ...]
    dst_dtype: torch.dtype
    src_dtype: torch.dtype
    placement: Placement
    how: How
    why: str = ""

    def __str__(self) -> str:
        """One line of the plan."""
        cast = "" if self.src_dtype == self.dst_dtype else f"{dtype_text(self.src_dtype)} -> "
        how = f"{self.how}: {self.why}" if self.why else self.how
        return f"copy    {', '.join(self.slots)}  ({cast}{dtype_text(self.dst_dtype)}, {self.placement}, {how})"


@attrs.frozen
class ComputeStep:
    """One computed slot: its function's name, what it needs, where it runs; `packed` into the upload, or written."""

    slot: str
    function: str
    needs: tuple[str, ...]
    on: Placement
    packed: bool = False

    def __str__(self) -> str:
        """One line of the plan."""
        how = ", rides in the upload" if self.packed else ""
        return f"compute {self.slot} = {self.function}({', '.join(self.needs)}) on the {self.on}{how}"


@attrs.frozen
class FillPlan:
    """How one bucket is filled: tails, then copies, then computed slots in dependency order.

    sizes: the bucket's padded sizes by axis name. absent: optional slots that this batch comes without.
    nbytes: bytes that the copies move when every row is live. mixed: whether one foreach call takes several groups.
    lowering: how the plan is run. packed: slots on the device whose values the host has, which foreach copies take out
    of one packet; moved: those that are too large for it, each by itself.
    """

    declaration: str
    sizes: tuple[tuple[str, int], ...]
    absent: tuple[str, ...]
    tails: tuple[TailReset, ...]
    copies: tuple[CopyGroup, ...]
    computed: tuple[ComputeStep, ...]
    nbytes: int
    mixed: bool = False
    lowering: Lowering = "foreach"
    packed: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()

    @property
    def fused(self) -> tuple[str, ...]:
        """What the fused kernel writes, which is copies, tails of others, and values that ride in the upload."""
        if self.lowering not in FUSED:
            return ()
        copied = [name for group in self.copies if group.how == "fused" for name in group.slots]
        tails = [tail.slot for tail in self.tails if tail.fused and tail.slot not in copied]
        return (*copied, *tails, *(one.slot for one in self.computed if one.packed))

    @property
    def calls(self) -> int:
        """Calls into torch for the copies; the fused kernel is one, inside the graph or before it."""
        together = sum(group.how == "foreach" for group in self.copies)
        singles = sum(len(group.slots) for group in self.copies if group.how == "single")
        return (min(together, 1) if self.mixed else together) + singles + bool(self.fused)

    def lines(self) -> Iterator[str]:
        """The plan as text, a step a line."""
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes)
        calls = "1 copy call" if self.calls == 1 else f"{self.calls} copy calls"
        yield f"plan of {self.declaration} for {sizes}: {calls}, {self.nbytes} bytes, {self.lowering}"
        if self.absent:
            yield f"absent  {', '.join(self.absent)}"
        if self.fused:
            where = "the graph's first node" if self.lowering == "in_graph" else "before the graph"
            yield f"upload  one packet, then one kernel for {len(self.fused)} slots, {where}"
        if self.packed:
            yield f"upload  {', '.join(self.packed)} in one packet"
        yield from (f"upload  {name} by itself" for name in self.moved)
        yield from map(str, (*self.tails, *self.copies, *self.computed))

    def __str__(self) -> str:
        """The plan as text."""
        return "\n".join(self.lines())
