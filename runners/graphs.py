"""The graphs of one runner: what is captured of each bucket, and how it is replayed."""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic

import attrs
import torch

from ..dataflow.axes import Sizes
from ..dataflow.bucket import Absent
from ..dataflow.buffers import Buffers, at_rest, overlaps, span
from ..dataflow.errors import CaptureError, ReplayError
from ..dataflow.ready import Ready
from ..dataflow.slots import Output
from .capture import (
    CaptureReport,
    MemoryAccount,
    capture_step,
    driver_bytes,
    frozen_garbage,
    log_capture,
    progress_over,
    told_as_capture_error,
    warm_up,
    warn_of_many,
)
from .captured import FORKS, Captured, Filling, clock_of
from .config import ADDRESSES, GENERATIONS, RunnerConfig
from .coordination import Coordinator
from .filler import Filler
from .holdings import Holdings
from .outputs import Stamped, check_rows, map_tensors, nbytes_of
from .running import Running, under_way
from .stage import Stage, V
from .state import State, check_writes


@attrs.frozen
class Order:
    """What is to be captured: buckets and their sizes, patterns of absent slots, and how.

    warmups: runs before each capture, of which the look at the step's state may be the first.
    """

    buckets: Mapping[int, Sizes]
    patterns: Collection[Absent]
    warmups: int
    error_mode: str | None
    progress: bool
    lazy: bool
    runner: str
    coordinator: Coordinator

    @classmethod
    def of(
        cls,
        config: RunnerConfig,
        buckets: Mapping[int, Sizes],
        patterns: Collection[Absent],
        runner: str,
        coordinator: Coordinator,
    ) -> "Order":
        """What a configuration asks for: none where its graphs are off. Of several ranks one shows a bar."""
        wanted = buckets if config.graphs else {}
        shown = config.progress and coordinator.rank == 0
        return cls(wanted, patterns, config.warmups, config.error_mode, shown, config.lazy, runner, coordinator)

    def warmups_after_look(self) -> int:
        """Runs between the look and the capture.

        The look is a warm-up where nothing can be compiled: compiled functions run as they were written under it. Of
        several ranks all run a step equally often, whatever each has imported.
        """
        looked = self.coordinator.size == 1 and "torch._dynamo" not in sys.modules
        return max(0, self.warmups - 1) if looked else self.warmups


Key = tuple[int, Absent]
Look = Callable[[Callable[[], Any]], State]
"""Runs a whole step for the first time, and tells its state: what it changes beside its slots, which is put back."""
Recipe = Callable[[Filling, Absent, Look], tuple[Callable[[], Any], State]]
"""Makes the call that is captured of a bucket, and looks at its step's state before it runs the step otherwise."""


class GraphSet(Generic[V]):
    """The graphs of one runner over one set of buffers.

    rows_each: output rows for each row of the leading axis, or None where outputs are handed out whole.
    modes: of debugging: stamp outputs, and check addresses at each replay instead of the first only. recipe: makes what
    is captured of a bucket; the whole step, where it is not given. holder: what reaches the tensors that graphs read
    beside slots; the step, where no recipe is given. parameters: slots whose values each replay hands to its graph,
    by the operator's argument; all that are declared, where it is not given.
    """

    def __init__(
        self,
        stage: Stage[V],
        buffers: Buffers,
        filler: Filler[V],
        *,
        rows_each: int | None,
        modes: frozenset[str],
        recipe: "Recipe | None" = None,
        holder: Callable[..., Any] | None = None,
        parameters: Mapping[str, str] | None = None,
    ) -> None:
        self.stage = stage
        self.buffers = buffers
        self.filler = filler
        self.report: CaptureReport | None = None
        self._pool = stage.backend.pool()
        self.clock = clock_of(self._pool)
        self.rows_each = rows_each
        self._stamps, self._verifies = GENERATIONS in modes, ADDRESSES in modes
        self._holder = stage.step if recipe is None else holder
        self.holdings = Holdings(self._holder)
        self._recipe = self._whole_step if recipe is None else recipe
        self._parameters = stage.declaration.parameters if parameters is None else parameters
        self._captured: dict[Key, Captured] = {}
        self._order: Order | None = None
        self._forks = FORKS.count

    @property
    def captured(self) -> Mapping[Key, Captured]:
        """The graphs that there are, by bucket and pattern."""
        return self._captured.copy()

    def has(self, bucket: int | None, absent: Absent) -> bool:
        """Whether one bucket and pattern was captured, or will be when a batch comes for it."""
        return (bucket, absent) in self._captured or self._is_pending(bucket, absent)

    def get(self, bucket: int | None, absent: Absent) -> Captured | None:
        """The graph of one bucket and pattern, captured now if that was put off; None where there is none."""
        captured = self._captured.get((bucket, absent)) if bucket is not None else None
        if captured is None and bucket is not None and self._is_pending(bucket, absent):
            return self._capture_late(bucket, absent)
        return captured

    def capture(self, order: Order) -> CaptureReport:
        """Capture every bucket, the largest first, for every pattern. CaptureError at the end if some failed.

        A bucket that fails is left out and the others stay usable. A lazy order captures nothing yet.
        """
        if self.report is not None:
            raise CaptureError(
                "this runner is captured already: its addresses are sealed; make a new runner to capture again"
            )
        backend, runner = self.stage.backend, order.runner
        warn_of_many(len(order.buckets) * len(order.patterns), backend.capabilities.graphs_hint, runner)
        order.coordinator.meet(f"captures begin, of buckets {', '.join(map(str, order.buckets)) or 'none'}")
        self._order = order
        buckets = [] if order.lazy else sorted(order.buckets, reverse=True)
        report, failed = self._capture_buckets(order, buckets, late=False)
        self._forks = FORKS.count
        if failed:
            message = f"{len(failed)} of {len(order.buckets)} buckets were not captured and run eagerly: "
            raise CaptureError(message + "; ".join(report.reasons)) from failed[0]
        return report

    def _capture_buckets(
        self, order: Order, buckets: Sequence[int], *, late: bool
    ) -> tuple[CaptureReport, list[CaptureError]]:
        """Capture some buckets; the report, and the errors of those that failed. late: a batch has come for them."""
        start, before, known = time.perf_counter(), self.stage.backend.memory(), self.report
        errors = list[CaptureError]()
        reasons = {} if known is None else dict(known.failed)
        with frozen_garbage(), self._at_rest(always=late):
            for rows in progress_over(buckets, self.stage.backend, show=order.progress and not late):
                try:
                    self._capture_bucket(rows, order)
                except CaptureError as error:
                    errors.append(error)
                    reasons[rows] = str(error)
        if buckets and self._holder is not None and all(one.graph.is_recorded for one in self._captured.values()):
            self.holdings = self.holdings.joined(Holdings.of(self._holder))
        seconds, driver = time.perf_counter() - start, driver_bytes(before, self.stage.backend.memory())
        if known is not None:
            seconds, driver = seconds + known.seconds, driver + known.driver
        done = tuple(sorted({rows for rows, _ in self._captured}))
        self.report = report = CaptureReport(done, reasons, seconds, self.memory(), driver)
        log_capture(report, order.runner)
        return report, errors

    def _is_pending(self, bucket: int | None, absent: Absent) -> bool:
        order, report = self._order, self.report
        if order is None or report is None or not order.lazy or bucket in report.failed:
            return False
        return bucket in order.buckets and absent in order.patterns

    def _capture_late(self, rows: int, absent: Absent) -> Captured | None:
        """Capture a bucket whose first batch has come; None, and never again, where it fails."""
        if self._order is None:
            return None
        self._capture_buckets(self._order, [rows], late=True)
        self.filler.captured_late()
        return self._captured.get((rows, absent))

    def _at_rest(self, *, always: bool) -> contextlib.AbstractContextManager[None]:
        """Initial values in the buffers, as at first, where a fill or another runner of a pool may have been since."""
        self.filler.hosts.wait()
        self.filler.order()  # others may have been there on another stream
        wanted = always or any(buffer.pooled for buffer in self.buffers)
        return at_rest(self.buffers, self.stage.backend.capabilities) if wanted else contextlib.nullcontext()

    def _capture_bucket(self, rows: int, order: Order) -> None:
        """Capture one bucket for every pattern. CaptureError, with nothing of it kept, also of another rank."""
        gradients = torch.is_grad_enabled()
        try:
            for absent in sorted(order.patterns, key=sorted):
                self._captured[rows, absent] = self._capture(rows, absent, order)
            failed = order.coordinator.meet(f"captured bucket {rows}")
        except CaptureError as error:
            order.coordinator.meet(f"captured bucket {rows}", error)
            self._drop(rows)
            raise
        finally:
            torch.set_grad_enabled(gradients)  # an interrupt may come while a `no_grad` block ends
        if failed is not None:
            self._drop(rows)
            raise CaptureError(f"rank {failed[0]}: {failed[1]}")

    def _drop(self, rows: int) -> None:
        """Keep nothing of a bucket."""
        self._captured = {key: one for key, one in self._captured.items() if key[0] != rows}
        self.buffers.distrust()

    def _capture(self, rows: int, absent: Absent, order: Order) -> Captured:
        stage, filler = self.stage, self.filler
        filling = filler.make(order.buckets[rows], absent)
        filler.rest()
        as_warm_up = functools.partial(order.coordinator.warm_up, backend=stage.backend)
        step, state = self._recipe(filling, absent, lambda run: self._look(as_warm_up(run), absent))
        for _ in range(order.warmups_after_look()):
            with told_as_capture_error(), state.kept():
                warm_up(stage.backend, as_warm_up(step))
        views = self._whole(filling, absent).views  # of an optional slot that is absent, None
        named = ((argument, views[name]) for argument, name in self._parameters.items())
        parameters = {argument: view for argument, view in named if view is not None}
        with told_as_capture_error(), state.kept():
            graph = capture_step(
                stage.backend,
                step,
                pool=self._pool,
                error_mode=order.error_mode,
                parameters=parameters,
            )
        if self.rows_each is not None:
            check_rows(graph.outputs, rows * self.rows_each, f"padded row of bucket {rows}")
        if filler.lowering == "fused":
            filler.capture_alone(filling, warm=True)
        _ = self.buffers.addresses
        return Captured(rows, filling, graph, step)

    def _look(self, run: Callable[[], Any], absent: Absent) -> State:
        """Run the whole step once: its first warm-up. What it changes beside its slots, which is put back.

        Watched, too: which host slots its operators read, once for each pattern, and that it writes no slot which it
        may only read. CaptureError where it does, where the step raises, and where its state is too large to be kept.
        """
        stage, hosts, found = self.stage, self.filler.hosts, list[State]()
        seen = functools.partial(hosts.look, run, absent) if hosts.wants(absent) else run

        def once() -> None:
            if stage.state is None:
                slots = [span(buffer.tensor) for buffer in self.buffers if buffer.nbytes]
                found.append(State.found(stage.backend, slots, seen, exact=True, holder=stage.step))
            else:
                found.append(State.of(stage.backend, stage.state))
                with found[0].kept():
                    seen()

        warm_up(stage.backend, lambda: check_writes(once, self.buffers))
        return found[0]

    def _whole_step(self, filling: Filling, absent: Absent, look: Look) -> tuple[Callable[[], Any], State]:
        """The whole step without gradients: first the fused kernel, where it is the first node, and computed slots."""
        stage, filler, ready = self.stage, self.filler, self._whole(filling, absent)

        def step() -> Any:
            with torch.no_grad():
                filler.first_node(filling)
                ready.compute_on_device()
                view = stage.capture_view(ready)
                return under_way(Running(view), stage.run, view)

        return step, look(step)

    def view(self, captured: Captured, absent: Absent) -> V:
        """A bucket's slots at their padded size, for producers who write them."""
        self.buffers.ledger.handed_out = True
        return self.stage.view(self._whole(captured.filling, absent), None)

    def _whole(self, filling: Filling, absent: Absent) -> Ready:
        """What a bucket needs where every row is live."""
        bucket = filling.bucket
        return bucket.ready(tuple(bucket.sizes[axis] for axis in self.stage.declaration.varying), absent)

    def replay(self, captured: Captured, rows: int) -> Any:
        """Replay a filled bucket and return its outputs for `rows` live rows of the leading axis."""
        if not captured.verified or self._verifies:
            captured.graph.check_addresses()
            moved = ", ".join(map(repr, self.buffers.moved()))
            if moved:
                raise ReplayError(f"the buffers of {moved} moved since capture: a graph would read freed memory")
            captured.verified = True
        if self._forks != FORKS.count:
            raise ReplayError("this process was forked after capture: graphs belong to the process that captured them")
        self.clock.stream = self.filler.follow(self.clock.stream)  # of whichever runner: the graphs share memory
        try:
            captured.graph.replay()
        except BaseException:
            self.buffers.distrust()  # slots that the step would have put back
            raise
        self.clock.replays += 1
        if self.filler.hosts.possible:
            self.filler.hosts.note()
        outputs = self.outputs(captured, rows)
        return map_tensors(outputs, self._stamp) if self._stamps else outputs

    def order(self) -> None:
        """Let a whole step wait for what was handed to other streams, of these graphs and of others of their pool."""
        filler, turn, clock = self.filler, self.buffers.turn, self.clock
        last = turn.stream
        filler.order()
        clock.stream = turn.stream if clock.stream == last else filler.follow(clock.stream)

    def outputs(self, captured: Captured, rows: int) -> Any:
        """What the last replay of a graph left, for `rows` live rows of the leading axis."""
        return captured.live(None if self.rows_each is None else rows * self.rows_each)

    def memory(self) -> MemoryAccount:
        """Bytes of inputs, graphs and outputs."""
        graphs = [captured.graph for captured in self.captured.values()]
        return MemoryAccount(
            inputs=self.buffers.nbytes,
            graphs=sum(graph.nbytes for graph in graphs),
            outputs=nbytes_of([graph.outputs for graph in graphs], but=self.buffers.storages),
            uploads=self.filler.nbytes,
            shared=sum(buffer.nbytes for buffer in self.buffers if buffer.pooled),
        )

    def _stamp(self, tensor: torch.Tensor) -> torch.Tensor:
        """In an input it lasts to the next fill, in an output slot to the next step, else to a replay in the pool."""
        inside = next((b for b in self.buffers if b.nbytes and overlaps(tensor, [span(b.tensor)])), None)
        if inside is None or not tensor.numel():
            return Stamped.stamp(tensor, lambda: self.clock.replays)
        name, turn = inside.name, self.buffers.turn
        if isinstance(inside.slot, Output):
            return Stamped.stamp(tensor, lambda: self.clock.replays + turn.eager_runs + turn.overwritten(name))
        return Stamped.stamp(tensor, lambda: turn.fills + turn.overwritten(name))
