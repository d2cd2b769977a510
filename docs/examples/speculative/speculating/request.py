"""Requests: a prompt that arrives at some cycle, and all that becomes of it."""

import random
from pathlib import Path
from typing import Final

import attrs
import torch

from serving.model import Language
from serving.options import RANDOM
from serving.request import Request, arrivals
from speculating.options import Options

PROMPTS: Final = Path(__file__).parents[1] / "prompts.txt"
"""Prompts with a blank line between them, most of whose answers repeat words of theirs."""


@attrs.define(eq=False, kw_only=True)
class SpeculativeRequest(Request):
    """A request whose newest token, the root of the next tree, has no keys and values in the target's cache yet.

    pages: rows of the caches, the root's last. row: its row in the table of places, 0 for none. gains: tokens that it
    won in each verify. shares, tokens: probabilities and ids, [topk] each, of the root's likeliest children by a draft
    model.
    """

    row: int = 0
    gains: list[int] = attrs.field(factory=list)
    shares: torch.Tensor = attrs.field(factory=lambda: torch.empty(0))
    tokens: torch.Tensor = attrs.field(factory=lambda: torch.empty(0))

    @property
    def root(self) -> int:
        """The position of the newest token."""
        return self.seq_len - 1


def make_requests(options: Options, language: Language) -> list[SpeculativeRequest]:
    """The prompts in turns, with limits of their own, of which some arrive together; a seeded model gets their ends."""
    chance, limit = random.Random(options.seed), options.max_new_tokens
    texts = PROMPTS.read_text(encoding="utf-8").strip().split("\n\n")
    requests = []
    for number, arrival in enumerate(arrivals(options.requests, 1.0, options.seed)):
        text = texts[number % len(texts)]
        if options.model == RANDOM:
            text = text[-chance.randint(3, 24) :]
        ids, most = language.tokens.encode(text), chance.randint(max(1, limit // 2), limit)
        requests.append(SpeculativeRequest(number=number, prompt=text, prompt_ids=ids, arrival=arrival, limit=most))
    return requests
