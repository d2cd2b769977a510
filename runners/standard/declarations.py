"""Declarations to subclass: the inputs of each phase of a step, and mixins for kinds of models and of parallelism.

Mixins are plain bases, which combine in any order.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, float32, int32, int64

from ...dataflow.axes import BATCH, TOKENS, WIDTH, Step
from ...dataflow.capabilities import CACHE_LOC, HOST, SEQ_LEN_FILL
from ...dataflow.inputs import Inputs
from ...dataflow.slots import computed, constant, copied, output, staged
from ...dataflow.sources import side
from ...dataflow.tails import keep, once
from . import counts
from .counts import ADAPTERS, CONTEXT, DP, FILL, FRONT, HIDDEN, INDEX_TOPK, MODEL_DTYPE, STEPS, TOPK, VOCAB


class Requests(Inputs):
    """Where each request's cache is, and how long its sequence is.

    req_pool_indices: padded rows use row 0 of the request table, which is reserved.
    seq_lens: padded rows run attention over the fewest tokens that the backend's kernels can take.
    seq_lens_cpu: attention is planned on the host; reading seq_lens back would wait for the device.
    """

    req_pool_indices: Tensor = copied(BATCH, dtype=int64, pad=0, poison=())
    seq_lens: Tensor = copied(BATCH, dtype=int32, pad=SEQ_LEN_FILL, converts=(int64,))
    seq_lens_cpu: Tensor | None = copied(
        BATCH, dtype=int32, pad=SEQ_LEN_FILL, placement=HOST, converts=(int64,), default=None
    )


class BoundedContext(Requests):
    """A mixin: a request longer than the context is refused before anything is written.

    seq_lens: values in lists and arrays are checked; those on the device are not, since that would wait for it.
    seq_lens_cpu: one position too many reads past the rope table and writes past the request's pages.
    """

    seq_lens: Tensor = copied(BATCH, dtype=int32, pad=SEQ_LEN_FILL, converts=(int64,), limit=CONTEXT)
    seq_lens_cpu: Tensor | None = copied(
        BATCH, dtype=int32, pad=SEQ_LEN_FILL, placement=HOST, converts=(int64,), limit=CONTEXT, default=None
    )


class HostLengths(Inputs):
    """A mixin: fused attention that takes lengths as a host argument, which an NPU updates at each replay.

    actual_seq_lengths_kv: lengths on the host, since reading seq_lens back would wait; padded rows as in seq_lens.
    """

    actual_seq_lengths_kv: Tensor = copied(
        BATCH,
        dtype=int32,
        pad=SEQ_LEN_FILL,
        placement=HOST,
        converts=(int64,),
        source="seq_lens_cpu",
        argument="actual_seq_lengths_kv",
    )


class ContextLengths(Inputs):
    """A mixin: paged attention that takes lengths as a host tensor, which an NPU also updates at each replay.

    context_lens: int32, which the operator expects; padded rows as in seq_lens.
    """

    context_lens: Tensor = copied(
        BATCH,
        dtype=int32,
        pad=SEQ_LEN_FILL,
        placement=HOST,
        converts=(int64,),
        source="seq_lens_cpu",
        argument="context_lens",
    )


class DecodeInputs(Requests):
    """The inputs of one decode step, and where it writes its logits.

    input_ids: a stale id is still a row of the embedding table, and the result is not used.
    positions: a stale position may index past the end of the rope table: an illegal access, perhaps after hours.
    out_cache_loc: padded rows write their keys and values, too; location 0 is kept free for that.
    next_token_logits: one allocation for all buckets, at an address that samplers and collectives know.
    """

    input_ids: Tensor = copied(
        TOKENS, dtype=int64, pad=keep("any id will do, its row's result is dropped"), poison="stale"
    )
    positions: Tensor = copied(TOKENS, dtype=int64, pad=0)
    out_cache_loc: Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    next_token_logits: Tensor = output(TOKENS, VOCAB, dtype=float32)
    capture_hidden_mode: str = "null"


class TargetVerifyInputs(DecodeInputs):
    """The inputs of the target model, which verifies a tree of WIDTH draft tokens for each request.

    custom_mask: which tokens each draft token sees, as the tree's builder writes it; True at first and in padded rows,
    since a softmax over nothing is NaN.
    """

    custom_mask: Tensor = staged((BATCH * FILL + TOKENS) * WIDTH, dtype=torch.bool, pad=True)


class EagerInputs(DecodeInputs):
    """The inputs of an eager step: those of decode, never padded.

    It has no counts of its own. An eager batch already has right values of what a mixin would compute: drop those in a
    subclass, or declare them as fields there.
    """


class PrefillInputs(Inputs):
    """The inputs of the captured pieces of a prefill: tokens alone, so that no piece depends on the requests.

    input_ids: padded rows are executed by kernels that may sort or route by id, so their id is always the same.
    positions: padded rows are executed; a stale position indexes the rope table past its end.
    out_cache_loc: padded rows are executed, and write to location 0, which is kept free for that.
    """

    input_ids: Tensor = copied(TOKENS, dtype=int64, pad=0)
    positions: Tensor = copied(TOKENS, dtype=int64, pad=0)
    out_cache_loc: Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)


class BreakableInputs(PrefillInputs, Requests, drop=["seq_lens_cpu"]):
    """Further inputs of the breaks and eager parts of a prefill: which tokens belong to which request.

    Only whole-model capture pads requests; a padded one has no tokens.

    extend_seq_lens: new tokens of each request; 0 in padded rows, so that attention does nothing for them.
    extend_prefix_lens: cached tokens before the new ones; 0 in padded rows, which have no cache.
    extend_start_loc: where each request's tokens begin; a padded row stays inside the tokens.
    orig_seq_lens: lengths before chunking, for rope scaling that depends on them.
    """

    extend_seq_lens: Tensor = copied(BATCH, dtype=int32, pad=0, poison=(), converts=(int64,))
    extend_prefix_lens: Tensor = copied(BATCH, dtype=int32, pad=0, converts=(int64,))
    extend_start_loc: Tensor = computed(counts.first_tokens, shape=BATCH, dtype=int32)
    orig_seq_lens: Tensor = copied(BATCH, dtype=int32, pad=SEQ_LEN_FILL, converts=(int64,))

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        """Return one request without a prefix, which owns every token of the bucket."""
        whole = [step.padded(TOKENS)]
        none = [0]
        mine = {"seq_lens": whole, "extend_seq_lens": whole, "orig_seq_lens": whole}
        mine |= {"extend_prefix_lens": none, "req_pool_indices": none}
        present = {name: value for name, value in mine.items() if name in cls.slotgraph.slots}
        return {**super().placeholder(step), **present}


class DraftPrefillInputs(PrefillInputs):
    """Further inputs of the prefill of a draft model: the target's hidden states.

    hidden_states: one for each token of the target's prefill; padded rows are executed, on zeros.
    """

    hidden_states: Tensor = copied(TOKENS, HIDDEN, dtype=MODEL_DTYPE, pad=0)


class DraftInputs(Requests):
    """The inputs for drafting a tree: TOPK tokens a request, in STEPS steps of one graph.

    input_ids: not in the batch; each step writes the ids of the branches that it continues, in all rows.
    positions: each step advances them in place, and the graph restores them at the end.
    out_cache_loc: a location for each branch of each step; padded rows write to location 0, which is kept free.
    extend_seq_lens: each branch grows by one token a step.
    topk_p: the probabilities of the first branches; 0 in padded rows, which then are never chosen.
    topk_index: the ids of these branches; 0 in padded rows, an id like any other.
    hidden_states: the target's last one for each request; so large that it is copied by itself, not in a group.
    """

    input_ids: Tensor = staged(TOKENS, dtype=int64, pad=keep("written before it is read, all rows"))
    positions: Tensor = copied(TOKENS, dtype=int64, pad=0, restored=True)
    out_cache_loc: Tensor = copied(TOKENS * STEPS, dtype=CACHE_LOC, pad=0)
    extend_seq_lens: Tensor = constant(1, shape=BATCH, dtype=int32)
    topk_p: Tensor = copied(BATCH, TOPK, dtype=float32, pad=0)
    topk_index: Tensor = copied(BATCH, TOPK, dtype=int64, pad=0)
    hidden_states: Tensor = copied(BATCH, HIDDEN, dtype=MODEL_DTYPE, pad=0)
    capture_hidden_mode: str = "null"


class DraftSampling(Inputs):
    """A mixin: inputs for drafting if drafts are sampled, not chosen greedily.

    draft_probs: the probabilities that the first branches were drawn from, to compare with the target's.
    sampling_seed: one a request, so that a run can be repeated.
    temperatures: logits are divided by them; 1 in padded rows, since 0 would make NaN of them.
    top_ks: the whole vocabulary in padded rows, so that nothing is cut off.
    """

    draft_probs: Tensor = copied(BATCH, VOCAB, dtype=float32, pad=0)
    sampling_seed: Tensor = copied(BATCH, dtype=int64, pad=0)
    temperatures: Tensor = copied(BATCH, 1, dtype=float32, pad=1)
    top_ks: Tensor = copied(BATCH, dtype=int32, pad=VOCAB)


class Sampling(Inputs):
    """A mixin: inputs for sampling in the graph, as SGLang and vLLM feed them.

    sampling_seed: one a request, so that a run can be repeated.
    temperatures: logits are divided by them; 1 in padded rows, since 0 would make NaN of them.
    top_ks: the whole vocabulary in padded rows, so that nothing is cut off.
    top_ps: 1 in padded rows, so that nothing is cut off.
    min_ps: 0 in padded rows, so that nothing is cut off.
    frequency_penalties: 0 in padded rows: none.
    presence_penalties: 0 in padded rows: none.
    repetition_penalties: 1 in padded rows, since logits are divided by it.
    """

    sampling_seed: Tensor = copied(BATCH, dtype=int64, pad=0)
    temperatures: Tensor = copied(BATCH, 1, dtype=float32, pad=1)
    top_ks: Tensor = copied(BATCH, dtype=int32, pad=VOCAB)
    top_ps: Tensor = copied(BATCH, dtype=float32, pad=1)
    min_ps: Tensor = copied(BATCH, dtype=float32, pad=0)
    frequency_penalties: Tensor = copied(BATCH, dtype=float32, pad=0)
    presence_penalties: Tensor = copied(BATCH, dtype=float32, pad=0)
    repetition_penalties: Tensor = copied(BATCH, dtype=float32, pad=1)


class Lora(Inputs):
    """A mixin: low-rank adapters, of which each request has one, as SGLang feeds them (lora/utils.py, commit 01235a1).

    weight_indices: the adapter of each request; padded rows have adapter 0, and their result is not used.
    lora_ranks: the rank of each adapter, 0 for none: an engine keeps them, and changes them as it loads adapters.
    scalings: what each adapter's result is multiplied by.
    seg_lens: each request has WIDTH tokens.
    seg_indptr: where each request's tokens begin, and behind them how many there are.
    """

    weight_indices: Tensor = copied(BATCH, dtype=int32, pad=0)
    lora_ranks: Tensor = copied(ADAPTERS, dtype=int32)
    scalings: Tensor = copied(ADAPTERS, dtype=float32)
    seg_lens: Tensor = constant(WIDTH, shape=BATCH, dtype=int32)
    seg_indptr: Tensor = computed(counts.segment_offsets, shape=BATCH + 1, dtype=int32)


class LoraPrefill(Lora):
    """A mixin: as `Lora`, in a prefill, where each request has tokens of its own number.

    seg_lens: the batch's `extend_seq_lens`; 0 in padded rows, so that no adapter is applied to padded tokens.
    """

    seg_lens: Tensor = copied(BATCH, dtype=int32, pad=0, poison=(), converts=(int64,), source="extend_seq_lens")


class DraftExtendInputs(Requests):
    """The inputs of the draft model after a verification: WIDTH tokens for each request, as many as were drafted.

    input_ids: a stale id is still a row of the embedding table, and the result is not used.
    positions: a stale position indexes the rope table past its end.
    out_cache_loc: while a bucket is captured all rows write to location 1, in a step padded ones to 0, both kept free.
    hidden_states: the target's, one for each token; padded rows are executed, on zeros.
    extend_seq_lens: each request has WIDTH tokens, accepted or not.
    num_correct_drafts: WIDTH in padded rows, as if all of their drafts were right.
    num_accept_tokens: WIDTH in padded rows, whose select_index is then the last of their own rows.
    select_index: the row of each request's last accepted token; it depends on WIDTH, so no two widths may share it.
    next_token_logits: one row a request, that of select_index.
    """

    input_ids: Tensor = copied(
        TOKENS, dtype=int64, pad=keep("any id will do, its row's result is dropped"), poison="stale"
    )
    positions: Tensor = copied(TOKENS, dtype=int64, pad=0)
    out_cache_loc: Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0, starts=1)
    hidden_states: Tensor = copied(TOKENS, HIDDEN, dtype=MODEL_DTYPE, pad=0)
    extend_seq_lens: Tensor = constant(WIDTH, shape=BATCH, dtype=int32)
    num_correct_drafts: Tensor = copied(BATCH, dtype=int32, pad=WIDTH)
    num_accept_tokens: Tensor = copied(BATCH, dtype=int32, pad=WIDTH)
    select_index: Tensor = computed(counts.last_accepted, shape=BATCH, dtype=int64)
    next_token_logits: Tensor = output(BATCH, VOCAB, dtype=float32)
    capture_hidden_mode: str = "null"


class MultiLayerDraftExtendInputs(DraftExtendInputs):
    """The inputs of a draft with several layers, one step per layer: WIDTH tokens per request, FRONT and the drafts.

    All layers share one set of inputs.

    hidden_states: each layer writes them in the graph for the next one, so that no tail is known to be clean.
    num_correct_drafts: 1 while a bucket is captured, an ordinary count; -1 in padded rows: nothing was drafted.
    num_accept_tokens: as num_correct_drafts.
    extend_start_loc: where each request's tokens begin, the same in each step.
    front_tokens: the size of FRONT, in memory that the device can read, to find the drafts after them.
    select_index: the row of each request's last correct draft, in padded rows one of their own.
    """

    hidden_states: Tensor = copied(TOKENS, HIDDEN, dtype=MODEL_DTYPE, pad=0, rewritten=True)
    num_correct_drafts: Tensor = copied(BATCH, dtype=int32, pad=-1, starts=1)
    num_accept_tokens: Tensor = copied(BATCH, dtype=int32, pad=-1, starts=1)
    extend_start_loc: Tensor = constant(counts.even_starts, shape=BATCH, dtype=int32)
    front_tokens: Tensor = constant(FRONT, shape=1, dtype=int32)
    select_index: Tensor = computed(counts.last_correct, shape=BATCH, dtype=int64)


class SlidingWindow(Inputs):
    """A mixin: models with layers that see only a window and have their own KV pool.

    out_cache_loc_swa: pass it to the KV pool in the step, so that graphs write there without translating locations.
    """

    out_cache_loc_swa: Tensor = copied(TOKENS, dtype=int32, pad=0, poison=())


class Mrope(Inputs):
    """A mixin: multimodal models, whose positions have three parts.

    mrope_positions: absent if a batch is text alone; padded columns are executed, at position 0.
    """

    mrope_positions: Tensor | None = copied(3, TOKENS, dtype=int64, pad=0, strided=True, default=None)


class DraftMrope(Mrope):
    """A mixin for draft: multimodal positions that each step advances.

    mrope_positions: advanced in place, all three parts, and put back by the graph; absent if a batch is text alone.
    """

    mrope_positions: Tensor | None = copied(3, TOKENS, dtype=int64, pad=0, strided=True, default=None, restored=True)


class InputEmbeds(Inputs):
    """A mixin: multimodal models, which make one sequence of the embeddings of images and texts.

    input_embeds: the model writes it inside the step, differently for each batch; padded rows are executed, on zeros.
    """

    input_embeds: Tensor = staged(TOKENS, HIDDEN, dtype=MODEL_DTYPE, pad=0)


class Mamba(Inputs):
    """A mixin: state-space models, which keep a state for each request, and snapshots of it.

    mamba_track_indices: where snapshots go; padded rows name entry 0, which is kept free.
    mamba_track_mask: which requests take one; padded rows take none.
    mamba_track_seqlens: how many tokens a snapshot covers.
    """

    mamba_track_indices: Tensor = copied(BATCH, dtype=int64, pad=0, poison=())
    mamba_track_mask: Tensor = copied(BATCH, dtype=torch.bool, pad=False)
    mamba_track_seqlens: Tensor = copied(BATCH, dtype=int32, pad=0)


class EncoderDecoder(Inputs):
    """A mixin: models with an encoder, to whose output decoder layers attend.

    encoder_lens: 0 at first, then written for live rows only; a stale length is still that of some encoder output.
    """

    encoder_lens: Tensor = copied(BATCH, dtype=int32, pad=once(0))


class NgramEmbedding(Inputs):
    """A mixin: models that embed a token together with those before it.

    ngram_column_starts: where each request's tokens begin in the table of ids.
    ngram_req_lens: how many of them; 1 at first, so that a row never written has a token.
    """

    ngram_column_starts: Tensor = copied(
        BATCH,
        dtype=int32,
        poison="stale",
        pad=keep("a stale start is one that a request had"),
        source="ngram_embedding_info.column_starts",
    )
    ngram_req_lens: Tensor = copied(
        BATCH,
        dtype=int32,
        poison="stale",
        pad=keep("a stale length is one that a request had"),
        source="ngram_embedding_info.req_lens",
        starts=1,
    )


class PipelineProxies(Inputs):
    """A mixin: the results of the pipeline stage before, from `runner(batch, pp_proxy_tensors=...)`.

    pp_hidden_states: a stale row would affect results over all rows, such as scales and routing.
    pp_residual: as pp_hidden_states; absent if the model adds it before it sends its results on.
    """

    pp_hidden_states: Tensor | None = copied(
        TOKENS, HIDDEN, dtype=MODEL_DTYPE, pad=0, poison=(), source=side("pp_proxy_tensors.hidden_states"), default=None
    )
    pp_residual: Tensor | None = copied(
        TOKENS, HIDDEN, dtype=MODEL_DTYPE, pad=0, poison=(), source=side("pp_proxy_tensors.residual"), default=None
    )


class PipelineIndices(Inputs):
    """A mixin: the tokens that sparse attention chose on the stage before, which later layers reuse.

    pp_topk_indices: padded rows attend to token 0, which is always there.
    """

    pp_topk_indices: Tensor | None = copied(
        TOKENS, INDEX_TOPK, dtype=int32, pad=0, source=side("pp_proxy_tensors.topk_indices"), default=None
    )


class ExpertParallel(Inputs):
    """A mixin: expert parallelism, which must not route padded rows. Needs settings: see `Sharding`.

    num_token_non_padded: live tokens of this rank's part of the padded bucket; the rest is routed to no expert.
    """

    num_token_non_padded: Tensor = computed(counts.num_token_non_padded, shape=1, dtype=int32)


class ExpertParallelSharded(Inputs):
    """A mixin: as `ExpertParallel`, if the runner's `Ranks(shards=)` says how many ranks share a bucket's tokens.

    num_token_non_padded: live tokens of this rank's part, all of them if there is one shard; needs no settings.
    """

    num_token_non_padded: Tensor = computed(counts.own_tokens, shape=1, dtype=int32)


class DataParallelGathered(Inputs):
    """A mixin: data-parallel attention whose ranks gather their tokens, all of them in the same bucket.

    global_num_tokens: the padded count, even on an idle rank, since collectives exchange whole buckets.
    global_num_tokens_for_logprob: the same count, with a row of logits a token.
    """

    global_num_tokens: Tensor = computed(counts.padded_tokens, shape=DP, dtype=int32)
    global_num_tokens_for_logprob: Tensor = computed(counts.padded_tokens, shape=DP, dtype=int32)


class DataParallelGatheredExtend(DataParallelGathered):
    """A mixin for draft-extend: as its base, with a row of logits a request.

    global_num_tokens_for_logprob: the padded request count, since select_index chooses one row of each request.
    """

    global_num_tokens_for_logprob: Tensor = computed(counts.padded_requests, shape=DP, dtype=int32)


class DataParallelAgreed(Inputs):
    """A mixin: data-parallel attention whose ranks do not gather, so that counts differ and `Ranks` exchanges them.

    global_num_tokens: live tokens of each batch, as ranks sent before this step; 0 for an idle one, without padding.
    global_num_tokens_for_logprob: the same count, with a row of logits a token.
    """

    global_num_tokens: Tensor = computed(counts.agreed_tokens, shape=DP, dtype=int32)
    global_num_tokens_for_logprob: Tensor = computed(counts.agreed_tokens, shape=DP, dtype=int32)


class DataParallelAgreedExtend(DataParallelAgreed):
    """A mixin for draft-extend: as its base, with a row of logits a request.

    global_num_tokens_for_logprob: live requests of each batch, since select_index chooses one row of each.
    """

    global_num_tokens_for_logprob: Tensor = computed(counts.agreed_requests, shape=DP, dtype=int32)


class DataParallelCarried(Inputs):
    """A mixin: data-parallel attention whose ranks do not gather, and whose counts are in the batch, without `Ranks`.

    global_num_tokens: what the scheduler's ranks agreed on; a buffer of zeros in its place is a known bug.
    global_num_tokens_for_logprob: the same, for rows of logits.
    """

    global_num_tokens: Tensor = copied(DP, dtype=int32)
    global_num_tokens_for_logprob: Tensor = copied(DP, dtype=int32)
