"""The report: what one run showed, as one record that goes to JSON as it is; on a terminal see tables."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace as Part
from typing import Any, TypeAlias

import attrs
import cattrs

from serving.comparison import Comparison
from serving.engine import Engine
from serving.model import Language
from serving.options import Options
from serving.ranks import World
from serving.request import Request
from slotgraph import EagerRunner
from slotgraph.runners.engine.statistics import CaptureReport

Report: TypeAlias = dict[str, Any]


def part_of(engine: Engine, captured: CaptureReport, requests: Sequence[Request], **judged: Any) -> Part:
    """What one rank did, which every rank tells the others; but for logits, which have been compared.

    counts: live rows of decode steps, as the device counted them, of this rank and of all. decode, prompts: the
    runners' statistics; captured: what their captures came to. judged: comparison with generate() of the same model,
    None where the rank has no logits; alone: with that of the whole one; reference_seconds.
    """
    runner = engine.prefill
    return Part(
        requests=[attrs.evolve(request, logits=[]) for request in requests],
        backend=engine.decode.stage.backend.name,
        attention=engine.steps.attention,
        work=engine.work,
        counts=engine.steps.counts.flatten().tolist(),
        decode=dict(engine.decode.stats()),
        captured=captured,
        prompts=dict(runner.stats()),
        captured_prompts=None if isinstance(runner, EagerRunner) else runner.report,
        kv_cache=engine.steps.cache.nbytes,
        **judged,
    )


def summarise(
    options: Options, world: World, language: Language, parts: Sequence[Part], batched: tuple[float | None, str]
) -> Report:
    """The report of all ranks: of data parallelism their sums, else of one whose requests stand for all."""
    shown = parts if world.way == "dp" else parts[-1:] if world.way == "pp" else parts[:1]
    works = [part.work for part in shown]
    requests = sorted((request for part in shown for request in part.requests), key=lambda one: one.number)
    compared = [part.comparison for part in shown if part.comparison is not None]
    comparison = Comparison.together(compared) if compared else None
    tokens = sum(len(request.generated) for request in requests)
    speed = tokens / max(work.seconds for work in works)
    memories = [part.captured.memory for part in shown]
    buckets = _buckets([part.decode for part in shown])
    return {
        "model": language.name,
        "parameters": sum(parameter.numel() for parameter in language.model.parameters()),
        "backend": shown[0].backend,
        "attention": shown[0].attention,  # of decode steps
        "dtype": options.dtype,
        "requests": len(requests),
        "steps": max(work.steps for work in works),
        "prefill": _prefill(options, shown),
        "decode_steps": sum(work.decodes for work in works),
        "ahead": dict(shown[0].decode["ahead"]),  # steps by how they were launched; empty with --sync
        "eager_steps": sum(part.decode["steps"]["eager"] for part in shown),
        "decoded": sum(work.decoded for work in works),  # by the host; counted: by the device, inside the step
        "counted": sum(part.counts[0] for part in shown),
        "tokens": tokens,
        "tokens_per_second": speed,
        "reference_tokens_per_second": comparison and comparison.tokens / max(part.reference_seconds for part in shown),
        "batched": dict(zip(("tokens_per_second", "note"), batched, strict=True)),
        "capture_seconds": max(part.captured.seconds for part in shown),
        "padding_waste": _waste(buckets),
        "buckets": buckets,
        "fill": _fill([seconds for work in works for seconds in work.fills]),
        "memory": {
            **{name: sum(getattr(memory, name) for memory in memories) for name in ("inputs", "graphs", "outputs")},
            "kv_cache": sum(part.kv_cache for part in shown),
        },
        "comparison": comparison,
        "texts": [_text(request, language) for request in requests],
        "ranks": _ranks(world, parts) if world.size > 1 else None,
        "pairs": [] if batched[0] is None else [(speed, batched[0])],  # tokens a second of both, run after run
        "turns": {},  # tokens a second of runs that took turns, by the way of their decode steps
        # of a run that is right: what steps take, and fills by hand and here; what came of forgotten resets
        "measured": None,
        "prefill_times": None,
        "fills": None,
        "forgotten": None,
    }


def passed(report: Report) -> bool:
    """Whether ranks agree, all that was compared is equal to the reference, and devices counted as the host did."""
    ranks = report["ranks"] or {"differing": [], "alone": None}
    comparisons = report["comparison"], ranks["alone"]
    equal = all(comparison is None or comparison.difference is None for comparison in comparisons)
    return equal and not ranks["differing"] and miscounted(report) is None


def miscounted(report: Report) -> int | None:
    """A count of the decoded tokens that is wrong, of this rank's tokens or of all ranks'; None where none is."""
    counts = [report["counted"], *(report["ranks"] or {"counted": []})["counted"]]
    return next((count for count in counts if count != report["decoded"]), None)


def write_json(report: Report, path: Path) -> None:
    """The report and whether it passed; a number that is not finite becomes null."""
    converter = cattrs.Converter()
    converter.register_unstructure_hook(float, lambda number: number if math.isfinite(number) else None)
    content = {"passed": passed(report), **converter.unstructure(report)}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def _prefill(options: Options, shown: Sequence[Part]) -> Report:
    works = [part.work for part in shown]
    buckets = _buckets([part.prompts for part in shown])
    captured = [part.captured_prompts for part in shown if part.captured_prompts is not None]
    decisions = [decision for work in works for decision in work.prefills]
    return {
        "asked": options.prefill,
        "steps": len(decisions),
        "paths": dict(Counter(decision.path for decision in decisions)),
        "reasons": {one.why: one.reason for one in reversed(decisions) if one.path == "eager"},
        "tokens": sum(work.prompt_tokens for work in works),
        "most": max(work.most for work in works),
        "share": sum(work.prefill_seconds for work in works) / sum(work.seconds for work in works),
        "capture_seconds": max((report.seconds for report in captured), default=0.0),
        "padding_waste": _waste(buckets),
        "buckets": buckets,
        "memory": sum(report.memory.total for report in captured),
    }


def _buckets(stats: Sequence[Mapping[str, Any]]) -> list[Report]:
    """How often runners replayed each bucket, and the share of its rows that were padding."""
    found: list[Report] = []
    for bucket in sorted({bucket for one in stats for bucket in one["buckets"]}):
        uses = [one["buckets"][bucket] for one in stats if bucket in one["buckets"]]
        sums = {name: sum(use[name] for use in uses) for name in ("steps", "live", "padded")}
        found.append({"bucket": bucket, "path": uses[0]["path"], **sums, "waste": _waste([sums])})
    return found


def _waste(uses: Sequence[Report]) -> float:
    """The share of all replayed rows that were padding."""
    padded = sum(use["padded"] for use in uses)
    return 1 - sum(use["live"] for use in uses) / padded if padded else 0.0


def _fill(seconds: Sequence[float]) -> Report:
    """Host time of the fill of one decode step; zeros where nothing was filled."""
    ranked = sorted(seconds) or [0.0]
    last = ranked[math.ceil(0.99 * len(ranked)) - 1]
    return {"fills": len(seconds), "median_us": 1e6 * statistics.median(ranked), "p99_us": 1e6 * last}


def _text(request: Request, language: Language) -> Report:
    return {
        "request": request.number,
        "arrived": request.arrival,  # in engine steps; until it began it was waiting
        "began": request.steps[0],
        "ended": request.steps[-1],
        "prompt": request.prompt,
        "prompt_tokens": len(request.prompt_ids),
        "tokens": request.generated,
        "text": language.tokens.decode(request.generated),
    }


def _ranks(world: World, parts: Sequence[Part]) -> Report:
    texts = [[request.generated for request in part.requests] for part in parts]
    forced: Counter[int] = Counter()
    for stats in (parts[0].prompts, parts[0].decode):
        forced.update({rank: sum(why.values()) for rank, why in (stats["ranks"] or {"forced": {}})["forced"].items()})
    return {
        "way": world.way,
        "size": world.size,
        "requests": [len(part.requests) for part in parts],
        "differing": [rank for rank, made in enumerate(texts) if made != texts[0] and world.way != "dp"],
        "alone": parts[0].alone,
        "counted": [part.counts[1] for part in parts] if world.way == "dp" else [],
        "forced": dict(sorted(forced.items())),  # steps by the rank that forced the path of all
    }
