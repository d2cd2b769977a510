"""The engine: prompts through an eager runner, decode steps through captured buckets, until all requests are done."""

import time
from collections.abc import Sequence

import torch

from serving.attention import PageAllocator
from serving.model import Language
from serving.request import Request
from slotgraph import DecodeRunner, EagerRunner, standard
from slotgraph.backends import Backend
from slotgraph.runners.engine.statistics import CaptureReport
from states.inputs import DecodeInputs, PromptInputs
from states.models import VOCABULARY
from states.steps import Steps


class Engine:
    """Serves a set of requests on one model.

    declaration: what a decode step reads; a subclass of DecodeInputs may add to it or override it.
    """

    def __init__(
        self,
        language: Language,
        requests: Sequence[Request],
        buckets: tuple[int, ...],
        backend: Backend,
        declaration: type[DecodeInputs] = DecodeInputs,
    ) -> None:
        self.running: list[Request] = []
        self.waiting = list(requests)
        self.steps = 0
        self.seconds = 0.0
        self.batch = max(buckets)
        self.rows, self._eos = PageAllocator(1 + self.batch), language.eos  # a page is a row
        self.model = Steps.over(language.model, 1 + self.batch, max(request.longest for request in requests))
        self.prefill = EagerRunner(PromptInputs, self.model.prefill, backend=backend)
        sizes = {standard.VOCAB: VOCABULARY}
        self.decode = DecodeRunner(declaration, self.model.decode, buckets=buckets, sizes=sizes, backend=backend)

    def capture(self) -> CaptureReport:
        """Capture every bucket of the decode step."""
        return self.decode.capture()

    def run(self) -> None:
        """Step until all requests are done."""
        begin = time.perf_counter()
        while self.running or self.waiting:
            self._admit()
            if self.running:
                self._decode_each()
            self.steps += 1
        self.seconds += time.perf_counter() - begin

    def _admit(self) -> None:
        """Prompts run in the order of arrival, one at a time, while rows are free."""
        while self.waiting and self.rows.free and self.waiting[0].arrival <= self.steps:
            request = self.waiting.pop(0)
            request.pages = self.rows.take(1)
            self.running.append(request)
            batch = {"input_ids": request.prompt_ids, "req_pool_indices": request.pages}
            self._add([request], self.prefill(batch))

    def _decode_each(self) -> None:
        """Make one more token for each request."""
        batch = {
            "input_ids": [request.generated[-1] for request in self.running],
            "positions": [request.seq_len - 1 for request in self.running],
            "seq_lens": [request.seq_len for request in self.running],
            "req_pool_indices": [request.pages[0] for request in self.running],
        }
        self._add(self.running, self.decode(batch))

    def _add(self, requests: Sequence[Request], logits: torch.Tensor) -> None:
        """Greedy: the largest logit is the token. Requests that are done leave, and their rows are free at once."""
        tokens = logits.argmax(dim=-1).tolist()
        kept = logits.to("cpu", copy=True)  # the next replay overwrites them
        for request, token, row in zip(requests, tokens, kept, strict=True):
            request.add(token, row, self.steps)
            if request.finished(self._eos):
                self.rows.give_back(request.pages)
        self.running = [request for request in self.running if not request.finished(self._eos)]
