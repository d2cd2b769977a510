"""The summary: what the engine, its runners and the comparison have to say, put into one report."""

from collections.abc import Sequence

from serving.comparison import Comparison
from serving.engine import Engine
from serving.model import Language
from serving.options import Options
from serving.report import BucketUse, FillTime, MemoryUse, Report, TextMade
from serving.request import Request
from slotgraph.runners.capture import CaptureReport


def summarise(
    options: Options,
    language: Language,
    engine: Engine,
    requests: Sequence[Request],
    captured: CaptureReport,
    comparison: Comparison,
    reference_seconds: float,
) -> Report:
    """The report of a run that is over."""
    stats, work = engine.decode.stats(), engine.work
    buckets = [BucketUse(bucket=bucket, **use) for bucket, use in stats["buckets"].items()]
    tokens = sum(len(request.generated) for request in requests)
    return Report(
        model=language.name,
        parameters=language.parameters,
        backend=engine.decode.stage.backend.name,
        dtype=options.dtype,
        requests=len(requests),
        steps=work.steps,
        prefill_steps=work.prefill_steps,
        decode_steps=len(work.fills),
        eager_steps=stats["steps"]["eager"],
        decoded=work.decoded,
        counted=int(engine.steps.counted),
        tokens=tokens,
        capture_seconds=captured.seconds,
        tokens_per_second=tokens / work.seconds,
        reference_tokens_per_second=comparison.tokens / reference_seconds,
        padding_waste=1 - sum(use.live for use in buckets) / max(1, sum(use.padded for use in buckets)),
        buckets=buckets,
        fill=FillTime.of(work.fills),
        memory=_memory(engine, captured),
        comparison=comparison,
        texts=[_text(request, language) for request in requests],
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
