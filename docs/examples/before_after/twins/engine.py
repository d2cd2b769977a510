"""The engine: admits sequences, runs their prompts, and decodes them together, with whichever runner it is given."""

import abc
from collections.abc import Sequence as Several

import attrs
import torch

from slotgraph.backends import Backend
from twins.cache import PageAllocator, PagedCache
from twins.model import Model
from twins.sequences import Sequence


@attrs.frozen(eq=False, kw_only=True)
class Setting:
    """What a runner is made of. max_pages: the most pages that one sequence owns."""

    model: Model
    cache: PagedCache
    backend: Backend
    buckets: tuple[int, ...]
    max_pages: int


class Runner(abc.ABC):
    """What an engine asks of a model runner."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @abc.abstractmethod
    def capture(self) -> None:
        """Capture the decode step, once for each bucket."""

    @abc.abstractmethod
    def prefill(self, sequences: Several[Sequence]) -> torch.Tensor:
        """Logits for the first token after each prompt, [sequences, vocabulary]."""

    @abc.abstractmethod
    def decode(self, sequences: Several[Sequence]) -> torch.Tensor:
        """Logits for the token after each sequence's newest, valid until the next step."""


class Engine:
    """Serves sequences with one runner. max_batch: how many may run at a time."""

    def __init__(self, runner: Runner, cache: PagedCache, max_batch: int) -> None:
        self.runner = runner
        self.cache = cache
        self.steps = 0
        self._max_batch = max_batch
        self._pages = PageAllocator(cache.pages)
        self._running: list[Sequence] = []

    @torch.no_grad()
    def run(self, sequences: Several[Sequence]) -> None:
        """Capture, then step until all sequences are done."""
        self.runner.capture()
        waiting = list(sequences)
        while waiting or self._running:
            admitted = self._admit(waiting)
            if admitted:
                self._add(admitted, self.runner.prefill(admitted))
            if self._running:
                self._add(self._running, self.runner.decode(self._running))
            self.steps += 1

    def _admit(self, waiting: list[Sequence]) -> list[Sequence]:
        """Those that have arrived, in that order, while there is room in the batch and in the cache."""
        admitted: list[Sequence] = []
        while waiting and waiting[0].arrival <= self.steps and len(self._running) < self._max_batch:
            needed = waiting[0].pages_needed(self.cache.page_size)
            if needed > self._pages.free:
                break
            one = waiting.pop(0)
            one.pages = self._pages.take(needed)
            admitted.append(one)
            self._running.append(one)
        return admitted

    def _add(self, sequences: Several[Sequence], logits: torch.Tensor) -> None:
        """Greedy: the largest logit is the token. Those that are done leave, and their pages are free at once."""
        tokens = logits.argmax(dim=-1).tolist()
        kept = logits.to("cpu", copy=True)  # the next step overwrites them
        for one, token, row in zip(sequences, tokens, kept, strict=True):
            one.tokens.append(token)
            one.logits.append(row)
            if one.finished:
                self._pages.give_back(one.pages)
        self._running = [one for one in self._running if not one.finished]
