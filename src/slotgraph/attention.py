"""What attention kernels read besides lengths and pages: declarations to mix in, computed in the graph."""

# fmt: off
from slotgraph import _publish  # noqa: I001 - several names a line
from slotgraph.runners.attention.kernels import (
    FlashAttention, FlashAttentionPrefill, FlashInferDecode, FlashInferPrefill, FlashInferVerify, FlashMLA, FlexDecode,
    FusedInferAttention, LinearAttention, LinearAttentionVerify, PagedCache, PooledCache, SparseIndexer,
    TritonDecode,
)
from slotgraph.runners.attention.layouts import CHUNK, CHUNKS, PAGE_SIZE, PAGES, POOL, SM_PARTS, TILE

__all__ = [
    "CHUNK", "CHUNKS", "PAGES", "PAGE_SIZE", "POOL", "SM_PARTS", "TILE", "FlashAttention", "FlashAttentionPrefill",
    "FlashInferDecode", "FlashInferPrefill", "FlashInferVerify", "FlashMLA", "FlexDecode", "FusedInferAttention",
    "LinearAttention", "LinearAttentionVerify", "PagedCache", "PooledCache", "SparseIndexer", "TritonDecode",
]
# fmt: on

_publish(__name__)
