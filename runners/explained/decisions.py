"""Decisions: what a runner's books count, with each reason told in a sentence."""

from typing import Final

from ..decision import Why
from ..filltimes import FillTimesData
from ..statistics import Statistics
from .records import Decisions, FillTime, Reason, Use

MEANINGS: Final[dict[Why, str]] = {
    "fits": "a bucket fits",
    "too_large": "the batch is larger than the largest bucket",
    "waste": "the bucket would be more padding than max_waste allows",
    "not_captured": "the bucket was not captured",
    "absent": "no graph was captured for batches without these slots",
    "field_differs": "a field has another value than graphs were captured with",
    "width_differs": "requests have another number of tokens than graphs were captured for",
    "disabled": "graphs are switched off",
    "always_eager": "an eager runner captures nothing",
}


def decisions_of(stats: Statistics) -> Decisions:
    """The books' counts but for those of buckets."""
    meanings = {str(why): meaning for why, meaning in MEANINGS.items()}
    times = stats["fills"]["eager"]
    return Decisions(
        paths=dict(stats["steps"]),
        reasons=tuple(
            Reason(
                why=why,
                meaning=meanings.get(why, why),
                steps=counts["steps"],
                live=counts["live"],
                time=_time(times.get(why)),
            )
            for why, counts in stats["eager"].items()
        ),
        lowerings=dict(stats["lowerings"]),
        detours=dict(stats["detours"]),
        every=stats["fills"]["every"],
    )


def use_of(stats: Statistics, rows: int) -> Use | None:
    """What the books say of one bucket; None where nothing went there yet."""
    counts = stats["buckets"].get(rows)
    if counts is None:
        return None
    return Use(
        steps=counts["steps"],
        live=counts["live"],
        padded=counts["padded"],
        waste=float(counts["waste"]),
        time=_time(stats["fills"]["buckets"].get(rows)),
    )


def _time(data: FillTimesData | None) -> FillTime | None:
    """What fills took; None where none was timed."""
    if data is None or data["mean"] is None or data["p50"] is None or data["p90"] is None or data["p99"] is None:
        return None
    return FillTime(count=data["count"], mean=data["mean"], p50=data["p50"], p90=data["p90"], p99=data["p99"])
