"""The engine whose cycles are one launch each, ahead of what the host reads."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from slotgraph import BATCH, DecodeRunner
from slotgraph.extend import LaunchedStep
from speculating.batches import cycle_batch
from speculating.cycle import CycleStep, TextDrafts, TreeDrafts
from speculating.drafts import DraftPrompts, LookupDrafts, Timed
from speculating.engine import BLOCK, Engine
from speculating.inputs import DEPTH, LENGTH, CycleInputs
from speculating.request import SpeculativeRequest


class LaunchEngine(Engine):
    """Drafts, verifies and extends in one launch, or several such cycles in one, from what the launch before left.

    The host says which requests join and leave, and gives each of them rows of the caches for the most that it can win
    in cycles that the host has not read. cycle: what a cycle reads; None for that of the drafts, of which a subclass
    may override slots.
    """

    def __init__(self, *args: Any, cycle: type[CycleInputs] | None = None) -> None:
        super().__init__(*args)
        self._ahead, self._chunk = self.options.ahead, self.options.chunk
        self._drafts: TextDrafts | TreeDrafts = TextDrafts(LookupDrafts(self.backend.device))
        if self.draft is not None:
            prompts = DraftPrompts(self.draft, self.topk, self.backend)
            self._drafts = TreeDrafts(self.draft, self.topk, self.depth, prompts)
        step = CycleStep(
            target=self.target,
            drafts=self._drafts,
            nodes=self.nodes,
            steps=self.depth,
            room=self.room,
            ends=torch.tensor(sorted(self._eos), dtype=torch.int64, device=self.backend.device),
        )
        self._runner = DecodeRunner(
            cycle or self._drafts.reads,
            step,
            sizes={LENGTH: self.longest, DEPTH: self.depth, **self._drafts.sizes},
            output_rows=BATCH,
            chunks=(self._chunk,),
            done="done",
            **self._where,
        )
        self.runners = {"cycle": Timed(self._runner)}
        self._steps: Iterator[LaunchedStep] = iter(())
        self._step: LaunchedStep | None = None
        self._since: dict[SpeculativeRequest, int] = {}  # the first cycle of each request

    def _begin(self, request: SpeculativeRequest) -> None:
        self._drafts.prompts.begin(request)

    def _cycle(self) -> None:
        new, step = [request for request in self.running if request not in self._since], self._step
        lands = 0 if step is None else step.lands
        self._since |= dict.fromkeys(new, lands)
        if step is None:
            self._reserve(new, 0, self._ahead * self._chunk)
            self._steps = self._runner.steps(self._batch(new), keys=new, ahead=self._ahead, chunk=self._chunk)
        elif new:
            self._reserve(new, lands, lands + self._chunk - 1)
            step.join(self._batch(new), new)
        self._read(next(self._steps))

    def _batch(self, requests: Sequence[SpeculativeRequest]) -> dict[str, Any]:
        return cycle_batch(requests) | self._drafts.batch(requests)

    def _read(self, step: LaunchedStep) -> None:
        """Take what a cycle has won, and say what later ones must know: who leaves, and rows that they may write.

        RuntimeError where the device has ended a request whose end the host does not see.
        """
        self.launches += self._step is None or step.launch > self._step.launch
        found = dict(step.tokens())
        for request in step.keys:
            if request in self._since and request not in found:
                raise RuntimeError(f"request {request.number} has ended on the device after {request.generated}")
        for request, tokens in found.items():
            won = [token for token in tokens if token >= 0]
            request.generated += won
            request.gains.append(len(won))
        done = self._retire()
        step.leave(done)
        for request in done:
            del self._since[request]
        grown = self._reserve(self.running, step.number + 1, step.lands + self._chunk - 1)
        step.append(grown, places=[*grown.values()])
        self._step = step if self.running else None

    def _reserve(
        self, requests: Sequence[SpeculativeRequest], read: int, last: int
    ) -> dict[SpeculativeRequest, list[int]]:
        """Take rows for all that requests may write until cycle `last`; cycles from `read` on may win the most.

        Returns new rows of each request that needs some.
        """
        grown = dict[SpeculativeRequest, list[int]]()
        for request in requests:
            cycles = last - max(read, self._since[request])
            most = min(request.root + cycles * (self.depth + 1), request.longest) + self.room
            missing = most - len(request.pages)
            if missing > 0:
                grown[request] = self.rows.take(math.ceil(missing / BLOCK) * BLOCK)
                request.pages += grown[request]
        return grown
