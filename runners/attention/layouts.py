"""Layouts of attention kernels: axes, and functions that make each slot from lengths and a page table."""

from typing import Final

import torch
from torch import Tensor

from ...dataflow.axes import BATCH, WIDTH, Axis, Step

PAGES: Final = Axis("PAGES", fixed=True)
"""The most pages that one request may have."""
PAGE_SIZE: Final = Axis("PAGE_SIZE", fixed=True)
"""Tokens in one page of the KV cache."""
KV_PAGES: Final = Axis("KV_PAGES", fixed=True)
"""Pages of the whole KV cache, page 0 included."""
POOL: Final = Axis("POOL", fixed=True)
"""Rows of the table of a pool of requests, the reserved row 0 included."""

CORES: Final = Axis("CORES", fixed=True)
"""Multiprocessors of the device."""
HEADS: Final = Axis("HEADS", fixed=True)
"""Query heads of this rank."""
KV_HEADS: Final = Axis("KV_HEADS", fixed=True)
"""Heads of keys and values of this rank."""
SPLITS: Final = Axis("SPLITS", fixed=True)
"""The most parts that a request's keys are split into."""
SM_PARTS: Final = Axis("SM_PARTS", fixed=True)
"""Parts of the device that FlashMLA spreads its work over."""
TILE: Final = Axis("TILE", fixed=True)
"""Keys in one part of a request, if all parts have as many."""


def offsets(lengths: Tensor) -> Tensor:
    """Return where each request's items begin, and behind them the total: int32, one more than there are requests."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def page_counts(seq_lens: Tensor, page_size: Tensor) -> Tensor:
    """Return how many pages each request has."""
    return _divided_up(seq_lens, page_size)


def length_offsets(seq_lens: Tensor) -> Tensor:
    """Return the offsets of each request's tokens in the cache."""
    return offsets(seq_lens)


def query_offsets(extend_seq_lens: Tensor) -> Tensor:
    """Return the offsets of each request's query tokens."""
    return offsets(extend_seq_lens)


def even_offsets(step: Step) -> Tensor:
    """Return the offsets of query tokens if each request has WIDTH of them, at full capacity."""
    return torch.arange(step.padded(BATCH) + 1, dtype=torch.int32, device="cpu") * step.padded(WIDTH)


def page_offsets(seq_lens: Tensor, page_size: Tensor) -> Tensor:
    """Return the offsets of each request's pages."""
    return offsets(page_counts(seq_lens, page_size))


def _packed(indptr: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each place of a packed list whether it is in use, and the request and the item that it holds."""
    places = torch.arange(capacity, dtype=torch.int32, device=indptr.device)
    owners = torch.searchsorted(indptr[1:], places, right=True)
    in_use = owners < indptr.shape[0] - 1
    requests = torch.where(in_use, owners, 0)
    return in_use, requests, torch.where(in_use, places - indptr[requests], 0)


def packed_pages(page_table: Tensor, kv_indptr: Tensor) -> Tensor:
    """Return the pages of all requests one behind the other, and 0 behind the last."""
    in_use, requests, pages = _packed(kv_indptr, page_table.numel())
    return torch.where(in_use, page_table[requests, pages], 0)


def packed_tokens(page_table: Tensor, kv_indptr: Tensor, page_size: Tensor, out: Tensor) -> None:
    """Write the places of all requests' tokens one behind the other, and 0 behind the last."""
    in_use, requests, tokens = _packed(kv_indptr, out.shape[0])
    places = page_table[requests, tokens // page_size].to(out.dtype) * page_size + tokens % page_size
    out.copy_(torch.where(in_use, places, 0))


def last_page_lengths(seq_lens: Tensor, page_size: Tensor) -> Tensor:
    """Return the tokens in each request's last page: 0 for a request without tokens, else 1 to the page's size."""
    return (seq_lens - (page_counts(seq_lens, page_size) - 1).clamp(min=0) * page_size).to(torch.int32)


def lengths_in_int32(seq_lens: Tensor) -> Tensor:
    """Return the lengths in the dtype that kernels take."""
    return seq_lens.to(torch.int32)


def cores_by_length(step: Step) -> Tensor:
    """Return, for each length of the longest request, as how many cores the device counts: more for longer ones.

    The formula is int(cores * max(log2(length / 64), 1)), in float32. The table is made once, so that a step needs
    whole numbers only.
    """
    lengths = torch.arange(step.padded(PAGES * PAGE_SIZE) + 1, dtype=torch.float32, device="cpu")
    return (step.padded(CORES) * (lengths / 64).log2().clamp(min=1)).to(torch.int32)


def split_counts(  # noqa: PLR0913 - each is a slot
    seq_lens: Tensor,
    scaled_cores: Tensor,
    num_heads: Tensor,
    num_kv_heads: Tensor,
    max_kv_splits: Tensor,
    out: Tensor,
) -> None:
    """Write into how many parts each token's keys are split: more for longer requests, and for small batches.

    A chunk is as long as the shortest request, or as makes one part a core, whichever gives more parts.
    """
    longest, shortest = seq_lens.amax(0, keepdim=True), seq_lens.amin(0, keepdim=True)
    shortest = torch.where(longest * 8 < shortest * 10, longest, shortest).clamp(min=1)
    group = num_heads // num_kv_heads
    head_blocks = torch.where(group == 1, num_heads, _divided_up(num_heads, group.clamp(max=16)))
    by_length = _divided_up(longest, shortest)
    by_cores = _divided_up(scaled_cores[longest.clamp(max=scaled_cores.shape[0] - 1)], head_blocks * out.shape[0])
    parts = [torch.minimum(one, max_kv_splits) for one in (by_length, by_cores)]
    chunks = [_divided_up(longest, one).clamp(min=1) for one in parts]
    counts = torch.maximum(*[_divided_up(seq_lens, one) for one in chunks])
    _write_by_token(counts, out)


def tile_counts(seq_lens: Tensor, split_tile_size: Tensor, out: Tensor) -> None:
    """Write into how many parts of one size each token's keys are split."""
    _write_by_token(_divided_up(seq_lens, split_tile_size), out)


def _write_by_token(values: Tensor, out: Tensor) -> None:
    """Write each request's value to all of its tokens, of which every request has as many."""
    out.copy_(values[:, None].expand(-1, out.shape[0] // values.shape[0]).flatten())


def _divided_up(number: Tensor, divisor: Tensor) -> Tensor:
    return (number + divisor - 1) // divisor


def full_page_counts(seq_lens: Tensor, page_size: Tensor) -> Tensor:
    """Return how many pages of each request are full, as flex attention shapes it."""
    return (seq_lens // page_size).to(torch.int32)[:, None, None]


def part_page_counts(seq_lens: Tensor, page_size: Tensor) -> Tensor:
    """Return 1 for each request whose last page is not full, else 0, as flex attention shapes it."""
    return (seq_lens % page_size > 0).to(torch.int32)[:, None, None]


def full_page_indices(page_table: Tensor) -> Tensor:
    """Return each request's pages in their order, of which the first are full."""
    return page_table[:, None, None]


def part_page_indices(page_table: Tensor, full_kv_num_blocks: Tensor, kv_num_blocks: Tensor) -> Tensor:
    """Return each request's pages with the one that is not full, if there is one, in front of all others."""
    columns = torch.arange(page_table.shape[1], device=page_table.device)
    last = full_kv_num_blocks[:, 0]
    moved = torch.where(columns == 0, last, columns - (columns <= last).long())
    return page_table.gather(1, torch.where(kv_num_blocks[:, 0] > 0, moved, columns))[:, None, None]


def logical_pages(page_table: Tensor, seq_lens: Tensor, page_size: Tensor, out: Tensor) -> None:
    """Write for each page of the cache which of a request's pages it is, and -1 if the request does not have it."""
    columns = torch.arange(page_table.shape[1], device=out.device).expand(page_table.shape)
    is_used = columns < page_counts(seq_lens, page_size)[:, None]
    places = torch.where(is_used, page_table, out.shape[1]).long()  # unused ones go behind the last page
    room = torch.full((out.shape[0], out.shape[1] + 1), -1, device=out.device)
    out.copy_(room.scatter(1, places, columns)[:, :-1])


_OVERHEAD: Final = 5
"""FlashMLA's `fixed_overhead_num_blocks`: what beginning with a request costs, in blocks."""


def block_costs(seq_lens: Tensor, page_size: Tensor) -> Tensor:
    """Return the offsets of each request's work: its blocks, at least one, and the cost of beginning with it."""
    return offsets(page_counts(seq_lens, page_size).clamp(min=1) + _OVERHEAD)


def part_starts(cost_offsets: Tensor, page_table: Tensor, out: Tensor) -> None:
    """Write the place in all work at which each part of the device begins, and behind them where the last one ends.

    A part takes whole requests while its share lasts, and then blocks of the next one, if it can begin with that. Where
    a part ends depends on where it begins: `ends` has this for each place, then for two parts at once, four, and so on.
    """
    requests, parts = page_table.shape[0], out.shape[0] - 1
    places = torch.arange(requests * (page_table.shape[1] + _OVERHEAD) + 1, device=out.device, dtype=torch.int32)
    reach = places + _divided_up(cost_offsets[-1:], parts) + _OVERHEAD
    whole = torch.searchsorted(cost_offsets, reach, right=True) - 1
    taken = torch.maximum(cost_offsets[whole], places)
    ends = torch.where((whole < requests) & (reach - taken > _OVERHEAD), reach - _OVERHEAD, taken)
    number = torch.arange(parts + 1, device=out.device)
    starts, step = torch.zeros_like(number, dtype=torch.int32), 1
    while step <= parts:
        starts = torch.where(number // step % 2 > 0, ends[starts], starts)
        ends, step = ends[ends.clamp(max=ends.shape[0] - 1)], step * 2
    out.copy_(starts)


def tile_schedule(cost_offsets: Tensor, part_offsets: Tensor, seq_lens: Tensor) -> Tensor:
    """Return for each part its first and last request, blocks of these, first split, and whether they are split."""
    blocks = (cost_offsets[1:] - cost_offsets[:-1]) - _OVERHEAD
    first = torch.searchsorted(cost_offsets, part_offsets[:-1], right=True) - 1
    begin = part_offsets[:-1] - cost_offsets[first]
    before = torch.searchsorted(part_offsets, cost_offsets[first], right=True)
    split = (torch.arange(1, first.shape[0] + 1, device=first.device) - before).clamp(min=0)
    last = torch.searchsorted(cost_offsets, part_offsets[1:], right=True) - 1
    end = part_offsets[1:] - cost_offsets[last]
    last = torch.where(end > 0, last, last - 1)
    has_tokens = seq_lens[last] > 0
    end = torch.where(end > 0, end, torch.where(has_tokens, blocks[last], 0))
    ends_inside = (end != blocks[last]) & has_tokens
    is_one = first == last
    first_is_split = (begin > 0) | (is_one & ends_inside)
    last_is_split = ends_inside | (is_one & (begin > 0))
    columns = (first, last, begin, end, split, first_is_split, last_is_split, torch.zeros_like(first))
    return torch.stack([one.to(torch.int32) for one in columns], 1)


def split_offsets(cost_offsets: Tensor, part_offsets: Tensor) -> Tensor:
    """Return the offsets of each request's splits: one, and one more for each part that begins inside of it."""
    owners = torch.searchsorted(cost_offsets, part_offsets, right=True) - 1
    is_inside = part_offsets > cost_offsets[owners]
    inside = (is_inside & (part_offsets < cost_offsets[:, None])).sum(1)
    return (torch.arange(cost_offsets.shape[0], device=inside.device) + inside).to(torch.int32)


def pooled_pages(req_to_token: Tensor, req_pool_indices: Tensor, page_size: Tensor, out: Tensor) -> None:
    """Write each request's pages: those of its first token in each page."""
    first_tokens = torch.arange(out.shape[1], device=out.device) * page_size
    out.copy_(req_to_token[req_pool_indices[:, None], first_tokens] // page_size)
