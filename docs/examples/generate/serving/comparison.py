"""The comparison: every token and every logit of the engine against the reference, and the first that differs."""

import math
from collections.abc import Iterable, Iterator, Sequence

import attrs
import torch

from serving.bounds import Bounds
from serving.reference import Answer
from serving.request import Request
from serving.sampling import Sampler


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
            difference=earliest(part.difference for part in parts if part.difference is not None),
        )


@attrs.frozen(eq=False)
class _Held:
    """One request beside its answer, token by token, up to the first wrong one.

    others: whether it is another token. gaps: by how much the reference prefers its own. apart: largest difference of a
    logit, infinite for nan. wrong: the place of the first token that is no tie either, or of the shorter text's end.
    """

    request: Request
    answer: Answer
    others: torch.Tensor
    gaps: torch.Tensor
    apart: torch.Tensor
    wrong: int

    @classmethod
    def of(cls, request: Request, answer: Answer, bounds: Bounds, sampler: Sampler) -> "_Held":
        """Texts are compared for as long as both go on after the same tokens, or after ties.

        Another token is a tie where the bounds allow any, the logits are within them, and the sampler makes this token
        of the request's own logits.
        """
        count = min(len(request.generated), len(answer.tokens))
        chosen, logits = torch.tensor(request.generated[:count]), answer.logits[:count]
        gaps = logits.amax(dim=1) - logits.gather(1, chosen[:, None])[:, 0]
        others = chosen != torch.tensor(answer.tokens[:count])
        mine = torch.stack(request.logits[:count])
        apart = (mine - logits).abs().amax(dim=1).nan_to_num(nan=math.inf)
        own = chosen == torch.tensor(sampler.choices(mine, request))
        beyond = others & ~(own & (apart <= bounds.logits)) if bounds.tie else others
        wrong = next(iter(beyond.nonzero().flatten().tolist()), count)
        return cls(request, answer, others, gaps, apart[: wrong + 1], wrong)

    @property
    def ties(self) -> torch.Tensor:
        """The gaps of the near-ties."""
        return self.gaps[: self.wrong][self.others[: self.wrong]]

    def difference(self, bounds: Bounds) -> Iterator[Difference]:
        """The request's first difference, if there is one."""
        off = (self.apart > bounds.logits).nonzero().flatten().tolist()
        place = min([self.wrong, *off])
        if place < max(len(self.request.generated), len(self.answer.tokens)):
            yield self._difference_at(place, bounds)

    def _difference_at(self, place: int, bounds: Bounds) -> Difference:
        logits = float(self.apart[place]) if place < len(self.apart) else math.inf
        return Difference(
            request=self.request.number,
            token=place,
            step=_at(self.request.steps, place),
            expected=_at(self.answer.tokens, place),
            got=_at(self.request.generated, place),
            logits=logits,
            gap=float(self.gaps[place]) if place < len(self.gaps) else math.nan,
            near_tie=logits <= bounds.logits,
        )


def compare(requests: Sequence[Request], answers: Sequence[Answer], bounds: Bounds, sampler: Sampler) -> Comparison:
    """Every token must be the same, or tie where the bounds have room for that, and every logit be within them."""
    held = [_Held.of(request, answer, bounds, sampler) for request, answer in zip(requests, answers, strict=True)]
    differences = [difference for one in held for difference in one.difference(bounds)]
    ties = torch.cat([one.ties for one in held])
    return Comparison(
        tokens=sum(len(answer.tokens) for answer in answers),
        ties=len(ties),
        gap=float(ties.max()) if len(ties) else 0.0,
        apart=len(differences),
        bounds=bounds,
        spread=float(torch.cat([answer.logits for answer in answers]).std()),
        largest=max(float(one.apart.max()) for one in held),
        difference=earliest(differences),
    )


def earliest(differences: Iterable[Difference]) -> Difference | None:
    """The one that an engine step made first, if there is any."""
    return min(differences, key=lambda found: math.inf if found.step is None else found.step, default=None)


def _at(numbers: Sequence[int], place: int) -> int | None:
    return numbers[place] if place < len(numbers) else None
