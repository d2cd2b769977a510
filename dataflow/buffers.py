"""Buffers: the memory behind slots, one allocation a placement where the device can."""

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs
import torch

from .axes import Sizes, extent
from .binding import Allocate, Bound, Exclusive, check_bindings, merge, overlaps, span, tensor_in
from .capabilities import Capabilities, Placement, resolve_dtype
from .computation import initial_value, write_all
from .declaration import Declaration
from .slots import Slot
from .tails import Pad
from .turns import NO_MEMORY, SharedMemory

ALIGNMENT: Final = 256
"""Bytes that each slot's address is a multiple of: what CUDA's allocator gives, and wide loads need."""


@attrs.frozen
class Room:
    """What one slot asks for."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement

    @property
    def nbytes(self) -> int:
        """Bytes, rounded up to the alignment; never nothing, so that no two slots begin at one address."""
        return max(math.ceil(math.prod(self.shape) * self.dtype.itemsize / ALIGNMENT), 1) * ALIGNMENT


def together(rooms: Iterable[Room], empty: Allocate) -> dict[str, torch.Tensor]:
    """All slots of one placement in one allocation, the largest first."""
    tensors: dict[str, torch.Tensor] = {}
    asked = sorted(rooms, key=lambda room: (room.placement, -room.nbytes, room.name))
    with torch.inference_mode(mode=False):
        for placement, group in itertools.groupby(asked, key=operator.attrgetter("placement")):
            mine = [*group]
            arena = empty((sum(room.nbytes for room in mine),), torch.uint8, placement)
            for room, stop in zip(mine, itertools.accumulate(room.nbytes for room in mine), strict=True):
                tensors[room.name] = carve(arena, stop - room.nbytes, room.shape, room.dtype)
    return tensors


def carve(block: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in the bytes of a block, from one of them on."""
    used = math.prod(shape) * dtype.itemsize
    return block[start : start + used].view(dtype).view(shape)


NOT_BOUND: Final[Mapping[str, Bound]] = {}


Box = Sequence[tuple[int, int]]


@attrs.define(eq=False)
class Buffer:
    """One slot's memory at full capacity.

    mark: how far rows may hold something else than the tail's value, along each varying dim (a high-water mark);
    owner: the tensor that was handed in, where the memory was adopted; `tensor` is an alias of it, whose shape nobody
    else can change. foreign: whether its owner may write it between steps. pooled: whether it is a part of memory that
    others use in their turn.
    """

    name: str
    slot: Slot
    tensor: torch.Tensor
    mark: tuple[int, ...]
    owner: torch.Tensor | None = None
    foreign: bool = False
    pooled: bool = False

    @property
    def adopted(self) -> bool:
        """Whether the memory was handed in."""
        return self.owner is not None

    @property
    def addresses(self) -> set[int]:
        """Where it begins: one address, unless its owner has moved the tensor that was handed in."""
        return {tensor.data_ptr() for tensor in (self.tensor, self.owner) if tensor is not None}

    def view(self, sizes: Sizes) -> torch.Tensor:
        """The part that a bucket reads: the first rows along each varying dim."""
        return self.box([(0, self.slot.shape[dim].at(sizes)) for dim in self.slot.varying])

    def box(self, ranges: Box) -> torch.Tensor:
        """The part between two bounds along each varying dim; no inference tensor, whatever mode is on."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(mode=False):
                return self.box(ranges)
        view = self.tensor
        for dim, (start, stop) in zip(self.slot.varying, ranges, strict=True):
            view = view.narrow(dim, start, stop - start)
        return view

    def reach(self, sizes: Sizes) -> tuple[int, ...]:
        """A size along each varying dim."""
        return tuple(self.slot.shape[dim].at(sizes) for dim in self.slot.varying)

    def distrust(self) -> None:
        """From now on any row may hold anything."""
        self.mark = tuple(self.tensor.shape[dim] for dim in self.slot.varying)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.tensor.nbytes


class Buffers:
    """The buffers of one declaration.

    ledger: tells which fill came last, so that a repeated one finds tails clean; mine: the last one to these buffers.
    turn: what is to be known of others in the same memory. unmarked: whether a kernel has written slots since, which
    keeps no marks.
    """

    def __init__(self, buffers: Mapping[str, Buffer], capacity: Sizes, shared: SharedMemory | None = None) -> None:
        self._buffers = dict(buffers)
        self.capacity = dict(capacity)
        shared = SharedMemory() if shared is None else shared
        self.ledger, self.turn = shared.ledger, shared.turn
        self.mine: object | None = None
        self.unmarked = False

    def __getitem__(self, name: str) -> Buffer:
        """One slot's buffer."""
        return self._buffers[name]

    def __iter__(self) -> Iterator[Buffer]:
        """All buffers, in the declaration's order."""
        return iter(self._buffers.values())

    def __len__(self) -> int:
        """How many there are."""
        return len(self._buffers)

    def distrust(self) -> None:
        """Forget what is known of tails: after a write that no plan made, or one that broke off."""
        self.ledger.stamp, self.mine, self.unmarked = None, None, False
        for buffer in self:
            buffer.distrust()

    @property
    def nbytes(self) -> int:
        """Bytes allocated here, alignment included; memory of others and of a pool belongs to these."""
        own = [buffer.tensor for buffer in self if not (buffer.adopted or buffer.pooled)]
        shared = {buffer.tensor.untyped_storage().data_ptr() for buffer in self if buffer.pooled}
        storages = [tensor.untyped_storage() for tensor in own]
        return sum({one.data_ptr(): one.nbytes() for one in storages if one.data_ptr() not in shared}.values())

    @functools.cached_property
    def foreign(self) -> frozenset[str]:
        """Slots whose memory others may write between steps, so that no fill knows its tail to be clean."""
        return frozenset(buffer.name for buffer in self if buffer.foreign)

    @functools.cached_property
    def storages(self) -> frozenset[int]:
        """Where the allocations begin that buffers are parts of."""
        return frozenset(buffer.tensor.untyped_storage().data_ptr() for buffer in self if buffer.nbytes)

    @functools.cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The address range of each buffer."""
        return [span(buffer.tensor) for buffer in self if buffer.nbytes]

    @functools.cached_property
    def near(self) -> list[tuple[int, int]]:
        """Ranges of addresses outside of which no tensor begins that reaches into a buffer; a few, in order."""
        tensors = [buffer.tensor for buffer in self if buffer.nbytes]
        return merge((one.untyped_storage().data_ptr(), span(one)[1]) for one in tensors)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether some of a tensor's elements lie in a buffer."""
        address = tensor.data_ptr()
        return any(low <= address < high for low, high in self.near) and overlaps(tensor, self.spans)

    @functools.cached_property
    def addresses(self) -> dict[str, int]:
        """Where each buffer began when this was first asked: at capture."""
        return {buffer.name: buffer.tensor.data_ptr() for buffer in self}

    def moved(self) -> list[str]:
        """Slots whose buffer is not where it was."""
        return [b.name for b in self if b.addresses != {self.addresses[b.name]}]


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
    """Buffers for every slot at full capacity, those in `bind` adopted, each with its initial value.

    shared: memory for some of them, which others use in their turn. keep_bound: leave what adopted memory holds. It is
    written otherwise: a step is captured on what its inputs hold, which must be harmless.
    Raises BindError where a tensor cannot be adopted, ComputeError where a value does not fit its dtype here.
    """
    check_bindings(declaration, capacity, capabilities, empty, bind)
    pooled = NO_MEMORY if shared is None else shared.tensors
    rooms = [
        Room(name, extent(slot.shape, capacity), resolve_dtype(slot.dtype, capabilities), slot.placement)
        for name, slot in declaration.slots.items()
        if name not in bind and name not in pooled
    ]
    owners = {name: tensor_in(bound) for name, bound in bind.items()}
    foreign = {name for name, bound in bind.items() if not isinstance(bound, Exclusive)}
    if capabilities.arenas:
        own = together(rooms, empty)
    else:
        own = {room.name: empty(room.shape, room.dtype, room.placement) for room in rooms}
    with torch.inference_mode(mode=False):
        tensors = {**own, **{name: owner.detach() for name, owner in owners.items()}, **pooled}
    made = {
        name: Buffer(
            name,
            slot,
            tensors[name],
            tuple(0 for _ in slot.varying),
            owner=owners.get(name),
            foreign=name in foreign,
            pooled=name in pooled,
        )
        for name, slot in declaration.slots.items()
    }
    buffers = Buffers(made, capacity, shared)
    _initialise(buffers, capabilities, adopted=not keep_bound)
    for buffer in buffers:
        if buffer.pooled or (buffer.adopted and keep_bound) or not _is_all_tail(buffer.slot):
            buffer.distrust()
    return buffers


def _is_all_tail(slot: Slot) -> bool:
    """Whether a slot that holds its initial value holds what its tail must."""
    rule = slot.rule()
    return not isinstance(rule, Pad) or rule.value is slot.initial()


def _initialise(buffers: Buffers, capabilities: Capabilities, *, adopted: bool = True) -> None:
    for buffer in buffers:
        if buffer.adopted and not adopted:
            continue
        value = initial_value(buffer.name, buffer.slot, buffers.capacity, capabilities)
        with torch.inference_mode(mode=False), torch.no_grad():
            write_all(buffer.tensor, value, f"slot {buffer.name!r}")


@contextlib.contextmanager
def at_rest(buffers: Buffers, capabilities: Capabilities) -> Iterator[None]:
    """Have all slots hold their initial values for a while, on which a step does no harm; then what they held."""
    with torch.inference_mode(mode=False), torch.no_grad():
        kept = [(buffer.tensor, buffer.tensor.clone()) for buffer in buffers]
    try:
        _initialise(buffers, capabilities)
        yield
    finally:
        with torch.inference_mode(mode=False), torch.no_grad():
            for tensor, before in kept:
                tensor.copy_(before)
        buffers.distrust()
