"""What kinds of models and of parallelism add to any phase: mixins, which are plain bases and combine in any order."""

import torch

from ...dataflow.axes import BATCH, TOKENS
from ...dataflow.inputs import Inputs
from ...dataflow.slots import computed, copied, staged
from ...dataflow.sources import side
from ...dataflow.tails import keep, once
from .axes import DP, HIDDEN, INDEX_TOPK, MODEL_DTYPE
from .counts import agreed_requests, agreed_tokens, num_token_non_padded, own_tokens, padded_requests, padded_tokens


class SlidingWindow(Inputs):
    """A mixin: models some of whose layers see a window only, with a KV pool of its own.

    out_cache_loc_swa: lent to the KV pool while buckets are captured, so that graphs write there without a translation.
    """

    out_cache_loc_swa: torch.Tensor = copied(TOKENS, dtype=torch.int32, pad=0, poison=())


class Mrope(Inputs):
    """A mixin: multimodal models, whose positions have three parts.

    mrope_positions: absent where a batch is text alone; padded columns are executed, at position 0.
    """

    mrope_positions: torch.Tensor | None = copied(3, TOKENS, dtype=torch.int64, pad=0, strided=True, default=None)


class DraftMrope(Mrope):
    """A mixin for draft: the same, where each step advances the positions.

    mrope_positions: advanced in place, all three parts, and put back by the graph; absent where a batch is text alone.
    """

    mrope_positions: torch.Tensor | None = copied(
        3, TOKENS, dtype=torch.int64, pad=0, strided=True, default=None, restored=True
    )


class InputEmbeds(Inputs):
    """A mixin: multimodal models, which make one sequence of what images and texts are embedded to.

    input_embeds: the model writes it inside the step, where each batch differs; padded rows are executed, on zeros.
    """

    input_embeds: torch.Tensor = staged(TOKENS, HIDDEN, dtype=MODEL_DTYPE, pad=0)


class Mamba(Inputs):
    """A mixin: state-space models, which keep a state a request and snapshots of it.

    mamba_track_indices: where snapshots go; padded rows name entry 0, which is kept free.
    mamba_track_mask: which requests take one; padded rows take none.
    mamba_track_seqlens: how many tokens a snapshot stands for.
    """

    mamba_track_indices: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, poison=())
    mamba_track_mask: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=False)
    mamba_track_seqlens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0)


class EncoderDecoder(Inputs):
    """A mixin: models with an encoder, to whose output decoder layers attend.

    encoder_lens: 0 at first, written for live rows alone; a stale length is one that some encoder output had.
    """

    encoder_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=once(0))


class NgramEmbedding(Inputs):
    """A mixin: models that embed a token together with those before it.

    ngram_column_starts: where each request's tokens stand in the table of ids.
    ngram_req_lens: how many of them; 1 at first, so that a row never written has a token.
    """

    ngram_column_starts: torch.Tensor = copied(
        BATCH,
        dtype=torch.int32,
        pad=keep("a stale start is one that a request had"),
        poison="stale",
        source="ngram_embedding_info.column_starts",
    )
    ngram_req_lens: torch.Tensor = copied(
        BATCH,
        dtype=torch.int32,
        pad=keep("a stale length is one that a request had"),
        poison="stale",
        starts=1,
        source="ngram_embedding_info.req_lens",
    )


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


class ExpertParallel(Inputs):
    """A mixin: experts and gathered data parallelism, which must not route padded rows. Needs settings: see `Sharding`.

    num_token_non_padded: live tokens of this rank's part of the padded bucket; the rest is routed to no expert.
    """

    num_token_non_padded: torch.Tensor = computed(num_token_non_padded, shape=1, dtype=torch.int32)


class ExpertParallelSharded(Inputs):
    """A mixin: the same, where the runner's `Ranks(shards=)` says over which ranks a bucket's tokens are spread.

    num_token_non_padded: live tokens of this rank's part, all of them where there is one shard; needs no settings.
    """

    num_token_non_padded: torch.Tensor = computed(own_tokens, shape=1, dtype=torch.int32)


class DataParallelGathered(Inputs):
    """A mixin: data-parallel attention whose ranks gather their tokens, all of them in the same bucket.

    global_num_tokens: the padded count, live or not, also on an idle rank: collectives move whole buckets.
    global_num_tokens_for_logprob: likewise, a row of logits a token.
    """

    global_num_tokens: torch.Tensor = computed(padded_tokens, shape=DP, dtype=torch.int32)
    global_num_tokens_for_logprob: torch.Tensor = computed(padded_tokens, shape=DP, dtype=torch.int32)


class DataParallelGatheredExtend(DataParallelGathered):
    """A mixin for draft-extend: the same, with a row of logits a request.

    global_num_tokens_for_logprob: the padded request count, since select_index leaves one row of each request.
    """

    global_num_tokens_for_logprob: torch.Tensor = computed(padded_requests, shape=DP, dtype=torch.int32)


class DataParallelAgreed(Inputs):
    """A mixin: data-parallel attention whose ranks do not gather, so that their counts differ and `Ranks` tells them.

    global_num_tokens: live tokens of each batch, as ranks told before this step; 0 of an idle one, padding of none.
    global_num_tokens_for_logprob: likewise, a row of logits a token.
    """

    global_num_tokens: torch.Tensor = computed(agreed_tokens, shape=DP, dtype=torch.int32)
    global_num_tokens_for_logprob: torch.Tensor = computed(agreed_tokens, shape=DP, dtype=torch.int32)


class DataParallelAgreedExtend(DataParallelAgreed):
    """A mixin for draft-extend: the same, with a row of logits a request.

    global_num_tokens_for_logprob: live requests of each batch, since select_index leaves one row of each.
    """

    global_num_tokens_for_logprob: torch.Tensor = computed(agreed_requests, shape=DP, dtype=torch.int32)


class DataParallelCarried(Inputs):
    """A mixin: data-parallel attention whose ranks do not gather, where no `Ranks` but the batch has their counts.

    global_num_tokens: what the scheduler's ranks agreed on; a buffer of zeros in its place is a known bug.
    global_num_tokens_for_logprob: likewise.
    """

    global_num_tokens: torch.Tensor = copied(DP, dtype=torch.int32)
    global_num_tokens_for_logprob: torch.Tensor = copied(DP, dtype=torch.int32)
