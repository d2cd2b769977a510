"""The summary: what the engines, their runners and the comparison have to say, put into one report."""

from collections.abc import Sequence

import attrs

from serving.batched import Batched
from serving.comparison import Comparison
from serving.engine import Work
from serving.model import Language
from serving.options import Options
from serving.report import FillTime, PrefillUse, RanksUse, Report, TextMade
from serving.request import Request
from serving.served import Served, buckets_of, memory_of, waste_of


@attrs.frozen(eq=False, kw_only=True)
class Run:
    """A run that is over, and what it came to.

    requests: all that were served. served: by which engines. reference_seconds: what generate() took for all prompts.
    batched: what transformers' own continuous batching came to. ranks: how it was shared out, None where it was not.
    """

    options: Options
    language: Language
    requests: Sequence[Request]
    served: Sequence[Served]
    comparison: Comparison
    reference_seconds: float
    batched: Batched
    ranks: RanksUse | None


def summarise(run: Run) -> Report:
    """The report of a run."""
    stats = [one.decode for one in run.served]
    work = Work.together([one.work for one in run.served])
    buckets = buckets_of(stats)
    tokens = sum(len(request.generated) for request in run.requests)
    return Report(
        model=run.language.name,
        parameters=run.language.parameters,
        backend=run.served[0].backend,
        dtype=run.options.dtype,
        requests=len(run.requests),
        steps=work.steps,
        prefill=_prefill(run, work),
        decode_steps=work.decodes,
        eager_steps=sum(one["steps"]["eager"] for one in stats),
        decoded=work.decoded,
        counted=sum(one.counted for one in run.served),
        tokens=tokens,
        tokens_per_second=tokens / work.seconds,
        reference_tokens_per_second=run.comparison.tokens / run.reference_seconds,
        batched=run.batched,
        capture_seconds=max(one.captured.seconds for one in run.served),
        padding_waste=waste_of(buckets),
        buckets=buckets,
        fill=FillTime.of(work.fills),
        memory=memory_of(run.served),
        comparison=run.comparison,
        texts=[_text(request, run.language) for request in run.requests],
        ranks=run.ranks,
    )


def _prefill(run: Run, work: Work) -> PrefillUse:
    prefills, buckets = work.prefills, buckets_of([one.prompts for one in run.served])
    captured = [one.captured_prompts for one in run.served if one.captured_prompts is not None]
    return PrefillUse(
        asked=run.options.prefill,
        steps=prefills.steps,
        paths=dict(prefills.by_path),
        reasons=dict(prefills.reasons),
        tokens=prefills.tokens,
        most=prefills.most,
        share=sum(one.work.prefills.seconds for one in run.served) / sum(one.work.seconds for one in run.served),
        capture_seconds=max((report.seconds for report in captured), default=0.0),
        padding_waste=waste_of(buckets),
        buckets=buckets,
        memory=sum(report.memory.total for report in captured),
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
