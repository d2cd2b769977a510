"""The engine: runs all requests, and says between steps what is new."""

import torch

from paging.request import Request
from paging.runner import ModelRunner
from paging.scheduler import Scheduler
from slotgraph.extend import LaunchedStep


class LLMEngine:
    """Serves requests. While the host works on the tokens of a step, the device runs the next one.

    Attributes:
        done: Decode steps whose tokens were read.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self.runner, self.scheduler = runner, scheduler
        self.done = 0
        self._launch = -1  # the launch for which the scheduler has decided last
        self._first = dict[int, tuple[list[Request], torch.Tensor]]()  # by step, who begins there, after which token

    def run(self) -> None:
        """Run until no request waits or decodes."""
        while self.scheduler.waiting:
            self._launch = -1
            self._first.clear()
            requests = self.scheduler.admit()
            for step in self.runner.steps(requests, self.prefilled(requests, 0)):
                self.decide(step)

    def decide(self, step: LaunchedStep) -> None:
        """Read a step's tokens, and say, once for each launch, what is new in the next one."""
        self.done += 1
        tokens = step.tokens()  # waits for the step, and so for the prompts of requests that begin in it
        if step.number in self._first:
            requests, first = self._first.pop(step.number)
            known = dict(zip(requests, first.tolist(), strict=True))
            step.leave(self.scheduler.take([(one, known[one]) for one, _ in tokens if one in known]))
            tokens = step.tokens()  # without those that end by their first token, or were preempted before the step
        step.leave(self.scheduler.take(tokens))
        if step.launch == self._launch:
            return
        self._launch = step.launch
        grown, preempted = self.scheduler.grow(step.needs("page_table"))
        step.leave(preempted)
        step.append(grown, page_table=[*grown.values()])
        joining = [] if preempted else self.scheduler.admit()
        if joining:
            self.runner.join(step, joining, self.prefilled(joining, step.lands))

    def prefilled(self, requests: list[Request], step: int) -> torch.Tensor:
        """Run the prompts of requests that begin in a step. Return the tokens after them, without waiting.

        The host reads these tokens together with those of the step.
        """
        first = self.runner.prefill(requests)
        self._first[step] = requests, first.to("cpu", non_blocking=True, copy=True)
        return first
