"""The plan: a frozen, printable list of steps that fills one bucket."""

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, get_args

import attrs
import torch

from .axes import Sizes, extent
from .capabilities import DEVICE, HOST, Capabilities, LoweringName, Placement, dtype_text, resolve_dtype
from .declaration import Declaration
from .lowering import LOWERINGS, How, Lowering
from .packet import WORD, has_lane, head_bytes, rounded
from .shown import Shown, Table
from .slots import Slot
from .sources import OUT, linear
from .tails import Number, Pad, resolve_value
from .transition import Advance, rows_of_requests


@attrs.frozen
class TailReset:
    """Sets the rows beyond the live size to `value`, along each dim that varies.

    Attributes:
        slot: The slot.
        value: What the rows are set to.
        always: Whether they are reset in each step.
        fused: Whether the fused kernel resets it, as it does in each step.
    """

    slot: str
    value: Number
    always: bool
    fused: bool = False

    def __str__(self) -> str:
        """Return one line of the plan."""
        when = "in each step" if self.always or self.fused else "where it was dirtied"
        return f"reset   {self.slot}[live:] = {self.value} {when}{', fused' if self.fused else ''}"


@attrs.frozen
class CopyGroup:
    """Slots that are copied in one way, all of one destination dtype, source dtype and placement.

    Attributes:
        slots: The slots.
        dst_dtype: Their dtype.
        src_dtype: The dtype of their sources.
        placement: Where they are.
        how: "fused" with all others into one kernel, "direct" by address in host memory, together in one "foreach"
            call, each by a "single" plain copy, or not at all, because a producer wrote them "in place".
        why: Why the slots are not copied by the lowering's own method, or "".
    """

    slots: tuple[str, ...]
    dst_dtype: torch.dtype
    src_dtype: torch.dtype
    placement: Placement
    how: How
    why: str = ""

    def __str__(self) -> str:
        """Return one line of the plan."""
        cast = "" if self.src_dtype == self.dst_dtype else f"{dtype_text(self.src_dtype)} -> "
        how = f"{self.how}: {self.why}" if self.why else self.how
        return f"copy    {', '.join(self.slots)}  ({cast}{dtype_text(self.dst_dtype)}, {self.placement}, {how})"


@attrs.frozen
class ComputeStep:
    """One computed slot.

    Attributes:
        slot: The slot.
        function: The function's name.
        needs: What the function needs.
        on: Where it runs.
        packed: Whether its value is sent in the packet; else it is written directly.
        pad: What its tail holds, or None if that is what the function gives.
        fills: All slots that the same call fills, if there are several.
    """

    slot: str
    function: str
    needs: tuple[str, ...]
    on: Placement
    packed: bool = False
    pad: Number | None = None
    fills: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return one line of the plan."""
        how = f", one call for {' and '.join(self.fills)}" if self.fills else ""
        how += "" if self.pad is None else f", then [live:] = {self.pad}"
        how += ", rides in the upload" if self.packed else ""
        return f"compute {self.slot} = {self.function}({', '.join(self.needs)}) on the {self.on}{how}"


@attrs.frozen(repr=False)
class FillPlan(Shown):
    """How one bucket is filled: tails, then copies, then computed slots in dependency order.

    Attributes:
        declaration: The name of the declaration.
        sizes: The bucket's padded sizes by axis name.
        absent: Optional slots that this batch lacks.
        tails: The tails that are reset.
        copies: The groups of copies.
        computed: The computed slots.
        nbytes: Bytes that the copies move when every row is live.
        mixed: Whether one foreach call copies several groups.
        lowering: How the plan is run.
        packed: Slots on the device whose values the host has, and which foreach calls copy from one packet.
        advances: How slots change in the next step if no batch comes, in the order in which they are written.
        done: The slot that says which requests are done, so that their rows hold the tails of all others, or "".
    """

    declaration: str
    sizes: tuple[tuple[str, int], ...]
    absent: tuple[str, ...]
    tails: tuple[TailReset, ...]
    copies: tuple[CopyGroup, ...]
    computed: tuple[ComputeStep, ...]
    nbytes: int
    mixed: bool = False
    lowering: LoweringName = "foreach"
    packed: tuple[str, ...] = ()
    advances: tuple[Advance, ...] = ()
    done: str = ""

    @property
    def fused(self) -> tuple[str, ...]:
        """Slots that the fused kernel writes: copies, tails of other slots, and computed values from the packet."""
        if not LOWERINGS[self.lowering].has_kernel:
            return ()
        copied = [name for group in self.copies if group.how == "fused" for name in group.slots]
        tails = [tail.slot for tail in self.tails if tail.fused and tail.slot not in copied]
        return (*copied, *tails, *(one.slot for one in self.computed if one.packed))

    @property
    def calls(self) -> int:
        """The number of calls into torch for the copies.

        The fused kernel counts as one, inside the graph or before it.
        """
        together = sum(group.how == "foreach" for group in self.copies)
        singles = sum(len(group.slots) for group in self.copies if group.how == "single")
        return (min(together, 1) if self.mixed else together) + singles + bool(self.fused)

    def lines(self) -> Iterator[str]:
        """Yield the plan as text, one step a line."""
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes)
        calls = "1 copy call" if self.calls == 1 else f"{self.calls} copy calls"
        yield f"plan of {self.declaration} for {sizes}: {calls}, {self.nbytes} bytes, {self.lowering}"
        if self.absent:
            yield f"absent  {', '.join(self.absent)}"
        if self.fused:
            where = "the graph's first node" if LOWERINGS[self.lowering].is_in_graph else "before the graph"
            yield f"upload  one packet, then one kernel for {len(self.fused)} slots, {where}"
        if self.packed:
            yield f"upload  {', '.join(self.packed)} in one packet"
        yield from map(str, (*self.tails, *self.copies))
        if self.done:
            yield f"reset   rows of all other slots where {self.done} is true"
        yield from map(str, (*self.computed, *self.advances))

    def tables(self) -> Iterator[Table]:
        """Yield the plan, one step a line."""
        title, *steps = self.lines()
        yield Table(title, text="\n".join(steps))

    def __str__(self) -> str:
        """Return the plan as text, with no line folded."""
        return "\n".join(self.lines())


LARGE_BYTES: Final = 1 << 20
"""From this size on, a plain copy beats a foreach call. Field figures put the crossover at about 1 MB on an H200."""

LARGE_LANE_BYTES: Final = 4 << 20
"""From this size on, a slot gets a plain copy instead of a lane.

A lane's source stays allocated until the device is known to be past it, some steps later. A lane is faster up to 16
MiB at least: one H200 takes 7.6 us of host and 6.5 us of device time for 4 MiB as a lane, and 19.3 and 8.6 as a copy.
"""

_NOT_TOGETHER: Final = frozenset({torch.uint16, torch.uint32, torch.uint64})
"""Dtypes that torch copies on a device only one by one."""

Absent = frozenset[str]
"""Optional slots that a batch lacks."""
NONE: Final[Absent] = frozenset()


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@attrs.frozen
class Pattern:
    """The properties of a batch that its plan depends on.

    Attributes:
        absent: Optional slots that the batch lacks.
        in_place: Slots that a producer has written.
        hosted: Slots on the device whose host data is sent in a packet and copied from there by foreach calls.
        source_dtypes: For slots whose source has another dtype than the slot, that dtype.
    """

    absent: frozenset[str] = attrs.field(default=NONE, converter=_names)
    in_place: frozenset[str] = attrs.field(default=NONE, converter=_names)
    hosted: frozenset[str] = attrs.field(default=NONE, converter=_names)
    source_dtypes: frozenset[tuple[str, torch.dtype]] = frozenset()

    def check(self, declaration: Declaration) -> None:
        """Raise ConfigError if an absent slot is not optional, or if another slot named here is not copied."""
        declaration.check_names("absent", self.absent, "optional")
        declaration.check_names("in_place", self.in_place, "copied")
        declaration.check_names("hosted", self.hosted, "copied")


PLAIN: Final = Pattern()


def plan_fill(
    declaration: Declaration,
    sizes: Sizes,
    capabilities: Capabilities,
    pattern: Pattern = PLAIN,
    *,
    lowering: LoweringName = "foreach",
    foreign: frozenset[str] = NONE,
) -> FillPlan:
    """Plan how to fill one bucket.

    Args:
        declaration: The slots.
        sizes: The padded size of every axis.
        capabilities: What the device can do.
        pattern: The properties of the batch.
        lowering: How the plan is to be run.
        foreign: Slots whose memory others may write between steps.
    """
    return _Planning(declaration, sizes, capabilities, pattern, LOWERINGS[lowering], foreign).plan()


def slot_bytes(slot: Slot, sizes: Sizes, capabilities: Capabilities) -> int:
    """Return a slot's size in bytes at given sizes."""
    return math.prod(extent(slot.shape, sizes)) * resolve_dtype(slot.dtype, capabilities).itemsize


def packed_bytes(declaration: Declaration, sizes: Sizes, capabilities: Capabilities) -> dict[str, int]:
    """Return the slots that a packet has room for, with their bytes in the widest dtype that their sources may have."""
    found = dict[str, int]()
    for name, slot in declaration.slots.items():
        widest = max(one.itemsize for one in (resolve_dtype(slot.dtype, capabilities), *slot.converts_from()))
        shape = extent(slot.shape, sizes)
        nbytes = math.prod(shape) * widest + bool(slot.ragged) * WORD * math.prod(shape[:1])
        if slot.placement == DEVICE and nbytes < LARGE_BYTES and not slot.is_state:
            found[name] = rounded(nbytes)
    return found


def packet_bytes(declaration: Declaration, sizes: Sizes, capabilities: Capabilities) -> int:
    """Return the largest number of bytes that a packet of a bucket can have."""
    words = rounded(head_bytes(len(declaration.slots), len(declaration.counted)))
    return words + sum(packed_bytes(declaration, sizes, capabilities).values())


@attrs.frozen
class _Planning:
    """Collects the parts of one plan."""

    declaration: Declaration
    sizes: Sizes
    capabilities: Capabilities
    pattern: Pattern
    lowering: Lowering
    foreign: frozenset[str]

    def plan(self) -> FillPlan:
        sizes = self.sizes
        capabilities = self.capabilities
        present = {name: slot for name, slot in self.declaration.slots.items() if name not in self.pattern.absent}
        packed = self._packed(present)
        copied = {name: slot for name, slot in present.items() if name in self.declaration.sources or name in packed}
        return FillPlan(
            declaration=self.declaration.name,
            sizes=tuple((axis.name, sizes[axis]) for axis in self.declaration.axes),
            absent=tuple(sorted(self.pattern.absent)),
            tails=tuple(self._tails(present)),
            copies=tuple(self._copies(copied)),
            computed=tuple(self._computed(packed)),
            nbytes=sum(self._nbytes(slot) for name, slot in copied.items() if name not in self.pattern.in_place),
            mixed=capabilities.foreach_mixed and not capabilities.foreach_chunk and not packed,
            lowering=self.lowering.name,
            packed=packed,
            advances=tuple(self._advances(present)),
            done=self.declaration.done,
        )

    def _nbytes(self, slot: Slot) -> int:
        return slot_bytes(slot, self.sizes, self.capabilities)

    def _tails(self, slots: Mapping[str, Slot]) -> Iterable[TailReset]:
        for name, slot in sorted(slots.items()):
            value = self._pad(slot)
            if value is not None and name not in self.declaration.functions:
                written = slot.rewritten or name in self.pattern.in_place or name in self.foreign
                always = written or self.lowering.is_reference
                yield TailReset(name, value, always, fused=not self._apart(slot))

    def _pad(self, slot: Slot) -> Number | None:
        """Return the value that a slot's rows behind the live ones have in each step, or None."""
        rule = slot.rule()
        if slot.varying and isinstance(rule, Pad):
            return resolve_value(rule.value, self.capabilities, self.sizes)
        return None

    def _advances(self, slots: Mapping[str, Slot]) -> Iterable[Advance]:
        """Yield the rules of slots: those that run as operators, in dependency order, and then sums."""
        rules = {name: rule for name, rule in self.declaration.rules.items() if name in slots}
        read = {need for name, rule in rules.items() for need in rule.needs if need != name}
        sums = list[Advance]()
        for name, rule in rules.items():
            found = None if name in read else linear(rule)
            if found is not None and self._adds(name, *found):
                sums.append(Advance(name, rule.name, rule.needs, *found))
            else:
                yield Advance(name, rule.name, rule.needs)
        yield from sums

    def _adds(self, name: str, source: str, add: int) -> bool:
        """Return whether a slot can be written as the sum of a number and a slot of the same dtype and shape."""
        target = self.declaration.slots[name]
        other = self.declaration.slots.get(source)
        if other is None:
            return False
        own = resolve_dtype(target.dtype, self.capabilities)
        is_alike = (
            own == resolve_dtype(other.dtype, self.capabilities)
            and extent(target.shape, self.sizes) == extent(other.shape, self.sizes)
            and rows_of_requests(target, self.sizes) == rows_of_requests(other, self.sizes)
        )
        is_whole = not (own.is_floating_point or own.is_complex or own == torch.bool)
        return is_alike and (is_whole or not add)

    def _packed(self, slots: Mapping[str, Slot]) -> tuple[str, ...]:
        """Return the slots that foreach calls copy from a packet: those with host data, then computed ones."""
        if self.lowering.copies != "foreach" or not self.capabilities.packed_uploads:
            return ()
        room = self._room.keys() & slots.keys()
        brought = sorted(self.pattern.hosted & room)
        computed = [name for name in self.declaration.functions if name in room and self._is_value(name)]
        return tuple(brought + computed)

    @functools.cached_property
    def _room(self) -> Mapping[str, int]:
        return packed_bytes(self.declaration, self.sizes, self.capabilities)

    def _is_value(self, name: str) -> bool:
        """Return whether the host computes a slot in each step, with a function that returns the value."""
        compute = self.declaration.functions[name]
        return self.declaration.side(name) == HOST and not (compute.writes_out or compute.again)

    def _computed(self, packed: Collection[str]) -> Iterable[ComputeStep]:
        for name, compute in self.declaration.functions.items():
            needs = (*compute.needs, OUT) if compute.writes_out else compute.needs
            slot = self.declaration.slots[name]
            on = self.declaration.side(name)
            is_packed = name in packed or (name in self._room and self._is_value(name) and not self._apart(slot))
            yield ComputeStep(name, compute.name, needs, on, is_packed, self._pad(slot), compute.fills)

    def _copies(self, slots: Mapping[str, Slot]) -> Iterator[CopyGroup]:
        """Yield groups of slots that are copied in the same way. Foreach groups have at most `foreach_chunk` slots."""
        groups: dict[tuple[torch.dtype, torch.dtype, Placement, How, str], list[str]] = {}
        casts = dict(self.pattern.source_dtypes)
        for name, slot in sorted(slots.items()):
            dtype = resolve_dtype(slot.dtype, self.capabilities)
            alike = dtype, casts.get(name, dtype), slot.placement, *self._how(name, slot)
            groups.setdefault(alike, []).append(name)
        for alike in sorted(groups, key=lambda alike: (get_args(How).index(alike[3]), *map(str, alike))):
            names = groups[alike]
            most = (self.capabilities.foreach_chunk if alike[3] == "foreach" else 0) or len(names)
            for start in range(0, len(names), most):
                yield CopyGroup(tuple(names[start : start + most]), *alike)

    def _how(self, name: str, slot: Slot) -> tuple[How, str]:
        """Return how a slot is copied, and why not by the lowering's own method, or ""."""
        if name in self.pattern.in_place:
            return "in place", ""
        if self.lowering.is_reference:
            return "single", "slot by slot"
        if slot.placement == HOST or self.lowering.copies == "direct":
            return "direct", ""
        why = self._apart(slot) if self.lowering.has_kernel else self._alone(name, slot)
        return ("single", why) if why else (self.lowering.copies, "")

    def _apart(self, slot: Slot) -> str:
        """Return why the fused kernel does not write a slot, or ""."""
        if not self.lowering.has_kernel:
            return "not fused"
        if slot.placement != DEVICE:
            return "on the host"
        dtype = resolve_dtype(slot.dtype, self.capabilities)
        if self._nbytes(slot) >= LARGE_LANE_BYTES:
            return "large"
        return has_lane(dtype, extent(slot.shape, self.sizes), slot.varying)

    def _alone(self, name: str, slot: Slot) -> str:
        """Return why a slot cannot share a foreach call, or ""."""
        if not self.capabilities.foreach_device:
            return "no foreach on this device"
        dtype = resolve_dtype(slot.dtype, self.capabilities)
        if dtype in _NOT_TOGETHER:
            return f"no foreach of {dtype_text(dtype)}"
        packs = self.capabilities.packed_uploads
        if (slot.strided and not (packs and name in self.pattern.hosted)) or any(dim > 0 for dim in slot.varying):
            return "strided"
        return "large" if self._nbytes(slot) >= LARGE_BYTES else ""
