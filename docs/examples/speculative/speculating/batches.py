"""Batches of all steps, made from the requests that run in a cycle."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from slotgraph.runners.tree import Tree
from speculating.request import SpeculativeRequest

Requests = Sequence[SpeculativeRequest]
Rows = Sequence[Sequence[int]]


def prompt_batch(ids: Sequence[int], rows: Sequence[int]) -> dict[str, Any]:
    """One text from its begin, and where its keys and values go."""
    return {"input_ids": list(ids), "positions": list(range(len(ids))), "out_cache_loc": list(rows[: len(ids)])}


def draft_batch(requests: Requests, topk: int, scratch: Rows) -> dict[str, Any]:
    """Trees are drafted behind each request's root; scratch: rows for a key of each branch in each step."""
    return {
        **_lengths(requests, 1),
        "positions": [request.root + 1 for request in requests for _ in range(topk)],
        "out_cache_loc": _flat(scratch),
        "topk_p": torch.stack([request.shares for request in requests]),
        "topk_index": torch.stack([request.tokens for request in requests]),
    }


def verify_batch(requests: Requests, tree: Tree, rows: Rows) -> dict[str, Any]:
    """Whole trees, the roots among them, whose keys the target's cache has not seen yet."""
    roots = torch.tensor([request.root for request in requests], device=tree.tokens.device)
    return {
        **_lengths(requests, 0),
        "input_ids": tree.tokens.flatten(),
        "positions": tree.positions(roots).flatten(),
        "out_cache_loc": _flat(rows),
        "parents": tree.parents,
    }


def extend_batch(requests: Requests, width: int) -> dict[str, Any]:
    """What each request won in the last verify, its new root among it; the rest of the width goes to row 0."""
    gains = [request.gains[-1] for request in requests]
    pairs = list(zip(requests, gains, strict=True))
    return {
        "req_pool_indices": [request.row for request in requests],
        "seq_lens": [request.root + 1 - gain for request, gain in pairs],
        "input_ids": _flat([_padded(request.generated[-gain:], width) for request, gain in pairs]),
        "positions": [request.root + 1 - gain + place for request, gain in pairs for place in range(width)],
        "out_cache_loc": _flat([_padded(request.pages[-gain:], width) for request, gain in pairs]),
        "num_correct_drafts": [gain - 1 for gain in gains],
        "num_accept_tokens": gains,
    }


def cycle_batch(requests: Requests) -> dict[str, Any]:
    """What requests bring to cycles in one launch. What their drafts begin with is not among it."""
    return {
        "input_ids": [request.generated[-1] for request in requests],
        "positions": [request.root for request in requests],
        "places": [request.pages for request in requests],
        "last": [request.longest for request in requests],
        "done": [False] * len(requests),
    }


def _lengths(requests: Requests, more: int) -> dict[str, Any]:
    """Where each request's places are, and how many of its tokens the cache holds: those before the root, and more."""
    return {
        "req_pool_indices": [request.row for request in requests],
        "seq_lens": [request.root + more for request in requests],
    }


def _padded(numbers: Sequence[int], width: int) -> list[int]:
    return [*numbers, *[0] * (width - len(numbers))]


def _flat(rows: Rows) -> list[int]:
    return list(chain.from_iterable(rows))
