"""What a prefill step takes by its path, beside the same step without graphs."""

import functools
from collections.abc import Sequence

import attrs

from serving.attention import attend_within_requests
from serving.batch import prefill_batch
from serving.cache import PageAllocator
from serving.engine import Engine
from serving.inputs import PrefillInputs
from serving.measuring import asked, is_device, race_of, served
from serving.options import Options
from serving.prefill import Runner
from serving.request import Request
from serving.timing import Contestant, Spread
from slotgraph import EagerRunner

ON_A_CPU = 128
"""Tokens; that it can be measured is all that a CPU shows."""


@attrs.frozen(kw_only=True)
class PrefillTimes:
    """One prefill step of several requests, in microseconds of the host's clock, one step behind another.

    whole: runner(batch), through the graphs of a bucket. eager: the same through an eager runner. ratio: eager beside
    whole, compared round by round.
    """

    path: str
    requests: int
    tokens: int
    bucket: int
    whole: Spread
    eager: Spread
    ratio: Spread


def prefill_times(engine: Engine, options: Options, requests: Sequence[Request]) -> PrefillTimes | None:
    """Time the prefill of as many requests as fit into one step; None where none do, or there is nothing to compare."""
    runner, backend, effort = engine.prefill, engine.decode.stage.backend, asked(engine, options)
    if isinstance(runner, EagerRunner) or not effort.rounds:
        return None
    together = _together(engine, options, requests, options.max_prefill_tokens if is_device(engine) else ON_A_CPU)
    batch = prefill_batch(together, options.page_size, backend.device)
    decision = runner.decide(batch)
    if decision.bucket is None or not together:
        return None
    step = engine.steps.prefill(attend_within_requests)
    other = EagerRunner(runner.stage.inputs, step, backend=backend)
    contestants = [_contestant(engine, one, batch) for one in (other, runner)]
    race = race_of(effort, contestants, backend.synchronize)
    eager, whole = race.run(contestants)
    return PrefillTimes(
        path=decision.path,
        requests=len(together),
        tokens=sum(batch.lengths),
        bucket=decision.bucket,
        whole=Spread.of(whole),
        eager=Spread.of(eager),
        ratio=Spread.of([one / other for one, other in zip(eager, whole, strict=True)]),
    )


def _contestant(engine: Engine, runner: Runner, batch: PrefillInputs) -> Contestant:
    return Contestant(lambda _: runner(batch), functools.partial(served, engine.steps))


def _together(engine: Engine, options: Options, requests: Sequence[Request], room: int) -> list[Request]:
    """Requests of a run that is over whose prompts fit into so many tokens, on pages of their own."""
    allocator = PageAllocator(engine.steps.cache.pages)
    chosen: list[Request] = []
    for request in requests:
        room -= len(request.prompt_ids)
        if room < 0 or len(chosen) == options.max_batch:
            break
        chosen.append(attrs.evolve(request, pages=allocator.take(request.pages_needed(options.page_size))))
    return chosen
