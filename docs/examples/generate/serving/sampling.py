"""Choosing tokens: the largest logit, or a seeded draw that generate() can repeat."""

from collections.abc import Sequence
from typing import Final

import attrs
import torch

from serving.request import Request


@attrs.frozen
class Sampler:
    """Chooses the next token of a request from its logits.

    A draw adds Gumbel noise to the logits and takes the largest sum: it samples from their softmax. The noise depends
    on the seed, the request and the token's place alone, so a request gets the same text in any batch.

    temperature: what logits are divided by; 0 takes the largest logit. top_p: tokens are drawn from the fewest whose
    probabilities sum to at least this.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def scores(self, logits: torch.Tensor, request: Request, place: int) -> torch.Tensor:
        """What the largest of is the token at a place of a text, [vocabulary] float32 on the host, as logits are."""
        if not self.temperature:
            return logits
        scores = logits / self.temperature
        if self.top_p < 1:
            shares, order = scores.softmax(-1).sort(descending=True)
            beyond = order[shares.cumsum(-1) - shares >= self.top_p]
            scores = scores.index_fill(-1, beyond, float("-inf"))
        noise = torch.Generator().manual_seed(hash((self.seed, request.number, place)))
        return scores - torch.empty_like(scores).exponential_(generator=noise).log()

    def choices(self, logits: torch.Tensor, request: Request) -> list[int]:
        """The sampler's token for each place of a text. logits: [tokens, vocabulary] float32 on the host."""
        return [int(self.scores(row, request, place).argmax()) for place, row in enumerate(logits)]

    def choose(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """The next token of each request. logits: [requests, vocabulary] float32, on any device."""
        if not self.temperature:
            return logits.argmax(dim=-1).tolist()
        rows = zip(logits.cpu(), requests, strict=True)
        return [int(self.scores(row, request, len(request.generated)).argmax()) for row, request in rows]


GREEDY: Final = Sampler()
"""Takes the largest logit."""
