"""Buffers: the memory behind slots, at fixed addresses, and how far each of them may be dirty."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Final

import attrs
import torch

from .arena import ALIGNMENT, Room, separate, together
from .axes import Sizes, extent
from .binding import Allocate, check_bindings, merge, overlaps, span
from .caches import keep_newest
from .capabilities import Capabilities
from .declaration import Declaration
from .roles import resolve_dtype
from .slots import Slot
from .tails import Pad
from .values import initial_value, write_all

NOT_BOUND: Final[Mapping[str, torch.Tensor]] = {}


Box = tuple[tuple[int, int], ...]
KEPT: Final = 2048
"""Views that one buffer keeps; the oldest goes first."""


@attrs.define(eq=False)
class Buffer:
    """One slot's memory at full capacity.

    mark: how far rows may hold something else than the tail's value, along each varying dim (a high-water mark);
    adopted: whether the memory was handed in.
    """

    name: str
    slot: Slot
    tensor: torch.Tensor
    mark: tuple[int, ...]
    adopted: bool = False
    _views: dict[Box, torch.Tensor] = attrs.field(factory=dict, init=False)

    def view(self, sizes: Sizes) -> torch.Tensor:
        """The part that a bucket reads: the first rows along each varying dim."""
        return self.box(tuple((0, self.slot.shape[dim].at(sizes)) for dim in self.slot.varying))

    def box(self, ranges: Box) -> torch.Tensor:
        """The part between two bounds along each varying dim, sliced once for all fills that ask for it."""
        view = self._views.get(ranges)
        if view is None:
            view = keep_newest(self._views, KEPT)[ranges] = self._slice(ranges)
        return view

    def _slice(self, ranges: Box) -> torch.Tensor:
        """A view that is no inference tensor, whatever mode is on."""
        with torch.inference_mode(mode=False):
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

    stamp: who filled them last, so that a repeated fill finds tails clean. unmarked: whether a kernel has written slots
    since, which keeps no marks. handed_out: whether producers were given views, so that they may write any row.
    """

    def __init__(self, buffers: Mapping[str, Buffer], capacity: Sizes) -> None:
        self._buffers = dict(buffers)
        self.capacity = dict(capacity)
        self.stamp: object | None = None
        self.unmarked = False
        self.handed_out = False

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
        self.stamp, self.unmarked = None, False
        for buffer in self:
            buffer.distrust()

    @property
    def nbytes(self) -> int:
        """Bytes allocated here, alignment included; adopted memory belongs to someone else."""
        storages = [buffer.tensor.untyped_storage() for buffer in self if not buffer.adopted]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @functools.cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The address range of each buffer."""
        return [span(buffer.tensor) for buffer in self if buffer.nbytes]

    @functools.cached_property
    def near(self) -> list[tuple[int, int]]:
        """Ranges of addresses outside of which no tensor begins that reaches into a buffer; a few, in order."""
        reach = self.reach_before
        return merge(((low - reach, high) for low, high in self.spans), ALIGNMENT)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether some of a tensor's elements lie in a buffer."""
        address = tensor.data_ptr()
        return any(low <= address < high for low, high in self.near) and overlaps(tensor, self.spans)

    @property
    def reach_before(self) -> int:
        """Bytes before a buffer at which a tensor that reaches into it may begin.

        0 where all memory was allocated here: what lies in it begins in it. Adopted memory is part of something
        larger, of which a source may be another part.
        """
        storages = [buffer.tensor.untyped_storage().nbytes() for buffer in self if buffer.adopted]
        return max(storages, default=0)

    @functools.cached_property
    def addresses(self) -> dict[str, int]:
        """Where each buffer began when this was first asked: at capture."""
        return {buffer.name: buffer.tensor.data_ptr() for buffer in self}

    def moved(self) -> list[str]:
        """Slots whose buffer is not where it was."""
        return [b.name for b in self if b.tensor.data_ptr() != self.addresses[b.name]]


def allocate(
    declaration: Declaration,
    capacity: Sizes,
    capabilities: Capabilities,
    empty: Allocate,
    bind: Mapping[str, torch.Tensor] = NOT_BOUND,
) -> Buffers:
    """Buffers for every slot at full capacity, those in `bind` adopted, each with its initial value.

    Adopted memory is written too: a step is captured on what its inputs hold, which must be harmless.
    Raises BindError where a tensor cannot be adopted, ComputeError where a value does not fit its dtype here.
    """
    check_bindings(declaration, capacity, capabilities, empty, bind)
    rooms = [
        Room(name, extent(slot.shape, capacity), resolve_dtype(slot.dtype, capabilities), slot.placement)
        for name, slot in declaration.slots.items()
        if name not in bind
    ]
    tensors = {**(together if capabilities.arenas else separate)(rooms, empty), **bind}
    buffers = Buffers(
        {
            name: Buffer(name, slot, tensors[name], tuple(0 for _ in slot.varying), name in bind)
            for name, slot in declaration.slots.items()
        },
        capacity,
    )
    _initialise(buffers, capabilities)
    for buffer in buffers:
        if not _is_all_tail(buffer.slot):
            buffer.distrust()
    return buffers


def _is_all_tail(slot: Slot) -> bool:
    """Whether a slot that holds its initial value holds what its tail must."""
    rule = slot.rule()
    return not isinstance(rule, Pad) or rule.value is slot.initial()


def _initialise(buffers: Buffers, capabilities: Capabilities) -> None:
    for buffer in buffers:
        value = initial_value(buffer.name, buffer.slot, buffers.capacity, capabilities)
        with torch.inference_mode(mode=False), torch.no_grad():
            write_all(buffer.tensor, value, f"slot {buffer.name!r}")


@contextlib.contextmanager
def at_rest(buffers: Buffers, capabilities: Capabilities) -> Iterator[None]:
    """Have all slots hold their initial values for a while, on which a step does no harm; then what they held."""
    with torch.inference_mode(mode=False), torch.no_grad():
        kept = [buffer.tensor.clone() for buffer in buffers]
    try:
        _initialise(buffers, capabilities)
        yield
    finally:
        with torch.inference_mode(mode=False), torch.no_grad():
            for buffer, before in zip(buffers, kept, strict=True):
                buffer.tensor.copy_(before)
        buffers.distrust()
