"""Paged attention in plain torch, from each kernel's own inputs alone, and from requests one by one in plain code."""

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from tests.runners.attention import kinds
from tests.runners.attention.builders import CHUNK, SPLITS, STEPS, TILE, WINDOW, Requests

Attention = Callable[[Any, Tensor, int], Tensor]


def attend(queries: Tensor, keys: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Each query's mean of keys, and the logarithm of its sum: `seen` says which keys it sees."""
    scores = (queries @ keys.T).masked_fill(~seen, -1e9)
    return scores.softmax(1) @ keys, scores.logsumexp(1)


def owners_of(indptr: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each place of a packed list: whether it is in use, its request, and its number there."""
    places = torch.arange(count, device=indptr.device)
    requests = torch.searchsorted(indptr[1:].long(), places, right=True)
    rows = requests.clamp(max=indptr.shape[0] - 2)
    return requests < indptr.shape[0] - 1, rows, places - indptr[rows]


def last_seen(lens: Tensor, qo_indptr: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Of each query token: its request, and the last position that it sees. -1 where no request owns it."""
    in_use, rows, number = owners_of(qo_indptr, tokens)
    counts = qo_indptr[1:] - qo_indptr[:-1]
    return rows, torch.where(in_use, lens[rows] - counts[rows] + number, -1)


def even(view: Any) -> Tensor:
    """The offsets of query tokens where each request has as many."""
    tokens, requests = view.queries.shape[0], view.seq_lens.shape[0]
    found: Tensor = torch.arange(requests + 1, device=view.queries.device) * (tokens // requests)
    return found


def flashinfer(view: Any, cache: Tensor, page: int, window: int | None = None) -> Tensor:
    """As FlashInfer reads: pages by kv_indices, lengths from offsets and last pages."""
    counts = view.kv_indptr[1:] - view.kv_indptr[:-1]
    lens = (counts - 1).clamp(min=0) * page + view.kv_last_page_len
    in_use, owners, number = owners_of(view.kv_indptr, view.kv_indices.shape[0])
    keys = cache.view(-1, page, cache.shape[1])[view.kv_indices.long()].flatten(0, 1)
    positions = (number[:, None] * page + torch.arange(page, device=cache.device)).flatten()
    owners, in_use = owners.repeat_interleave(page), in_use.repeat_interleave(page)
    offsets = view.qo_indptr if hasattr(view, "qo_indptr") else even(view)
    rows, last = last_seen(lens, offsets, view.queries.shape[0])
    seen = in_use & (owners == rows[:, None]) & (positions <= last[:, None])
    if window is not None:
        seen &= positions > last[:, None] - window
    return attend(view.queries, keys, seen)[0]


def flashinfer_window(view: Any, cache: Tensor, page: int) -> Tensor:
    """Layers of both kinds, by one sum: the second list with its kernel's mask of the window, `window_left`."""
    second = types.SimpleNamespace(
        kv_indptr=view.window_kv_indptr,
        kv_indices=view.window_kv_indices,
        kv_last_page_len=view.kv_last_page_len,
        qo_indptr=view.qo_indptr if hasattr(view, "qo_indptr") else even(view),
        queries=view.queries,
    )
    return flashinfer(view, cache, page) + flashinfer(second, cache, page, WINDOW)


def triton_window(view: Any, cache: Tensor, page: int) -> Tensor:
    """Layers of both kinds, by one sum: the second list has the window's tokens alone, and no mask."""
    second = types.SimpleNamespace(
        kv_indptr=view.window_kv_indptr,
        kv_indices=view.window_kv_indices,
        num_kv_splits=view.window_num_kv_splits,
        queries=view.queries,
        seq_lens=view.seq_lens,
    )
    return triton_decode(view, cache, page) + triton_decode(second, cache, page)


def window_cache(view: Any, cache: Tensor, page: int) -> Tensor:
    """Layers of both kinds, by one sum: a row of each page table for each request, with a mask of the window."""
    found = torch.zeros_like(view.queries)
    for table, first in ((view.page_table, None), (view.window_page_table, view.window_kv_offsets)):
        places = (table.long()[:, :, None] * page + torch.arange(page, device=cache.device)).flatten(1)
        positions = torch.arange(places.shape[1], device=cache.device)
        seen = positions < view.seq_lens[:, None]
        if first is not None:
            seen = (positions >= first[:, None]) & (positions < (first + view.window_kv_lens)[:, None])
        own = torch.eye(places.shape[0], dtype=torch.bool, device=cache.device)[:, :, None] & seen
        found = found + attend(view.queries, cache[places].flatten(0, 1), own.flatten(1))[0]
    return found


def flash_attention(view: Any, cache: Tensor, page: int) -> Tensor:
    """As FlashAttention reads: a row of the page table for each request."""
    places = view.page_table.long()[:, :, None] * page + torch.arange(page, device=cache.device)
    positions = torch.arange(places[0].numel(), device=cache.device)
    rows, last = last_seen(view.cache_seqlens, view.cu_seqlens_q, view.queries.shape[0])
    keys = cache[places.flatten(1)]
    owned = torch.arange(places.shape[0], device=cache.device)[:, None] == rows[:, None, None]
    seen = owned & (positions <= last[:, None, None])
    return attend(view.queries, keys.flatten(0, 1), seen.flatten(1))[0]


def flash_mla(view: Any, cache: Tensor, page: int) -> Tensor:
    """As FlashMLA's kernels run: each part of the device its blocks, and then each request's splits put together."""
    places = (view.page_table.long()[:, :, None] * page + torch.arange(page, device=cache.device)).flatten(1)
    rows, last = last_seen(view.seq_lens, even(view), view.queries.shape[0])
    keys, positions = cache[places[rows]], torch.arange(places.shape[1], device=cache.device)
    scores = (keys @ view.queries[:, :, None])[:, :, 0]
    splits, logs, values = [], [], []
    for first, final, begin, end, split, *_ in view.tile_scheduler_metadata.long():
        low = torch.where(first == rows, begin, 0) * page
        high = torch.where(final == rows, end, view.page_table.shape[1]) * page
        seen = (positions >= low[:, None]) & (positions < torch.minimum(high, last + 1)[:, None])
        masked = scores.masked_fill(~(seen & ((first <= rows) & (rows <= final))[:, None]), -1e9)
        splits.append(view.num_splits[rows] + torch.where(first == rows, split, 0))
        logs.append(masked.logsumexp(1))
        values.append((masked.softmax(1)[:, :, None] * keys).sum(1))
    mine = torch.stack(splits, 1) < view.num_splits[rows + 1][:, None]
    weights = torch.stack(logs, 1).masked_fill(~mine, -torch.inf).softmax(1)
    return (weights[:, :, None] * torch.stack(values, 1)).sum(1)


def flex_decode(view: Any, cache: Tensor, page: int) -> Tensor:
    """As a flex kernel reads: full pages without a mask, and one with it."""
    pages, found = cache.view(-1, page, cache.shape[1]), []
    for counts, indices in (
        (view.full_kv_num_blocks, view.page_table[:, None, None]),
        (view.kv_num_blocks, view.kv_indices),
    ):
        chosen = indices[:, 0, 0].long()
        offsets = torch.arange(page, device=cache.device)
        used = torch.arange(chosen.shape[1], device=cache.device) < counts[:, 0]
        masked = offsets < (view.seq_lens % page)[:, None, None]
        seen = used[:, :, None] & (masked | (counts is view.full_kv_num_blocks))
        found.append((pages[chosen].flatten(1, 2), seen.flatten(1)))
    keys, seen = torch.cat([keys for keys, _ in found], 1), torch.cat([seen for _, seen in found], 1)
    owned = torch.eye(keys.shape[0], dtype=torch.bool, device=cache.device)
    return attend(view.queries, keys.flatten(0, 1), (owned[:, :, None] & seen).flatten(1))[0]


def triton_decode(view: Any, cache: Tensor, page: int) -> Tensor:
    """As SGLang's kernel reads: places of tokens, in so many parts, whose results are put together."""
    most = max(-(-kinds.PAGES * page // TILE), SPLITS)
    lens = view.kv_indptr[1:] - view.kv_indptr[:-1]
    in_use, owners, number = owners_of(view.kv_indptr, view.kv_indices.shape[0])
    rows, last = last_seen(lens, even(view), view.queries.shape[0])
    seen = in_use & (owners == rows[:, None]) & (number <= last[:, None])
    splits = view.num_kv_splits[:, None]
    chunk = (lens[rows][:, None] + splits - 1) // splits.clamp(min=1)
    parts = [
        attend(view.queries, cache[view.kv_indices], seen & (number // chunk.clamp(min=1) == part))
        for part in range(most)
    ]
    weights = torch.stack([logs for _, logs in parts]).softmax(0)
    return (weights[:, :, None] * torch.stack([values for values, _ in parts])).sum(0)


def draft(view: Any, cache: Tensor, page: int) -> Tensor:
    """As kernels read in each step of drafting a tree: each branch by itself; the sum over steps."""
    del page
    found = torch.zeros_like(view.queries)
    rows = torch.arange(view.queries.shape[0], device=cache.device)
    for starts, places in zip(view.kv_indptr, view.kv_indices, strict=True):
        in_use, owners, _ = owners_of(starts, places.shape[0])
        found = found + attend(view.queries, cache[places.long()], in_use & (owners == rows[:, None]))[0]
    return found


def sparse_indexer(view: Any, cache: Tensor, page: int) -> Tensor:
    """As an indexer scores: each query token has a length of its own."""
    places = (view.page_table.long()[:, :, None] * page + torch.arange(page, device=cache.device)).flatten(1)
    keys = cache[places.repeat_interleave(view.queries.shape[0] // places.shape[0], 0)]
    seen = torch.arange(places.shape[1], device=cache.device) < view.token_seq_lens[:, None]
    scores = (keys @ view.queries[:, :, None])[:, :, 0].masked_fill(~seen, -1e9)
    found: Tensor = (scores.softmax(1)[:, :, None] * keys).sum(1)
    return found


def sparse_indexer_schedule(view: Any, cache: Tensor, page: int) -> Tensor:
    """As DeepGEMM's kernel scores: each multiprocessor the splits of keys up to where the next one begins."""
    places = (view.page_table.long()[:, :, None] * page + torch.arange(page, device=cache.device)).flatten(1)
    tokens = view.queries.shape[0]
    keys = cache[places.repeat_interleave(tokens // places.shape[0], 0)]
    columns = torch.arange(places.shape[1], device=cache.device)
    width = places.shape[1] // 256 + 1
    work = torch.arange(tokens, device=cache.device)[:, None] * width + columns // 256
    starts = view.schedule_metadata[:, 0].long() * width + view.schedule_metadata[:, 1]
    scores = torch.full(work.shape, -1e9, device=cache.device)
    for begin, end in itertools.pairwise(starts):
        mine = (work >= begin) & (work < end) & (columns < view.token_seq_lens[:, None])
        scores = torch.where(mine, (keys @ view.queries[:, :, None])[:, :, 0], scores)
    found: Tensor = (scores.softmax(1)[:, :, None] * keys).sum(1)
    return found


def sparse_indexer_prefill(view: Any, cache: Tensor, page: int) -> Tensor:
    """As an indexer scores in a prefill: keys that were gathered, each query token from its start to its end."""
    table = view.page_table.long()
    in_use, rows, number = owners_of(view.cu_seqlens_k, table.numel() * page)
    number = number.clamp(min=0) * in_use
    keys = cache[table[rows, number // page] * page + number % page]
    columns = torch.arange(keys.shape[0], device=cache.device)
    seen = (columns >= view.cu_seqlen_ks[:, None]) & (columns < view.cu_seqlen_ke[:, None])
    return attend(view.queries, keys, seen)[0]


def linear_attention(view: Any, states: Tensor, page: int) -> Tensor:
    """As chunked kernels run: sums of each chunk, then of the chunks before it, and the state to begin with."""
    del page
    requests, numbers = view.chunk_indices.long().unbind(1)
    rows = (view.query_start_loc[requests] + numbers * CHUNK)[:, None] + torch.arange(CHUNK, device=states.device)
    is_own = rows < view.query_start_loc[requests + 1][:, None]
    tokens = view.queries.shape[0]
    chosen = torch.where(is_own, rows, tokens).long()
    inside = torch.cat([view.queries, torch.zeros_like(view.queries[:1])])[chosen].cumsum(1)
    totals = inside[:, -1].cumsum(0)
    before = torch.cat([torch.zeros_like(totals[:1]), totals])
    first = view.chunk_offsets[requests]
    begin = torch.where(view.has_initial_state[:, None], states[view.state_indices.clamp(min=0).long()], 0)[requests]
    sums = inside + (before[:-1] - before[first] + begin)[:, None]
    out = torch.zeros(tokens + 1, states.shape[1], device=states.device)
    return out.index_put((chosen.flatten(),), sums.flatten(0, 1))[:-1]


def linear_attention_verify(view: Any, states: Tensor, page: int) -> Tensor:
    """As recurrent kernels run: each request from the state behind its last accepted token."""
    del page
    begin = view.state_indices.gather(1, view.num_accepted_tokens[:, None].long() - 1).clamp(min=0)[:, 0]
    in_use, rows, number = owners_of(view.query_start_loc, view.queries.shape[0])
    sums = view.queries.cumsum(0)
    before = torch.cat([torch.zeros_like(sums[:1]), sums])[view.query_start_loc[:-1].long()]
    return torch.where((in_use & (number >= 0))[:, None], sums - before[rows] + states[begin.long()][rows], 0)


def expected_of_states(one: Requests, queries: Tensor, states: Tensor, *, is_prefill: bool) -> Tensor:
    """Sums over each request by itself, from the state on that it begins with; a prefill may begin without."""
    found, row = list[Tensor](), 0
    for length, count, state in zip(one.lens, one.queries, one.states, strict=True):
        begin = states[state[one.accepted[len(found)] - 1]]
        if is_prefill and length == count:
            begin = torch.zeros_like(begin)
        found.append(queries[row : row + count].cumsum(0) + begin)
        row += count
    return torch.cat(found)


ATTENTIONS: Final[dict[str, Attention]] = {
    "FlashInferDecode": flashinfer,
    "FlashInferDraft": draft,
    "FlashInferVerify": flashinfer,
    "FlashInferPrefill": flashinfer,
    "FlashInferWindow": flashinfer_window,
    "FlashAttention": flash_attention,
    "FlashAttentionPrefill": flash_attention,
    "FlashMLA": flash_mla,
    "FlexDecode": flex_decode,
    "LinearAttention": linear_attention,
    "LinearAttentionVerify": linear_attention_verify,
    "SparseIndexer": sparse_indexer,
    "SparseIndexerPrefill": sparse_indexer_prefill,
    "SparseIndexerSchedule": sparse_indexer_schedule,
    "TritonBalanced": triton_decode,
    "TritonDecode": triton_decode,
    "TritonDraft": draft,
    "TritonWindow": triton_window,
    "WindowCache": window_cache,
}


def expected(name: str, one: Requests, queries: Tensor, cache: Tensor) -> Tensor:
    """Attention of each request by itself, of each query over the tokens before it and its own."""
    if name.startswith("Linear"):
        return expected_of_states(one, queries, cache, is_prefill=name == "LinearAttention")
    if name.endswith("Draft"):
        return drafted(one, queries, cache)
    found = attended(one, queries, cache, one.table)
    return found + attended(one, queries, cache, one.window_table, WINDOW) if "Window" in name else found


def drafted(one: Requests, queries: Tensor, cache: Tensor) -> Tensor:
    """Each branch's query over the request's tokens and the branch's drafts so far; the sum over steps."""
    found, branches = [], [(request, branch) for request, count in enumerate(one.queries) for branch in range(count)]
    for query, branch in zip(queries, branches, strict=True):
        steps = [cache[torch.tensor(one.branch_of(*branch, step), device=cache.device)] for step in range(STEPS)]
        found.append(torch.stack([(query @ seen.T).softmax(0) @ seen for seen in steps]).sum(0))
    return torch.stack(found)


def attended(
    one: Requests, queries: Tensor, cache: Tensor, table: Sequence[Sequence[int]], window: int | None = None
) -> Tensor:
    """Each query over its request's tokens, in the cache of a page table; over the last ones if there is a window."""
    found, row = [], 0
    own = attrs.evolve(one, table=table)
    for request, count in enumerate(one.queries):
        keys = cache[torch.tensor(own.places_of(request), device=cache.device)]
        for token in range(count):
            seen = keys[: one.lens[request] - count + token + 1]
            seen = seen if window is None else seen[-window:]
            found.append((queries[row] @ seen.T).softmax(0) @ seen)
            row += 1
    return torch.stack(found)
