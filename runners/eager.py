"""The eager runner: the same declaration, never padded, buffers that grow on demand."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Unpack, final

import torch

from ..backends.base import Backend
from ..dataflow.admission import Wanted, check_carried
from ..dataflow.axes import BATCH, TOKENS, Axis, Dim, Sizes, extent
from ..dataflow.buffers import Buffers
from ..dataflow.caches import keep_newest
from ..dataflow.capabilities import DEVICE
from ..dataflow.declaration import Declaration
from ..dataflow.errors import BatchError, ReplayError
from ..dataflow.gradients import without_gradients
from ..dataflow.handover import hand_over
from ..dataflow.limits import Limits
from ..dataflow.readable import unreadable
from ..dataflow.roles import resolve_dtype
from ..dataflow.sizing import Sizer
from ..dataflow.slots import Slot
from ..dataflow.sources import Side, look_up
from .arguments import checked
from .coordination import Coordinator
from .decision import Decision, Tally
from .gate import Gate
from .growing import Growing
from .hostreads import HostReads
from .options import EagerOptions, config_of
from .parts import Eager, Parts
from .ranks.agreement import coordinator_of
from .ranks.group import Ranks
from .runner import Runner
from .running import Running, under_way
from .stage import NO_LOANS, NO_SIZES, Lend, Stage, V
from .watching import Watch

NO_COPY_VARIABLE: Final = "SLOTGRAPH_EAGER_NO_COPY"
KEPT: Final = 64
"""Other widths that a runner remembers how to size."""
_ALWAYS: Final = Decision("eager", None, "always_eager", "an eager runner captures nothing")


@final
class EagerRunner(Runner[V], Eager[V]):
    """Runs a step on unpadded views of a declaration.

    Buffers grow to the next power of two on each axis when a batch asks for more. With `no_copy` nothing is copied:
    the step sees the batch's own tensors, checked as ever. carry: slots that the batch has already computed right.
    buffers: another runner's, to be used as long as they are large enough. lend: by slot, a call that gets its view
    before the step's code runs, and None after it. ranks: that run each step together, which tell each other sizes.
    """

    def __init__(
        self,
        inputs: type[V],
        step: Callable[[V], Any],
        *,
        sizes: Sizes = NO_SIZES,
        settings: object = None,
        carry: tuple[str, ...] = (),
        relations: Mapping[Axis, Dim] | None = None,
        buffers: Buffers | None = None,
        lend: Mapping[str, Lend] = NO_LOANS,
        ranks: Ranks | None = None,
        backend: str | Backend = "auto",
        **options: Unpack[EagerOptions],
    ) -> None:
        self.config = config = config_of(type(self), backend, options)
        self.stage = Stage.of(inputs, step, backend, sizes, settings, relations, carry=carry, lend=lend, ranks=ranks)
        self.no_copy = os.environ.get(NO_COPY_VARIABLE) == "1" if config.no_copy is None else config.no_copy
        capabilities, slots = self.stage.backend.capabilities, inputs.slotgraph.slots
        self._carried = [
            Wanted(name, slots[name], resolve_dtype(slots[name].dtype, capabilities), self._home(slots[name]))
            for name in carry
        ]
        self._size = Sizer(self.stage.declaration, self.stage.relations, self.stage.sizes)
        self._other_sizes: dict[int, Sizer] = {}
        self._limits = Limits.of(self.stage.declaration, self.stage.sizes)
        self._rows_of = _leading(self.stage.declaration)
        self._reads: HostReads | None = None
        if buffers is not None:
            checked("buffers", "the buffers of another runner", buffers, Buffers)
        self._memory = Growing(self.stage, type(self).__name__, buffers)
        alone = buffers is not None  # beside another runner, which agrees with other ranks before it comes here
        declaration, name = self.stage.declaration, type(self).__name__
        self.coordinator = Coordinator() if alone else coordinator_of(declaration, name, config, {})
        self._tally = Tally()
        self._watch = Watch()
        self._gate = Gate(type(self).__name__)
        self._filled: V | None = None

    @classmethod
    def beside(cls, stage: Stage[V], buffers: Buffers, carry: tuple[str, ...]) -> "EagerRunner[V]":
        """What runs the batches that no graph takes, in a runner's own buffers as long as they are large enough."""
        return cls(
            stage.inputs,
            stage.step,
            sizes=stage.sizes,
            settings=stage.declaration.settings,
            ranks=stage.declaration.ranks,
            carry=carry,
            relations=stage.relations,
            buffers=buffers,
            lend=stage.lend,
            backend=stage.backend,
            no_copy=False,
        )

    @property
    def parts(self) -> Parts[V]:
        """What it is made of, for tools that look at runners."""
        books = self.coordinator, self._size, self._tally, self._watch
        return Parts(type(self).__name__, self.config, self.stage, {}, (), None, self, *books)

    @property
    def watch(self) -> Watch:
        """Who is told of each step."""
        return self._watch

    def _step(self, batch: Any, side: Side) -> Any:
        with self._gate.open():
            return self._run(self._fill(batch, side, self._size, self.stage.relations))

    def _fill_view(self, batch: Any, side: Side) -> V:
        with self._gate.open():
            view = self._filled = self._fill(batch, side, self._size, self.stage.relations)
        return view

    def _replay_view(self, view: V) -> Any:
        return self.run(view)

    def fill_width(self, width: int, batch: Any, side: Side) -> V:
        """Fill from a batch with `width` tokens a request, whatever relation of TOKENS the runner was given."""
        size, relations = self._sized(width)
        with self._gate.open():
            view = self._filled = self._fill(batch, side, size, relations)
        return view

    def admit_width(self, width: int, batch: Any, side: Side) -> None:
        """Raise as such a fill would."""
        size, _ = self._sized(width)
        self.admit(batch, size(batch, side), self.stage.absent(batch, side), side)

    def _sized(self, width: int) -> tuple[Sizer, Mapping[Axis, Dim]]:
        """What tells the sizes of batches with so many tokens a request."""
        relations = {**self.stage.relations, TOKENS: BATCH * width}
        size = self._other_sizes.get(width)
        if size is None:
            size = Sizer(self.stage.declaration, relations, self.stage.sizes)
            keep_newest(self._other_sizes, KEPT)[width] = size
        return size, relations

    def _fill(self, batch: Any, side: Side, size: Sizer, relations: Mapping[Axis, Dim]) -> V:
        before = self._memory.held
        filled, self._filled = self._filled, None
        start = time.perf_counter_ns() if next(self._tally.turns) else 0
        self.coordinator.begin()
        try:
            live = size(batch, side)
            self.coordinator.settle(_ALWAYS, live, lambda: self._admit_within_limits(batch, live, side))
            view = self._fill_sized(batch, side, live, relations)
        except BaseException as error:
            self.coordinator.refuse(error)
            self._memory.held = before  # what grew for this batch goes again
            if isinstance(error, BatchError):
                self._filled = filled  # nothing was written: the view filled last still stands
                size.explain(error, batch, side)
            raise
        if start:
            self._tally.timed(self._tally.reasons[_ALWAYS.why], start)
        return view

    def _admit_within_limits(self, batch: Any, live: tuple[int, ...], side: Side) -> None:
        if self._limits is not None:
            self._limits.check(batch, side)
        self.admit(batch, live, self.stage.absent(batch, side), side)

    def _fill_sized(self, batch: Any, side: Side, live: tuple[int, ...], relations: Mapping[Axis, Dim]) -> V:
        if self._limits is not None:
            self._limits.check(batch, side)
        self._check_carried(batch, live)
        bucket = self._memory.bucket(live)
        absent = self.stage.absent(batch, side)
        hosts = self._hosts()
        if hosts.possible:
            hosts.wait()
        ready = hand_over(bucket, batch, live, absent, side) if self.no_copy else bucket.fill(batch, live, absent, side)
        ready.compute_on_device(batch)
        return self.stage.view(ready, batch, relations)

    def admit(self, batch: Any, live: tuple[int, ...], absent: frozenset[str], side: Side) -> None:
        """Raise as a fill of the batch would, but for its sizes; memory grows as for a fill."""
        self._check_carried(batch, live)
        self._memory.bucket(live).admit(batch, live, absent, side)

    def run(self, view: V) -> Any:
        """Run the step on the view that was filled last: `replay`, but for watchers, who are not told.

        ReplayError where another fill has overwritten the view, or another thread is in the middle of a step.
        """
        with self._gate.open():
            if self._filled is not view:
                message = "this view was not filled last: a later fill has overwritten its slots"
                raise ReplayError(message)
            return self._run(view)

    def _run(self, view: V) -> Any:
        """Run the step on a view, without gradients."""
        outputs = self.coordinator.run(without_gradients, self._run_under_way, view)
        self._tally.fell_back(_ALWAYS, self._rows_in(view))
        return outputs

    def _run_under_way(self, view: V) -> Any:
        with under_way(Running(view)):
            return self._watched_run(view)

    def _hosts(self) -> HostReads:
        """What steps read of slots in host memory, of the present buffers."""
        if self._reads is None or self._reads.buffers is not self.buffers:
            self._reads = HostReads(self.stage.backend, self.buffers)
        return self._reads

    def _watched_run(self, view: V) -> Any:
        """Run the step; the first time without some slots, see whether its operators read others in host memory."""
        hosts = self._hosts()
        if not hosts.possible:
            return self.stage.run(view)
        values = view.__dict__
        absent = frozenset(name for name, _ in self.stage.declaration.optional if values[name] is None)
        look = hosts.wants(absent)
        outputs = hosts.look(lambda: self.stage.run(view), absent) if look else self.stage.run(view)
        hosts.note()
        return outputs

    def decide(self, batch: Any, **side: Any) -> Decision:
        """Always eager. BatchError for a side argument that no slot reads."""
        del batch
        self.stage.declaration.check_side(side)
        return _ALWAYS

    @property
    def buffers(self) -> Buffers | None:
        """The buffers at their present capacity; none before the first batch."""
        bucket = self._memory.held  # read once: another thread may ask
        return bucket.buffers if bucket else None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers at their present capacity."""
        buffers = self.buffers
        return buffers.nbytes if buffers else 0

    def _rows_in(self, view: V) -> int:
        """Live rows of a view; none are known of one that no fill made."""
        info = view._slotgraph_view  # noqa: SLF001 - what a fill leaves there for runners
        return 0 if info is None or self._rows_of is None else info.step.live(self._rows_of)

    def _check_carried(self, batch: Any, live: tuple[int, ...]) -> None:
        """Hold the slots that the batch has computed to their declaration, like any source."""
        sizes = {**self.stage.sizes, **dict(zip(self.stage.declaration.varying, live, strict=True))}
        for want in self._carried:
            sized = extent(want.slot.shape, sizes) if want.slot.axes <= sizes.keys() else None
            source = look_up(batch, want.name)
            known = sized is not None or not isinstance(source, torch.Tensor) or unreadable(source)
            shape = sized or () if known else tuple(source.shape)  # of an axis that no copied slot tells, any size
            check_carried(want, source, (want.dtype, self._home(want.slot), shape))

    def _home(self, slot: Slot) -> torch.device:
        return self.stage.backend.device if slot.placement == DEVICE else torch.device("cpu")


def _leading(declaration: Declaration) -> Axis | None:
    """The axis that rows are counted on: requests where there are any, else tokens, else what varies."""
    varying = declaration.varying
    return next((axis for axis in (BATCH, TOKENS, *varying) if axis in varying), None)
