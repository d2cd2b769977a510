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
from .packet import has_lane, head_bytes, rounded
from .slots import Slot
from .sources import OUT, linear
from .tails import Number, Pad, resolve_value
from .transition import Advance, rows_of_requests

"""Lowerings that launch the fused kernel."""


@attrs.frozen
class TailReset:
    """Rows beyond the live size are set to `value`, along each dim that varies; in each step where `always`.

    fused: whether the fused kernel does it, which writes every tail in each step.
    """

    slot: str
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

    how: "fused" into one kernel with all others that are, "direct" by their addresses in host memory, together in one
    "foreach" call, each by a "single" plain copy, or not at all, because a producer wrote them "in place". why: what
    set a slot apart.
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
    of one packet. advances: what slots hold in the next step if no batch comes, in the order in which they are written.
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

    @property
    def fused(self) -> tuple[str, ...]:
        """What the fused kernel writes, which is copies, tails of others, and values that ride in the upload."""
        if not LOWERINGS[self.lowering].has_kernel:
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
            where = "the graph's first node" if LOWERINGS[self.lowering].is_in_graph else "before the graph"
            yield f"upload  one packet, then one kernel for {len(self.fused)} slots, {where}"
        if self.packed:
            yield f"upload  {', '.join(self.packed)} in one packet"
        yield from map(str, (*self.tails, *self.copies, *self.computed, *self.advances))

    def __str__(self) -> str:
        """The plan as text."""
        return "\n".join(self.lines())


LARGE_BYTES: Final = 1 << 20
"""From here on a plain copy beats a share in a foreach: field figures put the crossover at about 1 MB on an H200."""

LARGE_LANE_BYTES: Final = 4 << 20
"""From here on a slot is left to a plain copy, because a lane's source stays allocated until the device is known to be
past it, some steps later. A lane is faster up to 16 MiB at least: one H200, us of host and device for 4 MiB as a lane
7.6 and 6.5, as a copy of its own 19.3 and 8.6."""

_NOT_TOGETHER: Final = frozenset({torch.uint16, torch.uint32, torch.uint64})
"""Dtypes that torch copies on a device one by one alone."""

Absent = frozenset[str]
"""Optional slots that a batch comes without."""
NONE: Final[Absent] = frozenset()


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@attrs.frozen
class Pattern:
    """What batches differ in, so that each needs a plan of its own.

    absent: optional slots that the batch comes without. in_place: slots that a producer has written. hosted: slots on
    the device whose host data rides in a packet, from which foreach copies take it. source_dtypes: for slots whose
    source has another dtype than the slot, which one.
    """

    absent: frozenset[str] = attrs.field(default=NONE, converter=_names)
    in_place: frozenset[str] = attrs.field(default=NONE, converter=_names)
    hosted: frozenset[str] = attrs.field(default=NONE, converter=_names)
    source_dtypes: frozenset[tuple[str, torch.dtype]] = frozenset()

    def check(self, declaration: Declaration) -> None:
        """ConfigError where an absent slot is not optional, or where another one that is named is not copied."""
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
    """The plan that fills one bucket.

    sizes: padded size of every axis. pattern: what the batch is like. lowering: how the plan is to be run. foreign:
    slots whose memory others may write between steps.
    """
    return _Planning(declaration, sizes, capabilities, pattern, LOWERINGS[lowering], foreign).plan()


def slot_bytes(slot: Slot, sizes: Sizes, capabilities: Capabilities) -> int:
    """A slot's size in bytes at given sizes."""
    return math.prod(extent(slot.shape, sizes)) * resolve_dtype(slot.dtype, capabilities).itemsize


def packed_bytes(declaration: Declaration, sizes: Sizes, capabilities: Capabilities) -> dict[str, int]:
    """Slots that a packet has room for, and their bytes in the widest dtype that their sources may have."""
    found = dict[str, int]()
    for name, slot in declaration.slots.items():
        widest = max(one.itemsize for one in (resolve_dtype(slot.dtype, capabilities), *slot.converts_from()))
        nbytes = math.prod(extent(slot.shape, sizes)) * widest
        if slot.placement == DEVICE and nbytes < LARGE_BYTES:
            found[name] = rounded(nbytes)
    return found


def packet_bytes(declaration: Declaration, sizes: Sizes, capabilities: Capabilities) -> int:
    """Bytes that a packet may have in a bucket."""
    words = rounded(head_bytes(len(declaration.slots), len(declaration.counted)))
    return words + sum(packed_bytes(declaration, sizes, capabilities).values())


@attrs.frozen
class _Planning:
    """One plan in the making."""

    declaration: Declaration
    sizes: Sizes
    capabilities: Capabilities
    pattern: Pattern
    lowering: Lowering
    foreign: frozenset[str]

    def plan(self) -> FillPlan:
        sizes, capabilities = self.sizes, self.capabilities
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
        )

    def _nbytes(self, slot: Slot) -> int:
        return slot_bytes(slot, self.sizes, self.capabilities)

    def _tails(self, slots: Mapping[str, Slot]) -> Iterable[TailReset]:
        for name, slot in sorted(slots.items()):
            rule = slot.rule()
            if slot.varying and isinstance(rule, Pad):
                value = resolve_value(rule.value, self.capabilities, self.sizes)
                written = slot.rewritten or name in self.pattern.in_place or name in self.foreign
                always = written or self.lowering.is_reference
                yield TailReset(name, value, always, fused=not self._apart(slot))

    def _advances(self, slots: Mapping[str, Slot]) -> Iterable[Advance]:
        """The rules of slots: first operators in their order, then sums in any order."""
        rules = {name: rule for name, rule in self.declaration.rules.items() if name in slots}
        read, sums = {need for name, rule in rules.items() for need in rule.needs if need != name}, list[Advance]()
        for name, rule in rules.items():
            found = None if name in read else linear(rule)
            if found is not None and self._adds(name, *found):
                sums.append(Advance(name, rule.name, rule.needs, *found))
            else:
                yield Advance(name, rule.name, rule.needs)
        yield from sums

    def _adds(self, name: str, source: str, add: int) -> bool:
        """Whether a slot can be written as the sum of a slot, of the same dtype and shape, and a number."""
        target, other = self.declaration.slots[name], self.declaration.slots.get(source)
        if other is None:
            return False
        (own, *rest), (mine, *others) = (
            (
                resolve_dtype(slot.dtype, self.capabilities),
                extent(slot.shape, self.sizes),
                rows_of_requests(slot, self.sizes),
            )
            for slot in (target, other)
        )
        is_whole = not (own.is_floating_point or own.is_complex or own == torch.bool)
        return own == mine and rest == others and (is_whole or not add)

    def _packed(self, slots: Mapping[str, Slot]) -> tuple[str, ...]:
        """Slots that foreach copies take out of a packet: those that the batch brings, then computed ones."""
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
        """Whether the host computes a slot, and returns what it computed."""
        return self.declaration.side(name) == HOST and not self.declaration.functions[name].writes_out

    def _computed(self, packed: Collection[str]) -> Iterable[ComputeStep]:
        for name, compute in self.declaration.functions.items():
            needs = (*compute.needs, OUT) if compute.writes_out else compute.needs
            is_fused = name in self._room and self._is_value(name) and not self._apart(self.declaration.slots[name])
            yield ComputeStep(name, compute.name, needs, self.declaration.side(name), name in packed or is_fused)

    def _copies(self, slots: Mapping[str, Slot]) -> Iterator[CopyGroup]:
        """Groups of slots that are copied alike; of foreach copies no group is larger than the device can take."""
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
        """How a slot is copied, and what sets it apart."""
        if name in self.pattern.in_place:
            return "in place", ""
        if self.lowering.is_reference:
            return "single", "slot by slot"
        if slot.placement == HOST or self.lowering.copies == "direct":
            return "direct", ""
        why = self._apart(slot) if self.lowering.has_kernel else self._alone(name, slot)
        return ("single", why) if why else (self.lowering.copies, "")

    def _apart(self, slot: Slot) -> str:
        """Why the fused kernel does not write a slot, or nothing."""
        if not self.lowering.has_kernel:
            return "not fused"
        if slot.placement != DEVICE:
            return "on the host"
        dtype = resolve_dtype(slot.dtype, self.capabilities)
        if self._nbytes(slot) >= LARGE_LANE_BYTES:
            return "large"
        return has_lane(dtype, extent(slot.shape, self.sizes), slot.varying)

    def _alone(self, name: str, slot: Slot) -> str:
        """Why a slot cannot share a foreach call, or nothing."""
        if not self.capabilities.foreach_device:
            return "no foreach on this device"
        dtype = resolve_dtype(slot.dtype, self.capabilities)
        if dtype in _NOT_TOGETHER:
            return f"no foreach of {dtype_text(dtype)}"
        packs = self.capabilities.packed_uploads
        if (slot.strided and not (packs and name in self.pattern.hosted)) or any(dim > 0 for dim in slot.varying):
            return "strided"
        return "large" if self._nbytes(slot) >= LARGE_BYTES else ""
