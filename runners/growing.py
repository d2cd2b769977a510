"""Memory that grows on demand: one exact bucket, for batches of whatever size."""

from typing import Any

from ..dataflow import log
from ..dataflow.axes import Sizes
from ..dataflow.bucket import Bucket
from ..dataflow.buffers import Buffers
from ..dataflow.errors import BatchError
from ..dataflow.feed import Feeder
from ..dataflow.packet import most_for_copies
from .stage import Stage


class Growing:
    """The bucket of a runner whose buffers grow to the next power of two on each axis.

    runner: in events. buffers: another runner's, to be used as long as they are large enough. held: the bucket at its
    present capacity; None before the first batch.
    """

    def __init__(self, stage: Stage[Any], runner: str, buffers: Buffers | None) -> None:
        self._stage = stage
        self._runner = runner
        self.held = None if buffers is None else self._over(buffers)

    def bucket(self, live: tuple[int, ...]) -> Bucket:
        """One that takes these live sizes, by varying axis. BatchError where its memory is bound and cannot grow."""
        capacity = self._capacity
        axes = self._stage.declaration.varying
        short = {axis: rows for axis, rows in zip(axes, live, strict=True) if rows > capacity[axis]}
        if self.held is None or short:
            self.held = self._grown(capacity, {axis: _power_of_two(rows) for axis, rows in short.items()})
        return self.held

    @property
    def _capacity(self) -> Sizes:
        if self.held is not None:
            return self.held.buffers.capacity
        declaration = self._stage.declaration
        return dict.fromkeys((*declaration.axes, *declaration.following), 0) | dict(self._stage.sizes)

    def _grown(self, before: Sizes, more: Sizes) -> Bucket:
        stage, held = self._stage, self.held
        bound = [buffer.name for buffer in held.buffers if buffer.adopted] if held is not None else []
        if bound:
            most = ", ".join(f"{axis} {rows}" for axis, rows in before.items() if axis in more)
            message = f"slot {bound[0]!r} is bound to memory that cannot grow, and the batch has more rows than {most}"
            raise BatchError(message)
        capacity = {**before, **more}
        buffers = stage.allocate(capacity)
        sizes = {axis.name: size for axis, size in capacity.items()}
        name = stage.declaration.name
        log.debug("grown", runner=self._runner, declaration=name, nbytes=buffers.nbytes, sizes=sizes)
        return self._over(buffers)

    def _over(self, buffers: Buffers) -> Bucket:
        declaration, backend = self._stage.declaration, self._stage.backend
        capabilities, feeder = backend.capabilities, None
        if capabilities.packed_uploads:
            feeder = Feeder(backend.upload, most_for_copies(declaration, buffers.capacity, capabilities))
        return Bucket(declaration, buffers.capacity, capabilities, buffers, exact=True, feeder=feeder)


def _power_of_two(rows: int) -> int:
    return 1 << max(rows - 1, 0).bit_length()
