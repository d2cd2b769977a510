"""The comparison: every token and every logit of the engine against the reference, and the first that differs."""

import math
from collections.abc import Iterator, Sequence

import attrs
import torch

from serving.reference import Answer
from serving.request import Request


@attrs.frozen(kw_only=True)
class Difference:
    """A place where a request goes another way than the reference.

    token: index among the request's generated tokens. step: the engine step that made it, None where none did.
    expected, got: token ids, None where that side's text had ended.
    logits: largest absolute difference of the logits that chose this token. margin: by how much the reference
    preferred its token to the next best. near_tie: another token although all logits are within the tolerance.
    """

    request: int
    token: int
    step: int | None
    expected: int | None
    got: int | None
    logits: float
    margin: float
    near_tie: bool

    def __str__(self) -> str:
        """One line: where, what, and by how much."""
        tie = " (a near-tie)" if self.near_tie else ""
        tokens = f"expected {self.expected}, got {self.got}"
        if self.expected == self.got:
            tokens = f"both {self.got}, by other logits"
        return (
            f"request {self.request}, generated token {self.token}, engine step {self.step}: {tokens}; "
            f"logits differ by {self.logits:.3g}; generate() chose its token by {self.margin:.3g}{tie}"
        )


@attrs.frozen(kw_only=True)
class Comparison:
    """All requests against the reference.

    tokens: how many were compared. apart: requests whose tokens are not all equal. tolerance: what counts as equal.
    largest: the largest difference of a logit, up to each request's first other token. difference: the earliest one,
    None where all is equal.
    """

    tokens: int
    apart: int
    tolerance: float
    largest: float
    difference: Difference | None


def compare(requests: Sequence[Request], answers: Sequence[Answer], tolerance: float) -> Comparison:
    """Every token must be the same and every logit within `tolerance`."""
    pairs = list(zip(requests, answers, strict=True))
    differences = [difference for pair in pairs for difference in _first_difference(*pair, tolerance)]
    return Comparison(
        tokens=sum(len(answer.tokens) for answer in answers),
        apart=sum(request.generated != answer.tokens for request, answer in pairs),
        tolerance=tolerance,
        largest=max(float(_logits_differences(*pair).max()) for pair in pairs),
        difference=min(differences, key=lambda found: math.inf if found.step is None else found.step, default=None),
    )


def _first_difference(request: Request, answer: Answer, tolerance: float) -> Iterator[Difference]:
    """The request's first difference, if there is one."""
    apart = _logits_differences(request, answer)
    beyond = (apart > tolerance).nonzero().flatten().tolist()
    place = min([_equal_tokens(request, answer), *beyond])
    if place < max(len(request.generated), len(answer.tokens)):
        logits = float(apart[place]) if place < len(apart) else math.inf
        yield _difference_at(place, request, answer, logits, tolerance)


def _difference_at(place: int, request: Request, answer: Answer, logits: float, tolerance: float) -> Difference:
    best = answer.logits[place].topk(2).values if place < len(answer.tokens) else torch.full((2,), math.nan)
    return Difference(
        request=request.number,
        token=place,
        step=_at(request.steps, place),
        expected=_at(answer.tokens, place),
        got=_at(request.generated, place),
        logits=logits,
        margin=float(best[0] - best[1]),
        near_tie=logits <= tolerance,
    )


def _logits_differences(request: Request, answer: Answer) -> torch.Tensor:
    """Largest absolute difference per token, for those that both sides chose after the same text; a nan is infinite."""
    count = min(_equal_tokens(request, answer) + 1, len(request.generated), len(answer.tokens))
    apart = (torch.stack(request.logits[:count]) - answer.logits[:count]).abs().amax(dim=1)
    return apart.nan_to_num(nan=math.inf)


def _equal_tokens(request: Request, answer: Answer) -> int:
    """How many leading tokens are the same."""
    pairs = enumerate(zip(request.generated, answer.tokens, strict=False))
    shorter = min(len(request.generated), len(answer.tokens))
    return next((place for place, (got, expected) in pairs if got != expected), shorter)


def _at(numbers: Sequence[int], place: int) -> int | None:
    return numbers[place] if place < len(numbers) else None
