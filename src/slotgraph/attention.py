"""What attention kernels read besides lengths and pages: declarations to mix in, computed in the graph."""

# fmt: off
from slotgraph import _publish  # noqa: I001 - several names a line
from slotgraph.runners.attention.kernels import (
    FlashAttention, FlashAttentionPrefill, FlashInferDecode, FlashInferPrefill, FlashInferVerify, FlashMLA, FlexDecode,
    PagedCache, PooledCache, TritonDecode, TritonDecodeBalanced,
)
from slotgraph.runners.attention.layouts import (
    CORES, HEAD_BLOCKS, PAGES, PAGE_SIZE, POOL, SM_PARTS, SPLITS, TILE,
)

__all__ = [
    "CORES", "HEAD_BLOCKS", "PAGES", "PAGE_SIZE", "POOL", "SM_PARTS", "SPLITS", "TILE", "FlashAttention",
    "FlashAttentionPrefill", "FlashInferDecode", "FlashInferPrefill", "FlashInferVerify", "FlashMLA", "FlexDecode", "PagedCache", "PooledCache",
    "TritonDecode", "TritonDecodeBalanced",
]
# fmt: on

_publish(__name__)
