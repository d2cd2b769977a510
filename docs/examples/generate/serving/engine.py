"""The engine: prompts by the path that is asked for, decode steps through captured buckets, until all are done."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from serving.batch import decode_batch, prefill_batch
from serving.cache import PageAllocator, PagedCache
from serving.crew import Crew, Outputs
from serving.inputs import PAGES, DecodeInputs, PrefillInputs
from serving.model import Language
from serving.options import Options
from serving.prefill import Prefills, prefill_runner
from serving.request import Request
from serving.sampling import Sampler
from serving.scheduler import Scheduler
from serving.steps import Decode, Steps
from slotgraph import DecodeRunner, EagerRunner
from slotgraph.ranks import PipelineStage
from slotgraph.runners.statistics import CaptureReport

Prepare = Callable[[DecodeInputs], DecodeInputs]


def unchanged(batch: DecodeInputs) -> DecodeInputs:
    """The batch as the engine made it."""
    return batch


@attrs.define(kw_only=True)
class Work:
    """What the engine has done so far.

    decodes: decode steps. decoded: tokens that they made. done: requests that left. seconds: time spent in steps.
    fills: seconds on the host for the fill of each decode step, where it is a call of its own. prefills: the prefill
    steps.
    """

    steps: int = 0
    decodes: int = 0
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
            decodes=sum(work.decodes for work in works),
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
        declaration, prompts = crew.decode_inputs(declaration), crew.prefill_inputs(prompts)
        needs = sorted((request.pages_needed(options.page_size) for request in requests), reverse=True)
        pages = 1 + sum(needs[: options.max_batch])
        self.work = Work()
        cache = PagedCache.empty(language.model, pages, options.page_size)
        self.steps = Steps.over(language.model, cache, crew.world)
        limits = options.max_batch, options.max_prefill_tokens
        self.scheduler = Scheduler(requests, PageAllocator(pages), options.page_size, *limits)
        self.prefill = prefill_runner(prompts, self.steps, options, crew)
        sizes = {PAGES: needs[0], **crew.sizes_of(declaration)}
        among: Any = {"sizes": sizes, "backend": options.backend, **crew.among}
        self._decoder = functools.partial(DecodeRunner, declaration, **among)
        self.step = self.steps.decoding(compiled=options.compile)
        self.decode = self.decoder(self.step, options.ladder)
        self._stages = {"prefill": crew.stage(self.prefill), "decode": crew.stage(self.decode)}
        self._eos = language.eos
        self._sampler = Sampler.of(options)
        self._page_size = options.page_size
        self._device = language.model.device
        self._prepare = prepare

    def decoder(self, step: Decode, buckets: Sequence[int], **options: Any) -> DecodeRunner[Any]:
        """A runner of a decode step, with the inputs of the engine's own."""
        return self._decoder(step, buckets=buckets, **options)

    @torch.inference_mode()
    def capture(self) -> CaptureReport:
        """Capture every bucket of both kinds of steps; what the decode step's came to."""
        if not isinstance(self.prefill, EagerRunner):
            self.prefill.capture()
        report = self.decode.capture()
        self.steps.start()
        return report

    def run(self) -> Iterator[Work]:
        """Step until all requests are done, here and in the rest of the crew; hands out the work so far each time."""
        ran = False
        while not self.scheduler.idle or self._crew.goes_on(ran=ran, steps=self.work.steps):
            begin = time.perf_counter()
            ran = self._step()
            self.work.seconds += time.perf_counter() - begin
            yield self.work

    @torch.inference_mode()
    def _step(self) -> bool:
        """Prompts, then decoding, as far as there is any, here or in the rest of the crew; whether there was."""
        admitted = self.scheduler.admit(self.work.steps)
        if admitted:
            self._run_prompts(admitted)
            self._retire()
        ran = bool(admitted) or self._crew.idle(self.prefill, prefill_batch([], self._page_size, self._device))
        if self.scheduler.running:
            self._decode_each(self.scheduler.running)
            self._retire()
            ran = True
        else:
            ran |= self._crew.idle(self.decode)
        self.work.steps += 1
        return ran

    def _run_prompts(self, requests: Sequence[Request]) -> None:
        """Store the prompts' keys and values, and make the first token of each request."""
        begin = time.perf_counter()
        batch = prefill_batch(requests, self._page_size, self._device)
        self._add(requests, self._stages["prefill"](batch))
        seconds = time.perf_counter() - begin
        self.work.prefills.add(batch, self._crew.decision(self.prefill, batch), seconds)

    def _decode_each(self, requests: Sequence[Request]) -> None:
        """Make one more token for each request."""
        batch = self._prepare(decode_batch(requests, self._page_size, self._device))
        self._add(requests, self._decoded(batch))
        self.work.decodes += 1
        self.work.decoded += len(requests)

    def _decoded(self, batch: DecodeInputs) -> Outputs:
        """Fill and replay, of which the first is timed, where they are two calls."""
        logits: Outputs
        stage = self._stages["decode"]
        if isinstance(stage, PipelineStage):
            logits = stage(batch)
            return logits
        begin = time.perf_counter()
        view = stage.fill(batch)
        self.work.fills.append(time.perf_counter() - begin)
        logits = stage.replay(view)
        return logits

    def _add(self, requests: Sequence[Request], logits: Outputs) -> None:
        """A token each, with the logits that chose it where they are known: the next replay overwrites them."""
        tokens = self._crew.tokens(logits, requests, self._sampler)
        rows = [None] * len(requests) if logits is None else logits.to("cpu", copy=True)
        for request, token, row in zip(requests, tokens, rows, strict=True):
            request.add(token, row, self.work.steps)

    def _retire(self) -> None:
        self.work.done += len(self.scheduler.retire(self._eos))
