"""Requests: prompts shorter and longer than the window, each with pages in both pools."""

import math

import attrs

from serving.model import Tokens
from serving.options import PROMPTS
from serving.request import Request, arrivals
from windows.pools import PAGE


@attrs.define(eq=False, kw_only=True)
class WindowRequest(Request):
    """A request with pages of the window pool too, used in turns. ring: which they are."""

    ring: list[int] = attrs.field(factory=list)

    def place(self, position: int) -> int:
        """Where in the window pool the keys and values of the token at `position` go."""
        return self.ring[position // PAGE % len(self.ring)] * PAGE + position % PAGE

    def place_of_prompt(self, position: int) -> int:
        """The same for a token of the prompt; nobody's place, 0, where it is out of every window to come."""
        newest = len(self.prompt_ids) - 1
        first = (newest // PAGE - len(self.ring) + 1) * PAGE
        return self.place(position) if position >= first else 0


def make_requests(count: int, limit: int, tokens: Tokens, seed: int) -> list[WindowRequest]:
    """Requests over the demo's prompts, which arrive over time; every third is cut to a few tokens."""
    lines = [line for line in PROMPTS.read_text(encoding="utf-8").splitlines() if line.strip()]
    texts = [lines[number % len(lines)][: 6 if number % 3 == 1 else None] for number in range(count)]
    steps = arrivals(count, 2.0, seed)
    return [
        WindowRequest(number=number, prompt=text, prompt_ids=tokens.encode(text), arrival=step, limit=limit)
        for number, (text, step) in enumerate(zip(texts, steps, strict=True))
    ]


def pages_of(requests: list[WindowRequest]) -> list[int]:
    """Pages that each request needs of the pool for layers that see all, the most first."""
    return sorted((math.ceil(request.longest / PAGE) for request in requests), reverse=True)
