"""The base of the prefill runners: a part of the step is captured by tokens, and the rest runs eagerly around it."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ...dataflow.axes import BATCH, TOKENS, Axis
from ...dataflow.buffers import Buffers
from ...dataflow.capabilities import chosen_lowering
from ...dataflow.errors import ConfigError, ReplayError
from ...dataflow.gradients import without_gradients
from ...dataflow.ready import Ready
from ..captured import Captured
from ..config import RunnerConfig
from ..filler import Filler
from ..graph_runner import GraphRunner
from ..graphs import GraphSet
from ..outputs import live_rows, map_tensors
from ..pool import Phase
from ..runner import Filled
from ..running import Running, under_way
from ..stage import NO_BINDINGS, Stage, V
from .capture import Boundary, Part, StackCapture, live_viewer


class Answer:
    """What the stack does in a replay: it takes the arguments, and replays its graphs."""

    def __init__(self, graphs: GraphSet[Any], captured: Captured, step: Running) -> None:
        self._graphs = graphs
        self._captured = captured
        self._step = step
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay, on these arguments; what the graphs returned."""
        self._calls += 1
        part: Part[Any] = self._captured.step  # type: ignore[assignment] # as StackCapture made it
        step, call = self._step, part.call
        step.now, step.shown = call.take(args, kwargs, step.view), call.view
        clock = self._graphs.clock
        before = clock.replays
        try:
            outputs = self._graphs.replay(self._captured, self._captured.rows)
        finally:
            step.shown = None
        if clock.replays != before + 1:
            message = (
                "a break of this step replayed a graph of the same memory pool, which may overwrite what this step's "
                "later graphs read: run that runner before or after this one's step, or eagerly within the break"
            )
            raise ReplayError(message)
        call.give_back(args, kwargs)
        return outputs

    def check(self, name: str) -> None:
        """ReplayError where the stack was not called once, as at capture."""
        if self._calls != 1:
            message = f"the step called the stack, {name}, {self._calls} times, and once at capture"
            raise ReplayError(message)


class StackRunner(GraphRunner[V]):
    """A runner whose graphs are those of a stack. Subclasses are final, and say what of a step is captured.

    A bucket is captured on the declaration's `placeholder`, one request that owns all its tokens, and its graphs hold
    for any number of requests. No fill is inside a graph, because what runs before it reads the slots, too.

    Attributes:
        output_rows: The axis that the rows of outputs follow; None where outputs are handed out whole.
    """

    def __init__(
        self,
        stage: Stage[V],
        boundary: Boundary,
        config: RunnerConfig,
        *,
        absent: Sequence[Collection[str]],
        carry: tuple[str, ...],
        output_rows: Axis | None,
        phase: Phase | None,
    ) -> None:
        """Check what is given; `capture` makes the graphs.

        Args:
            stage: The declaration, the backend and the step.
            boundary: What of the step is captured.
            config: The options.
            absent: Patterns of absent optional slots, beside none.
            carry: Slots that the batch has computed already where a step runs without a graph.
            output_rows: The axis that the rows of outputs follow.
            phase: Of a pool.

        """
        self._boundary = boundary
        self.output_rows = output_rows
        varying = stage.declaration.varying
        self._requests = varying.index(BATCH) if BATCH in varying else None
        super().__init__(
            config,
            stage,
            config.token_ladder(),
            lambda tokens: {TOKENS: tokens, BATCH: config.max_batch},
            said="max_batch= and buckets=",
            leading=(TOKENS,),
            relations={},
            path=boundary.path,
            absent=absent,
            carry=carry,
            bind=NO_BINDINGS,
            phase=phase,
        )
        _check_axis(output_rows, stage)

    @property
    def _lowering(self) -> str:
        lowering = chosen_lowering(self.stage.backend.capabilities, self.config.lowering)
        return "fused" if lowering == "in_graph" else lowering  # what runs before the graphs reads the slots, too

    def _graph_set(self, buffers: Buffers, filler: Filler[V]) -> GraphSet[V]:
        capturing = StackCapture(self.stage, self._boundary, buffers, self.output_rows)
        return GraphSet(
            self.stage,
            buffers,
            filler,
            rows_each=None,
            modes=self.config.modes,
            recipe=capturing,
            holder=capturing.holder,
            parameters=_handed(self.stage),
        )

    @property
    def _is_whole(self) -> bool:
        return False

    def _viewer(self, ready: Ready) -> Callable[[Any], V]:
        """Token slots padded to the bucket, request slots live."""
        return live_viewer(self.stage, self.graphs.buffers, ready)

    def _run_graph(self, filled: Filled[V], captured: Captured) -> Any:
        view: V = filled.view  # type: ignore[assignment] # its fills make one
        stack, stage = self._boundary.stack, self.stage
        step = Running(view, "replay")
        answer = Answer(self.graphs, captured, step)
        try:
            if stack is None:
                outputs = without_gradients(under_way, step, stage.run, view, answer)
            else:
                with stack.answered(answer):
                    outputs = without_gradients(under_way, step, stage.run, view)
                answer.check(stack.name)
        except BaseException:  # slots may be as the step has written them
            self.graphs.buffers.distrust()
            raise
        if self.graphs.filler.hosts.possible:
            self.graphs.filler.hosts.note()  # of what runs around the graphs, too
        return self._cut(outputs, captured.rows, filled)

    def _cut(self, outputs: Any, padded: int, filled: Filled[V]) -> Any:
        """The outputs' live rows."""
        if self.output_rows is None:
            return outputs
        if self.output_rows == BATCH:
            requests = 0 if self._requests is None else filled.live[self._requests]
            _check_rows(outputs, requests, "requests", "TOKENS, if its rows are tokens")
            return outputs
        _check_rows(outputs, padded, "tokens of the bucket", "BATCH, if its rows are requests")
        return live_rows(outputs, filled.rows)


def _check_axis(output_rows: Axis | None, stage: Stage[Any]) -> None:
    """ConfigError where outputs follow an axis that they cannot, or one that no slot has."""
    if output_rows is None or (output_rows in (TOKENS, BATCH) and output_rows in stage.declaration.axes):
        return
    if output_rows in (TOKENS, BATCH):
        message = f"output_rows is {output_rows}, which no slot of {stage.declaration.name} has: pass another, or None"
    else:
        message = f"output_rows is TOKENS, BATCH or None, got {output_rows!r}"
    raise ConfigError(message)


def _handed(stage: Stage[Any]) -> dict[str, str]:
    """Host parameters that graphs are handed. Those over requests are for breaks: no graph knows of requests."""
    slots = stage.declaration.slots
    return {argument: name for argument, name in stage.declaration.parameters.items() if BATCH not in slots[name].axes}


def _check_rows(outputs: Any, rows: int, what: str, otherwise: str) -> None:
    """Every tensor has so many rows: ReplayError."""
    if type(outputs) is torch.Tensor and outputs.dim() and outputs.shape[0] == rows:
        return

    def check(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            message = (
                f"the step returned a tensor of shape {list(tensor.shape)}, expected {rows} rows, the {what}: pass "
                f"output_rows={otherwise}, or None to get it whole"
            )
            raise ReplayError(message)
        return tensor

    map_tensors(outputs, check)
