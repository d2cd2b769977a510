"""The engine: runs all requests, and says between steps what is new."""

from paging.request import Request
from paging.runner import ModelRunner
from paging.scheduler import Scheduler
from slotgraph.extend import LaunchedStep

AHEAD = 1


class LLMEngine:
    """Serves requests. While the host works on the tokens of a step, the device runs the next one.

    Attributes:
        done: Decode steps whose tokens were read.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self.runner, self.scheduler = runner, scheduler
        self.done = 0

    def run(self) -> None:
        """Run until no request waits or decodes."""
        while self.scheduler.waiting:
            requests = self.prefilled()
            if requests:
                for step in self.runner.steps(requests, AHEAD):
                    self.decide(step)

    def decide(self, step: LaunchedStep) -> None:
        """Read a step's tokens, and say what is new in the next step that is launched."""
        self.done += 1
        step.leave(self.scheduler.take(step.tokens()))
        grown, preempted = self.scheduler.grow(step.needs("page_table"))
        step.leave(preempted)
        step.append(grown, page_table=[*grown.values()])
        joining = [] if preempted else self.prefilled()
        if joining:
            self.runner.join(step, joining)

    def prefilled(self) -> list[Request]:
        """Run the prompts of requests that can be admitted; return those that go on after their first token."""
        admitted = self.scheduler.admit()
        if not admitted:
            return []
        first = self.runner.prefill(admitted)
        ended = self.scheduler.take(zip(admitted, first, strict=True))
        return [request for request in admitted if request not in ended]
