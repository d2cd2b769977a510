"""Choosing tokens where the logits are: the largest, or a seeded draw that generate() can repeat on another device."""

from typing import Final, NamedTuple, TypeVar

import attrs
import torch

Bits = TypeVar("Bits", int, torch.Tensor)
LOW = 0xFFFFFFFF


class Chosen(NamedTuple):
    """What a step makes for each request.

    next_ids: the next token, [requests] int64. logits: which it was chosen from, [requests, vocabulary] float32; None
    where they stay on the device.
    """

    next_ids: torch.Tensor
    logits: torch.Tensor | None


def mixed(bits: Bits) -> Bits:
    """Bits of which each depends on every bit of a number below 2**32; another number gets others.

    The constants are those of https://github.com/skeeto/hash-prospector. No product is beyond 63 bits, so that int64
    gives the same bits on every device.
    """
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        bits = ((bits ^ (bits >> shift)) * factor) & LOW
    return bits ^ (bits >> 15)


@attrs.frozen
class Sampler:
    """Chooses the next token of each request from its logits, on their device: the decode step calls it.

    A draw adds Gumbel noise to the logits and takes the largest sum: it samples from their softmax. The noise is a hash
    of the seed, the request's number, the token's position and its id, so a request gets the same text in any batch.

    temperature: what logits are divided by; 0 takes the largest logit. top_p: tokens are drawn from the fewest whose
    probabilities sum to at least this.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def choose(self, logits: torch.Tensor, numbers: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The token at a position of each request's text, [rows] int64: where the scores are largest."""
        return self.scores(logits, numbers, positions).argmax(dim=-1)

    def scores(self, logits: torch.Tensor, numbers: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Scores of all tokens, [rows, vocabulary] float32, as logits are.

        numbers: of the requests, [rows] int64. positions: of the tokens to choose, the prompt's counted, [rows] int64.
        """
        if not self.temperature:
            return logits
        scores = logits / self.temperature
        if self.top_p < 1:
            shares, order = scores.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
            beyond = shares.cumsum(dim=-1) - shares >= self.top_p
            scores = scores.masked_fill(beyond.scatter(-1, order, beyond), float("-inf"))
        bits = mixed(mixed(mixed(self.seed & LOW) ^ numbers) ^ positions)[:, None]
        bits = mixed(bits ^ torch.arange(logits.shape[-1], device=logits.device))
        chance = ((bits >> 9).float() + 0.5) / 2**23  # above 0 and below 1: float32 has 24 bits
        return scores - (-chance.log()).log()

    def choices(self, logits: torch.Tensor, number: int, begin: int) -> list[int]:
        """The tokens of a request from a position on, whose logits are [tokens, vocabulary] float32."""
        positions = torch.arange(begin, begin + len(logits), device=logits.device)
        return self.choose(logits, torch.full_like(positions, number), positions).tolist()


GREEDY: Final = Sampler()
