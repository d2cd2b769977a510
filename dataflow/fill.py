"""The hot loop: one plan's fill of one bucket, with everything sliced, grouped and expected beforehand."""

import bisect
import operator
from typing import Any, Final

import torch

from .arena import ALIGNMENT
from .binding import merge, overlaps
from .caches import keep_newest
from .gather import Gather, Sources
from .ready import Preparer, Ready
from .refusal import Wanted, refuse
from .sources import Side

_POINTER: Final = torch.Tensor.data_ptr
_CONTIGUOUS: Final = torch.Tensor.is_contiguous
_FOREACH_COPY: Final = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - no public name
_FOREACH_ZERO: Final = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage] - likewise
_GRAD_IS_ON: Final = torch.is_grad_enabled
KEPT: Final = 1024
"""Live sizes that one fill keeps ready; the oldest goes first."""


class Fill:
    """Runs one plan: checks what a batch can get wrong, resets dirty tails, copies, computes.

    A batch that is refused leaves every buffer as it was; BatchError and MissingSourceError say why.
    """

    def __init__(self, preparer: Preparer) -> None:
        plan, slots = preparer.plan, preparer.declaration.slots
        names = [name for group in plan.copies for name in group.slots]
        sources = [source for name in names if (source := slots[name].reads(name)) is not None]
        spans, reach = preparer.buffers.spans, preparer.buffers.reach_before
        self.plan = plan
        self.copied = tuple(names)
        self._wanted = [Wanted(name, slots[name], group.dst_dtype) for group in plan.copies for name in group.slots]
        self._spans = spans
        self._prepare = preparer
        self._buffers = preparer.buffers
        self._gather = Gather(sources)
        self._contiguous = [i for i, name in enumerate(names) if not slots[name].takes_strided()]
        self._all_contiguous = len(self._contiguous) == len(names)
        self._near = merge(((low - reach, high) for low, high in spans), ALIGNMENT)
        self._facts = operator.attrgetter("dtype", preparer.where, "shape")
        self._ready: dict[tuple[int, ...], Ready] = {}

    def check(self, batch: Any, side: Side, live: tuple[int, ...]) -> tuple[Ready, Sources]:
        """The sources of a batch in the order of `copied`, all of them found to fit. Writes nothing."""
        ready = self._ready.get(live) or self.ready(live)
        sources = self._gather(batch, side)
        if not self._fits(sources, ready):
            refuse(self._wanted, sources, ready, self._spans)
        return ready, sources

    def write(self, ready: Ready, sources: Sources, batch: Any) -> None:
        """Fill from sources that were found to fit, all but what the device computes; without gradients."""
        if _GRAD_IS_ON():
            with torch.no_grad():
                self._write(ready, sources, batch)
        else:
            self._write(ready, sources, batch)

    def ready(self, live: tuple[int, ...]) -> Ready:
        """What a live size needs, made on its first use. BatchError where it does not fit the bucket."""
        ready = self._ready.get(live)
        if ready is None:
            ready = keep_newest(self._ready, KEPT)[live] = self._prepare(live)
        return ready

    def _fits(self, sources: Sources, ready: Ready) -> bool:
        """Whether every source is a tensor of the dtype, device and shape expected, and none lies in a buffer."""
        try:
            if [*map(self._facts, sources)] != ready.facts:
                return False
            whole = sources if self._all_contiguous else [sources[i] for i in self._contiguous]
            if not all(map(_CONTIGUOUS, whole)):
                return False
            pointers = sorted(map(_POINTER, sources))
        except (AttributeError, TypeError, RuntimeError):  # no tensor, or one without memory of its own
            return False
        for low, high in self._near:
            first = bisect.bisect_left(pointers, low)
            if first < len(pointers) and pointers[first] < high:
                return not any(overlaps(source, self._spans) for source in sources)
        return True

    def _write(self, ready: Ready, sources: Sources, batch: Any) -> None:
        buffers = self._buffers
        try:
            if buffers.stamp is not ready:
                self._reset(ready)
            for tail, number in ready.always:
                tail.fill_(number)
            for views, start, stop in ready.groups:
                _FOREACH_COPY(views, sources[start:stop])
            for view, index in ready.singles:
                view.copy_(sources[index])
            for computation in ready.host:
                computation.run(batch)
        except BaseException:
            buffers.distrust()
            raise

    def _reset(self, ready: Ready) -> None:
        """Reset tails that an earlier fill may have left dirty, and note how far this one dirties them."""
        if ready.exact:
            for buffer, reach, _ in ready.marks:
                buffer.mark = tuple(map(max, buffer.mark, reach))
            self._buffers.stamp = ready
            return
        zeros, others = ready.reset_from(tuple([buffer.mark for buffer, _, _ in ready.marks]))
        if zeros:
            _FOREACH_ZERO(zeros)
        for tail, number in others:
            tail.fill_(number)
        for buffer, reach, _ in ready.marks:
            buffer.mark = reach
        self._buffers.stamp = ready


def compute_on_device(ready: Ready, batch: Any = None) -> None:
    """Run what the device computes from slots: inside the graph, or right after an eager fill from `batch`."""
    with torch.no_grad():
        for computation in ready.device:
            computation.run(batch)
