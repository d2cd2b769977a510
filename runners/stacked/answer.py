"""The answer of a stack in a replay: it takes the arguments, and its graphs do the rest."""

from typing import Any

from ...dataflow.errors import ReplayError
from ..captured import Captured
from ..graphs import GraphSet
from ..running import Running
from .capture import Part


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
