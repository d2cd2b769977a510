"""Who runs in a step: requests are admitted in order of arrival while there is room, and leave when they are done."""

from collections.abc import Sequence

from serving.cache import PageAllocator
from serving.request import Request

PREFILL_TOKENS = 512


class Scheduler:
    """Keeps the waiting and the running requests, and the pages that the running ones own.

    prefill_tokens: the most tokens of prompts in one step; a longer prompt has a step of its own.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        allocator: PageAllocator,
        page_size: int,
        max_batch: int,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        self.running: list[Request] = []
        self._waiting = sorted(requests, key=lambda request: request.arrival)
        self._allocator = allocator
        self._page_size = page_size
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens

    @property
    def idle(self) -> bool:
        """Whether no request is running or waiting."""
        return not self.running and not self._waiting

    def admit(self, step: int) -> list[Request]:
        """Requests whose prompts run in this step: arrived, with a row and all pages free, and not too many at once."""
        admitted: list[Request] = []
        while self._waiting and self._fits(self._waiting[0], step, admitted):
            request = self._waiting.pop(0)
            request.pages = self._allocator.take(request.pages_needed(self._page_size))
            self.running.append(request)
            admitted.append(request)
        return admitted

    def retire(self, eos: frozenset[int]) -> list[Request]:
        """Requests that are done: they leave the batch, and their pages are free at once."""
        done = [request for request in self.running if request.finished(eos)]
        self.running = [request for request in self.running if not request.finished(eos)]
        for request in done:
            self._allocator.give_back(request.pages)
        return done

    def _fits(self, request: Request, step: int, admitted: Sequence[Request]) -> bool:
        tokens = sum(len(other.prompt_ids) for other in (*admitted, request))
        return (
            request.arrival <= step
            and len(self.running) < self._max_batch
            and request.pages_needed(self._page_size) <= self._allocator.free
            and (not admitted or tokens <= self._prefill_tokens)
        )
