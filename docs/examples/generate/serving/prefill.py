"""Prefill: the runner of each path that prompts may take, and what has become of its steps."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from serving.attention import as_operator, attend_within_requests, between_graphs
from serving.crew import Crew
from serving.inputs import PrefillInputs
from serving.options import Options
from serving.steps import Steps
from slotgraph import BATCH, TOKENS, BreakableRunner, EagerRunner, PrefillRunner
from slotgraph.runners.statistics import Decision

Runner: TypeAlias = "EagerRunner[PrefillInputs] | BreakableRunner[PrefillInputs] | PrefillRunner[PrefillInputs]"


def prefill_runner(declaration: type[PrefillInputs], steps: Steps, options: Options, crew: Crew) -> Runner:
    """A runner of prompts by the path that the options name. Its graphs are for so many tokens of any requests."""
    sizes, ranks = crew.sizes_of(declaration), crew.among
    if options.prefill == "eager":
        step = steps.prefill(attend_within_requests)
        return EagerRunner(declaration, step, sizes=sizes, backend=options.backend, **ranks)
    graphs: Any = {
        "stack": steps.layers,
        "max_tokens": options.max_prefill_tokens,
        "max_batch": options.max_batch,
        "output_rows": BATCH if steps.world.ends else TOKENS,
        "sizes": sizes,
        "backend": options.backend,
        **ranks,
    }
    if options.prefill == "breakable":
        return BreakableRunner(declaration, steps.prefill(between_graphs), **graphs)
    return PrefillRunner(declaration, steps.prefill(as_operator), splits=[as_operator], **graphs)


@attrs.define(kw_only=True)
class Prefills:
    """The prefill steps so far.

    seconds: what they took. tokens: of all prompts. most: requests in one step. decisions: the path of each step.
    """

    seconds: float = 0.0
    tokens: int = 0
    most: int = 0
    decisions: list[Decision] = attrs.field(factory=list)

    @classmethod
    def together(cls, parts: "Sequence[Prefills]") -> "Prefills":
        """The prefill steps of several engines; seconds: of the one that took longest."""
        return cls(
            seconds=max(part.seconds for part in parts),
            tokens=sum(part.tokens for part in parts),
            most=max(part.most for part in parts),
            decisions=[decision for part in parts for decision in part.decisions],
        )

    @property
    def steps(self) -> int:
        """How many there were."""
        return len(self.decisions)

    @property
    def by_path(self) -> Mapping[str, int]:
        """Steps by the path that they took."""
        return Counter(decision.path for decision in self.decisions)

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why steps ran eagerly: for each reason's word the first sentence."""
        eager = (decision for decision in reversed(self.decisions) if decision.path == "eager")
        return {decision.why: decision.reason for decision in eager}

    def add(self, batch: PrefillInputs, decision: Decision, seconds: float) -> None:
        """Count one step."""
        self.seconds += seconds
        self.tokens += sum(batch.lengths)
        self.most = max(self.most, len(batch.lengths))
        self.decisions.append(decision)
