"""Requests: a prompt that arrives at some step, and all that becomes of it."""

import math
import random
import sys
from pathlib import Path

import attrs
import torch

from serving.model import Language
from serving.options import FOLDER, PROMPTS, RANDOM, Options, OptionsError


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

    def pages_needed(self, page_size: int, more: int = 0) -> int:
        """Pages for the request at its longest, and for so many tokens more."""
        return math.ceil((self.longest + more) / page_size)

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
    chance = random.Random(seed)
    steps: list[int] = []
    now = 0.0
    for _ in range(count):
        steps.append(int(now))
        now += chance.choice((0, 2)) * mean_gap * chance.expovariate(1)
    return steps


def read_requests(options: Options, language: Language) -> list[Request]:
    """A request a line that is not blank; OptionsError where there is none, or one that the model cannot hold."""
    own = str(FOLDER / "texts.txt" if options.model == RANDOM else PROMPTS)
    prompts = [line.rstrip("\r") for line in _lines(options.prompts or own) if line.strip()]
    if not prompts:
        raise OptionsError("no prompts: give at least one line that is not blank")
    steps, limit = arrivals(len(prompts), options.arrival_gap, options.seed), options.max_new_tokens
    requests = [
        Request(number=number, prompt=prompt, prompt_ids=language.tokens.encode(prompt), arrival=step, limit=limit)
        for number, (prompt, step) in enumerate(zip(prompts, steps, strict=True))
    ]
    room = language.model.config.max_position_embeddings
    for request in requests:
        if not request.prompt_ids:
            raise OptionsError(f"prompt {request.number}: the model's tokenizer makes no token of {request.prompt!r}")
        if request.longest > room:
            tokens = f"{len(request.prompt_ids)} tokens and {limit} new ones"
            raise OptionsError(
                f"prompt {request.number}: {tokens} exceed the model's {room} positions: lower --max-new-tokens"
            )
    return requests


def _lines(source: str) -> list[str]:
    if source == "-":
        return sys.stdin.read().split("\n")
    path = Path(source)
    if not path.is_file():
        raise OptionsError(f"--prompts {path}: no such file; give one, or - for standard input")
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise OptionsError(f"--prompts {path}: this is no UTF-8 text: {error}") from error
