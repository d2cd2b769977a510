"""Judges: a model that has answered each prompt alone, and what requests that were served are held to."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from serving.bounds import TIES, Bounds, bounds_for
from serving.comparison import Comparison, compare
from serving.forcing import answer_to
from serving.model import Language
from serving.options import Options
from serving.reference import Answer, reference_answers
from serving.request import Request
from serving.sampling import Sampler

Watch = Callable[[Iterator[Answer], int], Iterable[Answer]]
"""What sees so many answers pass, one after another."""


@attrs.frozen(eq=False)
class Judge:
    """A model, its answer to each prompt alone, how far a request may be from it, and what the answers took."""

    language: Language
    answers: Sequence[Answer]
    bounds: Bounds
    seconds: float
    sampler: Sampler

    @classmethod
    def asked(cls, options: Options, language: Language, requests: Sequence[Request], watch: Watch) -> "Judge":
        """The reference comes first: whatever the engine might do to the weights does not reach it."""
        sampler = Sampler.of(options)
        begin = time.perf_counter()
        answers = list(watch(reference_answers(language, requests, sampler), len(requests)))
        seconds = time.perf_counter() - begin
        return cls(language, answers, bounds_for(options, language, requests, answers), seconds, sampler)

    def within(self, others: Iterable[Bounds]) -> "Judge":
        """The same with the widest of its bounds and others."""
        return attrs.evolve(self, bounds=max((self.bounds, *others), key=lambda bounds: bounds.logits))

    def beside(self, other: "Judge") -> "Judge":
        """The same for requests of another model that makes the same sums in another order.

        Rounding then decides between nearly equal logits, so near-ties are allowed; and where bounds are measured, each
        of both may be as far from the right numbers as it is from itself.
        """
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
