"""The parts of a run: what each rank brings to the report, which every rank makes and the first one prints."""

from collections import Counter
from collections.abc import Sequence

import attrs

from serving.batched import Batched
from serving.comparison import Comparison
from serving.model import Language
from serving.options import Options
from serving.ranks import World
from serving.report import RanksUse
from serving.request import Request
from serving.served import Served
from serving.summary import Run


@attrs.frozen(eq=False, kw_only=True)
class Part:
    """What one rank did.

    comparison: with generate() of the same model, None where the rank has no logits; alone: with that of the whole one.
    """

    requests: Sequence[Request]
    served: Served
    comparison: Comparison | None
    alone: Comparison | None
    reference_seconds: float
    batched: Batched

    @property
    def light(self) -> "Part":
        """Without logits, which have been compared."""
        return attrs.evolve(self, requests=[attrs.evolve(request, logits=[]) for request in self.requests])


def run_of(options: Options, world: World, language: Language, mine: Part) -> Run:
    """The whole run, the same in every rank: requests of all ranks in their order, or one share that stands for all."""
    parts = world.gathered(mine.light)
    counted = parts if world.data_parallel else parts[-1:] if world.pipeline_parallel else parts[:1]
    return Run(
        options=options,
        language=language,
        requests=sorted((request for part in counted for request in part.requests), key=lambda one: one.number),
        served=[part.served for part in counted],
        comparison=Comparison.together([part.comparison for part in counted if part.comparison is not None]),
        reference_seconds=max(part.reference_seconds for part in counted),
        batched=mine.batched,
        ranks=_ranks(world, parts) if world.size > 1 else None,
    )


def _ranks(world: World, parts: Sequence[Part]) -> RanksUse:
    texts = [[request.generated for request in part.requests] for part in parts]
    return RanksUse(
        way=world.way,
        size=world.size,
        requests=[len(part.requests) for part in parts],
        differing=[rank for rank, made in enumerate(texts) if made != texts[0] and not world.data_parallel],
        alone=parts[0].alone,
        counted=[part.served.counted_all for part in parts] if world.data_parallel else [],
        forced=_forced(parts[0].served),
    )


def _forced(one: Served) -> dict[int, int]:
    """Steps by the rank that forced the path of all; none where ranks agree on nothing."""
    forced: Counter[int] = Counter()
    for stats in (one.prompts, one.decode):
        books = stats["ranks"] or {"forced": {}}
        forced.update({rank: sum(why.values()) for rank, why in books["forced"].items()})
    return dict(sorted(forced.items()))
