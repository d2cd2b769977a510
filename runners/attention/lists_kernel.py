"""Triton kernels of attention: lists of pages or tokens, offsets, what a block mask has, and FlashMLA's schedule.

A program of `write_lists` has one request, and a part of its lists. It adds up the lengths of all requests by itself,
so that none waits for another. `layouts` has the same as plain functions, with which a capture compares it.
"""
# Triton's language is no typed Python: it infers types, and capitals are values that it compiles in.
# ruff: noqa: ANN001, ANN201, ANN202, C901, N803, PLR0913, PLR0917 - see above; the kernel has an argument for each list
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from collections.abc import Mapping
from typing import Final

import triton  # pyright: ignore[reportMissingImports] - there only on Linux
import triton.language as tl  # pyright: ignore[reportMissingImports] - likewise
from torch import Tensor

BLOCK: Final = 1024
"""Items that a program writes at a time."""
NOWHERE: tl.constexpr = tl.constexpr(2**31 - 1)
"""Behind all ends."""
LISTS: Final = (
    "first_tokens",
    "lengths",
    "query_offsets",
    "token_offsets",
    "page_offsets",
    "pages",
    "tokens",
    "last_lengths",
    "tiles",
    "full_counts",
    "part_counts",
    "part_first",
)
"""What the kernel can write, in the order of its arguments. `layouts` says what each holds."""


@triton.jit
def _divided_up(number, divisor):
    return (number + divisor - 1) // divisor


@triton.jit
def _write_offset(target, counts, every, row):
    """Write where the next request begins. Return where this one begins, and the total."""
    tl.store(target + row + 1, tl.sum(tl.where(every <= row, counts, 0)))
    if row == 0:
        tl.store(target, 0)
    return tl.sum(tl.where(every < row, counts, 0)), tl.sum(counts)


@triton.jit
def _is_inside(place, count, most, start, rows):
    """Whether places of a request are in use, in its row of the source and in the list, whatever the lengths say."""
    return (place < tl.minimum(count, most)) & (start + place >= 0) & (start + place < rows * most)


@triton.jit
def _write_pages(target, source, stride, columns, most, rows, row, first, count, start, total, BLOCK: tl.constexpr):
    """Write a request's pages, from its first one on, at its place, and 0 to its share of what is behind all of them.

    columns: Pages in a row of the source. most: Pages that the list has room for, of each request.
    """
    for at in range(tl.program_id(1) * BLOCK, most, tl.num_programs(1) * BLOCK):
        place = at + tl.arange(0, BLOCK)
        in_use = _is_inside(place, count, most, start, rows)
        page = tl.load(source + (first + place) * stride, mask=in_use & (first + place < columns))
        tl.store(target + start + place, page, mask=in_use)
        behind = row * most + place
        tl.store(target + behind, 0, mask=(place < most) & (behind >= total))


@triton.jit
def _write_tokens(
    target, source, stride, columns, size, most, rows, row, first, count, start, total, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the places of a request's tokens, as `_write_pages` writes pages. size: Tokens in a page."""
    for at in range(tl.program_id(1) * BLOCK, most, tl.num_programs(1) * BLOCK):
        place = at + tl.arange(0, BLOCK)
        token = first + place
        in_use = _is_inside(place, count, most, start, rows)
        page = tl.load(source + token // size * stride, mask=in_use & (token < columns * size)).to(tl.int64)
        tl.store(target + start + place, page * size + token % size, mask=in_use)
        behind = row * most + place
        tl.store(target + behind, 0, mask=(place < most) & (behind >= total))


@triton.jit
def _write_part_first(target, source, stride, columns, front, BLOCK: tl.constexpr):
    """Write a request's pages with the one at `front` before all others."""
    for at in range(tl.program_id(1) * BLOCK, columns, tl.num_programs(1) * BLOCK):
        place = at + tl.arange(0, BLOCK)
        column = tl.where(place == 0, front, place - (place <= front).to(tl.int32))
        page = tl.load(source + column * stride, mask=(place < columns) & (column < columns))
        tl.store(target + place, page, mask=place < columns)


@triton.jit(do_not_specialize=["row_stride", "rows", "columns", "most", "width"])  # one compilation for most buckets
def write_lists(
    seq_lens, queries, table, row_stride, stride, page_size, tile_size, window_size, rows, columns, most, width,
    first_tokens, lengths, query_offsets, token_offsets, page_offsets, pages, tokens, last_lengths, tiles, full_counts,
    part_counts, part_first, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one request's share of each list that is not None; of the tokens in its window, if windows have a size.

    rows and columns are those of the page table; most is how many pages or tokens of each request a list has room for;
    width is how often a request's number of tiles is written.
    """
    row = tl.program_id(0)
    every = tl.arange(0, ROWS)
    end = tl.load(seq_lens + row)
    all_ends = tl.load(seq_lens + every, mask=every < rows, other=0)
    first = end * 0
    all_first = all_ends * 0
    if window_size is not None:
        window = tl.load(window_size)
        first = tl.maximum(end - window, 0)
        all_first = tl.maximum(all_ends - window, 0)
    length = end - first
    all_lengths = all_ends - all_first
    source = table + row.to(tl.int64) * row_stride
    if first_tokens is not None:
        tl.store(first_tokens + row, first)
    if lengths is not None:
        tl.store(lengths + row, length)
    if query_offsets is not None:
        _write_offset(query_offsets, tl.load(queries + every, mask=every < rows, other=0), every, row)
    if tiles is not None:
        for place in range(width):
            tl.store(tiles + row * width + place, _divided_up(length, tl.load(tile_size)))
    if token_offsets is not None:
        start, total = _write_offset(token_offsets, all_lengths, every, row)
        if tokens is not None:
            size = tl.load(page_size)
            _write_tokens(tokens, source, stride, columns, size, most, rows, row, first, length, start, total, BLOCK)
    if page_offsets is not None:
        size = tl.load(page_size)
        first_page = first // size
        start, total = _write_offset(page_offsets, _divided_up(all_ends, size) - all_first // size, every, row)
        if pages is not None:
            count = _divided_up(end, size) - first_page
            _write_pages(pages, source, stride, columns, most, rows, row, first_page, count, start, total, BLOCK)
        if last_lengths is not None:
            tl.store(last_lengths + row, tl.where(end > 0, (end - 1) % size + 1, 0))
    if part_first is not None:
        size = tl.load(page_size)
        is_part = (length % size > 0).to(tl.int32)
        tl.store(full_counts + row, length // size)
        tl.store(part_counts + row, is_part)
        _write_part_first(part_first + row * columns, source, stride, columns, length // size * is_part, BLOCK)


def launch(
    seq_lens: Tensor,
    lists: Mapping[str, Tensor | None],
    *,
    queries: Tensor | None = None,
    page_table: Tensor | None = None,
    page_size: Tensor | None = None,
    split_tile_size: Tensor | None = None,
    window_size: Tensor | None = None,
) -> None:
    """Launch the kernel.

    Args:
        seq_lens: Lengths of requests, at least one.
        lists: What to write, by the names of `LISTS`.
        queries: Query tokens of each request, for their offsets.
        page_table: Pages of each request, for lists of them.
        page_size: Tokens in a page.
        split_tile_size: Keys in a part of a request's list.
        window_size: Tokens in a window, for lists of those alone.
    """
    rows = seq_lens.shape[0]
    strides = (0, 0) if page_table is None else page_table.stride()
    columns = 0 if page_table is None else page_table.shape[1]
    items = next((found for name in ("tokens", "pages") if (found := lists.get(name)) is not None), None)
    most = max(1, columns) if items is None else items.shape[0] // rows
    tiles = lists.get("tiles")
    width = 0 if tiles is None else tiles.shape[0] // rows
    write_lists[rows, triton.cdiv(most, 2 * BLOCK)](
        seq_lens, queries, seq_lens if page_table is None else page_table, *strides, page_size, split_tile_size,
        window_size, rows, columns, most, width, *map(lists.get, LISTS),
        ROWS=max(64, triton.next_power_of_2(rows)), BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def _located(starts, count, places, HALF: tl.constexpr):
    """Return of each place the last of the starts, at most twice HALF and in order, that is there or before."""
    found = places * 0
    step = HALF
    while step > 0:
        ahead = found + step
        is_there = ahead < count
        start = tl.load(starts + ahead, mask=is_there, other=0)
        found = tl.where(is_there & (start <= places), ahead, found)
        step //= 2
    return found


@triton.jit
def _ahead(end, start, share, inverse, OVERHEAD: tl.constexpr):
    """Return how many parts further the first one begins that is at most OVERHEAD places before an end, or behind.

    inverse: 2**32 - 1 by the share: a division would take longer than all else of a look.
    """
    places = tl.maximum(end - start - OVERHEAD, 1) - 1
    count = tl.umulhi(places.to(tl.uint32), inverse).to(tl.int32)  # or one less
    return count + 1 + (places - count * share >= share).to(tl.int32)


@triton.jit
def _next_end(ends, start, share, inverse, OVERHEAD: tl.constexpr):
    """Return the first end that parts, a share each from a start on, miss by at most OVERHEAD places; or NOWHERE."""
    is_near = _ahead(ends, start, share, inverse, OVERHEAD) * share < ends - start
    return tl.min(tl.where(is_near, ends, NOWHERE))


@triton.jit
def _begins(ends, total, part, parts, OVERHEAD: tl.constexpr):
    """Return where each part begins, a share behind the one before it, or at a request's end.

    That is where an end is at most OVERHEAD places behind the part's share. From one of these ends on parts begin a
    share apart, up to the next one: one look at all ends for each.
    """
    share = tl.maximum(_divided_up(total, parts), 1)
    inverse = (((1 << 32) - 1) // share.to(tl.int64)).to(tl.uint32)
    begins = part * share
    number, start = total * 0, total * 0
    end = _next_end(ends, start, share, inverse, OVERHEAD)
    while end < NOWHERE:
        number += _ahead(end, start, share, inverse, OVERHEAD)
        start = end
        begins = tl.where(part >= number, start + (part - number) * share, begins)
        end = _next_end(ends, start, share, inverse, OVERHEAD)
    return tl.minimum(begins, total)


@triton.jit(do_not_specialize=["rows", "parts"])
def write_schedule(
    seq_lens, page_size, rows, parts, cost_offsets, part_offsets, tile_scheduler_metadata, num_splits,
    OVERHEAD: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write FlashMLA's schedule by one program. What `_begins` does not say is found by binary search."""
    row = tl.arange(0, ROWS)
    lengths = tl.load(seq_lens + row, mask=row < rows, other=0)
    blocks = tl.maximum(_divided_up(lengths, tl.load(page_size)), 1)
    ends = tl.cumsum(tl.where(row < rows, blocks + OVERHEAD, 0))
    total = tl.max(ends)
    tl.store(cost_offsets, 0)
    tl.store(cost_offsets + row + 1, ends, mask=row < rows)

    part = tl.arange(0, PARTS)
    is_part = part < parts
    begin = _begins(ends, total, part, parts, OVERHEAD)
    tl.store(part_offsets + part, begin, mask=part <= parts)
    tl.debug_barrier()  # what is stored can be read

    if num_splits is not None:
        before = _located(part_offsets, parts + 1, ends - blocks - OVERHEAD, PARTS)
        splits = _located(part_offsets, parts + 1, ends - 1, PARTS) - before + 1
        tl.store(num_splits, 0)
        tl.store(num_splits + row + 1, tl.cumsum(tl.where(row < rows, splits, 0)), mask=row < rows)

    end = tl.load(part_offsets + part + 1, mask=is_part, other=0)
    first = _located(cost_offsets, rows + 1, begin, ROWS)
    last = _located(cost_offsets, rows + 1, end, ROWS)
    first_start = tl.load(cost_offsets + first)
    begin -= first_start
    end -= tl.load(cost_offsets + last)
    is_cut = end > 0
    last = tl.maximum(tl.where(is_cut, last, last - 1), 0)
    all_blocks = tl.load(cost_offsets + last + 1, mask=last < rows, other=0) - tl.load(cost_offsets + last) - OVERHEAD
    has_tokens = tl.load(seq_lens + last, mask=last < rows, other=0) > 0
    end = tl.where(is_cut, end, tl.where(has_tokens, all_blocks, 0))
    split = tl.maximum(part - _located(part_offsets, parts + 1, first_start, PARTS), 0)
    either = (first == last) & ((begin > 0) | is_cut)
    target = tile_scheduler_metadata + part * 8
    tl.store(target, first, mask=is_part)
    tl.store(target + 1, last, mask=is_part)
    tl.store(target + 2, begin, mask=is_part)
    tl.store(target + 3, end, mask=is_part)
    tl.store(target + 4, split, mask=is_part)
    tl.store(target + 5, ((begin > 0) | either).to(tl.int32), mask=is_part)
    tl.store(target + 6, (is_cut | either).to(tl.int32), mask=is_part)
    tl.store(target + 7, 0, mask=is_part)


def launch_schedule(
    seq_lens: Tensor,
    page_size: Tensor,
    overhead: int,
    cost_offsets: Tensor,
    part_offsets: Tensor,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor | None = None,
) -> None:
    """Launch the kernel of FlashMLA's schedule. overhead: What beginning with a request costs, in blocks."""
    rows = seq_lens.shape[0]
    parts = tile_scheduler_metadata.shape[0]
    write_schedule[(1,)](
        seq_lens, page_size, rows, parts, cost_offsets, part_offsets, tile_scheduler_metadata, num_splits,
        OVERHEAD=overhead, ROWS=triton.next_power_of_2(rows), PARTS=triton.next_power_of_2(parts + 1), num_warps=8,
    )  # fmt: skip
