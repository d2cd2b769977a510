"""The field's declarations, ready to subclass: what decode, prefill and speculative steps read in LLM engines."""

from .axes import CONTEXT, DP, FILL, FRONT, HIDDEN, INDEX_TOPK, STEPS, TOPK, VOCAB
from .decode import DecodeInputs, EagerInputs, TargetVerifyInputs
from .draft import DraftInputs, DraftSampling
from .dtypes import MODEL_DTYPE, model_dtype
from .extend import DraftExtendInputs, MultiLayerDraftExtendInputs
from .mixins import DraftMrope, EncoderDecoder, InputEmbeds, Mamba, Mrope, NgramEmbedding, SlidingWindow
from .parallel import (
    DataParallelAgreed,
    DataParallelAgreedExtend,
    DataParallelCarried,
    DataParallelGathered,
    DataParallelGatheredExtend,
    ExpertParallel,
    ExpertParallelSharded,
)
from .prefill import BreakableInputs, DraftPrefillInputs, PrefillInputs
from .proxies import PipelineIndices, PipelineProxies, PrefillPipelineIndices, PrefillPipelineProxies
from .requests import BoundedContext, ContextLengths, HostLengths, Requests
from .settings import Sharding

__all__ = [
    "CONTEXT",
    "DP",
    "FILL",
    "FRONT",
    "HIDDEN",
    "INDEX_TOPK",
    "MODEL_DTYPE",
    "STEPS",
    "TOPK",
    "VOCAB",
    "BoundedContext",
    "BreakableInputs",
    "ContextLengths",
    "DataParallelAgreed",
    "DataParallelAgreedExtend",
    "DataParallelCarried",
    "DataParallelGathered",
    "DataParallelGatheredExtend",
    "DecodeInputs",
    "DraftExtendInputs",
    "DraftInputs",
    "DraftMrope",
    "DraftPrefillInputs",
    "DraftSampling",
    "EagerInputs",
    "EncoderDecoder",
    "ExpertParallel",
    "ExpertParallelSharded",
    "HostLengths",
    "InputEmbeds",
    "Mamba",
    "Mrope",
    "MultiLayerDraftExtendInputs",
    "NgramEmbedding",
    "PipelineIndices",
    "PipelineProxies",
    "PrefillInputs",
    "PrefillPipelineIndices",
    "PrefillPipelineProxies",
    "Requests",
    "Sharding",
    "SlidingWindow",
    "TargetVerifyInputs",
    "model_dtype",
]
