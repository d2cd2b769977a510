"""The engine: prompts by the path that is asked for, decode steps through captured buckets, until all are done."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch

from serving.batch import decode_batch, prefill_batch
from serving.cache import PageAllocator, PagedCache
from serving.inputs import PAGES, DecodeInputs, PrefillInputs
from serving.model import Language
from serving.options import Options
from serving.prefill import Prefills, prefill_runner
from serving.request import Request
from serving.scheduler import Scheduler
from serving.steps import Steps
from slotgraph import DecodeRunner, EagerRunner
from slotgraph.runners.capture import CaptureReport

Prepare = Callable[[DecodeInputs], DecodeInputs]


def unchanged(batch: DecodeInputs) -> DecodeInputs:
    """The batch as the engine made it."""
    return batch


@attrs.define(kw_only=True)
class Work:
    """What the engine has done so far.

    decoded: tokens made by decode steps. done: requests that left. seconds: time spent in steps. fills: seconds on the
    host for the fill of each decode step. prefills: the prefill steps.
    """

    steps: int = 0
    decoded: int = 0
    done: int = 0
    seconds: float = 0.0
    fills: list[float] = attrs.field(factory=list)
    prefills: Prefills = attrs.field(factory=Prefills)

    @classmethod
    def together(cls, works: "Sequence[Work]") -> "Work":
        """What several engines have done side by side."""
        return cls(
            steps=max(work.steps for work in works),
            decoded=sum(work.decoded for work in works),
            done=sum(work.done for work in works),
            seconds=max(work.seconds for work in works),
            fills=[seconds for work in works for seconds in work.fills],
            prefills=Prefills.together([work.prefills for work in works]),
        )


class Engine:
    """Serves a set of requests on one model, whose attention must be `paged` meanwhile.

    declaration, prompts: what a decode step and what a prefill step reads; subclasses of DecodeInputs and PrefillInputs
    may add to these or override them. prepare: has the last look at each decode batch before the runner gets it.
    among: what both runners are told of other ranks that step when they do, by keyword; nothing where ranks need not
    agree on a path, because each has the same batch, or runs all by itself.
    """

    def __init__(
        self,
        language: Language,
        requests: Sequence[Request],
        options: Options,
        *,
        declaration: type[DecodeInputs] = DecodeInputs,
        prompts: type[PrefillInputs] = PrefillInputs,
        prepare: Prepare = unchanged,
        among: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        needs = sorted((request.pages_needed(options.page_size) for request in requests), reverse=True)
        pages = 1 + sum(needs[: options.max_batch])
        self.work = Work()
        self.steps = Steps.over(language.model, PagedCache.empty(language.model, pages, options.page_size))
        limits = options.max_batch, options.max_prefill_tokens
        self.scheduler = Scheduler(requests, PageAllocator(pages), options.page_size, *limits)
        self.prefill = prefill_runner(prompts, self.steps, options, among)
        graphs: Any = {"buckets": options.ladder, "backend": options.backend, "sizes": {PAGES: needs[0]}, **among}
        self.decode = DecodeRunner(declaration, self.steps.decode, **graphs)
        self._eos = language.eos
        self._page_size = options.page_size
        self._device = language.model.device
        self._prepare = prepare

    @torch.inference_mode()
    def capture(self) -> CaptureReport:
        """Capture every bucket of both kinds of steps; what the decode step's came to."""
        if not isinstance(self.prefill, EagerRunner):
            self.prefill.capture()
        report = self.decode.capture()
        self.steps.counted.zero_()  # warm-ups were counted too
        return report

    def run(self) -> Iterator[Work]:
        """Step until all requests are done; hands out the work so far after each step."""
        while not self.scheduler.idle:
            begin = time.perf_counter()
            self._step()
            self.work.seconds += time.perf_counter() - begin
            yield self.work

    @torch.inference_mode()
    def _step(self) -> None:
        admitted = self.scheduler.admit(self.work.steps)
        if admitted:
            self._run_prompts(admitted)
            self._retire()
        if self.scheduler.running:
            self._decode_each(self.scheduler.running)
            self._retire()
        self.work.steps += 1

    def _run_prompts(self, requests: Sequence[Request]) -> None:
        """Store the prompts' keys and values, and make the first token of each request."""
        begin = time.perf_counter()
        batch = prefill_batch(requests, self._page_size, self._device)
        decision = self.prefill.decide(batch)
        self._add(requests, self.prefill(batch))
        self.work.prefills.add(batch, decision, time.perf_counter() - begin)

    def _decode_each(self, requests: Sequence[Request]) -> None:
        """Make one more token for each request."""
        batch = self._prepare(decode_batch(requests, self._page_size, self._device))
        begin = time.perf_counter()
        view = self.decode.fill(batch)
        self.work.fills.append(time.perf_counter() - begin)
        self._add(requests, self.decode.replay(view))
        self.work.decoded += len(requests)

    def _add(self, requests: Sequence[Request], logits: torch.Tensor) -> None:
        """Greedy: the largest logit is the token."""
        tokens = logits.argmax(dim=-1).tolist()
        rows = logits.to("cpu", copy=True)  # the next replay overwrites them
        for request, token, row in zip(requests, tokens, rows, strict=True):
            request.add(token, row, self.work.steps)

    def _retire(self) -> None:
        self.work.done += len(self.scheduler.retire(self._eos))
