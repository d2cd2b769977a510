"""What attention kernels take, built request by request in plain Python, as each library documents its layout.

Nothing here is shared with the functions of `slotgraph.attention`. The sources are named in the declarations.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import numpy as np
import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import create_block_mask

TILE: Final = 5
CHUNK: Final = 3
CHUNKS: Final = 20
SM_PARTS: Final = 7
WINDOW: Final = 6
RANKS: Final = 3
RANK: Final = 1
HEADS: Final = 8
GROUP: Final = 4
SPLITS: Final = 6
MULTIPROCESSORS: Final = 11
STEPS: Final = 2
Table = Sequence[Sequence[int]]


@attrs.frozen(kw_only=True)
class Requests:
    """One step of a bucket, padded requests included, and the sizes of its axes.

    lens: What attention sees of each request. table: Its row of the page table. queries: Its new tokens.
    states: Where its states are. accepted: How many tokens of the step before were accepted.
    window_table: Its row of the page table of layers with a window.
    drafts: Its drafts in all steps, behind what is in the cache.
    """

    lens: list[int]
    table: Table
    queries: list[int]
    page: int
    pages: int
    states: Table = ()
    accepted: Sequence[int] = ()
    window_table: Table = ()
    drafts: int = 0
    tile: int = TILE
    chunk: int = CHUNK
    chunks: int = CHUNKS
    parts: int = SM_PARTS

    @property
    def interleave(self) -> int:
        """Tokens in a row that a rank keeps: as many as divide a page."""
        return self.page // 2 if self.page % 2 == 0 else self.page

    def seen_of(self, request: int) -> range:
        """Its tokens that are in the window."""
        return range(max(self.lens[request] - WINDOW, 0), self.lens[request])

    def pages_of(self, request: int) -> list[int]:
        """The pages that a request uses."""
        return list(self.table[request][: math.ceil((self.lens[request] + self.drafts) / self.page)])

    def place_of(self, request: int, token: int) -> int:
        """Where one of its tokens is in the cache."""
        return self.table[request][token // self.page] * self.page + token % self.page

    def places_of(self, request: int) -> list[int]:
        """Where each of its tokens is in the cache."""
        return [self.place_of(request, token) for token in range(self.lens[request])]

    def branch_of(self, request: int, branch: int, step: int) -> list[int]:
        """Where the tokens are that a branch sees in a step: the request's, and its own drafts, one for each step."""
        first = self.lens[request] + branch * STEPS
        drafts = [self.place_of(request, token) for token in range(first, first + step + 1)]
        return self.places_of(request) + drafts


def starts(counts: Sequence[int]) -> list[int]:
    """Where each begins, and the total."""
    found = [0]
    for count in counts:
        found.append(found[-1] + count)
    return found


def joined(rows: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Rows one behind the other, and zeros to the capacity."""
    found = [value for row in rows for value in row]
    return found + [0] * (capacity - len(found))


def flashinfer(one: Requests) -> dict[str, Any]:
    """docs/tutorials/kv_layout.rst of FlashInfer: seq_len = page_size * (pages - 1) + last_page_len."""
    rows = [one.pages_of(i) for i in range(len(one.lens))]
    last = []
    for length, pages in zip(one.lens, rows, strict=True):
        last.append(length - one.page * (len(pages) - 1) if pages else 0)
    return {
        "kv_indptr": starts([len(pages) for pages in rows]),
        "kv_indices": joined(rows, len(one.lens) * one.pages),
        "kv_last_page_len": last,
    }


def flashinfer_queries(one: Requests) -> dict[str, Any]:
    """The same with query tokens."""
    return {**flashinfer(one), "qo_indptr": starts(one.queries)}


def flash_attention(one: Requests) -> dict[str, Any]:
    """The arguments of flash_attn_with_kvcache."""
    return {
        "cache_seqlens": one.lens,
        "cu_seqlens_q": starts(one.queries),
        "cu_seqlens_k": starts(one.lens),
        "page_table": [list(row) for row in one.table],
    }


def triton_decode(one: Requests) -> dict[str, Any]:
    """SGLang's Triton backend: places of tokens, not of pages; parts of one size."""
    group = one.queries[0]
    places = [one.places_of(i) for i in range(len(one.lens))]
    return {
        "kv_indptr": starts(one.lens),
        "kv_indices": joined(places, len(one.lens) * one.pages * one.page),
        "num_kv_splits": [math.ceil(length / one.tile) for length in one.lens for _ in range(group)],
    }


def draft(one: Requests) -> dict[str, Any]:
    """SGLang's generate_draft_decode_kv_indices, whose last page has one token."""
    offsets, indices = [], []
    for step in range(STEPS):
        branches = [(request, branch) for request, count in enumerate(one.queries) for branch in range(count)]
        rows = [one.branch_of(*branch, step) for branch in branches]
        offsets.append(starts([len(row) for row in rows]))
        indices.append(joined(rows, len(branches) * one.pages * one.page))
    return {"kv_indptr": offsets, "kv_indices": indices}


def flashinfer_draft(one: Requests) -> dict[str, Any]:
    """The same, and that each page has one token."""
    return {**draft(one), "kv_last_page_len": [1] * sum(one.queries)}


def flex_decode(one: Requests) -> dict[str, Any]:
    """Torch's own: a mask over logical blocks, converted by its class for paged caches."""
    rows, most, lens = len(one.lens), one.pages * one.page, torch.tensor(one.lens)
    paged = PagedAttention(41, one.page, rows, device="cpu")
    paged.page_table[:, : one.pages] = torch.tensor(one.table)
    mask = create_block_mask(lambda b, _h, _q, kv: kv < lens[b], rows, 1, 1, most, "cpu", (1, one.page))
    made = paged.convert_logical_block_mask(mask)
    assert made.full_kv_num_blocks is not None
    assert made.full_kv_indices is not None
    return {
        "kv_num_blocks": made.kv_num_blocks.tolist(),
        "kv_indices": made.kv_indices[..., : one.pages].tolist(),
        "full_kv_num_blocks": made.full_kv_num_blocks.tolist(),
        "page_table": made.full_kv_indices[:, 0, 0, : one.pages].tolist(),
    }


def mla_schedule(lens: Sequence[int], block: int, parts: int) -> tuple[list[list[int]], list[int]]:
    """FlashMLA's get_mla_metadata: parts one by one, each of which takes requests, or blocks of one, while it can.

    For idle parts the library reads the first block behind the end of its array; no kernel uses that, 0 here.
    """
    blocks = [max(math.ceil(length / block), 1) for length in lens]
    share = math.ceil(sum(count + 5 for count in blocks) / parts) + 5
    rows, splits, request, done, split = [], [0], 0, 0, 0
    for _ in range(parts):
        first, begin, begin_split, left = request, done, split, share
        while request < len(lens):
            if left < blocks[request] - done + 5:
                if left > 5:
                    done, split = done + left - 5, split + 1
                break
            left -= blocks[request] - done + 5
            splits.append(splits[-1] + split + 1)
            request, done, split = request + 1, 0, 0
        last = request if done else request - 1
        end = done or (blocks[last] if lens[last] else 0)
        is_split = [begin > 0, end != blocks[last] and lens[last] > 0]
        if first == last:
            is_split = [any(is_split)] * 2
        rows.append([first, last, begin, end, begin_split, *map(int, is_split), 0])
    assert (request, done) == (len(lens), 0)
    return rows, splits


def flash_mla(one: Requests) -> dict[str, Any]:
    """What FlashMLA's first call makes for all layers."""
    rows, splits = mla_schedule(one.lens, one.page, one.parts)
    return {"tile_scheduler_metadata": rows, "num_splits": splits}


def fused_infer_attention(one: Requests) -> dict[str, Any]:
    """The argument of npu_fused_infer_attention_score, of layout TND."""
    return {"actual_seq_lengths": starts(one.queries)[1:]}


def linear_attention(one: Requests) -> dict[str, Any]:
    """prepare_chunk_indices and prepare_chunk_offsets of flash-linear-attention, and vLLM's has_initial_state."""
    counts = [math.ceil(queries / one.chunk) for queries in one.queries]
    chunks = [[request, number] for request, count in enumerate(counts) for number in range(count)]
    last, behind = len(counts) - 1, one.chunks - len(chunks)
    return {
        "query_start_loc": starts(one.queries),
        "has_initial_state": [
            queries > 0 and length > queries for length, queries in zip(one.lens, one.queries, strict=True)
        ],
        "chunk_offsets": starts(counts),
        "chunk_indices": chunks + [[last, counts[last] + number] for number in range(behind)],
        "state_indices": [row[0] for row in one.states],
    }


def linear_attention_verify(one: Requests) -> dict[str, Any]:
    """VLLM's spec_query_start_loc, whose rows behind the live ones repeat the last, and what it pads."""
    widths = [queries if row[0] >= 0 else 0 for queries, row in zip(one.queries, one.states, strict=True)]
    return {
        "query_start_loc": starts(widths),
        "state_indices": [list(row) for row in one.states],
        "num_accepted_tokens": list(one.accepted),
    }


def sparse_indexer(one: Requests) -> dict[str, Any]:
    """VLLM's lengths for each token of a decode of equal queries."""
    pairs = zip(one.lens, one.queries, strict=True)
    found = [max(length - queries + token + 1, 0) for length, queries in pairs for token in range(queries)]
    return {"token_seq_lens": found, "page_table": [list(row) for row in one.table]}


def window_cache(one: Requests) -> dict[str, Any]:
    """Where windows begin, and what they hold."""
    seen = [one.seen_of(i) for i in range(len(one.lens))]
    return {
        "window_page_table": [list(row) for row in one.window_table],
        "window_kv_offsets": [tokens.start for tokens in seen],
        "window_kv_lens": [len(tokens) for tokens in seen],
    }


def flashinfer_window(one: Requests) -> dict[str, Any]:
    """The pages of tokens in the window, each once, in order."""
    rows = []
    for i, row in enumerate(one.window_table):
        rows.append([row[number] for number in sorted({token // one.page for token in one.seen_of(i)})])
    indices = joined(rows, len(one.lens) * one.pages)
    window = {"window_kv_indptr": starts([len(row) for row in rows]), "window_kv_indices": indices}
    return {**flashinfer(one), **window_cache(one), **window}


def triton_window(one: Requests) -> dict[str, Any]:
    """SGLang's update_sliding_window_buffer, of layers that have pages of their own."""
    rows = []
    for i, row in enumerate(one.window_table):
        rows.append([row[token // one.page] * one.page + token % one.page for token in one.seen_of(i)])
    splits = [math.ceil(len(row) / one.tile) for row in rows for _ in range(one.queries[0])]
    return {
        **triton_decode(one),
        **window_cache(one),
        "window_kv_indptr": starts([len(row) for row in rows]),
        "window_kv_indices": joined(rows, len(one.lens) * WINDOW),
        "window_num_kv_splits": splits,
    }


def context_parallel(one: Requests) -> dict[str, Any]:
    """Tokens go to ranks by turns, so many in a row."""
    own = [[t for t in range(length) if t // one.interleave % RANKS == RANK] for length in one.lens]
    return {"seq_lens": [len(tokens) for tokens in own], "page_table": [list(row) for row in one.table]}


def triton_balanced(one: Requests) -> dict[str, Any]:
    """SGLang's get_num_kv_splits_triton, one program for all requests; float32 where the kernel has it."""
    lens, tokens = [max(length, 1) for length in one.lens], sum(one.queries)
    longest, shortest = max(lens), min(lens)
    if longest * 8 < shortest * 10:
        shortest = longest
    first = min(math.ceil(longest / shortest), SPLITS)
    scale = np.maximum(np.log2(np.float32(longest) / np.float32(64)), np.float32(1))
    cores = int(np.float32(MULTIPROCESSORS) * scale)
    second = min(math.ceil(cores / (tokens * math.ceil(HEADS / min(16, GROUP)))), SPLITS)
    chunks = math.ceil(longest / first), math.ceil(longest / second)
    counts = [max(math.ceil(length / chunk) for chunk in chunks) for length in one.lens]
    splits = [count for count, queries in zip(counts, one.queries, strict=True) for _ in range(queries)]
    return {**triton_decode(one), "num_kv_splits": splits}


def sparse_indexer_prefill(one: Requests) -> dict[str, Any]:
    """VLLM's kernel for the metadata of one chunk, token by token; 0 in rows behind the last."""
    begin, end, keys = [], [], 0
    for length, queries in zip(one.lens, one.queries, strict=True):
        for token in range(queries):
            begin.append(keys)
            end.append(keys + length - queries + token + 1)
        keys += length
    tokens = len(one.lens) * 6
    return {**flash_attention(one), "cu_seqlen_ks": joined([begin], tokens), "cu_seqlen_ke": joined([end], tokens)}


def sparse_indexer_schedule(one: Requests) -> dict[str, Any]:
    """DeepGEMM's metadata on Hopper: of all splits, the last parts have one more where they do not divide."""
    made = sparse_indexer(one)
    lens, parts = made["token_seq_lens"], MULTIPROCESSORS
    units = [[token, split] for token, length in enumerate(lens) for split in range(math.ceil(length / 256))]
    share, more = divmod(len(units), parts)
    sizes = [share] * (parts - more) + [share + 1] * more
    units.append([len(lens), 0])
    return {**made, "schedule_metadata": [units[place] for place in starts(sizes)]}


BUILDERS: Final[dict[str, Callable[[Requests], dict[str, Any]]]] = {
    "ContextParallel": context_parallel,
    "FlashInferDecode": flashinfer,
    "FlashInferDraft": flashinfer_draft,
    "FlashInferVerify": flashinfer_queries,
    "FlashInferPrefill": flashinfer_queries,
    "FlashInferWindow": flashinfer_window,
    "FlashAttention": flash_attention,
    "FlashAttentionPrefill": flash_attention,
    "FlashMLA": flash_mla,
    "FlexDecode": flex_decode,
    "FusedInferAttention": fused_infer_attention,
    "LinearAttention": linear_attention,
    "LinearAttentionVerify": linear_attention_verify,
    "SparseIndexer": sparse_indexer,
    "SparseIndexerPrefill": sparse_indexer_prefill,
    "SparseIndexerSchedule": sparse_indexer_schedule,
    "TritonBalanced": triton_balanced,
    "TritonDecode": triton_decode,
    "TritonDraft": draft,
    "TritonWindow": triton_window,
    "WindowCache": window_cache,
}
"""What makes the slots of each declaration."""
