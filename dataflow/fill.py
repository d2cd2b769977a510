"""The hot loop: one plan's fill of one bucket, with everything sliced, grouped and expected beforehand."""

import bisect
import operator
from typing import Any, Final

import torch

from .admission import OtherSources, admit
from .caches import keep_newest
from .capabilities import DEVICE
from .copies import copy_all
from .gather import Gather, Sources, chosen
from .gradients import without_gradients
from .guard import below_modes, guard_over
from .hostdata import tensors_of
from .plan import FUSED
from .readable import NOT_TOLD, has_memory, unreadable
from .ready import Preparer, Ready
from .sources import Side

_POINTER: Final = torch.Tensor.data_ptr
_CONTIGUOUS: Final = torch.Tensor.is_contiguous
_FOREACH_ZERO: Final = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage] - no public name
KEPT: Final = 1024
"""Live sizes that one fill keeps ready, where it is not told otherwise; the oldest goes first."""


class Fill:
    """Runs one plan: checks what a batch can get wrong, resets dirty tails, copies, computes.

    A batch that is refused leaves every buffer as it was; BatchError and MissingSourceError say why.
    """

    def __init__(self, preparer: Preparer) -> None:
        plan, slots, buffers = preparer.plan, preparer.declaration.slots, preparer.buffers
        self.plan = plan
        self.buffers = buffers
        self.wanted = wanted = preparer.wanted
        self.copied = tuple(want.name for want in wanted)
        sources = [source for want in wanted if (source := want.slot.reads(want.name)) is not None]
        self._hosted = frozenset(self.copied) & {*plan.packed, *plan.moved}
        dtypes = zip(wanted, preparer.source_dtypes, strict=True)
        self._dtypes = {want.name: dtype for want, dtype in dtypes if dtype != want.dtype}
        self._packs = preparer.feeder is not None
        self._own = [None if self._packs and want.slot.placement == DEVICE else want.kind for want in self.wanted]
        self._in_place = frozenset(name for group in plan.copies if group.how == "in place" for name in group.slots)
        self._prepare = preparer
        self.gather = Gather(sources)
        here = [i for i, name in enumerate(self.copied) if name not in self._hosted]
        self._here = tuple(self.copied[i] for i in here)
        self._places = here
        self._chosen = chosen(here) if self._hosted else None
        self._read = [i for i, name in enumerate(self._here) if name not in self._in_place]
        self._resting = [(i, buffers[n].tensor.data_ptr()) for i, n in enumerate(self._here) if n in self._in_place]
        self._contiguous = [i for i in self._read if not slots[self._here[i]].takes_strided()]
        self._near = buffers.near
        self._facts = operator.attrgetter("dtype", preparer.where, "shape")
        self._distrusts = plan.lowering not in FUSED
        self._ready: dict[tuple[int, ...], Ready] = {}
        self._kept = KEPT

    def check(self, batch: Any, side: Side, live: tuple[int, ...]) -> tuple[Ready, Sources]:
        """The sources of a batch in the order of `copied`, all of them found to fit. Writes nothing.

        Raises OtherSources where the batch fits, but another plan.
        """
        ready = self._ready.get(live) or self.ready(live)
        sources = self.gather(batch, side)
        taken = self._taken(ready, sources)
        if taken is not None:
            return ready, taken
        tensors = tensors_of(sources, self._own)
        taken = None if tensors is None else self._taken(ready, tensors)
        if taken is not None:
            return ready, taken
        admitted = admit(self.wanted, sources, ready.facts, self.buffers, packs=self._packs)
        if (admitted.source_dtypes, admitted.in_place, admitted.hosted) != (self._dtypes, self._in_place, self._hosted):
            raise OtherSources(admitted)
        return ready, self.carry(ready, admitted.sources)

    def _taken(self, ready: Ready, sources: Sources) -> Sources | None:
        """What `write` takes, of sources that fit as they are; None where they do not."""
        if not below_modes(self._fits, sources if self._chosen is None else self._chosen(sources), ready):
            return None
        return sources if ready.cargo is None else ready.cargo.carry(sources)

    def carry(self, ready: Ready, sources: Sources) -> Sources:
        """What `write` takes, of sources that were admitted for this plan."""
        return sources if ready.cargo is None else ready.cargo.carry_tensors(sources)

    def write(self, ready: Ready, sources: Sources, batch: Any) -> None:
        """Fill from sources that were found to fit, all but what the device computes; without gradients."""
        without_gradients(self._write, ready, sources, batch)

    def ready(self, live: tuple[int, ...]) -> Ready:
        """What a live size needs, made on its first use. BatchError where it does not fit the bucket."""
        ready = self._ready.get(live)
        if ready is None:
            ready = keep_newest(self._ready, self._kept)[live] = self._prepare(live)
        return ready

    def keep(self, sizes: int) -> None:
        """Keep so many live sizes ready at most, from now on; KEPT where nothing is said."""
        self._kept = sizes
        keep_newest(self._ready, sizes + 1)

    def _fits(self, sources: Sources, ready: Ready) -> bool:
        """Whether every source is a tensor of the dtype, device and shape expected, and none lies in a buffer."""
        try:
            if (ready.guard is None or not ready.guard(*sources)) and not self._fits_anew(sources, ready):
                return False
            if self._resting:
                if any(sources[i].data_ptr() != address for i, address in self._resting):
                    return False
                sources = tuple([sources[i] for i in self._read])
            pointers = sorted(map(_POINTER, sources))
            if pointers and not pointers[0] and not all(map(has_memory, sources)):
                return False
        except NOT_TOLD:  # no tensor, or one without memory of its own
            return False
        for low, high in self._near:
            first = bisect.bisect_left(pointers, low)
            if first < len(pointers) and pointers[first] < high:
                return not any(self.buffers.holds(source) for source in sources)
        return True

    def _fits_anew(self, sources: Sources, ready: Ready) -> bool:
        """The same but for addresses, the long way; from then on one call tells whether sources are like these."""
        if [*map(self._facts, sources)] != [ready.facts[i] for i in self._places]:
            return False
        if not all(_CONTIGUOUS(sources[i]) for i in self._contiguous):
            return False
        if any(source.is_neg() or source.is_conj() or source.data_ptr() % source.itemsize for source in sources):
            return False
        if any(map(unreadable, sources)):
            return False
        for i, _ in self._resting:
            if sources[i].stride() != self.buffers[self._here[i]].tensor.stride():
                return False
        ready.guard = guard_over(sources)
        return True

    def _write(self, ready: Ready, sources: Sources, batch: Any) -> None:
        buffers = self.buffers
        try:
            if buffers.ledger.stamp is not ready or buffers.ledger.handed_out:
                self._reset(ready)
            for tail, number in ready.always:
                tail.fill_(number)
            if ready.cargo is None:
                copy_all(ready.groups, ready.singles, sources)
                for computation in ready.host:
                    computation.run(batch)
            else:
                copy_all(ready.groups, ready.singles, ready.cargo.load(sources, batch))
            for i, _ in self._resting:
                buffers[self._here[i]].distrust()  # its producer may have written any row
        except BaseException:
            buffers.distrust()
            raise

    def _reset(self, ready: Ready) -> None:
        """Reset tails that an earlier fill may have left dirty, and note how far this one dirties them."""
        buffers = self.buffers
        buffers.take_turn()
        if buffers.ledger.handed_out or (self._distrusts and buffers.unmarked):
            buffers.distrust()
        elif buffers.unmarked:  # a slot that is apart here may be a lane of another bucket's kernel
            for mark in ready.marks:
                mark.buffer.distrust()
        if ready.exact:
            for mark in ready.marks:
                mark.buffer.mark = tuple(map(max, mark.buffer.mark, mark.live))
            buffers.ledger.stamp = buffers.mine = ready
            return
        zeros, others = ready.reset_from_marks()
        if zeros:
            _FOREACH_ZERO(zeros)
        for tail, number in others:
            tail.fill_(number)
        buffers.ledger.stamp = buffers.mine = ready


def compute_on_device(ready: Ready, batch: Any = None) -> None:
    """Run what the device computes from slots: inside the graph, or right after an eager fill from `batch`."""
    if ready.device:
        with torch.no_grad():
            for computation in ready.device:
                computation.run(batch)
