"""The comparison: every token and every logit against what transformers' own generate() makes of each prompt alone."""

from collections.abc import Sequence
from typing import Any, Final

import attrs
import torch
from transformers import GenerationConfig, PreTrainedModel

from states.requests import Request

TOLERANCE: Final = 1e-3
"""The largest difference of a logit that counts as equal in float32; about 0.0004 is seen."""


@attrs.frozen(eq=False)
class Answer:
    """What generate() said: its tokens, and a row of logits for each of them, [tokens, vocabulary]."""

    tokens: list[int]
    logits: torch.Tensor


@attrs.frozen
class Comparison:
    """All requests against their answers.

    tokens: how many were made. distinct: different ones among them, since a model that repeats one would prove nothing.
    largest: the largest difference of a logit. difference: the first one that is too large, if any.
    """

    tokens: int
    distinct: int
    largest: float
    difference: str | None


def ask(model: PreTrainedModel, request: Request) -> Answer:
    """Greedy generate() of one prompt alone."""
    ids = torch.tensor([request.prompt], device=model.device)
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=request.limit,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    generate: Any = model.generate
    output = generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return Answer(output.sequences[0, ids.shape[1] :].tolist(), torch.cat(output.logits).float().cpu())


def compare(requests: Sequence[Request], answers: Sequence[Answer]) -> Comparison:
    """Tokens must be the same, and logits within the tolerance."""
    pairs = list(zip(requests, answers, strict=True))
    apart = [(torch.stack(request.logits) - answer.logits).abs().amax(dim=1) for request, answer in pairs]
    differences = [said for pair, off in zip(pairs, apart, strict=True) if (said := _difference(*pair, off))]
    return Comparison(
        tokens=sum(len(request.generated) for request in requests),
        distinct=len({token for request in requests for token in request.generated}),
        largest=max(float(off.max()) for off in apart),
        difference=next(iter(differences), None),
    )


def _difference(request: Request, answer: Answer, apart: torch.Tensor) -> str | None:
    """Where a request first goes another way than its answer; what comes after follows from it."""
    for place, (got, expected, off) in enumerate(zip(request.generated, answer.tokens, apart.tolist(), strict=True)):
        if got != expected or not off <= TOLERANCE:
            where = f"request {request.number}, generated token {place}"
            tokens = f"expected {expected}, got {got}" if got != expected else f"both {got}, by other logits"
            gap = float(answer.logits[place, expected] - answer.logits[place, got])
            tie = f" (a near-tie: it prefers its token by {gap:.3g})" if 0 < gap <= 2 * TOLERANCE else ""
            return f"{where}: {tokens}; logits differ by {off:.3g}{tie}"
    return None
