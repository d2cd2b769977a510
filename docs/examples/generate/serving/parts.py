"""The parts of a run: what each rank brings to the report, which every rank makes and the first one prints."""

from collections.abc import Sequence

import attrs

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
    """What one rank did. comparison: with generate() of the same model; alone: with that of the whole model."""

    requests: Sequence[Request]
    served: Served
    comparison: Comparison
    alone: Comparison | None
    reference_seconds: float

    @property
    def light(self) -> "Part":
        """Without logits, which have been compared."""
        return attrs.evolve(self, requests=[attrs.evolve(request, logits=[]) for request in self.requests])


def run_of(options: Options, world: World, language: Language, mine: Part) -> Run:
    """The whole run, the same in every rank: requests of all ranks in their order, or one share that stands for all."""
    parts = world.gathered(mine.light)
    counted = parts if world.data_parallel else parts[:1]
    return Run(
        options=options,
        language=language,
        requests=sorted((request for part in counted for request in part.requests), key=lambda one: one.number),
        served=[part.served for part in counted],
        comparison=Comparison.together([part.comparison for part in counted]),
        reference_seconds=max(part.reference_seconds for part in counted),
        ranks=_ranks(world, parts) if world.size > 1 else None,
    )


def _ranks(world: World, parts: Sequence[Part]) -> RanksUse:
    texts = [[request.generated for request in part.requests] for part in parts]
    return RanksUse(
        way=world.way,
        size=world.size,
        requests=[len(part.requests) for part in parts],
        differing=[rank for rank, made in enumerate(texts) if world.tensor_parallel and made != texts[0]],
        alone=parts[0].alone,
    )
