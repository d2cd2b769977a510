"""The fused fill of one bucket: pack, upload, and leave the rest to the kernel."""

from typing import Any

import attrs

from .feed import Feed
from .fill import Fill
from .guard import below_modes
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

    def send(self, batch: Any, side: Side, live: tuple[int, ...]) -> Ready | Misfit:
        """Upload what the kernel needs for a batch, and fill what it leaves out.

        A misfit, and nothing is done, where the kernel cannot read a source: the next lowering takes the batch, or
        says what is wrong with it. Raises ComputeError as a fill does.
        """
        fill = self.fill
        ready = fill.ready(live)
        sources = fill.gather(batch, side)
        packed = below_modes(self.packer.pack, ready, sources)
        if isinstance(packed, Misfit):
            return packed
        words, data, sources = packed
        buffers = fill.buffers
        if not ready.plain:
            fill.write(ready, sources, batch)
        if ready.packed or data:
            words = b"".join((words, *self.values(ready, batch), data))
        buffers.ledger.stamp = buffers.mine = ready
        buffers.unmarked = True
        self.feed.arm(words, ready.manifests[0].kept(sources))
        return ready

    def values(self, ready: Ready, batch: Any) -> list[bytes]:
        """What the host computes. ComputeError where a slot cannot hold it."""
        return [value.bytes_of(batch) for value in ready.packed]
