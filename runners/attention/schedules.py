"""Mixins with schedules of kernels: what `plan` makes on the host, split counts by the device, and sparse indexers."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, int32, int64, uint8

from ...dataflow.axes import BATCH, TOKENS, Axis, Step
from ...dataflow.capabilities import HOST, SEQ_LEN_FILL
from ...dataflow.errors import ConfigError
from ...dataflow.slots import computed, constant, copied
from ...dataflow.sources import fills, look_up
from . import layouts
from .kernels import FlashAttentionPrefill, FlashInferDecode, SparseIndexer, TritonDecode
from .layouts import PAGE_SIZE, PAGES

PLAN_BYTES: Final = Axis("PLAN_BYTES", fixed=True)
"""Bytes of the workspace on the device that FlashInfer plans into; its wrappers allocate 8 MiB."""
HEAD_BLOCKS: Final = Axis("HEAD_BLOCKS", fixed=True)
"""Blocks that SGLang's kernel has for the heads of a token: each a head, or the up to 16 that share a head of keys."""
SPLITS: Final = Axis("SPLITS", fixed=True)
"""The most parts that the keys of a token are split into."""
MULTIPROCESSORS: Final = Axis("MULTIPROCESSORS", fixed=True)
"""Multiprocessors of the device that a kernel spreads its work over."""
SPLIT_KEYS: Final = 256
"""DeepGEMM's `SPLIT_KV`: keys in one split of a query token."""


def host_page_counts(host_seq_lens: Tensor, step: Step) -> Tensor:
    """Return how many pages each request has, on the host."""
    return layouts.divided_up(host_seq_lens, step.padded(PAGE_SIZE))


def planned(host_page_counts: Tensor, settings: Any, out: Tensor) -> None:
    """Let the settings' `plan` write the workspace. Raise ConfigError if there is none."""
    plan = look_up(settings, "plan")
    if plan is None:
        raise ConfigError("settings have no 'plan', which calls the plan of FlashInfer's wrapper: plan(kv_indptr, out)")
    out.zero_()
    plan(layouts.offsets(host_page_counts), out)


class FlashInferPlanned(FlashInferDecode):
    """FlashInfer's decode with its `plan`, which the host calls if the number of pages of a request is another one.

    The plan of FlashInfer 0.6.18 depends on kv_indptr alone (flashinfer-ai/flashinfer,
    include/flashinfer/attention/scheduler.cuh, `DecodePlan` and `PrefillPlan`, commit fb28d72); that of its fa3
    kernels depends on more. The runner's settings have `plan`, a function of kv_indptr on the host, with padded
    requests, and of the workspace. It makes that the `_int_workspace_buffer` of the wrapper of so many requests,
    and calls its plan. What else is planned, `_plan_info`, is frozen in the graph: let the function raise if that
    differs from its first one.

    host_seq_lens: the batch's seq_lens_cpu, since reading seq_lens back would wait; padded rows as in seq_lens.
    host_page_counts: pages of each request, until one of which changes the plan is good; padded rows have a page, or
        none if they have no token, also at a capture.
    plan_workspace: which block works on which pages of which request; 0 where the plan writes nothing.
    """

    host_seq_lens: Tensor = copied(
        BATCH, dtype=int32, pad=SEQ_LEN_FILL, placement=HOST, converts=(int64,), source="seq_lens_cpu"
    )
    host_page_counts: Tensor = computed(host_page_counts, shape=BATCH, dtype=int32, placement=HOST, pad=SEQ_LEN_FILL)
    plan_workspace: Tensor = computed(planned, shape=PLAN_BYTES, dtype=uint8, again=("host_page_counts",))


def balanced_counts(
    seq_lens: Tensor, head_blocks: Tensor, most_splits: Tensor, multiprocessors: Tensor, out: Tensor
) -> None:
    """Write into how many parts each token's keys are split, by all lengths and by how much the device can run."""
    lens = seq_lens.clamp(min=1)
    longest = lens.amax()
    shortest = lens.amin()
    shortest = torch.where(longest * 8 < shortest * 10, longest, shortest)
    runs = (multiprocessors * (longest / 64).log2().clamp(min=1)).to(int32)
    by_length = layouts.divided_up(longest, shortest).minimum(most_splits)
    by_device = layouts.divided_up(runs, head_blocks * out.shape[0]).minimum(most_splits)
    chunks = torch.minimum(layouts.divided_up(longest, by_length), layouts.divided_up(longest, by_device))
    counts = layouts.divided_up(seq_lens, chunks)
    out.copy_(counts.repeat_interleave(layouts.queries_each(out.shape[0], len(seq_lens))))


class TritonBalanced(TritonDecode, drop=["split_tile_size"]):
    """As `TritonDecode`, with the split counts that SGLang uses by default: so many that the device is busy.

    The rule is that of `get_num_kv_splits_triton` (sgl-project/sglang, layers/attention/triton_ops/metadata.py, commit
    bdd1bcd); a length of 0, by which it would divide, counts as 1. SPLITS is `triton_attention_num_kv_splits`. All
    requests of the bucket decide how each is split, padded ones too: `check` reports that as poison in seq_lens, unless
    you declare it again with poison=(). The logarithm makes floats: the function is compiled by compile_computed=True.

    head_blocks: the size of HEAD_BLOCKS, in memory that the device can read.
    most_splits: as head_blocks, of SPLITS.
    multiprocessors: as head_blocks, of MULTIPROCESSORS.
    num_kv_splits: how many parts each token's keys have; at most SPLITS.
    """

    head_blocks: Tensor = constant(HEAD_BLOCKS, shape=1, dtype=int32)
    most_splits: Tensor = constant(SPLITS, shape=1, dtype=int32)
    multiprocessors: Tensor = constant(MULTIPROCESSORS, shape=1, dtype=int32)
    kv_indptr: Tensor = computed(layouts.token_lists, shape=BATCH + 1, dtype=int32)
    kv_indices: Tensor = computed(layouts.token_lists, shape=BATCH * PAGES * PAGE_SIZE, dtype=int64)
    num_kv_splits: Tensor = computed(balanced_counts, shape=TOKENS, dtype=int32)


@fills("cu_seqlen_ks", "cu_seqlen_ke")
def key_ranges(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, out: Mapping[str, Tensor]) -> None:
    """Write where the keys that each query token sees begin and end among those of all requests."""
    in_use, requests, numbers = layouts.packed(cu_seqlens_q, out["cu_seqlen_ks"].shape[0])
    cached = cu_seqlens_k[requests + 1] - cu_seqlens_q[requests + 1] + cu_seqlens_q[requests]
    out["cu_seqlen_ks"].copy_(cu_seqlens_k[requests] * in_use)
    out["cu_seqlen_ke"].copy_((cached + numbers + 1) * in_use)


class SparseIndexerPrefill(FlashAttentionPrefill):
    """The indexer of sparse attention in a prefill, which scores keys that were gathered, request by request.

    The layout is that of vLLM's for DeepSeek V3.2, of one chunk (vllm-project/vllm, vllm/v1/attention/backends/mla/
    indexer.py, commit 0023368), where cu_seqlens_k is called cu_seq_lens. DeepGEMM's `fp8_mqa_logits` takes both slots.

    cu_seqlen_ks: where the keys of each query token's request begin; 0 for tokens that no request owns.
    cu_seqlen_ke: where the keys end that the token sees, its own included; 0 for those tokens, which see none.
    """

    cu_seqlen_ks: Tensor = computed(key_ranges, shape=TOKENS, dtype=int32)
    cu_seqlen_ke: Tensor = computed(key_ranges, shape=TOKENS, dtype=int32)


def logits_schedule(token_seq_lens: Tensor, out: Tensor) -> None:
    """Write the query token and the split at which each multiprocessor begins, and behind them the end."""
    starts = layouts.offsets(layouts.divided_up(token_seq_lens, SPLIT_KEYS))
    parts = out.shape[0] - 1
    numbers = torch.arange(parts + 1, dtype=int32, device=out.device)
    work = numbers * (starts[-1] // parts) + (numbers - parts + starts[-1] % parts).clamp(min=0)
    out.copy_(torch.stack(layouts.located(starts, work), 1))


class SparseIndexerSchedule(SparseIndexer):
    """The indexer of sparse attention in decode with DeepGEMM's kernel: how its work is spread over the device.

    The schedule is that of `get_paged_mqa_logits_metadata` on Hopper (deepseek-ai/DeepGEMM, in deep_gemm/include:
    deep_gemm/scheduler/sm90_paged_mqa_logits.cuh, commit 54e2261), for one query token a row: its kernels then take
    `token_seq_lens[:, None]`, and in a verify step a page table with a row for each token.

    schedule_metadata: for each multiprocessor the query token and the split of its keys at which it begins, 256 keys a
        split; behind them how many query tokens there are, and 0.
    """

    schedule_metadata: Tensor = computed(logits_schedule, shape=(MULTIPROCESSORS + 1, 2), dtype=int32)
