"""Buffers: the memory of slots, which is allocated, adopted or taken from a pool, and which of its tails are clean."""

import bisect
import collections
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias, final

import attrs
import torch

from .axes import Extent, Sizes, extent
from .capabilities import Capabilities, Placement, dtype_text, resolve_dtype
from .computation import LastRun, initial_value, write
from .declaration import Declaration
from .errors import BindError, did_you_mean
from .fill.tails import CleanTails
from .guard import outside_inference
from .slots import BY_STEP, Slot

Allocate: TypeAlias = Callable[[Extent, torch.dtype, Placement], torch.Tensor]
ALIGNMENT: Final = 256
"""Each slot's address is a multiple of this many bytes, as CUDA's allocator guarantees and wide loads need."""


@attrs.define(eq=False)
class BufferUse:
    """What is known of the use of one set of buffers, whose memory other sets may share.

    Attributes:
        fills: The number of fills.
        eager_runs: The number of steps without a graph.
        stream: The stream of its last fill or step.
        reading: An event after the last step that copies from host slots.
        neighbours: All other sets that share a byte with this one.
        overwriters: The same sets, by slot.
    """

    fills: int = 0
    eager_runs: int = 0
    stream: int | None = None
    reading: Any = None
    neighbours: tuple["BufferUse", ...] = ()
    overwriters: Mapping[str, tuple["BufferUse", ...]] = attrs.field(factory=dict)

    def follows(self, stream: int | None) -> bool:
        """Return whether no neighbour's memory was last used on a stream other than this one."""
        for other in self.neighbours:  # noqa: SIM110 - `all` takes twice as long, and it is asked in each step
            if other.stream != stream and other.stream is not None:
                return False
        return True

    @property
    def others(self) -> int:
        """A number that grows whenever a fill may have written some of this memory."""
        return sum([other.fills for other in self.neighbours], self.fills) if self.neighbours else self.fills

    def overwritten(self, slot: str) -> int:
        """Return a number that grows whenever another set's fill may have written a slot's memory."""
        return sum(other.fills for other in self.overwriters.get(slot, ()))


@attrs.frozen(eq=False)
class SharedMemory:
    """Memory that a pool provides for one set of buffers.

    Attributes:
        tensors: Memory for some of its slots.
        clean: The record of clean tails, which all sets in this memory share.
        use: The record of the set's use of the memory.
    """

    tensors: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    clean: CleanTails = attrs.field(factory=CleanTails)
    use: BufferUse = attrs.field(factory=BufferUse)


@final
@attrs.frozen(eq=False)
class Exclusive:
    """A tensor to adopt that only the runner writes: `bind={"ids": Exclusive(tensor)}`.

    Its tail is reset only if an earlier step left it dirty, as in memory that the runner allocates. The owner of any
    other adopted tensor may write it between steps, so its tail is reset in each step.

    Attributes:
        tensor: The slot's memory.
    """

    tensor: torch.Tensor


Bound: TypeAlias = torch.Tensor | Exclusive
NOT_BOUND: Final[Mapping[str, Bound]] = {}


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's elements, and the address after the last."""
    first = tensor.data_ptr()
    if not tensor.numel():
        return first, first
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return first, first + (last + 1) * tensor.itemsize


def overlaps(tensor: torch.Tensor, spans: Iterable[tuple[int, int]]) -> bool:
    """Return whether some of a tensor's elements may lie in one of several address ranges."""
    low, high = span(tensor)
    return any(low < stop and start < high for start, stop in spans)


@attrs.define(eq=False)
class Buffer:
    """One slot's memory at full capacity.

    Attributes:
        name: The slot's name.
        slot: The slot.
        tensor: The memory.
        owner: The tensor that the user passed, which `tensor` is an alias of, or None.
        foreign: Whether its owner may write it between steps.
        pooled: Whether other sets of buffers also use the memory.
    """

    name: str
    slot: Slot
    tensor: torch.Tensor
    owner: torch.Tensor | None = None
    foreign: bool = False
    pooled: bool = False

    @property
    def adopted(self) -> bool:
        """Whether the user passed the memory."""
        return self.owner is not None

    def view(self, sizes: Sizes) -> torch.Tensor:
        """Return the part that a bucket reads: the first rows along varying dims. It is never an inference tensor."""
        if torch.is_inference_mode_enabled():
            with outside_inference():
                return self.view(sizes)
        view = self.tensor
        for dim in self.slot.varying:
            view = view.narrow(dim, 0, self.slot.shape[dim].at(sizes))
        return view

    @property
    def nbytes(self) -> int:
        """The bytes of the whole buffer."""
        return self.tensor.nbytes


class Buffers:
    """The buffers of one declaration, with the record of their clean tails and of who uses their memory."""

    def __init__(self, buffers: Mapping[str, Buffer], capacity: Sizes, shared: SharedMemory) -> None:
        self._buffers = dict(buffers)
        self.capacity = dict(capacity)
        self.clean = shared.clean
        self.use = shared.use
        self.last_runs = collections.defaultdict[str, LastRun](LastRun)
        self._following: dict[str, Buffer] = {}

    def __getitem__(self, name: str) -> Buffer:
        """Return one slot's buffer."""
        return self._buffers[name]

    def __iter__(self) -> Iterator[Buffer]:
        """Iterate over all buffers, in the declaration's order."""
        return iter(self._buffers.values())

    def distrust(self) -> None:
        """Trust no contents any more, after a write by something other than a fill, or after an interrupted fill.

        All tails count as dirty, and functions that do not run in each step run in the next.
        """
        self.clean.forget()
        for last in self.last_runs.values():
            last.seen = None

    @property
    def nbytes(self) -> int:
        """Bytes allocated for these buffers, alignment included. Adopted and pooled memory does not count."""
        own = [buffer.tensor.untyped_storage() for buffer in self if not (buffer.adopted or buffer.pooled)]
        shared = {buffer.tensor.untyped_storage().data_ptr() for buffer in self if buffer.pooled}
        return sum({one.data_ptr(): one.nbytes() for one in own if one.data_ptr() not in shared}.values())

    @property
    def again(self) -> dict[str, dict[str, int]]:
        """How often functions that do not run in each step have run, and how often their slots kept a value."""
        return {name: {"ran": last.ran, "kept": last.kept} for name, last in self.last_runs.copy().items()}

    @functools.cached_property
    def foreign(self) -> frozenset[str]:
        """Slots whose memory others may write between steps, so that their tails are reset in each fill."""
        return frozenset(buffer.name for buffer in self if buffer.foreign)

    @functools.cached_property
    def storages(self) -> frozenset[int]:
        """The addresses of the allocations that the buffers are in."""
        return frozenset(buffer.tensor.untyped_storage().data_ptr() for buffer in self if buffer.nbytes)

    @functools.cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The address range of each buffer."""
        return [span(buffer.tensor) for buffer in self if buffer.nbytes]

    @functools.cached_property
    def bounds(self) -> list[int]:
        """The start of each allocation that buffers are in and the end of the last buffer in it, in ascending order."""
        ends = dict[int, int]()
        for buffer in self:
            if buffer.nbytes:
                start = buffer.tensor.untyped_storage().data_ptr()
                ends[start] = max(ends.get(start, 0), span(buffer.tensor)[1])
        found = list[int]()
        for start, stop in sorted(ends.items()):
            if found and start <= found[-1]:  # two allocations that overlap or touch
                found[-1] = max(found[-1], stop)
            else:
                found += [start, stop]
        return found

    def reaches(self, address: int) -> bool:
        """Return whether a tensor that begins at an address may have elements in a buffer."""
        return bool(bisect.bisect_right(self.bounds, address) & 1)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether some of a tensor's elements lie in a buffer."""
        return self.reaches(tensor.data_ptr()) and overlaps(tensor, self.spans)

    def following(self, name: str) -> Buffer:
        """Return memory of a slot's size, which holds its next value until the slot itself is written."""
        if name not in self._following:
            with outside_inference():
                self._following[name] = attrs.evolve(self[name], tensor=torch.zeros_like(self[name].tensor), owner=None)
        return self._following[name]

    @functools.cached_property
    def addresses(self) -> dict[str, int]:
        """The address of each buffer at capture, which is when this is first read."""
        return {buffer.name: buffer.tensor.data_ptr() for buffer in self}

    def moved(self) -> list[str]:
        """Return the slots whose buffer, or the tensor that the user passed for it, has moved."""
        found = list[str]()
        for buffer in self:
            owner = buffer.tensor if buffer.owner is None else buffer.owner
            if {buffer.tensor.data_ptr(), owner.data_ptr()} != {self.addresses[buffer.name]}:
                found.append(buffer.name)
        return found


def aligned(shape: Extent, dtype: torch.dtype) -> int:
    """Return the bytes of a slot's memory, rounded up to the alignment: at least one unit, so that addresses differ."""
    return max(math.ceil(math.prod(shape) * dtype.itemsize / ALIGNMENT), 1) * ALIGNMENT


def carve(block: torch.Tensor, start: int, shape: Extent, dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of the bytes of a block from `start` on."""
    used = math.prod(shape) * dtype.itemsize
    return block[start : start + used].view(dtype).view(shape)


def allocate(
    declaration: Declaration,
    capacity: Sizes,
    capabilities: Capabilities,
    empty: Allocate,
    bind: Mapping[str, Bound] = NOT_BOUND,
    shared: SharedMemory | None = None,
    *,
    keep_bound: bool = False,
) -> Buffers:
    """Make a buffer for every slot at full capacity. Tensors in `bind` are adopted, and all get their initial values.

    `shared` has memory for some slots. `keep_bound` leaves the contents of adopted memory, on which a step is captured.
    Raises BindError if a tensor cannot be adopted, and ComputeError if a value does not fit its dtype on this backend.
    """
    check_bindings(declaration, capacity, capabilities, empty, bind)
    shared = SharedMemory() if shared is None else shared
    owners = {name: _tensor_in(bound) for name, bound in bind.items()}
    slots = declaration.slots.items()
    waiting = dict[Placement, list[tuple[int, str]]]()
    asked = {name: (extent(slot.shape, capacity), resolve_dtype(slot.dtype, capabilities)) for name, slot in slots}
    with outside_inference():
        tensors = {**{name: owner.detach() for name, owner in owners.items()}, **shared.tensors}
        for name, slot in slots:
            if name in tensors:
                continue
            if capabilities.arenas and slot.writers != BY_STEP:
                # one allocation for each placement, with the largest slots first; but torch.compile rejects a step that
                # writes one of several tensors of different dtypes in one allocation
                waiting.setdefault(slot.placement, []).append((aligned(*asked[name]), name))
            else:
                tensors[name] = empty(*asked[name], slot.placement)
        for placement, mine in waiting.items():
            arena = empty((sum(nbytes for nbytes, _ in mine),), torch.uint8, placement)
            start = 0
            for nbytes, name in sorted(mine, key=lambda one: (-one[0], one[1])):
                tensors[name] = carve(arena, start, *asked[name])
                start += nbytes
    made = dict[str, Buffer]()
    for name, slot in slots:
        foreign = isinstance(bind.get(name), torch.Tensor)
        pooled = name in shared.tensors
        made[name] = Buffer(name, slot, tensors[name], owners.get(name), foreign, pooled)
    buffers = Buffers(made, capacity, shared)
    _initialise(buffers, capabilities, adopted=not keep_bound)
    return buffers


def _initialise(buffers: Buffers, capabilities: Capabilities, *, adopted: bool = True) -> None:
    for buffer in buffers:
        if buffer.adopted and (buffer.slot.is_state or not adopted):
            continue
        value = initial_value(buffer.name, buffer.slot, buffers.capacity, capabilities)
        target = buffer.tensor
        with outside_inference(), torch.no_grad():
            if isinstance(value, bool | int | float):
                target.fill_(value)
            else:
                write(target, value, f"slot {buffer.name!r}")


@contextlib.contextmanager
def at_rest(buffers: Buffers, capabilities: Capabilities) -> Iterator[None]:
    """Set all slots to their initial values, on which a step can run safely, and restore their contents on exit."""
    with contents_kept(buffers):
        _initialise(buffers, capabilities)
        yield


@contextlib.contextmanager
def contents_kept(buffers: Buffers) -> Iterator[None]:
    """Run a block, and put the contents of all slots back. The next fill then resets their tails."""
    with outside_inference(), torch.no_grad():
        kept = [(buffer.tensor, buffer.tensor.clone()) for buffer in buffers]
    try:
        yield
    finally:
        with outside_inference(), torch.no_grad():
            for tensor, before in kept:
                tensor.copy_(before)
        buffers.distrust()


def check_bindings(
    declaration: Declaration, capacity: Sizes, capabilities: Capabilities, empty: Allocate, bind: Mapping[str, Bound]
) -> None:
    """Raise BindError for all tensors that cannot be adopted."""
    faults = list[str]()
    spans = list[tuple[tuple[int, int], str]]()
    for name, tensor in ((name, _tensor_in(bound)) for name, bound in bind.items()):
        if name not in declaration.slots:
            near = did_you_mean(name, declaration.slots)
            faults.append(f"bind names {name!r}, which is not a slot of {declaration.name}{near}")
        elif not isinstance(tensor, torch.Tensor):
            faults.append(f"slot {name!r}: expected a tensor to adopt, got {type(tensor).__name__}")
        else:
            slot = declaration.slots[name]
            like = empty((0,), resolve_dtype(slot.dtype, capabilities), slot.placement)
            faults += [f"slot {name!r}: {fault}" for fault in _misfits(tensor, like, extent(slot.shape, capacity))]
            spans.append((span(tensor), name))
    for ((_, stop), first), ((start, _), second) in itertools.pairwise(() if faults else sorted(spans)):
        if start < stop:
            faults.append(f"slots {first!r} and {second!r} are bound to overlapping memory: each needs its own")
    if faults:
        raise BindError("; ".join(faults))


def _tensor_in(bound: Bound) -> torch.Tensor:
    """Return the tensor to adopt."""
    return bound.tensor if isinstance(bound, Exclusive) else bound


def _misfits(tensor: torch.Tensor, like: torch.Tensor, shape: Extent) -> Iterator[str]:
    """Yield why a tensor cannot be adopted."""
    if tuple(tensor.shape) != shape:
        yield f"expected shape {list(shape)} (its full capacity), got {list(tensor.shape)}"
    if tensor.dtype != like.dtype:
        yield f"expected {dtype_text(like.dtype)}, got {dtype_text(tensor.dtype)}"
    if tensor.device != like.device:
        yield f"expected memory on {like.device}, got {tensor.device}"
    if not tensor.is_contiguous():
        yield f"expected a contiguous tensor, got strides {list(tensor.stride())}; adopt `.contiguous()`"
    if tensor.is_inference():
        yield "made under inference_mode, so it cannot be filled outside it; make it outside"
    if tensor.requires_grad:
        yield "requires grad; adopt `.detach()`"
