"""Prompt lookup (Saxena, 2023): a draft without a model, out of the text so far."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Final

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
