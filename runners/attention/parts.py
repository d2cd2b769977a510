"""Mixins for parts of a cache: layers that see only a sliding window, and ranks of a context-parallel group.

Their slots are computed as those of `kernels`: on the device, in the graph, whole numbers only.
"""

from collections.abc import Mapping
from typing import Final

from torch import Tensor, int32, int64

from ...dataflow.axes import BATCH, TOKENS, Axis
from ...dataflow.capabilities import SEQ_LEN_FILL
from ...dataflow.slots import computed, constant, copied
from ...dataflow.sources import fills
from . import layouts
from .kernels import FlashInferDecode, PagedCache, TritonDecode

WINDOW: Final = Axis("WINDOW", fixed=True)
"""Tokens that a layer with a sliding window sees, that of this step included."""
CONTEXT_RANKS: Final = Axis("CONTEXT_RANKS", fixed=True)
"""Ranks of a context-parallel group, each of which has a part of every sequence."""
CONTEXT_RANK: Final = Axis("CONTEXT_RANK", fixed=True)
"""Which of them this one is, from 0."""
INTERLEAVE: Final = Axis("INTERLEAVE", fixed=True)
"""Tokens in a row that one rank of a context-parallel group keeps: 1, or a number that divides PAGE_SIZE."""


def _window_kernel(
    out: Mapping[str, Tensor], seq_lens: Tensor, window_page_table: Tensor | None = None, **given: Tensor
) -> None:
    names = {"first_tokens": "window_kv_offsets", "lengths": "window_kv_lens", "tiles": "window_num_kv_splits"}
    is_of_tokens = "split_tile_size" in given
    names["token_offsets" if is_of_tokens else "page_offsets"] = "window_kv_indptr"
    names["tokens" if is_of_tokens else "pages"] = "window_kv_indices"
    lists = {name: out.get(slot) for name, slot in names.items()}
    layouts.by_kernel(seq_lens, lists, page_table=window_page_table, **given)


@fills("window_kv_offsets", "window_kv_lens", kernel=_window_kernel)
def window_bounds(seq_lens: Tensor, window_size: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first token of each request that its window has, and the tokens in its window."""
    first = (seq_lens - window_size).clamp(min=0).to(int32)
    return first, (seq_lens - first).to(int32)


@fills("window_kv_offsets", "window_kv_lens", "window_kv_indptr", "window_kv_indices", kernel=_window_kernel)
def window_page_lists(
    seq_lens: Tensor, window_size: Tensor, window_page_table: Tensor, page_size: Tensor
) -> tuple[Tensor, ...]:
    """Return what `window_bounds` returns, the offsets of each window's pages, and these pages."""
    first, lengths = window_bounds(seq_lens, window_size)
    first_pages = first // page_size
    kv_indptr = layouts.offsets(layouts.divided_up(seq_lens, page_size) - first_pages)
    return first, lengths, kv_indptr, layouts.packed_pages(window_page_table, kv_indptr, first_pages)


@fills(
    "window_kv_offsets",
    "window_kv_lens",
    "window_kv_indptr",
    "window_kv_indices",
    "window_num_kv_splits",
    kernel=_window_kernel,
)
def window_token_lists(
    seq_lens: Tensor,
    window_size: Tensor,
    window_page_table: Tensor,
    page_size: Tensor,
    split_tile_size: Tensor,
    out: Mapping[str, Tensor],
) -> None:
    """Write what `window_bounds` returns, offsets and places of each window's tokens, and how many parts they have."""
    first, lengths = window_bounds(seq_lens, window_size)
    kv_indptr = layouts.offsets(lengths)
    values = {"window_kv_offsets": first, "window_kv_lens": lengths, "window_kv_indptr": kv_indptr}
    if "window_kv_indices" in out:
        capacity = out["window_kv_indices"].shape[0]
        places = layouts.packed_tokens(window_page_table, kv_indptr, page_size, capacity, first)
        values["window_kv_indices"] = places
    if "window_num_kv_splits" in out:
        tokens = out["window_num_kv_splits"].shape[0]
        values["window_num_kv_splits"] = layouts.tile_counts(lengths, split_tile_size, tokens)
    layouts.write_each(out, values)


class WindowCache(PagedCache):
    """A second page table, of layers that see only a sliding window.

    It has a request's pages at the places where page_table has them, as vLLM's block tables of cache groups do
    (vllm-project/vllm, vllm/v1/core/single_type_kv_cache_manager.py): page j has tokens from j * PAGE_SIZE on. Those
    that the window has left may be any, such as 0. FlashAttention takes it with `window_size=(WINDOW - 1, 0)`.

    window_page_table: padded rows, and what is behind a request's pages, name page 0, which is kept free.
    window_size: the size of WINDOW, in memory that the device can read.
    window_kv_offsets: the first token of each request that its window has.
    window_kv_lens: the tokens in each request's window.
    """

    window_page_table: Tensor = copied(
        BATCH, layouts.PAGES, dtype=int32, pad=0, ragged=True, strided=True, converts=(int64,)
    )
    window_size: Tensor = constant(WINDOW, shape=1, dtype=int32)
    window_kv_offsets: Tensor = computed(window_bounds, shape=BATCH, dtype=int32)
    window_kv_lens: Tensor = computed(window_bounds, shape=BATCH, dtype=int32)


class FlashInferWindow(FlashInferDecode, WindowCache):
    """Decode by FlashInfer where some layers see a window only: a second list, of the pages that windows touch.

    SGLang trims its list so, with pages of one token (sgl-project/sglang, layers/attention/flashinfer_backend.py,
    `update_sliding_window`, commit 454e84d). A longer page may hold tokens that the window has left: plan with
    `window_left=WINDOW - 1`, too. kv_last_page_len serves both lists.

    window_kv_indptr: where each request's pages begin in window_kv_indices, and behind them how many there are.
    window_kv_indices: the pages; no kernel reads those behind the last, which are 0.
    """

    window_kv_offsets: Tensor = computed(window_page_lists, shape=BATCH, dtype=int32)
    window_kv_lens: Tensor = computed(window_page_lists, shape=BATCH, dtype=int32)
    window_kv_indptr: Tensor = computed(window_page_lists, shape=BATCH + 1, dtype=int32)
    window_kv_indices: Tensor = computed(window_page_lists, shape=BATCH * layouts.PAGES, dtype=int32)


class TritonWindow(TritonDecode, WindowCache):
    """Decode by SGLang's Triton kernels where some layers see a window only: a second list, of the windows' tokens.

    The layout is that of `update_sliding_window_buffer` (sgl-project/sglang, layers/attention/triton_backend.py, commit
    0085842), where WINDOW is called sliding_window_size.

    window_kv_indptr: where each request's tokens begin in window_kv_indices, and behind them how many there are.
    window_kv_indices: the places of tokens in the cache; no kernel reads those behind the last, which are 0.
    window_num_kv_splits: how many parts each token's keys have in the window, of TILE keys each.
    """

    window_kv_offsets: Tensor = computed(window_token_lists, shape=BATCH, dtype=int32)
    window_kv_lens: Tensor = computed(window_token_lists, shape=BATCH, dtype=int32)
    window_kv_indptr: Tensor = computed(window_token_lists, shape=BATCH + 1, dtype=int32)
    window_kv_indices: Tensor = computed(window_token_lists, shape=BATCH * WINDOW, dtype=int64)
    window_num_kv_splits: Tensor = computed(window_token_lists, shape=TOKENS, dtype=int32)


def local_lengths(global_seq_lens: Tensor, context_ranks: Tensor, context_rank: Tensor, interleave: Tensor) -> Tensor:
    """Return the tokens of each request that this rank keeps."""
    turn = interleave * context_ranks
    rest = (global_seq_lens % turn - context_rank * interleave).clamp(min=0)
    return (global_seq_lens // turn * interleave + rest.minimum(interleave)).to(int32)


class ContextParallel(PagedCache):
    """A rank's part of each sequence, where ranks of a group keep INTERLEAVE tokens each by turns, in decode.

    The parts are those of vLLM's decode context parallelism (vllm-project/vllm, `get_dcp_local_seq_lens` of
    vllm/v1/attention/backends/utils.py, commit a9e3b0a). page_table has this rank's pages. The slots of a kernel's
    declaration beside it are then those of the rank's part, which has length 0 if the rank has no token of a request.
    The step puts the results of ranks together, by their logarithms of sums.

    global_seq_lens: the batch's `seq_lens`; padded rows as there.
    context_ranks: the size of CONTEXT_RANKS, in memory that the device can read.
    context_rank: as context_ranks, of CONTEXT_RANK.
    interleave: as context_ranks, of INTERLEAVE.
    seq_lens: tokens of each request that this rank keeps.
    """

    global_seq_lens: Tensor = copied(BATCH, dtype=int32, pad=SEQ_LEN_FILL, converts=(int64,), source="seq_lens")
    context_ranks: Tensor = constant(CONTEXT_RANKS, shape=1, dtype=int32)
    context_rank: Tensor = constant(CONTEXT_RANK, shape=1, dtype=int32)
    interleave: Tensor = constant(INTERLEAVE, shape=1, dtype=int32)
    seq_lens: Tensor = computed(local_lengths, shape=BATCH, dtype=int32)
