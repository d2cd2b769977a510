"""The engine: prompts through an eager runner, decode steps through captured buckets, until all requests are done."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from serving.attention import PageAllocator
from serving.model import Language
from slotgraph import DecodeRunner, EagerRunner, standard
from slotgraph.backends import Backend
from slotgraph.runners.engine.statistics import CaptureReport
from windows.inputs import PAGES, RING, DecodeInputs, PromptInputs
from windows.options import Options
from windows.pools import PAGE, Pools, ring_pages
from windows.requests import WindowRequest, pages_of
from windows.steps import Steps

Batch = dict[str, Any]
Prepare = Callable[[Batch], Batch]


def unchanged(batch: Batch) -> Batch:
    """The batch as the engine made it."""
    return batch


class Engine:
    """Serves a set of requests on one model, whose attention must be `windowed` meanwhile.

    declaration: what a decode step reads; a subclass of DecodeInputs may add to it or override it.
    prepare: has the last look at each decode batch before the runner gets it.
    """

    def __init__(
        self,
        language: Language,
        requests: list[WindowRequest],
        options: Options,
        backend: Backend,
        *,
        declaration: type[DecodeInputs] = DecodeInputs,
        prepare: Prepare = unchanged,
    ) -> None:
        self.running: list[WindowRequest] = []
        self.waiting = list(requests)
        self.steps, self.seconds = 0, 0.0
        self.most, self.ring = max(options.buckets), ring_pages(options.window)
        needs = pages_of(requests)
        pages = 1 + sum(needs[: self.most])
        self.pools = Pools.empty(language.model, pages, self.most)
        self.free = PageAllocator(pages), PageAllocator(self.pools.window.cache.pages)
        steps, config = Steps(language.model, self.pools, translates=options.translate), language.model.config
        self.prefill = EagerRunner(PromptInputs, steps.prefill, backend=backend)
        self.decode = DecodeRunner(
            declaration,
            steps.decode,
            buckets=options.buckets,
            sizes={PAGES: needs[0], RING: self.ring, standard.VOCAB: config.vocab_size},
            backend=backend,
        )
        self._eos = language.eos
        self._prepare = prepare

    @torch.inference_mode()
    def capture(self) -> CaptureReport:
        """Capture every bucket of the decode step."""
        return self.decode.capture()

    @torch.inference_mode()
    def run(self) -> None:
        """Step until all requests are done."""
        begin = time.perf_counter()
        while self.running or self.waiting:
            admitted = self._admit()
            if admitted:
                self._add(admitted, self.prefill(self._prompts(admitted)))
            if self.running:
                self._add(self.running, self.decode(self._prepare(self._newest(self.running))))
            self.steps += 1
        self.seconds += time.perf_counter() - begin

    def _admit(self) -> list[WindowRequest]:
        """Requests whose prompts run in this step: arrived, with pages free for all that they may come to."""
        admitted = []
        full, window = self.free
        while self.waiting and self.waiting[0].arrival <= self.steps and len(self.running) < self.most:
            if self.waiting[0].pages_needed(PAGE) > full.free:
                break
            request = self.waiting.pop(0)
            request.pages, request.ring = full.take(request.pages_needed(PAGE)), window.take(self.ring)
            self.running.append(request)
            admitted.append(request)
        return admitted

    def _prompts(self, requests: Sequence[WindowRequest]) -> Batch:
        """All tokens of the requests' prompts behind one another."""
        each = [(row, at) for row, request in enumerate(requests) for at in range(len(request.prompt_ids))]
        batch: Batch = {
            "input_ids": [requests[row].prompt_ids[at] for row, at in each],
            "positions": [at for _, at in each],
            "out_cache_loc": [requests[row].location(at, PAGE) for row, at in each],
            "out_cache_loc_swa": [requests[row].place_of_prompt(at) for row, at in each],
            "request_rows": [row for row, _ in each],
            "last_rows": [i for i, (row, at) in enumerate(each) if at == len(requests[row].prompt_ids) - 1],
        }
        self.pools.window.place(batch["out_cache_loc"], batch["out_cache_loc_swa"])
        return batch

    def _newest(self, requests: Sequence[WindowRequest]) -> Batch:
        """Each request's newest token; block tables are as wide as the longest of these requests needs."""
        newest = [request.seq_len - 1 for request in requests]
        pairs = list(zip(requests, newest, strict=True))
        width = max(len(request.pages) for request in requests)
        batch: Batch = {
            "input_ids": [request.generated[-1] for request in requests],
            "positions": newest,
            "out_cache_loc": [request.location(at, PAGE) for request, at in pairs],
            "out_cache_loc_swa": [request.place(at) for request, at in pairs],
            "seq_lens": [request.seq_len for request in requests],
            "block_tables": [request.pages + [0] * (width - len(request.pages)) for request in requests],
            "ring_tables": [request.ring for request in requests],
        }
        self.pools.window.place(batch["out_cache_loc"], batch["out_cache_loc_swa"])
        return batch

    def _add(self, requests: Sequence[WindowRequest], logits: torch.Tensor) -> None:
        """Greedy: the largest logit is the token. Requests that are done leave, and their pages are free at once."""
        tokens = logits.argmax(dim=-1).tolist()
        kept = logits.to("cpu", copy=True)  # the next replay overwrites them
        for request, token, row in zip(requests, tokens, kept, strict=True):
            request.add(token, row, self.steps)
            if request.finished(self._eos):
                for pages, owned in zip(self.free, (request.pages, request.ring), strict=True):
                    pages.give_back(owned)
        self.running = [request for request in self.running if not request.finished(self._eos)]
