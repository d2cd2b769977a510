"""What the engines of a run did, as plain records that travel between ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from serving.engine import Engine, Work
from serving.report import BucketUse, MemoryUse
from slotgraph import EagerRunner
from slotgraph.runners.statistics import CaptureReport


@attrs.frozen(eq=False, kw_only=True)
class Served:
    """One engine after its run.

    counted: live rows of decode steps, as the device counted them. counted_all: of all ranks, where these are known.
    decode, prompts: the runners' statistics. captured, captured_prompts: what their captures came to.
    """

    backend: str
    work: Work
    counted: int
    counted_all: int
    decode: Mapping[str, Any]
    captured: CaptureReport
    prompts: Mapping[str, Any]
    captured_prompts: CaptureReport | None
    kv_cache: int

    @classmethod
    def by(cls, engine: Engine, captured: CaptureReport) -> "Served":
        """What an engine has to tell. captured: of its decode steps."""
        runner = engine.prefill
        return cls(
            backend=engine.decode.stage.backend.name,
            work=engine.work,
            counted=int(engine.steps.counted),
            counted_all=int(engine.steps.counted_all),
            decode=dict(engine.decode.stats()),
            captured=captured,
            prompts=dict(runner.stats()),
            captured_prompts=None if isinstance(runner, EagerRunner) else runner.report,
            kv_cache=engine.steps.cache.nbytes,
        )


def buckets_of(stats: Sequence[Mapping[str, Any]]) -> list[BucketUse]:
    """What several runners did with each of their buckets, in all."""
    uses = [one["buckets"] for one in stats]
    buckets = sorted({bucket for use in uses for bucket in use})
    return [_bucket(bucket, [use[bucket] for use in uses if bucket in use]) for bucket in buckets]


def waste_of(buckets: Sequence[BucketUse]) -> float:
    """The share of all replayed rows that were padding."""
    return 1 - sum(use.live for use in buckets) / max(1, sum(use.padded for use in buckets)) if buckets else 0.0


def memory_of(served: Sequence[Served]) -> MemoryUse:
    """Bytes of all decode runners, and of all caches."""
    accounts = [one.captured.memory for one in served]
    return MemoryUse(
        inputs=sum(account.inputs for account in accounts),
        graphs=sum(account.graphs for account in accounts),
        outputs=sum(account.outputs for account in accounts),
        kv_cache=sum(one.kv_cache for one in served),
    )


def _bucket(bucket: int, uses: Sequence[Mapping[str, Any]]) -> BucketUse:
    steps, live, padded = (sum(use[name] for use in uses) for name in ("steps", "live", "padded"))
    waste = 1 - live / padded if padded else 0.0
    return BucketUse(bucket=bucket, path=uses[0]["path"], steps=steps, live=live, padded=padded, waste=waste)
