"""The contestants of `slotgraph bench`: as engines hand-write a step, this library's lowerings, and a bare replay."""

import bisect
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import attrs
import numpy as np
import torch

from ...backends.base import Graph
from ...dataflow.bucket import Bucket
from ...dataflow.buffers import Buffers
from ...dataflow.capabilities import Lowering
from ...dataflow.plan import FUSED
from ...dataflow.planner import NONE
from ...dataflow.tails import Number, Pad, resolve_value
from ..capture import capture_step, warm_up
from ..decode import DecodeRunner
from .workload import COUNT, Batch, Workload, plus_one

_FOREACH_COPY: Final = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage] - torch has no public name for it
_FOREACH_ZERO: Final = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage] - likewise
PER_SLOT: Final = "per_slot"
REGROUPED: Final = "regrouped"
BY_HAND: Final = (PER_SLOT, REGROUPED)
FILL_ALONE: Final = "fill_alone"
BARE: Final = "bare"
ORACLE: Final = "slot_by_slot"
IN_GRAPH: Final = "in_graph"

Way = Callable[[Batch], Any]
"""Takes a batch; returns a view where it fills, and outputs where it runs a whole step."""


@attrs.frozen(kw_only=True, eq=False)
class Contestant:
    """One way to run steps.

    buffers: where its steps read. fill: fills, and returns the padded view. step: fill, view and replay; returns the
    live rows' outputs. runner: whose it is, where it is this library's.
    """

    name: str
    buffers: Buffers
    fill: Way | None = None
    step: Way | None = None
    runner: DecodeRunner[Any] | None = None


def contestants(workload: Workload) -> list[Contestant]:
    """All of them: two by hand, a runner for each lowering that the backend has, and what a part of one takes."""
    by_hand = ByHand(workload)
    lowerings = workload.backend.capabilities.lowerings
    runners: dict[Lowering, DecodeRunner[Any]] = {one: captured(workload, one) for one in lowerings}
    plain = next((runner for lowering, runner in runners.items() if lowering not in FUSED), None)
    parts = () if plain is None else (_fill_alone(workload, plain), _bare(workload, plain))
    return [
        by_hand.contestant(PER_SLOT, by_hand.per_slot),
        by_hand.contestant(REGROUPED, by_hand.regrouped),
        *(_of_runner(lowering, runner) for lowering, runner in runners.items()),
        *parts,
    ]


def captured(workload: Workload, lowering: Lowering) -> DecodeRunner[Any]:
    """A runner of the smallest step that fills by one lowering."""
    runner = DecodeRunner(
        workload.inputs,
        plus_one,
        buckets=workload.buckets,
        backend=workload.backend,
        lowering=lowering,
        progress=False,
    )
    runner.capture()
    return runner


def _of_runner(lowering: Lowering, runner: DecodeRunner[Any]) -> Contestant:
    """The public path: sizing, routing, checks, the fill, and a typed view or the replay."""
    fill = None if lowering == ORACLE else runner.fill  # the oracle is slow: whole steps are enough
    return Contestant(name=lowering, buffers=runner.graphs.buffers, fill=fill, step=runner, runner=runner)


def _fill_alone(workload: Workload, runner: DecodeRunner[Any]) -> Contestant:
    """The fill of one bucket alone: what is left when a runner's sizing, routing and view are taken off."""
    axes = len(runner.parts.stage.declaration.varying)
    buckets = {rows: bucket for rows, (bucket, _) in _parts_of(workload, runner).items()}

    def fill(batch: Batch) -> Any:
        return types.SimpleNamespace(**buckets[batch.padded].fill(batch, (batch.rows,) * axes).views)

    return Contestant(name=FILL_ALONE, buffers=runner.graphs.buffers, fill=fill)


def _bare(workload: Workload, runner: DecodeRunner[Any]) -> Contestant:
    """The replay alone, of a graph that holds the step and nothing of a fill."""
    replays = {rows: graph.replay for rows, (_, graph) in _parts_of(workload, runner).items()}

    def step(batch: Batch) -> None:
        replays[batch.padded]()

    return Contestant(name=BARE, buffers=runner.graphs.buffers, step=step)


def _parts_of(workload: Workload, runner: DecodeRunner[Any]) -> Mapping[int, tuple[Bucket, Graph]]:
    """What fills each bucket, and its graph."""
    found = {rows: runner.graphs.get(rows, NONE) for rows in workload.buckets}
    return {rows: (one.filling.bucket, one.graph) for rows, one in found.items() if one is not None}


@final
class ByHand:
    """What the hand-written ways share: buffers, a table of slots, the count, and a graph for each bucket.

    As engines do, they copy host data without waiting for the device, which has read pageable memory when the call
    returns.
    """

    def __init__(self, workload: Workload) -> None:
        self.buffers = workload.buffers()
        self._buckets = workload.buckets
        self._moves = not workload.backend.capabilities.foreach_host
        self._slots = [
            (name, self.buffers[name].tensor, _pad(self.buffers[name].slot.rule(), workload))
            for name, slot in workload.inputs.slotgraph.slots.items()
            if slot.reads(name) is not None
        ]
        self._count = self.buffers[COUNT].tensor
        self._graphs = {rows: self._captured(workload, rows) for rows in reversed(workload.buckets)}

    def contestant(self, name: str, copy: Callable[[Batch], int]) -> Contestant:
        """Fills and steps by one way to copy, which returns the bucket."""

        def fill(batch: Batch) -> Any:
            return self._view(copy(batch))

        def step(batch: Batch) -> torch.Tensor:
            graph = self._graphs[copy(batch)]
            graph.replay()
            outputs: torch.Tensor = graph.outputs[: batch.rows]
            return outputs

        return Contestant(name=name, buffers=self.buffers, fill=fill, step=step)

    def per_slot(self, batch: Batch) -> int:
        """One tail reset and one copy a slot."""
        live = batch.rows
        padded = self._buckets[bisect.bisect_left(self._buckets, live)]
        for name, buffer, pad in self._slots:
            if live < padded:
                buffer[live:padded].fill_(pad)
            source = getattr(batch, name)
            if type(source) is not torch.Tensor:
                source = _tensor(source, buffer.dtype)
            buffer[:live].copy_(source, non_blocking=True)
        self._count.fill_(live)
        return padded

    def regrouped(self, batch: Batch) -> int:
        """One foreach copy a pair of dtypes and one foreach zero, the groups built anew in each step."""
        live, zeros = batch.rows, []
        padded = self._buckets[bisect.bisect_left(self._buckets, live)]
        groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for name, buffer, pad in self._slots:
            source = getattr(batch, name)
            if type(source) is not torch.Tensor:
                source = _tensor(source, buffer.dtype)
            if self._moves:  # where no foreach may read host memory, one has to move it first
                source = source.to(buffer.device)
            targets, sources = groups.setdefault((buffer.dtype, source.dtype), ([], []))
            targets.append(buffer[:live])
            sources.append(source)
            if live < padded and pad == 0:
                zeros.append(buffer[live:padded])
            elif live < padded:
                buffer[live:padded].fill_(pad)
        if zeros:
            _FOREACH_ZERO(zeros)
        for targets, sources in groups.values():
            _FOREACH_COPY(targets, sources, non_blocking=True)
        self._count.fill_(live)
        return padded

    def _view(self, padded: int) -> Any:
        """What a step reads, sliced in each step."""
        view = types.SimpleNamespace(num_token_non_padded=self._count)
        for name, buffer, _ in self._slots:
            setattr(view, name, buffer[:padded])
        return view

    def _captured(self, workload: Workload, padded: int) -> Graph:
        backend, step = workload.backend, torch.no_grad()(functools.partial(plus_one, self._view(padded)))
        warm_up(backend, step)
        return capture_step(backend, step, pool=backend.pool())


def _tensor(source: Any, dtype: torch.dtype) -> torch.Tensor:
    """A host tensor of an array or a list."""
    return (
        torch.from_numpy(source) if isinstance(source, np.ndarray) else torch.tensor(source, dtype=dtype, device="cpu")
    )


def _pad(rule: object, workload: Workload) -> Number:
    return resolve_value(rule.value, workload.backend.capabilities, {}) if isinstance(rule, Pad) else 0
