"""What counts as equal: how far the logits of two right computations lie apart in the model's dtype."""

from collections.abc import Sequence

import attrs
import torch

from serving.forcing import forced_logits
from serving.model import Language
from serving.options import Options
from serving.reference import Answer
from serving.request import Request

EXACT = "float32"
FLOAT32_TOLERANCE = 1e-3
MARGIN = 2
TIES = 2
ULPS = 4
TOGETHER = 8


@attrs.frozen(kw_only=True)
class Bounds:
    """How far a request may be from the reference.

    logits: the largest difference of a logit that counts as equal. tie: how much less than its best token the reference
    may like the one that was chosen, which is a near-tie then; 0 where the token must be the same.
    noise: the largest difference of a logit of the reference from itself in another batch, None if not measured.
    """

    logits: float
    tie: float = 0.0
    noise: float | None = None


def bounds_for(options: Options, language: Language, requests: Sequence[Request], answers: Sequence[Answer]) -> Bounds:
    """The bounds of the options' dtype.

    With float32 the token must be the same. Lower precisions round so coarsely that the best of two nearly equal logits
    depends on the shape of the batch, in the reference too. Where no logit is off by more than x, a chosen token is at
    most 2 x below the reference's best: it was not below that in the engine's own logits. So x is all that is needed,
    and the reference says it: MARGIN times its difference from itself, at least a few units in the last place.
    """
    if options.dtype == EXACT:
        return Bounds(logits=FLOAT32_TOLERANCE if options.tolerance is None else options.tolerance)
    noise = noise_of(language, requests, answers)
    largest = max(float(answer.logits.abs().max()) for answer in answers)
    measured = max(MARGIN * noise, ULPS * torch.finfo(options.torch_dtype).eps * largest)
    logits = measured if options.tolerance is None else options.tolerance
    return Bounds(logits=logits, tie=TIES * logits, noise=noise)


def noise_of(language: Language, requests: Sequence[Request], answers: Sequence[Answer]) -> float:
    """The largest difference of a logit among three ways in which the reference reads generate()'s own texts.

    Token by token, as generate() does it; each text at once; and TOGETHER texts at once.
    """
    texts = [(request.prompt_ids, answer.tokens) for request, answer in zip(requests, answers, strict=True)]
    stepwise = [answer.logits for answer in answers]
    alone, among_others = forced_logits(language, texts), forced_logits(language, texts, TOGETHER)
    ways = ((stepwise, alone), (stepwise, among_others), (alone, among_others))
    return max(float((left - right).abs().max()) for way in ways for left, right in zip(*way, strict=True))
