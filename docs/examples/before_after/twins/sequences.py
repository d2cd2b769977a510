"""Sequences: a prompt that arrives at some step, all that becomes of it, and what a step needs of several of them."""

import math
import random
from collections.abc import Sequence as Several
from itertools import accumulate

import attrs
import torch

from twins.model import VOCABULARY

LONGEST_PROMPT = 40
MEAN_GAP = 1.5


@attrs.define(eq=False, kw_only=True)
class Sequence:
    """One text on its way through the engine.

    arrival: the engine step from which it may be admitted. pages: what it owns of the cache, in order.
    tokens: the prompt, then what was generated. logits: a row on the host for each generated token.
    """

    number: int
    arrival: int
    prompt_length: int
    limit: int
    tokens: list[int]
    pages: list[int] = attrs.field(factory=list)
    logits: list[torch.Tensor] = attrs.field(factory=list, repr=False)

    def pages_needed(self, page_size: int) -> int:
        """Pages for the text at its longest: the last token's keys and values are never read."""
        return math.ceil((self.prompt_length + self.limit - 1) / page_size)

    def place(self, position: int, page_size: int) -> int:
        """Where in the cache the keys and values of the token at `position` go."""
        return self.pages[position // page_size] * page_size + position % page_size

    @property
    def generated(self) -> list[int]:
        """The tokens that were made so far."""
        return self.tokens[self.prompt_length :]

    @property
    def finished(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.generated) == self.limit


def make_sequences(count: int, limit: int, seed: int) -> list[Sequence]:
    """Prompts of random tokens and lengths, which arrive over time and want `limit` tokens or somewhat fewer."""
    chance = random.Random(seed)
    sequences: list[Sequence] = []
    now = 0.0
    for number in range(count):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, LONGEST_PROMPT))]
        wanted = chance.randint((limit + 1) // 2, limit)
        one = Sequence(number=number, arrival=int(now), prompt_length=len(prompt), limit=wanted, tokens=prompt)
        sequences.append(one)
        now += chance.expovariate(1 / MEAN_GAP)
    return sequences


def prefill_numbers(sequences: Several[Sequence], page_size: int) -> dict[str, list[int]]:
    """What a prefill step needs, as plain numbers: all prompts behind one another, with no padding between them."""
    tokens = [(row, position) for row, one in enumerate(sequences) for position in range(one.prompt_length)]
    return {
        "input_ids": [sequences[row].tokens[position] for row, position in tokens],
        "positions": [position for _, position in tokens],
        "slot_mapping": [sequences[row].place(position, page_size) for row, position in tokens],
        "sequence_rows": [row for row, _ in tokens],
        "last_rows": [end - 1 for end in accumulate(one.prompt_length for one in sequences)],
    }


def decode_numbers(sequences: Several[Sequence], page_size: int) -> dict[str, list[int] | list[list[int]]]:
    """What a decode step needs, as plain numbers: block tables are as wide as the longest of these texts needs."""
    newest = [len(one.tokens) - 1 for one in sequences]
    width = max(len(one.pages) for one in sequences)
    return {
        "input_ids": [one.tokens[-1] for one in sequences],
        "positions": newest,
        "slot_mapping": [one.place(at, page_size) for one, at in zip(sequences, newest, strict=True)],
        "context_lens": [len(one.tokens) for one in sequences],
        "block_tables": [one.pages + [0] * (width - len(one.pages)) for one in sequences],
    }
