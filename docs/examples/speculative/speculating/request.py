"""Requests: a prompt that arrives at some cycle, and all that becomes of it."""

import random

import attrs
import torch

from speculating.models import VOCABULARY


@attrs.define(eq=False, kw_only=True)
class Request:
    """One prompt on its way through the engine.

    arrival: the cycle from which it may be admitted. generated: its tokens; the last one, the root of the next tree,
    has no keys and values in the target's cache yet. row: its row in the table of places, 0 for none. places: its rows
    of the caches, the root's last. gains: tokens that it won in each verify. shares, tokens: probabilities and ids,
    [topk] each, of the root's likeliest children.
    """

    number: int
    prompt: list[int]
    arrival: int
    limit: int
    generated: list[int] = attrs.field(factory=list)
    row: int = 0
    places: list[int] = attrs.field(factory=list)
    gains: list[int] = attrs.field(factory=list)
    shares: torch.Tensor = attrs.field(factory=lambda: torch.empty(0))
    tokens: torch.Tensor = attrs.field(factory=lambda: torch.empty(0))

    @property
    def root(self) -> int:
        """The position of the newest token."""
        return len(self.prompt) + len(self.generated) - 1

    @property
    def longest(self) -> int:
        """Prompt and all tokens that it may get."""
        return len(self.prompt) + self.limit

    @property
    def finished(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.generated) >= self.limit


def make_requests(count: int, limit: int, seed: int) -> list[Request]:
    """Random prompts of 3 to 24 tokens, with limits of their own, of which some arrive together and some later."""
    chance = random.Random(seed)  # noqa: S311 - a reproducible schedule, no secret
    requests, now = [], 0
    for number in range(count):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(3, 24))]
        most = chance.randint(max(1, limit // 2), limit)
        requests.append(Request(number=number, prompt=prompt, arrival=now, limit=most))
        now += chance.choice((0, 0, 3))
    return requests
