"""Pipeline parallelism: what a stage that is not the first reads from the one before it, beside the batch."""

import torch

from ...dataflow.axes import TOKENS
from ...dataflow.inputs import Inputs
from ...dataflow.sources import side
from ...dataflow.specifiers import copied
from ...dataflow.tails import keep
from .axes import HIDDEN, INDEX_TOPK
from .dtypes import MODEL_DTYPE

_KEPT = keep("a row's result is dropped with the row, whatever it was computed from")


class PipelineProxies(Inputs):
    """A mixin for decode: `runner(batch, pp_proxy_tensors=...)` brings what the stage before computed.

    pp_hidden_states: each key is optional, since stages and models differ in what they hand on.
    pp_residual: absent where the model adds it before it hands on.
    """

    pp_hidden_states: torch.Tensor | None = copied(
        TOKENS, HIDDEN, dtype=MODEL_DTYPE, pad=_KEPT, source=side("pp_proxy_tensors.hidden_states"), default=None
    )
    pp_residual: torch.Tensor | None = copied(
        TOKENS, HIDDEN, dtype=MODEL_DTYPE, pad=_KEPT, source=side("pp_proxy_tensors.residual"), default=None
    )


class PipelineIndices(Inputs):
    """A mixin for decode: the tokens that sparse attention chose on the stage before, which later layers use again.

    pp_topk_indices: a stale index names a token that a live row attended to.
    """

    pp_topk_indices: torch.Tensor | None = copied(
        TOKENS,
        INDEX_TOPK,
        dtype=torch.int32,
        pad=_KEPT,
        poison="stale",
        source=side("pp_proxy_tensors.topk_indices"),
        default=None,
    )


class PrefillPipelineProxies(Inputs):
    """A mixin for prefill: the same, but padded rows are zero, since they are executed among live ones.

    pp_hidden_states: a stale row would enter what is computed over all rows at once, scales and routing.
    pp_residual: likewise.
    """

    pp_hidden_states: torch.Tensor | None = copied(
        TOKENS, HIDDEN, dtype=MODEL_DTYPE, pad=0, poison=(), source=side("pp_proxy_tensors.hidden_states"), default=None
    )
    pp_residual: torch.Tensor | None = copied(
        TOKENS, HIDDEN, dtype=MODEL_DTYPE, pad=0, poison=(), source=side("pp_proxy_tensors.residual"), default=None
    )


class PrefillPipelineIndices(Inputs):
    """A mixin for prefill: the tokens that sparse attention chose on the stage before.

    pp_topk_indices: padded rows attend to token 0, which is always there.
    """

    pp_topk_indices: torch.Tensor | None = copied(
        TOKENS, INDEX_TOPK, dtype=torch.int32, pad=0, source=side("pp_proxy_tensors.topk_indices"), default=None
    )
