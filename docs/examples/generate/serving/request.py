"""Requests: a prompt that arrives at some step, and all that becomes of it."""

import math
import random

import attrs
import torch


@attrs.define(eq=False, kw_only=True)
class Request:
    """One prompt on its way through the engine.

    arrival: the engine step from which it may be admitted. pages: what it owns of the KV cache, in order.
    logits: a float32 row on the host for each generated token, none where another process made them. steps: the engine
    step that made each token.
    """

    number: int
    prompt: str
    prompt_ids: list[int]
    arrival: int
    limit: int
    generated: list[int] = attrs.field(factory=list)
    logits: list[torch.Tensor] = attrs.field(factory=list, repr=False)
    steps: list[int] = attrs.field(factory=list)
    pages: list[int] = attrs.field(factory=list)

    @property
    def seq_len(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self.prompt_ids) + len(self.generated)

    @property
    def longest(self) -> int:
        """The most tokens whose keys and values the cache must hold: the last one generated needs none."""
        return len(self.prompt_ids) + self.limit - 1

    def pages_needed(self, page_size: int) -> int:
        """Pages for the request at its longest."""
        return math.ceil(self.longest / page_size)

    def location(self, position: int, page_size: int) -> int:
        """Where in the cache the keys and values of the token at `position` go."""
        return self.pages[position // page_size] * page_size + position % page_size

    def add(self, token: int, logits: torch.Tensor | None, step: int) -> None:
        """Append a token that a step made, with the logits that chose it."""
        self.generated.append(token)
        if logits is not None:
            self.logits.append(logits)
        self.steps.append(step)

    def finished(self, eos: frozenset[int]) -> bool:
        """Whether it has all its tokens, or ended its text."""
        return len(self.generated) == self.limit or (bool(self.generated) and self.generated[-1] in eos)


def arrivals(count: int, mean_gap: float, seed: int) -> list[int]:
    """Steps at which `count` requests arrive, the first at step 0, with gaps of that mean: half of them none at all."""
    chance = random.Random(seed)  # noqa: S311 - a reproducible schedule, no secret
    steps: list[int] = []
    now = 0.0
    for _ in range(count):
        steps.append(int(now))
        now += chance.choice((0, 2)) * mean_gap * chance.expovariate(1)
    return steps
