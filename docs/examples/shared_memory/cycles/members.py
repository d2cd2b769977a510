"""Cycles as engines run them: each runner's standard declaration, at the sizes of a server."""

from collections.abc import Iterator, Mapping, Sequence

import attrs

from slotgraph import BATCH, TOKENS, Axis, Inputs, standard
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.runners.engine.sharing import Layout, PooledSlot, Schedule, lay_out, pooled_slots
from slotgraph.speculative import WIDTH


@attrs.frozen(kw_only=True)
class Scale:
    """How large a server's steps are.

    batch: requests. tokens: of a prefill. context: cached tokens of each request that a tree mask has room for. topk,
    steps, drafts: branches, draft steps and tokens of a draft tree. front: tokens before the drafts of several layers.
    """

    batch: int = 512
    tokens: int = 8192
    vocabulary: int = 152_064
    hidden: int = 8192
    context: int = 4096
    topk: int = 4
    steps: int = 5
    drafts: int = 8
    front: int = 2

    @property
    def fixed(self) -> dict[Axis, int]:
        """Sizes of the axes that depend on the model and the drafts."""
        return {
            standard.HIDDEN: self.hidden,
            standard.VOCAB: self.vocabulary,
            standard.FILL: self.context,
            standard.TOPK: self.topk,
            standard.STEPS: self.steps,
            standard.FRONT: self.front,
            standard.INDEX_TOPK: 2048,
            standard.DP: 8,
        }


@attrs.frozen(eq=False)
class Cycle:
    """Runners that a loop goes through, one in each phase, and how their phases relate."""

    name: str
    schedule: Schedule
    slots: Sequence[PooledSlot]

    @property
    def layout(self) -> Layout:
        """Their inputs in shared memory."""
        return lay_out(self.slots, self.schedule)


class Decode(standard.DecodeInputs, standard.ExpertParallel):
    """A decode step of a mixture of experts."""


class Verify(standard.TargetVerifyInputs, standard.ExpertParallel):
    """Its verification of a draft tree."""


class Draft(standard.DraftInputs, standard.DraftSampling):
    """A draft that is sampled."""


class Prefill(standard.BreakableInputs, standard.ExpertParallel):
    """A prefill, padded in tokens and in requests."""


class StageDecode(standard.DecodeInputs, standard.PipelineProxies, standard.NgramEmbedding):
    """A later stage of a pipeline, of a model that embeds tokens with those before them."""


class StageVerify(standard.TargetVerifyInputs, standard.PipelineProxies, standard.NgramEmbedding):
    """The same in a verification."""


class StagePrefill(standard.BreakableInputs, standard.PipelineProxies, standard.NgramEmbedding):
    """The same in a prefill."""


def cycles(scale: Scale, capabilities: Capabilities | None = None) -> Iterator[Cycle]:
    """Plain serving, speculation in several forms, and a pipeline's later stage."""
    able = Capabilities() if capabilities is None else capabilities
    made = _Made(scale, able)
    tree = {"draft": (Draft, scale.topk), "verify": (Verify, scale.drafts)}
    extend = {"extend": (standard.DraftExtendInputs, scale.drafts)}
    layers = {"extend": (standard.MultiLayerDraftExtendInputs, scale.drafts + scale.front)}
    prefills = {"prefill": (Prefill, 0), "draft prefill": (standard.DraftPrefillInputs, 0)}
    stages = {"prefill": (StagePrefill, 0), "decode": (StageDecode, 1), "verify": (StageVerify, scale.drafts)}
    yield made.cycle("prefill, decode", {"prefill": (Prefill, 0), "decode": (Decode, 1)})
    yield made.cycle("draft, verify, extend", {**tree, **extend})
    yield made.cycle("the same, verify prepared beside the draft", {**tree, **extend}, [("draft", "verify")])
    yield made.cycle("prefills, draft, verify, extend", {**prefills, **tree, **extend})
    yield made.cycle("prefills, draft, verify, layers of extend", {**prefills, **tree, **layers})
    yield made.cycle("a pipeline's later stage", stages)


@attrs.frozen
class _Made:
    """Cycles of one scale."""

    scale: Scale
    capabilities: Capabilities

    def cycle(
        self,
        name: str,
        kinds: Mapping[str, tuple[type[Inputs], int]],
        overlaps: Sequence[tuple[str, str]] = (),
    ) -> Cycle:
        """A runner a phase, by declaration and tokens a request; 0 for a prefill."""
        scale, slots = self.scale, list[PooledSlot]()
        for phase, (inputs, width) in kinds.items():
            tokens = scale.batch * width if width else scale.tokens
            capacity = {BATCH: scale.batch, TOKENS: tokens, WIDTH: width, **scale.fixed}
            declaration = inputs.slotgraph.under(standard.Sharding())
            slots += pooled_slots(declaration, capacity, self.capabilities, phase, phase, "cuda:0")
        return Cycle(name, Schedule(tuple(kinds), tuple(overlaps)), slots)
