"""Ranks as an explanation tells of them: which one this is, how they agree, and what they agreed on last."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from ...dataflow.compute import RANKS
from ..coordination import RanksData
from ..decision import Decision
from ..parts import Parts
from ..ranks.group import HOST, Ranks
from .decisions import MEANINGS
from .records import DecisionFacts, Forced, RankFacts

Row: TypeAlias = Mapping[str, Any]


def rank_facts(parts: Parts[Any]) -> RankFacts | None:
    """Those of a runner; None of one that has none."""
    ranks: Ranks | None = parts.stage.declaration.ranks
    if ranks is None:
        return None
    slots, agreed = parts.stage.declaration.slots, parts.coordinator.agreed
    asked = [name for name, slot in slots.items() if (one := slot.computes()) is not None and RANKS in one.needs]
    return RankFacts(
        rank=ranks.rank,
        size=ranks.size,
        on=None if ranks.quiet else ranks.on,
        equal=ranks.equal,
        shards=ranks.shards,
        asked=tuple(asked),
        exchanges=ranks.exchanges,
        agreed=None if agreed is None else _told(agreed),
        forced=tuple(_forced(parts.coordinator.as_data())),
    )


def decision_facts(parts: Parts[Any], decision: Decision) -> DecisionFacts:
    """What a runner would do by itself with a batch."""
    ranks: Ranks | None = parts.stage.declaration.ranks
    return _told(decision, alone=ranks is not None and not ranks.quiet)


def decision_text(one: DecisionFacts) -> str:
    """A decision in one line."""
    path = one.path if one.bucket is None else f"{one.path}, bucket {one.bucket}"
    forced = "" if one.rank is None else f", forced by rank {one.rank}"
    alone = "; what this rank would do alone: the others were not asked" if one.alone else ""
    return f"{path}{forced}: {one.reason}{alone}"


def rank_rows(ranks: RankFacts) -> list[Row]:
    """What there is to say of ranks, a line each."""
    rows = [("rank", f"{ranks.rank} of {ranks.size}"), ("exchange", _exchange(ranks))]
    rows += [("exchanges so far", f"{ranks.exchanges:,}")]
    rows += [("shards of a bucket's tokens", f"{ranks.shards}")] if ranks.shards > 1 else []
    rows += [("asked for by slots", ", ".join(ranks.asked))] if ranks.asked else []
    rows += [("agreed on last", decision_text(ranks.agreed))] if ranks.agreed else []
    return [{"ranks": what, "": told} for what, told in rows]


def forced_rows(ranks: RankFacts | None) -> list[Row]:
    """Steps by the rank that forced them, and why."""
    meanings = {str(why): meaning for why, meaning in MEANINGS.items()}
    forced = () if ranks is None else ranks.forced
    return [
        {"forced by": f"rank {one.rank}", "why": one.why, "steps": one.steps, "that is": meanings.get(one.why, one.why)}
        for one in forced
    ]


def _exchange(ranks: RankFacts) -> str:
    if ranks.on is not None:
        return "before each step, " + ("in host memory" if ranks.on == HOST else f"on {ranks.on}")
    return "none: there is one rank" if ranks.size == 1 else "none before a step: all get the same batches"


def _forced(ranks: RanksData) -> Iterator[Forced]:
    for rank, reasons in ranks["forced"].items():
        for why, steps in reasons.items():
            yield Forced(rank=rank, why=why, steps=steps)


def _told(one: Decision, *, alone: bool = False) -> DecisionFacts:
    return DecisionFacts(path=one.path, bucket=one.bucket, why=one.why, reason=one.reason, rank=one.rank, alone=alone)
