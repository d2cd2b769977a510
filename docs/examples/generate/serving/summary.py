"""The summary: what the engine, its runners and the comparison have to say, put into one report."""

from collections.abc import Sequence

import attrs

from serving.comparison import Comparison
from serving.engine import Engine
from serving.model import Language
from serving.options import Options
from serving.report import BucketUse, FillTime, MemoryUse, Report, TextMade
from serving.request import Request
from slotgraph.runners.capture import CaptureReport


@attrs.frozen(eq=False)
class Run:
    """A run that is over, and what it came to. reference_seconds: what generate() took for all prompts."""

    options: Options
    language: Language
    requests: Sequence[Request]
    engine: Engine
    captured: CaptureReport
    comparison: Comparison
    reference_seconds: float


def summarise(run: Run) -> Report:
    """The report of a run."""
    stats, work = run.engine.decode.stats(), run.engine.work
    buckets = [BucketUse(bucket=bucket, **use) for bucket, use in stats["buckets"].items()]
    tokens = sum(len(request.generated) for request in run.requests)
    return Report(
        model=run.language.name,
        parameters=run.language.parameters,
        backend=run.engine.decode.stage.backend.name,
        dtype=run.options.dtype,
        requests=len(run.requests),
        steps=work.steps,
        prefill_steps=work.prefill_steps,
        decode_steps=len(work.fills),
        eager_steps=stats["steps"]["eager"],
        decoded=work.decoded,
        counted=int(run.engine.steps.counted),
        tokens=tokens,
        tokens_per_second=tokens / work.seconds,
        reference_tokens_per_second=run.comparison.tokens / run.reference_seconds,
        capture_seconds=run.captured.seconds,
        padding_waste=1 - sum(use.live for use in buckets) / max(1, sum(use.padded for use in buckets)),
        buckets=buckets,
        fill=FillTime.of(work.fills),
        memory=_memory(run.engine, run.captured),
        comparison=run.comparison,
        texts=[_text(request, run.language) for request in run.requests],
    )


def _memory(engine: Engine, captured: CaptureReport) -> MemoryUse:
    account = captured.memory
    return MemoryUse(
        inputs=account.inputs, graphs=account.graphs, outputs=account.outputs, kv_cache=engine.steps.cache.nbytes
    )


def _text(request: Request, language: Language) -> TextMade:
    return TextMade(
        request=request.number,
        arrived=request.arrival,
        began=request.steps[0],
        ended=request.steps[-1],
        prompt=request.prompt,
        prompt_tokens=len(request.prompt_ids),
        tokens=request.generated,
        text=language.tokens.decode(request.generated),
    )
