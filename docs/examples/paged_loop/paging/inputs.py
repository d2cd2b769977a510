"""What steps read: the declarations, and the batches that the engine makes of requests."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paging.request import PAGE, Request, pages_for
from slotgraph import BATCH, CACHE_LOC, TOKENS, Inputs, Step, attention, computed, copied, output


def place(page_table: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """Say where in the cache each request's newest token goes, in the device's dtype; padded rows write to page 0."""
    pages = page_table.gather(1, (positions // PAGE)[:, None])[:, 0]
    out.copy_(pages * PAGE + positions % PAGE)


class DecodeInputs(attention.PagedCache):
    """One token a request. `then` says what the next step reads if the host says nothing."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda next_ids: next_ids)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda positions: positions + 1)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, then=lambda seq_lens: seq_lens + 1)
    page_table: torch.Tensor = copied(BATCH, attention.PAGES, dtype=torch.int32, pad=0, ragged=pages_for)
    out_cache_loc: torch.Tensor = computed(place, shape=TOKENS, dtype=CACHE_LOC)
    next_ids: torch.Tensor = output(BATCH, dtype=torch.int64)


class PrefillInputs(Inputs):
    """All tokens of several prompts that are not cached, behind one another.

    Attributes:
        last_rows: Where each request's last token lies.
        requests: The row of each token's request in the page table.
        new_tokens: How many tokens of each request run, on the host, where attention reads them.
        lengths: How many tokens each request has, cached ones too, on the host.
    """

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    last_rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    page_table: torch.Tensor = copied(BATCH, attention.PAGES, dtype=torch.int32, pad=0, ragged=True)
    requests: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    new_tokens: list[int]
    lengths: list[int]

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        """Return what graphs are captured on: one request that owns all tokens."""
        tokens = step.live(TOKENS)
        return {"last_rows": [tokens - 1], "new_tokens": [tokens], "lengths": [tokens]}


def first_batch(requests: Sequence[Request], first: torch.Tensor) -> dict[str, Any]:
    """Return the first token after each prompt, which may still lie on the device alone, with its place."""
    return {
        "input_ids": first,
        "positions": [len(request) for request in requests],
        "seq_lens": [len(request) + 1 for request in requests],
        "page_table": [request.pages for request in requests],
    }


def prefill_batch(requests: Sequence[Request]) -> dict[str, Any]:
    """Return all tokens of the requests that are not cached; of a request that was preempted also generated ones."""
    tokens = [(request, position) for request in requests for position in range(request.cached, len(request))]
    counts = [len(request) - request.cached for request in requests]
    return {
        "input_ids": [token for request in requests for token in request.ids[request.cached :]],
        "positions": [position for _, position in tokens],
        "out_cache_loc": [request.location(position) for request, position in tokens],
        "last_rows": [row for row, (request, position) in enumerate(tokens) if position == len(request) - 1],
        "page_table": [request.pages for request in requests],
        "requests": [row for row, count in enumerate(counts) for _ in range(count)],
        "new_tokens": counts,
        "lengths": [len(request) for request in requests],
    }
