"""The fused fill of one bucket: pack, upload, and leave the rest to the kernel."""

import functools
from typing import Any

import attrs
import torch

from .capabilities import HOST
from .feed import Feed
from .fill import Fill
from .hostdata import tensors_of
from .kinds import Misfit
from .packer import Packer
from .ready import Ready
from .sources import Side


@attrs.frozen(eq=False)
class FusedFill:
    """One plan whose slots a kernel writes; what it does not take is filled as ever."""

    fill: Fill
    packer: Packer
    feed: Feed

    @functools.cached_property
    def _on_host(self) -> tuple[torch.dtype | None, ...]:
        """The dtypes of slots in host memory, None for all others; nothing where there is none."""
        found = tuple(want.dtype if want.slot.placement == HOST else None for want in self.fill.wanted)
        return found if any(dtype is not None for dtype in found) else ()

    def send(self, batch: Any, side: Side, live: tuple[int, ...]) -> Ready | Misfit:
        """Upload what the kernel needs for a batch, and fill what it leaves out.

        A misfit, and nothing is done, where the kernel cannot read a source: the next lowering takes the batch, or
        says what is wrong with it. Raises ComputeError as a fill does.
        """
        fill = self.fill
        ready = fill.ready(live)
        sources = fill.gather(batch, side)
        if self._on_host:  # lists for them are no reason to leave the kernel
            sources = tensors_of(sources, self._on_host) or sources
        packed = self.packer.pack(ready, sources)
        if isinstance(packed, Misfit):
            return packed
        words, data, kept = packed
        buffers = fill.buffers
        if not ready.plain:
            fill.write(ready, sources, batch)
        if ready.packed or data:
            words = b"".join((words, *self.values(ready, batch), data))
        buffers.ledger.stamp = buffers.mine = ready
        buffers.unmarked = True
        self.feed.arm(words, kept)
        return ready

    def values(self, ready: Ready, batch: Any) -> list[bytes]:
        """What the host computes. ComputeError where a slot cannot hold it."""
        return [value.bytes_of(batch) for value in ready.packed]
