"""The comparison: what counts as equal, every token and logit against the reference, and the first that differs."""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch

from serving.model import Language
from serving.options import Options
from serving.reference import Answer, answer_to, forced_logits, reference_answers
from serving.request import Request
from serving.sampling import GREEDY, Sampler

FLOAT32_TOLERANCE = 1e-3
MARGIN, TIES, ULPS, TOGETHER = 2, 2, 4, 8


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
    if options.dtype == "float32":
        return Bounds(logits=FLOAT32_TOLERANCE if options.tolerance is None else options.tolerance)
    texts = [(request.prompt_ids, answer.tokens) for request, answer in zip(requests, answers, strict=True)]
    stepwise = [answer.logits for answer in answers]
    alone, among_others = forced_logits(language, texts), forced_logits(language, texts, TOGETHER)
    ways = ((stepwise, alone), (stepwise, among_others), (alone, among_others))
    noise = max(float((left - right).abs().max()) for way in ways for left, right in zip(*way, strict=True))
    largest = max(float(logits.abs().max()) for logits in stepwise)
    measured = max(MARGIN * noise, ULPS * torch.finfo(options.torch_dtype).eps * largest)
    logits = measured if options.tolerance is None else options.tolerance
    return Bounds(logits=logits, tie=TIES * logits, noise=noise)


@attrs.frozen(kw_only=True)
class Difference:
    """A place where a request goes another way than the reference.

    token: index among the request's generated tokens. step: the engine step that made it, None where none did.
    expected, got: token ids, None where that side's text had ended.
    logits: largest absolute difference of the logits that chose this token. gap: by how much the reference prefers its
    token to the one that was chosen. near_tie: another token although all logits are within the tolerance.
    """

    request: int
    token: int
    step: int | None
    expected: int | None
    got: int | None
    logits: float
    gap: float
    near_tie: bool

    def __str__(self) -> str:
        """One line: where, what, and by how much."""
        tie = " (a near-tie)" if self.near_tie else ""
        tokens = f"expected {self.expected}, got {self.got}"
        if self.expected == self.got:
            tokens = f"both {self.got}, by other logits"
        return (
            f"request {self.request}, generated token {self.token}, engine step {self.step}: {tokens}; "
            f"logits differ by {self.logits:.3g}; the reference prefers its token by {self.gap:.3g}{tie}"
        )


@attrs.frozen(kw_only=True)
class Comparison:
    """All requests against the reference.

    tokens: how many were compared. ties: near-ties among them, which count as equal; the others are the same outright.
    gap: by how much the reference preferred another token, at most, in a near-tie. apart: requests with a difference.
    bounds: what counts as equal. spread: the standard deviation of all logits, beside which to judge the bounds.
    largest: the largest difference of a logit, up to each request's first wrong token. difference: the earliest one,
    None where all is equal.
    """

    tokens: int
    ties: int
    gap: float
    apart: int
    bounds: Bounds
    spread: float
    largest: float
    difference: Difference | None

    @classmethod
    def together(cls, parts: "Sequence[Comparison]") -> "Comparison":
        """Of several ranks' requests within the same bounds; spread: the mean square of theirs, by their tokens."""
        tokens = sum(part.tokens for part in parts)
        return cls(
            tokens=tokens,
            ties=sum(part.ties for part in parts),
            gap=max(part.gap for part in parts),
            apart=sum(part.apart for part in parts),
            bounds=parts[0].bounds,
            spread=math.sqrt(sum(part.tokens * part.spread**2 for part in parts) / tokens),
            largest=max(part.largest for part in parts),
            difference=_earliest(part.difference for part in parts if part.difference is not None),
        )


def compare(
    requests: Sequence[Request], answers: Sequence[Answer], bounds: Bounds, sampler: Sampler = GREEDY
) -> Comparison:
    """Every token must be the same, or tie where the bounds have room for that, and every logit be within them."""
    pairs = zip(requests, answers, strict=True)
    gaps, largest, differences = zip(*(_compare(*pair, bounds, sampler) for pair in pairs), strict=True)
    ties = torch.cat(gaps)
    found = [difference for difference in differences if difference is not None]
    return Comparison(
        tokens=sum(len(answer.tokens) for answer in answers),
        ties=len(ties),
        gap=float(ties.max()) if len(ties) else 0.0,
        apart=len(found),
        bounds=bounds,
        spread=float(torch.cat([answer.logits for answer in answers]).std()),
        largest=max(largest),
        difference=_earliest(found),
    )


def _compare(
    request: Request, answer: Answer, bounds: Bounds, sampler: Sampler
) -> tuple[torch.Tensor, float, Difference | None]:
    """The gaps of the near-ties, the largest difference of a logit (infinite for nan), and the first difference.

    Texts are compared for as long as both go on after the same tokens, or after ties: up to the first wrong token.
    Another token is a tie where the bounds allow any, the logits are within them, and the sampler makes this token of
    the request's own logits.
    """
    count = min(len(request.generated), len(answer.tokens))
    chosen, logits = torch.tensor(request.generated[:count]), answer.logits[:count]
    gaps = logits.amax(dim=1) - logits.gather(1, chosen[:, None])[:, 0]
    others = chosen != torch.tensor(answer.tokens[:count])
    mine = torch.stack(request.logits[:count])
    apart = (mine - logits).abs().amax(dim=1).nan_to_num(nan=math.inf)
    own = chosen == torch.tensor(sampler.choices(mine, request.number, len(request.prompt_ids)))
    beyond = others & ~(own & (apart <= bounds.logits)) if bounds.tie else others
    wrong = next(iter(beyond.nonzero().flatten().tolist()), count)
    ties, apart = gaps[:wrong][others[:wrong]], apart[: wrong + 1]
    place = min([wrong, *(apart > bounds.logits).nonzero().flatten().tolist()])
    if place >= max(len(request.generated), len(answer.tokens)):
        return ties, float(apart.max()), None
    off = float(apart[place]) if place < count else math.inf
    difference = Difference(
        request=request.number,
        token=place,
        step=_at(request.steps, place),
        expected=_at(answer.tokens, place),
        got=_at(request.generated, place),
        logits=off,
        gap=float(gaps[place]) if place < count else math.nan,
        near_tie=off <= bounds.logits,
    )
    return ties, float(apart.max()), difference


def _earliest(differences: Iterable[Difference]) -> Difference | None:
    """The one that an engine step made first, if there is any."""
    return min(differences, key=lambda found: math.inf if found.step is None else found.step, default=None)


def _at(numbers: Sequence[int], place: int) -> int | None:
    return numbers[place] if place < len(numbers) else None


@attrs.frozen(eq=False)
class Judge:
    """A model, its answer to each prompt alone, how far a request may be from it, and what the answers took."""

    language: Language
    answers: Sequence[Answer]
    bounds: Bounds
    seconds: float
    sampler: Sampler

    @classmethod
    def asked(cls, options: Options, language: Language, requests: Sequence[Request], watch: Any) -> "Judge":
        """The reference comes first: whatever the engine might do to the weights does not reach it."""
        begin, sampler = time.perf_counter(), options.sampler
        answers = list(watch(reference_answers(language, requests, sampler)))
        seconds = time.perf_counter() - begin
        return cls(language, answers, bounds_for(options, language, requests, answers), seconds, sampler)

    def beside(self, other: "Judge") -> "Judge":
        """For requests of a model that sums in another order: near-ties, and the bounds of both."""
        bounds, more = self.bounds, other.bounds
        logits = bounds.logits if bounds.noise is None else bounds.logits + more.logits
        noise = None if bounds.noise is None or more.noise is None else max(bounds.noise, more.noise)
        return attrs.evolve(self, bounds=Bounds(logits=logits, tie=TIES * logits, noise=noise))

    def compare(self, requests: Sequence[Request]) -> Comparison:
        """Compare with generate(), and after a near-tie with what the reference makes of the request's own text."""
        answers = self.answers
        if self.bounds.tie:
            pairs = zip(requests, answers, strict=True)
            answers = [answer_to(self.language, request, answer, self.sampler) for request, answer in pairs]
        return compare(requests, answers, self.bounds, self.sampler)
