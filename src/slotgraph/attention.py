"""What attention kernels read besides lengths and pages: declarations to mix in, computed in the graph."""

# fmt: off
from slotgraph import _publish  # noqa: I001 - several names a line
from slotgraph.runners.attention.kernels import (
    FlashAttention, FlashAttentionPrefill, FlashInferDecode, FlashInferDraft, FlashInferPrefill, FlashInferVerify,
    FlashMLA, FlexDecode, FusedInferAttention, LinearAttention, LinearAttentionVerify, PagedCache, PooledCache,
    SparseIndexer, TritonDecode, TritonDraft,
)
from slotgraph.runners.attention.layouts import CHUNK, CHUNKS, PAGE_SIZE, PAGES, POOL, SM_PARTS, TILE
from slotgraph.runners.attention.parts import (
    CONTEXT_RANK, CONTEXT_RANKS, INTERLEAVE, WINDOW, ContextParallel, FlashInferWindow, TritonWindow,
    WindowCache,
)
from slotgraph.runners.attention.schedules import (
    HEAD_BLOCKS, MULTIPROCESSORS, PLAN_BYTES, SPLITS, FlashInferPlanned, SparseIndexerPrefill,
    SparseIndexerSchedule, TritonBalanced,
)

__all__ = [
    "CHUNK", "CHUNKS", "CONTEXT_RANK", "CONTEXT_RANKS", "HEAD_BLOCKS", "INTERLEAVE", "MULTIPROCESSORS", "PAGES",
    "PAGE_SIZE", "PLAN_BYTES", "POOL", "SM_PARTS", "SPLITS", "TILE", "WINDOW", "ContextParallel",
    "FlashAttention", "FlashAttentionPrefill", "FlashInferDecode", "FlashInferDraft", "FlashInferPlanned",
    "FlashInferPrefill", "FlashInferVerify", "FlashInferWindow", "FlashMLA", "FlexDecode", "FusedInferAttention",
    "LinearAttention", "LinearAttentionVerify", "PagedCache", "PooledCache", "SparseIndexer", "SparseIndexerPrefill",
    "SparseIndexerSchedule", "TritonBalanced", "TritonDecode", "TritonDraft", "TritonWindow", "WindowCache",
]
# fmt: on

_publish(__name__)
