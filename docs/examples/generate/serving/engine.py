"""The engine: prompts through an eager runner, decode steps through captured buckets, until all requests are done."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from slotgraph import DecodeRunner, EagerRunner

from serving.batch import decode_batch, last_rows, prefill_batch
from serving.cache import PageAllocator, PagedCache
from serving.inputs import PAGES, DecodeInputs, PrefillInputs
from serving.model import Language
from serving.options import Options
from serving.request import Request
from serving.scheduler import Scheduler
from serving.steps import Steps

Prepare = Callable[[DecodeInputs], DecodeInputs]


def unchanged(batch: DecodeInputs) -> DecodeInputs:
    """The batch as the engine made it."""
    return batch


@attrs.define(kw_only=True)
class Progress:
    """How far the engine is. seconds: spent in steps. done: requests that left. decoded: tokens made by decode steps."""

    steps: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    decoded: int = 0
    done: int = 0
    seconds: float = 0.0


class Engine:
    """Serves a set of requests on one model.

    declaration: what a decode step reads; a subclass of DecodeInputs may add to it or override it.
    prepare: has the last look at each decode batch before the runner gets it.
    """

    def __init__(
        self,
        language: Language,
        requests: Sequence[Request],
        options: Options,
        *,
        declaration: type[DecodeInputs] = DecodeInputs,
        prepare: Prepare = unchanged,
    ) -> None:
        needs = sorted((request.pages_needed(options.page_size) for request in requests), reverse=True)
        pages = 1 + sum(needs[: options.max_batch])
        self.progress = Progress()
        self.steps = Steps.over(language.model, PagedCache.empty(language.model, pages, options.page_size))
        self.scheduler = Scheduler(requests, PageAllocator(pages), options.page_size, options.max_batch)
        self.prefill = EagerRunner(PrefillInputs, self.steps.prefill, backend=options.backend)
        self.decode = DecodeRunner(
            declaration, self.steps.decode, buckets=options.ladder, backend=options.backend, sizes={PAGES: needs[0]}
        )
        self._eos = language.eos
        self._page_size = options.page_size
        self._device = language.model.device
        self._prepare = prepare

    @torch.inference_mode()
    def capture(self) -> Any:
        """Capture every bucket; the runner's report."""
        report = self.decode.capture()
        self.steps.counted.zero_()  # warm-ups count too
        return report

    def run(self) -> Iterator[Progress]:
        """Step until all requests are done; hands out the progress after each step."""
        while not self.scheduler.idle:
            begin = time.perf_counter()
            self._step()
            self.progress.seconds += time.perf_counter() - begin
            yield self.progress

    @torch.inference_mode()
    def _step(self) -> None:
        admitted = self.scheduler.admit(self.progress.steps)
        if admitted:
            self._prefill(admitted)
        if self.scheduler.running:
            self._decode(self.scheduler.running)
        self.progress.done += len(self.scheduler.retire(self._eos))
        self.progress.steps += 1

    def _prefill(self, requests: Sequence[Request]) -> None:
        """Run the prompts; their last tokens' logits give the first token of each request."""
        hidden = self.prefill(prefill_batch(requests, self._page_size, self._device))
        self._add(requests, self.steps.logits(hidden[last_rows(requests, self._device)]))
        self.progress.prefill_steps += 1
        self.progress.done += len(self.scheduler.retire(self._eos))

    def _decode(self, requests: Sequence[Request]) -> None:
        """One more token for each request."""
        batch = self._prepare(decode_batch(requests, self._page_size, self._device))
        self._add(requests, self.decode(batch))
        self.progress.decode_steps += 1
        self.progress.decoded += len(requests)

    def _add(self, requests: Sequence[Request], logits: torch.Tensor) -> None:
        """Greedy: the largest logit is the token."""
        tokens = logits.argmax(dim=-1).tolist()
        rows = logits.to("cpu", copy=True)  # the next step overwrites them
        for request, token, row in zip(requests, tokens, rows, strict=True):
            request.add(token, row, self.progress.steps)
