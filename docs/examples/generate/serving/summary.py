"""The summary: what the engine, its runners and the comparison have to say, put into one report."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from serving.comparison import Comparison
from serving.engine import Engine
from serving.model import Language
from serving.options import Options
from serving.prefill import Runner
from serving.report import BucketUse, FillTime, MemoryUse, PrefillUse, Report, TextMade
from serving.request import Request
from slotgraph import EagerRunner
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
    buckets = _buckets(stats)
    tokens = sum(len(request.generated) for request in run.requests)
    return Report(
        model=run.language.name,
        parameters=run.language.parameters,
        backend=run.engine.decode.stage.backend.name,
        dtype=run.options.dtype,
        requests=len(run.requests),
        steps=work.steps,
        prefill=_prefill(run),
        decode_steps=len(work.fills),
        eager_steps=stats["steps"]["eager"],
        decoded=work.decoded,
        counted=int(run.engine.steps.counted),
        tokens=tokens,
        tokens_per_second=tokens / work.seconds,
        reference_tokens_per_second=run.comparison.tokens / run.reference_seconds,
        capture_seconds=run.captured.seconds,
        padding_waste=_waste(buckets),
        buckets=buckets,
        fill=FillTime.of(work.fills),
        memory=_memory(run.engine, run.captured),
        comparison=run.comparison,
        texts=[_text(request, run.language) for request in run.requests],
    )


def _prefill(run: Run) -> PrefillUse:
    runner, work = run.engine.prefill, run.engine.work
    prefills, buckets, captured = work.prefills, _buckets(runner.stats()), _captured(runner)
    return PrefillUse(
        asked=run.options.prefill,
        steps=prefills.steps,
        paths=dict(prefills.by_path),
        reasons=dict(prefills.reasons),
        tokens=prefills.tokens,
        most=prefills.most,
        share=prefills.seconds / work.seconds,
        capture_seconds=captured.seconds if captured else 0.0,
        padding_waste=_waste(buckets),
        buckets=buckets,
        memory=captured.memory.total if captured else 0,
    )


def _captured(runner: Runner) -> CaptureReport | None:
    return None if isinstance(runner, EagerRunner) else runner.report


def _buckets(stats: Mapping[str, Any]) -> list[BucketUse]:
    return [BucketUse(bucket=bucket, **use) for bucket, use in stats["buckets"].items()]


def _waste(buckets: Sequence[BucketUse]) -> float:
    """The share of all replayed rows that were padding."""
    return 1 - sum(use.live for use in buckets) / max(1, sum(use.padded for use in buckets)) if buckets else 0.0


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
