"""What attention kernels take, built request by request in plain Python, as each library documents its layout.

Nothing here is shared with the functions of `slotgraph.attention`. The sources are named in the declarations.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import create_block_mask

TILE: Final = 5
CHUNK: Final = 3
CHUNKS: Final = 20
SM_PARTS: Final = 7
Table = Sequence[Sequence[int]]


@attrs.frozen(kw_only=True)
class Requests:
    """One step of a bucket, padded requests included, and the sizes of its axes.

    lens: What attention sees of each request. table: Its row of the page table. queries: Its new tokens.
    states: Where its states are. accepted: How many tokens of the step before were accepted.
    """

    lens: list[int]
    table: Table
    queries: list[int]
    page: int
    pages: int
    states: Table = ()
    accepted: Sequence[int] = ()
    tile: int = TILE
    chunk: int = CHUNK
    chunks: int = CHUNKS
    parts: int = SM_PARTS

    def pages_of(self, request: int) -> list[int]:
        """The pages that a request uses."""
        return list(self.table[request][: math.ceil(self.lens[request] / self.page)])

    def places_of(self, request: int) -> list[int]:
        """Where each of its tokens is in the cache."""
        return [self.table[request][t // self.page] * self.page + t % self.page for t in range(self.lens[request])]


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


BUILDERS: Final[dict[str, Callable[[Requests], dict[str, Any]]]] = {
    "FlashInferDecode": flashinfer,
    "FlashInferVerify": flashinfer_queries,
    "FlashInferPrefill": flashinfer_queries,
    "FlashAttention": flash_attention,
    "FlashAttentionPrefill": flash_attention,
    "FlashMLA": flash_mla,
    "FlexDecode": flex_decode,
    "FusedInferAttention": fused_infer_attention,
    "LinearAttention": linear_attention,
    "LinearAttentionVerify": linear_attention_verify,
    "SparseIndexer": sparse_indexer,
    "TritonDecode": triton_decode,
}
"""What makes the slots of each declaration."""
