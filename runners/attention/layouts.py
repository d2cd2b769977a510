"""Layouts of attention kernels: axes, and functions that make each slot from lengths and a page table."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, int32

from ...dataflow.axes import BATCH, TOKENS, Axis, Step
from ...dataflow.sources import fills

PAGES: Final = Axis("PAGES", fixed=True)
"""The most pages that one request may have."""
PAGE_SIZE: Final = Axis("PAGE_SIZE", fixed=True)
"""Tokens in one page of the KV cache."""
POOL: Final = Axis("POOL", fixed=True)
"""Rows of the table of a pool of requests, the reserved row 0 included."""
SM_PARTS: Final = Axis("SM_PARTS", fixed=True)
"""Parts of the device that FlashMLA spreads its work over."""
CHUNK: Final = Axis("CHUNK", fixed=True)
"""Tokens in one chunk of linear attention."""
CHUNKS: Final = Axis("CHUNKS", fixed=True)
"""The most chunks that a step may have: its tokens divided by CHUNK, and one for each request."""
TILE: Final = Axis("TILE", fixed=True)
"""Keys in one part of a request, if all parts have as many."""


def offsets(lengths: Tensor) -> Tensor:
    """Return where each request's items begin, and behind them the total: int32, one more than there are requests."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=int32), (1, 0))


def divided_up(number: Tensor, divisor: Tensor | int) -> Tensor:
    """Return the quotient, rounded up."""
    return (number + divisor - 1) // divisor


def located(starts: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return of each place the last item that begins there or before, and how far behind its beginning the place is."""
    items = torch.searchsorted(starts, places, right=True) - 1
    return items, places - starts[items]


def query_offsets(extend_seq_lens: Tensor) -> Tensor:
    """Return the offsets of each request's query tokens."""
    return offsets(extend_seq_lens)


def query_ends(step: Step) -> list[int]:
    """Return where each request's query tokens end if each has as many: a list, which host parameters take."""
    requests = step.padded(BATCH)
    return [(row + 1) * step.padded(TOKENS) // requests for row in range(requests)]


def page_offsets(seq_lens: Tensor, page_size: Tensor) -> Tensor:
    """Return the offsets of each request's pages."""
    return offsets(divided_up(seq_lens, page_size))


def packed(indptr: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each place of a packed list whether it is in use, and the request and the item that it holds."""
    requests, items = located(indptr, torch.arange(capacity, dtype=int32, device=indptr.device))
    in_use = requests < indptr.shape[0] - 1
    return in_use, requests * in_use, items * in_use


def packed_pages(page_table: Tensor, kv_indptr: Tensor, first: Tensor | None = None) -> Tensor:
    """Return the pages of all requests one behind the other, and 0 behind the last.

    first: The first page of each request. None: it is 0.
    """
    in_use, requests, pages = packed(kv_indptr, page_table.numel())
    pages = pages if first is None else first[requests] + pages
    return page_table[requests, pages] * in_use


def packed_tokens(
    page_table: Tensor, kv_indptr: Tensor, page_size: Tensor, capacity: int, first: Tensor | None = None
) -> Tensor:
    """Return the places of all requests' tokens as `packed_pages` returns pages: int64. first: As there, a token."""
    in_use, requests, tokens = packed(kv_indptr, capacity)
    tokens = tokens if first is None else first[requests] + tokens
    return (page_table[requests, tokens // page_size].long() * page_size + tokens % page_size) * in_use


def write_each(out: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write the values of those slots that there are."""
    for name, target in out.items():
        target.copy_(values[name])


def last_page_lengths(seq_lens: Tensor, page_size: Tensor) -> Tensor:
    """Return the tokens in each request's last page: 0 for a request without tokens, else 1 to the page's size."""
    return (((seq_lens - 1) % page_size + 1) * (seq_lens > 0)).to(int32)


def queries_each(tokens: int, requests: int) -> int:
    """Return how many query tokens each request has. Raise ValueError if they cannot have equally many."""
    if tokens % (requests or 1):
        raise ValueError(
            f"{tokens} padded tokens do not divide among {requests} padded requests, and requests have equally many in "
            "the decode and verify steps that this set is for: mix in a prefill's set, or choose buckets that divide"
        )
    return tokens // (requests or 1)


def tile_counts(seq_lens: Tensor, split_tile_size: Tensor, tokens: int) -> Tensor:
    """Return into how many parts of one size each token's keys are split. Every request has as many tokens."""
    counts = divided_up(seq_lens, split_tile_size)
    return counts.repeat_interleave(queries_each(tokens, len(counts)))


_OVERHEAD: Final = 5
"""FlashMLA's `fixed_overhead_num_blocks`: what beginning with a request costs, in blocks."""


def block_costs(seq_lens: Tensor, page_size: Tensor) -> Tensor:
    """Return the offsets of each request's work: its blocks, at least one, and the cost of beginning with it."""
    return offsets(divided_up(seq_lens, page_size).clamp(min=1) + _OVERHEAD)


def part_starts(cost_offsets: Tensor, page_table: Tensor, parts: int) -> Tensor:
    """Return the place in all work at which each part of the device begins, and behind them where the last one ends.

    A part takes whole requests while its share lasts, and then blocks of the next one, if it can begin with that. Where
    a part ends depends on where it begins: `ends` has this for each place, then for two parts in a row, four, and so
    on, so that the parts that are known give as many more.
    """
    work = page_table.numel() + page_table.shape[0] * _OVERHEAD
    places = torch.arange(work + 1, dtype=int32, device=cost_offsets.device)
    reach = places + divided_up(cost_offsets[-1:], parts) + _OVERHEAD
    unused = located(cost_offsets, reach)[1].clamp(max=_OVERHEAD)
    ends = torch.minimum(reach - unused, cost_offsets[-1:])
    starts = places[:1]
    while starts.shape[0] <= parts:
        starts = torch.cat([starts, ends[starts]])
        ends = ends[ends]
    return starts[: parts + 1]


def tile_schedule(cost_offsets: Tensor, part_offsets: Tensor, seq_lens: Tensor) -> Tensor:
    """Return for each part its first and last request, blocks of these, first split, and whether they are split."""
    first, begin = located(cost_offsets, part_offsets[:-1])
    last, end = located(cost_offsets, part_offsets[1:])
    is_cut = end > 0
    last = torch.where(is_cut, last, last - 1)
    blocks = cost_offsets[last + 1] - cost_offsets[last] - _OVERHEAD
    end = torch.where(is_cut, end, blocks * (seq_lens[last] > 0))
    before = torch.searchsorted(part_offsets, cost_offsets[first], right=True)
    split = (torch.arange(1, first.shape[0] + 1, device=first.device) - before).clamp(min=0)
    either = (first == last) & ((begin > 0) | is_cut)
    columns = (first, last, begin, end, split, (begin > 0) | either, is_cut | either, first * 0)
    return torch.stack(columns, 1).to(int32)


def split_offsets(cost_offsets: Tensor, part_offsets: Tensor) -> Tensor:
    """Return the offsets of each request's splits: one, and one more for each part that begins inside of it."""
    is_cut = located(cost_offsets, part_offsets)[1] > 0
    cuts = (is_cut & (part_offsets < cost_offsets[:, None])).sum(1)
    return (torch.arange(cuts.shape[0], device=cuts.device) + cuts).to(int32)


def pooled_pages(req_to_token: Tensor, req_pool_indices: Tensor, page_size: Tensor, out: Tensor) -> None:
    """Write each request's pages: those of its first token in each page."""
    first_tokens = torch.arange(out.shape[1], device=out.device) * page_size
    out.copy_(req_to_token[req_pool_indices[:, None], first_tokens] // page_size)


def chunk_offsets(extend_seq_lens: Tensor, chunk_size: Tensor) -> Tensor:
    """Return the offsets of each request's chunks: int64, as flash-linear-attention has them."""
    return offsets(divided_up(extend_seq_lens, chunk_size)).long()


def chunk_indices(chunk_offsets: Tensor, out: Tensor) -> None:
    """Write the request of each chunk, and its number there. Those in the tail are behind the last one's end."""
    places = torch.arange(out.shape[0], device=out.device)
    requests = located(chunk_offsets, places)[0].clamp(max=chunk_offsets.shape[0] - 2)
    out.copy_(torch.stack([requests, places - chunk_offsets[requests]], 1))


def are_cached(extend_prefix_lens: Tensor) -> Tensor:
    """Return whether each request has cached tokens, and so a state to begin with."""
    return extend_prefix_lens > 0


def live_query_offsets(state_indices: Tensor) -> Tensor:
    """Return the offsets of query tokens: as many as states for each request that has some, none for others."""
    return offsets((state_indices[:, 0] >= 0) * state_indices.shape[1])


def lengths_by_token(seq_lens: Tensor, out: Tensor) -> None:
    """Write how many keys each query token sees if every request has as many: one more for each next token."""
    width = queries_each(out.shape[0], len(seq_lens))
    out.copy_((seq_lens[:, None] + torch.arange(1 - width, 1, device=out.device)).clamp(min=0).flatten())


def by_kernel(seq_lens: Tensor, lists: Mapping[str, Tensor | None], **given: Tensor | None) -> None:
    """Write lists by one kernel. lists: What it writes, by its own names of them."""
    from .lists_kernel import launch  # noqa: PLC0415 - it needs triton, which is there with a CUDA device

    launch(seq_lens, lists, **given)


def _flash_mla_kernel(out: Mapping[str, Tensor], seq_lens: Tensor, page_table: Tensor, page_size: Tensor) -> None:
    from .lists_kernel import launch_schedule  # noqa: PLC0415 - as in `by_kernel`

    del page_table  # only its size counts, for the function
    launch_schedule(seq_lens, page_size, _OVERHEAD, **out)


@fills("cost_offsets", "part_offsets", "tile_scheduler_metadata", "num_splits", kernel=_flash_mla_kernel)
def flash_mla_lists(seq_lens: Tensor, page_table: Tensor, page_size: Tensor, out: Mapping[str, Tensor]) -> None:
    """Write the offsets of requests and of parts in all work, the schedule of parts, and the offsets of splits."""
    parts = [
        len(out[name]) - more for name, more in (("tile_scheduler_metadata", 0), ("part_offsets", 1)) if name in out
    ]
    if not parts:
        raise ValueError("no slot has SM_PARTS: of tile_scheduler_metadata and part_offsets, drop one at most")
    cost_offsets = block_costs(seq_lens, page_size)
    part_offsets = part_starts(cost_offsets, page_table, parts[0])
    values = {
        "cost_offsets": cost_offsets,
        "part_offsets": part_offsets,
        "tile_scheduler_metadata": tile_schedule(cost_offsets, part_offsets, seq_lens),
        "num_splits": split_offsets(cost_offsets, part_offsets),
    }
    write_each(out, values)


def _flash_attention_kernel(out: Mapping[str, Tensor], seq_lens: Tensor, extend_seq_lens: Tensor) -> None:
    lists = {
        "lengths": out.get("cache_seqlens"),
        "query_offsets": out.get("cu_seqlens_q"),
        "token_offsets": out.get("cu_seqlens_k"),
    }
    by_kernel(seq_lens, lists, queries=extend_seq_lens)


@fills("cache_seqlens", "cu_seqlens_q", "cu_seqlens_k", kernel=_flash_attention_kernel)
def flash_attention_lists(seq_lens: Tensor, extend_seq_lens: Tensor) -> tuple[Tensor, ...]:
    """Return the lengths in the dtype that kernels take, and the offsets of query tokens and of tokens in the cache."""
    return seq_lens.to(int32), offsets(extend_seq_lens), offsets(seq_lens)


def _flashinfer_kernel(
    out: Mapping[str, Tensor], seq_lens: Tensor, extend_seq_lens: Tensor | None = None, **pages: Tensor
) -> None:
    lists = {
        "page_offsets": out["kv_indptr"],
        "pages": out.get("kv_indices"),
        "last_lengths": out.get("kv_last_page_len"),
        "query_offsets": out.get("qo_indptr"),
    }
    by_kernel(seq_lens, lists, queries=extend_seq_lens, **pages)


@fills("kv_indptr", "kv_indices", "kv_last_page_len", kernel=_flashinfer_kernel)
def flashinfer_lists(seq_lens: Tensor, page_table: Tensor, page_size: Tensor) -> tuple[Tensor, ...]:
    """Return the offsets of pages, the pages, and the tokens in each request's last page."""
    kv_indptr = page_offsets(seq_lens, page_size)
    return kv_indptr, packed_pages(page_table, kv_indptr), last_page_lengths(seq_lens, page_size)


@fills("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len", kernel=_flashinfer_kernel)
def flashinfer_query_lists(
    extend_seq_lens: Tensor, seq_lens: Tensor, page_table: Tensor, page_size: Tensor
) -> tuple[Tensor, ...]:
    """Return the offsets of query tokens, and what `flashinfer_lists` returns."""
    return offsets(extend_seq_lens), *flashinfer_lists(seq_lens, page_table, page_size)


def _tokens_kernel(out: Mapping[str, Tensor], seq_lens: Tensor, **given: Tensor) -> None:
    lists = {"token_offsets": out["kv_indptr"], "tokens": out.get("kv_indices"), "tiles": out.get("num_kv_splits")}
    by_kernel(seq_lens, lists, **given)


@fills("kv_indptr", "kv_indices", kernel=_tokens_kernel)
def token_lists(seq_lens: Tensor, page_table: Tensor, page_size: Tensor, out: Mapping[str, Tensor]) -> None:
    """Write the offsets of tokens, and their places in the cache."""
    kv_indptr = offsets(seq_lens)
    values = {"kv_indptr": kv_indptr}
    if "kv_indices" in out:
        capacity = out["kv_indices"].shape[0]
        values["kv_indices"] = packed_tokens(page_table, kv_indptr, page_size, capacity)
    write_each(out, values)


@fills("kv_indptr", "kv_indices", "num_kv_splits", kernel=_tokens_kernel)
def split_token_lists(
    seq_lens: Tensor, page_table: Tensor, page_size: Tensor, split_tile_size: Tensor, out: Mapping[str, Tensor]
) -> None:
    """Write what `token_lists` writes, and how many parts each token's keys have."""
    lists = dict(out)
    if "num_kv_splits" in lists:
        counts = lists.pop("num_kv_splits")
        counts.copy_(tile_counts(seq_lens, split_tile_size, counts.shape[0]))
    token_lists(seq_lens, page_table, page_size, lists)


def draft_offsets(seq_lens: Tensor, out: Tensor) -> None:
    """Write, for each step, where each branch's tokens begin: the request's, and one draft more in each step."""
    steps = out.shape[0]
    tokens = out.shape[1] - 1
    cached = seq_lens.repeat_interleave(queries_each(tokens, len(seq_lens)))
    drafts = torch.arange(1, steps + 1, dtype=int32, device=out.device)[:, None]
    out.copy_(torch.nn.functional.pad((cached + drafts).cumsum(1), (1, 0)))


def draft_tokens(page_table: Tensor, kv_indptr: Tensor, seq_lens: Tensor, page_size: Tensor, out: Tensor) -> None:
    """Write, for each step, the places of each branch's tokens one behind the other, and 0 behind the last."""
    steps = out.shape[0]
    branches = queries_each(kv_indptr.shape[1] - 1, len(seq_lens)) or 1
    for starts, places in zip(kv_indptr, out, strict=True):
        in_use, rows, tokens = packed(starts, places.shape[0])
        requests = rows // branches
        is_draft = tokens >= seq_lens[requests]
        tokens = tokens + rows % branches * steps * is_draft
        found = page_table[requests, tokens // page_size].to(out.dtype) * page_size + tokens % page_size
        places.copy_(found * in_use)


def _flex_kernel(out: Mapping[str, Tensor], seq_lens: Tensor, **pages: Tensor) -> None:
    lists = {
        "full_counts": out["full_kv_num_blocks"],
        "part_counts": out["kv_num_blocks"],
        "part_first": out["kv_indices"],
    }
    by_kernel(seq_lens, lists, **pages)


@fills("full_kv_num_blocks", "kv_num_blocks", "kv_indices", kernel=_flex_kernel)
def flex_lists(seq_lens: Tensor, page_table: Tensor, page_size: Tensor) -> tuple[Tensor, ...]:
    """Return how many pages are full, whether the last one is not, and the pages with that one before all others."""
    full = (seq_lens // page_size).to(int32)
    part = (seq_lens % page_size > 0).to(int32)
    front = (full * part)[:, None]
    columns = torch.arange(page_table.shape[1], device=page_table.device)
    order = torch.where(columns == 0, front, columns - (columns <= front).long())
    return full[:, None, None], part[:, None, None], page_table.gather(1, order)[:, None, None]
