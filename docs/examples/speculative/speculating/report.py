"""The report: what one run showed."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from speculating.engine import Engine
from speculating.options import Options
from speculating.request import Request

_BAR: Final = 40


def lines(options: Options, engine: Engine, requests: Sequence[Request], difference: str | None) -> Iterator[str]:
    """A line for each thing that is worth to know."""
    target, draft = (one.model.config.num_hidden_layers for one in (engine.steps.target, engine.steps.draft))
    tokens = sum(len(request.generated) for request in requests)
    distinct = len({token for request in requests for token in request.generated})
    yield f"models           seeded Llamas, a target of {target} layers and a draft of {draft}"
    yield f"backend          {engine.draft.stage.backend.name}"
    yield f"tree             {options.topk} wide, {options.steps} deep; {options.draft_tokens} nodes are verified"
    yield f"requests         {len(requests)}, in {engine.cycles} cycles"
    yield f"tokens           {tokens}, {distinct} different ones; {tokens / engine.seconds:.0f} tokens/s"
    for name, stats in (("draft", engine.draft), ("verify", engine.verify), ("extend", engine.extend)):
        steps = stats.stats()["steps"]
        yield f"{name:<16} {steps['graph']} steps from graphs, {steps['eager']} eagerly"
    yield from _acceptance(requests)
    if options.time:
        yield from _times(engine)
    if difference is None:
        yield "equality         every token is the one that generate() chose"
    else:
        yield f"DIFFERENT from generate(): {difference}"


def _acceptance(requests: Sequence[Request]) -> Iterator[str]:
    """Acceptance lengths: tokens that a request won in one verify, the target's own among them."""
    gains = [gain for request in requests for gain in request.gains]
    mean = statistics.fmean(gains) if gains else 0.0
    yield f"acceptance       {mean:.2f} tokens a verify, over {len(gains)} trees"
    counts = Counter(gains)
    for length in range(1, max(gains, default=0) + 1):
        share = counts[length] / len(gains)
        yield f"  length {length:<8} {counts[length]:>4} {'#' * round(_BAR * share)}"


def _times(engine: Engine) -> Iterator[str]:
    """What the fills took on the host, in the median; the first of each live size prepares what later ones reuse."""
    medians = {name: 1e6 * statistics.median(times) for name, times in engine.fills.items() if times}
    parts = ", ".join(f"{name} {took:.1f}" for name, took in medians.items())
    yield f"inputs           {sum(medians.values()):.1f} us of the host's time a cycle: {parts}"
