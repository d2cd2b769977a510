"""Requests: a prompt that arrives at some step, and all that becomes of it."""

import random
from collections.abc import Sequence

import attrs
import torch

from states.models import VOCABULARY

LONGEST_PROMPT = 40
MEAN_GAP = 1.5


@attrs.define(eq=False, kw_only=True)
class Request:
    """One prompt on its way through the engine.

    arrival: the engine step from which it may be admitted. row: its row of the pools while it runs.
    logits: a row on the host for each generated token.
    """

    number: int
    prompt: Sequence[int]
    arrival: int
    limit: int
    row: int | None = None
    generated: list[int] = attrs.field(factory=list)
    logits: list[torch.Tensor] = attrs.field(factory=list, repr=False)

    @property
    def seq_len(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self.prompt) + len(self.generated)

    @property
    def longest(self) -> int:
        """The most positions that attention keeps of it: the last token needs none."""
        return len(self.prompt) + self.limit - 1

    @property
    def finished(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.generated) == self.limit

    def add(self, token: int, logits: torch.Tensor) -> None:
        """Append a token, with the logits that chose it."""
        self.generated.append(token)
        self.logits.append(logits)


def make_requests(count: int, limit: int, seed: int) -> list[Request]:
    """Prompts of random tokens and lengths, which arrive over time and want `limit` tokens or somewhat fewer."""
    chance = random.Random(seed)  # noqa: S311 - reproducible requests, no secret
    requests: list[Request] = []
    now = 0.0
    for number in range(count):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, LONGEST_PROMPT))]
        wanted = chance.randint((limit + 1) // 2, limit)
        requests.append(Request(number=number, prompt=prompt, arrival=int(now), limit=wanted))
        now += chance.expovariate(1 / MEAN_GAP)
    return requests
