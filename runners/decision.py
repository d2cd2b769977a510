"""Decisions: which path a batch takes and why, and how often each was taken."""

import collections
from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs
import structlog

_LOG: Final = structlog.get_logger("slotgraph")
Path = Literal["graph", "piecewise", "breakable", "eager"]
Why = Literal[
    "fits",
    "too_large",
    "waste",
    "not_captured",
    "absent",
    "field_differs",
    "width_differs",
    "disabled",
    "always_eager",
]


@attrs.frozen
class Decision:
    """The path of one batch: one with its bucket, or `eager`, with the reason in one word and in one sentence."""

    path: Path
    bucket: int | None
    why: Why
    reason: str


@attrs.define
class Counts:
    """Steps, and their live rows."""

    steps: int = 0
    live: int = 0

    def add(self, rows: int, times: int = 1) -> None:
        """Count a step of `rows` live rows, or several."""
        self.steps += times
        self.live += rows * times


class Tally:
    """Counts decisions as they are carried out.

    path: the one that batches take which fit a bucket. buckets: steps by bucket. reasons: eager runs by reason.
    """

    def __init__(self, path: Path = "graph") -> None:
        self.path = path
        self.buckets: dict[int, Counts] = collections.defaultdict(Counts)
        self.reasons: dict[Why, Counts] = collections.defaultdict(Counts)

    def replayed(self, bucket: int, rows: int, times: int = 1) -> None:
        """A replay of `rows` live rows in a bucket, or several."""
        self.buckets[bucket].add(rows, times)

    def fell_back(self, decision: Decision, rows: int) -> bool:
        """An eager run of `rows` live rows in a graph's place; whether it is the first for its reason."""
        first = decision.why not in self.reasons
        self.reasons[decision.why].add(rows)
        return first

    def note_fallback(self, decision: Decision, rows: int, runner: str) -> None:
        """The same, with one warning the first time that a reason leads to it."""
        if self.fell_back(decision, rows):
            _LOG.warning("fallback", runner=runner, why=decision.why, reason=decision.reason)

    def as_data(self) -> Mapping[str, Any]:
        """Plain data.

        steps: by path. buckets: path, steps, live and padded rows, and waste of each. eager: steps and live rows by the
        reason that led to them.
        """
        buckets = {size: self._bucket(size, counts) for size, counts in sorted(self.buckets.items())}
        eager = {why: attrs.asdict(counts) for why, counts in sorted(self.reasons.items())}
        steps = {self.path: _steps(self.buckets), "eager": _steps(self.reasons)}
        return {"steps": steps, "buckets": buckets, "eager": eager}

    def _bucket(self, size: int, counts: Counts) -> dict[str, Any]:
        """One bucket's counts; waste is the share of padded rows that were padding."""
        padded = size * counts.steps
        waste = (padded - counts.live) / padded if padded else 0.0
        return {"path": self.path, "steps": counts.steps, "live": counts.live, "padded": padded, "waste": waste}


def _steps(counts: Mapping[Any, Counts]) -> int:
    return sum(one.steps for one in counts.values())
