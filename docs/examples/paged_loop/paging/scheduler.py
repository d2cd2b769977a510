"""The scheduler: who runs next, with which pages, and who must wait."""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

from paging.pages import Pages
from paging.request import Request, pages_for


class Scheduler:
    """Admits requests in their order, and preempts the newest one where no page is free.

    Attributes:
        waiting: Requests that have not begun, or were preempted.
        running: Requests that decode, the oldest first.
        pages: The pages of the cache.
        preemptions: How often a request was preempted.
    """

    def __init__(self, *, pages: int, most_running: int, most_tokens: int, ahead: int, eos: frozenset[int]) -> None:
        self.waiting = deque[Request]()
        self.running: list[Request] = []
        self.pages = Pages(pages)
        self.preemptions = 0
        self._most_running, self._most_tokens = most_running, most_tokens
        self._ahead, self._eos = ahead, eos

    def add(self, request: Request) -> None:
        """Queue a request; ValueError where it would not fit even alone."""
        needed, there = pages_for(len(request.prompt_ids) + request.limit + self._ahead), len(self.pages.users) - 1
        if needed > there:
            raise ValueError(f"request {request.number} may need {needed} pages, and there are {there}: raise --pages")
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Return requests whose prompts run now. Each has room for its prompt and for the steps launched after it."""
        admitted, tokens = list[Request](), 0
        while self.waiting and len(self.running) < self._most_running:
            request = self.waiting[0]
            if admitted and tokens + len(request) > self._most_tokens:
                break
            if not self.pages.admit(request, len(request) + 1 + self._ahead):
                break
            tokens += len(request) - request.cached
            admitted.append(self.waiting.popleft())
            self.running.append(request)
        return admitted

    def grow(self, lacking: Mapping[Request, int]) -> tuple[dict[Request, list[int]], list[Request]]:
        """Find as many pages as requests lack; return the new pages by request, and the requests preempted for them."""
        grown, preempted = defaultdict[Request, list[int]](list), list[Request]()
        for request in [request for request in self.running if lacking[request]]:
            while request.pages and len(grown[request]) < lacking[request]:
                if self.pages.free:
                    grown[request].append(self.pages.append(request))
                else:
                    preempted.append(self._preempt())
                    grown.pop(preempted[-1], None)
        return grown, preempted

    def _preempt(self) -> Request:
        """Send the newest request back to the queue, where it is the first. Its tokens will run as a prompt."""
        request = self.running.pop()
        self.pages.release(request)
        self.waiting.appendleft(request)
        self.preemptions += 1
        return request

    def take(self, tokens: Iterable[tuple[Request, int]]) -> list[Request]:
        """Append tokens that a step made; return the requests that end by them. Their pages are free."""
        ended = []
        for request, token in tokens:
            request.generated.append(token)
            self.pages.publish(request)
            if token in self._eos or len(request.generated) == request.limit:
                self.running.remove(request)
                self.pages.release(request)
                ended.append(request)
        return ended
