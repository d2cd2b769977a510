"""Standard declarations, ready to subclass: what decode, prefill and speculative steps read in LLM engines."""

# fmt: off
from slotgraph import _publish  # noqa: I001 - several names a line
from slotgraph.runners.standard.counts import (
    ADAPTERS, CONTEXT, DP, FILL, FRONT, HIDDEN, INDEX_TOPK, MODEL_DTYPE, STEPS, TOPK, VOCAB, Sharding, model_dtype,
)
from slotgraph.runners.standard.declarations import (
    BoundedContext, BreakableInputs, ContextLengths, DataParallelAgreed, DataParallelAgreedExtend,
    DataParallelCarried, DataParallelGathered, DataParallelGatheredExtend, DecodeInputs, DraftExtendInputs,
    DraftInputs, DraftMrope, DraftPrefillInputs, DraftSampling, EagerInputs, EncoderDecoder, ExpertParallel,
    ExpertParallelSharded, HostLengths, InputEmbeds, Lora, LoraPrefill, Mamba, Mrope, MultiLayerDraftExtendInputs,
    NgramEmbedding, PipelineIndices, PipelineProxies, PrefillInputs, Requests, Sampling, SlidingWindow,
    TargetVerifyInputs,
)

__all__ = [
    "ADAPTERS", "CONTEXT", "DP", "FILL", "FRONT", "HIDDEN", "INDEX_TOPK", "MODEL_DTYPE", "STEPS", "TOPK", "VOCAB",
    "BoundedContext", "BreakableInputs", "ContextLengths", "DataParallelAgreed", "DataParallelAgreedExtend",
    "DataParallelCarried", "DataParallelGathered", "DataParallelGatheredExtend", "DecodeInputs", "DraftExtendInputs",
    "DraftInputs", "DraftMrope", "DraftPrefillInputs", "DraftSampling", "EagerInputs", "EncoderDecoder",
    "ExpertParallel", "ExpertParallelSharded", "HostLengths", "InputEmbeds", "Lora", "LoraPrefill", "Mamba", "Mrope",
    "MultiLayerDraftExtendInputs", "NgramEmbedding", "PipelineIndices", "PipelineProxies", "PrefillInputs",
    "Requests", "Sampling", "Sharding", "SlidingWindow", "TargetVerifyInputs", "model_dtype",
]
# fmt: on

_publish(__name__)
