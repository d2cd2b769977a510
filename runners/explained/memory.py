"""The memory layout: where each slot lies, when its value counts, what alignment costs, and who has the same bytes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import attrs
import torch

from ...dataflow.buffers import Buffer, Buffers
from ...dataflow.capabilities import DEVICE
from ...dataflow.declaration import Declaration
from ...dataflow.plan import FUSED, FillPlan
from ...dataflow.roles import dtype_text
from ...dataflow.sharing.lifetimes import lasting
from ...dataflow.slots import Output
from .records import Allocation, Phase, Place

WITH_KERNEL: Final[tuple[Phase, ...]] = ("fill", "kernel", "replay", "outputs")
WITHOUT_KERNEL: Final[tuple[Phase, ...]] = ("fill", "replay", "outputs")
Sharers = Mapping[str, tuple[str, ...]]
"""By slot, who else has some of its bytes."""
ALONE: Final[Sharers] = {}
_POOLED: Final = "pooled "


def phases_of(plan: FillPlan | None) -> tuple[Phase, ...]:
    """The phases of one step: the kernel is one of its own where the plan has any."""
    return WITH_KERNEL if plan is not None and plan.lowering in FUSED and plan.fused else WITHOUT_KERNEL


@attrs.frozen(eq=False)
class Layout:
    """The slots of a runner's buffers as they lie in memory."""

    allocations: tuple[Allocation, ...]
    places: tuple[Place, ...]

    @classmethod
    def of(
        cls,
        buffers: Buffers,
        declaration: Declaration,
        plan: FillPlan | None,
        *,
        whole: bool,
        sharers: Sharers = ALONE,
        kept: Collection[str] = (),
    ) -> "Layout":
        """Read it off the buffers themselves.

        plan: of a bucket, which tells when slots are written. whole: whether graphs compute what the device does.
        sharers: of memory that runners share. kept: slots that were asked to be kept there.
        """
        lives = _Lives(declaration, plan, whole, kept)
        pieces = list(_pieces(buffers))
        chained = {tensor.untyped_storage().data_ptr() for tensor in buffers.beside}
        made = [_Piece(name, members, lives, sharers, chained) for name, members in _named(pieces)]
        allocations = tuple(piece.allocation() for piece in made)
        return cls(allocations, tuple(place for piece in made for place in piece.places()))


def _pieces(buffers: Buffers) -> Iterator[list[Buffer]]:
    """Buffers that lie in one storage, in the order of their offsets; storages without bytes each by itself."""
    found: dict[tuple[int, str], list[Buffer]] = {}
    for buffer in buffers:
        storage = buffer.tensor.untyped_storage()
        found.setdefault((storage.data_ptr(), "" if storage.nbytes() else buffer.name), []).append(buffer)
    for members in found.values():
        yield sorted(members, key=lambda buffer: (_offset(buffer), buffer.nbytes, buffer.name))


def _offset(buffer: Buffer) -> int:
    """Its first byte within its storage; a tensor without elements has no address that would tell."""
    return int(buffer.tensor.storage_offset()) * buffer.tensor.itemsize


def _named(pieces: Sequence[list[Buffer]]) -> Iterator[tuple[str, list[Buffer]]]:
    """Each piece with a name: a pool's, by its placement where it is the only one there, else by its slot."""
    order = sorted(pieces, key=lambda piece: (piece[0].adopted, piece[0].slot.placement != DEVICE))
    kinds = [_kind(piece[0]) for piece in order]
    seen: dict[str, int] = {}
    for piece, kind in zip(order, kinds, strict=True):
        seen[kind] = seen.get(kind, 0) + 1
        is_one = kinds.count(kind) == 1 and not piece[0].adopted
        is_shared = kind.startswith(_POOLED)
        number = "" if is_one else f" {seen[kind]}"
        yield f"{kind}{number}" if is_one or is_shared else f"{kind} of {', '.join(one.name for one in piece)}", piece


def _kind(buffer: Buffer) -> str:
    """What memory a buffer lies in, in words."""
    return f"{_POOLED if buffer.pooled else ''}{buffer.slot.placement} memory"


@attrs.frozen(eq=False)
class _Piece:
    """One storage and the slots in it, in order of their addresses; chained: storages with all parts of some slots."""

    name: str
    members: list[Buffer]
    lives: "_Lives"
    sharers: Sharers
    chained: Collection[int]

    @property
    def _is_handed_in(self) -> bool:
        """Whether it is someone else's: parts of chained slots are adopted, too, but from the runner itself."""
        return self.members[0].adopted and self._storage.data_ptr() not in self.chained

    @property
    def _storage(self) -> torch.UntypedStorage:
        return self.members[0].tensor.untyped_storage()

    def allocation(self) -> Allocation:
        """The storage itself."""
        first, nbytes = self.members[0], self._storage.nbytes()
        used = sum(end - start for start, end in _merged([self._span(buffer) for buffer in self.members]))
        return Allocation(
            name=self.name,
            placement=first.slot.placement,
            nbytes=nbytes,
            adopted=self._is_handed_in,
            unused=nbytes - used,
        )

    def places(self) -> Iterator[Place]:
        """Each slot's place."""
        spans = [self._span(buffer) for buffer in self.members]
        ends = [*(start for start, _ in spans[1:]), self._storage.nbytes()]
        for buffer, (start, end), following in zip(self.members, spans, ends, strict=True):
            since, until = self.lives.of(buffer.name)
            yield Place(
                slot=buffer.name,
                kind=buffer.slot.kind,
                dtype=dtype_text(buffer.tensor.dtype),
                allocation=self.name,
                placement=buffer.slot.placement,
                offset=start,
                nbytes=buffer.nbytes,
                gap=0 if buffer.adopted or buffer.pooled else max(0, following - end),
                shape=tuple(buffer.tensor.shape),
                adopted=self._is_handed_in,
                since=since,
                until=until,
                lasting=self.lives.lasting(buffer.name),
                shares=self.sharers.get(buffer.name, ()),
            )

    def _span(self, buffer: Buffer) -> tuple[int, int]:
        """First and one past the last byte within the storage."""
        start = _offset(buffer)
        return start, start + buffer.nbytes


def _merged(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The same bytes as spans that do not overlap."""
    reached = 0
    for start, end in sorted(spans):
        if end > reached:
            yield max(start, reached), end
            reached = end


@attrs.frozen
class _Lives:
    """Between which phases of a step each slot's value counts."""

    declaration: Declaration
    plan: FillPlan | None
    whole: bool
    kept: Collection[str]

    def lasting(self, name: str) -> str | None:
        """Why a slot's bytes must hold between steps, too."""
        return lasting(self.declaration.slots[name], name, self.kept)

    def of(self, name: str) -> tuple[Phase, Phase]:
        """The first and the last of them."""
        slot, phases = self.declaration.slots[name], phases_of(self.plan)
        if self.lasting(name) is not None:
            return phases[0], phases[-1]
        if isinstance(slot, Output):
            return "replay", "outputs"
        if slot.computes() is not None and self.declaration.side(name) == DEVICE:
            return ("replay" if self.whole else "fill"), "replay"
        by_kernel = self.plan is not None and name in self.plan.fused and not slot.rewritten
        return ("kernel" if by_kernel else "fill"), "replay"
