"""The report: what one run showed."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from speculating.engine import Engine
from speculating.options import Options
from speculating.request import SpeculativeRequest

_BAR: Final = 40
_WORDS: Final = 44


def lines(
    options: Options, engine: Engine, name: str, requests: Sequence[SpeculativeRequest], alone: float
) -> Iterator[str]:
    """A line for each thing that is worth to know. name: of the target; alone: seconds that generate() took."""
    topk, depth = options.tree
    tokens = sum(len(request.generated) for request in requests)
    distinct = len({token for request in requests for token in request.generated})
    draft = "a smaller model" if engine.draft is not None else "prompt lookup"
    yield f"model            {name}, its draft is {draft}"
    yield f"backend          {engine.backend.name}"
    yield f"tree             {topk} wide, {depth} deep; {options.draft_tokens} nodes are verified"
    yield f"requests         {len(requests)}, in {engine.cycles} cycles"
    speeds = f"{tokens / engine.seconds:.0f} tokens/s, generate() one at a time {tokens / alone:.0f}"
    yield f"tokens           {tokens}, {distinct} different ones; {speeds}"
    yield f"launches         {engine.launches} of captured steps, {engine.launches / engine.cycles:.2f} a cycle"
    for step, timed in engine.runners.items():
        steps = timed.runner.stats()["steps"]
        yield f"{step:<16} {steps['graph']} steps from graphs, {steps['eager']} eagerly"
    yield from _acceptance(requests)
    if options.time:
        yield from _times(engine)


def _acceptance(requests: Sequence[SpeculativeRequest]) -> Iterator[str]:
    """Acceptance lengths: tokens that a request won in one verify, the target's own among them."""
    gains = [gain for request in requests for gain in request.gains]
    yield f"acceptance       {_mean(gains):.2f} tokens a verify, over {len(gains)} trees"
    counts = Counter(gains)
    for length in range(1, max(gains, default=0) + 1):
        share = counts[length] / len(gains)
        yield f"  length {length:<8} {counts[length]:>4} {'#' * round(_BAR * share)}"
    for request in requests:
        text = " ".join(request.prompt.split())
        short = text if len(text) <= _WORDS else f"{text[:_WORDS]} ..."
        yield f"  {_mean(request.gains):<15.2f} {len(request.generated):>4} tokens: {short}"


def _mean(gains: Sequence[int]) -> float:
    return statistics.fmean(gains) if gains else 0.0


def _times(engine: Engine) -> Iterator[str]:
    """What the fills took on the host, in the median; the first of each kind of batch binds what later ones reuse."""
    medians = {name: 1e6 * statistics.median(timed.fills) for name, timed in engine.runners.items() if timed.fills}
    parts = ", ".join(f"{name} {took:.1f}" for name, took in medians.items())
    yield f"inputs           {sum(medians.values()):.1f} us of the host's time a cycle: {parts}"
