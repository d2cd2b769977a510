"""Prompt lookup (Saxena, 2023): a draft without a model, out of the text so far."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Final

import torch

LONGEST: Final = 3
"""Tokens at a text's end that are looked for, at most."""


def lookup(text: Sequence[int], count: int) -> list[int]:
    """The `count` tokens after the newest earlier place where most of the text's last tokens stand, over again if few.

    text: two tokens or more. Where none of them stands earlier, the newest one is repeated.
    """

    def equal(end: int) -> int:
        sizes = range(min(LONGEST, end), 0, -1)
        return next((size for size in sizes if text[end - size : end] == text[-size:]), 0)

    best = max(range(1, len(text)), key=lambda end: (equal(end), end))
    return list(islice(cycle(text[best:]), count))


def lookup_on_device(texts: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
    """The same for many texts, [texts, count], given [texts, places] and how many tokens each has, [texts].

    It may be part of a captured step. A text of one token is repeated.
    """
    ends = torch.arange(texts.shape[1], device=texts.device)
    equal, sizes = torch.ones_like(texts, dtype=torch.bool), torch.zeros_like(texts)
    for size in range(1, LONGEST + 1):
        own = texts.gather(1, (lengths[:, None] - size).clamp(min=0))
        equal = equal & (texts.roll(size, 1) == own) & (ends >= size)
        sizes = sizes + equal.int()
    found = (sizes * texts.shape[1] + ends).masked_fill((ends < 1) | (ends >= lengths[:, None]), -1)
    best = found.argmax(1, keepdim=True)
    return texts.gather(1, best + torch.arange(count, device=texts.device) % (lengths[:, None] - best))
