"""Captured buckets: each with its fill, its graph and its outputs."""

import os
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Generic

import attrs
import torch

from ..backends.base import Graph
from ..dataflow.axes import Sizes
from ..dataflow.binding import overlaps, span
from ..dataflow.bucket import Bucket
from ..dataflow.buffers import Buffers
from ..dataflow.errors import CaptureError, ReplayError
from ..dataflow.fill import compute_on_device
from ..dataflow.ready import Ready
from ..dataflow.slots import Output
from .capture import CaptureReport, MemoryAccount, capture_step, frozen_garbage, log_capture, progress_over
from .outputs import Stamped, check_rows, live_rows, map_tensors, nbytes_of
from .stage import Stage, V

Absent = frozenset[str]
Key = tuple[int, Absent]


@attrs.define(eq=False)
class Captured:
    """One bucket for one pattern of absent slots; `verified` once its addresses were found unmoved."""

    rows: int
    bucket: Bucket
    graph: Graph
    verified: bool = False


@attrs.define(eq=False)
class _Clock:
    """Replays so far in one pool of graph memory: each may overwrite what another graph of the pool handed out."""

    replays: int = 0


_CLOCKS: Final["weakref.WeakKeyDictionary[object, _Clock]"] = weakref.WeakKeyDictionary()


def _clock_of(pool: object | None) -> _Clock:
    """The clock of all runners whose graphs share a pool; one of its own where there is none."""
    return _Clock() if pool is None else _CLOCKS.setdefault(pool, _Clock())


class GraphSet(Generic[V]):
    """The graphs of one runner over one set of buffers.

    rows_each: output rows for each row of the leading axis, or None where outputs are handed out whole.
    debug: stamp outputs, and check addresses at each replay instead of the first only. fills, eager_runs:
    how often the buffers were filled, and how often a step ran on them without a graph.
    """

    def __init__(self, stage: Stage[V], buffers: Buffers, *, rows_each: int | None, debug: bool) -> None:
        self.stage = stage
        self.buffers = buffers
        self.report: CaptureReport | None = None
        self.fills = self.eager_runs = 0
        self._pool = stage.backend.pool()
        self._clock = _clock_of(self._pool)
        self._inputs = [span(b.tensor) for b in buffers if b.nbytes and not isinstance(b.slot, Output)]
        self._outputs = [span(b.tensor) for b in buffers if b.nbytes and isinstance(b.slot, Output)]
        self._rows_each = rows_each
        self._debug = debug
        self._captured: dict[Key, Captured] = {}
        self._process = os.getpid()

    def get(self, bucket: int | None, absent: Absent) -> Captured | None:
        """The graph of one bucket and pattern, if it was captured."""
        return self._captured.get((bucket, absent)) if bucket is not None else None

    def capture(
        self, buckets: Mapping[int, Sizes], patterns: Collection[Absent], *, warmups: int, progress: bool, name: str
    ) -> CaptureReport:
        """Capture every bucket, the largest first, for every pattern. CaptureError at the end if some failed.

        A bucket that fails is left out and the others stay usable.
        """
        if self.report is not None:
            message = "this runner is captured already: its addresses are sealed; make a new runner to capture again"
            raise CaptureError(message)
        start, failed = time.perf_counter(), {}
        with frozen_garbage():
            for rows in progress_over(sorted(buckets, reverse=True), self.stage.backend, show=progress):
                try:
                    for absent in sorted(patterns, key=sorted):
                        self._captured[rows, absent] = self._capture(rows, buckets[rows], absent, warmups)
                except CaptureError as error:
                    failed[rows] = error
                    self._captured = {key: one for key, one in self._captured.items() if key[0] != rows}
                    self.buffers.distrust()
        self._process = os.getpid()
        done = tuple(sorted({rows for rows, _ in self._captured}))
        reasons = {rows: str(error) for rows, error in failed.items()}
        self.report = CaptureReport(done, reasons, time.perf_counter() - start, self.memory())
        log_capture(self.report, name)
        if failed:
            message = f"{len(failed)} of {len(buckets)} buckets were not captured and run eagerly: "
            raise CaptureError(message + "; ".join(self.report.reasons)) from next(iter(failed.values()))
        return self.report

    def _capture(self, rows: int, sizes: Sizes, absent: Absent, warmups: int) -> Captured:
        stage = self.stage
        bucket = Bucket(stage.declaration, sizes, stage.backend.capabilities, self.buffers)
        ready = bucket.fill_for(absent).ready(tuple(sizes[axis] for axis in stage.declaration.varying))
        graph = capture_step(stage.backend, _Step(stage, ready), self.buffers, warmups=warmups, pool=self._pool)
        if self._rows_each is not None:
            check_rows(graph.outputs, rows * self._rows_each, f"bucket {rows}")
        _ = self.buffers.addresses
        return Captured(rows, bucket, graph)

    def replay(self, captured: Captured, rows: int) -> Any:
        """Replay a filled bucket and return its outputs for `rows` live rows of the leading axis."""
        if not captured.verified or self._debug:
            self._verify(captured.graph)
            captured.verified = True
        if os.getpid() != self._process:
            message = "this process was forked after capture: graphs belong to the process that captured them"
            raise ReplayError(message)
        captured.graph.replay()
        self._clock.replays += 1
        outputs = captured.graph.outputs
        if self._rows_each is not None:
            outputs = live_rows(outputs, rows * self._rows_each)
        return map_tensors(outputs, self._stamp) if self._debug else outputs

    def memory(self) -> MemoryAccount:
        """Bytes of inputs, graphs and outputs."""
        graphs = [captured.graph for captured in self._captured.values()]
        return MemoryAccount(
            inputs=self.buffers.nbytes,
            graphs=sum(graph.nbytes for graph in graphs),
            outputs=nbytes_of([graph.outputs for graph in graphs]),
        )

    def _stamp(self, tensor: torch.Tensor) -> torch.Tensor:
        """In an input it lasts to the next fill, in an output slot to the next step, else to a replay in the pool."""
        if tensor.numel() and overlaps(tensor, self._inputs):
            return Stamped.stamp(tensor, lambda: self.fills)
        if tensor.numel() and overlaps(tensor, self._outputs):
            return Stamped.stamp(tensor, lambda: self._clock.replays + self.eager_runs)
        return Stamped.stamp(tensor, lambda: self._clock.replays)

    def _verify(self, graph: Graph) -> None:
        graph.check_addresses()
        moved = self.buffers.moved()
        if moved:
            names = ", ".join(map(repr, moved))
            message = f"the buffers of {names} moved since capture: a graph would read freed memory"
            raise ReplayError(message)


class _Step(Generic[V]):
    """What is captured: the device's computed slots, then the step on the bucket's view, without gradients."""

    def __init__(self, stage: Stage[V], ready: Ready) -> None:
        self._stage = stage
        self._ready = ready

    def __call__(self) -> Any:
        with torch.no_grad():
            compute_on_device(self._ready)
            return self._stage.step(self._stage.capture_view(self._ready))


def patterns_of(declared: Sequence[Collection[str]]) -> set[Absent]:
    """Patterns of absent slots to capture: none absent, and those declared."""
    return {frozenset(), *map(frozenset, declared)}
