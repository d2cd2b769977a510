"""The engine: admit, prefill, decode and retire, until all requests are done."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch

from serving.attention import PageAllocator, PagedCache, best_attention
from serving.inputs import DecodeInputs, PrefillInputs, decode_batch, prefill_batch, with_ends
from serving.model import Language
from serving.options import Options
from serving.ranks import Crew, Outputs
from serving.request import Request
from serving.steps import Decode, Steps, prefill_runner
from slotgraph import DecodeRunner, EagerRunner, attention
from slotgraph.ranks import PipelineStage
from slotgraph.runners.engine.statistics import CaptureReport, Decision

Prepare = Callable[[DecodeInputs], DecodeInputs]


def unchanged(batch: DecodeInputs) -> DecodeInputs:
    """The batch as the engine made it."""
    return batch


@attrs.define(kw_only=True)
class Work:
    """What the engine has done so far.

    decodes: decode steps. decoded: tokens that they made. done: requests that left. seconds: time spent in steps.
    fills: seconds on the host for the fill of each decode step, where it is a call of its own. prefills: the path of
    each prefill step. prompt_tokens: of all prompts. most: requests in one prefill step.
    """

    steps: int = 0
    decodes: int = 0
    decoded: int = 0
    done: int = 0
    seconds: float = 0.0
    fills: list[float] = attrs.field(factory=list)
    prefills: list[Decision] = attrs.field(factory=list)
    prefill_seconds: float = 0.0
    prompt_tokens: int = 0
    most: int = 0


class Engine:
    """Serves a set of requests on one model, whose attention must be `paged` meanwhile.

    declaration, prompts: what a decode step and what a prefill step reads; subclasses of DecodeInputs and PrefillInputs
    may add to these or override them. prepare: has the last look at each decode batch before the runner gets it.
    crew: how its steps go with those of other processes; `language` and `requests` are what this one has of them.
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
        crew: Crew | None = None,
    ) -> None:
        self._crew = crew = Crew() if crew is None else crew
        self._options, self._prepare, self._eos = options, prepare, language.eos
        self._device, self._rows = language.model.device, options.max_batch
        self.running: list[Request] = []
        self.take(requests)

        needs = sorted((self._pages(request)[1] for request in requests), reverse=True)
        pages, self.width = 1 + sum(needs[: options.max_batch]), needs[0]
        self._allocator = PageAllocator(pages)
        cache = PagedCache.empty(language.model, pages, options.page_size)
        chosen = best_attention(options.attention, self._device)
        self.steps = Steps(language.model, cache, crew.world, options.sampler, logits=options.verify, attention=chosen)

        self._declaration, self._chunks = crew.inputs(declaration), dict[str, Any]()
        if options.chunk > 1:
            self._declaration = with_ends(self._declaration, language.eos)
            self._chunks = {"chunks": [options.chunk], "done": "done"}
        sizes = {attention.PAGES: self.width, attention.PAGE_SIZE: options.page_size}
        given = crew.given(self._declaration, sizes)
        self._given = {"backend": options.backend, **given}
        self.step = self.steps.decoding(compiled=options.compile)
        self.decode = self.decoder(self.step, options.ladder)
        self.prefill = prefill_runner(crew.inputs(prompts), self.steps, options, crew)
        self._run_decode, self._run_prefill = crew.stage(self.decode), crew.stage(self.prefill)

    def decoder(self, step: Decode, buckets: tuple[int, ...] | list[int], **options: Any) -> DecodeRunner[Any]:
        """A runner of a decode step, with the inputs of the engine's own."""
        return DecodeRunner(self._declaration, step, buckets=buckets, **self._given, **self._chunks, **options)

    @torch.inference_mode()
    def capture(self) -> CaptureReport:
        """Capture every bucket of both kinds of steps; what the decode step's came to."""
        if not isinstance(self.prefill, EagerRunner):
            self.prefill.capture()
        report = self.decode.capture()
        self.steps.counts.zero_()  # warm-ups were counted, too
        return report

    def take(self, requests: Sequence[Request]) -> None:
        """Serve these requests next. All earlier ones are done, and no longer than these."""
        self.work = Work()
        self._waiting = sorted(requests, key=lambda request: request.arrival)

    def run(self) -> Iterator[Work]:
        """Step until all requests are done, here and in the rest of the crew; hands out the work so far each time."""
        ran = False
        while self.running or self._waiting or self._crew.goes_on(ran=ran, steps=self.work.steps):
            begin = time.perf_counter()
            ran = self._step()
            self.work.seconds += time.perf_counter() - begin
            yield self.work

    @torch.inference_mode()
    def _step(self) -> bool:
        """Prompts, then decoding, as far as there is any, here or in the rest of the crew; whether there was."""
        admitted = self._admit()
        if admitted:
            self._add(admitted, self._run_prompts(admitted))
            self._free(self._retire())
        ran = bool(admitted) or self._crew.idle(self.prefill, self._prompts([]))
        if self.running:
            self._decode_each(self.running)
            self._free(self._retire())
            ran = True
        else:
            ran |= self._crew.idle(self.decode)
        self.work.steps += 1
        return ran

    def _admit(self) -> list[Request]:
        """Requests whose prompts run in this step: arrived, with a row and all pages free, and not too many at once."""
        admitted: list[Request] = []
        tokens = 0
        while self._waiting and self._waiting[0].arrival <= self.work.steps:
            request = self._waiting[0]
            tokens += len(request.prompt_ids)
            first, most = self._pages(request)
            promised = sum(self._pages(one)[1] - len(one.pages) for one in self.running)
            if len(self.running) == self._rows or most + promised > self._allocator.free:
                break
            if admitted and tokens > self._options.max_prefill_tokens:
                break
            request.pages = self._allocator.take(first)
            admitted.append(self._waiting.pop(0))
            self.running.append(request)
        return admitted

    def _pages(self, request: Request) -> tuple[int, int]:
        """Pages that a request gets when it is admitted, and the most that it needs: here all at once."""
        most = request.pages_needed(self._options.page_size)
        return most, most

    def _run_prompts(self, requests: Sequence[Request]) -> Any:
        """Store the prompts' keys and values, and make the first token of each request."""
        begin = time.perf_counter()
        batch, work = self._prompts(requests), self.work
        chosen = self._run_prefill(batch)
        work.prefill_seconds += time.perf_counter() - begin
        work.prefills.append(self._crew.decision(self.prefill, batch))
        work.prompt_tokens += sum(batch.lengths)
        work.most = max(work.most, len(requests))
        return chosen

    def _prompts(self, requests: Sequence[Request]) -> PrefillInputs:
        return prefill_batch(requests, self._options.page_size, self._device)

    def _decode_each(self, requests: Sequence[Request]) -> None:
        """Make one more token for each request: fill and replay, of which the first is timed, or a pipeline's stage."""
        batch = self._prepare(decode_batch(requests, self.width, self._device))
        runner = self._run_decode
        if isinstance(runner, PipelineStage):
            self._add(requests, runner(batch))
        else:
            begin = time.perf_counter()
            view = runner.fill(batch)
            self.work.fills.append(time.perf_counter() - begin)
            self._add(requests, runner.replay(view))
        self.work.decodes += 1
        self.work.decoded += len(requests)

    def _add(self, requests: Sequence[Request], chosen: Outputs) -> None:
        """A token for each request that goes on, with its logits where they are compared: a replay overwrites them."""
        tokens, logits = self._crew.tokens(chosen, len(requests)), None if chosen is None else chosen.logits
        rows = [None] * len(requests) if logits is None else logits.to("cpu", copy=True)
        for request, token, row in zip(requests, tokens, rows, strict=True):
            if not request.finished(self._eos):
                request.add(token, row, self.work.steps)

    def _retire(self) -> list[Request]:
        """Requests that are done leave the batch; which ones."""
        done = [request for request in self.running if request.finished(self._eos)]
        self.running = [request for request in self.running if not request.finished(self._eos)]
        self.work.done += len(done)
        return done

    def _free(self, requests: Iterable[Request]) -> None:
        """Nothing reads or writes the pages of these requests any more."""
        for request in requests:
            self._allocator.give_back(request.pages)
