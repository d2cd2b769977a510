"""Requests: a prompt, the tokens that follow it, and the pages that hold its keys and values."""

import attrs

PAGE = 16
"""Tokens in one page of the KV cache."""


def pages_for(seq_lens: int) -> int:
    """Return how many pages hold so many tokens, of a number or of an array of them."""
    return -(-seq_lens // PAGE)


@attrs.define(eq=False, kw_only=True)
class Request:
    """One prompt on its way through the engine.

    Attributes:
        number: Which request it is.
        prompt_ids: The prompt's tokens.
        limit: The most tokens that it gets.
        generated: The tokens that it has got.
        pages: Its pages, in the order of its tokens.
        cached: Tokens at its beginning whose keys and values lay in shared pages when it was admitted.
        hashes: The hash of each of its full pages.
    """

    number: int
    prompt_ids: list[int]
    limit: int
    generated: list[int] = attrs.field(factory=list)
    pages: list[int] = attrs.field(factory=list)
    cached: int = 0
    hashes: list[bytes] = attrs.field(factory=list)

    def __len__(self) -> int:
        """Return the number of its tokens so far."""
        return len(self.prompt_ids) + len(self.generated)

    @property
    def ids(self) -> list[int]:
        """All tokens so far. A request that was preempted runs them as its prompt."""
        return self.prompt_ids + self.generated

    def location(self, position: int) -> int:
        """Return where in the cache the token at a position lies."""
        return self.pages[position // PAGE] * PAGE + position % PAGE
