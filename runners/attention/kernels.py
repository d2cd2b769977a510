"""Mixins that declare what attention kernels read, one for each kernel and phase. They combine with other declarations.

seq_lens counts all tokens that attention sees, with those of this step. What is computed runs on the device, in the
graph, compiled as one function where the device can.
"""

import torch
from torch import Tensor, int32, int64

from ...dataflow.axes import BATCH, TOKENS, WIDTH
from ...dataflow.capabilities import HOST, SEQ_LEN_FILL
from ...dataflow.inputs import Inputs
from ...dataflow.slots import computed, constant, copied, staged
from ..standard.counts import STEPS
from . import layouts
from .layouts import CHUNK, CHUNKS, PAGE_SIZE, PAGES, POOL, SM_PARTS, TILE


class PagedCache(Inputs):
    """How long each request's sequence is, and which pages of the KV cache it has.

    seq_lens: padded rows have the fewest tokens that the backend's kernels can take, as in `standard.Requests`.
    page_table: padded rows, and what is behind a request's pages, name page 0, which is kept free.
    page_size: the size of PAGE_SIZE, in memory that the device can read.
    """

    seq_lens: Tensor = copied(BATCH, dtype=int32, pad=SEQ_LEN_FILL, converts=(int64,))
    page_table: Tensor = copied(BATCH, PAGES, dtype=int32, pad=0, ragged=True, strided=True, converts=(int64,))
    page_size: Tensor = constant(PAGE_SIZE, shape=1, dtype=int32)


class PooledCache(PagedCache):
    """A page table that is gathered from a table of all requests, as SGLang keeps it.

    The table is SGLang's `req_to_token` (sgl-project/sglang, layers/attention/triton_ops/metadata.py, commit bdd1bcd):
    a row for each request in the pool, a column for each token, with the token's place in the KV cache.

    req_pool_indices: padded rows use row 0 of the table, which is reserved.
    req_to_token: the engine's own table, which it binds and writes between steps.
    page_table: each page's first token divided by the page's size; all columns, also those behind the request's pages.
    """

    req_pool_indices: Tensor = copied(BATCH, dtype=int64, pad=0, poison=())
    req_to_token: Tensor = staged(POOL, PAGES * PAGE_SIZE, dtype=int32)
    page_table: Tensor = computed(layouts.pooled_pages, shape=(BATCH, PAGES), dtype=int32)


class FlashInferDecode(PagedCache):
    """Decode by FlashInfer's paged attention: the pages of all requests in one list.

    The layout is that of FlashInfer 0.6.18 (flashinfer-ai/flashinfer, docs/tutorials/kv_layout.rst, commit fb28d72).

    kv_indptr: where each request's pages begin in kv_indices, and behind them how many pages there are.
    kv_indices: the pages; no kernel reads those behind the last, which are 0, a page that is always there.
    kv_last_page_len: tokens in each request's last page; 0 if it has none, from which `get_seq_lens` makes 0 again.
    """

    kv_indptr: Tensor = computed(layouts.flashinfer_lists, shape=BATCH + 1, dtype=int32)
    kv_indices: Tensor = computed(layouts.flashinfer_lists, shape=BATCH * PAGES, dtype=int32)
    kv_last_page_len: Tensor = computed(layouts.flashinfer_lists, shape=BATCH, dtype=int32)


class FlashInferVerify(FlashInferDecode):
    """FlashInfer's paged attention with WIDTH query tokens for each request, as verify and draft-extend have them.

    extend_seq_lens: each request has WIDTH tokens.
    qo_indptr: where each request's query tokens begin, and behind them how many there are.
    """

    extend_seq_lens: Tensor = constant(WIDTH, shape=BATCH, dtype=int32)
    qo_indptr: Tensor = computed(layouts.flashinfer_query_lists, shape=BATCH + 1, dtype=int32)
    kv_indptr: Tensor = computed(layouts.flashinfer_query_lists, shape=BATCH + 1, dtype=int32)
    kv_indices: Tensor = computed(layouts.flashinfer_query_lists, shape=BATCH * PAGES, dtype=int32)
    kv_last_page_len: Tensor = computed(layouts.flashinfer_query_lists, shape=BATCH, dtype=int32)


class FlashInferPrefill(FlashInferVerify):
    """Prefill by FlashInfer's paged attention: each request has query tokens of its own number.

    extend_seq_lens: new tokens of each request; 0 in padded rows, so that padded tokens belong to no request.
    """

    extend_seq_lens: Tensor = copied(BATCH, dtype=int32, pad=0, poison=(), converts=(int64,))


class FlashAttention(PagedCache):
    """FlashAttention 3 and 4, and torch's varlen_attn: WIDTH query tokens for each request, as in decode and verify.

    The layout is that of `flash_attn_with_kvcache` and `flash_attn_varlen_func` (Dao-AILab/flash-attention,
    hopper/flash_attn_interface.py and flash_attn/cute/interface.py, commit 0251105), and of torch.nn.attention.varlen
    since torch 2.10, where cu_seqlens_q is `cu_seq_q`, cache_seqlens is `seqused_k` and page_table is `block_table`.

    Both take the longest lengths as numbers, which a graph keeps: give those of the bucket, from the shapes of slots.

    extend_seq_lens: each request has WIDTH tokens.
    cache_seqlens: seq_lens as int32, the dtype that kernels take.
    cu_seqlens_q: where each request's query tokens begin, and behind them how many there are.
    cu_seqlens_k: the same for its tokens in the cache, for keys that are not in pages.
    """

    extend_seq_lens: Tensor = constant(WIDTH, shape=BATCH, dtype=int32)
    cache_seqlens: Tensor = computed(layouts.flash_attention_lists, shape=BATCH, dtype=int32)
    cu_seqlens_q: Tensor = computed(layouts.flash_attention_lists, shape=BATCH + 1, dtype=int32)
    cu_seqlens_k: Tensor = computed(layouts.flash_attention_lists, shape=BATCH + 1, dtype=int32)


class FlashAttentionPrefill(FlashAttention):
    """As `FlashAttention`, in a prefill: each request has query tokens of its own number.

    extend_seq_lens: new tokens of each request; 0 in padded rows, so that padded tokens belong to no request.
    """

    extend_seq_lens: Tensor = copied(BATCH, dtype=int32, pad=0, poison=(), converts=(int64,))


class FlashMLA(PagedCache):
    """Decode by FlashMLA's dense kernel: how its work is spread over parts of the device.

    The schedule is that of FlashMLA (deepseek-ai/FlashMLA, csrc/smxx/decode/get_decoding_sched_meta and csrc/params.h,
    commit 9241ae3). Its pages have 64 tokens. SM_PARTS is multiprocessors // heads of keys // ceil(WIDTH * query heads
    / heads of keys / 64), at least 1. Give both tensors to a `FlashMLASchedMeta`. All requests of the bucket decide how
    each is split, padded ones too: `check` reports that as poison in seq_lens, unless you declare it again with
    poison=().

    cost_offsets: where each request's work begins, in blocks and the cost of beginning with a request.
    part_offsets: where each part of the device begins in all work.
    tile_scheduler_metadata: for each part 8 numbers: its first and its last request, the first block and the one behind
        the last, the first split, whether the first and the last request are split, and 0; idle parts begin at BATCH.
    num_splits: where each request's splits begin among those of all requests, and behind them how many there are.
    """

    cost_offsets: Tensor = computed(layouts.flash_mla_lists, shape=BATCH + 1, dtype=int32)
    part_offsets: Tensor = computed(layouts.flash_mla_lists, shape=SM_PARTS + 1, dtype=int32)
    tile_scheduler_metadata: Tensor = computed(layouts.flash_mla_lists, shape=(SM_PARTS, 8), dtype=int32)
    num_splits: Tensor = computed(layouts.flash_mla_lists, shape=BATCH + 1, dtype=int32)


class FlexDecode(PagedCache):
    """Decode by torch's flex attention over a paged cache: the tensors of a BlockMask, whose key blocks are pages.

    They are those of `create_block_mask` and `PagedAttention.convert_logical_block_mask` of torch 2.13
    (torch/nn/attention/flex_attention.py and torch/nn/attention/experimental/_paged_attention.py). Each request has one
    query token, and sees all of its tokens. Give them to `BlockMask.from_kv_blocks`, `page_table[:, None, None]` as
    full_kv_indices, and a mask for the last page: whether the place in the page is below seq_lens % PAGE_SIZE.

    full_kv_num_blocks: full pages, the first ones of page_table, to which the kernel applies no mask.
    kv_num_blocks: 1 if the last page is not full, else 0.
    kv_indices: that page first, then the others, which no kernel reads.
    """

    full_kv_num_blocks: Tensor = computed(layouts.flex_lists, shape=(BATCH, 1, 1), dtype=int32)
    kv_num_blocks: Tensor = computed(layouts.flex_lists, shape=(BATCH, 1, 1), dtype=int32)
    kv_indices: Tensor = computed(layouts.flex_lists, shape=(BATCH, 1, 1, PAGES), dtype=int32)


class TritonDecode(PagedCache):
    """Decode by Triton kernels that split keys and values, as SGLang writes them: the places of all tokens in one list.

    The layout is that of SGLang with `split_tile_size` (sgl-project/sglang, layers/attention/triton_backend.py, commit
    0085842): a request's parts depend on its own length alone, so that its result is the same in any batch.

    kv_indptr: where each request's tokens begin in kv_indices, and behind them how many there are.
    kv_indices: the places of tokens in the KV cache; no kernel reads those behind the last, which are 0.
    split_tile_size: the size of TILE, in memory that the device can read.
    num_kv_splits: how many parts each token's keys have, of TILE keys each.
    """

    kv_indptr: Tensor = computed(layouts.split_token_lists, shape=BATCH + 1, dtype=int32)
    kv_indices: Tensor = computed(layouts.split_token_lists, shape=BATCH * PAGES * PAGE_SIZE, dtype=int64)
    split_tile_size: Tensor = constant(TILE, shape=1, dtype=int32)
    num_kv_splits: Tensor = computed(layouts.split_token_lists, shape=TOKENS, dtype=int32)


class TritonDraft(PagedCache):
    """Drafting a tree by Triton kernels that split keys and values: lists of each step of one graph, for each branch.

    The layout is that of `generate_draft_decode_kv_indices` (sgl-project/sglang, speculative/spec_utils.py, commit
    00731f0) for pages of one token. A branch sees the request's tokens and its own drafts so far, that of the step
    itself included. Its drafts are STEPS tokens of the request's row, behind seq_lens and the branches before it, so
    page_table has room for all of them. Where a tree goes on from another branch (`DraftStep.branches`), a branch still
    sees its own earlier drafts, as with SGLang: that costs accepted tokens, and never makes a wrong one. Drafting
    without branches needs no lists of its own: it is a decode whose seq_lens advance.

    seq_lens: tokens of each request before the drafts; padded rows as in `PagedCache`.
    kv_indptr: for each step, where each branch's tokens begin in kv_indices, and behind them how many there are.
    kv_indices: for each step, the places of tokens in the KV cache; no kernel reads those behind the last, which are 0.
    """

    kv_indptr: Tensor = computed(layouts.draft_offsets, shape=(STEPS, TOKENS + 1), dtype=int32)
    kv_indices: Tensor = computed(layouts.draft_tokens, shape=(STEPS, TOKENS * PAGES * PAGE_SIZE), dtype=int64)


class FlashInferDraft(TritonDraft):
    """Drafting a tree by FlashInfer's paged attention with pages of one token, as SGLang plans it for each step.

    kv_indices: for each step, the pages; no kernel reads those behind the last, which are 0.
    kv_last_page_len: a page has one token.
    """

    kv_indices: Tensor = computed(layouts.draft_tokens, shape=(STEPS, TOKENS * PAGES * PAGE_SIZE), dtype=int32)
    kv_last_page_len: Tensor = constant(1, shape=TOKENS, dtype=int32)


class FusedInferAttention(PagedCache):
    """Fused infer attention of Ascend NPUs, which takes lengths as host parameters; page_table is its `block_table`.

    The arguments are those of `npu_fused_infer_attention_score` with the layout TND, as vllm-ascend's attention_v1.py
    gives them. Mix in `standard.HostLengths`, too: it has `actual_seq_lengths_kv`.

    actual_seq_lengths: where each request's query tokens end; on the host.
    """

    actual_seq_lengths: Tensor = computed(
        layouts.query_ends, shape=BATCH, dtype=int64, placement=HOST, argument="actual_seq_lengths"
    )


class LinearAttention(Inputs):
    """Prefill of linear attention, whose kernels go chunk by chunk and keep a state for each request.

    Chunks are those of flash-linear-attention (fla-org/flash-linear-attention, fla/ops/utils/index.py, commit 0091f40),
    the rest is that of vLLM's gated delta net (vllm-project/vllm, vllm/v1/attention/backends/gdn_attn.py, commit
    007d500).

    extend_seq_lens: new tokens of each request; 0 in padded rows, which have no chunk.
    extend_prefix_lens: cached tokens before the new ones; 0 in padded rows, which have no cache.
    state_indices: where each request's state is; kernels pass over -1, in padded rows.
    query_start_loc: where each request's new tokens begin, and behind them how many there are.
    has_initial_state: whether a request's state is there; else it begins with zeros.
    chunk_size: the size of CHUNK, in memory that the device can read.
    chunk_offsets: where each request's chunks begin, and behind them how many there are.
    chunk_indices: the request of each chunk, and its number there; those behind the last have no tokens.
    """

    extend_seq_lens: Tensor = copied(BATCH, dtype=int32, pad=0, poison=(), converts=(int64,))
    extend_prefix_lens: Tensor = copied(BATCH, dtype=int32, pad=0, converts=(int64,))
    state_indices: Tensor = copied(BATCH, dtype=int32, pad=-1, poison=())
    query_start_loc: Tensor = computed(layouts.query_offsets, shape=BATCH + 1, dtype=int32)
    has_initial_state: Tensor = computed(layouts.are_cached, shape=BATCH, dtype=torch.bool)
    chunk_size: Tensor = constant(CHUNK, shape=1, dtype=int32)
    chunk_offsets: Tensor = computed(layouts.chunk_offsets, shape=BATCH + 1, dtype=int64)
    chunk_indices: Tensor = computed(layouts.chunk_indices, shape=(CHUNKS, 2), dtype=int32)


class LinearAttentionVerify(Inputs):
    """Linear attention over drafts: a state for each of WIDTH tokens, so that rejected ones can be taken back.

    The layout is that of vLLM's gated delta net (vllm-project/vllm, vllm/v1/attention/backends/gdn_attn.py, commit
    007d500).

    state_indices: where the states after each token are; kernels pass over -1, in padded rows.
    num_accepted_tokens: how many tokens of the step before were accepted, which says at which state to begin.
    query_start_loc: where each request's tokens begin, and behind them how many there are; padded rows have none.
    """

    state_indices: Tensor = copied(BATCH, WIDTH, dtype=int32, pad=-1, poison=())
    num_accepted_tokens: Tensor = copied(BATCH, dtype=int32, pad=1)
    query_start_loc: Tensor = computed(layouts.live_query_offsets, shape=BATCH + 1, dtype=int32)


class SparseIndexer(PagedCache):
    """The indexer of sparse attention in decode and verify, which scores keys for each query token by itself.

    The layout is that of vLLM's for DeepSeek V3.2 (vllm-project/vllm, vllm/v1/attention/backends/mla/indexer.py, commit
    0023368).

    token_seq_lens: how many keys each query token sees: the request's for its last one, one less for each before it.
    """

    token_seq_lens: Tensor = computed(layouts.lengths_by_token, shape=TOKENS, dtype=int32)
