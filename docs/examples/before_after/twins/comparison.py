"""The comparison: both runners' tokens, logits and caches byte by byte, and both against whole texts read at once."""

from collections.abc import Sequence as Several
from typing import Final

import attrs
import torch

from twins.attention import PrefillAttention
from twins.model import Model
from twins.sequences import Sequence

TOLERANCE: Final = 1e-3
"""The largest difference from a text read at once that counts as equal in float32; about 0.00005 is seen."""


@attrs.frozen
class Served:
    """What one runner made of the sequences. cache: its pages at the end, the dummy left out."""

    sequences: Several[Sequence]
    cache: torch.Tensor
    steps: int

    @property
    def tokens(self) -> int:
        """How many were generated."""
        return sum(len(one.generated) for one in self.sequences)


@attrs.frozen
class Comparison:
    """Both runners beside each other. unequal: where they first differ, or None.

    off: the largest difference of a logit, by either runner, from its text read at once without any cache.
    """

    unequal: str | None
    off: float

    @property
    def passed(self) -> bool:
        """Whether both are the same, and right."""
        return self.unequal is None and self.off <= TOLERANCE


def compare(model: Model, before: Served, after: Served) -> Comparison:
    """All bytes must be the same; and since two runners may share a mistake, both are held to the model alone."""
    pairs = list(zip(before.sequences, after.sequences, strict=True))
    unequal = next((said for pair in pairs if (said := _difference(*pair))), None)
    if unequal is None and not _same_bytes(before.cache, after.cache):
        unequal = "the caches, although all tokens and logits are the same"
    return Comparison(unequal, max(_off(model, one) for pair in pairs for one in pair))


def _difference(one: Sequence, other: Sequence) -> str | None:
    """Where two runs of one text first go different ways."""
    for place, (token, twin) in enumerate(zip(one.generated, other.generated, strict=True)):
        logits, others = one.logits[place], other.logits[place]
        if token != twin or not _same_bytes(logits, others):
            apart = float((logits - others).abs().max())
            tokens = f"before {token}, after {twin}"
            return f"sequence {one.number}, generated token {place}: {tokens}; logits differ by {apart:.3g}"
    return None


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """As they lie in memory: nan equals itself, and zeros of either sign differ."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@torch.no_grad()
def _off(model: Model, one: Sequence) -> float:
    """By how much the logits of a sequence differ from those of its whole text, read in one pass."""
    text = torch.tensor(one.tokens[:-1], device=model.rope.device)
    positions = torch.arange(len(text), device=text.device)
    attention = PrefillAttention(model.new_cache(1, len(text)), positions, positions, torch.zeros_like(positions))
    logits = model.logits(model(text, positions, attention)[one.prompt_length - 1 :])
    return float((logits.cpu() - torch.stack(one.logits)).abs().max().nan_to_num(nan=torch.inf))
