"""The engine whose steps are launched before the host has read the tokens of those before."""

import math
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from serving.engine import Engine
from serving.inputs import DecodeInputs, decode_batch, tables
from serving.model import Language
from serving.options import Options
from serving.request import Request
from serving.sampling import Chosen
from slotgraph.extend import LaunchedStep

HOST = torch.device("cpu")


class AheadEngine(Engine):
    """The same by `steps()`: slots advance on the device, and the host says only which requests join, leave or grow.

    A request ends as soon as the host reads its last token. The steps that were launched by then have a row of it, too:
    their tokens are dropped, and its pages are free when they are done.

    _first: requests whose first tokens are on their way to the host, with the number of the step that has them.
    _leaving: requests whose pages are not free yet, with the number of the first step without them.
    """

    _steps: Iterator[LaunchedStep] = iter(())
    _launched = 0

    def __init__(self, language: Language, requests: Sequence[Request], options: Options, **more: Any) -> None:
        self._ahead, self._chunk = options.ahead or 0, options.chunk
        super().__init__(language, requests, options, **more)
        self._rows = min(self._rows, options.ladder[-1])
        self._device = HOST  # batches of host data wait for no step: they are uploaded in their turn
        self._first = deque[tuple[int, Sequence[Request], Chosen]]()
        self._leaving: list[tuple[int, Request]] = []
        self._since: dict[Request, int] = {}

    @torch.inference_mode()
    def _step(self) -> bool:
        """Read a step's tokens and say what is new, or begin with requests that have arrived while none was there."""
        step = next(self._steps, None) if self.running else None
        if step is not None:
            self._read(step)
            self._say(step)
        else:
            self.decode.stage.backend.synchronize()
            self._let_go(self._launched)
            if admitted := self._admit():
                batch, self._launched = self._prefilled(admitted, 0), 0
                given: Any = {"ahead": self._ahead, "needs": ["positions"], "chunk": self._chunk}
                self._steps = self.decode.steps(batch, keys=admitted, **given)
        self.work.steps += 1
        return True

    def _read(self, step: LaunchedStep) -> None:
        """Wait for a step alone, and add its tokens to requests that go on; before them first ones, of prompts."""
        chosen = step.outputs
        while self._first and self._first[0][0] <= step.number:
            _, requests, first = self._first.popleft()
            self._add(requests, first)
        self._add(cast("tuple[Request, ...]", step.keys), chosen)

    def _say(self, step: LaunchedStep) -> None:
        """Requests leave, join, or take the page that their next token is for, all before the next step is launched."""
        work, lands = self.work, step.lands
        work.decodes, self._launched = work.decodes + lands - self._launched, lands
        done = self._retire()
        step.leave(done)
        self._leaving += [(lands, request) for request in done]
        work.decoded += sum(lands - self._since.pop(request) for request in done)
        self._let_go(step.number + 1)
        needs = cast("dict[Request, int]", step.needs("positions"))
        missing = {one: self._reach(one, position + 1) - len(one.pages) for one, position in needs.items()}
        grown = [request for request, count in missing.items() if count > 0]
        if grown:
            for request in grown:
                request.pages += self._allocator.take(missing[request])
            step.edit(grown, page_table=tables(grown, self.width))
        if admitted := self._admit():
            step.join(self._prefilled(admitted, lands), admitted)

    def _let_go(self, done: int) -> None:
        """Free the pages of requests that no step writes any more. done: how many steps are."""
        self._free(request for lands, request in self._leaving if lands <= done)
        self._leaving = [(lands, request) for lands, request in self._leaving if lands > done]

    def _pages(self, request: Request) -> tuple[int, int]:
        """For steps before the host can say that it needs another; for those before the host has read its last token.

        If that is the prompt's, it is read one step later than others. A launch of several steps ends requests itself.
        """
        steps = max(1 + self._ahead * self._chunk, self._chunk)
        return self._reach(request, len(request.prompt_ids) + steps), self._reach(request, sys.maxsize)

    def _reach(self, request: Request, tokens: int) -> int:
        """Pages for so many tokens of a request, or for all that it may store."""
        surplus = 0 if self._chunk > 1 else self._ahead + 1
        return math.ceil(min(tokens, request.longest + surplus) / self._options.page_size)

    def _prefilled(self, requests: Sequence[Request], lands: int) -> DecodeInputs:
        """Run prompts; their rows of the step `lands`, which reads the first tokens where the prefill wrote them."""
        chosen = self._run_prompts(requests)
        copies: Any = [None if one is None else one.to(HOST, non_blocking=True, copy=True) for one in chosen]
        self._first.append((lands, requests, Chosen(*copies)))
        self._since |= dict.fromkeys(requests, lands)
        batch: Any = self._prepare(decode_batch(requests, self.width, self._device, chosen.next_ids))
        if self._chunk > 1:
            batch.last = torch.tensor([request.longest - 1 for request in requests])
        return cast("DecodeInputs", batch)
