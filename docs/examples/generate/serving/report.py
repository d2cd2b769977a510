"""The report: what one run showed, as plain records that go to JSON as they are."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import attrs
import cattrs

from serving.batched import Batched
from serving.comparison import Comparison
from serving.measuring import Measured
from serving.prefill_times import PrefillTimes


@attrs.frozen(kw_only=True)
class BucketUse:
    """How often one bucket was replayed, and how; waste: the share of its rows that were padding."""

    bucket: int
    path: str
    steps: int
    live: int
    padded: int
    waste: float


@attrs.frozen(kw_only=True)
class PrefillUse:
    """The prefill steps.

    asked: the path that was asked for. paths: steps by the path that they took. reasons: why steps ran eagerly, by the
    reason's word. tokens: of all prompts. most: requests in one step. share: of the time of all steps. buckets: of
    tokens. memory: bytes of input buffers, graphs and outputs; 0 without graphs.
    """

    asked: str
    steps: int
    paths: dict[str, int]
    reasons: dict[str, str]
    tokens: int
    most: int
    share: float
    capture_seconds: float
    padding_waste: float
    buckets: list[BucketUse]
    memory: int


@attrs.frozen(kw_only=True)
class FillTime:
    """Host time of the fill of one decode step, in microseconds."""

    fills: int
    median_us: float
    p99_us: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "FillTime":
        """Median and 99th percentile; zeros where nothing was filled."""
        ranked = sorted(seconds) or [0.0]
        last = ranked[math.ceil(0.99 * len(ranked)) - 1]
        return cls(fills=len(seconds), median_us=1e6 * statistics.median(ranked), p99_us=1e6 * last)


@attrs.frozen(kw_only=True)
class MemoryUse:
    """Bytes of the decode runner's input buffers, graphs and outputs, and of the KV cache."""

    inputs: int
    graphs: int
    outputs: int
    kv_cache: int


@attrs.frozen(kw_only=True)
class TextMade:
    """One request and its text. arrived, began, ended: engine steps; what lies between the first two is waiting."""

    request: int
    arrived: int
    began: int
    ended: int
    prompt: str
    prompt_tokens: int
    tokens: list[int]
    text: str


@attrs.frozen(kw_only=True)
class RanksUse:
    """How a run was shared out among processes.

    way: "tp", "dp" or "pp". requests: of each rank. differing: ranks that made other tokens than rank 0 of the same
    requests. alone: with tensor parallelism what all came to beside one process with the whole model; the report's
    comparison is with the same shares run eagerly. counted: with data parallelism all ranks' decoded tokens, as each
    rank's device counted them inside the step. forced: steps by the rank that forced the bucket of all.
    """

    way: str
    size: int
    requests: list[int]
    differing: list[int]
    alone: Comparison | None
    counted: list[int] = attrs.field(factory=list)
    forced: dict[int, int] = attrs.field(factory=dict)

    @property
    def passed(self) -> bool:
        """Whether all ranks agree, with one another and with one process."""
        return not self.differing and (self.alone is None or self.alone.difference is None)


@attrs.frozen(kw_only=True)
class Report:
    """One run of the demo.

    decoded, counted: live tokens of all decode steps, counted by the host and by the device inside the step.
    eager_steps: decode steps that no bucket could take. reference_tokens_per_second: transformers' own, one prompt at a
    time. batched: its continuous batching. measured, prefill_times: what decode and prefill steps take, None where they
    were not timed. ranks: None where there was one process; with data parallelism all else is of all ranks, with tensor
    parallelism of rank 0, with pipeline parallelism of the last one.
    """

    model: str
    parameters: int
    backend: str
    dtype: str
    requests: int
    steps: int
    prefill: PrefillUse
    decode_steps: int
    eager_steps: int
    decoded: int
    counted: int
    tokens: int
    tokens_per_second: float
    reference_tokens_per_second: float
    batched: Batched
    capture_seconds: float
    padding_waste: float
    buckets: list[BucketUse]
    fill: FillTime
    memory: MemoryUse
    comparison: Comparison
    texts: list[TextMade]
    ranks: RanksUse | None = None
    measured: Measured | None = None
    prefill_times: PrefillTimes | None = None

    @property
    def passed(self) -> bool:
        """Whether all tokens and logits count as equal to the reference, and the device counted what the host did."""
        equal = self.comparison.difference is None and self.miscounted is None
        return equal and (self.ranks is None or self.ranks.passed)

    @property
    def miscounted(self) -> int | None:
        """A count of the decoded tokens that is wrong, of this rank's tokens or of all ranks'; None where none is."""
        counts = [self.counted, *(self.ranks.counted if self.ranks is not None else ())]
        return next((count for count in counts if count != self.decoded), None)


def write_json(report: Report, path: Path) -> None:
    """The report and whether it passed; a number that is not finite becomes null."""
    converter = cattrs.Converter()
    converter.register_unstructure_hook(float, lambda number: number if math.isfinite(number) else None)
    content = {"passed": report.passed, **converter.unstructure(report)}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
