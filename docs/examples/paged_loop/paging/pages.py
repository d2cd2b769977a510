"""Pages of the KV cache: each is counted by the requests that use it, and found by the hash of what it holds."""

import hashlib
from array import array
from collections import deque
from collections.abc import Sequence

from paging.request import PAGE, Request, pages_for


def hash_page(previous: bytes, ids: Sequence[int]) -> bytes:
    """Return the hash of a full page: of its tokens, and of all pages before it."""
    return hashlib.sha256(previous + array("q", ids).tobytes()).digest()


class Pages:
    """Hands out pages. Requests with the same beginning share its full pages.

    A page that nobody uses is free, and can still be found until it is handed out again. Page 0 belongs to padded rows.

    Attributes:
        free: Pages that nobody uses; the one that was freed first is handed out first.
        users: How many requests use each page.
        shared: How often a page was found, and not computed again.
    """

    def __init__(self, count: int) -> None:
        self.free = deque(range(1, count))
        self.users = [0] * count
        self.shared = 0
        self._page_by_hash: dict[bytes, int] = {}
        self._hash_by_page: dict[int, bytes] = {}

    def find(self, ids: Sequence[int]) -> list[int]:
        """Return the pages that hold the beginning of these tokens. The last token is never among them: it must run."""
        pages, last = list[int](), b""
        for begin in range(0, (len(ids) - 1) // PAGE * PAGE, PAGE):
            last = hash_page(last, ids[begin : begin + PAGE])
            if last not in self._page_by_hash:
                break
            pages.append(self._page_by_hash[last])
        return pages

    def admit(self, request: Request, tokens: int) -> bool:
        """Give a request room for so many tokens, at its beginning in shared pages; or return False."""
        found = self.find(request.ids)
        new = pages_for(tokens) - len(found)
        if new > len(self.free) - sum(self.users[page] == 0 for page in found):
            return False
        for page in found:
            if self.users[page] == 0:
                self.free.remove(page)
            self.users[page] += 1
        request.pages, request.cached, request.hashes = found, len(found) * PAGE, []
        self.shared += len(found)
        for _ in range(new):
            self.append(request)
        self.publish(request)
        return True

    def append(self, request: Request) -> int:
        """Give a request one more page, which must be free, and return it. Its old contents are no longer found."""
        page = self.free.popleft()
        self._page_by_hash.pop(self._hash_by_page.pop(page, b""), None)
        self.users[page] = 1
        request.pages.append(page)
        return page

    def publish(self, request: Request) -> None:
        """Let others find a request's full pages.

        The newest token does not count: the step that stores its keys and values may not be launched yet.
        """
        full = (len(request) - 1) // PAGE
        while (number := len(request.hashes)) < full:
            previous = request.hashes[-1] if request.hashes else b""
            request.hashes.append(hash_page(previous, request.ids[number * PAGE : (number + 1) * PAGE]))
            if request.hashes[-1] not in self._page_by_hash:
                self._page_by_hash[request.hashes[-1]] = request.pages[number]
                self._hash_by_page[request.pages[number]] = request.hashes[-1]

    def release(self, request: Request) -> None:
        """Take a request's pages back; those that nobody else uses are free, its last one first."""
        for page in reversed(request.pages):
            self.users[page] -= 1
            if self.users[page] == 0:
                self.free.append(page)
        request.pages = []
