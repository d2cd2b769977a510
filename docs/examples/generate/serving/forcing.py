"""Teacher forcing: what the model itself makes of a text that is given to it, token by token."""

from collections.abc import Sequence

import torch

from serving.model import Language
from serving.reference import Answer
from serving.request import Request
from serving.sampling import Sampler

Text = tuple[Sequence[int], Sequence[int]]
"""A prompt's ids, and the ids of the tokens that follow it."""


@torch.inference_mode()
def forced_logits(language: Language, texts: Sequence[Text], together: int = 1) -> list[torch.Tensor]:
    """The logits for each token of each text after all before it, [tokens, vocabulary] float32 on the host.

    together: how many texts share a run; the shorter ones are padded on the right, which no earlier token sees.
    """
    rows: list[torch.Tensor] = []
    for first in range(0, len(texts), together):
        group = texts[first : first + together]
        logits = language.model(_padded(group, language.model.device), use_cache=False).logits
        for row, (prompt, tokens) in zip(logits, group, strict=True):
            rows.append(row[len(prompt) - 1 :][: len(tokens)].float().cpu())
    return rows


def _padded(texts: Sequence[Text], device: torch.device) -> torch.Tensor:
    """All but each text's last token, after which nothing is asked."""
    ids = [[*prompt, *tokens[:-1]] for prompt, tokens in texts]
    width = max(map(len, ids))
    return torch.tensor([row + [0] * (width - len(row)) for row in ids], device=device)


def answer_to(language: Language, request: Request, alone: Answer, sampler: Sampler) -> Answer:
    """What the reference says of a request's own tokens, each after those before it.

    alone: what generate() made of the prompt. Up to the first other token that is the answer; from there on its text is
    another one, and the model is run over the request's.
    """
    parted = first_other(request.generated, alone.tokens)
    if parted is None:
        return alone
    due = _tokens_due(request, language.eos)
    [forced] = forced_logits(language, [(request.prompt_ids, due)])
    logits = torch.cat([alone.logits[: parted + 1], forced[parted + 1 :]])
    return Answer(sampler.choices(logits, request), logits)


def first_other(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """The first place where both texts have a token and it is not the same; None where one begins the other."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((place for place, (token, other) in pairs if token != other), None)


def _tokens_due(request: Request, eos: frozenset[int]) -> list[int]:
    """The request's tokens as far as it should go: not beyond an end of text, and one more where it stopped short."""
    ends = (place + 1 for place, token in enumerate(request.generated) if token in eos)
    return [*request.generated, 0][: next(ends, request.limit)]
