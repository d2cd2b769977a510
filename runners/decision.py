"""Decisions: which path a batch takes and why, and how often each was taken."""

import collections
from collections.abc import Mapping
from typing import Any, Literal

import attrs

Path = Literal["graph", "eager"]
Why = Literal["fits", "too_large", "waste", "not_captured", "absent", "field_differs", "always_eager"]


@attrs.frozen
class Decision:
    """The path of one batch: `graph` with its bucket, or `eager`, with the reason in one word and in one sentence."""

    path: Path
    bucket: int | None
    why: Why
    reason: str


@attrs.define
class Counts:
    """Steps of one bucket, and their live and padded rows."""

    steps: int = 0
    live: int = 0
    padded: int = 0

    @property
    def waste(self) -> float:
        """The share of padded rows that were padding."""
        return (self.padded - self.live) / self.padded if self.padded else 0.0


class Tally:
    """Counts decisions as they are carried out."""

    def __init__(self) -> None:
        self.buckets: dict[int, Counts] = collections.defaultdict(Counts)
        self.reasons: dict[tuple[Path, Why], int] = collections.Counter()

    def replayed(self, bucket: int, rows: int, times: int = 1) -> None:
        """A replay of `rows` live rows in a bucket, or several."""
        counts = self.buckets[bucket]
        counts.steps += times
        counts.live += rows * times
        counts.padded += bucket * times

    def fell_back(self, decision: Decision) -> bool:
        """An eager run in a graph's place; whether it is the first for its reason."""
        key = (decision.path, decision.why)
        self.reasons[key] += 1
        return self.reasons[key] == 1

    def as_data(self) -> Mapping[str, Any]:
        """Plain data: per bucket steps, live and padded rows and waste; and how often each reason led to eager runs."""
        buckets = {
            size: {"steps": c.steps, "live": c.live, "padded": c.padded, "waste": c.waste}
            for size, c in sorted(self.buckets.items())
        }
        eager = {why: count for (_, why), count in sorted(self.reasons.items())}
        steps = {"graph": sum(c.steps for c in self.buckets.values()), "eager": sum(eager.values())}
        return {"steps": steps, "buckets": buckets, "eager": eager}
